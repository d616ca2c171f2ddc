"""Exported classifiers in onnxruntime against the library: logits, radii and time.

    python benchmarks/export.py --data-dir DIR     # trains, measures, writes the record and docs
    python benchmarks/export.py --docs             # writes the table of docs/deploy.md alone

The shipped digits model on 1,000 images, and a full-width CNN7 trained for some minutes at a
radius that grows to 0.1, on 100 MNIST test images. Times are processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acert
from acert import data
from acert.deploy import write_certified, write_plain
from acert.experiments.environment import environment

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "results" / "export-cpu.json", ROOT / "docs" / "deploy.md"
BEGIN, END = "<!-- export -->", "<!-- /export -->"
BATCHES = (1, 7, 64)
BATCH, WARM_UP, TRAINED_AT = 64, 15, 0.1
TITLES = {"digits": "digits, small_cnn, 1,000 images", "cnn7": "MNIST, full-width CNN7, 100 images"}


def trained(split: data.Split, *, steps: int) -> nn.Module:
    """A full-width CNN7 after so many steps of certified training."""
    torch.manual_seed(0)
    model = acert.models.ibp_init_(acert.models.cnn7((1, 28, 28)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step, batch in enumerate(torch.split(torch.randperm(len(split)), BATCH)[:steps]):
        images, labels = data.to_float(split.images[batch]), split.labels[batch]
        radius = TRAINED_AT * min(1.0, max(0, step - WARM_UP) / (0.7 * steps))
        logits, statistics = acert.clean_pass(model, images)
        worst_case = acert.worst_case_logits(model, images, labels, radius, statistics=statistics)
        loss = F.cross_entropy(worst_case, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 10 == 0:
            right = (logits.argmax(1) == labels).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, batch accuracy {right:.2f}", flush=True)
    return model.eval()


def measured(model: nn.Module, images: Tensor, max_radius: float) -> dict[str, Any]:
    """How onnxruntime's answers compare with the library's, and what they cost."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        certified, plain = Path(folder, "certified.onnx"), Path(folder, "plain.onnx")
        start = time.process_time()
        classifier = acert.CertifiedClassifier(model, max_radius=max_radius)
        write_certified(classifier, images[:2], certified)
        export_seconds = time.process_time() - start
        write_plain(model, images[:2], plain)
        sizes = certified.stat().st_size, plain.stat().st_size
        runners = {
            name: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for name, path in (("plain", plain), ("certified", certified))
        }
    with torch.no_grad():
        expected = model(images).numpy()
    proven = acert.certified_radius(
        model, images, max_radius=max_radius, arithmetic="float32", batch_size=50
    )
    library = proven.value.numpy()
    positive = library > 0
    found: dict[str, Any] = {
        "images": len(images), "max_radius": max_radius, "steps": classifier.steps,
        "export_seconds": export_seconds, "bytes": sizes[0], "plain_bytes": sizes[1],
        "largest_logit": float(np.abs(expected).max()),
        "library_positive": int(positive.sum()), "batches": {},
    }  # fmt: skip
    for batch in BATCHES:
        # The smallest batch is the slowest a picture, so it sees fewer of them.
        count = min(len(images), max(10, 10 * batch))
        parts = [part.numpy() for part in torch.split(images[:count], batch)]
        seconds, outputs = {}, []
        for name, runner in runners.items():
            runner.run(None, {"images": parts[0]})
            start = time.process_time()
            outputs = [runner.run(None, {"images": part}) for part in parts]
            seconds[name] = (time.process_time() - start) / count
        if batch == BATCHES[-1] and count < len(images):
            rest = torch.split(images[count:], batch)
            outputs += [runners["certified"].run(None, {"images": part.numpy()}) for part in rest]
        logits, prediction, radius = (np.concatenate(part) for part in zip(*outputs, strict=True))
        seen = len(radius)
        ratio = radius[positive[:seen]] / library[:seen][positive[:seen]]
        found["batches"][str(batch)] = {
            "images": seen,
            "logit_error": float(np.abs(logits - expected[:seen]).max()),
            "same_prediction": bool((prediction == proven.prediction[:seen].numpy()).all()),
            "median_ratio": float(np.median(ratio)),
            "worst_ratio": float(ratio.min()),
            "largest_ratio": float(ratio.max()),
            "never_above": bool((radius <= library[:seen] * (1 + 1e-5) + 1e-10).all()),
            "never_far_below": bool((radius >= 0.98 * library[:seen] - max_radius / 500).all()),
            "plain_ms": 1e3 * seconds["plain"],
            "certified_ms": 1e3 * seconds["certified"],
        }
    return found


def digits() -> Tensor:
    """The whole test set and training images, 1,000 in all."""
    test, train = data.load_test("digits"), data.load("digits", train_on_all=True).train
    return torch.cat((data.to_float(test.images), data.to_float(train.images)))[:1000]


def table(record: dict[str, Any]) -> str:
    """What the record says, as docs/deploy.md shows it."""
    rows = [
        "| network | batch | images | radius / library's, median | worst | plain, ms an image "
        "| with radius |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, title in TITLES.items():
        for batch, found in record[name]["batches"].items():
            rows.append(
                f"| {title} | {batch} | {found['images']} | {found['median_ratio']:.6f} | "
                f"{found['worst_ratio']:.6f} | {_short(found['plain_ms'])} | "
                f"{_short(found['certified_ms'])} |"
            )
    return "\n".join(rows)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def filled(text: str, record: dict[str, Any]) -> str:
    """The page with the table of the record between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="where MNIST is")
    parser.add_argument("--train-steps", type=int, default=100)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if not options.docs:
        import onnx
        import onnxruntime

        torch.set_num_threads(1)
        mnist = data.load("mnist", data_dir=options.data_dir, train_on_all=True).train
        test = data.load_test("mnist", data_dir=options.data_dir)
        model = trained(mnist, steps=options.train_steps)
        facts = environment(torch.device("cpu"), None)
        record = {
            "command": f"python benchmarks/export.py --train-steps {options.train_steps}",
            "hardware": f"{facts['cpu']}, 1 thread, processor time",
            **{name: facts[name] for name in ("commit", "torch")},
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
            "digits": measured(acert.load_model("digits-acert"), digits(), 0.3),
            "cnn7": measured(model, data.to_float(test.images[:100]), 0.2),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
