"""Every test runs on one thread, from the same seed, with the same hypothesis examples."""

import signal
import sys

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# A runner in the background (nohup, CI) may start us with Ctrl-C ignored, and children would
# inherit that; the tests that send signals need it answered.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline, because the first call of a compiled function takes seconds.
hypothesis.settings.register_profile("acert", derandomize=True, deadline=None)
hypothesis.settings.load_profile("acert")


@pytest.fixture(autouse=True)
def _seed() -> None:
    # NumPy has no global state here: tests draw from `np.random.default_rng(seed)`.
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Coverage looks away while torch.compile traces, which would take twice as long."""
    words = ("compile", "inductor", "aot_eager", "exported")
    trace = sys.gettrace()
    if trace is None or not any(word in item.name for word in words):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)
