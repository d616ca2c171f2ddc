"""Figures fit for a paper: one column wide, told apart by colour, marker and dashes.

Each function takes groups (`acert.report.group`) and returns a Matplotlib figure, to be saved with
`save` or changed first. Percentages are those of the records; bars and bands are over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from acert import metrics
from acert.errors import InvalidInput
from acert.report.drawing import (
    Labelled,
    certified,
    cut,
    draw_band,
    draw_contours,
    draw_legend,
    empty_figure,
    label_points,
    line_style,
    plain,
    save,
)
from acert.report.group import Band, Group, series_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "attack_gap",
    "certified_accuracy_curves",
    "class_radii",
    "radius_distribution",
    "save",
    "shown_tracks",
    "trade_off",
    "training_curves",
]

# More classes than this are shown by rank: their names would be illegible.
_NAMED_CLASSES = 20
# More points than this are not labelled with their kappa.
_LABELLED_POINTS = 16
# What training shows, as far as the records have it: name in metrics.jsonl, title, factor.
TRACKS = (
    ("loss", "Training loss", 1.0),
    ("train_accuracy", "Training accuracy (%)", 100.0),
    ("radius_cap", "Radius cap", 1.0),
    ("art", "Validation ART (%)", 100.0),
)


def trade_off(groups: Sequence[Group]) -> Figure:
    """Accuracy against ACR (Figure 1): seeds as bars, fronts as lines, contours of equal ART.

    Numbers beside points are kappa.
    """
    chosen = certified(groups)
    points: list[Labelled] = []
    with empty_figure(2.75) as (figure, axes):
        for series in series_of(chosen):
            style = line_style(series.look)
            mine = [_labelled(group, first=not i) for i, group in enumerate(series.groups)]
            x, y = (np.asarray([getattr(one, name) for one in mine]) for name in "xy")
            front = metrics.pareto_front([(one.x, one.y) for one in mine])
            axes.plot(x[front], y[front], **{**style, "marker": ""}, zorder=2)
            axes.errorbar(
                x, y, xerr=[one.dx for one in mine], yerr=[one.dy for one in mine],
                ecolor=series.look.light, elinewidth=0.8, zorder=3, clip_on=False,
                **{**style, "linestyle": "none"},
            )  # fmt: skip
            axes.plot([], [], label=plain(series.label), **style)
            points += mine
        axes.margins(0.09)
        draw_contours(axes, points)
        axes.set_xlabel("ACR (%)")
        axes.set_ylabel("Accuracy (%)")
        axes.grid(visible=False)
        draw_legend(figure, axes)
        if len(points) <= _LABELLED_POINTS:
            label_points(figure, axes, points)
    return figure


def _labelled(group: Group, *, first: bool) -> Labelled:
    sign = "\N{GREEK SMALL LETTER KAPPA} " if first else ""
    return Labelled(
        word=f"{sign}{group.kappa:g}",
        x=100 * group.acr.mean,
        y=100 * group.accuracy.mean,
        dx=100 * (group.acr.std or 0),
        dy=100 * (group.accuracy.std or 0),
        colour=group.look.light,
    )


def certified_accuracy_curves(groups: Sequence[Group]) -> Figure:
    """Certified accuracy by radius (Figure 3); the mean height of a curve is its ACR."""
    chosen = certified(groups)
    with empty_figure(2.5) as (figure, axes):
        for group in chosen:
            draw_band(axes, group.curve, line_style(group.look), plain(group.label))
        axes.set_ylim(_accuracy_floor(group.curve for group in chosen), 102)
        axes.set_xlim(0, float(chosen[0].curve.x[-1]))
        axes.set_xlabel(r"Radius ($\ell_\infty$)")
        axes.set_ylabel("Certified accuracy (%)")
        draw_legend(figure, axes)
    return figure


def attack_gap(groups: Sequence[Group]) -> Figure:
    """Certified accuracy and accuracy under attack by radius: the truth lies between them.

    Both are of the runs that were attacked.
    """
    chosen = [group for group in certified(groups) if group.gap is not None]
    if not chosen:
        raise InvalidInput("`groups` must hold an attacked run; got none")
    with empty_figure(2.5) as (figure, axes):
        for group in chosen:
            assert group.gap is not None
            lower, upper = group.gap
            draw_band(axes, replace(lower, low=lower.mean, high=upper.mean),
                      line_style(group.look), plain(group.label))  # fmt: skip
            axes.plot(upper.x, 100 * upper.mean, color=group.look.light, linewidth=0.7)
        for word, width in (("certified", 1.3), ("not broken by attack", 0.7)):
            axes.plot([], [], color="#4d4d4d", linewidth=width, label=word)
        axes.set_ylim(_accuracy_floor(group.gap[0] for group in chosen if group.gap), 102)
        axes.set_xlim(0, float(chosen[0].curve.x[-1]))
        axes.set_xlabel(r"Radius ($\ell_\infty$)")
        axes.set_ylabel("Robust accuracy (%)")
        draw_legend(figure, axes)
    return figure


def training_curves(groups: Sequence[Group]) -> Figure:
    """Loss, accuracy, radius cap and validation ART by epoch, as far as the records have them.

    ART is left out where runs were trained to different radii: each is relative to its own.
    """
    from matplotlib.ticker import MaxNLocator

    tracks = shown_tracks(groups)
    if not tracks:
        raise InvalidInput("`groups` must hold a run with a training history; got none")
    rows = (len(tracks) + 1) // 2
    with empty_figure(0.7 + 1.35 * rows, panels=(rows, 2)) as (figure, first):
        panels = figure.axes
        for axes, (name, title, factor) in zip(panels, tracks, strict=False):
            for group in groups:
                band = group.track(name)
                if band is not None:
                    marked = {**line_style(group.look), "markersize": 3}
                    draw_band(axes, band, marked, plain(group.label), factor=factor)
            axes.set_title(title, fontsize=7.5)
            axes.set_xlabel("Epoch")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
        for axes in panels[len(tracks) :]:
            axes.remove()
        draw_legend(figure, first)
    return figure


def class_radii(groups: Sequence[Group]) -> Figure:
    """Mean certified radius of each class; above 20 classes, by rank within each group."""
    chosen = certified(groups)
    names = chosen[0].runs[0].classes
    with empty_figure(2.5) as (figure, axes):
        for place, group in enumerate(chosen):
            band, style = group.class_radius, line_style(group.look)
            if len(names) > _NAMED_CLASSES:
                ranked = np.sort(band.mean[~np.isnan(band.mean)])[::-1]
                axes.plot(
                    np.arange(1, ranked.size + 1), ranked, label=plain(group.label),
                    **{**style, "markevery": max(1, ranked.size // 8)},
                )  # fmt: skip
                continue
            x = band.x + 0.6 * ((place + 0.5) / len(chosen) - 0.5)
            reach = np.stack([band.mean - band.low, band.high - band.mean])
            axes.errorbar(
                x, band.mean, yerr=np.maximum(reach, 0), elinewidth=0.8, clip_on=False,
                **{**style, "linestyle": "none"},
            )  # fmt: skip
            axes.plot([], [], label=plain(group.label), **{**style, "linestyle": "none"})
        if len(names) > _NAMED_CLASSES:
            axes.set_xlabel("Class, by rank")
        else:
            long = max(len(name) for name in names) > 3
            axes.set_xticks(
                range(len(names)), [plain(cut(name)) for name in names],
                rotation=45 if long else 0, ha="right" if long else "center",
            )  # fmt: skip
            axes.set_xlabel("Class")
            axes.grid(visible=False, axis="x")
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0) if high > 0 else 0, high if high > 0 else 1)
        axes.set_ylabel("Mean certified radius")
        draw_legend(figure, axes)
    return figure


def radius_distribution(groups: Sequence[Group]) -> Figure:
    """Shares of radii in bins, with the two ends, 0 and max_radius, as points of their own.

    The scale is that of square roots: the ends hold most of the samples.
    """
    chosen = certified(groups)
    with empty_figure(2.5) as (figure, axes):
        # First the scale: it resets ticks.
        axes.set_yscale("function", functions=(_root, np.square))
        for group in chosen:
            found, style = group.distribution, line_style(group.look)
            axes.stairs(
                100 * found.share, found.edges, color=style["color"], baseline=None,
                linestyle=style["linestyle"], linewidth=1.2,
            )  # fmt: skip
            axes.plot(
                [0, found.edges[-1]], [100 * found.at_zero, 100 * found.at_max],
                clip_on=False, zorder=4, **{**style, "linestyle": "none"},
            )  # fmt: skip
            axes.plot([], [], label=plain(group.label), **style)
        largest = float(chosen[0].distribution.edges[-1])
        axes.set_xlim(-0.03 * largest, 1.03 * largest)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 1, 5, 10, 20, 40, 60, 80, 100])
        axes.set_xlabel("Certified radius (ends: exactly 0 and max_radius)")
        axes.set_ylabel("Share of images (%)")
        draw_legend(figure, axes)
    return figure


def _accuracy_floor(curves: Iterable[Band]) -> float:
    """Where an axis of percentages starts: 0, or higher where every curve stays above half."""
    lowest = 100 * min(float(curve.low.min()) for curve in curves)
    return min(90, 10 * math.floor(lowest / 10)) if lowest > 50 else 0


def shown_tracks(groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    """The figures of the training that these groups have and that can be compared."""
    radii = {run.trained_to for group in groups for run in group.runs}
    return [
        track
        for track in TRACKS
        if any(group.track(track[0]) is not None for group in groups)
        and (track[0] != "art" or len(radii) == 1)
    ]


def _root(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.sqrt(np.maximum(values, 0))
