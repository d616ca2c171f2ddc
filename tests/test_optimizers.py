"""Optimisers against PyTorch's own and against singular value decompositions."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from acert import optimizers
from acert.errors import InvalidInput
from acert.optimizers import Adam, Muon, orthogonalized
from acert.schedules import Constant, OneCycle, StepDecay


def weights(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def run(chosen, parameters, schedule, *, epochs=6, steps_per_epoch=5):
    """Every step of a run, as the trainer makes them."""
    optimizer = chosen.build(parameters, rate=0.0, capturable=False)
    length = {"steps_per_epoch": steps_per_epoch, "epochs": epochs}
    for step in range(epochs * steps_per_epoch):
        give_gradients(parameters, step)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, **length)
            group["momentum"] = chosen.momentum_at(schedule.height(step, **length))
        optimizer.step()
    return optimizer


def test_adam_with_a_cycle_is_pytorchs_under_onecyclelr():
    ours, theirs = weights((3, 4), (5,)), weights((3, 4), (5,))
    run(Adam(momentum=0.95, peak_momentum=0.85), ours, OneCycle(max_rate=2e-2))
    plain = torch.optim.Adam(theirs, lr=1.0, betas=(0.95, 0.999))
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        plain, max_lr=2e-2, total_steps=30, three_phase=True, anneal_strategy="linear",
        final_div_factor=100,
    )  # fmt: skip
    for step in range(30):
        give_gradients(theirs, step)
        plain.step()
        cycle.step() if step < 29 else None
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)
    # And the cycle makes a difference.
    constant = weights((3, 4), (5,))
    run(Adam(), constant, OneCycle(max_rate=2e-2))
    assert (constant[0] - ours[0]).abs().max() > 1e-4


def test_adam_without_a_cycle_is_pytorchs_own():
    optimizer = run(Adam(), weights((2, 2)), Constant(constant_rate=1e-2))
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    slower = Adam(momentum=0.95)
    optimizer = run(slower, weights((2, 2)), OneCycle(max_rate=1e-2))
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["betas"] == (0.95, 0.999)
    assert slower.momentum_at(1.0) == 0.95


@pytest.mark.parametrize("schedule", [Constant(), StepDecay()])
def test_rates_without_a_cycle_have_the_momentum_of_its_foot(schedule):
    height = schedule.height(3, steps_per_epoch=2, epochs=4)
    assert Adam(momentum=0.95, peak_momentum=0.85).momentum_at(height) == 0.95


def test_a_cycle_is_1_at_its_peak_and_0_at_its_feet_and_after():
    cycle = OneCycle(max_rate=1e-2)
    heights = [cycle.height(step, steps_per_epoch=10, epochs=10) for step in range(100)]
    assert heights[0] == heights[99] == heights[70] == 0
    assert heights[29] == pytest.approx(1)
    assert heights[14] == pytest.approx(14 / 29)
    flat = OneCycle(max_rate=1e-2, start_divisor=1.0)
    assert flat.height(5, steps_per_epoch=10, epochs=10) == 0


def through_the_iteration(singular):
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return singular


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 40), (2, 1, 7)])
def test_orthogonalized_takes_every_singular_value_through_the_polynomial(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    left, singular, right = torch.linalg.svd(matrices, full_matrices=False)
    norms = singular.square().sum(-1, keepdim=True).sqrt()
    expected = (left * through_the_iteration(singular / norms)[:, None]) @ right
    torch.testing.assert_close(orthogonalized(matrices), expected, rtol=1e-9, atol=1e-9)


def test_orthogonalized_brings_singular_values_near_1():
    matrices = torch.randn((2, 16, 64), generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalized(matrices * 1e-6))
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_orthogonalized_leaves_zeros():
    assert not orthogonalized(torch.zeros(1, 2, 3)).any()


def test_muon_is_pytorchs_for_matrices_and_adam_for_the_rest():
    shapes = [(8, 20), (6,), (30, 7), (4, 4)]  # wide, a bias, high, the last matrix
    ours, theirs = weights(*shapes), weights(*shapes)
    run(Muon(), ours, Constant(constant_rate=2e-2))
    muon = torch.optim.Muon(
        [theirs[0], theirs[2]], lr=2e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.Adam([theirs[1], theirs[3]], lr=2e-2)
    for step in range(30):
        give_gradients(theirs, step)
        muon.step()
        adam.step()
    for mine, their in zip(ours, theirs, strict=True):
        # PyTorch's iteration is in bfloat16.
        exact = mine.ndim == 1 or mine.shape == (4, 4)
        torch.testing.assert_close(mine, their, rtol=0, atol=1e-12 if exact else 0.03)


def test_muon_takes_kernels_as_matrices_whatever_else_is_in_the_batch():
    kernel, matrix = (6, 3, 2, 2), (6, 12)
    first, second = weights(kernel, (2, 5), (3, 3)), weights(matrix, (3, 3))
    optimizers = [Muon().build(p, rate=0.1, capturable=False) for p in (first, second)]
    gradient = torch.randn(matrix, generator=torch.Generator().manual_seed(3)).double()
    for parameters, optimizer in zip((first, second), optimizers, strict=True):
        give_gradients(parameters, 0)
        parameters[0].grad = gradient.reshape(parameters[0].shape).clone()
        for group in optimizer.param_groups:
            group["momentum"] = 0.95
        before = parameters[0].detach().clone()
        optimizer.step()
        parameters[0].moved = parameters[0].detach() - before
    torch.testing.assert_close(first[0].moved.flatten(1), second[0].moved)
    # The mean square of the update is near that of Adam: 0.2 of the rate.
    assert first[0].moved.square().mean().sqrt() == pytest.approx(0.2 * 0.1, rel=0.3)


@pytest.mark.parametrize("chosen", [Muon(), Adam(momentum=0.95, peak_momentum=0.85)])
def test_an_overflow_changes_nothing(chosen):
    parameters = weights((4, 6), (3,), (2, 2))
    optimizer = run(chosen, parameters, OneCycle(), epochs=1)
    give_gradients(parameters, 99)
    parameters[0].grad[0, 0] = torch.inf
    parameters[1].grad[0] = torch.nan
    before = parameters_to_vector(parameters).detach().clone()
    kept = {
        (id(p), key): value.clone() for p in parameters for key, value in optimizer.state[p].items()
    }
    optimizer.found_inf = torch.ones(())
    optimizer.grad_scale = None
    optimizer.step()
    assert torch.equal(parameters_to_vector(parameters), before)
    for parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, kept[id(parameter), key]), key


def test_kernels_that_cannot_be_built_are_done_without():
    optimizers._kernels_run.cache_clear()
    assert not optimizers._kernels_run(torch.device("cpu"))  # Triton has none for it


def test_parameters_without_a_gradient_stay():
    for chosen in (Muon(), Adam(momentum=0.95, peak_momentum=0.85)):
        parameters = weights((4, 6), (5, 2), (2, 2))
        before = parameters[1].detach().clone()
        optimizer = chosen.build(parameters, rate=0.1, capturable=False)
        give_gradients(parameters, 0)
        parameters[1].grad = None
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
        optimizer.step()
        assert torch.equal(parameters[1], before)
        assert not optimizer.state[parameters[1]]


def test_a_model_of_one_matrix_is_adams():
    ours, theirs = weights((3, 3)), weights((3, 3))
    run(Muon(), ours, Constant(constant_rate=1e-2))
    run(Adam(), theirs, Constant(constant_rate=1e-2))
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Adam(momentum=1.0), "`momentum` must be in"),
        (lambda: Adam(peak_momentum=-0.1), "`peak_momentum` must be in"),
        (lambda: Muon(momentum=1.5), "`momentum` must be in"),
        (lambda: Muon(scale=0.0), "`scale` must be positive"),
    ],
)
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(InvalidInput, match=message):
        wrong()
