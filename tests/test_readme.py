"""README's and docs' tables and pictures come from the records; a stale one fails here."""

import itertools
import shutil

import numpy as np
import pytest
from benchmarks import digits_tradeoff, readme
from examples import digits
from matplotlib import pyplot

from acert.experiments.paper.drawings import stamp


def test_tables_and_pictures_are_those_of_the_records():
    text = readme.README.read_text(encoding="utf-8")
    for name in ("picture", "results", "speed"):
        assert f"<!-- {name}:begin -->" in text
    assert readme.stale() == [], "run `python benchmarks/readme.py`"


def test_a_changed_figure_is_noticed(tmp_path, monkeypatch):
    text = readme.README.read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| [MNIST, ACERT, 0]")]
    copy = tmp_path / "README.md"
    copy.write_text(text.replace(row, row.replace("9", "8")), encoding="utf-8")
    monkeypatch.setattr(readme, "README", copy)
    made = readme.pages(readme.known_rows())[copy]
    assert made != copy.read_text(encoding="utf-8")
    assert made == text


def test_a_changed_picture_is_noticed(tmp_path, monkeypatch):
    picture = tmp_path / "digits.png"
    shutil.copyfile(digits_tradeoff.PICTURE, picture)
    monkeypatch.setattr(digits_tradeoff, "PICTURE", picture)
    monkeypatch.setattr(readme, "ROOT", tmp_path.parent)
    known = readme.known_rows()
    numbers = readme.pictures(known)[picture]
    monkeypatch.setattr(readme, "pages", lambda known: {})
    monkeypatch.setattr(readme, "pictures", lambda known: {picture: numbers})
    assert readme.stale() == []
    stamp(picture, {"acert, 0": [[0.5, 0.5]]})
    assert readme.stale() == [str(picture.relative_to(tmp_path.parent))]
    picture.unlink()
    assert len(readme.stale()) == 1


def test_the_digits_record_shows_what_the_runs_showed(tmp_path):
    """Rows of one method and kappa together, their radii as certified."""
    points = digits_tradeoff.points()
    assert [(point.method, point.kappa) for point in points] == [
        (method, kappa) for method in ("acert", "fastibp") for kappa in (0.0, 0.5, 0.9)
    ]
    for point in points:
        assert len(point.certificates) == 3
        for found in point.certificates:
            assert len(found) == 359
            assert (found.radius[found.status == 1] == found.max_radius).all()
            assert (found.radius[~found.correct] == 0).all()
            assert np.isfinite(found.radius).all()


@pytest.mark.parametrize("seeds", [slice(3), slice(1), slice(1, 2)], ids=["all", "first", "second"])
def test_no_word_of_the_digits_picture_is_across_another(tmp_path, monkeypatch, seeds):
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    points = [
        digits.Point(point.method, point.kappa, point.certificates[seeds], 0.0)
        for point in digits_tradeoff.points()
    ]
    digits.picture(points, tmp_path / "digits.png")
    monkeypatch.undo()
    (figure,) = kept
    axes = figure.axes[0]
    words = [text.get_text() for text in axes.texts]
    assert sum(word.startswith("\N{GREEK SMALL LETTER KAPPA} = ") for word in words) == len(points)
    assert len(words) >= len(points) + 4  # lines of equal ART
    assert sum(word.startswith("ART ") for word in words) == 1
    boxes = [text.get_window_extent() for text in axes.texts]
    boxes.append(axes.get_legend().get_window_extent())
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    markers = axes.transData.transform([(one.mean("acr"), one.mean("accuracy")) for one in points])
    assert not any(box.count_contains(markers) for box in boxes)
    pyplot.close(figure)
