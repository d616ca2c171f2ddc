"""The command `acert`: verbs that parse, call and print.

Errors are one line on stderr and exit status 2; Ctrl-C is 130, with the command that goes on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import acert
from acert import data, records
from acert.data import Split
from acert.errors import AcertError, InvalidInput, RunError
from acert.evaluation import Certificates, certify
from acert.experiments.experiment import Experiment, Network, build_own
from acert.experiments.override import field_names, nearest, number, override
from acert.experiments.recipes import recipe, with_epochs
from acert.experiments.run import (
    available_device,
    record_certification,
    resume_run,
    train_run,
)
from acert.methods import METHODS, Acert
from acert.schedules import SmoothRadius, StepDecay
from acert.zoo import load_model, load_weights, run_experiment, run_folder

__all__ = ["main"]

_TRAIN_EXAMPLES = """examples:
  acert train                                   digits with ACERT, under a minute on two cores
  acert train --dataset cifar10 --kappa 0.25 --data-dir ~/data --out runs/c25
  acert train --dataset mnist --method fastibp --epochs 20
  acert train --dataset npz --data-dir mine.npz --model mymodels:net --max-radius 0.05
  acert train --set learning_rate.max_rate=5e-3 --set radius_schedule=FullRadius
  acert train --dataset cifar10 --show          every field of the recipe, for --set
  acert train --resume runs/c25                 go on where a run was stopped
"""
_CERTIFY_EXAMPLES = """examples:
  acert certify runs/c25                        the test set, proven in real arithmetic
  acert certify runs/c25 --arithmetic float32   as float32 hardware evaluates the network
  acert certify runs/c25 --bounds crown-ibp --radii 2/255,8/255
  acert certify digits-acert                    the model that comes with acert
  acert certify --model mymodels:net --weights net.safetensors --dataset mnist \\
      --max-radius 0.3 --out runs/mine
