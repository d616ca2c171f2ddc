"""Run folders with made-up records, for the tests of the report: no training, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from acert import records


def make_run(
    folder: Path,
    *,
    method: str = "Acert",
    kappa: float = 0.0,
    seed: int = 0,
    dataset: str = "digits",
    max_radius: float = 0.3,
    epochs: int = 4,
    samples: int = 40,
    classes: int = 4,
    certified: bool = True,
    attacked: bool = False,
    arrays: bool = False,
    pictures: tuple[int, ...] | None = (1, 8, 8),
    names: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """Writes a run folder; `facts` replace columns and values of its certificates."""
    rng = np.random.default_rng([seed, int(1000 * kappa), len(method)])
    chosen: dict[str, Any] = {
        "class": "Settings",
        "method": {"class": method, "kappa": kappa},
        "max_radius": max_radius,
        "epochs": epochs,
        "radius_schedule": {"class": "SmoothRadius", "start_epoch": 2, "length": 2},
        "seed": seed,
    }
    if method == "Acert":
        chosen["method"]["solver"] = {"class": "Brent", "max_steps": 2}
    chosen |= settings or {}
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"settings": chosen, "model": "Net"}
    if not arrays:
        config = {"experiment": {"class": "Experiment", "dataset": dataset, "settings": chosen}}
    listed = names or [str(i) for i in range(classes)]
    records.write_config(folder, config | {"data": {"name": "arrays", "classes": listed}})
    rows = [
        {"epoch": epoch, "step": 9 * epoch, "loss": 2 / epoch + 0.1 * seed, "seconds": 1.0,
         "train_accuracy": 1 - 0.5 / epoch, "radius_cap": max_radius * epoch / epochs}
        | ({"accuracy": 0.8, "acr": 0.5, "art": 0.6} if epoch % 2 == 0 else {})
        for epoch in range(1, epochs + 1)
    ]  # fmt: skip
    records.write_metrics(folder, rows)
    records.write_environment(
        folder, {"cpu": "EPYC", "cores": 2, "commit": "c0ffee0123456789", "acert": "0.1.0",
                 "seconds": 61.5}
    )  # fmt: skip
    if certified:
        columns = certificates(rng, samples, classes, max_radius, attacked) | facts
        wrong, label = columns["status"] == 0, columns["label"]
        columns["prediction"] = np.where(wrong, (label + 1) % classes, label)
        records.write_certificates(folder, columns)
        if pictures is not None:
            images = rng.integers(0, 256, (16, *pictures)).astype(np.uint8)
            order = np.argsort(columns["radius"])
            records.write_examples(
                folder, {"most_index": order[::-1][:16], "most_images": images,
                         "least_index": order[:16], "least_images": images[::-1]}
            )  # fmt: skip
    return folder


def certificates(
    rng: np.random.Generator, samples: int, classes: int, max_radius: float, attacked: bool
) -> dict[str, Any]:
    """Columns with every status: wrong, proven throughout, and a root between."""
    status = rng.choice([0, 1, 2, 2, 2], samples).astype(np.uint8)
    status[:3] = (0, 1, 2)
    roots = records.rounded_down(rng.uniform(0.01, 0.9, samples) * max_radius).astype(np.float64)
    radius = np.select([status == 0, status == 1], [0.0, max_radius], roots)
    label = np.arange(samples) % classes
    broken = np.where(radius * 1.3 + 0.01 > max_radius, np.inf, radius * 1.3 + 0.01)
    broken = np.where(status == 0, 0.0, broken)
    return {
        "index": np.arange(samples),
        "label": label,
        "radius": radius,
        "status": status,
        "margin": np.where(status == 0, 0.5, -0.5),
        "attack_radius": broken if attacked else np.full(samples, np.nan),
        "max_radius": max_radius,
        "arithmetic": "real",
        "bounds": "ibp",
        "elide": True,
        "domain": (0.0, 1.0),
    }
