"""`acert export`: a classifier for other runtimes, with its radius or beside properties."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acert import data, records
from acert.cli.certify import refuse_no_elide, with_weights
from acert.cli.flags import Parser, add_verb, as_number, own_model
from acert.data import Split
from acert.deploy import CertifiedClassifier, write_benchmark, write_certified, write_plain
from acert.errors import InvalidInput, RunError
from acert.experiments.preparation import opened_test_set
from acert.zoo import load_model, run_experiment, run_folder

__all__ = ["add"]

_EXAMPLES = """examples:
  acert export runs/c25 --to c25.onnx           images in; logits, prediction and its radius out
  acert export runs/c25 --to c25.onnx --steps 9        half the time, radii to max_radius/512
  acert export runs/c25 --to c25.onnx --plain          the network alone
  acert export runs/c25 --plain --vnnlib bench/ --images 0:100 --radius 2/255
  acert export digits-acert --to digits.onnx    the model that comes with acert
  acert export --model mymodels:net --weights net.safetensors --dataset mnist \\
      --max-radius 0.3 --to mine.onnx
"""


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "export", _export, summary="write a model for other runtimes and verifiers",
        examples=_EXAMPLES, description="Write a trained model as an ONNX file that answers with "
        "its certified radius, or plainly, beside VNN-LIB properties for other verifiers.",
    )  # fmt: skip
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="run folder, or the name of a shipped model")
    add("--to", type=Path, metavar="FILE", help="ONNX file to write")
    add("--plain", action="store_true", help="the network alone, without its radius")
    add("--vnnlib", type=Path, metavar="DIR", help="with --plain: folder for model and properties")
    add("--images", type=_range, help="with --vnnlib: test images, such as 0:100 (default: all)")
    add("--radius", type=_fraction, help="with --vnnlib: of every property, such as 2/255")
    add("--timeout", type=int, help="with --vnnlib: seconds a property (default: 300)")
    add("--max-radius", type=as_number, help="largest radius looked for (default: the run's)")
    add("--steps", type=int, help="bisections of [0, max_radius] (default: 20)")
    add("--model", help="package.module:factory, or :model, of your own")
    add("--weights", type=Path, help="safetensors file, or .pt state dict, of your own model")
    add("--dataset", help="data set for your own model")
    add("--no-elide", action="store_true", help="your own model does not end in a linear layer")
    add("--data-dir", type=Path, help="where the data are ($ACERT_DATA_DIR)")
    return parser


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is exported, and what the file says of it."""

    model: nn.Module
    name: str
    dataset: str
    shape: tuple[int, ...]
    domain: tuple[float, float]
    max_radius: float
    elide: bool
    record: dict[str, Any]

    def examples(self) -> Tensor:
        """Made-up images of the right shape."""
        low, high = self.domain
        drawn = torch.rand(2, *self.shape, generator=torch.Generator().manual_seed(0))
        return (low + (high - low) * drawn).clamp(low, high)


def _export(options: argparse.Namespace) -> None:
    if options.to is None and options.vnnlib is None:
        raise InvalidInput("give `--to FILE`, or `--plain --vnnlib DIR`")
    if options.vnnlib is not None and not options.plain:
        raise InvalidInput("`--vnnlib` must come with `--plain`: verifiers read the network alone")
    if (options.vnnlib is None) != (options.radius is None):
        raise InvalidInput("`--vnnlib` and `--radius` must come together")
    if options.to is not None and (not options.to.name or options.to.is_dir()):
        raise InvalidInput(f"`--to` must name a file; got {options.to}")
    for flag in ("images", "timeout"):
        if vars(options)[flag] is not None and options.vnnlib is None:
            raise InvalidInput(f"`--{flag}` must come with `--vnnlib`")
    for flag, given in (
        ("max-radius", options.max_radius is not None), ("steps", options.steps is not None),
        ("no-elide", options.no_elide),
    ):  # fmt: skip
        if given and options.plain:
            raise InvalidInput(
                f"`--{flag}` must be left out with `--plain`: no radius is looked for"
            )
    subject = _from_run(options) if options.run is not None else _own(options)
    if options.to is not None:
        records.make_writable(options.to.parent)  # before the work, not after it
        if options.plain:
            write_plain(subject.model, subject.examples(), options.to, record=subject.record)
            print(f"wrote {options.to}: images in, logits out")
        else:
            classifier = CertifiedClassifier(
                subject.model, max_radius=subject.max_radius, domain=subject.domain,
                elide=subject.elide, **_given(options, "steps"),
            )  # fmt: skip
            write_certified(classifier, subject.examples(), options.to, record=subject.record)
            print(
                f"wrote {options.to}: images in; logits, prediction and radius out, "
                f"up to {subject.max_radius:.4g}"
            )
    if options.vnnlib is not None:
        _benchmark(subject, options)


