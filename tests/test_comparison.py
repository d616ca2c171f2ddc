"""Ours beside the paper's: tables, claims and figures from made-up records."""

import builtins
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.made_records import made_run
from tests.test_publication import STEPS

from acert.errors import InvalidInput, RunError
from acert.experiments.paper import drawings
from acert.experiments.paper import rows as paper
from acert.experiments.paper.claims import average, trade_off_rows
from acert.experiments.paper.comparison import filled, page, sections, standings
from acert.experiments.paper.drawings import figure_names, figure_numbers, render, stamp, stamped
from acert.experiments.paper.publication import read_record

ROW = paper.find("table1/cifar10/acert-k0")


def made(tmp_path: Path, name: str, *, seed: int = 0, **details):
    training = paper.find(name).training
    folder = tmp_path / training.folder_name(seed=seed, epochs=details.get("epochs"))
    return read_record(made_run(folder, training, seed=seed, **details))


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- tables -------------------------------------------------------------------------------


def test_table_1_shows_ours_beside_the_papers(tmp_path):
    record = made(tmp_path, ROW.id)
    known = standings([record])
    table = sections(known, records_at="../results")["table1"]
    found = record.certificates
    assert cells(table, "[CIFAR-10, ACERT, 0]") == [
        "[CIFAR-10, ACERT, 0](../results/cifar10-acert-k0-s0)",
        f"{100 * found.accuracy:.2f}", f"{100 * found.acr:.2f}", f"{100 * found.art:.2f}",
        "62.21 / 41.80 / 50.96 (mean of 7: 50.74)", f"{100 * found.art - 50.74:+.2f}", "1",
        "a GPU, 10.0, 0123456",
    ]  # fmt: skip
    assert cells(table, "CIFAR-10, ACERT, 0.25")[-1] == "missing: `table1/cifar10/acert-k0.25`"
    assert cells(table, "CIFAR-10, Standard, 1")[4] == "91.84 / 0.0002 / 0.14"
    assert "(2) trained at 8/255 for 160 epochs" in table


def test_seeds_are_a_mean_with_its_spread(tmp_path):
    records = [made(tmp_path, ROW.id, seed=seed, accuracy=0.6 + 0.1 * seed) for seed in (0, 1, 2)]
    records[1].environment["commit"] = "fedcba9876-modified"
    table = sections(standings(records), records_at="r")["table5"]
    row = cells(table, "[CIFAR-10, ACERT, 0]")
    assert row[1] == "70.00 ± 10.00"
    assert row[4] == "61.64 ± 0.34 / 41.79 ± 0.19 / 50.74 ± 0.13"
    assert row[5:] == ["3", "a GPU, 10.0, 0123456 and fedcba9+"]


def test_a_small_spread_has_the_decimals_of_its_mean(tmp_path):
    figures = [
        made(tmp_path, ROW.id, seed=seed, accuracy=0.6 + 4e-4 * seed, samples=10_000)
        for seed in (0, 1)
    ]
    table = sections(standings(figures), records_at="r")["table5"]
    assert cells(table, "[CIFAR-10, ACERT, 0]")[1] == "60.02 ± 0.03"


def test_table_2_compares_with_table_1(tmp_path):
    short = made(tmp_path, "table2/cifar10/acert-k0", accuracy=0.5)
    table = sections(standings([short]), records_at="r")["table2"]
    assert cells(table, "[CIFAR-10, ACERT, 0]")[4] == "-"
    both = [short, made(tmp_path, ROW.id, accuracy=0.6)]
    table = sections(standings(both), records_at="r")["table2"]
    change = 100 * (both[0].certificates.art - both[1].certificates.art)
    row = cells(table, "[CIFAR-10, ACERT, 0]")
    assert row[4] == f"{change:+.2f}"
    assert row[5] == "52.65 / 38.95 / 45.32 / -5.64"


def test_table_6_has_times(tmp_path):
    record = made(tmp_path, ROW.id, seconds=3.91)
    table = sections(standings([record]), records_at="r")["table6"]
    row = cells(table, "[CIFAR-10, ACERT, 2 root steps, 0]")
    assert row[4:7] == ["10.00", "10.0", "61.82 / 41.66 / 50.70 / 0.07 s / 7.2 h"]
    assert cells(table, "CIFAR-10, ACERT, 1 root step, 0")[4:7] == ["-", "-", "-"]
    record.environment.pop("seconds")
    record.environment.pop("commit")
    table = sections(standings([record]), records_at="r")["table6"]
    row = cells(table, "[CIFAR-10, ACERT, 2 root steps, 0]")
    assert row[4:6] == ["10.00", "-"]
    assert row[-1] == "a GPU, -, unknown"


