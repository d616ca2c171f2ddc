"""Values of dataclasses against the types of their fields: in Python, in configs, in `--set`."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from numbers import Integral, Real
from types import UnionType
from typing import Any

from acert.errors import InvalidInput

__all__ = ["check_fields"]

_LARGEST = 2**63


def check_fields(cls: type, given: Mapping[str, Any]) -> None:
    """Refuses a value that is not of the type of its field, by the field's name."""
    kinds = typing.get_type_hints(cls)
    for name, value in given.items():
        kind = kinds[name]
        if not _fits(value, kind):
            word = kind.__name__ if isinstance(kind, type) else str(kind)
            word = {int: "a whole number", float: "a number"}.get(kind, f"of type {word}")
            if isinstance(value, Integral) and abs(int(value)) >= _LARGEST:
                word = "below 2^63 in size"
            raise InvalidInput(f"`{name}` must be {word}; got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    parts = typing.get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        inner = [parts[0]] * len(value) if Ellipsis in parts else parts
        return len(value) == len(inner) and all(map(_fits, value, inner))
    # bool is an int to Python, and an int does for a float; so do numpy's numbers.
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if isinstance(value, Integral):
        # JSON has whole numbers of any length, and no arithmetic of ours takes them.
        return kind in (int, float) and abs(int(value)) < _LARGEST
    return isinstance(value, Real if kind is float else kind)
