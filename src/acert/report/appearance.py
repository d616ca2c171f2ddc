"""Colour, marker and dashes of what a line joins: the same in paper figures and on the page.

The colours stay apart for readers with any of the common kinds of colour blindness (tested), and
a marker and a dash pattern of its own tells each method without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from acert.report.run import METHOD_NAMES

__all__ = ["Look", "look", "looks"]


@dataclass(frozen=True)
class Look:
    """How a method is drawn: hex colours on white and on dark, Matplotlib's marker, dashes."""

    light: str
    dark: str
    marker: str
    dashes: tuple[float, ...]
    hollow: bool = False


_LOOKS = (
    Look("#0067a8", "#4aa8f0", "o", ()),
    Look("#3fa7d6", "#a5dcff", "v", (4, 1.5)),
    Look("#c84e00", "#ff8c42", "s", (6, 2)),
    Look("#00805e", "#35c79a", "^", (1.5, 1.5)),
    Look("#b0589a", "#e9a3d6", "D", (6, 2, 1.5, 2)),
    Look("#6b2400", "#d0324a", "<", (10, 2)),
    Look("#a33cf5", "#9a2cff", "h", (1, 1)),
    Look("#0a0a3c", "#a06090", ">", (4, 1, 1, 1)),
    Look("#4d4d4d", "#c9c9c9", "X", (3, 2, 1, 2, 1, 2)),
    # For methods that this version does not know.
    Look("#9a7b00", "#f0dc5a", "P", (8, 3)),
    Look("#5c3a9e", "#9d8cf2", "p", (2, 3)),
)


def look(method: str, methods: Sequence[str]) -> Look:
    """How a method is drawn; those that are not ours get looks in the order of `methods`."""
    known = list(METHOD_NAMES.values())
    if method in known:
        return _LOOKS[known.index(method)]
    others = [name for name in methods if name not in known]
    spare = _LOOKS[len(known) :]
    return spare[others.index(method) % len(spare)]


def looks(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """How each pair of a method and its variant is drawn.

    The first variant of one of our methods looks as that method always does. All others
    take what is free; once nothing is, hollow markers, and then colours with the markers and
    dashes of others. The first 242 differ.
    """
    own: dict[tuple[str, str], Look] = {}
    for method, variant in series:
        if method in METHOD_NAMES.values() and all(method != other for other, _ in own):
            own[method, variant] = look(method, [])
    spare = [*_LOOKS[len(METHOD_NAMES) :], *_LOOKS[: len(METHOD_NAMES)]]
    free = [one for one in spare if one not in own.values()]
    free += [replace(one, hollow=True) for one in spare]
    for shift in range(1, len(spare)):
        pairs = zip(spare, [*spare[shift:], *spare[:shift]], strict=True)
        mixed = [replace(one, marker=other.marker, dashes=other.dashes) for one, other in pairs]
        free += [*mixed, *(replace(one, hollow=True) for one in mixed)]
    others = [pair for pair in series if pair not in own]
    return own | {pair: free[i % len(free)] for i, pair in enumerate(others)}
