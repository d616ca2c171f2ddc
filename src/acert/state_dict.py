"""The weights of a user's own model from a file: safetensors, or a `.pt` state dict.

A `.pt` file is a zip archive with a pickle of what its tensors are called. Only the names that
such a pickle needs may stand in it, and `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from acert.errors import RunError
from acert.untrusted import check_header, check_size, opened_zip, read_member

__all__ = ["read_state_dict"]

_SUFFIXES = (".pt", ".pth")
# What a saved state dict calls. PyTorch's own list is longer, and has names that take memory.
_REBUILT = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
    }
)
_NUMBERS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_STORAGES = frozenset(f"torch {kind}Storage" for kind in _NUMBERS)
# A pickle of ten thousand tensors is far below it.
_PICKLE_LIMIT = 16 * 2**20


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; `.pt` and `.pth` are PyTorch's own, all else safetensors."""
    if not path.is_file():
        raise RunError(f"the weights {path} are missing: there is no such file")
    torch_file = path.suffix in _SUFFIXES
    try:
        return _from_torch(path) if torch_file else _from_safetensors(path)
    # Everything: of two libraries, and of what is packed in the file.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = "state dict that can be read"
        if not torch_file:
            kind = f"safetensors file (PyTorch's own end in {' or '.join(_SUFFIXES)})"
        raise RunError(f"{path} is no {kind}: {reason}") from error


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # numpy has no bfloat16

    check_header(path)
    return load_file(path)


def _from_torch(path: Path) -> dict[str, Tensor]:
    with opened_zip(path) as archive:
        members = archive.infolist()
        check_size(sum(member.file_size for member in members))
        # torch.save packs nothing, so that what is packed could only be a bomb.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its members are compressed, which torch.save does not do")
        # PyTorch's reader takes names that differ in case alone for the same, and the last one.
        names = [member.filename.casefold() for member in members]
        if len(set(names)) < len(names):
            raise ValueError("it has two members of the same name")
        pickles = [one for one in members if one.filename.casefold().endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _PICKLE_LIMIT:
            raise ValueError("it does not hold one data.pkl of a reasonable size")
        _check_names(read_member(archive, pickles[0]))
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not a state dict")
    inner = [name for name, value in found.items() if isinstance(value, dict)]
    if inner:
        raise ValueError(f"what it holds under {inner[0]!r} seems to be one: save that alone")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"it has names and tensors only; got {type(value).__name__} under {name!r}"
            )
    return dict(found)


def _check_names(content: bytes) -> None:
    """Refuses a pickle that names anything but tensors, their storages and a dictionary."""
    for opcode, argument, _ in pickletools.genops(content):
        # Protocol 2, as torch.save writes it, names things by GLOBAL alone.
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
            raise ValueError(f"it builds objects ({opcode.name}), which a state dict does not need")
        if opcode.name == "GLOBAL" and argument not in _REBUILT | _STORAGES:
            raise ValueError(f"it names {argument}, which a state dict does not need")
