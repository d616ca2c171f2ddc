"""Fails unless the installed wheel is whole and needs torch and numpy alone.

`make wheel` runs it in an environment that holds nothing of ours but the wheel.
"""

import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path


class _Refuser:
    """Import hook that refuses packages which only the extras bring."""

    refused = frozenset(
        {"PIL", "flint", "hypothesis", "matplotlib", "onnx", "pooch", "pytest", "rich"}
        | {"safetensors", "scipy", "sklearn"}
    )

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.refused:
            raise ModuleNotFoundError(f"`import acert` needs {name}, which is not a dependency")


sys.meta_path.insert(0, _Refuser())

import acert  # noqa: E402 - the hook has to stand first
import acert.models  # noqa: E402

location = Path(acert.__file__ or "nowhere").resolve()
if not location.is_relative_to(Path(sys.prefix).resolve()):
    raise SystemExit(f"imported acert from {location}, which is not the wheel under {sys.prefix}")
if not files("acert").joinpath("py.typed").is_file():
    raise SystemExit("the wheel lacks py.typed, so type checkers would ignore its types")
# Asked for, because each is imported when it is first asked for.
missing = [name for name in acert.__all__ if getattr(acert, name, None) is None]
if missing:
    raise SystemExit(f"acert.__all__ names what is not there: {missing}")
print(f"wheel of acert {version('acert')} imports from {location.parent}")
