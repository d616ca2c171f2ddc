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
from acert.radius import CertifiedRadius, Status, certified_radius
from acert.rootfind import Bisection, Brent, RootResult, RootStatus

__version__ = "0.1.0"

__all__ = [
    "AcertError",
    "BatchStatistics",
    "Bisection",
    "Brent",
    "CertifiedRadius",
    "DataError",
    "Interval",
    "InvalidInput",
    "RootResult",
    "RootStatus",
    "RunError",
    "Status",
    "UnsupportedOperation",
    "certified_margin",
    "certified_radius",
    "clean_pass",
    "interval_bounds",
    "models",
    "register_rule",
    "worst_case_logits",
]
