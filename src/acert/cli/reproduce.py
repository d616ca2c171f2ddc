"""`acert reproduce`: the paper's tables and figures, row by row."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from acert import records
from acert.cli.flags import Parser, add_place, add_verb, as_duration, chosen_device
from acert.errors import InvalidInput
from acert.experiments.budget import spoken
from acert.experiments.paper.drawings import render
from acert.experiments.paper.publication import read_records
from acert.experiments.paper.reproduction import Job, jobs, reproduce
from acert.experiments.paper.row import Row
from acert.experiments.paper.rows import find, selected
from acert.experiments.paper.standing import Standing, standing
from acert.experiments.preparation import check_seed
from acert.untrusted import shown

__all__ = ["add"]

_EXAMPLES = """examples:
  acert reproduce --list                        every row: done, missing or needs data
  acert reproduce --list table1 -v              with the commands that make them
  acert reproduce cifar10 --budget 25m --data-dir ~/data --out runs   the worthiest that fit
  acert reproduce --rows table1/mnist/acert-k0 --data-dir ~/data --out runs
  acert reproduce --print table1/mnist/acert-k0
  acert reproduce --render --out docs           tables and figures from the records
"""


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "reproduce", _reproduce, summary="make the paper's tables and figures",
        examples=_EXAMPLES,
        description="Run the rows of the paper's tables and figures that have no record yet, "
        "worthiest first, and show ours beside the paper's.",
    )  # fmt: skip
    add = parser.add_argument
    add("which", nargs="*", metavar="WHICH", help="tables, figures or data sets (default: all)")
    add("--list", action="store_true", help="print how each row stands and stop")
    add("-v", "--verbose", action="store_true", help="with --list: the commands of each row too")
    add("--print", metavar="ROW", help="print the commands that make a row and stop")
    add("--render", action="store_true", help="write tables and figures from the records and stop")
    add("--rows", help="these rows alone, by their ids, between commas")
    add("--seeds", help="these seeds, between commas (default: those of each row)")
    add("--epochs", type=int, help="fewer than the recipe's, schedules in proportion; counts as "
        "done for TinyImageNet alone")  # fmt: skip
    add("--budget", type=as_duration, help="time to keep to, such as 90s, 25m or 2h")
    add("--results", type=Path, default=Path("results"), help="records (default: results)")
    add("--out", type=Path, help="run folders (default: runs); with --render, the page and its "
        "figures (default: docs)")  # fmt: skip
    add_place(parser)
    return parser


def _reproduce(options: argparse.Namespace) -> int:
    options.seeds = _seeds(options.seeds)
    if options.epochs is not None and options.epochs < 1:
        raise InvalidInput(f"`--epochs` must be at least 1; got {options.epochs}")
    if options.verbose and not options.list:
        raise InvalidInput("`--verbose` must come with `--list`")
    if options.render and (options.which or options.rows is not None):
        raise InvalidInput("`--render` writes all rows: leave tables, figures and `--rows` out")
    if options.print is not None:
        _print_commands(find(options.print), options)
        return 0
    rows = selected(options.which)
    if options.rows is not None:
        asked = [find(name.strip()) for name in options.rows.split(",")]
        outside = [row.id for row in asked if row not in rows]
        if outside:
            raise InvalidInput(
                f"`--rows` must be of {', '.join(options.which)}; got {', '.join(outside)}"
            )
        rows = asked
    if options.list:
        _list(rows, options)
        return 0
    if options.render:
        _render(options.results, options.out or Path("docs"))
        return 0
    return _run(rows, options)


def _run(rows: list[Row], options: argparse.Namespace) -> int:
    device, out = chosen_device(options.device), options.out or Path("runs")
    found, complaints = read_records(options.results)
    for complaint in complaints:
        print(shown(f"skipped: {complaint}"))
    wanted = jobs(rows, found, seeds=options.seeds, epochs=options.epochs)
    if not wanted:
        print("nothing is missing")
        return 0
    # Before the work, not after it; records have no folder before the first of them.
    for place in (out, options.results):
        if place == out or place.exists():
            records.make_writable(place)
    outcome = reproduce(
        wanted, results=options.results, out=out, data_dir=options.data_dir, device=device,
        budget=options.budget, say=_say,
    )  # fmt: skip
    if options.budget is not None and len(outcome.left) == len(wanted):
        raise InvalidInput(f"`--budget` must do for one run at least; got {spoken(options.budget)}")
    _render(options.results, out)
    for line in outcome.failed:
        print(shown(f"failed: {line}"))
    if outcome.left:
        print(f"left for another call: {', '.join(outcome.left)}")
    return 1 if outcome.failed else 0


def _say(line: str) -> None:
    # At once: a run takes minutes, and the output may be a pipe.
    print(shown(line), flush=True)


def _render(results: Path, out: Path) -> None:
    written, notes = render(results, out)
    for note in notes:
        print(shown(note))
    print(f"wrote {written[0]}" + (f" and {len(written) - 1} pictures" if written[1:] else ""))


def _list(rows: list[Row], options: argparse.Namespace) -> None:
    found, complaints = read_records(options.results)
    for complaint in complaints:
        print(shown(f"skipped: {complaint}"))
    if not found and not complaints:
        print(shown(f"no record under {options.results}: `--results` names their folder"))
    width = max(len(row.id) for row in rows)
    print(f"{'row':<{width}}  {'state':<10}  {'n':>3}  {'ART paper':>9}  {'ours':>6}")
    for row in rows:
        print(_line(standing(row, found, options.data_dir), width))
        if options.verbose:
            _print_commands(row, options)


def _line(one: Standing, width: int) -> str:
    published = one.row.published.art
    arts = [record.certificates.art for record in one.records]
    seeds = f"{len(one.row.seeds) - len(one.missing)}/{len(one.row.seeds)}"
    paper = "-" if published is None else f"{published:.2f}"
    ours = f"{100 * sum(arts) / len(arts):.2f}" if arts else "-"
    return f"{one.row.id:<{width}}  {one.state:<10}  {seeds:>3}  {paper:>9}  {ours:>6}"


def _print_commands(row: Row, options: argparse.Namespace) -> None:
    for seed in options.seeds or row.seeds:
        short = None if options.epochs == row.training.recipe_epochs else options.epochs
        job = Job(row=row, seed=seed, epochs=short)
        train, certify = job.commands(options.out or Path("runs"))
        place = "DATA" if options.data_dir is None else str(options.data_dir)
        words = [[place if word == "DATA" else word for word in part] for part in (train, certify)]
        print(f"{shlex.join(words[0])} && {shlex.join(words[1])}")


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(
            f"`--seeds` must be whole numbers between commas; got {text!r}"
        ) from None
    for seed in seeds:
        check_seed(seed)
    return seeds
