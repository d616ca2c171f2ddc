"""Ours beside the paper's: its tables as Markdown, from the records there are.

Every number comes from a record or from `acert.experiments.paper`. A page holds the tables
between markers, `<!-- table1:begin -->` and `<!-- table1:end -->`; what stands around them stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from acert import metrics
from acert.errors import InvalidInput
from acert.experiments.override import number
from acert.experiments.paper.claims import DATASETS, Standings, average, claims, root_step_shares
from acert.experiments.paper.publication import Record
from acert.experiments.paper.row import Published, Row
from acert.experiments.paper.rows import PARTS, ROWS
from acert.experiments.paper.standing import Standing, standing

__all__ = ["filled", "page", "relative", "sections", "shortened", "standings", "table"]

_DASH = "-"


def standings(found: Sequence[Record], rows: Sequence[Row] = ROWS) -> dict[str, Standing]:
    """How each row stands, by its id."""
    return {row.id: standing(row, found) for row in rows}


def sections(known: Standings, *, records_at: str) -> dict[str, str]:
    """Every generated part of the page by name, as Markdown; `records_at` leads to the records."""
    tables = {
        part: table(part, [one for one in known.values() if one.row.part == part], known)
        for part in PARTS
        if part.startswith("table")
    }
    made = {**tables, "claims": claims(known), "root-steps": root_step_shares(known)}
    return {name: text.replace("](RECORDS/", f"]({records_at}/") for name, text in made.items()}


def page(known: Standings, *, records_at: str) -> str:
    """A whole page, for who has none with text of their own."""
    titles = {**PARTS, "claims": "What the text claims", "root-steps": "Root steps to tolerance"}
    parts = ["# The paper's tables and figures, ours beside the paper's\n"]
    for name in (*sections(known, records_at=records_at), "figures"):
        title = titles.get(name, "Figures")
        parts.append(f"## {title}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->\n")
    return filled("\n".join(parts), sections(known, records_at=records_at))


def filled(text: str, made: Mapping[str, str]) -> str:
    r"""The text with each part put between its markers; a part without markers is left out.

    >>> filled("<!-- a:begin -->old<!-- a:end -->.", {"a": "new", "b": "not asked for"})
    '<!-- a:begin -->\nnew\n<!-- a:end -->.'
    """
    for name, content in made.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in text:
            continue
        before, rest = text.split(begin, 1)
        if end not in rest:
            raise InvalidInput(f"the page must hold {end} after {begin}")
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"
    return text


def relative(target: Path, start: Path) -> str:
    """The way from one folder to another, as a link has it."""
    return Path(os.path.relpath(target, start)).as_posix()


# -- tables ---------------------------------------------------------------------------------

Column = Callable[[Standing], str]


def table(part: str, chosen: Sequence[Standing], known: Standings) -> str:
    """Rows of one table as Markdown, with notes below; links lead to `RECORDS`."""
    columns: dict[str, Column] = {"data set, method, kappa": _name}
    columns |= {name: _figure(name) for name in ("Acc", "ACR", "ART")}
    if part == "table2":
        columns["change in ART"] = lambda one: _change(one, known)
    if part == "table6":
        columns["ms a step"] = _step
        columns["minutes in all"] = lambda one: _mean(one, lambda record: record.minutes, ".1f")
    if part == "table7":
        del columns["ACR"], columns["ART"]
        columns["radius"] = lambda one: one.row.at or _DASH
        columns["certified at it"] = _figure("certified")
    columns["paper"] = lambda one: _paper(one.row.published)
    if part == "table1":
        columns["ART to paper"] = _to_paper
    columns["n"] = lambda one: str(len(one.records)) if one.records else _DASH
    columns["hardware, minutes, commit"] = _made
    notes: list[str] = []
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for one in chosen:
        cells = [cell(one) for cell in columns.values()]
        cells[0] += _marks(one, notes)
        lines.append(f"| {' | '.join(cells)} |")
    below = [_READING[part], *(f"({place}) {note}." for place, note in enumerate(notes, start=1))]
    # Two spaces end a line in Markdown.
    return "\n".join([*lines, "", "  \n".join(below)])


_THREE = "Paper: Acc / ACR / ART"
_READING = {
    "table1": f"{_THREE}, its best run. `ART to paper`: to its mean of 7 where it has one.",
    "table2": f"{_THREE}, and its change in ART to Table 1.",
    "table5": f"{_THREE}, mean and standard deviation of its 7 runs.",
    "table6": f"{_THREE}, seconds a step, hours in all, on one V100. Ours: the median epoch's "
    "steps, and training without certification.",
    "table7": "Paper: Acc / certified accuracy at the radius.",
}


def _name(one: Standing) -> str:
    row = one.row
    text = f"{DATASETS.get(row.dataset, row.dataset)}, {row.label}, {row.kappa:g}"
    if not one.records:
        return text
    return f"[{text}](RECORDS/{one.records[0].folder.name})"


def _marks(one: Standing, notes: list[str]) -> str:
    """References to the notes of a row, which are added to `notes`."""
    mine = [one.row.differs] if one.row.differs else []
    mine += [shortened(record, one.row) for record in one.records]
    mine += [_SHARED for record in one.records if record.shared]
    places = []
    for note in dict.fromkeys(filter(None, mine)):
        if note not in notes:
            notes.append(note)
        places.append(f" ({notes.index(note) + 1})")
    return "".join(places)


_SHARED = "trained beside another run on the same GPU: such times are left out"


def shortened(record: Record, row: Row) -> str:
    """How many of the paper's epochs a run had; empty if all."""
    ours = record.experiment.settings.epochs
    whole = row.training.experiment(record.seed).settings.epochs
    if ours == whole:
        return ""
    return f"{ours} of the paper's {whole} epochs, warm-up and schedules in proportion"


