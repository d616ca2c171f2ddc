"""Tables of groups in Markdown and LaTeX: mean and sample standard deviation over seeds, in points.

The best mean of a column is bold. Nothing is typed: every number is one of the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from acert.metrics import Spread
from acert.report.collection import Collection
from acert.report.group import Group

__all__ = ["ARITHMETIC", "latex_table", "markdown_table", "note"]

# What a certificate means, by the word in its record.
ARITHMETIC = {
    "real": "proven in real arithmetic",
    "float32": "proven for float32 hardware",
    "nearest": "rounding is not covered",
}
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "\N{GREEK SMALL LETTER KAPPA}": r"$\kappa$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def markdown_table(collection: Collection) -> str:
    """A row per group with a certified run, and a line with what holds for all of them."""
    rows = _rows(collection.certified_groups, bold="**{}**", text=markdown_text)
    head = [markdown_text(name) for name in _head(collection.certified_groups)]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{markdown_text(note(collection))}\n"


def latex_table(collection: Collection) -> str:
    """The same as a plain tabular, which needs no package; the line below is a comment."""
    rows = _rows(collection.certified_groups, bold=r"\textbf{{{}}}", text=latex_text)
    head = [latex_text(name) for name in _head(collection.certified_groups)]
    words = 2 if any(group.variant for group in collection.certified_groups) else 1
    lines = [
        f"% {latex_text(note(collection))}",
        rf"\begin{{tabular}}{{{'l' * words}{'r' * (len(head) - words)}}}",
        r"\hline",
        rf"{' & '.join(head)} \\",
        r"\hline",
        *(rf"{' & '.join(row)} \\" for row in rows),
        r"\hline",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def note(collection: Collection) -> str:
    """What holds for all rows: data set, radius, bounds, arithmetic, hardware and commits."""
    found = collection.certification
    hardware = sorted({run.environment.hardware for run in collection.runs} - {""})
    commits = sorted({run.environment.commit[:10] for run in collection.runs} - {""})
    parts = [
        f"{collection.dataset}: {found.samples} test images, max_radius {found.max_radius:.6g}, "
        f"{found.bounds} bounds, {ARITHMETIC.get(found.arithmetic, found.arithmetic)}",
        "mean \N{PLUS-MINUS SIGN} sample standard deviation over n seeds, in points",
        *([f"trained on {', '.join(hardware)}"] if hardware else []),
        *([f"at commit {', '.join(commits)}"] if commits else []),
    ]
    return f"{'; '.join(parts)}."


def markdown_text(text: str) -> str:
    r"""The text as Markdown shows it unchanged.

    >>> markdown_text("a|b_c<d>")
    'a\\|b\\_c&lt;d&gt;'
    """
    for letter in "\\`*_[]|~#$":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex_text(text: str) -> str:
    r"""The text as LaTeX shows it; a letter that its fonts may lack becomes its code point.

    >>> latex_text("a_b & 50%")
    'a\\_b \\& 50\\%'
    """
    return "".join(
        _LATEX.get(letter) or (letter if letter.isascii() else f"U+{ord(letter):04X}")
        for letter in text
    )


def _head(groups: Sequence[Group]) -> list[str]:
    variant = ["setting"] if any(group.variant for group in groups) else []
    attacked = ["attacked ACR"] if any(group.attacked_acr for group in groups) else []
    kappa = "\N{GREEK SMALL LETTER KAPPA}"
    return ["method", *variant, kappa, "Acc", "ACR", "ART", *attacked, "n"]


def _rows(groups: Sequence[Group], *, bold: str, text: Callable[[str], str]) -> list[list[str]]:
    head = _head(groups)
    best = {
        "Acc": max(_points(group.accuracy) for group in groups),
        "ACR": max(_points(group.acr) for group in groups),
        "ART": max(_points(group.art) for group in groups),
    }

    def figure(name: str, spread: Spread) -> str:
        points = 100 * spread.mean
        # Standard training's ACR is next to nothing, and not nothing.
        mean = f"{points:.1g}" if 0 < points < 0.005 else f"{_points(spread):.2f}"
        shown = bold.format(mean) if best.get(name) == _points(spread) else mean
        tail = "" if spread.std is None else text(f" \N{PLUS-MINUS SIGN} {100 * spread.std:.2f}")
        return shown + tail

    rows = []
    for group in groups:
        attacked = group.attacked_acr
        cells = {
            "method": text(group.method),
            "setting": text(group.variant),
            "\N{GREEK SMALL LETTER KAPPA}": f"{group.kappa:g}",
            "Acc": figure("Acc", group.accuracy),
            "ACR": figure("ACR", group.acr),
            "ART": figure("ART", group.art),
            "attacked ACR": ""
            if attacked is None
            else figure("attacked ACR", attacked)
            + ("" if attacked.n == group.n else f" (n = {attacked.n})"),
            "n": str(group.n),
        }
        rows.append([cells[name] for name in head])
    return rows


def _points(spread: Spread) -> float:
    """The mean in points as it is shown, so that ties are seen as the reader sees them."""
    return round(100 * spread.mean, 2)
