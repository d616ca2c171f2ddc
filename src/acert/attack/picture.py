"""The gap as a picture: certified radii against attack radii, one point a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from acert.evaluation import Certificates

__all__ = ["draw_gap"]

_INK, _POINT, _BUG, _GRID = "#333333", "#0072b2", "#d55e00", "#dddddd"
_BINS = 24
_ABOVE = 1.08  # where those that no attack broke are drawn


def draw_gap(certificates: Certificates, path: Path) -> None:
    """Draws the attack radius over the certified one, in units of max_radius; needs matplotlib.

    Sound certificates lie on or above the diagonal; what no attack broke lies on a line above
    1. Misclassified samples are counted, not drawn. The margins show the share of samples.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    right = certificates.correct
    certified = certificates.radius[right] / certificates.max_radius
    attacked = certificates.attack_radius[right].astype(np.float64) / certificates.max_radius
    unbroken = ~np.isfinite(attacked)
    shown = np.where(unbroken, _ABOVE, attacked)
    inside = (attacked <= certified) & (certified > 0)

    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 1), height_ratios=(1, 5), wspace=0.03)
    main = figure.add_subplot(grid[1, 0])
    top = figure.add_subplot(grid[0, 0], sharex=main)
    side = figure.add_subplot(grid[1, 1], sharey=main)

    main.plot((0, 1), (0, 1), color=_INK, linewidth=1)
    main.text(
        0.5, 0.47, "certified = attacked", rotation=45, rotation_mode="anchor", color=_INK,
        ha="center", va="top", transform_rotates_text=True,
    )  # fmt: skip
    # Faint where there are many, so that crowds show as such.
    opacity = float(np.clip(300 / max(len(certified), 1), 0.08, 0.6))
    main.scatter(certified[~inside], shown[~inside], s=12, color=_POINT, alpha=opacity, linewidth=0)
    main.scatter(certified[inside], shown[inside], s=30, color=_BUG, marker="x")
    main.set_xlim(-0.02, 1.02)
    main.set_ylim(-0.02, _ABOVE + 0.05)
    main.set_yticks(
        [0, 0.25, 0.5, 0.75, 1, _ABOVE], ["0", "0.25", "0.5", "0.75", "1", "not\nbroken"]
    )
    main.set_xticks([0, 0.25, 0.5, 0.75, 1])
    main.set_xlabel("certified radius / max_radius (lower bound)")
    main.set_ylabel("attack radius / max_radius (upper bound)")

    bins = np.linspace(0, 1, _BINS + 1).tolist()
    share = np.full(len(certified), 100 / len(certificates))
    top.hist(certified, bins=bins, weights=share, color=_POINT)
    above = (_ABOVE - 0.5 / _BINS, _ABOVE + 0.5 / _BINS)
    side.hist(shown, bins=[*bins, *above], weights=share, color=_POINT, orientation="horizontal")
    top.set_ylabel("% of all")
    side.set_xlabel("% of all")
    top.tick_params(labelbottom=False)
    side.tick_params(labelleft=False)
    for axes in (main, top, side):
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    words = f"{len(certificates)} samples, {int((~right).sum())} misclassified and not drawn"
    if inside.any():
        words += f"\n{int(inside.sum())} attacked inside their certified radius (crosses)"
    figure.suptitle(words, fontsize=10)
    figure.savefig(path, dpi=150)
