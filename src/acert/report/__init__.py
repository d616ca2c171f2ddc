"""Tables, figures and a page to explore, from run folders alone.

>>> from acert.report import collect, write_report
>>> collection = collect([Path("runs/digits")])  # doctest: +SKIP
>>> write_report(collection, Path("report"))  # doctest: +SKIP

| module | lives there |
| --- | --- |
| `run.py`, `certification.py` | a run folder as a value |
| `group.py` | runs that differ by their seeds, as one |
| `collection.py` | which runs are there, and may stand in one plot |
| `figures.py`, `tables.py` | for papers: Matplotlib, Markdown, LaTeX |
| `content.py`, `page.py`, `template/` | the page |
| `writing.py` | all of it as files |
"""

from acert.report.certification import Attack, Certification, Examples
from acert.report.collection import Collection, check_comparable, collect, read_runs
from acert.report.group import Band, Group, Series, group_runs, series_of, smallest_kappa
from acert.report.page import page
from acert.report.run import METHOD_NAMES, Environment, Run, Track, read_run
from acert.report.tables import latex_table, markdown_table
from acert.report.writing import write_figures, write_page, write_report

__all__ = [
    "METHOD_NAMES",
    "Attack",
    "Band",
    "Certification",
    "Collection",
    "Environment",
    "Examples",
    "Group",
    "Run",
    "Series",
    "Track",
    "check_comparable",
    "collect",
    "group_runs",
    "latex_table",
    "markdown_table",
    "page",
    "read_run",
    "read_runs",
    "series_of",
    "smallest_kappa",
    "write_figures",
    "write_page",
    "write_report",
]
