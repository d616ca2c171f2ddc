"""What certification leaves in a run folder: certificates, examples, points of attacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import numpy.typing as npt

from acert.errors import RunError
from acert.records.files import (
    ATTACKS,
    CERTIFICATES,
    EXAMPLES,
    SCHEMA,
    Array,
    Arrays,
    check_schema,
    first_line,
    write,
)
from acert.untrusted import read_npz, shown, within

__all__ = [
    "drop_unfinished",
    "is_unfinished",
    "read_attacks",
    "read_certificates",
    "read_examples",
    "read_unfinished",
    "rounded_down",
    "rounded_up",
    "unfinished_file",
    "write_attacks",
    "write_certificates",
    "write_examples",
    "write_unfinished",
]

# Of `Status`: misclassified, with radius 0; certified to max, so that the radius is `max_radius`
# itself; and the largest there is.
_MISCLASSIFIED, _TO_MAX, _LAST_STATUS = 0, 1, 3
_COLUMNS: dict[str, type[np.generic]] = {
    "index": np.int64,
    "label": np.int64,
    "prediction": np.int64,
    "radius": np.float32,
    "status": np.uint8,
    "margin": np.float32,
    "attack_radius": np.float32,
}
# What holds for all samples, with the kinds of numpy types that may say so.
_VALUES = {
    "max_radius": "fiu",
    "arithmetic": "U",
    "bounds": "U",
    "elide": "b",
    "violations": "iu",
    "images": "iu",
}


def write_certificates(folder: Path, columns: Mapping[str, Any]) -> None:
    """Writes `certificates.npz`: a row per sample, and what the radii mean.

    `columns` has index, label, prediction, radius, status, margin (at radius 0) and
    attack_radius (NaN where none was looked for, infinity where no attack succeeded, otherwise
    rounded up to float32), one entry a sample each, and besides the values max_radius,
    arithmetic, bounds, elide, domain, violations and images. Radii are stored as float32, rounded
    towards 0, so that they stay proven.
    """
    stored = {name: np.asarray(value) for name, value in columns.items()}
    stored |= {name: stored[name].astype(dtype) for name, dtype in _COLUMNS.items()}
    stored["radius"] = rounded_down(np.asarray(columns["radius"], dtype=np.float64))
    for name in ("label", "prediction"):
        stored[name] = _narrow(stored[name])
    # Left out where it is the position itself, as in a whole test set.
    if np.array_equal(stored["index"], np.arange(len(stored["radius"]))):
        del stored["index"]
    _write_arrays(folder / CERTIFICATES, stored)


def read_certificates(folder: Path) -> dict[str, Any]:
    """The fields of `Certificates`; radii as float64, max_radius where proven so far."""
    path = folder / CERTIFICATES
    found: dict[str, Any] = _read_arrays(path)
    if "radius" in found:
        found.setdefault("index", np.arange(len(found["radius"])))
    for name in ("violations", "images"):
        found.setdefault(name, np.array(-1))  # older files do not tell
    absent = sorted({*_COLUMNS, *_VALUES, "domain"} - set(found))
    if absent:
        raise RunError(f"{path} is damaged: it does not hold {', '.join(absent)}")
    lengths = {found[name].shape for name in _COLUMNS}
    if len(lengths) > 1 or len(next(iter(lengths))) != 1:
        raise RunError(f"{path} is damaged: its columns have the shapes {sorted(lengths)}")
    for name, kinds, shape in _wanted(next(iter(lengths))):
        kind = found[name].dtype.kind
        if kind not in kinds or found[name].shape != shape:
            raise RunError(
                f"{path} is damaged: `{name}` must not be of type {found[name].dtype} and "
                f"shape {found[name].shape}"
            )
    _check_meaning(path, found)
    # Narrow as they are stored, a difference of two labels would wrap around.
    found |= {name: found[name].astype(np.int64) for name in ("index", "label", "prediction")}
    radius = found["radius"].astype(np.float64)
    found["radius"] = np.where(found["status"] == _TO_MAX, float(found["max_radius"]), radius)
    found["domain"] = tuple(found["domain"].tolist())
    found |= {name: found[name].item() for name in _VALUES}
    return found | {name: shown(found[name]) for name in ("arithmetic", "bounds")}


def _check_meaning(path: Path, found: Arrays) -> None:
    """Refuses columns that contradict each other: figures are read off one of them or another."""
    status, right = found["status"], found["status"] != _MISCLASSIFIED
    for says, wrong in (
        (f"`status` must be from 0 to {_LAST_STATUS}", (status < 0) | (status > _LAST_STATUS)),
        ("`radius` must be 0 where `status` says misclassified", ~right & (found["radius"] > 0)),
        (
            "`prediction` must be the label unless `status` says misclassified",
            right & (found["prediction"] != found["label"]),
        ),
    ):
        if wrong.any():
            raise RunError(f"{path} is damaged: {says}; not so in row {int(np.argmax(wrong))}")


def _wanted(column: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every array of the certificates with its kinds and its shape."""
    for name, dtype in _COLUMNS.items():
        yield name, "f" if issubclass(dtype, np.floating) else "iu", column
    for name, kinds in _VALUES.items():
        yield name, kinds, ()
    yield "domain", "fiu", (2,)


