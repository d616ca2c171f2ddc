"""Writes the tables of README.md from the records under results/.

python benchmarks/readme.py            # rewrite
python benchmarks/readme.py --check    # exit status 1 if README.md is stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from acert import records
from acert.evaluation import Certificates

ROOT = Path(__file__).parent.parent
# Table 1 of the paper: Acc, ACR, ART of one run each.
PAPER = {("mnist", "Acert"): (98.42, 95.01, 96.69), ("mnist", "FastIBP"): (97.61, 94.69, 96.13)}


def results_table() -> str:
    rows = [
        "| data, method, kappa | Acc | ACR | ART | paper's Acc / ACR / ART | n | "
        "trained on, minutes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for folder in sorted(path.parent for path in (ROOT / "results").glob("*/certificates.npz")):
        experiment = records.read_config(folder)["experiment"]
        environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        method, dataset = experiment["settings"]["method"], experiment["dataset"]
        found = Certificates(**records.read_certificates(folder))
        figures = [100 * figure for figure in (found.accuracy, found.acr, found.art)]
        paper = PAPER.get((dataset, method["class"]))
        hardware = environment.get("gpu", environment["cpu"])
        rows.append(
            f"| [{dataset}, {method['class']}, {method['kappa']:g}](results/{folder.name}) | "
            + " | ".join(f"{figure:.2f}" for figure in figures)
            + f" | {' / '.join(f'{figure:.2f}' for figure in paper) if paper else '-'} | 1 | "
            + f"{hardware}, {environment['seconds'] / 60:.1f} |"
        )
    return "\n".join(rows)


def speed_table() -> str:
    rows = [
        "| network, hardware, batch | forward, ms | bound pass | elided margin | auto_LiRPA's | "
        "certified radius, ms an image | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
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
                f"{radius:.1f} | {memory:.2f}x |"
            )
    return "\n".join(rows)


def filled(text: str) -> str:
    for name, table in (("results", results_table()), ("speed", speed_table())):
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = before + begin + table + "\n" + end + rest.split(end)[1]
    return text


def main() -> int:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        return int(filled(text) != text)
    path.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
