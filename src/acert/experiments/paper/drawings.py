"""The paper's figures, drawn from the records there are, and the page that holds them.

A picture carries the numbers that it shows (in its PNG's description), so that a stale one can
be told from the records without comparing pixels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acert import metrics, records
from acert.errors import InvalidInput, RunError
from acert.experiments.paper.claims import DATASETS, Standings, average, trade_off_rows
from acert.experiments.paper.comparison import (
    filled,
    page,
    relative,
    sections,
    shortened,
    standings,
)
from acert.experiments.paper.publication import read_records
from acert.experiments.paper.root_steps import RootSteps
from acert.experiments.paper.standing import Standing
from acert.extras import needs
from acert.methods import Acert
from acert.report import figures
from acert.report.appearance import look
from acert.report.group import Group, group_runs
from acert.report.run import read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PAGE", "PICTURES", "figure_names", "figure_numbers", "render", "stamp", "stamped"]

PAGE = "reproduction.md"
PICTURES = "figures"
_CURVE_POINTS = 33
# Matplotlib's own type for it lists every name there is.
_STYLE: Any = {"font.size": 7.5, "axes.spines.top": False, "axes.spines.right": False}
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.3)))
# name: (figure of the paper, data set)
_FIGURES = {
    "figure1-cifar10": ("figure1", "cifar10"),
    "figure1-tinyimagenet": ("figure1", "tinyimagenet"),
    "figure2-cifar10": ("figure2", "cifar10"),
    "figure3-mnist": ("figure3", "mnist"),
    "figure3-cifar10": ("figure3", "cifar10"),
}
_CAPTIONS = {
    "figure1": "Accuracy against ACR on {}; numbers beside points are kappa, lines equal ART",
    "figure2": "ART, time a step and root steps to tolerance on {}, kappa 0",
    "figure3": "Certified accuracy over the radius on {}",
}


def render(results: Path, out: Path) -> tuple[list[Path], list[str]]:
    """Writes the page and the pictures into `out`; returns their paths, and lines to be told.

    A page that is there keeps what stands outside of the markers. Without Matplotlib the
    pictures that are there stay as they are.
    """
    records.make_writable(out)
    found, complaints = read_records(results)
    known = standings(found)
    notes = [f"skipped: {complaint}" for complaint in complaints]
    written: list[Path] = []
    try:
        for name in figure_names(known):
            written += _draw(known, name, out / PICTURES)
    except ModuleNotFoundError as error:
        notes.append(f"no figures were drawn: this {needs(str(error.name))}")
    except OSError as error:
        raise _unwritten(out / PICTURES, error) from error
    text = rendered(known, results, out)
    # Beside its place first: the page may hold a user's own words.
    path, draft = out / PAGE, out / f".{PAGE}.tmp"
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise _unwritten(out, error) from error
    return [path, *written], notes


def _unwritten(folder: Path, error: OSError) -> RunError:
    return RunError(f"{folder} cannot be written: {error.strerror or error}")


def rendered(known: Standings, results: Path, out: Path) -> str:
    """The text of the page in `out`, with its generated parts made anew."""
    place = relative(results, out)
    path = out / PAGE
    made = {**sections(known, records_at=place), "figures": _gallery(known, out / PICTURES)}
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else page(known, records_at=place)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"the page {path} cannot be read: {error}") from error
    return filled(text, made)


def figure_names(known: Standings) -> list[str]:
    """The figures that can be drawn from the records."""
    return [name for name in _FIGURES if figure_numbers(known, name)]


def figure_numbers(known: Standings, name: str) -> dict[str, Any]:
    """What a figure shows, by row and seed, rounded; empty where there is nothing to draw."""
    numbers: dict[str, Any] = {}
    rows = _rows(known, name)
    counted = _counted_steps(rows)
    for one in rows:
        for record in one.records:
            proven = record.certificates
            key = f"{one.row.id}, seed {record.seed}"
            if name.startswith("figure3"):
                curve = metrics.certified_accuracy_curve(
                    proven.radius, proven.correct,
                    max_radius=proven.max_radius, points=_CURVE_POINTS,
                )  # fmt: skip
                numbers[key] = [round(float(value), 4) for value in curve.accuracy]
            else:
                numbers[key] = [round(proven.accuracy, 4), round(proven.acr, 4)]
            if name.startswith("figure2"):
                step = record.step_seconds
                numbers[key].append(None if step is None else round(1e3 * step, 2))
                if record.root_steps is not None and record.root_steps is counted:
                    numbers[key].append([list(pair) for pair in counted.arrived])
    return numbers


def stamp(picture: Path, numbers: Mapping[str, Any]) -> None:
    """Writes the numbers that a PNG shows into its description."""
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Description", json.dumps(numbers))
    with Image.open(picture) as image:
        image.load()
        dpi = image.info.get("dpi", (100, 100))
        image.save(picture, pnginfo=info, dpi=dpi)


def stamped(picture: Path) -> Any:
    """The numbers that `stamp` wrote; refused where there are none."""
    from PIL import Image

    with Image.open(picture) as image:
        text = image.info.get("Description")
    if not isinstance(text, str):
        raise InvalidInput(f"{picture} does not say which numbers it shows")
    return json.loads(text)


def _rows(known: Standings, name: str) -> list[Standing]:
    part, dataset = _FIGURES[name]
    if part == "figure1":
        return trade_off_rows(known, dataset)
    return [one for one in known.values() if one.row.part == part and one.row.dataset == dataset]


def _gallery(known: Standings, pictures: Path) -> str:
    """The figures as Markdown, each with its shortened rows and those that it does not show yet."""
    lines = []
    for name, (part, dataset) in _FIGURES.items():
        caption = f"{_CAPTIONS[part].format(DATASETS[dataset])} (Figure {part[-1]})"
        rows = _rows(known, name)
        if not figure_numbers(known, name):
            lines += [f"{caption}: nothing to draw yet."]
        elif (pictures / f"{name}.png").is_file():
            lines += [f"![{caption}]({PICTURES}/{name}.png)", "", f"{caption}."]
        else:
            lines += [f"{caption}: not drawn, which needs Matplotlib."]
        shorter: dict[str, list[str]] = {}
        for one in rows:
            for note in dict.fromkeys(shortened(record, one.row) for record in one.records):
                shorter.setdefault(note, []).append(one.row.id)
        shorter.pop("", None)
        lines[-1] += "".join(f" {note}: {', '.join(ids)}." for note, ids in shorter.items())
        absent = [one.row.id for one in rows if not one.records]
        if absent:
            lines[-1] += f" Not drawn, since missing: {', '.join(absent)}."
        lines.append("")
    return "\n".join(lines).rstrip()


# -- drawing --------------------------------------------------------------------------------


def _draw(known: Standings, name: str, folder: Path) -> list[Path]:
    numbers = figure_numbers(known, name)
    folder.mkdir(exist_ok=True)
    rows = [one for one in _rows(known, name) if one.records]
    if name.startswith("figure2"):
        figure = _root_step_figure(rows)
    elif name.startswith("figure1"):
        figure = figures.trade_off(_groups(rows))
    else:
        figure = _curve_figure(rows)
    vector, pixels = figures.save(figure, folder, name)
    stamp(pixels, numbers)
    return [vector, pixels]


def _groups(rows: Sequence[Standing]) -> tuple[Group, ...]:
    folders = dict.fromkeys(record.folder for one in rows for record in one.records)
    return group_runs([read_run(folder) for folder in folders])


def _curve_figure(rows: Sequence[Standing]) -> Figure:
    """Certified accuracy over the radius (Figure 3): a colour a method, dashes for its rows."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        figure = Canvas(figsize=(3.6, 2.9), layout="constrained")
        axes = figure.subplots()
        drawn: Counter[str] = Counter()
        for one in rows:
            curve = metrics.certified_accuracy_curve(
                np.concatenate([record.certificates.radius for record in one.records]),
                np.concatenate([record.certificates.correct for record in one.records]),
                max_radius=one.row.training.max_radius, points=257,
            )  # fmt: skip
            label = one.row.label
            trained = dict(one.row.training.changes).get("settings.max_radius")
            at = "" if trained is None else f", trained at {trained}"
            axes.plot(
                curve.radius, 100 * curve.accuracy, color=look(label, [label]).light,
                linestyle=_DASHES[drawn[label] % len(_DASHES)], linewidth=1.3,
                label=f"{label}, \N{GREEK SMALL LETTER KAPPA} {one.row.kappa:g}{at}",
            )  # fmt: skip
            drawn[label] += 1
        axes.set(
            xlabel="Radius", ylabel="Certified accuracy (%)",
            xlim=(0, rows[0].row.training.max_radius),
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=6.5)
    return figure


