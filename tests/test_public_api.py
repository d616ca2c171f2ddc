"""What users see: the names, the version, the README and the map from the paper to the code."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import acert
from acert import models
from acert.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
EQUATIONS = ROOT / "docs" / "equations.md"


# -- imports ----------------------------------------------------------------------------

IMPORT_WITH_TORCH_AND_NUMPY_ALONE = """
import sys

sys.path.insert(0, {source!r})
import numpy
import torch

before = {{name.partition(".")[0] for name in sys.modules}}


class Refuser:
    refused = {refused!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.refused:
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Refuser())
import acert

new = {{name.partition(".")[0] for name in sys.modules}} - before - sys.stdlib_module_names
print(sorted(new))
"""


def test_import_needs_torch_and_numpy_alone():
    refused = {
        "PIL", "flint", "hypothesis", "matplotlib", "pooch", "pytest", "rich", "safetensors",
        "scipy", "sklearn",
    }  # fmt: skip
    code = IMPORT_WITH_TORCH_AND_NUMPY_ALONE.format(
        source=str(Path(acert.__file__).parent.parent), refused=refused
    )
    # Isolated: no path of this process may lend it anything.
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['acert']"


def test_dependencies_are_torch_and_numpy():
    names = {re.split(r"[<>=!~ ;\[]", line)[0] for line in project()["dependencies"]}
    assert names == {"torch", "numpy"}


# -- names ------------------------------------------------------------------------------


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_matches_the_project():
    assert acert.__version__ == project()["version"]


def test_all_is_sorted_complete_and_there():
    assert acert.__all__ == sorted(acert.__all__)
    assert {*acert.__all__} <= {*dir(acert)}
    for name in acert.__all__:
        getattr(acert, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = acert.nothing
    public = {
        name
        for name, value in vars(acert).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    } - {"TYPE_CHECKING", "Any", "import_module"}
    # Submodules count only where they are named: Python sets them as attributes by itself.
    assert public <= set(acert.__all__)
    assert all(name in vars(acert) for name in acert.__all__)


@pytest.mark.parametrize("name", acert.__all__)
def test_every_public_name_is_documented(name):
    documented(getattr(acert, name), name)


def documented(value, name):
    # `getattr` would find the docstring of `object` or a base class.
    text = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    first = text.strip().splitlines()[0]
    # NamedTuple and dataclass write one themselves: the signature, which says nothing.
    assert not first.startswith(f"{name}("), f"{name} has only a generated docstring"
    assert len(first) > 15, f"the docstring of {name} says too little: {first!r}"
    if not inspect.isclass(value):
        return
    for part, member in vars(value).items():
        function = member.fget if isinstance(member, property) else member
        if not part.startswith("_") and inspect.isfunction(function):
            assert function.__doc__, f"{name}.{part} has no docstring"


# -- refusals ---------------------------------------------------------------------------

MODEL, IMAGES, LABELS = models.mlp(2, [], 3), torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
SOLVERS = (acert.Brent, acert.Bisection, acert.PowerLaw)
# Called with something of the wrong type where `parameter` stands.
CALLS = [
    ("model", lambda bad: acert.certified_margin(bad, IMAGES, LABELS, 0.1)),
    ("model", lambda bad: acert.worst_case_logits(bad, IMAGES, LABELS, 0.1)),
    ("model", lambda bad: acert.certified_radius(bad, IMAGES, LABELS, max_radius=0.1)),
    ("model", lambda bad: acert.clean_pass(bad, IMAGES)),
    ("images", lambda bad: acert.clean_pass(MODEL, bad)),
    ("model", lambda bad: acert.interval_bounds(bad, IMAGES, IMAGES)),
    ("lower", lambda bad: acert.interval_bounds(MODEL, bad, IMAGES)),
    ("lower", lambda bad: acert.Interval(bad, IMAGES)),
    ("upper", lambda bad: acert.Interval(IMAGES, bad)),
    ("model", lambda bad: acert.CertifiedClassifier(bad, max_radius=0.1)),
    ("function", lambda bad: acert.register_rule(bad, lambda box: box, ulps=0)),
    (
        "model",
        lambda bad: acert.train(
            bad, (IMAGES, LABELS), method=acert.Standard(), max_radius=0.1, epochs=1
        ),
    ),
    *[
        ("kappa", lambda bad, method=method: method(kappa=bad))
        for method in METHODS.values()
    ],
    ("solver", lambda bad: acert.Acert(solver=bad)),
    *[("max_steps", lambda bad, solver=solver: solver(max_steps=bad)) for solver in SOLVERS],
    ("f", lambda bad: acert.Brent().solve(bad, torch.zeros(2), torch.ones(2))),
    ("lower", lambda bad: acert.Brent().solve(torch.sin, bad, torch.ones(2))),
    ("upper", lambda bad: acert.Brent().solve(torch.sin, torch.zeros(2), bad)),
    (r"f\(x\)", lambda bad: acert.Brent().solve(lambda _: bad, torch.zeros(2), torch.ones(2))),
    ("branch", lambda bad: models.Residual(bad)),
    ("model", lambda bad: models.ibp_init_(bad)),
    ("mean", lambda bad: models.Normalize(bad, 1.0)),
    ("in_features", lambda bad: models.mlp(bad, [], 3)),
    ("hidden", lambda bad: models.mlp(2, bad, 3)),
    *[
        ("in_shape", lambda bad, factory=factory: factory(bad, 10))
        for factory in (models.cnn7, models.small_cnn, models.small_resnet)
    ],
    ("source", acert.load_model),
]  # fmt: skip


@pytest.mark.parametrize("bad", [None, {3}, object(), "text"], ids=["None", "set", "object", "str"])
@pytest.mark.parametrize(("parameter", "call"), CALLS)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_parameter(parameter, call, bad):
    if parameter == "source" and bad == "text":
        return  # a path like any other
    with pytest.raises(acert.AcertError, match=rf"^`{parameter}(\[0\])?`.* must be "):
        call(bad)


# -- the README -------------------------------------------------------------------------


def test_readme_code_runs(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    blocks = [
        (text[: match.start()].count("\n") + 2, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert blocks, "README.md shows no Python"
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for line, block in blocks:
        # Blank lines in front make a traceback name the line of the README.
        exec(compile("\n" * (line - 1) + block, str(ROOT / "README.md"), "exec"), namespace)


# -- docs/equations.md ------------------------------------------------------------------


def rows():
    """The cells of each row of the tables, without headings."""
    lines = [line for line in EQUATIONS.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "in the paper" and not set(row[0]) <= set("- :")]


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_item_of_the_paper_has_a_row():
    expected = {f"Eq. {number}" for number in range(1, 25)}
    expected |= {"Def. 3.1", "Thm. 3.2", "Thm. 3.4", "Thm. A.1", "Thm. A.2"}
    expected |= {f"Remark {number}" for number in ("3.3", "3.5", "A.3", "A.4")}
    expected |= {f"Table {number}" for number in range(1, 8)}
    expected |= {f"Figure {number}" for number in range(1, 4)}
    found = [row[0] for row in rows()]
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_names_functions_and_tests_or_says_why_not(row):
    _, _, functions, tests = row
    assert (functions == "-") == (not names_in(functions))
    assert names_in(tests) or tests.startswith("not yet"), "neither a test nor `not yet`"


@pytest.mark.parametrize("name", sorted({n for row in rows() for n in names_in(row[2])}))
def test_every_function_named_exists(name):
    module, parts = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
    for part in parts:
        value = getattr(value, part)
    assert callable(value), f"{name} is no function, class or method"


@pytest.mark.parametrize("name", sorted({n for row in rows() for n in names_in(row[3])}))
def test_every_test_named_exists(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function.startswith("test_")