def test_table_7_reads_certified_accuracy_off_the_radii(tmp_path):
    record = made(tmp_path, ROW.id, share=1.0)
    table = sections(standings([record]), records_at="r")["table7"]
    row = cells(table, "[CIFAR-10, ACERT, 0]")
    expected = 100 * np.mean(record.certificates.radius >= 8 / 255)
    assert 0 < expected < 20
    assert row[2:5] == ["8/255", f"{expected:.2f}", "62.21 / 26.61"]


def test_small_figures_keep_their_digits(tmp_path):
    record = made(tmp_path, "table1/cifar10/standard", share=1e-4)
    table = sections(standings([record]), records_at="r")["table1"]
    assert cells(table, "[CIFAR-10, Standard, 1]")[2] == f"{100 * record.certificates.acr:.4f}"


def test_a_shortened_run_is_said(tmp_path):
    record = made(tmp_path, "table1/tinyimagenet/acert-k0", epochs=40)
    table = sections(standings([record]), records_at="r")["table1"]
    note = "40 of the paper's 200 epochs, warm-up and schedules in proportion"
    place = next(line[1] for line in table.splitlines() if note in line)
    assert f"-s0) ({place})" in table


def test_times_of_a_shared_gpu_stand_in_no_table(tmp_path):
    shared = {"gpu_shared": True, "seconds": 6000.0}
    found = [
        made(tmp_path / "a", ROW.id, seed=0),
        made(tmp_path / "b", ROW.id, seed=1, seconds=9.0, environment=shared),
    ]
    for part, alone in ((found, "10.0"), (found[1:], "-")):
        table = sections(standings(part), records_at="r")["table6"]
        row = cells(table, "[CIFAR-10, ACERT, 2 root steps, 0]")
        assert row[4] == ("-" if alone == "-" else "5.12")
        assert row[-1] == f"a GPU, {alone}, 0123456"
        assert "trained beside another run on the same GPU" in table


# -- claims -------------------------------------------------------------------------------


def test_claims_without_records_are_dashes():
    made = sections({}, records_at="r")
    assert cells(made["claims"], "ACR at 75 %")[1:] == ["18 and 9", "- and -"]
    assert cells(made["claims"], "ACR at 38 %")[1:] == ["14 and 7", "- and -"]
    assert cells(made["claims"], "a step with 2 root steps")[1:] == ["3.3", "-"]
    assert made["root-steps"] == "No record has counted its root steps yet."
    assert average([None]) is None


def test_claims_are_read_off_the_records(tmp_path):
    records = [
        made(tmp_path, ROW.id, accuracy=0.7, share=0.8, seconds=6.0, steps=STEPS),
        made(tmp_path, "figure1/cifar10/acert-k0.5", accuracy=0.8, share=0.4),
        made(tmp_path, "table1/cifar10/fastibp-k0", accuracy=0.5, share=1.0, seconds=4.0),
        made(tmp_path, "table1/cifar10/fastibp-k0-at-8", accuracy=0.9),
    ]
    known = standings(records)
    text = sections(known, records_at="r")
    between = 50 * (records[0].certificates.acr + records[1].certificates.acr)
    assert cells(text["claims"], "ACR at 75 %")[2] == f"{between:.1f} and -"
    assert cells(text["claims"], "a step with 2 root steps")[2] == "1.50"
    claim = "certified accuracy on CIFAR-10"
    assert cells(text["claims"], claim)[2].startswith("above up to ")
    assert cells(text["claims"], claim)[2].endswith("of eps_max, then below")
    row = cells(text["root-steps"], "[cifar10-acert-k0-s0]")
    assert row[1:] == [
        "70 of 100", "2.3; 71 %, 100 %, 100 %, 100 %, 100 %",
        "3.0; 0 %, 100 %, 100 %, 100 %, 100 %",
    ]  # fmt: skip
    # The other reading of FastIBP is no point of the curve over kappa.
    assert records[3] not in [one for row in trade_off_rows(known) for one in row.records]


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [((0.9, 1.0), (0.5, 0.5), "above throughout"), ((0.5, 1.0), (0.9, 1.0), "below already at 0")],
)
def test_curves_that_do_not_cross_are_told_so(tmp_path, ours, theirs, told):
    records = [
        made(tmp_path, f"table1/mnist/{key}", accuracy=accuracy, share=share)
        for key, (accuracy, share) in (("acert-k0", ours), ("fastibp-k0", theirs))
    ]
    text = sections(standings(records), records_at="r")["claims"]
    assert cells(text, "certified accuracy on MNIST")[2] == told


