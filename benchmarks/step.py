"""Time, GPU-busy time, memory and arithmetic of one training step, for every method.

    python benchmarks/step.py --device cuda [--methods acert,fastibp] [--precisions tf32,float16]
    python benchmarks/step.py --cpu-targets

A step is all of it: batch assembly and augmentation, clean forward, root finding, bound pass,
backward, clipping, optimiser, statistics; on CUDA compiled and captured, on a CPU eager. Images are
random: no time depends on them. GFLOP counts convolutions and matrix products, forward and
backward; its share is that of the same arithmetic at the speed of one large matrix product, as
measured in the same run in the formats that the step uses. Where auto_LiRPA can be imported,
its eager step stands beside ours.

`--cpu-targets` compares the eager ACERT step on two threads with auto_LiRPA's, and with its own
convolutions and matrix products called bare.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring, peer  # noqa: E402
from benchmarks.products import Products  # noqa: E402

from acert import models  # noqa: E402
from acert.data import Split  # noqa: E402
from acert.experiments.recipes import in_range, recipe  # noqa: E402
from acert.methods import METHODS, Acert  # noqa: E402
from acert.precision import PRECISIONS  # noqa: E402
from acert.processes import ALONE, Processes  # noqa: E402
from acert.schedules import FullRadius, SmoothRadius  # noqa: E402
from acert.settings import Settings  # noqa: E402
from acert.training import Batch, Trainer  # noqa: E402

SHAPES = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "tinyimagenet": (3, 64, 64)}
CLASSES = {"cifar10": 10, "mnist": 10, "tinyimagenet": 200}
PEER_METHODS = ("fastibp", "acert")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: what is trained, and how."""

    method: str
    precision: str
    regularized: bool
    shape: str
    width: int
    batch_size: int
    root_steps: int
    network: str = "cnn7"
    augmented: bool = True

    def settings(self) -> Settings:
        """Those of the recipe, all in its warm-up (`regularized`) or all behind it."""
        settings = recipe(self.shape, self.method).settings
        method = settings.method
        if isinstance(method, Acert):
            method = replace(method, solver=replace(method.solver, max_steps=self.root_steps))
        # No time depends on the radius, and an untrained network at the full one leaves the range
        # of float16.
        share = 1.0 if self.precision == "float32" else 1e-3
        return replace(
            settings,
            method=method,
            max_radius=share * settings.max_radius,
            precision=self.precision,
            batch_size=self.batch_size,
            augmentation=settings.augmentation if self.augmented else None,
            radius_schedule=(
                SmoothRadius(start_epoch=1, length=10_000) if self.regularized else FullRadius()
            ),
        )

    def trainer(
        self, device: torch.device, batches: int, *, processes: Processes = ALONE
    ) -> Trainer:
        """A fresh network and as many batches of random images an epoch."""
        torch.manual_seed(0)
        count, shape = batches * self.batch_size, SHAPES[self.shape]
        images = torch.randint(256, (count, *shape), dtype=torch.uint8)
        labels = torch.randint(CLASSES[self.shape], (count,))
        normalize = models.Normalize([0.5] * shape[0], [0.25] * shape[0])
        factory = {"cnn7": models.cnn7, "small_cnn": models.small_cnn}[self.network]
        model: nn.Module = factory(
            shape, CLASSES[self.shape], width=self.width, normalize=normalize
        )
        model = models.ibp_init_(model).to(device).train()
        train = Split(images, labels).to(device)
        return Trainer(model, train, self.settings(), processes=processes)


def eager(trainer: Trainer, batch: Batch) -> measuring.Run:
    """The trainer's own step without compilation."""
    scalars = trainer.scalars(0).to(trainer.device)
    phase = trainer.phase(0)
    return lambda: trainer.update(batch, scalars, phase=phase, compiled=False)


def counted(trainer: Trainer) -> Products:
    """The convolutions and matrix products of one step."""
    products = Products()
    with trainer.arithmetic(), products:
        eager(trainer, next(trainer.batches(1)))()
    return products


