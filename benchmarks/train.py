"""Time from the command to a finished model, with its ART.

    python benchmarks/train.py --device cuda --dataset cifar10 --data-dir data [--precision float16]

Trains a recipe on all training images without validation, then certifies the test set. The clock
starts with the process: imports, data and checks are one figure (ready), with compilation and the
first step another, training from there to the last step the third, certification the fourth. Every
run is appended to the record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, final

BEGAN = time.time()
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

import torch  # noqa: E402
from benchmarks import measuring  # noqa: E402

from acert import data  # noqa: E402
from acert.evaluation import certify  # noqa: E402
from acert.experiments.choice import chosen_experiment  # noqa: E402
from acert.experiments.progress import Progress  # noqa: E402
from acert.experiments.run import train_run  # noqa: E402
from acert.methods import METHODS, Acert  # noqa: E402
from acert.precision import PRECISIONS  # noqa: E402
from acert.settings import Settings  # noqa: E402
from acert.training import Trainer  # noqa: E402


def process_start() -> float:
    """When this process was started, in seconds since 1970; when this file was, where unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return BEGAN


@final
class Watch(Progress):
    """When all was ready, when the first step was done and when the last; speaks now and then."""

    def __init__(self) -> None:
        self.ready = 0.0
        self.first: float | None = None
        self.last = 0.0
        self.steps = self.epochs = 0
        self.compiled = False

    def start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.ready = time.time()

    def step(self, step: int) -> None:
        if self.first is None:
            measuring.synchronize(self.trainer.device)
            self.first = time.time()
        self.steps = step

    def epoch(self, row: Any) -> None:
        self.last = time.time()
        self.epochs += 1
        if self.epochs % 10 == 0 or self.epochs == self.trainer.settings.epochs:
            print(
                f"epoch {row['epoch']}, {row['seconds']:.2f} s, loss {row['loss']:.4f}", flush=True
            )

    def close(self) -> None:
        self.compiled = self.trainer.device.type == "cuda" and self.trainer.captured is not None


def run(options: argparse.Namespace, folder: Path, began: float) -> dict[str, Any]:
    """One training with its certification; the run folder stays where the caller wants it."""
    changes = [] if options.precision is None else [f"precision={options.precision}"]
    experiment = chosen_experiment(
        dataset=options.dataset, method=options.method, kappa=options.kappa,
        epochs=options.epochs, seed=options.seed, changes=[*changes, *options.set],
        train_on_all=True,
    )  # fmt: skip
    settings, watch = experiment.settings, Watch()
    done = train_run(
        experiment, out=folder, data_dir=options.data_dir, device=options.device, progress=watch,
        command=["python", *sys.argv],
    )  # fmt: skip
    finished = time.time()
    assert watch.first is not None
    found: dict[str, Any] = {
        "dataset": options.dataset, "method": options.method, "kappa": settings.method.kappa,
        "precision": settings.precision, "epochs": settings.epochs, "seed": settings.seed,
        "batch_size": settings.batch_size, "captured": watch.compiled,
        "solver": _solver(settings), "optimizer": type(settings.optimizer).__name__,
        "ready_s": watch.ready - began,
        "first_step_s": watch.first - began,
        "training_s": watch.last - watch.first,
        "epoch_s": statistics.median(row["seconds"] for row in done.history),
        "writing_s": finished - watch.last,
    }  # fmt: skip
    split = data.load_test(experiment.dataset, data_dir=options.data_dir).to(options.device)
    if options.images is not None:
        split = data.Split(split.images[: options.images], split.labels[: options.images])
    certificates = None

    def certified() -> None:
        nonlocal certificates
        certificates = certify(
            done.model, split, max_radius=settings.max_radius, domain=settings.domain,
            elide=settings.elide, batch_size=options.certify_batch,
        )  # fmt: skip

    found["certify_s"] = measuring.timed(certified, options.device)
    assert certificates is not None
    found["certified"] = len(split)
    names = ("accuracy", "acr", "art")
    return found | {name: 100 * getattr(certificates, name) for name in names}


def _solver(settings: Settings) -> str | None:
    method = settings.method
    if not isinstance(method, Acert):
        return None
    return f"{type(method.solver).__name__}, {method.solver.max_steps} root steps"


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    add("--dataset", default="cifar10", choices=data.NAMES)
    add("--method", default="acert", choices=METHODS)
    add("--kappa", type=float, help="share of standard loss (default: 0)")
    add("--precision", choices=PRECISIONS, help="default: the recipe's")
    add("--epochs", type=int, help="default: the recipe's; schedules are scaled with it")
    add("--seed", default=0, type=int)
    add("--set", default=[], action="append", metavar="NAME=VALUE", help="any field of the recipe")
    add("--data-dir", help="where the data set lies")
    add("--images", type=int, help="test images to certify, from the first on (default: all)")
    add("--certify-batch", type=int, help="default: the library's")
    add("--keep", type=Path, help="run folder to keep; default: none is left")
    add("--out", type=Path, help="default: results/train-DEVICE.json")
    options = parser.parse_args(words)
    options.out = options.out or ROOT / "results" / f"train-{options.device.type}.json"
    return options


def main(words: list[str] | None = None, *, began: float | None = None) -> None:
    options = parsed(words)
    began = time.time() if began is None else began
    with tempfile.TemporaryDirectory() as scratch:
        found = run(options, options.keep or Path(scratch) / "run", began)
    record: dict[str, Any] = {"runs": []}
    if options.out.is_file():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    record["runs"].append(found | {"environment": measuring.facts(options.device)})
    print("\n" + measuring.table([found]))
    measuring.write(options.out, record)


if __name__ == "__main__":
    main(began=process_start())
