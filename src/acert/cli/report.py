"""`acert report`: a page, figures and tables from run folders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from acert.cli.flags import Parser, add_verb, as_number
from acert.report import collect, write_figures, write_page

__all__ = ["add"]

_EXAMPLES = """examples:
  acert report runs/digits --out report         all runs below a folder; open report/index.html
  acert report runs results --dataset mnist     of several data sets, one
  acert report runs --max-radius 8/255 --bounds ibp
"""


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "report", _report, summary="make a page, figures and tables", examples=_EXAMPLES,
        description="Collect run folders into one page to explore, figures fit for a paper (SVG, "
        "PNG) and tables (Markdown, LaTeX). A damaged run is named and skipped; runs that cannot "
        "be compared are refused. An earlier report in the folder is replaced.",
    )  # fmt: skip
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="folders of run folders, or run folders")
    add("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    add("--dataset", help="only runs of this data set")
    add("--max-radius", type=as_number, help="only runs certified up to this radius")
    add("--bounds", help="only runs certified with these bounds")
    add("--arithmetic", help="only runs certified in this arithmetic")
    return parser


def _report(options: argparse.Namespace) -> None:
    collection = collect(
        options.runs, dataset=options.dataset, max_radius=options.max_radius,
        bounds=options.bounds, arithmetic=options.arithmetic,
    )  # fmt: skip
    for line in (*collection.complaints, *collection.alarms):
        print(line, file=sys.stderr)
    print(collection.summary)
    written = write_page(collection, options.out)
    try:
        written += write_figures(collection, options.out / "figures")
    except ModuleNotFoundError as error:
        print(f"no figures: they need the package {error.name}", file=sys.stderr)
    for path in written:
        print(f"wrote {path}")
