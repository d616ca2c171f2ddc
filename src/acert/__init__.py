"""Exact certified radii and adaptive certified training for PyTorch classifiers."""

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
from acert.errors import AcertError, DataError, InvalidInput, RunError, UnsupportedOperation
from acert.experiments.run import Run, train
from acert.methods import Acert, AcertFast, CrownIBP, FastIBP, Sabr, Standard
from acert.radius import CertifiedRadius, Status, certified_radius
from acert.rootfind import Bisection, Brent, RootResult, RootStatus
from acert.version import __version__ as __version__
from acert.zoo import load_model

__all__ = [
    "Acert",
    "AcertError",
    "AcertFast",
    "BatchStatistics",
    "Bisection",
    "Brent",
    "CertifiedRadius",
    "CrownIBP",
    "DataError",
    "FastIBP",
    "Interval",
    "InvalidInput",
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
