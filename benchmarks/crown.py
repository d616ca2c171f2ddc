"""What intervals, CROWN-IBP and CROWN prove of networks that were trained without bounds.

    python benchmarks/crown.py                 trains, certifies, writes the record and the table
    python benchmarks/crown.py --from-record   writes the table of docs/crown.md anew

Networks learn digits by plain training; the shipped one, trained by ACERT, stands beside them.
Radii of test images are proven in real arithmetic; times are processor time of one thread. PGD's
radius, at which it finds another class, is an upper bound of what any method can prove. Where
auto_LiRPA can be imported, its CROWN margins of the same images, at half of PGD's mean radius,
stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring, peer  # noqa: E402

import acert  # noqa: E402
from acert import data, models  # noqa: E402
from acert.attack import attack_radius  # noqa: E402
from acert.bounds.margin import BOUNDS  # noqa: E402
from acert.data import to_float  # noqa: E402
from acert.experiments.paper.comparison import filled  # noqa: E402

RECORD, PAGE = ROOT / "results" / "crown-cpu.json", ROOT / "docs" / "crown.md"
IMAGES, MAX_RADIUS, EPOCHS = 100, 0.5, 30
SHIPPED = "the shipped network (ACERT)"


def networks() -> dict[str, nn.Module]:
    """Networks with activations of several kinds, untrained."""
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU(inplace=True))]
    return {
        "2 x 64, ReLU": models.mlp(64, [64, 64], 10),
        "5 x 64, ReLU": nn.Sequential(models.mlp(64, [64], 64)[:-1], *hidden, nn.Linear(64, 10)),
        "3 x 64, tanh": models.mlp(64, [64, 64, 64], 10, activation=nn.Tanh),
        "3 x 64, GELU": models.mlp(64, [64, 64, 64], 10, activation=nn.GELU),
        "3 x 64, SiLU": models.mlp(64, [64, 64, 64], 10, activation=nn.SiLU),
        "two convolutions, batch norm, max pooling": nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
            nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
        ),
        "small_resnet, width 4": models.small_resnet((1, 8, 8), 10, width=4),
    }  # fmt: skip


def trained(model: nn.Module, train: data.Split, epochs: int) -> nn.Module:
    """The network after plain training, by the defaults of `acert.train`."""
    run = acert.train(
        model, (to_float(train.images), train.labels),
        method=acert.Standard(), max_radius=MAX_RADIUS, epochs=epochs, progress=False,
    )  # fmt: skip
    return run.model.eval()


def row(model: nn.Module, images: Tensor, labels: Tensor, *, beside: bool) -> dict[str, Any]:
    """Radii, their cost and how far an attack stays above them."""
    found: dict[str, Any] = {"radius": {}, "ms": {}, "proven": {}}
    radii: dict[str, Tensor] = {}
    for bounds in BOUNDS:

        def run(bounds: str = bounds) -> None:
            radii[bounds] = acert.certified_radius(
                model, images, labels, max_radius=MAX_RADIUS, bounds=bounds
            ).value

        run()
        seconds = [measuring.timed(run, images.device, "cpu") for _ in range(3)]
        found["radius"][bounds] = float(radii[bounds].mean())
        found["proven"][bounds] = float((radii[bounds] > 0).double().mean())
        found["ms"][bounds] = 1e3 * sorted(seconds)[1] / len(images)
    attack = attack_radius(model, images, labels, max_radius=MAX_RADIUS, certified=radii["crown"])
    found["attack"] = float(attack.radius.mean())
    found["accuracy"] = float((model(images).argmax(1) == labels).double().mean())
    assert bool((attack.radius >= radii["crown"]).all()), "an attack got inside a certificate"
    if beside:
        radius = torch.full((len(images),), found["attack"] / 2)
        ours = acert.certified_margin(model, images, labels, radius, bounds="crown").detach()
        try:
            bounds_of = peer.PeerBounds(model, images, 10, conv_mode="matrix")
            theirs = bounds_of.upper_differences(images, labels, radius, method="CROWN").amax(1)
        except NotImplementedError as refusal:
            found["peer_refuses"] = str(refusal)
        else:
            found["above_peer"] = float((ours - theirs).max() / theirs.abs().max())
            found["below_peer"] = float((theirs - ours).max() / theirs.abs().max())
    return found


def record(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every network."""
    train, test = data.load("digits", train_on_all=True).train, data.load_test("digits")
    images, labels = to_float(test.images[: options.images]), test.labels[: options.images]
    beside = peer.available(options.peer)
    rows = {}
    torch.manual_seed(0)
    subjects = {name: trained(model, train, options.epochs) for name, model in networks().items()}
    subjects[SHIPPED] = acert.load_model("digits-acert")
    for name, model in subjects.items():
        rows[name] = row(model, images, labels, beside=beside)
        print(name, rows[name], flush=True)
    return {
        "images": len(images), "max_radius": MAX_RADIUS, "epochs": options.epochs, "rows": rows,
        "environment": measuring.facts(images.device),
    }  # fmt: skip


def table(content: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        f"| network | Acc | {' | '.join(BOUNDS)} | PGD | ms an image: {', '.join(BOUNDS)} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in content["rows"].items():
        radii = [f"{found['radius'][bounds]:.2g}" for bounds in BOUNDS]
        times = ", ".join(f"{found['ms'][bounds]:.1f}" for bounds in BOUNDS)
        accuracy = f"{100 * found['accuracy']:.0f}"
        lines.append(
            f"| {name} | {accuracy} | {' | '.join(radii)} | {found['attack']:.2g} | {times} |"
        )
    facts = content["environment"]
    text = (
        f"Mean radius of {content['images']} test digits, up to {content['max_radius']}; "
        f"{content['epochs']} epochs. {facts['cpu']}, torch {facts['torch']}, commit "
        f"{facts['commit'][:7]}: `{facts['command']}`"
    )
    rows = content["rows"]
    above = [found["above_peer"] for found in rows.values() if "above_peer" in found]
    if above:
        text += (
            ". No margin is further above that of auto_LiRPA's CROWN than "
            f"{max(above):.0e} of the largest"
        )
        refused = [name for name, found in rows.items() if "peer_refuses" in found]
        text += f"; it has none for {' and '.join(refused)}" if refused else ""
    return "\n".join([*lines, "", text + "."])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from-record", action="store_true", help="train nothing")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--peer", default="auto", help="auto, off, or the folder of auto_LiRPA")
    options = parser.parse_args(words)
    if not options.from_record:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            measuring.write(options.out, record(options))
        finally:
            torch.set_num_threads(threads)
    if options.out == RECORD:
        content = table(json.loads(RECORD.read_text(encoding="utf-8")))
        page = filled(PAGE.read_text(encoding="utf-8"), {"crown-cpu": content})
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
