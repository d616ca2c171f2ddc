"""The page: its content as JSON, then what a browser makes of it, offline and by keyboard."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from io import BytesIO

import numpy as np
import pytest
from tests.made_runs import make_run

from acert import records
from acert.cli import main
from acert.errors import RunError
from acert.report import collect, page, write_figures, write_page, write_report
from acert.report.content import content
from acert.report.picture import png
from acert.report.run import METHOD_NAMES

EVIL = "</script><script>document.title='hit'</script><img src=x onerror=alert(1)>"
NAMES = [EVIL, "b", "c", "d"]


def _data(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods, two kappas, two seeds; attacks, a damaged run, an uncertified one, and evil."""
    folder = tmp_path_factory.mktemp("runs")
    for method, kappa, seed in itertools.product(("Acert", "FastIBP"), (0.0, 0.5), (0, 1)):
        name = f"{method.lower()}-k{kappa:g}-s{seed}"
        make_run(
            folder / name, method=method, kappa=kappa, seed=seed, attacked=method == "Acert",
            names=NAMES,
        )  # fmt: skip
    make_run(folder / "sabr", method="Sabr", certified=False, names=NAMES)
    # A slash cannot be in a folder's name, but a config can hold anything.
    make_run(folder / "evil <b>&amp;", method=EVIL, names=NAMES)
    (make_run(folder / "broken", seed=7) / "metrics.jsonl").write_text("{")
    return folder


@pytest.fixture(scope="module")
def collection(runs):
    return collect([runs])


# -- content ------------------------------------------------------------------------------


def test_figures_of_runs_are_the_records_digit_for_digit(collection):
    shown = _data(page(collection))
    by_name = {run["name"]: run for run in shown["runs"]}
    assert set(by_name) == {run.name for run in collection.runs}
    for run in collection.runs:
        entry, found = by_name[run.name], run.certification
        assert entry["certified"] == (found is not None)
        assert entry["seed"] == run.seed
        if found is not None:
            assert [entry["accuracy"], entry["acr"], entry["art"]] == [
                found.accuracy, found.acr, found.art,
            ]  # fmt: skip
            assert entry["attacked"] == (found.attack.acr if found.attack else None)
    for entry, group in zip(shown["groups"], collection.groups, strict=True):
        assert entry["label"] == group.label
        if group.n:
            for name in ("accuracy", "acr", "art"):
                spread = getattr(group, name)
                assert entry[name] == [spread.mean, spread.std, spread.n]
            assert entry["curve"]["mean"] == pytest.approx(group.curve.mean, rel=1e-4)


def test_fronts_are_pareto_fronts(collection):
    for entry in (one for one in content(collection)["groups"] if one["n"]):
        beaten = any(
            other["series"] == entry["series"]
            and other["acr"][0] > entry["acr"][0]
            and other["accuracy"][0] > entry["accuracy"][0]
            for other in content(collection)["groups"]
            if other["n"]
        )
        assert entry["front"] != beaten


def test_nothing_from_a_file_can_end_the_script(collection):
    text = page(collection)
    assert text.count("</script>") == 2
    assert EVIL not in text
    assert _data(text)["classes"][0] == EVIL
    assert any(group["method"] == EVIL for group in _data(text)["groups"])


def test_the_page_asks_for_nothing_from_outside(collection):
    text = page(collection).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert "default-src 'none'" in text


def test_equal_runs_give_equal_bytes(collection, runs):
    assert page(collection) == page(collect([runs]))


def test_images_are_png_files():
    for shape in ((1, 5, 7), (3, 4, 2)):
        image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
        file = png(image)
        width, height, depth, kind = struct.unpack(">IIBB", file[16:26])
        assert (height, width, depth, kind) == (*shape[1:], 8, {1: 0, 3: 2}[shape[0]])
        from matplotlib.image import imread

        pixels = np.rint(255 * imread(BytesIO(file))).astype(np.uint8)
        expected = image[0] if shape[0] == 1 else image.transpose(1, 2, 0)
        assert (pixels == expected).all()


