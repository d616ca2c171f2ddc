"""No sampled or attacked point of a box leaves the bounds of a whole classifier."""

import pytest
import torch
from tests.rule_cases import MODELS, model_subject, probe

SMALL = [name for name in MODELS if name != "cnn7"]


def assert_sound(result):
    assert result.float64 >= -1e-12
    assert result.float32 >= -1e-5
    assert result.safe_real >= 0
    assert result.safe_float32 >= 0


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name):
    result = probe(model_subject(name), points=20_000, attacks=2_000)
    assert (result.sampled, result.attacked) == (20_000, 2_000)
    assert_sound(result)
    # Not vacuous: attacks come within a factor of the bounds.
    assert result.missed < 0.9


@pytest.mark.slow
def test_full_width_cnn7():
    result = probe(
        model_subject("cnn7"), points=500, attacks=52, attack_dtype=torch.float32, chunk=50
    )
    assert (result.sampled, result.attacked) == (500, 52)
    assert_sound(result)