def _figure(name: str) -> Column:
    """A column of one figure in per cent, with its spread over seeds."""

    def cell(one: Standing) -> str:
        values = [_read(record, name, one.row) for record in one.records]
        if not values:
            return _DASH
        found = metrics.spread(values)
        digits = _digits(found.mean)
        spread = "" if found.std is None else f" ± {found.std:.{digits}f}"
        return f"{found.mean:.{digits}f}{spread}"

    return cell


def _read(record: Record, name: str, row: Row) -> float:
    proven = record.certificates
    if name == "certified":
        assert row.at is not None
        return 100 * proven.certified_accuracy(number(row.at))
    return 100 * {"Acc": proven.accuracy, "ACR": proven.acr, "ART": proven.art}[name]


def _digits(value: float) -> int:
    """Decimals of a figure in per cent; standard training certifies next to nothing."""
    return 2 if value == 0 or abs(value) >= 0.05 else 4


def _art(one: Standing) -> float | None:
    return average([100 * record.certificates.art for record in one.records])


def _mean(one: Standing, read: Callable[[Record], float | None], form: str) -> str:
    found = average([read(record) for record in one.records])
    return _DASH if found is None else format(found, form)


def _step(one: Standing) -> str:
    return _mean(one, lambda record: record.step_seconds and 1e3 * record.step_seconds, ".2f")


def _change(one: Standing, known: Standings) -> str:
    """Difference in ART to the row of Table 1 with the same method and kappa."""
    other = known.get(one.row.id.replace("table2", "table1"))
    ours, before = _art(one), None if other is None else _art(other)
    return _DASH if ours is None or before is None else f"{ours - before:+.2f}"


def _to_paper(one: Standing) -> str:
    ours, theirs = _art(one), one.row.published.mean_art or one.row.published.art
    return _DASH if ours is None or theirs is None else f"{ours - theirs:+.2f}"


def _paper(published: Published) -> str:
    three = (published.accuracy, published.acr, published.art)
    cells = [_published(value) for value in three if value is not None]
    if published.spread is not None:
        cells = [f"{cell} ± {std:.2f}" for cell, std in zip(cells, published.spread, strict=True)]
    cells += [_published(value) for value in (published.certified,) if value is not None]
    if published.mean_art is not None:
        cells[-1] += f" (mean of 7: {published.mean_art:.2f})"
    cells += [f"{value:+.2f}" for value in (published.change,) if value is not None]
    cells += [f"{value:g} s" for value in (published.step_seconds,) if value is not None]
    cells += [f"{value:g} h" for value in (published.hours,) if value is not None]
    return " / ".join(cells) or _DASH


def _published(value: float) -> str:
    return f"{value:.2f}" if value >= 0.05 else f"{value:g}"


def _made(one: Standing) -> str:
    """Where the records were made, their mean time, and from which commits."""
    if not one.records:
        return f"missing: `{one.row.id}`"
    hardware = " and ".join(dict.fromkeys(record.hardware for record in one.records))
    commits = " and ".join(dict.fromkeys(_commit(record) for record in one.records))
    return f"{hardware}, {_mean(one, lambda record: record.minutes, '.1f')}, {commits}"


def _commit(record: Record) -> str:
    name = str(record.environment.get("commit") or "unknown")
    short = name.removesuffix("-modified")[:7]
    return short if name == short or not name.endswith("-modified") else f"{short}+"