def test_each_image_is_held_once_and_the_first_ones_are_shown(tmp_path):
    make_run(tmp_path / "a", pictures=(3, 64, 64))
    make_run(tmp_path / "b", kappa=0.5, pictures=None)
    shown = content(collect([tmp_path]))
    (entry,) = shown["examples"]
    assert len(entry["most"]) == len(entry["least"]) == 8
    assert len({image["source"] for image in shown["images"]}) == len(shown["images"]) == 16
    assert not shown["images"][0]["coarse"]
    source = shown["images"][entry["most"][0][0]]["source"]
    file = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    rows = zlib.decompress(file[41 : 41 + struct.unpack(">I", file[33:37])[0]])
    assert len(rows) == 64 * (1 + 3 * 64)


def test_images_stop_where_the_room_ends(tmp_path):
    for kappa in (0.0, 0.25, 0.5):
        make_run(tmp_path / f"{kappa}", kappa=kappa, pictures=(3, 100, 100))
    shown = content(collect([tmp_path]))
    assert [shown["groups"][one["group"]]["kappa"] for one in shown["examples"]] == [0.0, 0.25]
    assert sum(len(image["source"]) for image in shown["images"]) < 1_500_000


# -- files and the command ----------------------------------------------------------------


def test_the_report_is_complete_and_can_be_made_again(collection, tmp_path):
    paths = write_report(collection, tmp_path / "report")
    names = ["trade-off", "certified-accuracy", "radius-distribution", "class-radii"]
    names += ["attack-gap", "training"]
    expected = ["index.html", "table.md", "table.tex"]
    expected += [f"figures/{name}.{kind}" for name in names for kind in ("svg", "png")]
    assert [path.relative_to(tmp_path / "report").as_posix() for path in paths] == expected
    assert all(path.stat().st_size > 100 for path in paths)
    paths[0].write_text(paths[0].read_text(encoding="utf-8") + "stale", encoding="utf-8")
    (tmp_path / "report" / "mine.txt").write_text("kept")
    assert write_page(collection, tmp_path / "report") == paths[:3]
    assert paths[0].read_text(encoding="utf-8") == page(collection)
    assert (tmp_path / "report" / "mine.txt").read_text() == "kept"


def test_numbers_whose_sum_is_not_finite_are_not_drawn(tmp_path):
    rows = [{"epoch": epoch, "loss": 1.7e308, "train_accuracy": 1e307} for epoch in (1, 2)]
    for seed in (0, 1):
        records.write_metrics(make_run(tmp_path / "runs" / str(seed), seed=seed), rows)
    collection = collect([tmp_path / "runs"])
    assert collection.groups[0].track("loss") is None
    assert content(collection)["tracks"] == []


def test_figures_that_have_nothing_to_show_are_left_out(tmp_path):
    (make_run(tmp_path / "a") / "metrics.jsonl").unlink()
    paths = write_figures(collect([tmp_path]), tmp_path / "figures")
    assert {path.stem for path in paths} == {
        "trade-off", "certified-accuracy", "radius-distribution", "class-radii",
    }  # fmt: skip


def test_figures_of_an_earlier_report_are_not_left_behind(tmp_path):
    for name in ("attack-gap.png", "attack-gap.svg", "mine.png"):
        (tmp_path / "figures").mkdir(exist_ok=True)
        (tmp_path / "figures" / name).touch()
    make_run(tmp_path / "runs" / "a")
    write_figures(collect([tmp_path / "runs"]), tmp_path / "figures")
    assert not list((tmp_path / "figures").glob("attack-gap.*"))
    assert (tmp_path / "figures" / "mine.png").is_file()


