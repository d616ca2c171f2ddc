"""What the figures share: their style, lines and markers of a method, contours, legend, files."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acert.errors import InvalidInput
from acert.report.appearance import Look
from acert.report.group import Band, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Labelled",
    "certified",
    "cut",
    "draw_band",
    "draw_contours",
    "draw_legend",
    "empty_figure",
    "label_points",
    "line_style",
    "plain",
    "save",
]

# Left, bottom, right and top, in points of the figure.
_Box = tuple[float, float, float, float]
# A column of the usual two-column page, in inches.
_WIDTH = 3.4
_LEGEND_LETTERS, _LEGEND_LINES = 48, 3
_HALO = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
# Matplotlib's own type for it lists every name there is.
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that every machine draws the same
    "font.size": 7.5,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.handlelength": 2.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",  # letters as outlines: legible wherever the file goes
    "svg.hashsalt": "acert",  # equal figures, equal bytes
}


@dataclass(frozen=True)
class Labelled:
    """A point with bars of half lengths dx and dy, the word beside it, and its colour."""

    word: str
    x: float
    y: float
    dx: float
    dy: float
    colour: str


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Writes NAME.svg and NAME.png (300 dpi) into a folder that is there; returns the paths."""
    import matplotlib

    vector, pixels = folder / f"{name}.svg", folder / f"{name}.png"
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the tables have it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(vector, metadata={"Date": None})
        # The layout is found once; it is most of the work.
        figure.set_layout_engine("none")
        figure.savefig(pixels, dpi=300, metadata={"Software": None})
    return vector, pixels


