"""Every reader against broken and hostile files: no crash, no hang, no memory, nothing outside.

    python benchmarks/fuzz.py [--seconds 600] [--seed S] [--only NAME] [--out results/fuzz.json]

The time is shared equally by the readers of `fuzz_readers.py`. Where a reader is ours, atheris
guides the inputs by the edges of our code that they reach; the others are mutated blindly. Each
input is judged by `fuzz_watch.py`. Exit status 1 if one failed; the inputs stay in build/fuzz.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the made-up files live with the tests


def instrumented() -> Any:
    """A context in which imports of acert are made to tell which edges they reach."""
    try:
        import atheris
    except ImportError:
        return nullcontext()
    quiet = ExitStack()
    quiet.enter_context(redirect_stderr(io.StringIO()))  # or it tells of every module
    quiet.enter_context(atheris.instrument_imports(include=["acert"], enable_loader_override=False))
    return quiet


def bar(name: str, place: int, count: int) -> Callable[[float, int], None]:
    """Shows how far all readers are, on a terminal only."""

    def show(done: float, inputs: int) -> None:
        if sys.stderr.isatty():
            full = round(30 * (place + done) / count)
            line = f"[{'#' * full}{'.' * (30 - full)}] {name}: {inputs:,} inputs"
            print(f"{line:<78}", end="\r", file=sys.stderr, flush=True)

    return show


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every reader against hostile files.")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="readers whose name holds this")
    parser.add_argument("--blind", action="store_true", help="without atheris")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz.json")
    asked = parser.parse_args(words)
    with nullcontext() if asked.blind else instrumented():
        import torch
        from benchmarks import fuzz_watch, measuring
        from benchmarks.fuzz_readers import readers

        torch.set_num_threads(1)
    if not asked.blind and "atheris" not in sys.modules:
        parser.error("atheris is not installed: make fuzz installs it; or give --blind")
    chosen = [one for one in readers() if asked.only is None or asked.only in one.name]
    if not chosen:
        parser.error(f"no reader is called {asked.only}")
    limits, results, began = fuzz_watch.Limits(), {}, time.monotonic()
    for place, reader in enumerate(chosen):
        results[reader.name] = result = fuzz_watch.watch(
            reader, asked.work / f"{place:02}", limits=limits, seed=asked.seed,
            seconds=asked.seconds / len(chosen),
            driver=fuzz_watch.guided if reader.ours and not asked.blind else fuzz_watch.mutated,
            progress=bar(reader.name, place, len(chosen)),
        )  # fmt: skip
        print(
            f"{reader.name:<26} {result.inputs:>9,} inputs, {result.rejected:>9,} refused, "
            f"{result.slowest_s:6.3f} s, {result.peak_mib:6.1f} MiB, "
            f"{len(result.failures)} failures",
            flush=True,
        )
        for failure in result.failures:
            print(f"    {failure['kind']}: {failure['what']} ({failure['input']})", flush=True)
    failed = sum(len(result.failures) for result in results.values())
    inputs = sum(result.inputs for result in results.values())
    measuring.write(
        asked.out,
        {
            "seed": asked.seed,
            "seconds": asked.seconds,
            "spent_s": round(time.monotonic() - began, 1),
            "limits": asdict(limits),
            "inputs": inputs,
            "failures": failed,
            "slowest_s": max(result.slowest_s for result in results.values()),
            "peak_mib": max(result.peak_mib for result in results.values()),
            "readers": {name: asdict(result) for name, result in results.items()},
            "environment": measuring.facts(torch.device("cpu")),
        },
    )
    print(f"{inputs:,} inputs to {len(results)} readers, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
