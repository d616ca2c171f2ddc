"""README's tables come from the records under results/; a stale one fails here."""

from benchmarks import readme


def test_tables_are_those_of_the_records():
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- results:begin -->" in text
    assert "<!-- speed:begin -->" in text
    assert readme.filled(text) == text, "run `python benchmarks/readme.py`"


def test_a_changed_figure_is_noticed():
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| [mnist, Acert")]
    assert len(rows) == 1
    stale = text.replace(rows[0], rows[0].replace("9", "8"))
    assert readme.filled(stale) != stale
