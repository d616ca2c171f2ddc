"""The lists of layers that have bounds: complete, and what the rules do today."""

import torch
from benchmarks import layers

from acert.experiments.paper.comparison import filled


def test_every_layer_of_pytorch_is_in_a_list():
    assert layers.unlisted() == set()


def test_the_page_says_what_is_bounded_today():
    page = layers.PAGE.read_text(encoding="utf-8")
    found = layers.listed()
    if torch.__version__ >= "2.12":  # older ones name some operations otherwise
        assert filled(page, found) == page, "run `python benchmarks/layers.py`"
    assert "`GRU`" in found["layers"]