"""
_ARITHMETIC = {
    "real": "proven in real arithmetic",
    "float32": "proven for float32 hardware",
    "nearest": "rounding is not covered",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parsed(words)
        verb: Callable[[argparse.Namespace], None] = options.verb
        options.command = ["acert", *words]
        verb(options)
        # Here, where a closed pipe is still ours to handle.
        sys.stdout.flush()
    except AcertError as error:
        print(f"acert: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"acert: this needs the package {error.name}: install it", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nacert: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does; what is left of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


# -- acert train --------------------------------------------------------------------------

# Flags that would change the config of a run, by the names that argparse gives them.
_CONFIG_FLAGS = (
    "dataset", "method", "kappa", "max_radius", "steps", "epochs", "batch_size", "seed",
    "out", "train_on_all", "set", "show",
)  # fmt: skip


def _train(options: argparse.Namespace) -> None:
    device = _device(options.device)
    factory = None if options.model is None or ":" not in options.model else _loaded(options.model)
    if options.resume is not None:
        _check_resume(options)
        run = resume_run(
            options.resume, data_dir=options.data_dir, device=device, model=factory,
            tensorboard=options.tensorboard, command=options.command,
        )  # fmt: skip
    else:
        experiment = _experiment(options)
        settings = experiment.settings
        if options.show:
            for name, value in field_names(experiment).items():
                print(f"{name} = {type(value).__name__ if is_dataclass(value) else value}")
            return
        method = options.method or "acert"
        out = options.out or Path(
            "runs",
            f"{experiment.dataset}-{method}-k{settings.method.kappa:g}-s{settings.seed}",
        )
        print(
            f"{experiment.dataset}, {method}, kappa {settings.method.kappa:g}, max_radius "
            f"{settings.max_radius:.4g}, {_epochs(settings.epochs)}, seed {settings.seed}, {device}"
        )
        run = train_run(
            experiment, out=out, data_dir=options.data_dir, device=device, model=factory,
            tensorboard=options.tensorboard, command=options.command,
        )  # fmt: skip
    last = run.history[-1]
    if "art" in last:
        print(f"validation: {_figures(last['accuracy'], last['acr'], last['art'])}")
    print(f"the run is in {run.folder}; for its test set: acert certify {run.folder}")


def _experiment(options: argparse.Namespace) -> Experiment:
    """The recipe that the flags ask for."""
    method = options.method or "acert"
    experiment = recipe(options.dataset or "digits", method, kappa=options.kappa)
    if not options.show:  # which needs no data
        domain = data.facts(experiment.dataset, data_dir=options.data_dir).domain
        experiment = override(experiment, "settings.domain", domain)
    if options.steps is not None:
        if not isinstance(experiment.settings.method, Acert):
            raise InvalidInput(f"`--steps` must come with the method acert; got {method}")
        experiment = override(experiment, "settings.method.solver.max_steps", options.steps)
    if options.epochs is not None and options.epochs != experiment.settings.epochs:
        experiment = with_epochs(experiment, options.epochs)
        print(_schedules(experiment), file=sys.stderr)
    for name in ("max_radius", "batch_size", "seed"):
        if getattr(options, name) is not None:
            experiment = override(experiment, f"settings.{name}", getattr(options, name))
    if options.model is not None:
        network = Network(name=options.model, initialization=experiment.network.initialization)
        experiment = replace(experiment, network=network)
    for change in options.set or ():
        name, equals, value = change.partition("=")
        if not equals:
            raise InvalidInput(f"`--set` must be given as name=value; got {change!r}")
        experiment = override(experiment, name.strip(), value.strip())
    return replace(experiment, train_on_all=True) if options.train_on_all else experiment


def _schedules(experiment: Experiment) -> str:
    """What a new number of epochs did to the schedules."""
    settings = experiment.settings
    words = []
    if isinstance(settings.radius_schedule, SmoothRadius):
        words.append(f"the radius rises over {_epochs(settings.radius_schedule.length)}")
    if isinstance(settings.learning_rate, StepDecay):
        after = " and ".join(str(epoch) for epoch in settings.learning_rate.epochs)
        words.append(f"the learning rate falls after epoch {after}")
    return f"schedules scaled to {_epochs(settings.epochs)}: {', '.join(words)}"


def _epochs(count: int) -> str:
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def _check_resume(options: argparse.Namespace) -> None:
    values = {name: getattr(options, name) for name in _CONFIG_FLAGS}
    # A seed of 0 is given, a flag that is False is not.
    given = [name for name, value in values.items() if not (value is None or value is False)]
    if given:
        flag = given[0].replace("_", "-")
        raise InvalidInput(f"`--{flag}` cannot be changed by `--resume`: a run keeps its config")
    network = run_experiment(options.resume).network
    if ":" in network.name and options.model is None:
        raise InvalidInput(
            f"the run in {options.resume} needs its own model again: --model {network.name}"
        )


# -- acert certify ------------------------------------------------------------------------


def _certify(options: argparse.Namespace) -> None:
    device = _device(options.device)
    own = {"model": options.model, "weights": options.weights, "dataset": options.dataset}
    if options.run is not None:
        given = [f"--{name}" for name in ("weights", "dataset") if own[name] is not None]
        if given:
            raise InvalidInput(f"`{given[0]}` must be left out where a run is given")
        folder = run_folder(options.run)
        experiment = run_experiment(folder)
        settings, name = experiment.settings, experiment.dataset
        factory = None if options.model is None else _loaded(options.model)
        if ":" in experiment.network.name and factory is None:
            raise InvalidInput(
                f"the run in {folder} needs its own model again: --model {experiment.network.name}"
            )
        model = load_model(folder, device=device, model=factory)
        data_dir = options.data_dir or records.read_local(folder).get("data_dir")
        found = data.facts(name, data_dir=data_dir).domain
        if found != settings.domain:
            raise InvalidInput(
                f"the test set must have the domain of the run, {settings.domain}; got {found}"
            )
        split = data.load_test(name, data_dir=data_dir)
        max_radius = settings.max_radius if options.max_radius is None else options.max_radius
        domain, elide = settings.domain, settings.elide
        shipped = folder != Path(options.run)
        out = options.out or (Path("runs", folder.name) if shipped else folder)
    else:
        absent = [f"--{flag}" for flag, value in own.items() if value is None]
        absent += ["--max-radius"] if options.max_radius is None else []
        absent += ["--out"] if options.out is None else []
        if absent:
            raise InvalidInput(
                f"give a run folder, or a model of your own, which needs {', '.join(absent)} too"
            )
        name, max_radius, elide, out = options.dataset, options.max_radius, True, options.out
        known = data.facts(name, data_dir=options.data_dir)
        split, domain = data.load_test(name, data_dir=options.data_dir), known.domain
        model = _own_model(options, split, known.num_classes).to(device).eval()
    for flag, value in (("max_radius", max_radius), ("batch_size", options.batch_size)):
        if value is not None and not value > 0:
            raise InvalidInput(f"`{flag}` must be above 0; got {value}")
    outside = [radius for radius in options.radii or () if not 0 <= radius <= max_radius]
    if outside:
        raise InvalidInput(
            f"`--radii` must be in [0, {max_radius:g}], where radii are looked for; "
            f"got {outside[0]:g}"
        )
    # Before the work, not after it.
    records.make_writable(out)
    certificates = certify(
        model, split.to(device), max_radius=max_radius, bounds=options.bounds,
        arithmetic=options.arithmetic, domain=domain, elide=elide,
        batch_size=options.batch_size, progress=_counter(len(split)),
    )  # fmt: skip
    record_certification(out, certificates, split)
    _show(certificates, name, options.radii)
    print(f"wrote {records.CERTIFICATES} and {records.EXAMPLES} to {out}")


def _show(certificates: Certificates, name: str, radii: Sequence[float] | None) -> None:
    largest = certificates.max_radius
    chosen = radii or [share * largest for share in (0.25, 0.5, 0.75, 1.0)]
    print(
        f"{len(certificates)} test images of {name}, max_radius {largest:.4g}, "
        f"{certificates.bounds} bounds, {_ARITHMETIC[certificates.arithmetic]}"
    )
    print(_figures(certificates.accuracy, certificates.acr, certificates.art))
    for radius in chosen:
        share = 100 * certificates.certified_accuracy(radius)
        print(f"certified at {radius:.4g}: {share:.2f} %")


def _figures(accuracy: float, acr: float, art: float) -> str:
    return f"Acc {100 * accuracy:.2f}  ACR {100 * acr:.2f}  ART {100 * art:.2f}"


def _own_model(options: argparse.Namespace, split: Split, classes: int | None) -> nn.Module:
    model = _loaded(options.model)
    if not isinstance(model, nn.Module):
        if classes is None:
            raise InvalidInput(
                f"`--model` must name a module, not a factory, where {options.dataset} does not "
                f"say how many classes there are; got {options.model}"
            )
        model = build_own(model, tuple(split.images.shape[1:]), classes)
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # numpy has no bfloat16

    if not options.weights.is_file():
        raise RunError(f"the weights {options.weights} are missing: there is no such file")
    try:
        arrays = load_file(options.weights)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{options.weights} is no safetensors file: {error}") from error
    load_weights(model, arrays, source=options.weights)
    return model


# -- shared -------------------------------------------------------------------------------


def _loaded(name: str) -> Any:
    """What `package.module:factory` names; modules are looked for in the current folder too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InvalidInput(f"`--model` must be given as package.module:factory; got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    # Everything: a user's module may fail in any way while it is imported.
    except Exception as error:
        raise InvalidInput(
            f"`--model` {name}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if attribute not in vars(found):
        raise InvalidInput(
            f"`--model` {name}: {module} has no {attribute!r}{nearest(attribute, vars(found))}"
        )
    return vars(found)[attribute]


def _device(name: str | None) -> str:
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    available_device(chosen)
    return chosen


def _counter(total: int) -> Callable[[int], None] | None:
    """Shows how many samples are done, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} certified", end=end, file=sys.stderr, flush=True)

    return show


def _number(text: str) -> float:
    # argparse shows the words of this error alone.
    try:
        return number(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _radii(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one of our errors, so that all are printed alike."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message} (see {self.prog} --help)")


def _parsed(words: list[str]) -> argparse.Namespace:
    parser, verbs = _parser()
    if not words:
        parser.print_help()
        raise SystemExit(0)
    if not words[0].startswith("-") and words[0] not in verbs:
        raise InvalidInput(
            f"the verb must be one of {', '.join(verbs)}; got {words[0]!r}"
            f"{nearest(words[0], verbs)}"
        )
    if words[0].startswith("-") and words[0] not in parser._option_string_actions:
        raise InvalidInput(
            f"unknown argument {words[0]!r}{nearest(words[0], parser._option_string_actions)}"
        )
    options, unknown = parser.parse_known_args(words)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
    if flags:
        known = verbs[words[0]]._option_string_actions if words[0] in verbs else ()
        raise InvalidInput(f"unknown argument {flags[0]!r}{nearest(flags[0], known)}")
    return options


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    form: Any = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="acert", description=acert.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"acert {acert.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    train = verbs.add_parser(
        "train", help="train a network", epilog=_TRAIN_EXAMPLES, formatter_class=form,
        allow_abbrev=False, description="Train a network into a run folder.",
    )  # fmt: skip
    train.set_defaults(verb=_train)
    add = train.add_argument
    add("--dataset", help=f"{', '.join(data.NAMES)} (default: digits)")
    add("--method", help=f"{', '.join(METHODS)} (default: acert)")
    add("--kappa", type=_number, help="share of standard loss, from 0 to 1 (default: 0)")
    add("--max-radius", type=_number, help="largest radius, such as 0.1 or 8/255")
    add("--steps", type=int, help="root steps of acert (default: 2)")
    add("--epochs", type=int, help="other than the recipe's; schedules are scaled with it")
    add("--batch-size", type=int, help="samples a step")
    add("--seed", type=int, help="of initial weights and batches (default: 0)")
    add("--train-on-all", action="store_true", help="hold nothing out for validation")
    add("--set", action="append", metavar="NAME=VALUE", help="any field of the recipe")
    add("--show", action="store_true", help="print the fields of the recipe and stop")
    add("--out", type=Path, help="run folder (default: runs/DATASET-METHOD-kKAPPA-sSEED)")
    add("--resume", type=Path, metavar="RUN", help="go on with a run, by its own config")
    add("--tensorboard", action="store_true", help="write the figures as events too")
    add("--model", help="a name of acert.models, or package.module:factory of your own, "
        "called with (input_shape, num_classes)")  # fmt: skip

    certify = verbs.add_parser(
        "certify", help="certify a test set", epilog=_CERTIFY_EXAMPLES, formatter_class=form,
        allow_abbrev=False, description="Open the test set and prove a radius for every sample.",
    )  # fmt: skip
    certify.set_defaults(verb=_certify)
    add = certify.add_argument
    add("run", nargs="?", metavar="RUN", help="run folder, or the name of a shipped model")
    add("--arithmetic", choices=_ARITHMETIC, default="real", help="what is proven (default: real)")
    add("--bounds", choices=("ibp", "crown-ibp"), default="ibp", help="default: ibp")
    add("--radii", type=_radii, help="where to read certified accuracy off, such as 0.01,8/255")
    add("--max-radius", type=_number, help="largest radius looked for (default: the run's)")
    add("--batch-size", type=int, help="samples held in memory at a time")
    add("--model", help="package.module:factory, or :model, of your own")
    add("--weights", type=Path, help="safetensors file of your own model")
    add("--dataset", help="data set for your own model")
    add("--out", type=Path, help="folder for the certificates (default: the run's)")

    for verb in (train, certify):
        verb.add_argument("--data-dir", type=Path, help="where the data are ($ACERT_DATA_DIR)")
        verb.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    return parser, {"train": train, "certify": certify}
