"""What the paper's text and captions claim, beside what the records say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from acert import metrics
from acert.experiments.paper.standing import Standing

__all__ = ["DATASETS", "Standings", "average", "claims", "root_step_shares", "trade_off_rows"]

Standings = Mapping[str, Standing]

DATASETS = {"mnist": "MNIST", "cifar10": "CIFAR-10", "tinyimagenet": "TinyImageNet"}
_DASH = "-"
# Section 4.1: the ACR of ACERT and of FastIBP at an accuracy.
_PAPER_ACR = {"cifar10": (75.0, "18 and 9"), "tinyimagenet": (38.0, "14 and 7")}
# Section 4.2.2.
_PAPER_STEP_RATIO = 3.3


def claims(known: Standings) -> str:
    """The claims as a Markdown table; a dash where records are missing."""
    lines = ["| claim | paper | ours |", "| --- | --- | --- |"]
    for dataset, (accuracy, published) in _PAPER_ACR.items():
        points = [trade_off_rows(known, dataset, method) for method in ("acert", "fastibp")]
        reached = [_acr_at(accuracy, rows) for rows in points]
        ours = " and ".join(_DASH if value is None else f"{value:.1f}" for value in reached)
        lines.append(
            f"| ACR at {accuracy:g} % accuracy on {DATASETS[dataset]}, ACERT and FastIBP "
            f"(Figure 1) | {published} | {ours} |"
        )
    steps = [known.get(f"table6/cifar10/{key}") for key in ("acert-steps2", "fastibp-k0")]
    times = [
        None if one is None else average([record.step_seconds for record in one.records])
        for one in steps
    ]
    ratio = times[0] / times[1] if times[0] is not None and times[1] else None
    lines.append(
        f"| a step with 2 root steps, in units of FastIBP's (Figure 2) | {_PAPER_STEP_RATIO:g} | "
        f"{_DASH if ratio is None else f'{ratio:.2f}'} |"
    )
    for dataset in ("cifar10", "mnist"):
        crossing = _crossing(known, dataset)
        lines.append(
            f"| certified accuracy on {DATASETS[dataset]} at kappa 0: ACERT above FastIBP at small "
            "radii, below it at the largest (Appendix C) | above, then below | "
            f"{_DASH if crossing is None else crossing} |"
        )
    return "\n".join(lines)


def trade_off_rows(known: Standings, dataset: str = "cifar10", *methods: str) -> list[Standing]:
    """The rows whose runs are the points of Figure 1, each run once; of these methods, or all."""
    plain = [
        one
        for one in known.values()
        if one.row.dataset == dataset
        and one.row.part in ("table1", "figure1")
        and one.row.training.method in (methods or ("acert", "fastibp", "standard"))
        and not one.row.training.changes
    ]
    return sorted(plain, key=lambda one: (one.row.training.method, one.row.kappa))


def _acr_at(target: float, rows: Sequence[Standing]) -> float | None:
    """ACR at an accuracy, on the straight line between the two runs around it."""
    points = sorted(
        (
            float(np.mean([100 * record.certificates.accuracy for record in one.records])),
            float(np.mean([100 * record.certificates.acr for record in one.records])),
        )
        for one in rows
        if one.records
    )
    if not points or not points[0][0] <= target <= points[-1][0]:
        return None
    accuracy, acr = zip(*points, strict=True)
    return float(np.interp(target, accuracy, acr))


def _crossing(known: Standings, dataset: str) -> str | None:
    """Where the mean curve of ACERT falls below that of FastIBP, in words."""
    curves = []
    for key in ("acert-k0", "fastibp-k0"):
        one = known.get(f"figure3/{dataset}/{key}")
        if one is None or not one.records:
            return None
        largest = one.row.training.max_radius
        curves.append(
            np.mean(
                [
                    metrics.certified_accuracy_curve(
                        record.certificates.radius, record.certificates.correct,
                        max_radius=largest, points=257,
                    ).accuracy
                    for record in one.records
                ],
                axis=0,
            )
        )  # fmt: skip
    ahead = curves[0] >= curves[1]
    if ahead.all():
        return "above throughout"
    if not ahead[0]:
        return "below already at 0"
    first = int(np.argmin(ahead))
    share = 100 * first / (len(ahead) - 1)
    after = "below" if (curves[0] <= curves[1])[first:].all() else "mostly below"
    return f"above up to {share:.0f} % of eps_max, then {after}"


def root_step_shares(known: Standings) -> str:
    """Shares of training images by the steps that their radii take."""
    counted = [
        (record, record.root_steps)
        for key in ("table1/cifar10/acert-k0", "table1/mnist/acert-k0")
        for record in (known[key].records[:1] if key in known else ())
        if record.root_steps is not None
    ]
    if not counted:
        return "No record has counted its root steps yet."
    lines = [
        "| run | images with a root | steps to a point within tolerance: mean; share up to 2, 3, "
        "4, 6, 8 | to a proven bracket |",
        "| --- | --- | --- | --- |",
    ]
    for record, found in counted:
        cells = [_shares(found.arrived), _shares(found.proven)]
        roots = sum(count for _, count in found.proven)
        lines.append(
            f"| [{record.folder.name}](RECORDS/{record.folder.name}) | {roots} of {found.samples} "
            f"| {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _shares(counts: Sequence[tuple[int, int]]) -> str:
    total = sum(count for _, count in counts)
    if not total:
        return _DASH
    mean = sum(steps * count for steps, count in counts) / total
    shares = [
        100 * sum(count for steps, count in counts if steps <= limit) / total
        for limit in (2, 3, 4, 6, 8)
    ]
    return f"{mean:.1f}; " + ", ".join(f"{share:.0f} %" for share in shares)


def average(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
