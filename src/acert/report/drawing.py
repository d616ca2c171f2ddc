"""What the figures share: their style, lines and markers of a method, contours, legend, files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acert.errors import InvalidInput
from acert.report.appearance import look
from acert.report.group import Band, Group, Series, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "KappaLabel",
    "certified",
    "cut",
    "draw_band",
    "draw_contours",
    "draw_legend",
    "empty_figure",
    "group_styles",
    "label_kappas",
    "plain",
    "save",
    "series_style",
]

# The words, where the point is, its colour.
KappaLabel = tuple[str, float, float, str]
# A column of the usual two-column page, in inches.
_WIDTH = 3.4
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


def series_style(series: Series, groups: Sequence[Group]) -> tuple[dict[str, Any], str]:
    """Line and marker of a series; of several with one method every second is hollow."""
    seen = look(series.method, list(dict.fromkeys(group.method for group in groups)))
    variants = [one.variant for one in series_of(groups) if one.method == series.method]
    hollow = variants.index(series.variant) % 2 == 1
    style = {
        "color": seen.light,
        "marker": seen.marker,
        "linestyle": (0, seen.dashes) if seen.dashes else "-",
        "markerfacecolor": "white" if hollow else seen.light,
        "markeredgecolor": seen.light if hollow else "white",
        "markeredgewidth": 1.0 if hollow else 0.3,
    }
    return style, seen.light


def group_styles(groups: Sequence[Group]) -> list[tuple[Group, dict[str, Any]]]:
    """The groups in the order of legends, each with its line and marker."""
    return [
        (group, series_style(series, groups)[0])
        for series in series_of(groups)
        for group in series.groups
    ]


def draw_band(
    axes: Axes, band: Band, style: dict[str, Any], label: str, *, factor: float = 100.0
) -> None:
    """A line with markers, and the room between the lowest and the highest seed shaded."""
    every = max(1, band.x.size // 8)
    axes.plot(band.x, factor * band.mean, label=label, **{**style, "markevery": every})
    axes.fill_between(
        band.x, factor * band.low, factor * band.high,
        color=style["color"], alpha=0.15, linewidth=0,
    )  # fmt: skip


def label_kappas(
    figure: Figure, axes: Axes, points: Sequence[tuple[str, float, float, str]]
) -> None:
    """Each kappa beside its point, on the first side that is free; left out where none is."""
    figure.draw_without_rendering()  # only now is it known where the points are
    scale = 72 / figure.dpi
    places = [axes.transData.transform((x, y)) * scale for _, x, y, _ in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
    for (text, x, y, colour), (left, bottom) in zip(points, places, strict=True):
        width, height = 3.6 * len(text), 6.0
        for dx, dy in ((4, 3), (4, -height - 2), (-4 - width, 3), (-4 - width, -height - 2)):
            box = (left + dx, bottom + dy, left + dx + width, bottom + dy + height)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(
                    text, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=5.5,
                    color=colour,
                )  # fmt: skip
                break


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def draw_contours(axes: Axes) -> None:
    """Lines of equal ART behind the points, labelled in percent; the view stays as it is."""
    from matplotlib.ticker import MaxNLocator

    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    left, right = max(left, 0.0), min(right, 100.0)
    bottom, top = max(bottom, 0.0), min(top, 100.5)
    lowest, highest = math.sqrt(left * bottom), math.sqrt(right * top)
    ticks = MaxNLocator(9).tick_values(lowest, highest)
    levels = [float(level) for level in ticks if lowest < level < highest]
    for level in levels:
        # ART = level where accuracy is level^2 / ACR (Eq. 13).
        start, end = (level**2 / edge if edge > 0 else math.inf for edge in (top, bottom))
        x = np.linspace(max(left, start), min(right, end), 80)
        y = level**2 / x
        axes.plot(x, y, color="#a8a8a8", linewidth=0.5, zorder=1)
        # Low on the line, where methods are rarely to be found.
        at = int(np.argmin(np.abs(y - (y[-1] + 0.06 * (top - bottom)))))
        word = "ART " if level == levels[-1] else ""
        axes.text(
            x[at], y[at], f"{word}{level:g}", fontsize=5.5, color="#6b6b6b", ha="center",
            va="center", zorder=1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def draw_legend(figure: Figure, axes: Axes) -> None:
    """The legend of the axes above the figure, in as many columns as its words leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > 26 else 2 if max(map(len, labels)) > 14 else 3
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, columnspacing=1.2)


def plain(text: str) -> str:
    """The text as Matplotlib shows it unchanged: a dollar sign would start a formula."""
    return text.replace("$", r"\$")


def cut(name: str, length: int = 12) -> str:
    """The name, shortened with an ellipsis where it is longer."""
    return name if len(name) <= length else f"{name[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
