"""Figures fit for a paper: one column wide, told apart by colour, marker and dashes.

Each function takes groups (`acert.report.group`) and returns a Matplotlib figure, to be saved with
`save` or changed first. Percentages are those of the records; bars and bands are over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from acert import metrics
from acert.errors import InvalidInput
from acert.report.drawing import (
    KappaLabel,
    certified,
    cut,
    draw_band,
    draw_contours,
    draw_legend,
    empty_figure,
    group_styles,
    label_kappas,
    plain,
    save,
    series_style,
)
from acert.report.group import Group, series_of

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
    """Accuracy against ACR (Figure 1): seeds as bars, fronts as lines, contours of equal ART."""
    chosen = certified(groups)
    points: list[KappaLabel] = []
    with empty_figure(2.75) as (figure, axes):
        for series in series_of(chosen):
            style, colour = series_style(series, chosen)
            acr = [group.acr for group in series.groups]
            accuracy = [group.accuracy for group in series.groups]
            x = np.asarray([100 * one.mean for one in acr])
            y = np.asarray([100 * one.mean for one in accuracy])
            front = metrics.pareto_front(list(zip(x.tolist(), y.tolist(), strict=True)))
            axes.plot(x[front], y[front], **{**style, "marker": ""}, zorder=2)
            axes.errorbar(
                x, y, xerr=[100 * (one.std or 0) for one in acr],
                yerr=[100 * (one.std or 0) for one in accuracy], ecolor=colour, elinewidth=0.8,
                zorder=3, label=plain(series.label), **{**style, "linestyle": "none"},
            )  # fmt: skip
            points += [
                (f"{group.kappa:g}", *at, colour)
                for group, at in zip(series.groups, zip(x, y, strict=True), strict=True)
            ]
        axes.margins(0.09)
        draw_contours(axes)
        axes.set_xlabel("ACR (%)")
        axes.set_ylabel("Accuracy (%)")
        axes.grid(visible=False)
        draw_legend(figure, axes)
        if len(points) <= _LABELLED_POINTS:
            label_kappas(figure, axes, points)
    return figure


def certified_accuracy_curves(groups: Sequence[Group]) -> Figure:
    """Certified accuracy by radius (Figure 3); the area under a curve is ACR times max_radius."""
    chosen = certified(groups)
    with empty_figure(2.5) as (figure, axes):
        for group, style in group_styles(chosen):
            draw_band(axes, group.curve, style, plain(group.label))
        axes.set_ylim(0, 102)
        axes.set_xlim(0, float(chosen[0].curve.x[-1]))
        axes.set_xlabel(r"Radius ($\ell_\infty$)")
        axes.set_ylabel("Certified accuracy (%)")
        draw_legend(figure, axes)
    return figure


def attack_gap(groups: Sequence[Group]) -> Figure:
    """Certified accuracy and accuracy under attack by radius: the truth lies between them."""
    chosen = [group for group in certified(groups) if group.gap is not None]
    if not chosen:
        raise InvalidInput("`groups` must hold an attacked run; got none")
    with empty_figure(2.5) as (figure, axes):
        for group, style in group_styles(chosen):
            assert group.gap is not None
            lower, upper = group.gap
            draw_band(axes, lower, style, plain(group.label))
            axes.plot(upper.x, 100 * upper.mean, color=style["color"], linewidth=0.8)
            axes.fill_between(
                lower.x, 100 * lower.mean, 100 * upper.mean,
                color=style["color"], alpha=0.15, linewidth=0,
            )  # fmt: skip
        axes.set_ylim(0, 102)
        axes.set_xlim(0, float(chosen[0].curve.x[-1]))
        axes.set_xlabel(r"Radius ($\ell_\infty$)")
        axes.set_ylabel("Accuracy: certified to attacked (%)")
        draw_legend(figure, axes)
    return figure


def training_curves(groups: Sequence[Group]) -> Figure:
    """Loss, accuracy, radius cap and validation ART by epoch, as far as the records have them.

    ART is left out where runs were trained to different radii: each is relative to its own.
    """
    tracks = shown_tracks(groups)
    if not tracks:
        raise InvalidInput("`groups` must hold a run with a training history; got none")
    rows = (len(tracks) + 1) // 2
    with empty_figure(0.7 + 1.35 * rows, panels=(rows, 2)) as (figure, first):
        panels = figure.axes
        for axes, (name, title, factor) in zip(panels, tracks, strict=False):
            for group, style in group_styles(groups):
                band = group.track(name)
                if band is not None:
                    marked = {**style, "markersize": 3}
                    draw_band(axes, band, marked, plain(group.label), factor=factor)
            axes.set_title(title, fontsize=7.5)
            axes.set_xlabel("Epoch")
        for axes in panels[len(tracks) :]:
            axes.remove()
        draw_legend(figure, first)
    return figure


def class_radii(groups: Sequence[Group]) -> Figure:
    """Mean certified radius of each class; above 20 classes, by rank within each group."""
    chosen = certified(groups)
    names = chosen[0].runs[0].classes
    with empty_figure(2.5) as (figure, axes):
        for place, (group, style) in enumerate(group_styles(chosen)):
            band = group.class_radius
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
                x, band.mean, yerr=np.maximum(reach, 0), elinewidth=0.8,
                label=plain(group.label), **{**style, "linestyle": "none"},
            )  # fmt: skip
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
        highest = max(float(np.nanmax(group.class_radius.high)) for group in chosen)
        axes.set_ylim(0, 1.07 * highest or 1)
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
        for group, style in group_styles(chosen):
            found = group.distribution
            axes.stairs(
                100 * found.share, found.edges, color=style["color"],
                linestyle=style["linestyle"], linewidth=1.2,
            )  # fmt: skip
            axes.plot(
                [0, found.edges[-1]], [100 * found.at_zero, 100 * found.at_max],
                label=plain(group.label), clip_on=False, zorder=4,
                **{**style, "linestyle": "none"},
            )  # fmt: skip
        largest = float(chosen[0].distribution.edges[-1])
        axes.set_xlim(-0.03 * largest, 1.03 * largest)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 1, 5, 10, 20, 40, 60, 80, 100])
        axes.set_xlabel("Certified radius (ends: exactly 0 and max_radius)")
        axes.set_ylabel("Share of images (%)")
        draw_legend(figure, axes)
    return figure


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
