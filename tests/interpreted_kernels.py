"""Run by `test_fused.py` with TRITON_INTERPRET=1: the kernels on a CPU, against plain PyTorch."""

import itertools
import math

import torch

from acert import kernels
from acert.bounds import fused

SHAPES = [(1000, 64), (37, 128), (5, 3), (3, 1300)]
DTYPES = (torch.float16, torch.float32)


def compare(rows, channels, dtype, observe):
    """The kernels and plain PyTorch, on numbers of both signs."""
    center, by_center, by_radius = (torch.randn(rows, channels).to(dtype) for _ in range(3))
    radius, by_sums = torch.rand(rows, channels).to(dtype), torch.randn(8)
    channel = [torch.randn(channels) for _ in range(4)]
    channel[2][0] = 0.0
    pieces = fused._pieces(center)
    slack = {"rtol": 2e-3 if dtype == torch.float16 else 1e-4, "atol": 2e-3}

    expected = fused._forward(center, radius, *channel, observe)
    found = kernels.relu_of_scaled(center, radius, channel, observe, pieces)
    assert found[2].shape == expected[2].shape
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, **slack)
    torch.testing.assert_close(found[2].sum(0), expected[2].sum(0), rtol=1e-4, atol=2e-3)

    by = by_center, by_radius, by_sums
    expected = fused._backward(*by, center, radius, *channel, observe)
    found = kernels.relu_of_scaled_backward(*by, center, radius, channel, observe, pieces)
    assert found[2].shape == expected[2].shape
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, **slack)
    torch.testing.assert_close(found[2].sum(1), expected[2].sum(1), rtol=1e-4, atol=2e-3)


def compare_nan(dtype):
    """A ball that overflowed is no point: NaN stays NaN, as in plain PyTorch."""
    inf, nan = math.inf, math.nan
    center = torch.tensor([[nan, nan, -inf, inf, 1.0, nan, -1.0, inf]], dtype=dtype)
    radius = torch.tensor([[1.0, inf, inf, inf, nan, nan, inf, 1.0]], dtype=dtype)
    channel = [torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8)]
    expected = fused._forward(center, radius, *channel, False)
    found = kernels.relu_of_scaled(center, radius, channel, False, 1)
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    cases = [*itertools.product(SHAPES, DTYPES, (True, False))]
    for shape, dtype, observe in cases:
        compare(*shape, dtype, observe)
    for dtype in DTYPES:
        compare_nan(dtype)
    print(len(cases), "cases")
