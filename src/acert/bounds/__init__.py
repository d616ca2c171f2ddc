"""Interval bounds of unmodified models: the interval, the rule table, propagation, margins."""

from acert.bounds.interval import BatchStatistics, Interval
from acert.bounds.margin import certified_margin, worst_case_logits
from acert.bounds.propagation import Statistics, clean_pass, interval_bounds, propagate
from acert.bounds.registration import register_rule

__all__ = [
    "BatchStatistics",
    "Interval",
    "Statistics",
    "certified_margin",
    "clean_pass",
    "interval_bounds",
    "propagate",
    "register_rule",
    "worst_case_logits",
]
