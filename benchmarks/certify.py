"""Seconds to certify images, where they go, and how often the proven margin was evaluated.

    python benchmarks/certify.py --run runs/c0 --device cuda [--data-dir data] [--images 10000]
    python benchmarks/certify.py --quick            # a network trained for a moment, made-up data
    python benchmarks/certify.py ... --profile      # the most expensive kernels, and the waiting

Every batch size and arithmetic is a row: the whole call, then a second one with a clock around the
three parts of each batch, the pass of the images themselves, the guess in low precision and the
proof in float64. Beside them stand ten plain float32 bound passes over the same images, ours and,
where auto_LiRPA can be imported, its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring, peer  # noqa: E402

from acert import data, models, radius  # noqa: E402
from acert.arithmetic import quick_arithmetic  # noqa: E402
from acert.bounds.margin import box, margin, upper_differences  # noqa: E402
from acert.bounds.propagation import propagate  # noqa: E402
from acert.data import Split, to_float  # noqa: E402
from acert.methods import FastIBP  # noqa: E402
from acert.root_proof import prove  # noqa: E402
from acert.schedules import SmoothRadius  # noqa: E402
from acert.settings import Settings  # noqa: E402
from acert.training import Trainer  # noqa: E402
from acert.zoo import load_model, run_experiment  # noqa: E402

PASSES = 10
SHOWN = 25
# What makes the host wait for a GPU: the calls that the profiler sees, and on a CPU those
# operations that would.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WOULD_WAIT = ("aten::_local_scalar_dense", "aten::nonzero")


# -- what is certified ---------------------------------------------------------------------


def made_up(count: int, *, seed: int) -> Split:
    """Ten patterns under noise: easy for some images, hopeless for others."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.rand(10, 3, 4, 4, generator=generator)
    patterns = nn.functional.interpolate(patterns, size=32, mode="nearest")
    generator.manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    share = torch.rand(count, 1, 1, 1, generator=generator)
    noise = torch.rand(count, 3, 32, 32, generator=generator)
    images = share * patterns[labels] + (1 - share) * noise
    return Split((255 * images).round().to(torch.uint8), labels)


def quick_network(width: int, max_radius: float, device: torch.device) -> nn.Module:
    """CNN7 after four epochs of FastIBP on made-up images."""
    torch.manual_seed(0)
    model = models.ibp_init_(models.cnn7((3, 32, 32), 10, width=width)).to(device)
    train = made_up(512, seed=1).to(device)
    settings = Settings(
        method=FastIBP(), max_radius=max_radius, epochs=4, batch_size=64,
        radius_schedule=SmoothRadius(start_epoch=2, length=2),
    )  # fmt: skip
    trainer = Trainer(model, train, settings)
    trainer.captured = None  # compiling would take longer than the training
    for _ in range(settings.epochs):
        trainer.run_epoch()
    return model.eval()


# -- the parts of a certification ----------------------------------------------------------


