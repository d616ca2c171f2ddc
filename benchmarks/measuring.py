"""What the benchmarks share: times, memory, matrix-product peaks, tables and records.

Every time is taken after a warm-up and between two synchronisations. Subjects that are compared
take turns, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from acert.experiments.environment import environment

Run = Callable[[], object]
# What a convolution or a matrix product can be computed in.
FORMATS = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Processor time hardly depends on what else a machine does, but counts waiting threads as busy.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(run: Run, device: torch.device, clock: str = "wall") -> float:
    """Seconds of one call, the device's work included."""
    now = CLOCKS[clock]
    synchronize(device)
    start = now()
    run()
    synchronize(device)
    return now() - start


def in_turns(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    repeats: int,
    warm_up: int = 1,
    clock: str = "wall",
) -> dict[str, list[float]]:
    """Seconds of every call by subject; the subjects take turns, warm-ups left out."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + repeats):
        for name, run in runs.items():
            elapsed = timed(run, device, clock)
            if turn >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """How many times longer the first takes: the median over turns, each compared with itself."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def peak_bytes(run: Run, device: torch.device) -> int:
    """Peak memory of one call above what is held before it."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    # Every allocation and release of a tensor, in order of time.
    events = profile.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in moves), default=0)


@contextmanager
def single_precision(form: str) -> Iterator[None]:
    """Float32 products on CUDA as "ieee" or "tf32"; the caller's choice comes back afterwards."""
    backends: Any = torch.backends
    matmul, conv = backends.cuda.matmul, backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = conv.fp32_precision = form
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


def products_peak(form: str, device: torch.device, *, size: int | None = None) -> float:
    """FLOP/s of one large matrix product in a format: the fastest of ten calls after two."""
    size = size or (8192 if device.type == "cuda" else 1024)
    with single_precision("tf32" if form == "tf32" else "ieee"):
        one, other = (torch.randn(size, size, device=device).to(FORMATS[form]) for _ in range(2))
        seconds = in_turns({form: lambda: one @ other}, device, repeats=10, warm_up=2)[form]
    return 2 * size**3 / min(seconds)


def kernels(run: Run) -> dict[str, tuple[float, int]]:
    """Seconds and calls of everything the GPU did meanwhile, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in profile.events() or ():
        # A named range, such as that of the optimiser, covers kernels that are counted already.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            seconds, calls = found.get(event.name, (0.0, 0))
            found[event.name] = seconds + 1e-6 * event.self_device_time_total, calls + 1
    return found


def facts(device: torch.device) -> dict[str, Any]:
    """Commit, versions and hardware, the command, and what else keeps the machine busy."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent.parent
    # As it is called from the root of the repository, wherever this call came from.
    name = str(script.relative_to(root)) if script.is_relative_to(root) else sys.argv[0]
    found = environment(device, ["python", name, *sys.argv[1:]])
    return found | {"load": round(os.getloadavg()[0], 2)}


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows as aligned columns under their names; what a row lacks is a dash."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def shown(value: object) -> str:
    """A figure to four digits; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(path: Path, record: Mapping[str, object]) -> None:
    """The record as JSON, in a folder that is made where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", flush=True)