def test_a_page_of_somebody_else_is_not_overwritten(collection, tmp_path):
    (tmp_path / "index.html").write_text("my own home page")
    with pytest.raises(RunError, match=r"index.html is no report of acert: choose another folder"):
        write_page(collection, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "my own home page"


def test_a_folder_that_cannot_be_written(collection, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"the report cannot be written to .*file"):
        write_page(collection, tmp_path / "file")


def test_the_command(runs, tmp_path, capsys):
    assert main(["report", str(runs), "--out", str(tmp_path / "r")]) == 0
    printed = capsys.readouterr()
    assert "digits: 9 certified runs in 5 settings, 1 not certified, 1 skipped" in printed.out
    assert f"wrote {tmp_path / 'r' / 'index.html'}" in printed.out
    assert "skipped: " in printed.err
    assert "broken/metrics.jsonl is damaged in line 1" in printed.err
    assert (tmp_path / "r" / "figures" / "training.png").is_file()


def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("acert.cli.report.write_figures", lambda *_: [])  # seconds, tested above
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("acert: no runs found below")
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", max_radius=0.2)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r")]) == 2
    assert "a has 0.3, b has 0.2; choose one with --max-radius" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
    assert main(["report", str(tmp_path), "--max-radius", "1/5", "--out", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.startswith("digits: 1 certified run in 1 setting, 0 not")


def test_without_matplotlib_there_are_no_figures(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(runs), "--out", str(tmp_path / "r")]) == 0
    assert "no figures: they need the package matplotlib" in capsys.readouterr().err
    assert (tmp_path / "r" / "index.html").is_file()


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    assert "acert report runs/digits --out report" in capsys.readouterr().out


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """200 runs of 200 epochs: two methods, ten kappas, ten seeds."""
    folder = tmp_path_factory.mktemp("many")
    with pytest.MonkeyPatch.context() as patch:
        # Hundreds of files that need not survive a power cut.
        patch.setattr(os, "fsync", lambda handle: None)
        for method, kappa, seed in itertools.product(("Acert", "Sabr"), range(10), range(10)):
            make_run(
                folder / f"{method}-{kappa}-{seed}", method=method, kappa=kappa / 10, seed=seed,
                epochs=200, samples=1000, classes=10, pictures=(3, 32, 32), attacked=True,
            )  # fmt: skip
    return folder


TIMED = """
import sys, time
from pathlib import Path
start = time.process_time()
from acert.report import collect, write_report
collection = collect([Path(sys.argv[1])])
write_report(collection, Path(sys.argv[2]))
print(len(collection.runs), time.process_time() - start)
"""


def test_two_hundred_runs_take_under_ten_seconds_and_five_megabytes(many, tmp_path):
    # In a process of its own, where no coverage is measured; its own time, because tests share
    # the machine.
    command = [sys.executable, "-c", TIMED, str(many), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    count, seconds = done.stdout.split()
    assert count == "200"
    assert float(seconds) < 10
    assert (tmp_path / "index.html").stat().st_size < 5_000_000


# -- in a browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    path = next((name for name in found if name), None)
    if path is None:
        pytest.skip("no Chromium on the path: the page is not tested in a browser")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(collection, tmp_path_factory):
    return write_page(collection, tmp_path_factory.mktemp("page"))[0].as_uri()


@pytest.fixture
def opened(browser, address):
    """Opens the page with the network cut; complaints of its console fail the test."""
    contexts, problems, asked = [], [], []

    def open_page(width=1440, theme="light", at=address):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(at)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.parametrize("width", [375, 1440])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible_and_fitting(opened, width, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    tab = opened(width, theme)
    for summary in tab.locator("details:visible > summary").all():
        summary.click()
    tab.locator("#methods button").first.click()
    found = axe.Axe().run(tab)
    assert found.violations_count == 0, found.generate_report()
    sizes = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert sizes[0] <= sizes[1]
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (theme == "dark")


def test_the_theme_button_turns_the_theme(opened):
    tab = opened(theme="light")
    button = tab.locator("#theme")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(colour)
    assert button.get_attribute("aria-pressed") == "false"
    button.focus()
    tab.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert tab.evaluate(colour) != light
    tab.keyboard.press("Enter")
    assert tab.evaluate(colour) == light


def test_every_control_is_reached_by_tab(opened):
    tab = opened()
    controls = "a[href], button, input, summary, [tabindex='0']"
    wanted = tab.evaluate(
        f"""[...document.querySelectorAll("{controls}")].filter(
            (node) => node.checkVisibility()).map((node, i) => (node.dataset.place = i))"""
    )
    reached = set()
    for _ in range(len(wanted) + 3):
        tab.keyboard.press("Tab")
        place, outlined = tab.evaluate(
            """(() => { const node = document.activeElement, style = getComputedStyle(node);
            const ring = node.querySelector && node.querySelector(".ring");
            return [node.dataset.place, style.outlineStyle !== "none"
              || (ring && getComputedStyle(ring).stroke !== "rgba(0, 0, 0, 0)")]; })()"""
        )
        if place is not None:
            reached.add(int(place))
            assert outlined, f"no visible focus on control {place}"
    assert reached == set(wanted)


def test_a_legend_entry_hides_its_method_everywhere(opened):
    tab = opened()
    drawn = """(method) => { const colour = [...document.querySelectorAll("#methods button")]
        .find((button) => button.textContent === method).querySelector("svg").classList[0];
        return [...document.querySelectorAll("figure:not([hidden])")].map(
            (figure) => figure.querySelectorAll(`.plot .${colour}`).length); }"""
    assert all(tab.evaluate(drawn, "ACERT"))
    assert tab.locator("#examples h3", has_text="ACERT").count() == 1
    before = tab.evaluate(drawn, "FastIBP")
    button = tab.get_by_role("button", name="ACERT", exact=True)
    button.focus()
    tab.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(tab.evaluate(drawn, "ACERT"))
    assert tab.locator("#examples h3", has_text="ACERT").count() == 0
    assert tab.evaluate(drawn, "FastIBP") == before
    tab.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert all(tab.evaluate(drawn, "ACERT"))


def test_all_methods_hidden_is_said_in_words(opened):
    tab = opened()
    for button in tab.locator("#methods button").all():
        button.click()
    assert tab.locator("#trade-off .plot").text_content().startswith("Every method is hidden")
    assert tab.locator("#trade-off svg").count() == 0
    assert not tab.locator("#trade-off details").is_visible()


def test_kappa_chooses_the_curves(opened, collection):
    tab = opened()
    tab.locator("#curves summary").click()
    heads = tab.locator("#curves th")
    assert heads.all_text_contents()[1:3] == ["ACERT, \u03ba 0", "FastIBP, \u03ba 0"]
    tab.get_by_role("button", name="0.5", exact=True).press("Enter")
    assert heads.all_text_contents()[1:] == ["ACERT, \u03ba 0.5", "FastIBP, \u03ba 0.5"]
    tab.get_by_role("button", name="all", exact=True).press("Enter")
    assert heads.count() == 1 + len(collection.certified_groups)
    assert tab.locator("#kappas [aria-pressed=true]").all_text_contents() == ["all"]


def test_data_tables_hold_the_numbers_of_the_figures(opened, collection):
    tab = opened()
    tab.locator("#trade-off summary").focus()
    tab.keyboard.press("Enter")
    rows = [row.split("\n") for row in tab.locator("#trade-off tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent).join('\\n'))"
    )]  # fmt: skip
    for row, group in zip(rows, collection.certified_groups, strict=True):
        assert row[0] == group.label
        assert row[2] == f"{100 * group.accuracy.mean:.2f}"
        assert row[4] == f"{100 * group.acr.mean:.2f}"
        assert row[6] == f"{100 * group.art.mean:.2f}"
    for figure in ("curves", "gap", "distribution", "classes", "training"):
        tab.locator(f"#{figure} summary").click()
        tab.locator(f"#{figure} tbody tr").nth(3).wait_for()


def test_hovering_and_focusing_tell_the_run(opened, collection):
    tab = opened()
    tip = tab.locator("#tip")
    group = collection.certified_groups[0]
    assert not tip.is_visible()
    tab.locator(".point").first.hover(force=True)
    for words in (group.label, f"{100 * group.art.mean:.2f}", "acert-k0-s0", "acert-k0-s1"):
        assert words in tip.text_content()
    tab.mouse.move(5, 5)
    assert not tip.is_visible()
    tab.locator(".point[tabindex='0']").focus()
    assert group.label in tip.text_content()
    tab.keyboard.press("ArrowRight")
    assert collection.certified_groups[1].label in tip.text_content()
    tab.keyboard.press("ArrowLeft")
    assert "acert-k0-s0" in tip.text_content()
    tab.keyboard.press("Escape")
    assert not tip.is_visible()


def test_hovering_a_dot_tells_its_single_run(opened, collection):
    tab = opened()
    # Not under a mean, which lies above the dots.
    run, place = tab.evaluate(
        """(() => { const middle = (node) => { const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; };
          const means = [...document.querySelectorAll(".point .marker")].map(middle);
          const dots = [...document.querySelectorAll(".dot")].map(middle);
          const free = ([x, y]) => means.every(([a, b]) => Math.hypot(a - x, b - y) > 20);
          const at = dots.findIndex(free);
          return [at, dots[at]]; })()"""
    )
    tab.mouse.move(*place)
    runs = [run for group in collection.groups if group.n > 1 for run in group.runs]
    for words in (runs[run].name, f"{100 * runs[run].certification.art:.2f}"):
        assert words in tab.locator("#tip").text_content()
    tab.mouse.move(5, 5)
    assert not tab.locator("#tip").is_visible()


@pytest.mark.parametrize("figure", ["curves", "gap", "distribution", "classes", "training"])
def test_lines_are_read_by_pointer_and_by_keys(opened, figure):
    tab = opened()
    plot = tab.locator(f"#{figure} svg").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    assert "ACERT" in tab.locator("#tip").text_content()
    tab.mouse.move(5, 5)
    plot.focus()
    tab.keyboard.press("Home")
    first = tab.locator("#tip").text_content()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#tip").text_content() != first
    assert "ACERT" in tab.locator("#spoken").text_content()
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#tip").text_content() == first
    tab.keyboard.press("Escape")
    assert not tab.locator("#tip").is_visible()


def _column(tab, name):
    """The cells of a column of the table of results, from top to bottom."""
    place = tab.locator("#runs th").all_text_contents().index(name) + 1
    return tab.locator(f"#runs tbody tr td:nth-child({place})").all_text_contents()


def test_the_table_of_settings_has_means_and_spreads(opened, collection):
    tab = opened()
    assert tab.locator("#lists [aria-pressed=true]").text_content() == "Mean over seeds"
    groups = collection.groups
    assert _column(tab, "n") == [str(group.n) if group.n else "\u2013" for group in groups]

    def shown(spread):
        std = "" if spread.std is None else f" \u00b1 {100 * spread.std:.2f}"
        return f"{100 * spread.mean:.2f}{std}"

    for name, figure in (("Acc", "accuracy"), ("ACR", "acr"), ("ART", "art")):
        wanted = [shown(getattr(group, figure)) if group.n else "\u2013" for group in groups]
        assert _column(tab, name) == wanted
    best = max((group.art for group in groups if group.n), key=lambda spread: spread.mean)
    assert shown(best) in tab.locator("#runs td b").all_text_contents()
    assert tab.locator("#runs td b").count() == 3
    # By the means, and not by their words: 100 would come before 20.
    tab.locator("#runs th", has_text="ART").locator("button").click()
    means = sorted(group.art.mean for group in groups if group.n)
    assert [cell.split()[0] for cell in _column(tab, "ART")] == [
        *(f"{100 * mean:.2f}" for mean in means), "\u2013",
    ]  # fmt: skip


def test_attacks_on_some_seeds_say_on_how_many(opened, tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / str(seed), seed=seed, attacked=seed == 0)
    tab = opened(at=write_page(collect([tmp_path]), tmp_path)[0].as_uri())
    (cell,) = _column(tab, "Attacked ACR")
    assert cell.endswith(" (n = 1)")


def test_the_table_sorts(opened, collection):
    tab = opened()
    tab.get_by_role("button", name="Single runs").press("Enter")
    head = tab.locator("#runs th", has_text="ART")

    def shown():
        *cells, last = _column(tab, "ART")
        assert last == "\u2013", "what is not known stays last"
        return cells

    figures = sorted(run.certification.art for run in collection.runs if run.certification)
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert shown() == [f"{100 * art:.2f}" for art in figures]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert shown() == [f"{100 * art:.2f}" for art in reversed(figures)]
    tab.locator("#runs th", has_text="Run").first.locator("button").press("Enter")
    assert _column(tab, "Run")[:2] == ["acert-k0-s0", "acert-k0-s1"]
    assert head.get_attribute("aria-sort") == "none"


def test_the_table_filters(opened, collection):
    tab = opened()
    rows = tab.locator("#runs tbody tr:visible")
    assert rows.count() == len(collection.groups)
    tab.locator("#filter").fill("FastIBP")
    assert tab.locator("#count").text_content() == f"2 of {len(collection.groups)} settings"
    tab.get_by_role("button", name="Single runs").click()
    assert rows.count() == 4, "the filter holds for the other list too"
    tab.locator("#filter").fill("FastIBP s1")
    assert rows.count() == 2
    assert tab.locator("#count").text_content() == f"2 of {len(collection.runs)} runs"
    tab.locator("#filter").fill("not certified")
    assert rows.locator("td:first-child").all_text_contents() == ["sabrnot certified"]
    tab.locator("#filter").fill("c0ffee")
    assert rows.count() == len(collection.runs), "facts of all rows are found too"
    tab.locator("#filter").fill("nothing like it")
    assert rows.count() == 0


def test_what_all_runs_share_is_said_once(opened):
    tab = opened()
    tab.get_by_role("button", name="Single runs").click()
    heads = tab.locator("#runs th").all_text_contents()
    assert not {"Epochs", "Schedule", "Hardware", "Commit"} & set(heads)
    assert "Root steps" in heads, "only some runs have them"
    facts = (
        "All of them: epochs 4, schedule SmoothRadius, hardware EPYC, 2 cores, commit c0ffee0123."
    )
    assert tab.locator("#run-facts").text_content() == facts


def test_names_are_shown_as_text(opened, collection):
    tab = opened()
    assert tab.title() == "Accuracy and certified robustness on digits"
    assert tab.locator("#methods button").all_text_contents()[-1] == EVIL
    tab.get_by_role("button", name="Single runs").click()
    assert _column(tab, "Run")[-1] == "evil <b>&amp;"
    assert tab.locator("img[src=x]").count() == 0
    assert tab.evaluate("document.scripts.length") == 2


def test_a_script_in_the_name_of_a_run_is_shown_as_text(tmp_path, opened):
    # The slash of its end is that between two folders.
    name = "<script>document.title='hit'</script>"
    make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "<img src=x onerror=\"document.title='hit'\">", seed=1)
    tab = opened(at=write_page(collect([tmp_path / "runs"]), tmp_path / "page")[0].as_uri())
    tab.get_by_role("button", name="Single runs").click()
    assert name in _column(tab, "Run")
    assert tab.title() == "Accuracy and certified robustness on digits"
    assert tab.evaluate("document.scripts.length") == 2
    assert tab.locator("img[src=x]").count() == 0


def test_what_was_left_out_is_said(opened):
    tab = opened()
    assert "broken/metrics.jsonl is damaged" in tab.locator("#complaints").text_content()
    assert "not certified" in tab.locator("#tiles").text_content()
    assert not tab.locator("#alarms").is_visible()


def test_a_narrow_window_gets_its_own_drawing(opened):
    tab = opened(1440)
    wide = tab.locator("#trade-off svg").bounding_box()["width"]
    tab.set_viewport_size({"width": 375, "height": 800})
    tab.wait_for_function("document.querySelector('#trade-off svg').clientWidth < 375")
    assert tab.locator("#trade-off svg").bounding_box()["width"] < wide / 3


def test_training_panels_share_the_width(opened):
    panels = opened(1440).locator("#training svg")
    widths = {round(panel.bounding_box()["width"]) for panel in panels.all()}
    assert panels.count() == 4
    assert len(widths) == 1
    assert panels.first.get_attribute("width") == str(widths.pop())


def test_variants_of_a_method_have_colours_and_legend_entries_of_their_own(opened, tmp_path):
    make_run(tmp_path / "a", epochs=10)
    make_run(tmp_path / "b", epochs=2)
    tab = opened(at=write_page(collect([tmp_path]), tmp_path)[0].as_uri())
    assert tab.locator("#methods button").all_text_contents() == [
        "ACERT, epochs 2",
        "ACERT, epochs 10",
    ]
    colours = tab.locator("#curves svg path.curve").evaluate_all(
        "(lines) => lines.map((line) => getComputedStyle(line).stroke)"
    )
    assert len(colours) == len(set(colours)) == 2
    tab.locator("#methods button").first.click()
    assert tab.locator("#curves svg path.curve").count() == 1
    assert not tab.locator("#kappas").is_visible(), "there is one kappa only"


def test_every_method_has_a_marker_of_its_own(opened, tmp_path):
    methods = [*METHOD_NAMES, "Alpha", "Zeta"]
    for method in methods:
        make_run(tmp_path / method, method=method)
    tab = opened(at=write_page(collect([tmp_path]), tmp_path)[0].as_uri())
    shapes = tab.locator("#methods .marker").evaluate_all(
        "(markers) => markers.map((marker) => marker.getAttribute('d'))"
    )
    assert len(shapes) == len(set(shapes)) == len(methods)


def test_paper_is_white_and_high_contrast_shows_what_is_pressed(opened):
    tab = opened(theme="dark")
    tab.emulate_media(media="print")
    ink = "getComputedStyle(document.querySelector('h1')).color"
    assert max(map(int, re.findall(r"\d+", tab.evaluate(ink)))) < 100
    assert not tab.locator("#theme").is_visible()
    assert tab.locator("#methods").is_visible(), "it is the legend"
    tab.emulate_media(media="screen", forced_colors="active")
    ground = "(node) => getComputedStyle(node).backgroundColor"
    pressed, other = tab.locator("#kappas button").evaluate_all(f"(all) => all.map({ground})")[:2]
    assert pressed != other


def test_an_axis_starts_where_the_curves_are(opened, tmp_path):
    make_run(tmp_path / "a", status=np.full(40, 1), radius=np.full(40, 0.3))
    tab = opened(at=write_page(collect([tmp_path]), tmp_path)[0].as_uri())
    texts = tab.locator("#curves svg text").all_text_contents()
    assert [text for text in texts if text in ("0", "50", "90", "100")] == ["90", "100", "0"]


def test_a_single_run_without_history_or_images(opened, tmp_path):
    make_run(tmp_path / "a", classes=30, samples=60, pictures=None, epochs=1)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    at = write_page(collect([tmp_path]), tmp_path)[0].as_uri()
    tab = opened(375, at=at)
    assert tab.locator("#trade-off .point").count() == 1
    assert tab.locator("#classes svg").count() == 1
    assert not tab.locator("#examples").is_visible()
    assert "Training" in tab.locator("#training").text_content()


def test_an_attack_inside_a_certificate_is_shown_first(opened, tmp_path):
    broken = np.full(40, np.inf)
    broken[1] = 0.1
    make_run(tmp_path / "a", attack_radius=broken, arithmetic="float32")
    tab = opened(at=write_page(collect([tmp_path]), tmp_path)[0].as_uri())
    assert tab.locator("#alarms").is_visible()
    assert "the bounds are wrong" in tab.locator("#alarms").text_content()