class Clock:
    """Seconds by part, each between two synchronisations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(("guess", "proof"), 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        measuring.synchronize(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            measuring.synchronize(self.device)
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def around(self) -> Iterator[None]:
        """The guess is what runs in quick arithmetic; the proof has a function of its own."""

        @contextmanager
        def timed_quick(form: str) -> Iterator[None]:
            with self.part("guess"), quick_arithmetic(form):
                yield

        @wraps(prove)
        def timed_prove(*args: Any, **kwargs: Any) -> Any:
            with self.part("proof"):
                return prove(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(radius, "quick_arithmetic", timed_quick))
            stack.enter_context(patch.object(radius, "prove", timed_prove))
            yield


def row(certify: Callable[[], Any], device: torch.device, max_radius: float) -> dict[str, Any]:
    """Figures of one batch size and arithmetic: one call timed whole, another in parts."""
    found: list[Any] = []
    if device.type == "cuda":
        peak = measuring.peak_bytes(lambda: found.append(measuring.timed(certify, device)), device)
    else:  # there the profiler counts memory, and slows what it looks at
        peak = measuring.peak_bytes(certify, device)
        found.append(measuring.timed(certify, device))
    clock = Clock(device)
    with clock.around():
        whole = measuring.timed(lambda: found.append(certify()), device)
    seconds, certified = found
    right = certified.status != radius.Status.MISCLASSIFIED
    steps = certified.steps[right].double()
    return {
        "seconds": seconds,
        "guess_s": clock.seconds["guess"],
        "proof_s": clock.seconds["proof"],
        "rest_s": whole - sum(clock.seconds.values()),
        "proven_evaluations": float(steps.mean()) if len(steps) else None,
        "most_evaluations": int(steps.max()) if len(steps) else None,
        "peak_mib": peak / 2**20,
        "accuracy": float(right.double().mean()),
        "acr": float(certified.value.mean()) / max_radius,
    }


# -- plain passes --------------------------------------------------------------------------


def plain_passes(
    model: nn.Module, images: Tensor, labels: Tensor, *, max_radius: float, batch_size: int,
    bounds: peer.PeerBounds | None,
) -> Callable[[], None]:  # fmt: skip
    """Ten bound passes with elided margins over all images, in float32; nothing is proven."""

    def margins(images: Tensor, labels: Tensor, radii: Tensor) -> Tensor:
        if bounds is not None:
            return bounds.upper_differences(images, labels, radii).amax(1)
        output = propagate(model, box(images, radii, (0.0, 1.0)))
        return margin(upper_differences(output, labels), labels)

    @torch.no_grad()
    def run() -> None:
        for number in range(PASSES):
            for start in range(0, len(images), batch_size):
                part = slice(start, start + batch_size)
                size = max_radius * (number + 1) / PASSES
                radii = torch.full(labels[part].shape, size, device=images.device)
                margins(images[part], labels[part], radii)

    return run


# -- the profile ---------------------------------------------------------------------------


def profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Prints the most expensive kernels; returns totals and how often the host waited."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        wall = measuring.timed(run, device)
    averages = profile.key_averages()
    if device.type == "cuda":
        spent = {
            event.key: (1e-6 * event.self_device_time_total, event.count)
            for event in averages
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        }
    else:
        spent = {event.key: (1e-6 * event.self_cpu_time_total, event.count) for event in averages}
    calls = {event.key: event.count for event in averages}
    names = WAITS if device.type == "cuda" else WOULD_WAIT
    waits = {name: calls.get(name, 0) for name in names}
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:SHOWN]
    print(
        measuring.table(
            {"kernel": name[:90], "ms": 1e3 * seconds, "calls": count}
            for name, (seconds, count) in most
        )
    )
    found = {
        "wall_s": wall,
        "kernel_s": sum(seconds for seconds, _ in spent.values()),
        "kernels": sum(count for _, count in spent.values()),
        "launches": calls.get("cudaLaunchKernel", 0) + calls.get("cuLaunchKernel", 0),
        "host_waits": sum(waits.values()),
        "host_waits_by_call": waits,
        "most": [{"kernel": name, "seconds": s, "calls": n} for name, (s, n) in most],
    }
    print(", ".join(f"{k} {measuring.shown(v)}" for k, v in found.items() if k != "most"))
    return found


# -- the command line ----------------------------------------------------------------------


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", help="run folder with weights, or the name of a shipped model")
    source.add_argument("--quick", action="store_true", help="a quickly trained CNN7, no data set")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    add("--data-dir", help="where the run's data set lies")
    add("--images", default=10_000, type=int, help="how many, from the first on")
    add("--width", default=64, type=int, help="of CNN7 with --quick")
    add("--max-radius", default=8.8 / 255, type=float, help="with --quick; else the run's own")
    add(
        "--batch-sizes", default="256,500,1000", type=lambda text: [int(x) for x in text.split(",")]
    )
    add("--arithmetics", default="real,float32", type=lambda text: text.split(","))
    add("--peer", default="auto", help="auto, off, or the folder that holds auto_LiRPA")
    add("--profile", action="store_true", help="profile the first batch size and arithmetic")
    add("--out", type=Path, help="default: results/certify-DEVICE.json")
    options = parser.parse_args(words)
    kind = options.device.type
    options.out = options.out or ROOT / "results" / f"certify-{kind}.json"
    return options


def main(words: list[str] | None = None) -> None:
    options = parsed(words)
    device = options.device
    if options.quick:
        max_radius = options.max_radius
        model = quick_network(options.width, max_radius, device)
        split = made_up(options.images, seed=2)
    else:
        experiment = run_experiment(options.run)
        max_radius = experiment.settings.max_radius
        model = load_model(options.run, device=device)
        split = data.load_test(experiment.dataset, data_dir=options.data_dir)
    images = to_float(split.images[: options.images]).to(device)
    labels = split.labels[: options.images].to(device)

    def certify(batch_size: int, arithmetic: str) -> Callable[[], Any]:
        return lambda: radius.certified_radius(
            model, images, labels,
            max_radius=max_radius, arithmetic=arithmetic, batch_size=batch_size,
        )  # fmt: skip

    certify(options.batch_sizes[0], options.arithmetics[0])()  # loads libraries, tries kernels
    record: dict[str, Any] = {
        "network": f"CNN7 of width {options.width}" if options.quick else Path(options.run).name,
        "images": len(images), "max_radius": max_radius, "rows": [], "passes": [],
    }  # fmt: skip
    for arithmetic in options.arithmetics:
        for size in options.batch_sizes:
            found = {"arithmetic": arithmetic, "batch_size": size}
            found |= row(certify(size, arithmetic), device, max_radius)
            record["rows"].append(found)
            print(", ".join(f"{k} {measuring.shown(v)}" for k, v in found.items()), flush=True)
    subjects: dict[str, peer.PeerBounds | None] = {"acert": None}
    if peer.available(options.peer):
        subjects["auto_LiRPA"] = peer.PeerBounds(model, images, model(images[:1]).shape[1])
    with measuring.single_precision("ieee"):
        for name, bounds in subjects.items():
            for size in options.batch_sizes:
                run = plain_passes(
                    model, images, labels,
                    max_radius=max_radius, batch_size=size, bounds=bounds,
                )  # fmt: skip
                seconds = measuring.in_turns({name: run}, device, repeats=1)[name][0]
                record["passes"].append({"library": name, "batch_size": size, "seconds": seconds})
    if options.profile:
        record["profile"] = profiled(
            certify(options.batch_sizes[0], options.arithmetics[0]), device
        )
    print("\n" + measuring.table(record["rows"]))
    print(f"\n{PASSES} plain float32 passes\n" + measuring.table(record["passes"]))
    measuring.write(options.out, record | {"environment": measuring.facts(device)})


if __name__ == "__main__":
    main()