def test_root_steps_without_a_root_are_a_dash(tmp_path):
    nothing = replace(STEPS, arrived=(), proven=())
    record = made(tmp_path, ROW.id, steps=nothing)
    text = sections(standings([record]), records_at="r")["root-steps"]
    assert cells(text, "[cifar10-acert-k0-s0]")[1:] == ["0 of 100", "-", "-"]
    render(tmp_path, tmp_path / "docs")  # without a histogram


# -- pages and pictures -------------------------------------------------------------------


def test_only_what_stands_between_markers_is_written():
    text = "mine <!-- table1:begin -->old<!-- table1:end --> mine"
    assert filled(text, {"table1": "new"}) == (
        "mine <!-- table1:begin -->\nnew\n<!-- table1:end --> mine"
    )
    with pytest.raises(InvalidInput, match="must hold <!-- table1:end --> after"):
        filled("<!-- table1:begin -->", {"table1": "new"})
    assert "<!-- figures:begin -->" in page({}, records_at="r")


def everything(tmp_path: Path) -> Path:
    """Records of every row, with two seeds of the first."""
    results = tmp_path / "results"
    for training in dict.fromkeys(row.training for row in paper.ROWS):
        for seed in (0, 1) if training == ROW.training else (0,):
            made_run(
                results / training.folder_name(seed=seed), training, seed=seed,
                accuracy=0.55 + 0.3 * training.kappa, share=1 - 0.9 * training.kappa,
                steps=STEPS if training.method == "acert" else None,
            )  # fmt: skip
    return results


def test_render_writes_the_page_and_the_figures(tmp_path):
    results, docs = everything(tmp_path), tmp_path / "docs"
    docs.mkdir()
    (docs / "reproduction.md").write_text(
        "My words.\n<!-- table1:begin --><!-- table1:end -->\n"
        "<!-- figures:begin --><!-- figures:end -->\n"
    )
    (results / "cut").mkdir()
    (results / "cut" / "config.json").write_text("{")
    written, notes = render(results, docs)
    assert len(notes) == 1
    assert notes[0].startswith("skipped: ")
    text = (docs / "reproduction.md").read_text()
    assert text.startswith("My words.\n")
    assert "](../results/cifar10-acert-k0-s0)" in text
    assert "table2" not in text
    names = [path.name for path in written]
    assert names == [
        "reproduction.md",
        *(
            f"{name}.{kind}"
            for name in (
                "figure1-cifar10",
                "figure1-tinyimagenet",
                "figure2-cifar10",
                "figure3-mnist",
                "figure3-cifar10",
            )
            for kind in ("svg", "png")
        ),
    ]
    assert "Not drawn" not in text
    known = standings([read_record(p.parent) for p in sorted(results.glob("*/env.json"))])
    for name in figure_names(known):
        picture = docs / "figures" / f"{name}.png"
        assert f"](figures/{name}.png)" in text
        assert stamped(picture) == figure_numbers(known, name)
        with Image.open(picture) as image:
            assert image.width > 800
            assert len(image.convert("L").getcolors(256) or [0] * 256) > 20
    assert len(figure_numbers(known, "figure1-cifar10")) == 13
    assert len(figure_numbers(known, "figure1-tinyimagenet")) == 4 + 6
    shown = figure_numbers(known, "figure2-cifar10")
    # The histogram is that of the recipe's first run: one step comes before it.
    histograms = [key for key, numbers in shown.items() if len(numbers) > 3]
    assert histograms == ["figure2/cifar10/acert-steps2, seed 0"]
    assert shown[histograms[0]][2:] == [round(2e3 / 391, 2), [[2, 50], [3, 20]]]


