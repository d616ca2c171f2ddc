"""The mechanics of the loop: what one step sees, what an epoch is, and what is never random."""

import copy
import math

import pytest
import torch
from torch import nn

from acert import cuda, models
from acert.bounds import propagate
from acert.bounds.margin import box
from acert.data import Augmentation, Split, to_float
from acert.errors import InvalidInput, RunError
from acert.losses import TERMS, Scalars
from acert.methods import (
    Acert,
    CcIBP,
    CrownIBP,
    ExpIBP,
    FastIBP,
    Method,
    MtlIBP,
    Sabr,
    Standard,
    Step,
    method_name,
)
from acert.optimizers import Adam, Muon
from acert.precision import PRECISIONS
from acert.processes import ALONE
from acert.rootfind import Brent
from acert.schedules import Constant, FullRadius, OneCycle, SmoothRadius, epoch_of
from acert.settings import Settings
from acert.training import Trainer, channels_last, lay_channels_last


def samples(count=22, shape=(1, 4, 4), classes=3):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand((count, *shape), generator=generator)
    return Split(images, torch.arange(count) % classes)


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def settings(**changes):
    standard = {
        "method": Acert(),
        "max_radius": 0.1,
        "epochs": 4,
        "batch_size": 8,
        "radius_schedule": SmoothRadius(start_epoch=2, length=2),
    }
    return Settings(**(standard | changes))


def trainer(model=None, train=None, *, processes=ALONE, **changes):
    return Trainer(model or network(), train or samples(), settings(**changes), processes=processes)


