"""Proofs need float64 as IEEE has it: where a thread was told otherwise, nothing is proven."""

import ctypes
import platform
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import acert
from acert.arithmetic import check_float64


class Tiny(nn.Module):
    """Logits 100 x and 50, through a weight below the smallest normal float32 number."""

    def forward(self, x):
        small = nn.functional.linear(x, torch.tensor([[1e-39]]))
        large = nn.functional.linear(small, torch.tensor([[1e38]]))
        return nn.functional.linear(large, torch.tensor([[1e3], [0.0]]), torch.tensor([0.0, 50.0]))


def radius(arithmetic):
    return acert.certified_radius(
        Tiny(), torch.tensor([[0.1]]), max_radius=0.9, arithmetic=arithmetic
    ).value.item()


def test_nothing_is_proven_where_subnormal_numbers_are_flushed():
    assert 0.39 < radius("real") < 0.4001
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        assert radius("nearest") == 0.9  # the weight counts as 0: no proof, and wrong
        for arithmetic in ("real", "float32"):
            with pytest.raises(acert.InvalidInput, match=r"set_flush_denormal.*got True"):
                radius(arithmetic)
    finally:
        torch.set_flush_denormal(False)


def test_nothing_is_proven_where_other_threads_flush_them():
    code = """
        import torch
        from acert.arithmetic import check_float64

        torch.set_num_threads(2)
        flushes = torch.set_flush_denormal(True)
        torch.rand(2**20).mul(2)  # starts the other thread, which goes on flushing
        torch.set_flush_denormal(False)
        kept = (torch.full((2**20,), 2.0**-149).double() == 0).any()
        if not flushes or not kept:
            raise SystemExit(77)
        check_float64()
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("threads do not flush here, or not what was set before")
    assert "set_flush_denormal` must be False for a proof" in done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="modes are numbers of the processor")
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
def test_nothing_is_proven_under_directed_rounding(mode):
    library = ctypes.CDLL(None)
    try:
        library.fesetround(mode)
        with pytest.raises(acert.InvalidInput, match="rounded to nearest"):
            check_float64()
    finally:
        library.fesetround(0)
    check_float64()
