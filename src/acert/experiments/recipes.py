"""Recipes: every method on every data set, as a function that returns a frozen `Experiment`.

The figures are those of Table 4 and of the methods' authors. `recipe` finds one by name:

>>> recipe("mnist", "acert") == mnist_acert()
True
>>> recipe("mnist", "acert", kappa=0.25, epochs=50).settings.epochs
50
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from acert import data
from acert.data import Augmentation
from acert.errors import InvalidInput
from acert.experiments.experiment import Experiment, Network
from acert.experiments.override import nearest, override
from acert.methods import (
    METHODS,
    Acert,
    AcertFast,
    CcIBP,
    CrownIBP,
    ExpIBP,
    Expressive,
    FastIBP,
    Method,
    MtlIBP,
    Sabr,
    Standard,
)
from acert.schedules import FullRadius, OneCycle, RadiusSchedule, SmoothRadius, StepDecay
from acert.settings import Settings

__all__ = ["RECIPES", "in_range", "recipe", "with_epochs"]

Recipe = Callable[..., Experiment]


def recipe(dataset: str, method: str, *, kappa: float | None = None, **changes: Any) -> Experiment:
    """The experiment of a method on a data set, by their names on the command line.

    `kappa` is 0 unless given. `changes` are fields of the experiment by name, as for
    `override`; a new number of epochs leaves the schedules as they are (see `with_epochs`).
    """
    if dataset not in data.NAMES:
        raise InvalidInput(
            f"`dataset` must be one of {', '.join(data.NAMES)}; got {dataset!r}"
            f"{nearest(dataset, data.NAMES)}"
        )
    if method not in METHODS:
        raise InvalidInput(
            f"`method` must be one of {', '.join(METHODS)}; got {method!r}"
            f"{nearest(method, METHODS)}"
        )
    if method == "standard" and kappa not in (None, 1):
        raise InvalidInput(f"`kappa` must be 1 for standard training; got {kappa}")
    chosen = {} if method == "standard" else {"kappa": 0.0 if kappa is None else kappa}
    if (dataset, method) in RECIPES:
        experiment = RECIPES[dataset, method](**chosen)
    else:
        experiment = _own(dataset, METHODS[method](**chosen))
    for name, value in changes.items():
        experiment = override(experiment, name, value)
    return experiment


def with_epochs(experiment: Experiment, epochs: int) -> Experiment:
    """The experiment with another number of epochs, its schedules shrunk or stretched with it.

    Lengths are rounded to whole epochs, at least 1; decays that fall on one epoch become one.

    >>> short = with_epochs(mnist_fastibp(), 10).settings
    >>> short.radius_schedule, short.learning_rate.epochs
    (SmoothRadius(start_epoch=2, length=2), (6, 7))
    """
    settings = experiment.settings
    if epochs < 1:
        raise InvalidInput(f"`epochs` must be at least 1; got {epochs}")

    def scaled(count: int) -> int:
        return max(1, round(count * epochs / settings.epochs))

    radius, rate = settings.radius_schedule, settings.learning_rate
    if isinstance(radius, SmoothRadius):
        start = min(radius.start_epoch, epochs)
        radius = replace(radius, start_epoch=start, length=scaled(radius.length))
    if isinstance(rate, StepDecay):
        rate = replace(rate, epochs=tuple(sorted({scaled(epoch) for epoch in rate.epochs})))
    settings = replace(settings, epochs=epochs, radius_schedule=radius, learning_rate=rate)
    return replace(experiment, settings=settings)


def in_range(experiment: Experiment) -> Experiment:
    """The experiment in TF32 if it is in float16 and may leave its range.

    That was found to be enough for CNN7 with a radius schedule. The coefficients of CROWN's linear
    relaxation leave it, and so do bounds at the full radius before any training; losses that are
    mixed with an attack's have not been tried.
    """
    settings = experiment.settings
    tried = (
        experiment.network.name == "cnn7"
        and not isinstance(settings.method, CrownIBP | Expressive)
        and not isinstance(settings.radius_schedule, FullRadius)
    )
    if tried or settings.precision != "float16":
        return experiment
    return replace(experiment, settings=replace(settings, precision="tf32"))


def _standard(experiment: Experiment) -> Experiment:
    """The same run on the clean loss: PyTorch's initialisation, no regularisers, no L1."""
    settings = replace(experiment.settings, method=Standard(), regularization=0.0, l1=0.0)
    network = replace(experiment.network, initialization="default")
    return replace(experiment, settings=settings, network=network)


