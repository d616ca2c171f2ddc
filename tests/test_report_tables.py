"""Tables hold the records' numbers and survive any name."""

import re

import pytest
from tests.made_runs import make_run

from acert.report import collect, latex_table, markdown_table
from acert.report.tables import latex_text, markdown_text


@pytest.fixture
def collection(tmp_path):
    for method, seeds in (("Acert", (0, 1, 2)), ("FastIBP", (0,))):
        for seed in seeds:
            make_run(tmp_path / f"{method}-{seed}", method=method, seed=seed)
    return collect([tmp_path])


def _cells(row, between="|"):
    return [cell.strip() for cell in re.split(rf"(?<!\\)[{between}]", row.strip("| \\"))]


def test_markdown_numbers_are_the_records(collection):
    lines = markdown_table(collection).splitlines()
    assert lines[0] == "| method | \u03ba | Acc | ACR | ART | n |"
    assert lines[1] == "| --- | --- | --- | --- | --- | --- |"
    for line, group in zip(lines[2:], collection.groups, strict=False):
        method, kappa, *figures, n = _cells(line)
        assert (method, kappa, n) == (group.method, "0", str(group.n))
        for cell, spread in zip(figures, (group.accuracy, group.acr, group.art), strict=True):
            mean, *std = cell.replace("*", "").split(" \u00b1 ")
            assert mean == f"{100 * spread.mean:.2f}"
            assert std == ([] if spread.std is None else [f"{100 * spread.std:.2f}"])


def test_the_best_mean_is_bold(collection):
    text = markdown_table(collection)
    best = max(group.art.mean for group in collection.groups)
    assert f"**{100 * best:.2f}**" in text
    assert rf"\textbf{{{100 * best:.2f}}}" in latex_table(collection)
    worst = min(group.art.mean for group in collection.groups)
    assert f"**{100 * worst:.2f}**" not in text


def test_the_note_says_what_holds_for_all(collection):
    note = markdown_table(collection).splitlines()[-1]
    for words in ("digits: 40 test images", r"max\_radius 0.3", "ibp bounds", "EPYC, 2 cores",
                  "proven in real arithmetic", "n seeds", "at commit c0ffee0123"):  # fmt: skip
        assert words in note


def test_latex_is_a_plain_tabular(collection):
    lines = latex_table(collection).splitlines()
    assert lines[0].startswith("% digits: 40 test images, max\\_radius 0.3")
    assert lines[1] == r"\begin{tabular}{lrrrrr}"
    assert lines[-1] == r"\end{tabular}"
    rows = [line for line in lines[2:-1] if line != r"\hline"]
    assert rows[0] == r"method & $\kappa$ & Acc & ACR & ART & n \\"
    assert len(rows) == 3
    for row in rows:
        assert row.endswith(r" \\")
        assert len(_cells(row, "&")) == 6
        assert row.count("{") == row.count("}")
        assert row.isascii()
    group = collection.groups[0]
    spread = rf"{100 * group.acr.mean:.2f}"
    assert spread in rows[1]
    assert rf"$\pm$ {100 * group.acr.std:.2f}" in rows[1]


def test_settings_and_attacks_get_columns(tmp_path):
    make_run(tmp_path / "a", attacked=True)
    make_run(tmp_path / "b", epochs=8)
    collection = collect([tmp_path])
    head, _, *rows = [_cells(line) for line in markdown_table(collection).splitlines()[:4]]
    assert head == ["method", "setting", "\u03ba", "Acc", "ACR", "ART", "attacked ACR", "n"]
    assert [row[1] for row in rows] == ["epochs 4", "epochs 8"]
    attack = collection.runs[0].certification.attack
    assert [row[6] for row in rows] == [f"{100 * attack.acr:.2f}", ""]
    assert r"\begin{tabular}{llrrrrrr}" in latex_table(collection)


def test_attacks_on_some_seeds_say_on_how_many(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / str(seed), seed=seed, attacked=seed == 0)
    collection = collect([tmp_path])
    shown = f"{100 * collection.groups[0].attacked_acr.mean:.2f} (n = 1)"
    assert f"| {shown} | 3 |" in markdown_table(collection)
    assert f"& {shown} & 3" in latex_table(collection)


def test_names_are_escaped(tmp_path):
    make_run(tmp_path / "a", method=r"50% & <b>x|y_$\{~^#*`[z]", dataset="d|s_\u8a3c")
    markdown, latex = markdown_table(collect([tmp_path])), latex_table(collect([tmp_path]))
    row = markdown.splitlines()[2]
    assert len(_cells(row)) == 6
    assert "<b>" not in markdown
    assert r"d\|s\_" in markdown
    assert r"50\% \& \textless{}b\textgreater{}x\textbar{}y\_\$\textbackslash{}\{" in latex
    assert r"\textasciitilde{}\textasciicircum{}\#*" in latex
    assert "U+8A3C" in latex
    assert latex.isascii()


@pytest.mark.parametrize("letter", [*r"\`*_[]|~#$<>&"])
def test_every_special_letter_is_escaped_in_markdown(letter):
    assert markdown_text(letter) in (f"\\{letter}", "&lt;", "&gt;", "&amp;")


@pytest.mark.parametrize("letter", [*'\\{}$&#^_~%<>|"'])
def test_every_special_letter_is_escaped_in_latex(letter):
    assert latex_text(letter) != letter
