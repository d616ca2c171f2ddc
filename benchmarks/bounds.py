"""Time and memory of bound passes and certification, as ratios to the plain forward pass.

    python benchmarks/bounds.py [--device cuda] [--batch 64] [--width 64] [--repeats 9]
                                [--json results/bounds-cpu.json]

A bound pass does twice the arithmetic of a forward pass, so under 3x is the aim. Where
auto_LiRPA can be imported it runs the same pass beside ours, in the same process; every one of
its calls gets a fresh input, or it would answer from its cache. Times are medians after a
warm-up, rounds of all subjects interleaved, synchronised on CUDA. Memory is the peak above what
the model and the images take.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import acert
from acert.bounds import propagate
from acert.bounds.margin import box, margin, upper_differences

RADIUS = 2 / 255
MAX_RADIUS = 8 / 255
CERTIFIED = 64  # images of a call, so that what is done once a call counts for little
Run = Callable[[], object]


def networks(width: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    networks: dict[str, nn.Module] = {
        "cnn7": acert.models.cnn7((3, 32, 32), 10, width=width),
        "small_resnet": acert.models.small_resnet((3, 32, 32), 10, width=max(1, width // 4)),
    }
    return {name: acert.models.ibp_init_(model).eval() for name, model in networks.items()}


def subjects(model: nn.Module, images: Tensor, certified: Tensor) -> dict[str, Run]:
    """What is timed, by name; the first is the plain forward pass all others are divided by."""
    labels = model(images).argmax(1)
    radius = torch.full((len(images),), RADIUS, device=images.device)

    def bound_pass() -> object:
        return propagate(model, box(images, radius, (0.0, 1.0))).ends()

    def elided_margin() -> object:
        output = propagate(model, box(images, radius, (0.0, 1.0)))
        return margin(upper_differences(output, labels), labels)

    def certify() -> object:
        return acert.certified_radius(model, certified, max_radius=MAX_RADIUS)

    runs: dict[str, Run] = {
        "forward": lambda: model(images),
        "bound pass": bound_pass,
        "elided margin": elided_margin,
        "certified radius": certify,
    }
    try:
        runs |= peer(model, images, labels)
    except ImportError:
        print("auto_LiRPA cannot be imported: no column for it", file=sys.stderr)
    return runs


def peer(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Run]:
    """auto_LiRPA's bound pass and elided margin on a copy of the model."""
    import copy
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

        bounded = BoundedModule(copy.deepcopy(model), images[:2], device=images.device)
    classes = torch.arange(10, device=images.device)
    rows = torch.eye(10, device=images.device)
    others = classes.expand(len(images), 10)[classes != labels.unsqueeze(1)].view(len(images), 9)
    specification = rows[labels].unsqueeze(1) - rows[others]

    def fresh() -> object:
        lower, upper = (images - RADIUS).clamp(min=0), (images + RADIUS).clamp(max=1)
        return BoundedTensor(images, PerturbationLpNorm(x_L=lower, x_U=upper))

    return {
        "auto_LiRPA bound pass": lambda: bounded.compute_bounds(x=(fresh(),), method="IBP"),
        "auto_LiRPA elided margin": lambda: bounded.compute_bounds(
            x=(fresh(),), C=specification, method="IBP", bound_upper=False
        ),
    }


def median_seconds(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(repeats + 1):
        for name, run in runs.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if round:  # the first is the warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Run, device: torch.device) -> int:
    """Peak memory of one call above what is held before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    # Every allocation and release of a tensor, in order of time.
    events = [event for event in profile.profiler.kineto_results.events() if is_memory(event)]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=start_ns))
    return max(held, default=0)


def is_memory(event: Any) -> bool:
    return bool(event.name() == "[memory]")


def start_ns(event: Any) -> int:
    return int(event.start_ns())


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--batch", default=64, type=int)
    parser.add_argument("--width", default=64, type=int, help="CNN7's; 64 is the paper's")
    parser.add_argument("--repeats", default=9, type=int)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if options.device.type == "cuda":  # what every subject shares; certification ignores it
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    record: dict[str, object] = {
        "command": "python benchmarks/bounds.py " + " ".join(sys.argv[1:]),
        "hardware": hardware(options.device),
        "torch": torch.__version__,
        "commit": commit(),
        "batch": options.batch,
        "certified": CERTIFIED,
    }
    for name, model in networks(options.width).items():
        model.to(options.device)
        images = torch.rand(options.batch, 3, 32, 32, device=options.device)
        certified = torch.rand(CERTIFIED, 3, 32, 32, device=options.device)
        runs = subjects(model, images, certified)
        seconds = median_seconds(runs, options.device, options.repeats)
        memory = {subject: peak_bytes(run, options.device) for subject, run in runs.items()}
        steps = acert.certified_radius(model, certified, max_radius=MAX_RADIUS).steps
        print(f"\n{name}, batch {options.batch}, {record['hardware']}, float32")
        print(f"{'':<26}{'ms':>10}{'x forward':>11}{'peak MiB':>10}{'x forward':>11}")
        for subject in runs:
            print(
                f"{subject:<26}{1e3 * seconds[subject]:10.2f}"
                f"{seconds[subject] / seconds['forward']:11.2f}"
                f"{memory[subject] / 2**20:10.1f}"
                f"{memory[subject] / max(1, memory['forward']):11.2f}"
            )
        mean = steps.float().mean()
        print(f"certification: {CERTIFIED} images, float64, {mean:.1f} root steps a sample")
        record[name] = {
            subject: {"seconds": seconds[subject], "peak_bytes": memory[subject]}
            for subject in runs
        }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
