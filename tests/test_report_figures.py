"""Figures show the records' numbers, can be told apart by anyone, and are saved for a paper."""

import itertools
import struct
from dataclasses import replace

import numpy as np
import pytest
from tests.made_runs import make_run

from acert.errors import InvalidInput
from acert.report import collect, figures, smallest_kappa
from acert.report.appearance import look, looks
from acert.report.drawing import Labelled, draw_contours, empty_figure, label_points, line_style
from acert.report.run import METHOD_NAMES


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, kappa, seed in itertools.product(("Acert", "FastIBP"), (0.0, 0.5), (0, 1)):
        name = f"{method}-{kappa}-{seed}"
        make_run(folder / name, method=method, kappa=kappa, seed=seed, attacked=True)
    return collect([folder]).groups


def _line(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def test_trade_off_has_each_group_at_its_means(groups):
    figure = figures.trade_off(groups)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "ACR (%)"
    assert axes.get_ylabel() == "Accuracy (%)"
    methods = axes.get_legend_handles_labels()[1]
    assert methods == ["ACERT", "FastIBP"]
    for method, container in zip(methods, axes.containers, strict=True):
        mine = [group for group in groups if group.method == method]
        x, y = container[0].get_data()
        assert x.tolist() == [100 * group.acr.mean for group in mine]
        assert y.tolist() == [100 * group.accuracy.mean for group in mine]
        horizontal = container[2][0].get_segments()
        for group, segment in zip(mine, horizontal, strict=True):
            width = segment[1][0] - segment[0][0]
            assert width == pytest.approx(2 * 100 * group.acr.std)


def test_contours_join_equal_art_and_are_labelled(groups):
    (axes,) = figures.trade_off(groups).axes
    curves = [line for line in axes.lines if line.get_color() == "#a8a8a8"]
    labels = [text.get_text() for text in axes.texts]
    assert len(curves) >= 3
    for line in curves:
        x, y = line.get_data()
        art = np.sqrt(x * y)
        assert np.allclose(art, art[0])
        assert any(label.removeprefix("ART ") == f"{art[0]:g}" for label in labels)
    assert sum(label.startswith("ART ") for label in labels) == 1


def test_kappas_stand_beside_their_points(groups):
    (axes,) = figures.trade_off(groups).axes
    kappas = [text.get_text() for text in axes.texts if text.get_color() != "#6b6b6b"]
    assert 2 <= len(kappas) <= 4
    # The first of a method says what the numbers are.
    assert set(kappas) <= {"\u03ba 0", "0.5"}


def test_many_points_carry_no_kappas_and_crowded_ones_only_some(tmp_path):
    for i in range(17):
        make_run(tmp_path / str(i), kappa=i / 20, status=np.full(40, 1), radius=np.full(40, 0.3))
    many = collect([tmp_path]).groups
    kappas = {"\u03ba 0", *(f"{i / 20:g}" for i in range(1, 17))}
    assert not kappas & {text.get_text() for text in figures.trade_off(many).axes[0].texts}
    crowded = {text.get_text() for text in figures.trade_off(many[:8]).axes[0].texts} & kappas
    assert 1 <= len(crowded) <= 4


def test_certified_accuracy_is_that_of_the_groups(groups):
    chosen = smallest_kappa(groups)
    (axes,) = figures.certified_accuracy_curves(chosen).axes
    for group in chosen:
        x, y = _line(axes, group.label).get_data()
        assert x.tolist() == group.curve.x.tolist()
        assert y.tolist() == (100 * group.curve.mean).tolist()


def test_the_gap_lies_between_certified_and_attacked(groups):
    chosen = smallest_kappa(groups)
    (axes,) = figures.attack_gap(chosen).axes
    uppers = [line.get_ydata() for line in axes.lines if line.get_label().startswith("_")]
    assert len(uppers) == 2
    assert axes.get_legend_handles_labels()[1][2:] == ["certified", "not broken by attack"]
    for group, upper in zip(chosen, uppers, strict=True):
        assert upper.tolist() == (100 * group.gap[1].mean).tolist()
        assert (upper >= _line(axes, group.label).get_ydata()).all()


def test_training_panels(groups):
    panels = figures.training_curves(smallest_kappa(groups)).axes
    titles = ["Training loss", "Training accuracy (%)", "Radius cap", "Validation ART (%)"]
    assert [axes.get_title() for axes in panels] == titles
    loss = _line(panels[0], "ACERT, \u03ba 0")
    assert loss.get_xdata().tolist() == [1, 2, 3, 4]
    assert loss.get_ydata()[0] == pytest.approx(2.05)
    assert _line(panels[3], "ACERT, \u03ba 0").get_ydata() == pytest.approx(60)


def test_validation_art_of_different_radii_is_not_compared(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", method="FastIBP", settings={"max_radius": 0.2})
    (tmp_path / "b" / "metrics.jsonl").write_text('{"epoch": 1, "loss": 2.0, "art": 0.1}\n')
    panels = figures.training_curves(collect([tmp_path]).groups).axes
    assert [axes.get_title() for axes in panels][-1] == "Radius cap"
    assert len(panels) == 3
    assert len(panels[0].lines) == 2
    assert len(panels[1].lines) == 1


def test_class_radii_by_name_and_by_rank(tmp_path, groups):
    (axes,) = figures.class_radii(groups[:1]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [*"0123"]
    assert axes.containers[0][0].get_ydata().tolist() == groups[0].class_radius.mean.tolist()
    make_run(tmp_path / "few", names=["a_very_long_name", "b$x$", "c", "d"])
    (axes,) = figures.class_radii(collect([tmp_path / "few"]).groups).axes
    assert axes.get_xticklabels()[0].get_text() == "a_very_long\N{HORIZONTAL ELLIPSIS}"
    make_run(tmp_path / "many", classes=30, samples=90)
    group = collect([tmp_path / "many"]).groups[0]
    (axes,) = figures.class_radii([group]).axes
    assert axes.get_xlabel() == "Class, by rank"
    assert axes.lines[0].get_ydata().tolist() == sorted(group.class_radius.mean, reverse=True)


def test_distribution_has_its_ends_as_points(groups):
    (axes,) = figures.radius_distribution(groups[:1]).axes
    found = groups[0].distribution
    assert axes.get_legend_handles_labels()[1] == [groups[0].label]
    (ends,) = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert ends.get_xdata().tolist() == [0, 0.3]
    assert ends.get_ydata().tolist() == [100 * found.at_zero, 100 * found.at_max]
    assert axes.patches[0].get_data().values.tolist() == (100 * found.share).tolist()


def test_figures_of_nothing_are_refused(tmp_path, groups):
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b", method="FastIBP", certified=False) / "metrics.jsonl").unlink()
    plain, bare = collect([tmp_path]).groups
    with pytest.raises(InvalidInput, match="must hold a certified run; got none"):
        figures.trade_off([bare])
    with pytest.raises(InvalidInput, match="must hold an attacked run; got none"):
        figures.attack_gap([plain])
    with pytest.raises(InvalidInput, match="with a training history; got none"):
        figures.training_curves([bare])
    assert figures.trade_off([plain, bare]).axes[0].get_legend_handles_labels()[1] == ["ACERT"]


def test_saved_for_a_paper(tmp_path, groups):
    figure = figures.certified_accuracy_curves(smallest_kappa(groups))
    vector, pixels = figures.save(figure, tmp_path, "curves")
    width, _ = struct.unpack(">II", pixels.read_bytes()[16:24])
    assert width == 3.4 * 300
    text = vector.read_text()
    assert "<text" not in text, "letters are outlines"
    assert "DejaVuSans" in text
    again = figures.certified_accuracy_curves(smallest_kappa(groups))
    assert figures.save(again, tmp_path, "again")[0].read_text() == text


def test_a_private_class_has_its_place_in_the_legend(tmp_path):
    make_run(tmp_path / "a", method="_Mine")
    for draw in (figures.trade_off, figures.radius_distribution, figures.class_radii):
        legend = draw(collect([tmp_path]).groups).legends[0]
        assert [text.get_text().split(",")[0].strip() for text in legend.get_texts()] == ["_Mine"]


def test_a_name_the_font_lacks_is_no_failure(tmp_path):
    make_run(tmp_path / "a", method="\u8a3c\u660e $x_")
    figure = figures.certified_accuracy_curves(collect([tmp_path]).groups)
    assert figures.save(figure, tmp_path, "curves")[1].stat().st_size > 1000


# -- looks --------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": np.asarray(
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
    ),
    "deutan": np.asarray(
        [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    ),
    "tritan": np.asarray(
        [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]
    ),
}
TO_XYZ = np.asarray([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(colour):
    values = np.asarray([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    xyz = TO_XYZ @ np.clip(linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.asarray([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stay_apart_for_colour_blind_readers(theme, deficiency):
    methods = list(METHOD_NAMES.values())
    seen = {
        name: _lab(DEFICIENCIES[deficiency] @ _linear(getattr(look(name, methods), theme)))
        for name in methods
    }
    for one, other in itertools.combinations(methods, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


@pytest.mark.parametrize(("theme", "ground"), [("light", "#ffffff"), ("dark", "#1a1d22")])
def test_colours_stand_out_from_the_card(theme, ground):
    """Graphics need a contrast of 3 to 1; the lightest method makes up for less by its marker."""
    for name in METHOD_NAMES.values():
        ends = [float(TO_XYZ[1] @ _linear(c)) for c in (getattr(look(name, []), theme), ground)]
        assert (max(ends) + 0.05) / (min(ends) + 0.05) > 2.6, name


def test_markers_and_dashes_differ():
    methods = [*METHOD_NAMES.values(), "Alpha", "Zeta"]
    looks = [look(name, methods) for name in methods]
    assert len({one.marker for one in looks}) == len({one.dashes for one in looks}) == 11


def test_variants_of_one_method_differ_and_the_first_looks_like_it(tmp_path):
    for epochs in (10, 2, 5):
        make_run(tmp_path / str(epochs), epochs=epochs)
    groups = collect([tmp_path]).groups
    assert [group.variant for group in groups] == ["epochs 2", "epochs 5", "epochs 10"]
    assert groups[0].look == look("ACERT", [])
    (axes,) = figures.certified_accuracy_curves(groups).axes
    assert len({line.get_color() for line in axes.lines}) == 3
    assert len({line.get_marker() for line in axes.lines}) == 3
    # The same in a figure that shows only one of them.
    (axes,) = figures.certified_accuracy_curves(groups[2:]).axes
    assert axes.lines[0].get_color() == groups[2].look.light


def test_looks_differ_while_there_are_any():
    known = [(name, "") for name in METHOD_NAMES.values()]
    assert list(looks(known).values()) == [look(name, []) for name, _ in known]
    found = looks([*known, *((f"Other {i}", "") for i in range(10))])
    assert len(set(found.values())) == 19
    assert [one.hollow for one in found.values()] == [False] * 11 + [True] * 8


def test_many_variants_all_look_different():
    # As a sweep over root steps, schedules and radii makes them.
    found = looks([("ACERT", f"root steps {i}") for i in range(242)])
    assert len(set(found.values())) == 242
    assert len(looks([("ACERT", f"root steps {i}") for i in range(300)])) == 300


def test_a_hollow_look_is_drawn_hollow():
    style = line_style(replace(look("ACERT", []), hollow=True))
    assert (style["markerfacecolor"], style["markeredgecolor"]) == ("white", "#0067a8")


def test_a_long_legend_makes_the_figure_higher_and_its_names_shorter(tmp_path):
    for i in range(12):
        make_run(tmp_path / str(i), method=f"{i} {'long' * 40}")
    groups = collect([tmp_path]).groups
    few, many = (figures.certified_accuracy_curves(some) for some in (groups[:2], groups))
    assert many.get_figheight() - few.get_figheight() == pytest.approx(10 * 3 * 0.14)
    words = [text.get_text() for text in many.legends[0].get_texts()]
    assert all(word.endswith("\N{HORIZONTAL ELLIPSIS}") for word in words)
    assert all(len(word.splitlines()) == 3 for word in words)
    assert all(len(line) < 50 for word in words for line in word.splitlines())


def test_what_tells_variants_apart_is_in_the_legend_to_the_end(tmp_path):
    for precision in ("float16", "tf32"):
        for epochs in (3, 4):
            settings = {"precision": precision, "l1": 1e-5 * epochs, "clip_norm": epochs, "a$": 1}
            if epochs == 3:
                settings["a$"] = 2
            make_run(tmp_path / f"{precision}-{epochs}", epochs=epochs, settings=settings)
    figure = figures.trade_off(collect([tmp_path]).groups)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(words)) == 4
    assert sum("tf32" in word for word in words) == 2
    assert all(r"a\$" in word for word in words)
    figure.draw_without_rendering()  # no dollar sign starts a formula


def test_of_two_close_points_the_upper_one_has_the_upper_word():
    close = [Labelled("low", 50, 79.5, 0, 0, "#000000"), Labelled("high", 50, 80, 0, 0, "#000000")]
    with empty_figure(2.5) as (figure, axes):
        axes.set(xlim=(40, 60), ylim=(70, 90))
        label_points(figure, axes, close)
        figure.draw_without_rendering()
    low, high = sorted((text.get_window_extent().y0, text.get_text()) for text in axes.texts)
    assert (low[1], high[1]) == ("low", "high")


def test_an_axis_starts_where_the_curves_are(tmp_path, groups):
    make_run(tmp_path / "a", status=np.full(40, 1), radius=np.full(40, 0.3))
    high = collect([tmp_path]).groups
    assert figures.certified_accuracy_curves(high).axes[0].get_ylim() == (90, 102)
    assert figures.certified_accuracy_curves(groups).axes[0].get_ylim() == (0, 102)


def test_epochs_are_whole_numbers(groups):
    for axes in figures.training_curves(groups).axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_words_rather_cross_a_bar_than_vanish_and_contours_keep_off_the_points():
    around = [Labelled("0.5", x, y, 9, 9, "#000000") for x in (50, 51) for y in (80, 82)]
    with empty_figure(2.5) as (figure, axes):
        axes.set(xlim=(40, 60), ylim=(70, 90))
        draw_contours(axes, around)
        marks = [text.get_position() for text in axes.texts]
        label_points(figure, axes, around)
    assert sum(text.get_text() == "0.5" for text in axes.texts) == 4
    assert all(abs(x - 50.5) > 1 or abs(y - 81) > 1 for x, y in marks)


@pytest.mark.parametrize("view", [(0, 100, 97, 99.8), (0, 100, 20, 100), (30, 100, 90, 100)])
def test_no_word_of_a_contour_is_across_another_or_an_axis(view):
    """Steep lines, as of methods between no ACR and nearly all, are close where ART is low."""
    with empty_figure(2.75) as (figure, axes):
        axes.set(xlim=view[:2], ylim=view[2:])
        draw_contours(axes, [])
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) > 3
    assert all(box.x0 > axes.bbox.x0 and box.y0 > axes.bbox.y0 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
