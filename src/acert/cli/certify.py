"""`acert certify`: a proven radius for every sample of a test set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acert import data, records
from acert.attack import AttackCheck, check_certificates
from acert.attack.picture import draw_gap
from acert.bounds.margin import BOUNDS
from acert.cli.flags import (
    Parser,
    add_place,
    add_verb,
    as_number,
    as_numbers,
    chosen_device,
    counter,
    figures,
    own_model,
)
from acert.data import Split
from acert.errors import InvalidInput
from acert.evaluation import Certificates, certify
from acert.experiments.experiment import build_own
from acert.experiments.preparation import opened_test_set
from acert.experiments.run import record_certification
from acert.processes import join, local_device
from acert.state_dict import read_state_dict
from acert.zoo import load_model, load_weights, run_experiment, run_folder

__all__ = ["add", "refuse_no_elide", "with_weights"]

_EXAMPLES = """examples:
  acert certify runs/c25                        the test set, proven in real arithmetic
  acert certify runs/c25 --arithmetic float32   as float32 hardware evaluates the network
  acert certify runs/c25 --bounds crown-ibp --radii 2/255,8/255
  acert certify runs/plain --bounds crown       for a network that was not trained for bounds
  acert certify digits-acert                    the model that comes with acert
  acert certify digits-acert --attack           and try to break the certificates
  acert certify --model mymodels:net --weights net.safetensors --dataset mnist \\
      --max-radius 0.3 --out runs/mine
