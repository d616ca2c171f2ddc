"""Packages that an installation may lack, and the extra of acert that brings each."""

from __future__ import annotations

__all__ = ["needs"]

# By the name it is imported by.
EXTRAS = {
    "PIL": "data",
    "matplotlib": "plots",
    "onnx": "export",
    "onnxscript": "export",
    "pooch": "data",
    "ray": "ray",
    "rich": "train",
    "safetensors": "train",
    "sklearn": "data",
}


def needs(package: str) -> str:
    """What to do about a package that cannot be imported.

    >>> needs("matplotlib")
    "needs the package matplotlib: pip install 'acert[plots]'"
    """
    extra = EXTRAS.get(package.partition(".")[0])
    what = "install it" if extra is None else f"pip install 'acert[{extra}]'"
    return f"needs the package {package}: {what}"
