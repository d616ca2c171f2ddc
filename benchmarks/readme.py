"""Writes all that README.md and docs/reproduction.md show of the records under results/.

python benchmarks/readme.py            # tables and pictures, from the records
python benchmarks/readme.py --check    # exit status 1 if a table or a picture is stale
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import digits_tradeoff  # noqa: E402

from acert.experiments.paper import drawings  # noqa: E402
from acert.experiments.paper.claims import Standings, trade_off_rows  # noqa: E402
from acert.experiments.paper.comparison import filled, standings, table  # noqa: E402
from acert.experiments.paper.publication import read_records  # noqa: E402

RESULTS, DOCS, README = ROOT / "results", ROOT / "docs", ROOT / "README.md"


def known_rows() -> Standings:
    found, complaints = read_records(RESULTS)
    assert not complaints, complaints
    return standings(found)


def results_table(known: Standings) -> str:
    """Table 1 as far as there are records."""
    chosen = [one for one in known.values() if one.row.part == "table1" and one.records]
    return table("table1", chosen, known).replace("](RECORDS/", "](results/")


def picture(known: Standings) -> str:
    """The trade-off on CIFAR-10 once both methods have two points there, before that on digits."""
    methods = [one.row.label for one in trade_off_rows(known) if one.records]
    if min(methods.count("ACERT"), methods.count("FastIBP")) >= 2:
        return (
            "![Accuracy against ACR on CIFAR-10](docs/figures/figure1-cifar10.png)\n\n"
            "CIFAR-10, all test images, radii up to 8.8/255; numbers beside points are kappa, the "
            "share of standard loss; thin lines join equal ART. "
            "[All of the paper's tables](docs/reproduction.md)."
        )
    return (
        "![Accuracy against robustness on digits](docs/digits.png)\n\n"
        "Three seeds, `python examples/digits.py --seeds 3`; one seed alone moves by a point or "
        "two of ART."
    )


def speed_table() -> str:
    rows = [
        "| network, hardware, batch | forward, ms | bound pass | elided margin | auto_LiRPA's | "
        "certified radius, ms an image | memory of a bound pass | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted((ROOT / "results").glob("bounds-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for network in ("cnn7", "small_resnet"):
            found = record[network]
            forward = found["forward"]

            def times(subject: str, found: dict = found, forward: dict = forward) -> str:  # type: ignore[type-arg]
                if subject not in found:
                    return "-"
                return f"{found[subject]['seconds'] / forward['seconds']:.2f}x"

            radius = 1e3 * found["certified radius"]["seconds"] / record["certified"]
            memory = found["bound pass"]["peak_bytes"] / forward["peak_bytes"]
            rows.append(
                f"| {network}, {record['hardware']}, {record['batch']} | "
                f"{1e3 * forward['seconds']:.1f} | {times('bound pass')} | "
                f"{times('elided margin')} | {times('auto_LiRPA elided margin')} | "
                f"{radius:.1f} | {memory:.2f}x | {record['commit'][:7]} |"
            )
    return "\n".join(rows)


def pages(known: Standings) -> dict[Path, str]:
    """Both pages as they should be."""
    text = README.read_text(encoding="utf-8")
    made = {
        "picture": picture(known),
        "results": results_table(known),
        "speed": speed_table(),
    }
    return {
        README: filled(text, made),
        DOCS / drawings.PAGE: drawings.rendered(known, RESULTS, DOCS),
    }


def pictures(known: Standings) -> dict[Path, object]:
    """Every picture with the numbers that it should show."""
    shown: dict[Path, object] = {
        DOCS / drawings.PICTURES / f"{name}.png": drawings.figure_numbers(known, name)
        for name in drawings.figure_names(known)
    }
    return shown | {digits_tradeoff.PICTURE: digits_tradeoff.numbers()}


def stale() -> list[str]:
    """What does not show the records as they are."""
    known = known_rows()
    old = [path for path, text in pages(known).items() if path.read_text("utf-8") != text]
    for path, numbers in pictures(known).items():
        if not path.is_file() or drawings.stamped(path) != json.loads(json.dumps(numbers)):
            old.append(path)
    return [str(path.relative_to(ROOT)) for path in old]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        print("\n".join(stale()))
        return int(bool(stale()))
    drawings.render(RESULTS, DOCS)
    digits_tradeoff.draw()
    known = known_rows()
    for path, text in pages(known).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