def _given(options: argparse.Namespace, name: str) -> dict[str, int]:
    """A flag as an argument, if it is there: the default is that of the function."""
    value = vars(options)[name]
    return {} if value is None else {name: value}


def _benchmark(subject: _Subject, options: argparse.Namespace) -> None:
    if options.run is None:
        split = data.load_test(subject.dataset, data_dir=options.data_dir)
    else:
        split = opened_test_set(run_folder(options.run), data_dir=options.data_dir)
    start, end = options.images or (0, len(split))
    if end > len(split):
        raise InvalidInput(
            f"`--images` must lie in the test set of {len(split)} images; got {start}:{end}"
        )
    images = data.to_float(split.images[start:end])
    written = write_benchmark(
        subject.model, images, split.labels[start:end], options.vnnlib, name=subject.name,
        radius=options.radius, domain=subject.domain, first=start, record=subject.record,
        **_given(options, "timeout"),
    )  # fmt: skip
    print(
        f"wrote {len(written.properties)} properties to {options.vnnlib}; "
        f"misclassified and left out: {len(written.misclassified)}"
    )


def _from_run(options: argparse.Namespace) -> _Subject:
    for flag in ("weights", "dataset"):
        if vars(options)[flag] is not None:
            raise InvalidInput(f"`--{flag}` must be left out where a run is given")
    refuse_no_elide(options)
    folder = run_folder(options.run)
    experiment = run_experiment(folder)
    factory = None if options.model is None else own_model(options.model)
    if ":" in experiment.network.name and factory is None:
        raise InvalidInput(
            f"the run in {folder} needs its own model again: --model {experiment.network.name}"
        )
    model = load_model(folder, model=factory)
    config, environment = records.read_config(folder), records.read_environment(folder)
    settings = experiment.settings
    return _Subject(
        model=model, name=folder.name, dataset=experiment.dataset,
        shape=_input_shape(folder, config), domain=settings.domain,
        max_radius=settings.max_radius if options.max_radius is None else options.max_radius,
        elide=settings.elide,
        # Not the command, which may name folders of the machine it ran on.
        record={"experiment": config["experiment"]}
        | {key: environment[key] for key in ("commit", "acert", "torch") if key in environment},
    )  # fmt: skip


def _input_shape(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    data_facts = config.get("data")
    shape = data_facts.get("input_shape") if isinstance(data_facts, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise RunError(f"{folder / records.CONFIG} is damaged: `input_shape` cannot be {shape!r}")
    return tuple(shape)


def _own(options: argparse.Namespace) -> _Subject:
    needed = ("model", "weights", "dataset", *(() if options.plain else ("max_radius",)))
    absent = [f"--{name.replace('_', '-')}" for name in needed if vars(options)[name] is None]
    if absent:
        raise InvalidInput(
            f"give a run folder, or a model of your own, which needs {', '.join(absent)} too"
        )
    known = data.facts(options.dataset, data_dir=options.data_dir)
    split: Split = data.load_test(options.dataset, data_dir=options.data_dir)
    model = with_weights(options, split, known.num_classes)
    model.eval()  # by itself: a module's own `train` may return nothing
    return _Subject(
        model=model,
        name=options.weights.stem, dataset=options.dataset,
        shape=tuple(split.images.shape[1:]), domain=known.domain,
        max_radius=options.max_radius, elide=not options.no_elide,
        record={"model": options.model},
    )  # fmt: skip


def _range(text: str) -> tuple[int, int]:
    """Two places in a test set, first:last + 1, for `type=`."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"a range such as 0:100 is needed; got {text!r}")
    return int(first), int(end)


def _fraction(text: str) -> Fraction:
    """An exact number, such as 2/255 or 0.01, for `type=`."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"a number is needed, such as 0.01 or 2/255; got {text!r}"
        ) from None