@contextmanager
def empty_figure(height: float, panels: tuple[int, int] = (1, 1)) -> Iterator[tuple[Figure, Axes]]:
    """An empty figure in our style, and its first axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        # Not through pyplot: no window, nothing to close, no state of the caller's touched.
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        figure.subplots(*panels)
        yield figure, figure.axes[0]


def certified(groups: Sequence[Group]) -> list[Group]:
    """The groups with a certified run; refused where there are none."""
    chosen = [group for group in groups if group.n]
    if not chosen:
        raise InvalidInput("`groups` must hold a certified run; got none")
    return chosen


def line_style(look: Look) -> dict[str, Any]:
    """Line and marker of a look, as Matplotlib names them."""
    return {
        "color": look.light,
        "marker": look.marker,
        "linestyle": (0, look.dashes) if look.dashes else "-",
        "markerfacecolor": "white" if look.hollow else look.light,
        "markeredgecolor": look.light if look.hollow else "white",
        "markeredgewidth": 1.0 if look.hollow else 0.3,
    }


def draw_band(
    axes: Axes, band: Band, style: dict[str, Any], label: str, *, factor: float = 100.0
) -> None:
    """A line with markers, and the room between the lowest and the highest seed shaded."""
    every = max(1, band.x.size // 8)
    # Unclipped: a marker at the end of an axis would be cut in half.
    axes.plot(
        band.x, factor * band.mean, label=label, clip_on=False,
        **{**style, "markevery": every},
    )  # fmt: skip
    axes.fill_between(
        band.x, factor * band.low, factor * band.high,
        color=style["color"], alpha=0.15, linewidth=0,
    )  # fmt: skip


def label_points(
    figure: Figure, axes: Axes, points: Sequence[Labelled], *, size: float = 5.5
) -> None:
    """A word beside each point, on the first side that is free; left out where none is.

    The highest point comes first: of two that are close, the upper one gets the upper word.
    Rather not across a bar, but rather there than nowhere. Words and a legend that are there
    already stay free.
    """
    figure.draw_without_rendering()  # only now is it known where the points are
    scale = 72 / figure.dpi

    def box(x: float, y: float, dx: float, dy: float) -> _Box:
        left, bottom = axes.transData.transform((x - dx, y - dy)) * scale
        right, top = axes.transData.transform((x + dx, y + dy)) * scale
        return left, bottom, right, top

    legend = axes.get_legend()
    words = [*axes.texts] if legend is None else [*axes.texts, legend]
    taken = [_wider(box(one.x, one.y, 0, 0), 0.6 * size) for one in points]
    for word in words:
        left, bottom, right, top = word.get_window_extent().extents
        taken.append((scale * left, scale * bottom, scale * right, scale * top))
    bars = [box(one.x, one.y, one.dx, 0) for one in points]
    bars += [box(one.x, one.y, 0, one.dy) for one in points]
    for one in sorted(points, key=lambda point: -point.y):
        x, y, _, _ = box(one.x, one.y, 0, 0)
        width, height = 0.65 * size * len(one.word), 1.1 * size
        across, up, down = 0.75 * size, 0.55 * size, -1.45 * size
        sides = [(across, up), (across, down), (-across - width, up), (-across - width, down)]
        places = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in sides]
        allowed = [i for i, place in enumerate(places) if not _meets(place, taken)]
        free = [i for i in allowed if not _meets(places[i], bars)]
        if allowed:
            side = (free or allowed)[0]
            taken.append(places[side])
            axes.annotate(
                one.word, (one.x, one.y), xytext=sides[side], textcoords="offset points",
                fontsize=size, color=one.colour, bbox=_HALO, zorder=4,
            )  # fmt: skip


def _wider(box: _Box, by: float) -> _Box:
    return box[0] - by, box[1] - by, box[2] + by, box[3] + by


def _meets(box: _Box, others: Sequence[_Box]) -> bool:
    return any(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
        for other in others
    )


def draw_contours(axes: Axes, points: Sequence[Labelled], *, size: float = 5.5) -> None:
    """Lines of equal ART behind the points, labelled in percent; the view stays as it is."""
    from matplotlib.ticker import MaxNLocator

    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    left, right = max(left, 0.0), min(right, 100.0)
    bottom, top = max(bottom, 0.0), min(top, 100.5)
    lowest, highest = math.sqrt(left * bottom), math.sqrt(right * top)
    ticks = MaxNLocator(11, steps=[1, 2, 5, 10]).tick_values(lowest, highest)
    name = "ART "  # on the first that has room for it
    words: list[tuple[float, float]] = []
    for level in (float(tick) for tick in ticks[::-1] if lowest < tick < highest):
        # ART = level where accuracy is level^2 / ACR (Eq. 13).
        start, end = (level**2 / edge if edge > 0 else math.inf for edge in (top, bottom))
        x = np.linspace(max(left, start), min(right, end), 80)
        y = level**2 / x
        axes.plot(x, y, color="#a8a8a8", linewidth=0.5, zorder=1)
        # Low on the line, where methods are rarely to be found, beside none that is there and
        # beside no word of another line.
        inside = (y >= y[-1] + 0.06 * (top - bottom)) & (x <= right - 0.05 * (right - left))
        inside &= x >= left + 0.03 * (right - left)
        far = [
            i
            for i in np.flatnonzero(inside)
            if all(
                abs(one.x - x[i]) > 0.12 * (right - left)
                or abs(one.y - y[i]) > 0.07 * (top - bottom)
                for one in points
            )
            and all(
                abs(there - x[i]) > 0.08 * (right - left)
                or abs(height - y[i]) > 0.06 * (top - bottom)
                for there, height in words
            )
        ]
        if far:
            word, name = f"{name}{level:g}", ""
            words.append((x[far[-1]], y[far[-1]]))
            axes.text(
                *words[-1], word, fontsize=size, color="#6b6b6b",
                ha="center", va="center", zorder=1, bbox=_HALO,
            )  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def draw_legend(figure: Figure, axes: Axes) -> None:
    """The legend of the axes above the figure, in as many columns as its words leave room for.

    Long words go on in a second and a third line, since what tells variants of a method apart
    often stands at their end. Many lines make the figure higher, not the axes lower.
    """
    handles, labels = axes.get_legend_handles_labels()
    words = [_lines(label) for label in labels]
    longest = max(len(line) for word in words for line in word.split("\n"))
    columns = 1 if longest > 26 else 2 if longest > 14 else 3
    lines = math.ceil(sum(word.count("\n") + 1 for word in words) / columns)
    figure.set_figheight(figure.get_figheight() + 0.14 * max(0, lines - 2))
    figure.legend(handles, words, loc="outside upper center", ncols=columns, columnspacing=1.2)


def _lines(label: str) -> str:
    """A label in lines of the legend's width; an ellipsis ends one that is too long for all."""
    # Dollar signs lose their mark before and get it after, or a line could end between the two.
    whole = label.replace(r"\$", "$")
    lines = textwrap.wrap(whole, _LEGEND_LETTERS, break_on_hyphens=False)
    kept = lines[:_LEGEND_LINES]
    if len(lines) > _LEGEND_LINES:
        kept[-1] = cut(f"{kept[-1]} {lines[_LEGEND_LINES]}", _LEGEND_LETTERS)
    return plain("\n".join(kept))


def plain(text: str) -> str:
    """The text as Matplotlib shows it: a dollar sign would start a formula.

    A leading underscore would keep it out of the legend, hence the space.
    """
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def cut(name: str, length: int = 12) -> str:
    """The name, shortened with an ellipsis where it is longer."""
    return name if len(name) <= length else f"{name[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