"""
_ARITHMETIC = {
    "real": "proven in real arithmetic",
    "float32": "proven for float32 hardware",
    "nearest": "rounding is not covered",
}
_GAP = "attack-gap.png"
# Mean radius of the images that are right, over the largest, below which intervals say little.
_LITTLE = 0.05
# Lines shown of a bug that may have as many as there are samples.
_SHOWN = 20


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "certify", _certify, summary="certify a test set", examples=_EXAMPLES,
        description="Open the test set and prove a radius for every sample.",
    )  # fmt: skip
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="run folder, or the name of a shipped model")
    add("--arithmetic", choices=_ARITHMETIC, default="real", help="what is proven (default: real)")
    add("--bounds", choices=BOUNDS, default="ibp",
        help="from the cheapest to the tightest (default: ibp)")  # fmt: skip
    add("--radii", type=as_numbers, help="where to read certified accuracy off, such as 0.01,8/255")
    add("--max-radius", type=as_number, help="largest radius looked for (default: the run's)")
    add("--batch-size", type=int, help="samples held in memory at a time")
    add("--model", help="package.module:factory, or :model, of your own")
    add("--weights", type=Path, help="safetensors file, or .pt state dict, of your own model")
    add("--dataset", help="data set for your own model")
    add("--no-elide", action="store_true", help="your own model does not end in a linear layer")
    add("--out", type=Path, help="folder for the certificates, in place of those there; "
        "no other run's (default: the run's)")  # fmt: skip
    add("--attack", action="store_true", help="attack every sample by PGD: an upper bound beside "
        "the certified lower one, and exit status 1 if they contradict each other")  # fmt: skip
    add("--attack-steps", type=int, help="steps of one attack (default: 40)")
    add("--attack-restarts", type=int, help="random starts at each radius (default: 5)")
    add_place(parser)
    return parser


def _certify(options: argparse.Namespace) -> int:
    device = local_device(chosen_device(options.device))
    processes = join(torch.device(device))
    own = {"model": options.model, "weights": options.weights, "dataset": options.dataset}
    if options.run is not None:
        given = [f"--{name}" for name in ("weights", "dataset") if own[name] is not None]
        if given:
            raise InvalidInput(f"`{given[0]}` must be left out where a run is given")
        refuse_no_elide(options)
        folder = run_folder(options.run)
        experiment = run_experiment(folder)
        settings, name = experiment.settings, experiment.dataset
        factory = None if options.model is None else own_model(options.model)
        if ":" in experiment.network.name and factory is None:
            raise InvalidInput(
                f"the run in {folder} needs its own model again: --model {experiment.network.name}"
            )
        model = load_model(folder, device=device, model=factory)
        split = opened_test_set(folder, data_dir=options.data_dir)
        max_radius = settings.max_radius if options.max_radius is None else options.max_radius
        domain, elide = settings.domain, settings.elide
        trained_for_bounds = settings.method.uses_bounds
        shipped = folder != Path(options.run)
        out = options.out or (Path("runs", folder.name) if shipped else folder)
        _refuse_run(out, unless=folder)
    else:
        absent = [f"--{flag}" for flag, value in own.items() if value is None]
        absent += ["--max-radius"] if options.max_radius is None else []
        absent += ["--out"] if options.out is None else []
        if absent:
            raise InvalidInput(
                f"give a run folder, or a model of your own, which needs {', '.join(absent)} too"
            )
        name, max_radius, out = options.dataset, options.max_radius, options.out
        elide, trained_for_bounds = not options.no_elide, False
        _refuse_run(out)
        known = data.facts(name, data_dir=options.data_dir)
        split, domain = data.load_test(name, data_dir=options.data_dir), known.domain
        model = with_weights(options, split, known.num_classes).to(device)
        model.eval()  # by itself: a module's own `train` may return nothing
    effort = {"steps": options.attack_steps, "restarts": options.attack_restarts}
    effort = {name: value for name, value in effort.items() if value is not None}
    if effort and not options.attack:
        raise InvalidInput(f"`--attack-{next(iter(effort))}` must come with `--attack`")
    above_zero = {"max_radius": max_radius, "batch_size": options.batch_size}
    above_zero |= {f"--attack-{name}": value for name, value in effort.items()}
    for flag, value in above_zero.items():
        if value is not None and not value > 0:
            raise InvalidInput(f"`{flag}` must be above 0; got {value}")
    width = domain[1] - domain[0]
    if max_radius > width * (1 + 1e-6):  # 0.3 - 0.1 is below 0.2
        raise InvalidInput(
            f"`--max-radius` must be at most the width of the domain, {width:g}; got {max_radius:g}"
        )
    outside = [radius for radius in options.radii or () if not 0 <= radius <= max_radius]
    if outside:
        raise InvalidInput(
            f"`--radii` must be in [0, {max_radius:g}], where radii are looked for; "
            f"got {outside[0]:g}"
        )
    # Before the work, not after it.
    records.make_writable(out)
    here = split.to(device)
    try:
        certificates = certify(
            model, here, max_radius=max_radius, bounds=options.bounds,
            arithmetic=options.arithmetic, domain=domain, elide=elide,
            batch_size=options.batch_size, processes=processes,
            progress=counter(len(split)) if processes.first else None, folder=out,
        )  # fmt: skip
    except KeyboardInterrupt:
        kept = "; the same command goes on from there" if records.is_unfinished(out) else ""
        raise KeyboardInterrupt(f"stopped{kept}") from None
    processes.leave()
    if not processes.first:
        return 0
    # Before the attack, which may take longer than anyone waits.
    record_certification(out, certificates, split)
    (out / _GAP).unlink(missing_ok=True)  # it may be of other certificates
    if not options.attack:
        _show(certificates, name, options.radii, trained_for_bounds=trained_for_bounds)
        print(f"wrote {records.CERTIFICATES} and {records.EXAMPLES} to {out}")
        return 0
    check = check_certificates(
        model, here, certificates, batch_size=options.batch_size,
        progress=counter(len(split), "attacked"), **effort,
    )  # fmt: skip
    record_certification(out, check.certificates, split, attacks=check.attacks)
    written = f"{records.CERTIFICATES}, {records.EXAMPLES}, {records.ATTACKS}"
    try:
        draw_gap(check.certificates, out / _GAP)
        written += f", {_GAP}"
    except ModuleNotFoundError as error:
        print(f"no picture of the gap: it needs the package {error.name}", file=sys.stderr)
    _show(check.certificates, name, options.radii, trained_for_bounds=trained_for_bounds)
    status = _report(check)
    print(f"wrote {written} to {out}")
    return status


def _refuse_run(out: Path, *, unless: Path | None = None) -> None:
    """Refuses the folder of another run, whose figures these certificates would be taken for."""
    same = unless is not None and out.resolve() == unless.resolve()
    if (out / records.CONFIG).is_file() and not same:
        raise InvalidInput(f"`--out` must not be the folder of another run; got {out}")


def _show(
    certificates: Certificates,
    name: str,
    radii: Sequence[float] | None,
    *,
    trained_for_bounds: bool,
) -> None:
    largest = certificates.max_radius
    chosen = radii or [share * largest for share in (0.25, 0.5, 0.75, 1.0)]
    print(
        f"{len(certificates)} test images of {name}, max_radius {largest:.4g}, "
        f"{certificates.bounds} bounds, {_ARITHMETIC[certificates.arithmetic]}"
    )
    print(figures(certificates.accuracy, certificates.acr, certificates.art))
    for radius in chosen:
        share = 100 * certificates.certified_accuracy(radius)
        line = f"certified at {radius:.4g}: {share:.2f} %"
        if certificates.attacked:
            line += f"  not broken: {100 * certificates.attacked_accuracy(radius):.2f} %"
        print(line)
    little = certificates.acr < _LITTLE * certificates.accuracy
    if little and certificates.bounds == "ibp" and not trained_for_bounds:
        print(
            "note: intervals prove next to nothing of a network that was not trained for them; "
            "--bounds crown is slower and proves more where activations are ReLU, tanh or sigmoid",
            file=sys.stderr,
        )


def _report(check: AttackCheck) -> int:
    """Prints the gap and every contradiction; the exit status."""
    certificates = check.certificates
    lower, upper = 100 * certificates.acr, 100 * certificates.attacked_acr
    print(
        f"average radius over max_radius: certified {lower:.2f} %, attacked {upper:.2f} %, "
        f"mean gap {upper - lower:.2f} %"
    )
    if check.rounding_only:
        print(
            f"attacks inside a certified radius by float32 rounding only: {check.rounding_only}; "
            f'--arithmetic float32 covers them, "{certificates.arithmetic}" does not'
        )
    count = len(check.violations)
    if not count:
        print("attacks inside a certified radius: 0")
        return 0
    word = "BUG" if check.promised else "note"
    for violation in check.violations[:_SHOWN]:
        print(f"{word}: {violation}", file=sys.stderr)
    if count > _SHOWN:
        print(f"{word}: and {count - _SHOWN} more images", file=sys.stderr)
    if not check.promised:
        print(f'attacks inside a radius: {count}; "nearest" radii promise nothing')
        return 0
    print(
        f"attacks inside a certified radius: {count}. A bound is wrong: a registered rule, or a "
        "rule of acert's own; please report the latter"
    )
    return 1


def refuse_no_elide(options: argparse.Namespace) -> None:
    """Refuses a margin other than the one that a run was trained with."""
    if options.no_elide:
        raise InvalidInput("`--no-elide` must be left out where a run is given: its config says it")


def with_weights(options: argparse.Namespace, split: Split, classes: int | None) -> nn.Module:
    """A model of the user's own, with the weights that the flags name."""
    model = own_model(options.model)
    if not isinstance(model, nn.Module):
        if classes is None:
            raise InvalidInput(
                f"`--model` must name a module, not a factory, where {options.dataset} does not "
                f"say how many classes there are; got {options.model}"
            )
        model = build_own(model, tuple(split.images.shape[1:]), classes)
    arrays = read_state_dict(options.weights)
    load_weights(model, arrays, source=options.weights)
    return model
