"""One of several training processes: `process_worker.py RANK COUNT FOLDER STEPS DTYPE`.

Trains every method for some steps and leaves the terms of each step, the gradients of the last
and the running statistics in FOLDER.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from acert.data import Augmentation, Split
from acert.methods import METHODS
from acert.models import ibp_init_
from acert.processes import Processes
from acert.schedules import SmoothRadius
from acert.training import Settings, Trainer

SAMPLES, BATCH, CLASSES = 40, 12, 3  # the last batch of an epoch has 4


def trained(method: str, processes: Processes, *, steps: int, dtype: torch.dtype) -> dict:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    model = ibp_init_(model).to(dtype)
    images = torch.rand(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    split = Split(images, torch.arange(SAMPLES) % CLASSES)
    settings = Settings(
        method=METHODS[method](**({} if method == "standard" else {"kappa": 0.3})),
        max_radius=0.1, epochs=100, batch_size=BATCH, l1=1e-4,
        radius_schedule=SmoothRadius(start_epoch=2, length=20),
        augmentation=Augmentation(padding=1, flip=True),
    )  # fmt: skip
    trainer = Trainer(model, split, settings, processes=processes)
    # Data are float32; the step is made in the precision that is compared.
    images_of = trainer.images
    trainer.images = lambda batch: images_of(batch).to(dtype)  # type: ignore[method-assign]
    model.train()
    terms: list[list[float]] = []
    while len(terms) < steps:
        for batch in trainer.batches(1 + trainer.step // trainer.steps_per_epoch):
            scalars = trainer.scalars(trainer.step).to(dtype)
            terms.append(trainer.update(batch, scalars, regularize=True).tolist())
            trainer.step += 1
    gradients = [p.grad.flatten() for p in trainer.parameters if p.grad is not None]
    return {
        f"{method}/terms": np.array(terms[:steps]),
        f"{method}/gradient": torch.cat(gradients).numpy(),
        f"{method}/buffers": torch.cat([b.double().flatten() for b in model.buffers()]).numpy(),
        f"{method}/weights": torch.cat([p.detach().flatten() for p in model.parameters()]).numpy(),
    }


def all_methods(processes: Processes, *, steps: int, dtype: torch.dtype) -> dict:
    found: dict = {}
    for method in METHODS:
        found |= trained(method, processes, steps=steps, dtype=dtype)
    return found


if __name__ == "__main__":
    rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count
    )
    torch.set_num_threads(1)
    found = all_methods(
        Processes(rank=rank, count=count), steps=int(sys.argv[4]), dtype=getattr(torch, sys.argv[5])
    )
    np.savez(folder / f"rank{rank}.npz", **found)
    dist.destroy_process_group()
