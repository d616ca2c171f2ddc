"""Other verifiers on an exported folder as it is: do they prove what is certified, and no more?

    python benchmarks/verifier.py nnenum DIR --python PATH     # runs it, writes record and docs
    python benchmarks/verifier.py --docs                       # writes the table of the docs alone

The first 100 digits of the test set and the shipped model, written by `acert export` at three
radii. What is certified in float32 at a radius must come out as proven, and what our attack breaks
as broken; between the two a verifier may say either. DIR is a checkout of the verifier, `--python`
an interpreter that has what it needs. The record keeps one entry a verifier; the exit status is 1
if one disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

import acert
from acert import cli, data
from acert.attack import attack_radius
from acert.experiments.environment import environment
from acert.experiments.paper.comparison import filled

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "results" / "verifier.json", ROOT / "docs" / "deploy.md"
RUN, IMAGES, RADII = "digits-acert", 100, ("2/255", "0.1", "0.2")
OUTWARD = 2.0**-22  # how far the written box may lie outside the exact one
SECONDS = 60  # a property

Verdicts = dict[int, str]


def crown(bench: Path, home: Path, python: str) -> Verdicts:
    """What alpha-beta-CROWN says of each property, in one process and with its own defaults."""
    config = bench.with_name("config.yaml")
    config.write_text(
        f"general:\n  device: cpu\n  root_path: {bench}\n  csv_name: instances.csv\n",
        encoding="utf-8",
    )
    words = [python, str(home / "complete_verifier" / "abcrown.py"), "--config", str(config)]
    done = subprocess.run(words, cwd=bench.parent, capture_output=True, text=True, check=True)
    return dict(crown_verdicts(done.stdout))


def crown_verdicts(output: str) -> Iterator[tuple[int, str]]:
    """Property and verdict from what alpha-beta-CROWN prints."""
    for part in output.split("Using vnnlib ")[1:]:
        named = re.match(r"vnnlib/prop_(\d+)\.vnnlib", part)
        result = re.search(r"^Result: (.+) in [\d.]+ seconds", part, re.MULTILINE)
        assert named is not None
        word = "" if result is None else result[1]
        verdict = "sat" if word.startswith("unsafe") else "unsat" if word.startswith("safe") else ""
        yield int(named[1]), verdict or f"undecided ({word})"


def nnenum(bench: Path, home: Path, python: str) -> Verdicts:
    """What nnenum says of each property, in a process of its own."""
    found = {}
    for line in (bench / "instances.csv").read_text(encoding="utf-8").splitlines():
        network, described, seconds = line.split(",")
        answer = bench.with_name("answer.txt")
        answer.unlink(missing_ok=True)
        subprocess.run(
            [python, "-m", "nnenum.nnenum", network, described, seconds, answer, "1"],
            cwd=bench, env=os.environ | {"PYTHONPATH": str(home / "src")},
            capture_output=True, check=True,
        )  # fmt: skip
        word = answer.read_text(encoding="utf-8").split()[0]
        place = int(described.removeprefix("vnnlib/prop_").removesuffix(".vnnlib"))
        found[place] = {"holds": "unsat", "violated": "sat"}.get(word, f"undecided ({word})")
    return found


VERIFIERS: dict[str, Callable[[Path, Path, str], Verdicts]] = {
    "alpha-beta-CROWN": crown,
    "nnenum": nnenum,
}
# Where a checkout says its version, and a package of its interpreter that matters most.
VERSIONS = {
    "alpha-beta-CROWN": ("complete_verifier/__init__.py", "torch"),
    "nnenum": ("pyproject.toml", "onnxruntime"),
}


def compared(
    verdicts: Verdicts, certified: list[float], attacked: list[float], radius: float
) -> dict[str, Any]:
    """How the verdicts on properties of one radius stand to what the library proves and breaks."""
    ours = {place: certified[place] >= radius + OUTWARD for place in verdicts}
    broken = {place: attacked[place] <= radius for place in verdicts}
    return {
        "properties": len(verdicts),
        "certified": sum(ours.values()),
        "attacked": sum(broken.values()),
        "unsat": sum(verdict == "unsat" for verdict in verdicts.values()),
        "sat": sum(verdict == "sat" for verdict in verdicts.values()),
        "certified_not_unsat": [k for k, v in verdicts.items() if ours[k] and v != "unsat"],
        "attacked_not_sat": [k for k, v in verdicts.items() if broken[k] and v != "sat"],
        "undecided": {k: v for k, v in verdicts.items() if v not in ("sat", "unsat")},
    }


def measured(name: str, home: Path, python: str) -> dict[str, Any]:
    """The record's entry of one verifier."""
    split = data.load_test("digits")
    images, labels = data.to_float(split.images[:IMAGES]), split.labels[:IMAGES]
    model, largest = acert.load_model(RUN), 1.01 * max(map(float, map(Fraction, RADII)))
    proven = acert.certified_radius(
        model, images, labels, max_radius=largest, arithmetic="float32"
    ).value.tolist()
    attacked = attack_radius(model, images, labels, max_radius=largest).radius.tolist()
    place, package = VERSIONS[name]
    told = re.search(r"version\w* *= *['\"](.+?)['\"]", (home / place).read_text(encoding="utf-8"))
    facts = environment(torch.device("cpu"), None)
    found: dict[str, Any] = {
        "version": None if told is None else told[1],
        "checkout": _output("git", "-C", str(home), "rev-parse", "--short", "HEAD"),
        package: _output(python, "-c", f"import {package}; print({package}.__version__)"),
        "hardware": f"{facts['cpu']}, 1 thread",
        "commit": facts["commit"],
        "radii": {},
    }
    for radius in RADII:
        with tempfile.TemporaryDirectory() as folder:
            bench = Path(folder, "bench")
            cli.main([
                "export", RUN, "--plain", "--vnnlib", str(bench), "--images", f"0:{IMAGES}",
                "--radius", radius, "--timeout", str(SECONDS),
            ])  # fmt: skip
            start = time.perf_counter()
            verdicts = VERIFIERS[name](bench, home.resolve(), python)
            seconds = time.perf_counter() - start
            asked = len((bench / "instances.csv").read_text(encoding="utf-8").splitlines())
        found["radii"][radius] = compared(verdicts, proven, attacked, float(Fraction(radius))) | {
            "asked": asked,
            "seconds": seconds,
        }
        print(name, radius, found["radii"][radius], flush=True)
    return found


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def failures(record: dict[str, Any]) -> list[str]:
    """Where a verifier and the library disagree, or a property was not answered for."""
    found = []
    for name, entry in record.items():
        for radius, one in entry["radii"].items():
            faults = {
                "certified, but not proven": one["certified_not_unsat"],
                "attacked, but not broken": one["attacked_not_sat"],
                "answered": one["properties"] if one["properties"] != one["asked"] else [],
            }
            found += [f"{name}, {radius}: {what}: {of}" for what, of in faults.items() if of]
    return found


def table(record: dict[str, Any]) -> str:
    """What the record says, as docs/deploy.md shows it."""
    rows = [
        "| verifier | radius | properties | certified here | proven there | attacked here "
        "| broken there | undecided |",
        "| --- |" + " --- |" * 7,
    ]
    for name, entry in sorted(record.items()):
        for radius, one in entry["radii"].items():
            rows.append(
                f"| {name} {entry['version']} | {radius} | {one['properties']} "
                f"| {one['certified']} | {one['unsat']} | {one['attacked']} | {one['sat']} "
                f"| {len(one['undecided'])} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("verifier", nargs="?", choices=VERIFIERS)
    parser.add_argument("home", nargs="?", type=Path, help="its checkout")
    parser.add_argument("--python", default=sys.executable, help="interpreter with its packages")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if not options.docs:
        torch.set_num_threads(1)
        found = measured(options.verifier, options.home, options.python)
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        RECORD.write_text(
            json.dumps(record | {options.verifier: found}, indent=1) + "\n", encoding="utf-8"
        )
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(
        filled(PAGE.read_text(encoding="utf-8"), {"verifier": table(record)}), encoding="utf-8"
    )
    faults = failures(record)
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