# -- MNIST: radius 0.4, 100 epochs, warm-up over 20 ---------------------------------------


def _mnist(method: Method, **changes: Any) -> Experiment:
    settings = Settings(
        method=method,
        max_radius=0.4,
        epochs=100,
        batch_size=128,
        learning_rate=OneCycle(max_rate=2e-3),
        radius_schedule=SmoothRadius(start_epoch=2, length=20),
        precision="tf32",
    )
    return _experiment("mnist", settings, **changes)


def mnist_standard() -> Experiment:
    """Clean loss alone."""
    return _standard(_mnist(Standard()))


def mnist_fastibp(*, kappa: float = 0.0) -> Experiment:
    """FastIBP (Shi et al., 2021), at the paper's radius."""
    return _mnist(FastIBP(kappa=kappa), learning_rate=StepDecay(epochs=(60, 70)))


def mnist_crown_ibp(*, kappa: float = 0.0) -> Experiment:
    """CROWN-IBP (Zhang et al., 2020) with FastIBP's settings, on CNN7."""
    return _mnist(CrownIBP(kappa=kappa), learning_rate=StepDecay(epochs=(60, 70)))


def mnist_sabr(*, kappa: float = 0.0) -> Experiment:
    """SABR (Mueller et al., 2023), trained at its authors' 0.3: certify it to 0.4."""
    return _mnist(
        Sabr(kappa=kappa, box_share=0.6),
        max_radius=0.3,
        epochs=70,
        batch_size=256,
        learning_rate=StepDecay(epochs=(50, 60)),
        l1=1e-6,
    )


def _mnist_expressive(method: Method, **changes: Any) -> Experiment:
    """The settings of De Palma et al. (2024) for 0.3: like them, trained a third above."""
    rate = StepDecay(epochs=(50, 60))
    return _mnist(method, epochs=70, batch_size=256, learning_rate=rate, **changes)


def mnist_cc_ibp(*, kappa: float = 0.0) -> Experiment:
    """CC-IBP (De Palma et al., 2024)."""
    return _mnist_expressive(CcIBP(kappa=kappa, bound_share=0.3), l1=3e-6)


def mnist_mtl_ibp(*, kappa: float = 0.0) -> Experiment:
    """MTL-IBP (De Palma et al., 2024)."""
    return _mnist_expressive(MtlIBP(kappa=kappa, bound_share=0.08), l1=1e-6)


def mnist_exp_ibp(*, kappa: float = 0.0) -> Experiment:
    """Exp-IBP, for which its authors have no figures on this set: the share is CC-IBP's."""
    return _mnist_expressive(ExpIBP(kappa=kappa, bound_share=0.3), l1=1e-6)


def mnist_acert(*, kappa: float = 0.0) -> Experiment:
    """ACERT with two root steps (Table 6)."""
    return _mnist(Acert(kappa=kappa))


def mnist_acert_fast(*, kappa: float = 0.0) -> Experiment:
    """ACERT-fast with ACERT's settings (Table 6)."""
    return _mnist(AcertFast(kappa=kappa))


# -- CIFAR-10: radius 8.8/255, 200 epochs, warm-up over 80 --------------------------------


def _cifar10(method: Method, **changes: Any) -> Experiment:
    settings = Settings(
        method=method,
        max_radius=8.8 / 255,
        epochs=200,
        batch_size=128,
        learning_rate=OneCycle(max_rate=2e-3),
        radius_schedule=SmoothRadius(start_epoch=2, length=80),
        precision="float16",
        augmentation=Augmentation(padding=2, flip=True),
    )
    return _experiment("cifar10", settings, **changes)


def cifar10_standard() -> Experiment:
    """Clean loss alone."""
    return _standard(_cifar10(Standard()))


def cifar10_fastibp(*, kappa: float = 0.0) -> Experiment:
    """FastIBP (Shi et al., 2021), at the paper's radius; its authors' own is 8/255."""
    return _cifar10(FastIBP(kappa=kappa), learning_rate=StepDecay(epochs=(120, 140)))


def cifar10_crown_ibp(*, kappa: float = 0.0) -> Experiment:
    """CROWN-IBP (Zhang et al., 2020) with FastIBP's settings, on CNN7."""
    return _cifar10(CrownIBP(kappa=kappa), learning_rate=StepDecay(epochs=(120, 140)))


