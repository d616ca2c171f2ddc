"""Soundness with millions of points: sampled and attacked points against every bound.

    python benchmarks/soak.py [--points N] [--seed S] [--out results/soak.json]

A round takes every case of `tests/rule_cases.py`, the small models and the full-width CNN7 with
as many points as the tests do (2,000 + 200, 20,000 + 2,000, 500 + 52), but with weights, boxes and
points of its own seed. Rounds follow until N points are reached. Exit status 1 if a point left.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the catalogue lives with the tests

from tests.rule_cases import (  # noqa: E402
    FAMILIES,
    MODELS,
    Case,
    Probe,
    model_subject,
    probe,
    subject,
)

import acert  # noqa: E402

# How far out of the bounds a point may be, relative to the largest magnitude met. Bounds that
# are safe against rounding get nothing.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "safe_real": 0.0, "safe_float32": 0.0}


@dataclass
class Tally:
    """What all probes of one group showed; a negative slack is a point outside."""

    cases: int = 0
    sampled: int = 0
    attacked: int = 0
    outside: list[str] = field(default_factory=list)
    worst_slack: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seed: int, result: Probe) -> None:
        self.cases += 1
        self.sampled += result.sampled
        self.attacked += result.attacked
        for kind, tolerance in TOLERANCES.items():
            slack = getattr(result, kind)
            self.worst_slack[kind] = min(slack, self.worst_slack.get(kind, slack))
            if slack < -tolerance:
                self.outside.append(f"{name}, {kind}, seed {seed}: {slack:.3g}")


def probes(seed: int) -> Iterator[tuple[str, str, Callable[[], Probe]]]:
    """One round: group, case, and what probes it."""
    for family, cases in FAMILIES.items():
        for case in cases:
            yield family, str(case), partial(probe_case, case, seed)
    for name in MODELS:
        yield name, name, partial(probe_model, name, seed)


def probe_case(case: Case, seed: int) -> Probe:
    return probe(subject(case, seed=seed), points=2_000, attacks=200)


def probe_model(name: str, seed: int) -> Probe:
    model = model_subject(name, seed=seed)
    if name != "cnn7":
        return probe(model, points=20_000, attacks=2_000)
    # Attacked in float32 and checked in both, because float64 convolutions take much longer.
    return probe(model, points=500, attacks=52, attack_dtype=torch.float32, chunk=50)


def soak(points: int, seed: int) -> dict[str, Tally]:
    """Rounds until `points` are reached, with progress on the way."""
    tallies: dict[str, Tally] = {}
    start, done, rounds = time.perf_counter(), 0, 0
    while done < points:
        group = None
        for name, case, run in probes(seed + rounds):
            if name != group:
                group = name
                now = f"{time.perf_counter() - start:6.0f} s  {done:>9,} points"
                print(f"{now}  round {rounds + 1}: {name}", flush=True)
            result = run()
            tallies.setdefault(name, Tally()).add(case, seed + rounds, result)
            done += result.sampled + result.attacked
        rounds += 1
    return tallies


def record(tallies: dict[str, Tally], seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "sampled": sum(tally.sampled for tally in tallies.values()),
        "attacked": sum(tally.attacked for tally in tallies.values()),
        "outside": sum(len(tally.outside) for tally in tallies.values()),
        "tolerance": TOLERANCES,
        "groups": {name: asdict(tally) for name, tally in tallies.items()},
        "versions": {
            "acert": acert.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Soundness with millions of points.")
    parser.add_argument("--points", type=int, default=4_000_000, help="at least this many")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "soak.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as the tests do
    result = record(soak(asked.points, asked.seed), asked.seed)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['sampled']:,} sampled and {result['attacked']:,} attacked points,", end=" ")
    print(f"{result['outside']} cases with a point outside; record in {asked.out.name}")
    return 1 if result["outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
