"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import acert

MODULES = ["acert", *(found.name for found in pkgutil.walk_packages(acert.__path__, "acert."))]
if importlib.util.find_spec("triton") is None:  # as everywhere without CUDA
    MODULES.remove("acert.kernels")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    assert any(case.examples for module in modules for case in finder.find(module))
