"""The picture of digits from a committed record, and the record from finished runs.

python examples/digits.py --seeds 3 --out demo     # trains, certifies
python benchmarks/digits_tradeoff.py demo/runs     # collects the runs into the record

The record is results/digits-tradeoff.npz: the radius and the status of every test image, a row a
run. `python benchmarks/readme.py` draws docs/digits.png from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `examples` is, if this is run as a script

from examples import digits  # noqa: E402

from acert import metrics, records  # noqa: E402
from acert.evaluation import Certificates  # noqa: E402

RECORD = ROOT / "results" / "digits-tradeoff.npz"
PICTURE = ROOT / "docs" / "digits.png"
KEPT = ("commit", "acert", "python", "torch", "system", "cpu", "cores", "threads")


def collected(runs: Path) -> dict[str, npt.NDArray[Any]]:
    folders = sorted(path.parent for path in runs.glob("*/certificates.npz"))
    found = [records.read_certificates(folder) for folder in folders]
    settings = [records.read_config(folder)["experiment"]["settings"] for folder in folders]
    environment = records.read_environment(folders[0])
    facts = {name: environment.get(name) for name in KEPT}
    facts["command"] = "python examples/digits.py --seeds 3"
    return {
        "method": np.array([one["method"]["class"].lower() for one in settings]),
        "kappa": np.array([one["method"]["kappa"] for one in settings]),
        "seed": np.array([one["seed"] for one in settings], dtype=np.uint8),
        "radius": np.stack([one["radius"] for one in found]).astype(np.float32),
        "status": np.stack([one["status"] for one in found]),
        "max_radius": np.array(found[0]["max_radius"]),
        "environment": np.array(json.dumps(facts)),
    }


def points(path: Path = RECORD) -> list[digits.Point]:
    with np.load(path, allow_pickle=False) as archive:
        record = {name: archive[name] for name in archive.files}
    largest = float(record["max_radius"])
    made: dict[tuple[str, float], list[Certificates]] = {}
    for row in np.lexsort((record["seed"], record["kappa"], record["method"])):
        radius, status = record["radius"][row].astype(np.float64), record["status"][row]
        count = len(radius)
        nothing = np.zeros(count, dtype=np.int64)
        certificates = Certificates(
            index=np.arange(count), label=nothing, prediction=nothing,
            radius=np.where(status == 1, largest, radius), status=status,
            margin=np.zeros(count, dtype=np.float32),
            attack_radius=np.full(count, np.nan, dtype=np.float32),
            max_radius=largest, arithmetic="real", bounds="ibp",
        )  # fmt: skip
        key = str(record["method"][row]), float(record["kappa"][row])
        made.setdefault(key, []).append(certificates)
    return [digits.Point(*key, certificates, 0.0) for key, certificates in made.items()]


def numbers(path: Path = RECORD) -> dict[str, list[list[float]]]:
    """What the picture shows: of every run accuracy, ACR and nine points of its curve."""
    shown: dict[str, list[list[float]]] = {}
    for point in points(path):
        for one in point.certificates:
            curve = metrics.certified_accuracy_curve(
                one.radius, one.correct, max_radius=one.max_radius, points=9
            )
            figures = [one.accuracy, one.acr, *curve.accuracy]
            rounded = [round(float(figure), 4) for figure in figures]
            shown.setdefault(f"{point.method}, {point.kappa:g}", []).append(rounded)
    return shown


def draw(path: Path = PICTURE) -> None:
    from acert.experiments.paper.drawings import stamp

    digits.picture(points(), path)
    stamp(path, numbers())


def main() -> None:
    np.savez_compressed(RECORD, **collected(Path(sys.argv[1])))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