class Subject:
    """A case with its step compiled and captured, ready to be timed."""

    def __init__(self, case: Case, device: torch.device, *, steps: int) -> None:
        if device.type == "cuda":  # nothing is compiled on a CPU
            torch._dynamo.reset()
        self.device, self.steps = device, steps
        self.products = counted(case.trainer(device, 1))
        self.trainer = case.trainer(device, steps)
        one = eager(self.trainer, next(self.trainer.batches(1)))
        self.peak = measuring.peak_bytes(one, device)
        if device.type == "cuda":  # the eager step's peak is another one
            self.trainer = case.trainer(device, steps)
            self.peak = measuring.peak_bytes(self._first, device)
        else:
            self._first()

    def _first(self) -> None:
        self.first_seconds = self.trainer.run_epoch()["seconds"]

    def row(self, peaks: dict[str, float], *, repeats: int) -> dict[str, Any]:
        """Medians over epochs of `steps` steps, beside the time of their arithmetic.

        `peaks` has what was measured of matrix products before, and takes what is measured now.
        """
        trainer, cuda = self.trainer, self.device.type == "cuda"
        seconds = [trainer.run_epoch()["seconds"] / self.steps for _ in range(repeats)]
        row: dict[str, Any] = {
            "ms": 1e3 * statistics.median(seconds),
            "ms_least": 1e3 * min(seconds),
            "ms_most": 1e3 * max(seconds),
            "busy_ms": None,
            "kernels": None,
            "peak_mib": self.peak / 2**20,
            "first_epoch_s": self.first_seconds,
            "captured": cuda and trainer.captured is not None,
        }
        if cuda:
            kernels = measuring.kernels(trainer.run_epoch)
            row["busy_ms"] = 1e3 * sum(seconds for seconds, _ in kernels.values()) / self.steps
            row["kernels"] = round(sum(calls for _, calls in kernels.values()) / self.steps)
        row |= {"gflop": self.products.gflop, "floor_ms": 1e3 * self._floor(peaks)}
        return row | {"share": row["floor_ms"] / row["ms"]}

    def _floor(self, peaks: dict[str, float]) -> float:
        """Seconds of the arithmetic at the peak of its formats."""
        names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
        single = "tf32" if self.trainer.precision.tf32 else "float32"
        floor = 0.0
        for dtype, flop in self.products.flop.items():
            form = names.get(dtype, single)
            if form not in peaks:
                peaks[form] = measuring.products_peak(form, self.device)
                print(f"matrix products in {form}: {peaks[form] / 1e12:.4g} TFLOP/s", flush=True)
            floor += flop / peaks[form]
        return floor


