"""Sweeps: the runs of a plan, each trained and certified once, whatever happens to the sweep.

What is finished is skipped, what was begun goes on, a failed run is told and does not end the
others. With a budget a run is started only if it will be done in time, by the epoch times of runs
like it; the first of a kind measures itself and stops, with its state saved, if it cannot be done.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, final

from acert import data, records
from acert.errors import InvalidInput, RunError
from acert.evaluation import Certificates, Evaluation, checksum
from acert.experiments.budget import Pace, epochs_left, spoken
from acert.experiments.complete import found_certificates
from acert.experiments.preparation import data_facts, refuse_other
from acert.experiments.sweeps.board import Board, Outcome
from acert.experiments.sweeps.engine import Engine
from acert.experiments.sweeps.plan import Plan, PlannedRun
from acert.experiments.sweeps.worker import Report, Task
from acert.untrusted import fresh

__all__ = ["Sweep", "failure_file"]


def failure_file(out: Path, name: str) -> Path:
    """Where the reason of a failed run is; beside its folder, which may not even exist."""
    return out / f"{name}.failure.txt"


@final
class Sweep:
    """A plan in its folder, with how its runs are made; `run` makes them.

    `threads` are those of a run, None for torch's own choice.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        *,
        device: str = "cpu",
        threads: int | None = 1,
        data_dir: Path | None = None,
        arithmetic: str = "real",
        bounds: str = "ibp",
        command: Sequence[str] = (),
    ) -> None:
        self.plan = plan.placed(out)
        self.out = out
        self.device = device
        self.threads = threads
        self.data_dir = data_dir
        self.arithmetic = arithmetic
        self.bounds = bounds
        self.command = command
        # Of the data sets that are the user's own files, once they are asked for.
        self.facts: dict[tuple[str, bool], dict[str, Any]] = {}
        self.images: dict[str, int] = {}
        self.pace = Pace(device)
        for run in self.plan.runs:
            self.pace.learn(run.experiment, out / run.name)

    def found(self, run: PlannedRun) -> Outcome | None:
        """The outcome of a run that is finished and certified; None if there is work to do.

        A folder that holds another config, or a run on other data, is refused; one whose config
        is damaged has failed.
        """
        folder = self.out / run.name
        try:
            if (folder / records.CONFIG).is_file():
                records.read_config(folder)
        except RunError as error:
            return Outcome(run=run, kind="failed", reason=str(error))
        certificates = self._certificates(run)
        if certificates is None:
            return None
        self._refuse_other_data(run, certificates)
        return Outcome(run=run, kind="found", figures=_figures(certificates))

    def standing(self, run: PlannedRun) -> str:
        """How far a run is, in words."""
        found = self.found(run)
        if found is not None:
            return "finished" if found.kind == "found" else f"damaged: {found.reason}"
        folder, epochs = self.out / run.name, run.experiment.settings.epochs
        need = self.pace.seconds(run.experiment, folder)
        about = "" if need is None else f", about {spoken(need)}"
        all_of_them = f"{epochs} epoch" if epochs == 1 else f"{epochs} epochs"
        if records.is_finished(folder):
            return f"to be certified{about}"
        if not (folder / records.CONFIG).is_file():
            return f"new, {all_of_them}{about}"
        done = epochs - epochs_left(run.experiment, folder)
        return f"begun, {done} of {all_of_them}{about}"

    def run(self, engine: Engine, board: Board, *, budget: float | None = None) -> list[Outcome]:
        """The outcome of every run, in the order of the plan; files are in the folder `out`.

        Ctrl-C stops the runs under way with their states saved, and says how to go on.
        """
        began = time.monotonic()
        ended = {run.name: self.found(run) for run in self.plan.runs}
        todo = [run for run in self.plan.runs if ended[run.name] is None]
        for name, all_of_it in {(r.experiment.dataset, r.experiment.train_on_all) for r in todo}:
            # Missing data are told once, before anything is started.
            data.load(name, data_dir=self.data_dir, train_on_all=all_of_it)
        finished = [one for one in ended.values() if one is not None and one.kind == "found"]
        if finished:
            board.note(f"{len(finished)} of {len(ended)} runs are finished already")
        records.make_writable(self.out)
        self.plan.record(self.out)
        if todo:
            board.start(todo)
        deadline = None if budget is None else began + budget
        outcomes: list[Outcome] = []
        try:
            with engine, _sigterm_as_ctrl_c():
                try:
                    for outcome in self._outcomes(todo, engine, board, deadline):
                        outcomes.append(outcome)
                        board.over(outcome)
                except KeyboardInterrupt:
                    board.note("stopping: runs under way are saved; Ctrl-C again ends them at once")
                    under_way = "saved"
                    try:
                        engine.stop()
                    except KeyboardInterrupt:
                        under_way = "as it was last saved"
                    told = self._stopped([*ended.values(), *outcomes], under_way)
                    raise KeyboardInterrupt(told) from None
        finally:
            board.close()
        if budget is not None:
            self._check_budget(budget, outcomes)
        new = {outcome.run.name: outcome for outcome in outcomes}
        every = (new.get(run.name) or ended[run.name] for run in self.plan.runs)
        return [outcome for outcome in every if outcome is not None]

    def _outcomes(
        self, todo: Sequence[PlannedRun], engine: Engine, board: Board, deadline: float | None
    ) -> Iterator[Outcome]:
        waiting = list(todo)
        running: dict[str, tuple[PlannedRun, float]] = {}
        while waiting or running:
            while waiting and engine.free > 0:
                run, now = waiting.pop(0), time.monotonic()
                left = None if deadline is None else deadline - now
                need = self.pace.seconds(run.experiment, self.out / run.name)
                if left is not None and not (need or 0.0) < left:
                    yield Outcome(run=run, kind="left out", reason=_too_long(need))
                    continue
                running[run.name] = run, now
                engine.submit(self._task(run, left))
                board.under_way(run, 0.0)
            if not running:
                return
            report = engine.report()
            run, start = running[report.name]
            if report.final:
                del running[report.name]
                yield self._outcome(run, report, time.monotonic() - start)
            else:
                board.under_way(run, report.share)

    def _task(self, run: PlannedRun, left: float | None) -> Task:
        place = None if self.data_dir is None else str(self.data_dir)
        return Task(
            name=run.name, experiment=run.experiment, folder=str(self.out / run.name),
            certify_to=run.certify_to, data_dir=place, device=self.device, threads=self.threads,
            arithmetic=self.arithmetic, bounds=self.bounds, command=tuple(self.command),
            seconds=left,
        )  # fmt: skip

    def _outcome(self, run: PlannedRun, report: Report, seconds: float) -> Outcome:
        """What a last report means; the reason of a failure is written down."""
        folder, file = self.out / run.name, failure_file(self.out, run.name)
        self.pace.learn(run.experiment, folder)
        if report.kind == "done":
            certificates = self._certificates(run)
            if certificates is not None:
                file.unlink(missing_ok=True)
                figures = _figures(certificates)
                return Outcome(run=run, kind="done", seconds=seconds, figures=figures)
            report = Report(name=run.name, kind="failed", reason="its certificates are not there")
        if report.kind == "late":
            need = self.pace.seconds(run.experiment, folder)
            reason = "not one epoch was done in time" if need is None else _too_long(need)
            return Outcome(run=run, kind="left out", reason=reason, seconds=seconds)
        # Told at the end anyway, if the disk is full.
        with suppress(OSError), fresh(file) as stream:
            stream.write((report.details or report.reason).encode())
        reason = report.reason or "it was stopped"
        return Outcome(run=run, kind="failed", reason=reason, seconds=seconds)

    def _refuse_other_data(self, run: PlannedRun, certificates: Certificates) -> None:
        """Refuses a finished run on files of the user's own that have changed since."""
        name, whole = run.experiment.dataset, run.experiment.train_on_all
        folder = self.out / run.name
        if name not in data.OWN:
            return
        if (name, whole) not in self.facts:
            found = data.load(name, data_dir=self.data_dir, train_on_all=whole)
            self.facts[name, whole] = data_facts(found)
        refuse_other(folder, "data", self.facts[name, whole])
        if name not in self.images:
            self.images[name] = checksum(data.load_test(name, data_dir=self.data_dir))
        # Older certificates do not tell.
        if certificates.images not in (-1, self.images[name]):
            raise RunError(
                f"the run in {folder} was certified on other test images: remove its "
                f"{records.CERTIFICATES}, and it is certified again"
            )

    def _certificates(self, run: PlannedRun) -> Certificates | None:
        return found_certificates(
            run.experiment, self.out / run.name,
            max_radius=run.certify_to, arithmetic=self.arithmetic, bounds=self.bounds,
        )  # fmt: skip

    def _check_budget(self, budget: float, outcomes: Sequence[Outcome]) -> None:
        """Refuses a budget in which nothing at all could be done."""
        left_out = [outcome.run for outcome in outcomes if outcome.kind == "left out"]
        if not left_out or len(left_out) < len(outcomes):
            return
        needs = {
            run.name: self.pace.seconds(run.experiment, self.out / run.name) for run in left_out
        }
        known = {name: seconds for name, seconds in needs.items() if seconds is not None}
        hint = ""
        if known:
            shortest = min(known, key=lambda name: known[name])
            hint = f"; the shortest, {shortest}, needs about {spoken(known[shortest])}"
        raise InvalidInput(f"`budget` must do for one run at least; got {spoken(budget)}{hint}")

    def _stopped(self, outcomes: Sequence[Outcome | None], under_way: str = "saved") -> str:
        kinds = [outcome.kind for outcome in outcomes if outcome is not None]
        done = kinds.count("found") + kinds.count("done")
        again = shlex.join(self.command) if self.command else "the same call"
        return (
            f"stopped with {done} of {len(self.plan.runs)} runs finished, and what was under way "
            f"{under_way}. To go on: {again}"
        )


def _too_long(need: float | None) -> str:
    return "no time is left" if need is None else f"it needs about {spoken(need)} more"


def _figures(certificates: Certificates) -> Evaluation:
    return Evaluation(
        accuracy=certificates.accuracy, acr=certificates.acr, art=certificates.art
    )  # fmt: skip


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM stops a sweep as Ctrl-C does; only the main thread may set handlers."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
