"""One self-contained HTML file: no network, no framework, safe to open whatever the runs are named.

Text from files stands in the page as JSON only, with every letter escaped that could end it, and
the script shows it as text. A content security policy allows nothing but that very script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from acert.report.appearance import Look
from acert.report.collection import Collection
from acert.report.content import content
from acert.report.group import series_of
from acert.version import __version__

__all__ = ["page"]

# In this order: the last one starts the page.
_SCRIPTS = ("chart.js", "figures.js", "tables.js", "page.js")
# In a script element these could end it, or begin a comment in it; the last two end a line.
_UNSAFE = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def page(collection: Collection) -> str:
    """The report on some runs as the text of an HTML file."""
    shown = content(collection)
    looks = [series.look for series in series_of(collection.groups)]
    style = _filled(_part("page.css"), {"colours": _colours(looks)}) + "".join(
        f".s{place} {{ color: var(--s{place}); }}\n" for place in range(len(looks))
    )
    script = '"use strict";\n(() => {\n' + "\n".join(_part(name) for name in _SCRIPTS) + "})();\n"
    return _filled(
        _part("page.html"),
        {
            "policy": (
                f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
                f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
            ),
            "version": html.escape(__version__),
            "title": html.escape(shown["title"]),
            "style": style,
            "script": script,
            "data": _embedded(shown),
        },
    )


def _part(name: str) -> str:
    return files("acert.report").joinpath("template", name).read_text(encoding="utf-8")


def _filled(template: str, values: dict[str, str]) -> str:
    """The template with {{name}} replaced; in one pass, so that values are never looked into."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _colours(looks: list[Look]) -> str:
    pairs = [f"--s{i}: light-dark({one.light}, {one.dark});" for i, one in enumerate(looks)]
    return "\n  ".join(pairs)


def _embedded(value: dict[str, Any]) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
