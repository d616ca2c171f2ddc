"""The compiled and captured step on a CUDA device: the eager step's figures, and repeatable."""

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

import acert
from acert import optimizers, records
from acert.bounds import fused
from acert.data import Augmentation, Split
from acert.experiments.experiment import Experiment, Network, to_config
from acert.methods import METHODS
from acert.optimizers import Adam, Muon, orthogonalized
from acert.schedules import SmoothRadius
from acert.settings import Settings
from acert.training import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's own making
]

SIZE, CLASSES, BATCH = (8, 8), 10, 32


def network(channels=3):
    """Every kind of layer of CNN7, few of each: a deep network takes a minute to compile.

    One channel has both layouts of memory, which shows behind a second convolution.
    """
    first = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU()] if channels == 1 else []
    return nn.Sequential(
        acert.models.Normalize(0.5, 0.25), *first,
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def loop(method="acert", *, captured=True, count=5 * BATCH + 7, channels=3, **changes):
    """A trainer in the middle of its warm-up; the last batch of an epoch is smaller."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda")
    images = torch.randint(0, 256, (count, channels, *SIZE), dtype=torch.uint8)
    split = Split(images.to(device), (torch.arange(count) % CLASSES).to(device))
    model = acert.models.ibp_init_(network(channels)).to(device)
    standard = {
        "method": METHODS[method](),
        "max_radius": 8 / 255,
        "epochs": 20,
        "batch_size": BATCH,
        "radius_schedule": SmoothRadius(start_epoch=2, length=4),
        "augmentation": Augmentation(padding=2, flip=True),
    }
    trainer = Trainer(model, split, Settings(**(standard | changes)))
    trainer.step = 3 * trainer.steps_per_epoch
    if not captured:
        trainer.captured = None
    return trainer


def losses_of(trainer):
    """The terms of every step of one epoch; the last batch is smaller than the others."""
    trainer.model.train()
    rows = []
    with trainer.arithmetic():
        for batch in trainer.batches(4):
            rows.append(trainer._step(batch).tolist())
            trainer.step += 1
    return rows


@pytest.mark.parametrize(
    ("method", "channels"), [(method, 3) for method in METHODS] + [("crown-ibp", 1), ("acert", 1)]
)
def test_captured_steps_are_the_eager_ones(method, channels):
    trainer = loop(method, channels=channels)
    eager = loop(method, channels=channels, captured=False)
    rows, expected = losses_of(trainer), losses_of(eager)
    assert trainer.captured, "nothing was captured"
    assert all(trainer.captured.values()), "the smaller last batch was not captured"
    assert rows[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    # Adam's first steps are signs of gradients, those that are nearly 0 too.
    assert rows[1:] == [pytest.approx(row, rel=0.05, abs=0.05) for row in expected[1:]]
    for one, other in zip(trainer.model.buffers(), eager.model.buffers(), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("optimizer", [Muon(), Adam(momentum=0.95, peak_momentum=0.85)])
def test_captured_updates_are_the_eager_ones(optimizer):
    trainer = loop(optimizer=optimizer, precision="float16")
    eager = loop(optimizer=optimizer, precision="float16", captured=False)
    rows, expected = losses_of(trainer), losses_of(eager)
    assert trainer.captured, "nothing was captured"
    assert rows[1:] == [pytest.approx(row, rel=0.05, abs=0.05) for row in expected[1:]]
    assert rows[-1][0] < rows[0][0]


def test_matrices_are_made_orthogonal_on_the_device_as_on_the_host():
    matrices = torch.randn((3, 64, 500), generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrices.cuda()).double().cpu()
    torch.testing.assert_close(found, orthogonalized(matrices.double()), rtol=0, atol=0.01)


@pytest.mark.parametrize("chosen", [Muon(), Adam(momentum=0.95, peak_momentum=0.85)])
def test_kernels_do_what_passes_over_the_memory_do(chosen, monkeypatch):
    def trained(fits):
        monkeypatch.setattr(optimizers, "_kernels_fit", fits)
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = [(16, 8, 3, 3), (5,), (32, 4096), (7, 3)]
        ours = [
            nn.Parameter(torch.randn(shape, generator=generator, device="cuda")) for shape in shapes
        ]
        ours[0].data = ours[0].data.contiguous(memory_format=torch.channels_last)
        rate = torch.full((), 0.01, device="cuda")
        optimizer = chosen.build(ours, rate=rate, capturable=True)
        for step in range(6):
            for group in optimizer.param_groups:
                group["momentum"] = torch.full((), 0.95 - 0.02 * step, device="cuda")
            for p in ours:
                drawn = torch.randn(p.shape, generator=generator, device="cuda")
                p.grad = torch.empty_like(p).copy_(drawn)
            if step == 3:  # a step that must not be seen in anything
                ours[2].grad[0, 0], ours[1].grad[0] = torch.inf, torch.nan
            optimizer.grad_scale = None
            optimizer.found_inf = torch.full((), float(step == 3), device="cuda")
            optimizer.step()
        state = [value for p in ours for value in optimizer.state[p].values()]
        return [*(p.detach() for p in ours), *state]

    real = optimizers._kernels_fit
    for found, expected in zip(trained(real), trained(lambda *_: False), strict=True):
        # Directions are rounded to bfloat16 at different places.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-4)


@pytest.mark.parametrize("observe", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1000, 64), (5000, 48), (37, 128), (5, 3), (3, 1300)])
def test_batch_norm_and_relu_of_a_ball_are_those_of_the_host(shape, dtype, observe):
    assert fused.available(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    ball = [drawn(*shape).to(dtype), drawn(*shape).abs().to(dtype)]
    inputs = [*ball, *(drawn(shape[1]) for _ in range(4))]
    inputs[4][0] = 0.0
    weights = [drawn(*shape).to(dtype), drawn(*shape).to(dtype), drawn(8)]
    results = []
    for device in ("cpu", "cuda"):
        leaves = [part.detach().to(device).requires_grad_() for part in inputs]
        outputs = fused.relu_of_scaled(*leaves, observe=observe)
        by = [weight.to(device) for weight in weights]
        gradients = torch.autograd.grad(outputs, leaves, by)
        results.append([part.detach().cpu() for part in (*outputs, *gradients)])
    for other, one in zip(*results, strict=True):
        assert one.dtype == other.dtype
        # Those of one axis are sums of thousands of numbers of either sign.
        slack = (1e-3, 0.05) if one.ndim == 1 else (2e-3, 2e-3)
        torch.testing.assert_close(one, other, rtol=slack[0], atol=slack[1])


@pytest.mark.parametrize("method", ["acert", "fastibp"])
def test_captured_steps_are_those_without_the_operator(method):
    trainer = loop(method, precision="float16")
    assert trainer.objective.fuse
    rows = losses_of(trainer)
    other = loop(method, precision="float16")
    other.objective = dataclasses.replace(other.objective, fuse=False)
    other.loss = other.objective
    expected = losses_of(other)
    assert trainer.captured, "nothing was captured"
    assert other.captured, "nothing was captured"
    # Adam's steps are signs of gradients, and the two drift apart.
    assert rows[:2] == [pytest.approx(row, rel=0.02, abs=0.02) for row in expected[:2]]


def test_a_run_can_be_repeated():
    """Deterministic algorithms on: the same loss to 1e-3 over 100 steps."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        losses = []
        for _ in range(2):
            trainer = loop(count=100 * BATCH, precision="tf32")
            trainer.model.train()
            with trainer.arithmetic():
                losses.append([trainer._step(batch)[0].item() for batch in trainer.batches(4)])
            assert len(losses[-1]) == 100
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3


def test_float16_stays_close_to_float32():
    exact, half = losses_of(loop(captured=False)), losses_of(loop(precision="float16"))
    assert half[0] == pytest.approx(exact[0], rel=0.01, abs=1e-3)
    assert half[-1][0] < half[0][0]


def test_a_step_that_cannot_be_compiled_runs_eagerly_and_says_so(capsys):
    class Peeking(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if isinstance(x, torch.Tensor) and float(x.detach().sum()) < 0:  # a host's business
                raise AssertionError
            return self.inner(x)

    reference = loop(captured=False)
    trainer = loop()
    trainer.model = Peeking(copy.deepcopy(reference.model)).cuda()
    trainer = Trainer(trainer.model, trainer.train, trainer.settings)
    trainer.step = reference.step
    row = trainer.run_epoch()
    assert "could not be compiled and runs eagerly" in capsys.readouterr().err
    assert row["loss"] == pytest.approx(reference.run_epoch()["loss"], rel=1e-3)


def test_an_optimizer_that_cannot_be_captured_runs_eagerly(capsys):
    reference, trainer = (loop(precision="float16", captured=False), loop(precision="float16"))
    step = trainer.optimizer.step

    def uncaptured(*words, **named):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not here")
        return step(*words, **named)

    trainer.optimizer.step = uncaptured  # after the scaler has begun its part of the step
    row = trainer.run_epoch()
    assert "could not be compiled and runs eagerly" in capsys.readouterr().err
    assert row["loss"] == pytest.approx(reference.run_epoch()["loss"], rel=1e-3)


def test_a_state_goes_from_device_to_device():
    trainer = loop(precision="float16")
    trainer.run_epoch()
    tensors, numbers = trainer.state()
    other = loop(precision="float16")
    other.restore({name: value.cpu() for name, value in tensors.items()}, numbers)
    assert other.scaler.state_dict() == trainer.scaler.state_dict()
    assert other.run_epoch()["loss"] == pytest.approx(trainer.run_epoch()["loss"], rel=1e-3)


def test_certificates_of_the_device_hold_on_the_host():
    """TF32 guesses and matrix products on the device prove what float64 on a CPU proves."""
    trainer = loop("fastibp")
    for _ in range(8):
        trainer.run_epoch()
    model = trainer.model.eval()
    images, labels = trainer.train.images[:64].float() / 255, trainer.train.labels[:64]
    for arithmetic in ("real", "float32"):
        there = acert.certified_radius(
            model, images, labels, max_radius=0.03, arithmetic=arithmetic
        )
        here = acert.certified_radius(
            copy.deepcopy(model).cpu(), images.cpu(), labels.cpu(),
            max_radius=0.03, arithmetic=arithmetic,
        )  # fmt: skip
        assert torch.equal(there.status.cpu(), here.status)
        assert (here.value > 0).any()
        assert torch.allclose(there.value.cpu(), here.value, rtol=3e-5, atol=1e-9)


def test_a_step_compiled_ahead_is_found_in_the_cache(tmp_path, monkeypatch):
    """By another process, from the run's folder alone; what is left to do here is to trace."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    experiment = Experiment(
        dataset="digits",
        network=Network(name="small_cnn", width=2),
        settings=loop(batch_size=8, precision="tf32", augmentation=None).settings,
    )
    facts = {"name": "digits", "input_shape": [1, 8, 8], "classes": list("0123"), "mean": [0.5],
             "std": [0.25], "domain": [0.0, 1.0]}  # fmt: skip
    records.create(folder)
    records.write_config(folder, {"experiment": to_config(experiment), "data": facts})
    code = f"from acert.experiments.ahead import main; main({str(folder)!r}, 'cuda:0')"
    # An open pipe: without one the process would leave with nobody to work for.
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait() == 0
    # A fresh process, as the run is: keys are hashes of pickles, and pytest makes other ones.
    code = f"""
from pathlib import Path
import torch
from acert.experiments.ahead import compile_later_step
assert compile_later_step(Path({str(folder)!r}), torch.device("cuda:0")).captured
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split()[-1] == b"1"