def cifar10_sabr(*, kappa: float = 0.0) -> Experiment:
    """SABR (Mueller et al., 2023), trained at its authors' 8/255: certify it to 8.8/255."""
    return _cifar10(
        Sabr(kappa=kappa, box_share=0.7),
        max_radius=8 / 255,
        epochs=180,
        learning_rate=StepDecay(epochs=(140, 160)),
    )


def _cifar10_expressive(method: Method, **changes: Any) -> Experiment:
    """The settings of De Palma et al. (2024) for 8/255: certify it to 8.8/255."""
    rate = StepDecay(epochs=(180, 220))
    return _cifar10(method, max_radius=8 / 255, epochs=260, learning_rate=rate, **changes)


def cifar10_cc_ibp(*, kappa: float = 0.0) -> Experiment:
    """CC-IBP (De Palma et al., 2024)."""
    return _cifar10_expressive(CcIBP(kappa=kappa, bound_share=0.5))


def cifar10_mtl_ibp(*, kappa: float = 0.0) -> Experiment:
    """MTL-IBP (De Palma et al., 2024)."""
    return _cifar10_expressive(MtlIBP(kappa=kappa, bound_share=0.5), l1=1e-7)


def cifar10_exp_ibp(*, kappa: float = 0.0) -> Experiment:
    """Exp-IBP (De Palma et al., 2024)."""
    return _cifar10_expressive(ExpIBP(kappa=kappa, bound_share=0.5))


def cifar10_acert(*, kappa: float = 0.0) -> Experiment:
    """ACERT with two root steps (Table 6)."""
    return _cifar10(Acert(kappa=kappa))


def cifar10_acert_fast(*, kappa: float = 0.0) -> Experiment:
    """ACERT-fast with ACERT's settings (Table 6)."""
    return _cifar10(AcertFast(kappa=kappa))


# -- TinyImageNet: radius 1/255, 200 epochs, warm-up over 80, L1 --------------------------


def _tinyimagenet(method: Method, **changes: Any) -> Experiment:
    settings = Settings(
        method=method,
        max_radius=1 / 255,
        epochs=200,
        batch_size=256,
        learning_rate=OneCycle(max_rate=2e-3),
        radius_schedule=SmoothRadius(start_epoch=2, length=80),
        regularization=0.2,
        l1=1e-4,
        precision="float16",
        augmentation=Augmentation(padding=4, flip=True),
    )
    return _experiment("tinyimagenet", settings, **changes)


# The warm-up of FastIBP's authors starts with the first epoch here, and only here.
_FROM_THE_START: RadiusSchedule = SmoothRadius(start_epoch=1, length=80)


def tinyimagenet_standard() -> Experiment:
    """Clean loss alone."""
    return _standard(_tinyimagenet(Standard()))


def tinyimagenet_fastibp(*, kappa: float = 0.0) -> Experiment:
    """FastIBP (Shi et al., 2021)."""
    return _tinyimagenet(
        FastIBP(kappa=kappa),
        learning_rate=StepDecay(epochs=(120, 140)),
        radius_schedule=_FROM_THE_START,
    )


def tinyimagenet_crown_ibp(*, kappa: float = 0.0) -> Experiment:
    """CROWN-IBP (Zhang et al., 2020) with FastIBP's settings, on CNN7."""
    return _tinyimagenet(
        CrownIBP(kappa=kappa),
        learning_rate=StepDecay(epochs=(120, 140)),
        radius_schedule=_FROM_THE_START,
    )


def tinyimagenet_sabr(*, kappa: float = 0.0) -> Experiment:
    """SABR's box share for this set, on whole images; the rest as for FastIBP."""
    return _tinyimagenet(
        Sabr(kappa=kappa, box_share=0.4),
        learning_rate=StepDecay(epochs=(120, 140)),
        radius_schedule=_FROM_THE_START,
    )


def _tinyimagenet_expressive(method: Method) -> Experiment:
    """The settings of De Palma et al. (2024) for 1/255."""
    rate = StepDecay(epochs=(120, 140))
    return _tinyimagenet(method, epochs=160, batch_size=128, learning_rate=rate, l1=5e-5)


def tinyimagenet_cc_ibp(*, kappa: float = 0.0) -> Experiment:
    """CC-IBP (De Palma et al., 2024)."""
    return _tinyimagenet_expressive(CcIBP(kappa=kappa, bound_share=0.01))