def _root_step_figure(rows: Sequence[Standing]) -> Figure:
    """ART and time of a step by the number of root steps, and the steps to tolerance (Figure 2)."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        figure = Canvas(figsize=(6.8, 2.5), layout="constrained")
        scores, times, histogram = figure.subplots(1, 3)
        named: set[str] = set()
        for one in rows:
            method = one.row.label.partition(",")[0]
            seen = look(method, [method])
            # A label that starts like this is left out of the legend.
            label = f"_{method}" if method in named else method
            named.add(method)
            style = {"color": seen.light, "marker": seen.marker, "linestyle": "none"}
            arts = [100 * record.certificates.art for record in one.records]
            step = average([record.step_seconds for record in one.records])
            at = _root_steps_of(one)
            if at is None:  # FastIBP, which finds no roots
                scores.axhline(
                    average(arts) or 0, color=seen.light, linestyle=(0, seen.dashes), label=label
                )
                if step is not None:
                    times.axhline(1e3 * step, color=seen.light, linestyle=(0, seen.dashes))
            else:
                scores.plot([at] * len(arts), arts, label=label, alpha=0.6, **style)  # every seed
                if step is not None:
                    times.plot([at], [1e3 * step], **style)
        counted = _counted_steps(rows)
        if counted is not None:
            steps, counts = zip(*counted.arrived, strict=True)
            shares = [100 * count / sum(counts) for count in counts]
            histogram.bar(steps, shares, color=look("ACERT", []).light)
        scores.set(xlabel="Root steps", ylabel="ART (%)")
        times.set(xlabel="Root steps", ylabel="Time a step (ms)")
        histogram.set(xlabel="Root steps to tolerance", ylabel="Share of images (%)")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        low, high = scores.get_ylim()
        scores.set_ylim(low - 0.3, high + 0.3)  # seeds differ by some tenths
        times.set_ylim(0, 1.1 * times.get_ylim()[1])
        for axes in (scores, times):
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlim(-0.5, axes.get_xlim()[1] + 0.5)
    return figure


def _counted_steps(rows: Sequence[Standing]) -> RootSteps | None:
    """The histogram of the recipe's own run, as in the table of root steps on the page."""
    plain = [record for one in rows if not one.row.training.changes for record in one.records]
    counted = [record.root_steps for record in plain if record.root_steps is not None]
    return next((one for one in counted if one.arrived), None)


def _root_steps_of(one: Standing) -> int | None:
    method = one.row.training.experiment().settings.method
    if isinstance(method, Acert):
        return method.solver.max_steps
    return 0 if one.row.training.method == "acert-fast" else None
