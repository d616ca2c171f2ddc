"""What the page shows, as plain JSON values: groups, runs, images and words.

Figures of runs and groups are those of the records, digit for digit; curves are rounded to what a
screen can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from acert import metrics
from acert.metrics import Spread
from acert.report.certification import Examples
from acert.report.collection import Collection, counted
from acert.report.figures import shown_tracks
from acert.report.group import Band, Group, series_of, smallest_kappa
from acert.report.picture import data_uri
from acert.report.run import Run
from acert.report.tables import ARITHMETIC
from acert.version import __version__

__all__ = ["content"]

# Images a run, most and least certified each, and the room for all of them, in characters.
_PICTURES = 8
_ROOM = 1_500_000
# Images below this many pixels a side are shown with visible pixels.
_COARSE = 48


def content(collection: Collection) -> dict[str, Any]:
    """Everything that the page shows, as JSON values without NaN."""
    found = collection.certification
    series = series_of(collection.groups)
    place = {id(group): i for i, one in enumerate(series) for group in one.groups}
    front = _fronts(collection.certified_groups)
    tracks = shown_tracks(collection.groups)
    images, examples = _examples(collection)
    return {
        "title": f"Accuracy and certified robustness on {collection.dataset}",
        "facts": _facts(collection),
        "made": _made(collection),
        "alarms": list(collection.alarms),
        "complaints": list(collection.complaints),
        "tiles": _tiles(collection),
        "max_radius": found.max_radius,
        "radii": _rounded(found.curve.radius),
        "edges": _rounded(found.distribution.edges),
        "classes": list(collection.classes),
        "series": [
            {
                "name": one.label,
                "colour": f"s{i}",
                "marker": one.look.marker,
                "dashes": one.look.dashes,
                "hollow": one.look.hollow,
            }
            for i, one in enumerate(series)
        ],
        "tracks": [{"name": name, "title": title, "factor": f} for name, title, f in tracks],
        "groups": [
            _group(group, place[id(group)], id(group) in front, tracks)
            for group in collection.groups
        ],
        "runs": [_run(run, i) for i, group in enumerate(collection.groups) for run in group.runs],
        "images": images,
        "examples": examples,
    }


# -- words --------------------------------------------------------------------------------


def _facts(collection: Collection) -> str:
    found = collection.certification
    methods = {group.method for group in collection.groups}
    return (
        f"{counted(len(collection.runs), 'run')} in {counted(len(collection.groups), 'setting')} "
        f"of {counted(len(methods), 'method')}. Certified on {found.samples} test images up to "
        f"radius {found.max_radius:.6g}, {found.bounds} bounds, "
        f"{ARITHMETIC.get(found.arithmetic, found.arithmetic)}."
    )


def _made(collection: Collection) -> str:
    environments = [run.environment for run in collection.runs]
    hardware = sorted({one.hardware for one in environments} - {""})
    commits = sorted({one.commit[:10] for one in environments} - {""})
    return " ".join(
        [
            f"Made by acert {__version__} from run folders.",
            *([f"Trained on {', '.join(hardware)}."] if hardware else []),
            *([f"Commit {', '.join(commits)}."] if commits else []),
        ]
    )


def _tiles(collection: Collection) -> list[dict[str, str]]:
    groups, waiting = collection.certified_groups, len(collection.uncertified)
    tiles = [
        {
            "word": "Certified runs",
            "value": str(len(collection.runs) - waiting),
            "spread": "",
            "of": f"{waiting} not certified" if waiting else "all that were trained",
        }
    ]
    for word, spreads in (
        ("Highest ART", [group.art for group in groups]),
        ("Highest accuracy", [group.accuracy for group in groups]),
        ("Highest ACR", [group.acr for group in groups]),
    ):
        best = max(range(len(groups)), key=lambda i: spreads[i].mean)
        mean, std = spreads[best].mean, spreads[best].std
        spread = "" if std is None else f" \N{PLUS-MINUS SIGN} {100 * std:.2f}"
        tiles.append(
            {
                "word": word,
                "value": f"{100 * mean:.2f}",
                "spread": f"{spread} %",
                "of": groups[best].label,
            }
        )
    return tiles


# -- groups and runs ----------------------------------------------------------------------


def _fronts(groups: Sequence[Group]) -> set[int]:
    """Which groups are on the Pareto front of their series, by identity."""
    found: set[int] = set()
    for series in series_of(groups):
        points = [(group.acr.mean, group.accuracy.mean) for group in series.groups]
        found |= {id(series.groups[place]) for place in metrics.pareto_front(points)}
    return found


def _group(
    group: Group, series: int, front: bool, tracks: Sequence[tuple[str, str, float]]
) -> dict[str, Any]:
    bands = {name: (group.track(name), factor) for name, _, factor in tracks}
    entry: dict[str, Any] = {
        "label": group.label,
        "method": group.method,
        "variant": group.variant,
        "kappa": group.kappa,
        "n": group.n,
        "series": series,
        "tracks": {
            name: {"x": [int(x) for x in band.x], **_band(band, factor)}
            for name, (band, factor) in bands.items()
            if band is not None
        },
    }
    if group.n:
        spread = group.distribution
        entry |= {
            "front": front,
            "accuracy": _spread(group.accuracy),
            "acr": _spread(group.acr),
            "art": _spread(group.art),
            "attacked": _spread(group.attacked_acr) if group.attacked_acr else None,
            "curve": _band(group.curve),
            "classes": _band(group.class_radius),
            "distribution": {
                "zero": spread.at_zero,
                "share": _rounded(spread.share),
                "max": spread.at_max,
            },
        }
        if group.gap is not None:
            lower, upper = group.gap
            entry["gap"] = {"mean": _rounded(lower.mean), "upper": _rounded(upper.mean)}
    return entry


def _run(run: Run, group: int) -> dict[str, Any]:
    found = run.certification
    attack = None if found is None else found.attack
    return {
        "name": run.name,
        "group": group,
        "seed": run.seed,
        "certified": found is not None,
        "accuracy": None if found is None else found.accuracy,
        "acr": None if found is None else found.acr,
        "art": None if found is None else found.art,
        "attacked": None if attack is None else attack.acr,
        "epochs": run.epochs,
        "steps": run.root_steps,
        "schedule": run.radius_schedule,
        "seconds": run.environment.seconds,
        "hardware": run.environment.hardware,
        "commit": run.environment.commit[:10],
    }


def _spread(spread: Spread) -> list[float | None]:
    return [spread.mean, spread.std, spread.n]


def _band(band: Band, factor: float = 1.0) -> dict[str, Any]:
    mean = {"mean": _rounded(factor * band.mean)}
    if np.array_equal(band.low, band.high, equal_nan=True):
        return mean
    return mean | {"low": _rounded(factor * band.low), "high": _rounded(factor * band.high)}


def _rounded(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else float(f"{value:.5g}") for value in values]


# -- images -------------------------------------------------------------------------------


def _examples(collection: Collection) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Images, each once, and by group which of them are the most and the least certified.

    Of each group the first certified run is shown, the smallest kappas first, as far as there is
    room: the page stays a file that can be sent.
    """
    groups = collection.certified_groups
    first = smallest_kappa(groups)
    place = {id(group): i for i, group in enumerate(collection.groups)}
    images: dict[str, tuple[int, bool]] = {}
    chosen = []
    room = _ROOM
    for group in [*first, *(group for group in groups if group not in first)]:
        run = next(run for run in group.runs if run.certification is not None)
        assert run.certification is not None
        most, least = run.certification.most, run.certification.least
        if most is None or least is None:
            continue
        found = {
            part: [data_uri(image) for image in part.images[:_PICTURES]] for part in (most, least)
        }
        fresh = {uri for uris in found.values() for uri in uris} - set(images)
        room -= sum(map(len, fresh))
        if room < 0:
            break
        coarse = max(most.images.shape[2:]) < _COARSE
        for uris in found.values():
            for uri in uris:
                images.setdefault(uri, (len(images), coarse))
        chosen.append(
            {
                "group": place[id(group)],
                "run": run.name,
                "most": _entries(most, [images[uri][0] for uri in found[most]]),
                "least": _entries(least, [images[uri][0] for uri in found[least]]),
            }
        )
    return [{"source": uri, "coarse": coarse} for uri, (_, coarse) in images.items()], chosen


def _entries(part: Examples, images: Sequence[int]) -> list[list[float]]:
    return [
        [image, part.label[i], part.prediction[i], part.radius[i], part.index[i]]
        for i, image in enumerate(images)
    ]
