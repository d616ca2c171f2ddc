"""What has no bounds: refused by the name of the operation, whatever it is."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.overrides import resolve_name

from acert.bounds.table import Function
from acert.errors import UnsupportedOperation

__all__ = ["NO_RULE", "Uncertain", "operation_name", "refuse"]


def operation_name(function: Function) -> str:
    """How PyTorch spells `function`."""
    name = resolve_name(function) or getattr(function, "__qualname__", function)
    return str(name)


NO_RULE = "it has no bound rule"


def refuse(function: Function | str, reason: str = NO_RULE) -> NoReturn:
    """Raises `UnsupportedOperation`; the pass adds the module path on the way out."""
    name = function if isinstance(function, str) else operation_name(function)
    raise UnsupportedOperation(f"{name}: {reason}")


class Uncertain:
    """What a function returns beside an interval and no bound can be given of: indices.

    Whatever is asked of it is refused, comparisons and truth included: Python has answers of its
    own for these, which would be wrong ones.
    """

    _reason = "its indices are not certain"

    def __init__(self, function: Function) -> None:
        object.__setattr__(self, "_function", function)

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Names the function whose indices an operation asks for."""
        refuse(self._function, self._reason)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        parts = [*args, *((kwargs or {}).values())]
        for part in parts:
            if isinstance(part, cls):
                part.refuse()
            parts.extend(part if isinstance(part, (tuple, list)) else ())
        refuse(func)

    def __getattr__(self, name: str) -> Any:
        self.refuse()


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "bool", "index", "int", "float", "complex", "len", "iter",
    "contains", "getitem", "setitem", "array", "neg", "pos", "abs", "invert", "round", "trunc",
    "floor", "ceil", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv",
    "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow",
    "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift",
    "rrshift", "iand", "ior", "ixor",
):  # fmt: skip
    setattr(Uncertain, f"__{_name}__", Uncertain.refuse)
