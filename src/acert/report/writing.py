"""The report as files: the page, the figures and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from acert.errors import RunError
from acert.report import figures
from acert.report.collection import Collection
from acert.report.group import smallest_kappa
from acert.report.page import page
from acert.report.tables import latex_table, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_figures", "write_page", "write_report"]

# Figures that not every report has.
_OPTIONAL = ("attack-gap", "training")
# How every page of ours starts, and few others do.
_OURS = b'<meta name="generator" content="acert '


def write_report(collection: Collection, out: Path) -> list[Path]:
    """Writes the page, the tables and the figures into a folder; returns the paths.

    An earlier report there is replaced; other files are left alone, and a page that is not a
    report is refused.
    """
    return [*write_page(collection, out), *write_figures(collection, out / "figures")]


def write_page(collection: Collection, out: Path) -> list[Path]:
    """Writes index.html, table.md and table.tex, which need nothing but NumPy."""
    _check_page(out)
    texts = {
        "index.html": page(collection),
        "table.md": markdown_table(collection),
        "table.tex": latex_table(collection),
    }
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def write_figures(collection: Collection, folder: Path) -> list[Path]:
    """Writes each figure as SVG and as PNG with 300 dpi.

    The trade-off shows all settings, the other figures the smallest kappa of each method. A
    figure of an earlier report that these runs do not have is removed.
    """
    drawn = _draw(collection)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in set(_OPTIONAL) - set(drawn):
            for kind in ("svg", "png"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        return [path for name, fig in drawn.items() for path in figures.save(fig, folder, name)]


def _check_page(out: Path) -> None:
    """Refuses a folder with an index.html that is no report: somebody else's page."""
    there = out / "index.html"
    with _writing(out):
        if there.is_file() and not _is_ours(there):
            raise RunError(
                f"{there} is no report of acert: choose another folder with --out, or remove it"
            )


def _is_ours(page: Path) -> bool:
    # The generator is named in the head.
    with page.open("rb") as stream:
        return _OURS in stream.read(10_000)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {folder}: {error.strerror or error}"
        ) from error


def _draw(collection: Collection) -> dict[str, Figure]:
    certified = collection.certified_groups
    chosen = smallest_kappa(certified)
    drawn = {
        "trade-off": figures.trade_off(certified),
        "certified-accuracy": figures.certified_accuracy_curves(chosen),
        "radius-distribution": figures.radius_distribution(chosen),
        "class-radii": figures.class_radii(chosen),
    }
    if any(group.gap is not None for group in chosen):
        drawn["attack-gap"] = figures.attack_gap(chosen)
    if figures.shown_tracks(collection.groups):
        drawn["training"] = figures.training_curves(smallest_kappa(collection.groups))
    return drawn
