"""Made-up records of the paper's rows: no training, as many samples as its test sets have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from acert import records
from acert.experiments.experiment import to_config
from acert.experiments.paper.publication import write_root_steps
from acert.experiments.paper.root_steps import RootSteps
from acert.experiments.paper.row import Training

CLASSES = 10


def made_run(
    folder: Path,
    training: Training,
    *,
    seed: int = 0,
    epochs: int | None = None,
    accuracy: float = 0.6,
    share: float = 0.7,
    samples: int = 10_000,
    seconds: float = 2.0,
    steps_per_epoch: int = 391,
    steps: RootSteps | None = None,
    environment: dict[str, Any] | None = None,
    certificates: dict[str, Any] | None = None,
) -> Path:
    """A finished, certified run folder; `share` of eps_max is the largest radius of a sample."""
    folder.mkdir(parents=True)
    experiment = training.experiment(seed, epochs=epochs)
    facts = {"name": training.dataset, "classes": [str(i) for i in range(CLASSES)]}
    records.write_config(folder, {"experiment": to_config(experiment), "data": facts})
    rows = [
        {
            "epoch": epoch,
            "step": epoch * steps_per_epoch,
            "loss": 1 / 3 + seed,
            "seconds": seconds + (30.0 if epoch == 1 else 0.0),
        }
        for epoch in range(1, experiment.settings.epochs + 1)
    ]
    records.write_metrics(folder, rows)
    known = {
        "commit": "0123456789abcdef", "device": "cuda", "cpu": "a CPU", "gpu": "a GPU",
        "seconds": 600.0, "certification_seconds": 40.0,
        "command": "acert train --data-dir my/data --out x",
    }  # fmt: skip
    records.write_environment(folder, known | (environment or {}))
    rng = np.random.default_rng(seed)
    right = np.arange(samples) < accuracy * samples
    largest = training.max_radius
    radius = np.where(right, share * largest * rng.random(samples), 0.0)
    label = np.arange(samples) % CLASSES
    columns = {
        "index": np.arange(samples), "label": label,
        "prediction": np.where(right, label, (label + 1) % CLASSES),
        "radius": radius, "status": np.where(right, 2, 0), "margin": np.where(right, -1.0, 1.0),
        "attack_radius": np.full(samples, np.nan), "max_radius": largest, "arithmetic": "real",
        "bounds": "ibp", "elide": True, "domain": (0.0, 1.0),
    }  # fmt: skip
    records.write_certificates(folder, columns | (certificates or {}))
    images = np.zeros((16, 3, 32, 32), dtype=np.uint8)
    index = np.arange(16)
    records.write_examples(
        folder,
        {"most_images": images, "most_index": index, "least_images": images, "least_index": index},
    )
    if steps is not None:
        write_root_steps(folder, steps)
    records.write_weights(folder, {"weight": np.zeros(3, dtype=np.float32)})
    records.write_local(folder, {"data_dir": "/somewhere/private"})
    return folder