def peer_row(case: Case, device: torch.device, *, repeats: int) -> dict[str, Any]:
    """auto_LiRPA's eager step, as `peer.PeerStep` has it."""
    trainer = case.trainer(device, 1)
    batch = next(trainer.batches(1))
    with trainer.arithmetic():
        step = peer.PeerStep(trainer, batch, trainer.settings.max_radius)
        peak = measuring.peak_bytes(step, device)
        seconds = measuring.in_turns({"step": step}, device, repeats=repeats)["step"]
    return {
        "ms": 1e3 * statistics.median(seconds),
        "ms_least": 1e3 * min(seconds),
        "ms_most": 1e3 * max(seconds),
        "peak_mib": peak / 2**20,
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What is measured, in the order of the table."""
    for precision in options.precisions:
        for method in options.methods:
            if precision != usable(method, precision, options.shape):
                print(f"{method}, {precision}: left out, it leaves the range of float16")
                continue
            for regularized in (False, True) if METHODS[method]().uses_bounds else (False,):
                yield Case(
                    method=method, precision=precision, regularized=regularized,
                    shape=options.shape, width=options.width, batch_size=options.batch_size,
                    root_steps=options.steps,
                )  # fmt: skip


def rows(options: argparse.Namespace, peaks: dict[str, float]) -> Iterator[dict[str, Any]]:
    """All rows, one by one as they are measured."""
    device, wanted = options.device, list(cases(options))
    beside = peer.available(options.peer)
    for case, found in zip(wanted, measured(wanted, options, peaks), strict=True):
        row: dict[str, Any] = {"method": case.method, "precision": case.precision}
        yield row | {"regularized": case.regularized} | found
        single = case.precision in ("float32", "tf32")
        if beside and case.method in PEER_METHODS and single and not case.regularized:
            row |= {"method": f"{case.method}, auto_LiRPA", "regularized": False}
            yield row | peer_row(case, device, repeats=options.repeats)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(
    wanted: Sequence[Case], options: argparse.Namespace, peaks: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """The figures of every case; there are none of one that failed in a process of its own."""
    if options.jobs > 1:
        yield from measured_apart(wanted, options, peaks)
        return
    for case in wanted:
        yield Subject(case, options.device, steps=options.epoch).row(peaks, repeats=options.repeats)


def measured_apart(
    wanted: Sequence[Case], options: argparse.Namespace, peaks: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """The same, each case in a process of its own.

    `--jobs` of them compile at once; then one at a time is measured while the others wait.
    """
    # Each process compiles kernels in several others.
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs))
    )
    spawn = multiprocessing.get_context("spawn")
    slots = spawn.Semaphore(options.jobs)
    ends = []
    for case in wanted:
        ours, theirs = spawn.Pipe()
        words = (case, options.device, options.epoch, options.repeats, slots, theirs)
        spawn.Process(target=measured_on_call, args=words).start()
        theirs.close()
        ends.append(ours)
    ready = [received(end) is not None for end in ends]
    for end, is_ready in zip(ends, ready, strict=True):
        if is_ready:
            end.send(peaks)
        found = received(end) if is_ready else None
        row, measured_peaks = ({}, {}) if found is None else found
        peaks.update(measured_peaks)
        yield row


def measured_on_call(
    case: Case, device: torch.device, steps: int, repeats: int, slots: Any, end: Connection
) -> None:
    """Compiles the step, says so, and measures it when the peaks known so far come in."""
    with slots:
        subject = Subject(case, device, steps=steps)
    end.send("ready")
    peaks = end.recv()
    end.send((subject.row(peaks, repeats=repeats), peaks))


def received(end: Connection) -> Any:
    """What a process sends, or None where it has ended instead."""
    try:
        return end.recv()
    except EOFError:
        return None


def usable(method: str, precision: str, shape: str) -> str:
    """The format itself, or the one that this method has to be trained in instead of it."""
    return in_range(recipe(shape, method, precision=precision)).settings.precision


# -- the eager step on two CPU cores -------------------------------------------------------


def cpu_targets(options: argparse.Namespace) -> dict[str, Any]:
    """The eager ACERT step beside auto_LiRPA's and beside its bare products, taking turns."""
    device = torch.device("cpu")
    record: dict[str, Any] = {}
    networks = zip(("cnn7", "small_cnn"), options.widths, (1.4, 2.0), strict=True)
    for network, width, faster in networks:
        case = Case(
            method="acert", precision="float32", regularized=False, shape=options.shape,
            width=width, batch_size=options.batch_size, root_steps=options.steps, network=network,
            augmented=False,
        )  # fmt: skip
        trainer = case.trainer(device, 1)
        batch = next(trainer.batches(1))
        products = counted(trainer)
        before = os.getloadavg()[0]
        runs = {
            "acert": eager(trainer, batch),
            "bare products": products.bare(),
            "bare, cached": products.bare(shared=True),
        }
        if peer.available(options.peer):
            runs["auto_LiRPA"] = peer.PeerStep(trainer, batch, trainer.settings.max_radius)
        seconds = measuring.in_turns(
            runs, device, repeats=options.repeats, warm_up=2, clock=options.clock
        )
        medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
        found: dict[str, Any] = {
            "width": width,
            "gflop": products.gflop,
            "load": [round(load, 2) for load in (before, os.getloadavg()[0])],
            "ms": medians,
            "ms_least": {name: 1e3 * min(values) for name, values in seconds.items()},
            "times_bare": measuring.median_ratio(seconds["acert"], seconds["bare products"]),
            "times_bare_cached": measuring.median_ratio(seconds["acert"], seconds["bare, cached"]),
            "times_bare_wanted": 1.3,
        }
        if "auto_LiRPA" in seconds:
            found["times_faster"] = measuring.median_ratio(seconds["auto_LiRPA"], seconds["acert"])
            found["times_faster_wanted"] = faster
        record[network] = found
        print(f"{network} of width {width}: {found}", flush=True)
    return record


def target_table(record: dict[str, Any]) -> str:
    """The three ratios, with what each should be."""
    rows = []
    for network, found in record.items():
        rows.append(
            {"network": f"{network}, width {found['width']}"}
            | {f"{name}, ms": value for name, value in found["ms"].items()}
            | {
                "faster than auto_LiRPA": found.get("times_faster"),
                "wanted": found.get("times_faster_wanted"),
                "of bare products": found["times_bare"],
                "at most": found["times_bare_wanted"],
                "of cached ones": found["times_bare_cached"],
            }
        )
    return measuring.table(rows)


# -- the command line ----------------------------------------------------------------------


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    add("--shape", default="cifar10", choices=SHAPES, help="the data set whose shape images have")
    add("--width", default=64, type=int, help="CNN7's; 64 is the paper's")
    add("--batch-size", type=int, help="default: 128; 64 with --cpu-targets")
    add("--methods", default=",".join(METHODS), type=lambda text: text.split(","))
    add("--precisions", type=lambda text: text.split(","),
        help="default: tf32,float16 on CUDA, float32 on a CPU")  # fmt: skip
    add("--steps", default=2, type=int, help="ACERT's root steps")
    add("--epoch", type=int, help="steps timed together; default: 100 on CUDA, 2 on a CPU")
    add("--repeats", default=9, type=int)
    add("--jobs", default=1, type=int,
        help="with more than 1, that many processes compile side by side")  # fmt: skip
    add("--peer", default="auto", help="auto, off, or the folder that holds auto_LiRPA")
    add("--cpu-targets", action="store_true", help="the eager step against bare products")
    add("--threads", default=2, type=int, help="of --cpu-targets")
    add("--clock", default="wall", choices=measuring.CLOCKS, help="of --cpu-targets; processor "
        "time on one thread is steadier on a machine with other work")  # fmt: skip
    add("--widths", default="16,8", type=lambda text: [int(part) for part in text.split(",")],
        help="of CNN7 and of the two-convolution network of --cpu-targets")  # fmt: skip
    add("--out", type=Path, help="default: results/step-DEVICE.json")
    options = parser.parse_args(words)
    if options.cpu_targets:
        options.device = torch.device("cpu")
    cuda = options.device.type == "cuda"
    options.precisions = options.precisions or (["tf32", "float16"] if cuda else ["float32"])
    options.epoch = options.epoch or (100 if cuda else 2)
    options.batch_size = options.batch_size or (64 if options.cpu_targets else 128)
    name = "cpu" if options.cpu_targets or not cuda else "cuda"
    options.out = options.out or ROOT / "results" / f"step-{name}.json"
    for name, given, known in (
        ("methods", options.methods, METHODS), ("precisions", options.precisions, PRECISIONS),
    ):  # fmt: skip
        if unknown := [word for word in given if word not in known]:
            parser.error(f"--{name} must be of {', '.join(known)}; got {', '.join(unknown)}")
    return options


def main(words: list[str] | None = None) -> None:
    options = parsed(words)
    record: dict[str, Any] = {
        "shape": options.shape, "batch_size": options.batch_size, "root_steps": options.steps,
        "repeats": options.repeats,
    }  # fmt: skip
    if options.cpu_targets:
        before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        try:
            record["clock"] = options.clock
            record["targets"] = cpu_targets(options)
            record["environment"] = measuring.facts(options.device)
        finally:
            torch.set_num_threads(before)
        print(target_table(record["targets"]))
    else:
        peaks: dict[str, float] = {}
        found = []
        for row in rows(options, peaks):
            found.append(row)
            print(", ".join(f"{name} {measuring.shown(row[name])}" for name in row), flush=True)
        print("\n" + measuring.table(found))
        whole = [row for row in found if "ms" in row]
        record |= {
            "width": options.width,
            "rows": whole,
            "peaks_tflops": {form: peak / 1e12 for form, peak in peaks.items()},
            "environment": measuring.facts(options.device),
        }
    measuring.write(options.out, record)
    if not options.cpu_targets and len(whole) < len(found):
        raise SystemExit("rows without figures failed: the errors stand above")


if __name__ == "__main__":
    main()