def weights(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- settings -----------------------------------------------------------------------------


def test_settings_report_all_faults_at_once():
    with pytest.raises(InvalidInput) as caught:
        settings(epochs=0, batch_size=1, regularization=-1, l1=-1, clip_norm=0, precision="half")
    for fault in (
        "`epochs` must be at least 1; got 0",
        "`batch_size` must be at least 2; got 1",
        "`regularization` must be at least 0 and finite; got -1",
        "`l1` must be at least 0 and finite; got -1",
        "`clip_norm` must be above 0; got 0",
        "`precision` must be one of float32, tf32, tf32-float16-roots, float16, bfloat16; got half",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("radius", "constraint"),
    [(0.0, "above 0"), (-0.1, "above 0"), (math.nan, "above 0"), (math.inf, "finite")],
)
def test_a_radius_must_be_positive_and_finite(radius, constraint):
    with pytest.raises(InvalidInput, match=f"`max_radius` must be {constraint}; got {radius}"):
        settings(max_radius=radius)


def test_a_radius_larger_than_the_domain_is_refused():
    with pytest.raises(InvalidInput, match=r"at most the width of the domain, 1; got 1\.5"):
        settings(max_radius=1.5)
    settings(max_radius=1.5, domain=(-1.0, 1.0))
    settings(max_radius=0.2, domain=(0.1, 0.3))  # whose ends are not 0.2 apart in floating point


@pytest.mark.parametrize("channels", [1, 3])
def test_kernels_take_the_layout_of_channels_even_if_there_is_one(channels):
    kernels = torch.randn(4, channels, 3, 3)
    found = channels_last(kernels)
    assert torch.equal(found, kernels)
    assert found.stride() == (9 * channels, 1, 3 * channels, channels)


class Viewing(nn.Module):
    """A model of one's own that calls `view` on what a convolution gives."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(100, 3)

    def forward(self, x):
        return self.last(self.convolution(x).view(len(x), -1))


def test_kernels_take_that_layout_only_where_the_model_can_do_with_it():
    images = torch.rand(2, 3, 7, 7)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(100, 3))
    for model, kernel, last in ((Viewing(), "convolution", False), (other, "0", True)):
        wanted = model(images)
        lay_channels_last(model, images)
        weight = model.get_submodule(kernel).weight
        assert weight.is_contiguous(memory_format=torch.channels_last) is last
        assert weight.is_contiguous() is not last
        torch.testing.assert_close(model(images), wanted)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InvalidInput, match="`batch_size` must be at most the 22 training samples"):
        trainer(batch_size=23)


# -- batches ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "sizes"), [(24, [8] * 3), (22, [8, 8, 6]), (17, [8, 8])])
def test_the_last_batch_may_be_smaller_but_never_a_single_sample(count, sizes):
    loop = trainer(train=samples(count))
    batches = list(loop.batches(1))
    assert [len(batch.index) for batch in batches] == sizes
    assert loop.steps_per_epoch == len(sizes)
    drawn = torch.cat([batch.index for batch in batches])
    assert len(drawn.unique()) == sum(sizes)


def test_batches_depend_on_seed_and_epoch_alone():
    def order(loop, epoch, start=0):
        return [batch.index.tolist() for batch in loop.batches(epoch, start)]

    one, other = trainer(), trainer()
    list(one.batches(5))
    torch.rand(7)
    assert order(one, 2) == order(other, 2)
    assert order(one, 2, start=1) == order(other, 2)[1:]
    assert order(one, 1) != order(one, 2)
    assert order(one, 2) != order(trainer(seed=1), 2)


def test_random_parts_of_a_step_do_not_depend_on_where_the_epoch_was_entered():
    loop = trainer(method=Sabr(), augmentation=Augmentation(padding=1, flip=True))
    whole, rest = list(loop.batches(3))[1:], list(loop.batches(3, start=1))
    assert len(whole) == len(rest) == 2
    for one, other in zip(whole, rest, strict=True):
        assert one.noise is not None
        assert other.noise is not None
        assert torch.equal(one.noise, other.noise)
        assert torch.equal(loop.images(one), loop.images(other))
    assert not torch.equal(whole[0].noise[:6], whole[1].noise)
    assert whole[0].noise.abs().max() <= 1


def test_images_are_augmented_and_scaled():
    bytes_ = Split((samples().images * 255).to(torch.uint8), samples().labels)
    loop = trainer(train=bytes_, augmentation=Augmentation(padding=1, flip=True))
    batch = next(loop.batches(1))
    plain = to_float(bytes_.images[batch.index])
    images = loop.images(batch)
    assert images.dtype is torch.float32
    assert images.shape == plain.shape
    assert not torch.equal(images, plain)
    # A crop with edge padding makes no new values.
    assert all(set(a.tolist()) <= set(b.tolist())
               for a, b in zip(images.flatten(1), plain.flatten(1), strict=True))  # fmt: skip


# -- schedules ----------------------------------------------------------------------------


def test_rate_and_cap_are_those_of_every_step(monkeypatch):
    rate, schedule = OneCycle(max_rate=1e-2), SmoothRadius(start_epoch=2, length=2)
    optimizer = Adam(momentum=0.95, peak_momentum=0.85)
    loop = trainer(
        learning_rate=rate,
        radius_schedule=schedule,
        method=Acert(kappa=0.25),
        optimizer=optimizer,
    )
    seen, rates, momenta = [], [], []
    true_update = loop.update

    def update(batch, scalars, **keywords):
        terms = true_update(batch, scalars, **keywords)
        seen.append(scalars.tolist())
        rates.append(loop.optimizer.param_groups[0]["lr"])
        momenta.append(loop.optimizer.param_groups[0]["momentum"])
        return terms

    monkeypatch.setattr(loop, "update", update)
    for _ in range(4):
        loop.run_epoch()
    assert len(seen) == loop.total_steps == 12
    for step, row in enumerate(seen):
        cap = schedule.cap(step, max_radius=0.1, steps_per_epoch=3)
        kappa = 1.0 if step < 3 else 0.25  # the first epoch is standard training
        expected = {
            Scalars.RATE: rate.rate(step, steps_per_epoch=3, epochs=4),
            Scalars.CAP: cap,
            Scalars.PROGRESS: cap / 0.1,
            Scalars.STANDARD: kappa,
            Scalars.ROBUST: 1 - kappa,
            Scalars.REGULARIZATION: 0.5 * (1 - cap / 0.1),
            Scalars.MOMENTUM: 0.95 - 0.1 * rate.height(step, steps_per_epoch=3, epochs=4),
        }
        assert row == pytest.approx([expected[i] for i in range(7)], rel=1e-6, abs=1e-12)
        assert rates[step] == pytest.approx(expected[Scalars.RATE], rel=1e-6)
        assert momenta[step] == pytest.approx(expected[Scalars.MOMENTUM], rel=1e-6)
    assert seen[2][Scalars.CAP] == 0 < seen[3][Scalars.CAP] < seen[4][Scalars.CAP]
    assert seen[8][Scalars.CAP] == pytest.approx(0.1)


def test_regularisers_are_on_until_the_warm_up_is_over():
    loop = trainer(epochs=5)
    on = [loop.phase(step).regularize for step in range(15)]
    assert on == [True] * 9 + [False] * 6
    terms = [loop.run_epoch()["regularization"] for _ in range(5)]
    assert all(term > 0 for term in terms[:3])
    assert terms[3:] == [0.0, 0.0]


@pytest.mark.parametrize("regularization", [0.0, 0.5])
def test_crown_ibp_settles_when_the_warm_up_is_over(regularization):
    loop = trainer(epochs=5, method=CrownIBP(), regularization=regularization)
    assert [loop.phase(step).settled for step in range(15)] == [False] * 9 + [True] * 6
    # From there on it is FastIBP, step by step.
    for _ in range(3):
        loop.run_epoch()
    later = []
    for method in (CrownIBP(), FastIBP()):
        other = trainer(epochs=5, method=method, regularization=regularization)
        other.restore(*copy.deepcopy(loop.state()))
        later.append({**other.run_epoch(), "seconds": 0.0})
    assert later[0] == later[1]


@pytest.mark.parametrize(
    "changes",
    [{"method": Standard()}, {"regularization": 0.0}, {"radius_schedule": FullRadius()}],
)
def test_nothing_is_regularised_without_bounds_weight_or_warm_up(changes):
    assert not trainer(**changes).phase(0).regularize


def test_while_regularisers_are_on_no_radius_is_zero():
    seen = []

    class Watching(Method):
        @property
        def uses_bounds(self):
            return True

        def worst_case_logits(self, step: Step):
            output = step.bounds(step.images, torch.zeros(len(step.images)))
            seen.append(float(output.bound_pass.first_input.radius.max()) if step.observe else 0.0)
            return step.worst_case(output)

    loop = trainer(method=Watching(), radius_schedule=SmoothRadius(start_epoch=1, length=1))
    loop.run_epoch()
    loop.run_epoch()
    assert seen == pytest.approx([1e-6] * 3 + [0.0] * 3, rel=0.1)


# -- batch statistics ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [Acert(solver=Brent(max_steps=3)), FastIBP(), CrownIBP(), Sabr(attack_steps=2)]
)
def test_running_statistics_move_once_a_step_by_the_clean_batch(method):
    loop = trainer(method=method, learning_rate=Constant(constant_rate=1e-9))
    norm = loop.model[1]
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    for batch in loop.batches(1):
        with torch.no_grad():
            inputs = loop.model[0](loop.images(batch)).transpose(0, 1).flatten(1)
        mean = 0.9 * mean + 0.1 * inputs.mean(1)
        variance = 0.9 * variance + 0.1 * inputs.var(1)  # PyTorch's rule: unbiased
    loop.run_epoch()
    assert int(norm.num_batches_tracked) == 3
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.running_var, variance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [CcIBP(), MtlIBP(), ExpIBP()], ids=method_name)
def test_attacked_points_move_running_statistics_after_the_images(method, monkeypatch):
    seen = []
    anchors = type(method).anchors

    def noted(*args, **kwargs):
        seen.append(anchors(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(type(method), "anchors", noted)
    loop = trainer(method=method, learning_rate=Constant(constant_rate=1e-9), max_radius=0.3,
                   radius_schedule=FullRadius())  # fmt: skip
    norm = loop.model[1]
    mean = norm.running_mean.clone()
    batches = [loop.images(batch) for batch in loop.batches(1)]
    loop.run_epoch()
    assert len(seen) == len(batches)
    for images, points in zip(batches, seen, strict=True):
        assert not torch.allclose(images, points, atol=0.2)
        for points_of_pass in (images, points):
            with torch.no_grad():
                inputs = loop.model[0](points_of_pass).transpose(0, 1).flatten(1)
            mean = 0.9 * mean + 0.1 * inputs.mean(1)
    assert int(norm.num_batches_tracked) == 2 * len(batches)
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-4, atol=1e-6)


def test_bounds_of_a_step_use_exactly_the_clean_batch_statistics():
    """A box that is a point comes out as the very logits of the clean forward."""
    seen = []

    class Watching(Method):
        @property
        def uses_bounds(self):
            return True

        def worst_case_logits(self, step: Step):
            buffers = [buffer.clone() for buffer in step.model.buffers()]
            for radius in (0.0, 0.05):
                output = step.bounds(step.images, torch.full((len(step.images),), radius))
                lower, upper = output.ends()
                seen.append((step, radius, lower.detach(), upper.detach()))
            assert same(buffers, list(step.model.buffers()))
            assert output.bound_pass.statistics is step.statistics
            return step.worst_case(output)

    loop = trainer(method=Watching(), regularization=0.0, radius_schedule=FullRadius())
    before = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    loop.run_epoch()
    assert len(seen) == 6
    for step, radius, lower, upper in seen:
        logits = step.logits.detach()
        if radius == 0:
            torch.testing.assert_close(lower, logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(upper, logits, rtol=1e-4, atol=1e-5)
        else:
            assert (lower <= logits + 1e-5).all()
            assert (logits <= upper + 1e-5).all()
    # The statistics of the first step are those of its clean input, with the gradient kept.
    first = seen[0][0]
    model = network()
    model.load_state_dict(before)
    inputs = model[0](first.images)
    mean, variance = first.statistics[0]
    torch.testing.assert_close(mean, inputs.mean((0, 2, 3)))
    torch.testing.assert_close(variance, inputs.var((0, 2, 3), correction=0))
    assert mean.requires_grad
    assert len(first.statistics) == 2
    # Running statistics would have given something else.
    model.eval()
    with torch.no_grad():
        other = propagate(model, box(first.images, torch.zeros(8), (0.0, 1.0))).center
    assert (other - first.logits.detach()).abs().max() > 0.1


# -- epochs -------------------------------------------------------------------------------


def test_an_epoch_reports_the_mean_over_its_samples(monkeypatch):
    loop = trainer()
    values = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(loop, "update", lambda *_, **__: torch.full((len(TERMS),), next(values)))
    figures = loop.run_epoch()
    assert figures["loss"] == pytest.approx((8 * 1 + 8 * 2 + 6 * 4) / 22)
    assert figures["epoch"] == 1
    assert figures["seconds"] >= 0
    assert (loop.step, loop.epoch) == (3, 2)


def test_on_step_hears_of_every_step():
    loop = trainer()
    heard: list[int] = []
    loop.run_epoch(heard.append)
    loop.run_epoch(heard.append)
    assert heard == [1, 2, 3, 4, 5, 6]
    assert epoch_of(loop.step, steps_per_epoch=3) == 3


def test_the_model_trains_in_training_mode_and_learns():
    loop = trainer(method=Standard(), epochs=30, learning_rate=OneCycle(max_rate=1e-2))
    loop.model.eval()
    losses = [loop.run_epoch()["standard"] for _ in range(30)]
    assert loop.model.training
    assert losses[-1] < 0.5 * losses[0]


def test_a_parameter_that_is_a_part_of_another_tensor_is_trained_and_nothing_beside_it():
    torch.manual_seed(0)
    whole = torch.randn(3, 20)
    model = nn.Sequential(nn.Flatten(), nn.Linear(10, 3))
    model[1].weight = nn.Parameter(whole[:, :10])
    before = whole.clone()
    train = Split(torch.rand(32, 1, 2, 5), torch.arange(32) % 3)
    trainer(model, train).run_epoch()
    assert bool((whole[:, :10] != before[:, :10]).all())
    assert torch.equal(whole[:, 10:], before[:, 10:])


def test_gradients_are_clipped():
    loop = trainer(clip_norm=1e-3)
    loop.run_epoch()
    norm = torch.stack([parameter.grad.norm() for parameter in loop.parameters]).norm()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_arithmetic_is_the_settings_own_and_the_callers_comes_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for precision, expected in (("float32", "ieee"), ("tf32", "tf32")):
        with trainer(precision=precision).arithmetic():
            assert matmul.fp32_precision == expected
        assert matmul.fp32_precision == before


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_that_cannot_be_captured_is_none_with_a_message(precision, monkeypatch, capsys):
    def refused(*_, **named):
        raise RuntimeError("no graph of this")

    monkeypatch.setattr(cuda, "CapturedStep", refused)
    loop = trainer(precision=precision)
    batch = next(loop.batches(1))
    assert cuda._captured(loop, batch, loop.scalars(0), phase=loop.phase(0)) is None
    assert "runs eagerly, several times slower: no graph of this" in capsys.readouterr().err


# -- determinism and state ----------------------------------------------------------------


@pytest.mark.parametrize("method", [Acert(), Sabr(attack_steps=2), MtlIBP()])
def test_one_seed_gives_the_same_weights_another_does_not(method):
    def trained(seed):
        loop = trainer(method=method, seed=seed, augmentation=Augmentation(padding=1, flip=True))
        torch.rand(seed + 3)  # the global generator does not matter
        figures = [loop.run_epoch() for _ in range(3)]
        return weights(loop.model), [row["loss"] for row in figures]

    one, other, different = trained(0), trained(0), trained(1)
    assert same(one[0], other[0])
    assert one[1] == other[1]
    assert not same(one[0], different[0])


class _Halt(Exception):
    """Stands for whatever stops a run between two steps."""


@pytest.mark.parametrize(
    ("stop", "optimizer"),
    [
        *((stop, Adam()) for stop in (1, 3, 5, 12)),
        (5, Adam(momentum=0.95, peak_momentum=0.85)),
        (5, Muon()),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(stop, optimizer):
    def dropping():
        model = network()
        return nn.Sequential(*model[:4], nn.Dropout(0.5), *model[4:])

    def figures(loop, epochs):
        rows = [loop.run_epoch() for _ in range(epochs)]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    torch.manual_seed(0)
    whole = trainer(dropping(), method=Standard(), optimizer=optimizer)
    torch.manual_seed(0)
    rows = figures(whole, 4)

    def halt(step):
        if step == stop:
            raise _Halt

    stopped = trainer(dropping(), method=Standard(), optimizer=optimizer)
    torch.manual_seed(0)
    for _ in range((stop - 1) // 3):
        stopped.run_epoch(halt)
    with pytest.raises(_Halt):
        stopped.run_epoch(halt)
    tensors, numbers = stopped.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    assert numbers["step"] == stop
    # A fresh trainer, other weights, other random numbers: only the state counts.
    model = dropping()
    nn.init.zeros_(model[0].weight)
    resumed = trainer(model, method=Standard(), optimizer=optimizer)
    torch.manual_seed(9)
    resumed.restore(kept, numbers)
    # At step 3 and 6 an epoch was over, but its means were not taken yet.
    remaining = 4 - (stop - 1) // 3
    assert resumed.epoch == 5 - remaining
    assert figures(resumed, remaining) == rows[-remaining:]
    assert same(weights(whole.model), weights(resumed.model))


def test_a_state_before_the_first_step_has_no_moments():
    loop = trainer()
    tensors, numbers = loop.state()
    assert not [name for name in tensors if name.startswith("adam/")]
    other = trainer()
    other.restore({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
    assert other.step == 0
    loop.run_epoch()
    other.run_epoch()
    assert same(weights(loop.model), weights(other.model))


# -- NaN ----------------------------------------------------------------------------------


@pytest.mark.parametrize("term", ["standard", "robust", "regularization", "loss"])
def test_a_term_that_is_not_finite_is_named_with_its_first_step(monkeypatch, term):
    loop = trainer()
    loop.run_epoch()

    def update(*_, **__):
        terms = torch.ones(len(TERMS))
        if loop.step >= 4:
            terms[0] = math.nan
            terms[TERMS.index(term)] = math.inf
        return terms

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(RunError, match=f"the {term} term was not finite at step 4"):
        loop.run_epoch()


def test_no_state_is_given_away_once_a_term_was_not_finite(monkeypatch):
    loop = trainer()
    monkeypatch.setattr(loop, "update", lambda *_, **__: torch.full((len(TERMS),), math.nan))

    def halt(step):
        raise _Halt

    with pytest.raises(_Halt):
        loop.run_epoch(halt)
    with pytest.raises(RunError, match="the standard term was not finite at step 0"):
        loop.state()


def test_in_float16_a_wider_format_is_advised(monkeypatch):
    loop = trainer()
    loop.precision = PRECISIONS["float16"]
    monkeypatch.setattr(loop, "update", lambda *_, **__: torch.full((len(TERMS),), math.inf))
    with pytest.raises(RunError, match=r"at step 0: it may have left .* try precision=tf32$"):
        loop.run_epoch()


def test_no_state_is_given_away_with_nan_in_a_weight():
    loop = trainer()
    loop.run_epoch()
    with torch.no_grad():
        loop.model[4].weight[0, 0] = math.nan
    with pytest.raises(RunError, match=r"model/4\.weight was not finite after step 2"):
        loop.state()


def test_a_weight_that_overflows_stops_the_run_by_its_loss():
    model = models.mlp(16, [4], 3)
    with torch.no_grad():
        model[1].weight.fill_(math.inf)
    loop = trainer(model, regularization=0.0, radius_schedule=FullRadius())
    with pytest.raises(RunError, match="the standard term was not finite at step 0"):
        loop.run_epoch()


def test_a_gradient_that_is_nan_in_the_last_step_stops_the_run():
    model = network()
    calls = []

    def poison(gradient):
        calls.append(gradient)
        return gradient * math.nan if len(calls) == 3 else gradient

    model[4].weight.register_hook(poison)
    loop = trainer(model, epochs=1, method=Standard())
    # Clipping divides all gradients by their norm, so that the first weight has it too.
    with pytest.raises(RunError, match=r"model/0\.weight was not finite after step 2"):
        loop.run_epoch()


@pytest.mark.parametrize("method", [Sabr(), Acert()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_callers_default_type_is_not_that_of_a_step(method, default):
    def trained():
        loop = trainer(model, split, method=method, epochs=1, radius_schedule=FullRadius())
        loop.run_epoch()
        return weights(loop.model)

    model, split = network(), samples()
    expected = trained()
    model = network()
    torch.set_default_dtype(default)
    try:
        found = trained()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found, expected)
