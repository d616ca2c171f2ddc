"""Every package that may be missing is brought by the extra that the message names."""

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from acert.extras import EXTRAS, needs


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_that_is_named_brings_the_package(package):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    extra = EXTRAS[package]
    assert needs(package) == f"needs the package {package}: pip install 'acert[{extra}]'"
    required = [
        line.partition(">")[0] for line in project["project"]["optional-dependencies"][extra]
    ]
    assert set(packages_distributions()[package]) & set(required)


def test_of_another_package_no_extra_is_named():
    assert needs("tensorboard") == "needs the package tensorboard: install it"
