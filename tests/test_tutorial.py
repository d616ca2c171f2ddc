"""The tutorial: its Python runs, its commands parse, and its tables are those of the records."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from acert.cli.parser import parsed

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language):
    return [body for found, body in BLOCK.findall(TUTORIAL) if found == language]


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for body in blocks("python"):
        exec(compile(body, "tutorial.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[0].split()[-1]) > 0.03  # the first example learns something
    assert len(blocks("python")) == 4


def test_commands_parse():
    commands = [
        line.removeprefix("$ ").partition("#")[0]
        for body in blocks("console")
        for line in body.splitlines()
    ]
    assert len(commands) == 6
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "acert"
        parsed(words)


def test_the_table_of_methods_is_that_of_its_record():
    generator = runpy.run_path(str(ROOT / "benchmarks" / "methods_table.py"))
    record = ROOT / "results" / "digits-methods.json"
    if not record.is_file():
        pytest.skip("there is no record yet")
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    wanted = generator["table"](json.loads(record.read_text(encoding="utf-8")))
    assert f"<!-- digits-methods:begin -->\n{wanted}\n<!-- digits-methods:end -->" in page
