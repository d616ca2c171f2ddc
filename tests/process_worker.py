"""One of several training processes: `process_worker.py RANK COUNT FOLDER METHODS STEPS DTYPE`.

Trains each method for some steps, from the state in FOLDER if there is one, and leaves there the
terms of each step, the last gradient, the running statistics, the weights and its own state.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from acert.data import Augmentation, Split
from acert.losses import Phase
from acert.methods import METHODS
from acert.models import ibp_init_
from acert.processes import ALONE, Processes
from acert.schedules import SmoothRadius
from acert.settings import Settings
from acert.training import Trainer

SAMPLES, BATCH, CLASSES = 40, 12, 3  # the last batch of an epoch has 4


def made(method: str, processes: Processes, dtype: torch.dtype) -> Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    model = ibp_init_(model).to(dtype)
    images = torch.rand(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    settings = Settings(
        method=METHODS[method](**({} if method == "standard" else {"kappa": 0.3})),
        max_radius=0.1, epochs=100, batch_size=BATCH, l1=1e-4,
        radius_schedule=SmoothRadius(start_epoch=2, length=6),
        augmentation=Augmentation(padding=1, flip=True),
    )  # fmt: skip
    split = Split(images, torch.arange(SAMPLES) % CLASSES)
    trainer = Trainer(model, split, settings, processes=processes)
    # Data are float32; the step is made in the precision that is compared.
    images_of = trainer.images
    trainer.images = lambda batch: images_of(batch).to(dtype)  # type: ignore[method-assign]
    model.train()
    return trainer


def train(trainer: Trainer, steps: int, dtype: torch.dtype) -> list[list[float]]:
    """The terms of the next steps."""
    terms: list[list[float]] = []
    while len(terms) < steps:
        epoch, start = divmod(trainer.step, trainer.steps_per_epoch)
        batch = next(iter(trainer.batches(1 + epoch, start)))
        scalars = trainer.scalars(trainer.step).to(dtype)
        terms.append(trainer.update(batch, scalars, phase=Phase(regularize=True)).tolist())
        trainer.step += 1
    return terms


def figures(trainer: Trainer, terms: list[list[float]]) -> dict[str, np.ndarray]:
    gradients = [p.grad.flatten() for p in trainer.parameters if p.grad is not None]
    tensors = trainer.model.state_dict().values()
    return {
        "terms": np.array(terms),
        "gradient": torch.cat(gradients).numpy(),
        "weights": torch.cat([value.detach().double().flatten() for value in tensors]).numpy(),
    }


def alone(method: str, steps: int, dtype: torch.dtype) -> dict[str, np.ndarray]:
    trainer = made(method, ALONE, dtype)
    return figures(trainer, train(trainer, steps, dtype))


if __name__ == "__main__":
    rank, count, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
    folder, methods, dtype = Path(sys.argv[3]), sys.argv[4], getattr(torch, sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'meeting{count}'}", rank=rank, world_size=count
    )
    processes = Processes(rank=rank, count=count, joined=True)
    for method in methods.split(","):
        trainer = made(method, processes, dtype)
        if (folder / f"{method}.state").is_file():
            trainer.restore(*torch.load(folder / f"{method}.state"))
        found = figures(trainer, train(trainer, steps, dtype))
        np.savez(folder / f"{method}-{rank}.npz", **found)  # type: ignore[arg-type]
        dist.barrier()
        if rank == 0:
            torch.save(trainer.state(), folder / f"{method}.state")
    dist.destroy_process_group()
    # All is written, and Gloo's threads have been seen to abort a process at its end.
    os._exit(0)
