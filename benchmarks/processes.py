"""What joining other processes costs a step: the reductions of one process, over NCCL or gloo.

    torchrun --nproc-per-node=1 benchmarks/processes.py --device cuda
    torchrun --nproc-per-node=1 benchmarks/processes.py --device cpu --width 4 --epoch 2

The step of a trainer that has joined, compiled and captured with its reductions, beside the plain
one: the same network, batches and draws, losses compared step by step, times taken in turns. One
process reduces over itself, so this is the price of the messages without a wire.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring  # noqa: E402
from benchmarks.step import SHAPES, Case  # noqa: E402

from acert.cuda import written_tensors  # noqa: E402
from acert.precision import PRECISIONS  # noqa: E402
from acert.processes import ALONE, join, local_device  # noqa: E402
from acert.training import Trainer  # noqa: E402


def losses(one: Trainer, other: Trainer) -> Tensor:
    """The losses of both at each step of the first epoch, every step from the state of the first.

    Left alone, two runs that differ in their last digits drift apart within some twenty steps.
    """
    found = []
    for batch in one.batches(1):
        terms = []
        for trainer in (one, other):
            with trainer.arithmetic():
                terms.append(trainer._step(batch)[0].clone())
            trainer.step += 1
        found.append(torch.stack(terms))
        with torch.no_grad():
            for target, source in zip(written_tensors(other), written_tensors(one), strict=True):
                target.copy_(source)
    return torch.stack(found).cpu()


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shape", default="cifar10", choices=SHAPES, help="the data set whose shape images have")
    add("--width", default=64, type=int, help="CNN7's; 64 is the paper's")
    add("--batch-size", default=128, type=int)
    add("--precision", default="tf32", choices=PRECISIONS)
    add("--epoch", default=50, type=int, help="steps compared, and timed together")
    add("--repeats", default=7, type=int)
    add("--out", type=Path, help="default: results/processes-DEVICE.json")
    options = parser.parse_args(words)
    options.out = options.out or ROOT / "results" / f"processes-{options.device}.json"
    return options


def main(words: list[str] | None = None) -> None:
    options = parsed(words)
    device = torch.device(local_device(options.device))
    processes = join(device)
    if not processes.joined or processes.count > 1:
        sys.exit("start one process with `torchrun --nproc-per-node=1`")
    try:
        case = Case(
            method="acert", precision=options.precision, regularized=True, shape=options.shape,
            width=options.width, batch_size=options.batch_size, root_steps=2,
        )  # fmt: skip
        trainers = {
            "plain": case.trainer(device, options.epoch, processes=ALONE),
            "joined": case.trainer(device, options.epoch, processes=processes),
        }
        plain, joined = losses(trainers["plain"], trainers["joined"]).T
        seconds = measuring.in_turns(
            {name: trainer.run_epoch for name, trainer in trainers.items()},
            device,
            repeats=options.repeats,
        )
        difference = (joined - plain).abs() / plain.abs()
        parameters = sum(p.numel() for p in trainers["plain"].parameters)
        record: dict[str, Any] = {
            "shape": options.shape, "width": options.width, "batch_size": options.batch_size,
            "precision": options.precision, "steps": options.epoch,
            "ms": {
                name: 1e3 * statistics.median(values) / options.epoch
                for name, values in seconds.items()
            },
            "captured": {name: bool(trainer.captured) for name, trainer in trainers.items()},
            "first_loss_difference": float(difference[0]),
            "largest_loss_difference": float(difference.max()),
            "gradient_mib": 4 * parameters / 2**20,
            "environment": measuring.facts(device),
        }  # fmt: skip
        print(measuring.table([{"step": name, "ms": ms} for name, ms in record["ms"].items()]))
        print(
            f"relative difference of losses: first {difference[0]:.1e}, largest of "
            f"{options.epoch} {difference.max():.1e}"
        )
        measuring.write(options.out, record)
    finally:
        processes.leave()


if __name__ == "__main__":
    main()