def _narrow(column: Array) -> Array:
    """Whole numbers in the smallest unsigned type that holds them; as they are if negative."""
    if column.size == 0 or column.min() < 0:
        return column
    return column.astype(np.min_scalar_type(column.max()))


def rounded_down(radius: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 numbers that are not above the radii, which are at least 0."""
    nearest = radius.astype(np.float32)
    return np.where(nearest > radius, np.nextafter(nearest, np.float32(0)), nearest)


def rounded_up(radius: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The smallest float32 numbers that are not below the radii, infinity among them."""
    nearest = radius.astype(np.float32)
    return np.where(nearest < radius, np.nextafter(nearest, np.float32(np.inf)), nearest)


def write_examples(folder: Path, columns: Arrays) -> None:
    """Writes `examples.npz`: images as uint8, and their positions in the test set."""
    _write_arrays(folder / EXAMPLES, columns)


def read_examples(folder: Path) -> dict[str, Array]:
    """What `write_examples` was given."""
    return _read_arrays(folder / EXAMPLES)


# The fields of `CertifiedRadius`, and margins at radius 0.
_UNFINISHED = {
    "value": "float64", "status": "uint8", "steps": "int32", "prediction": "int64",
    "at_zero": "float64",
}  # fmt: skip


def unfinished_file(folder: Path, rank: int | str = 0) -> Path:
    """Where a certification under way keeps what it has proven; one file a process."""
    return folder / f"certificates.unfinished-{rank}.npz"


def is_unfinished(folder: Path) -> bool:
    """Whether a certification was stopped there."""
    return any(folder.glob(unfinished_file(folder, "*").name))


def drop_unfinished(folder: Path) -> None:
    """Removes what was kept, once the certificates are written."""
    for path in folder.glob(unfinished_file(folder, "*").name):
        path.unlink(missing_ok=True)


def write_unfinished(path: Path, columns: Arrays, *, question: str) -> None:
    """Writes what is proven so far, with a digest of what was asked."""
    _write_arrays(path, {**columns, "question": np.array(question)})


def read_unfinished(path: Path) -> dict[str, Any] | None:
    """What `write_unfinished` was given, or None where there is no such file."""
    if not path.is_file():
        return None
    found: dict[str, Any] = _read_arrays(path)
    kinds = {name: str(column.dtype) for name, column in found.items() if name != "question"}
    shapes = {column.shape for name, column in found.items() if name != "question"}
    if kinds != _UNFINISHED or len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise RunError(f"{path} is damaged: its columns are {kinds}")
    found["question"] = str(found.get("question"))
    return found


def write_attacks(folder: Path, columns: Arrays) -> None:
    """Writes `attacks.npz`: points as float32, whose they are, how far and by which margin."""
    _write_arrays(folder / ATTACKS, columns)


def read_attacks(folder: Path) -> dict[str, Array]:
    """What `write_attacks` was given."""
    return _read_arrays(folder / ATTACKS)


def _write_arrays(path: Path, arrays: Arrays) -> None:
    content = BytesIO()
    np.savez_compressed(content, schema=np.int64(SCHEMA), **arrays)  # type: ignore[arg-type]
    write(path, [content.getvalue()])


def _read_arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise RunError(f"{path} is missing: acert certify {quote(str(path.parent))}")
    try:
        found = read_npz(within(path, path.parent))
    # Everything: zipfile and zlib each raise their own.
    except Exception as error:
        raise RunError(f"{path} is damaged: {first_line(error)}") from error
    schema = found.pop("schema", np.array(None))
    check_schema(path, schema.item() if schema.ndim == 0 else None)
    return found
