"""Exact certified radii and adaptive certified training for PyTorch classifiers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from acert.version import __version__ as __version__

# What is listed here is imported when it is first asked for: torch alone takes a second, which
# `acert --help` need not wait for, and Ctrl-C in that second is the command's to handle.
if TYPE_CHECKING:
    from acert import models
    from acert.bounds import (
        BatchStatistics,
        Interval,
        certified_margin,
        clean_pass,
        interval_bounds,
        register_rule,
        worst_case_logits,
    )
    from acert.deploy import CertifiedClassifier
    from acert.errors import AcertError, DataError, InvalidInput, RunError, UnsupportedOperation
    from acert.experiments.run import Run, train
    from acert.methods import (
        Acert,
        AcertFast,
        CcIBP,
        CrownIBP,
        ExpIBP,
        FastIBP,
        MtlIBP,
        Sabr,
        Standard,
    )
    from acert.optimizers import Adam, Muon
    from acert.radius import CertifiedRadius, Status, certified_radius
    from acert.rootfind import Bisection, Brent, PowerLaw, RootResult, RootStatus
    from acert.zoo import load_model

__all__ = [
    "Acert",
    "AcertError",
    "AcertFast",
    "Adam",
    "BatchStatistics",
    "Bisection",
    "Brent",
    "CcIBP",
    "CertifiedClassifier",
    "CertifiedRadius",
    "CrownIBP",
    "DataError",
    "ExpIBP",
    "FastIBP",
    "Interval",
    "InvalidInput",
    "MtlIBP",
    "Muon",
    "PowerLaw",
    "RootResult",
    "RootStatus",
    "Run",
    "RunError",
    "Sabr",
    "Standard",
    "Status",
    "UnsupportedOperation",
    "certified_margin",
    "certified_radius",
    "clean_pass",
    "interval_bounds",
    "load_model",
    "models",
    "register_rule",
    "train",
    "worst_case_logits",
]

_HOMES = (
    "errors", "rootfind", "optimizers", "bounds", "radius", "deploy", "methods",
    "experiments.run", "zoo",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        if name == "models":
            return import_module("acert.models")
        for home in _HOMES:
            found = vars(import_module(f"acert.{home}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module 'acert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