def test_what_is_missing_is_named_beside_the_figures(tmp_path):
    made(tmp_path / "results", ROW.id)
    written, notes = render(tmp_path / "results", tmp_path / "docs")
    assert notes == []
    text = written[0].read_text()
    assert "## Table 7" in text
    assert "Not drawn, since missing: table1/cifar10/acert-k0.25, figure1/" in text
    assert "on MNIST (Figure 3): nothing to draw yet." in text
    assert len(written) == 1 + 2 * 3


def test_shortened_runs_are_told_beside_the_figures(tmp_path):
    made(tmp_path / "results", "table1/tinyimagenet/acert-k0", epochs=40)
    made(tmp_path / "results", "table1/tinyimagenet/fastibp-k0")
    text = render(tmp_path / "results", tmp_path / "docs")[0][0].read_text()
    assert (
        "(Figure 1). 40 of the paper's 200 epochs, warm-up and schedules in proportion: "
        "table1/tinyimagenet/acert-k0. Not drawn, since missing: "
    ) in text


def test_a_figure_of_one_method_alone(tmp_path):
    made(tmp_path / "results", "table6/cifar10/acert-fast")
    written, _ = render(tmp_path / "results", tmp_path / "docs")
    assert [path.name for path in written[1:]] == ["figure2-cifar10.svg", "figure2-cifar10.png"]


def test_a_figure_has_no_time_where_there_is_none(tmp_path):
    """The GPU was shared: a line or a point at 0 ms would be a wrong one."""
    shared = {"gpu_shared": True}
    found = [
        made(tmp_path, name, environment=shared)
        for name in ("table6/cifar10/fastibp-k0", "table6/cifar10/acert-fast")
    ]
    found.append(made(tmp_path, ROW.id, seconds=3.91))
    known = standings(found)
    shown = figure_numbers(known, "figure2-cifar10")
    assert sorted(str(numbers[2]) for numbers in shown.values()) == ["10.0", "None", "None"]
    rows = [one for one in known.values() if one.row.part == "figure2" and one.records]
    _, times, _ = drawings._root_step_figure(rows).axes
    assert [line.get_ydata()[0] for line in times.lines] == [pytest.approx(10.0)]


def test_without_matplotlib_tables_are_written_and_it_is_said(tmp_path, monkeypatch):
    made(tmp_path / "results", ROW.id)
    true_import = builtins.__import__

    def refuse(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return true_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    written, notes = render(tmp_path / "results", tmp_path / "docs")
    assert [path.name for path in written] == [drawings.PAGE]
    assert notes == [
        "no figures were drawn: this needs the package matplotlib: pip install 'acert[plots]'"
    ]
    text = written[0].read_text()
    assert "](figures/" not in text
    assert "on CIFAR-10 (Figure 3): not drawn, which needs Matplotlib." in text
    (tmp_path / "docs" / drawings.PICTURES / "figure3-cifar10.png").touch()  # of an earlier time
    text = render(tmp_path / "results", tmp_path / "docs")[0][0].read_text()
    assert text.count("](figures/") == text.count("](figures/figure3-cifar10.png)") == 1


def test_a_page_that_cannot_be_written_is_one_error_and_stays_as_it_was(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / drawings.PAGE).write_text("My words.")

    def full(path, *rest, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="docs cannot be written: No space left on device"):
        render(tmp_path / "results", docs)
    assert (docs / drawings.PAGE).read_bytes() == b"My words."
    (docs / drawings.PAGE).write_bytes(b"\xff")
    with pytest.raises(RunError, match="cannot be read"):
        render(tmp_path / "results", docs)


def test_pictures_that_cannot_be_written_are_one_error(tmp_path):
    made(tmp_path / "results", ROW.id)
    (tmp_path / drawings.PICTURES).write_text("in the way")
    with pytest.raises(RunError, match="figures cannot be written: File exists"):
        render(tmp_path / "results", tmp_path)
    assert not (tmp_path / drawings.PAGE).exists()


def test_a_picture_without_numbers_is_refused(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(InvalidInput, match="does not say which numbers it shows"):
        stamped(tmp_path / "a.png")
    stamp(tmp_path / "a.png", {"a": [1, 0.5]})
    assert stamped(tmp_path / "a.png") == {"a": [1, 0.5]}