def tinyimagenet_mtl_ibp(*, kappa: float = 0.0) -> Experiment:
    """MTL-IBP (De Palma et al., 2024)."""
    return _tinyimagenet_expressive(MtlIBP(kappa=kappa, bound_share=0.01))


def tinyimagenet_exp_ibp(*, kappa: float = 0.0) -> Experiment:
    """Exp-IBP (De Palma et al., 2024)."""
    return _tinyimagenet_expressive(ExpIBP(kappa=kappa, bound_share=0.04))


def tinyimagenet_acert(*, kappa: float = 0.0) -> Experiment:
    """ACERT with two root steps (Table 6)."""
    return _tinyimagenet(Acert(kappa=kappa))


def tinyimagenet_acert_fast(*, kappa: float = 0.0) -> Experiment:
    """ACERT-fast with ACERT's settings (Table 6)."""
    return _tinyimagenet(AcertFast(kappa=kappa))


# -- digits: a small network, under a minute on two cores ---------------------------------


def _digits(method: Method, *, warm_up: int = 36) -> Experiment:
    """Chosen on validation images: the radius so large that it costs accuracy, the rest by ART.

    A warm-up of 36 epochs is the best one for every method but ACERT, which wants 24.
    """
    settings = Settings(
        method=method,
        max_radius=0.3,
        epochs=60,
        batch_size=64,
        learning_rate=OneCycle(max_rate=2e-2),
        radius_schedule=SmoothRadius(start_epoch=2, length=warm_up),
    )
    return _experiment("digits", settings)


def digits_standard() -> Experiment:
    """Clean loss alone."""
    return _standard(_digits(Standard()))


def digits_fastibp(*, kappa: float = 0.0) -> Experiment:
    """FastIBP (Shi et al., 2021)."""
    return _digits(FastIBP(kappa=kappa))


def digits_crown_ibp(*, kappa: float = 0.0) -> Experiment:
    """CROWN-IBP (Zhang et al., 2020)."""
    return _digits(CrownIBP(kappa=kappa))


def digits_sabr(*, kappa: float = 0.0) -> Experiment:
    """SABR (Mueller et al., 2023)."""
    return _digits(Sabr(kappa=kappa))


def digits_cc_ibp(*, kappa: float = 0.0) -> Experiment:
    """CC-IBP (De Palma et al., 2024)."""
    return _digits(CcIBP(kappa=kappa))


def digits_mtl_ibp(*, kappa: float = 0.0) -> Experiment:
    """MTL-IBP (De Palma et al., 2024)."""
    return _digits(MtlIBP(kappa=kappa))


def digits_exp_ibp(*, kappa: float = 0.0) -> Experiment:
    """Exp-IBP (De Palma et al., 2024)."""
    return _digits(ExpIBP(kappa=kappa))


def digits_acert(*, kappa: float = 0.0) -> Experiment:
    """ACERT with two root steps."""
    return _digits(Acert(kappa=kappa), warm_up=24)


def digits_acert_fast(*, kappa: float = 0.0) -> Experiment:
    """ACERT-fast."""
    return _digits(AcertFast(kappa=kappa))


# -- a user's own data --------------------------------------------------------------------


def _own(dataset: str, method: Method) -> Experiment:
    """Something to start from: CNN7 of a quarter width; radius and epochs are yours to choose."""
    settings = Settings(
        method=method,
        max_radius=0.05,
        epochs=60,
        batch_size=128,
        learning_rate=OneCycle(max_rate=5e-3),
        radius_schedule=SmoothRadius(start_epoch=2, length=24),
    )
    experiment = Experiment(dataset=dataset, settings=settings, network=Network(width=16))
    return experiment if method.uses_bounds else _standard(experiment)


def _experiment(dataset: str, settings: Settings, **changes: Any) -> Experiment:
    """The settings with a method's own changes, on the network that the data set is known for."""
    network = _SMALL if dataset == "digits" else Network(name="cnn7", width=64)
    settings = replace(settings, **changes)
    return in_range(Experiment(dataset=dataset, settings=settings, network=network))


_SMALL = Network(name="small_cnn", width=16)
# By the names on the command line: every function above whose name is dataset_method.
RECIPES: dict[tuple[str, str], Recipe] = {
    (dataset, method): globals()[f"{dataset}_{method.replace('-', '_')}"]
    for dataset in ("digits", "mnist", "cifar10", "tinyimagenet")
    for method in METHODS
}
