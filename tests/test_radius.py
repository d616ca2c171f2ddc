"""The certified radius (Def. 3.1, Thms. 3.2, 3.4, A.1): values, proofs and gradients."""

import copy
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from tests.rule_cases import Apply
from torch import nn

import acert
from acert import Bisection, Brent, Status, models
from acert import radius as radius_module
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import ROUNDINGS

ARITHMETICS = sorted(ROUNDINGS)
TIGHT = Brent(xtol=1e-300, rtol=0.0, max_steps=200)

seeds = st.integers(0, 10_000)


def linear(weight, bias, dtype=torch.float32):
    layer = nn.Linear(len(weight[0]), len(weight)).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=dtype))
        layer.bias.copy_(torch.tensor(bias, dtype=dtype))
    return layer


def random_net(seed, *, activation=nn.ReLU, samples=8, dtype=torch.float32):
    """A network with 6 inputs and 4 classes that is right about most of the images."""
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(6, [10, 8], 4, activation=activation).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
        images = torch.rand(samples, 6, generator=generator).to(dtype)
        labels = model(images).argmax(1)
    labels[0] = (labels[0] + 1) % 4
    return model, images, labels


def proven(model, images, labels, result, arithmetic="real", **options):
    return proven_margin(
        model, images.double(), labels.long(), result.value.detach(),
        rounding=ROUNDINGS[arithmetic], **options,
    )  # fmt: skip


def names(result):
    return [Status(code).name for code in result.status.tolist()]


# -- by hand ----------------------------------------------------------------------------

# z = (2 x0 - x1, x0 + x1, 1/4): differences to class 0 have the slopes 3 and 3.
BY_HAND = ([[2.0, -1.0], [1.0, 1.0], [0.0, 0.0]], [0.0, 0.0, 0.25])


def test_radius_of_a_linear_model_in_closed_form():
    model = linear(*BY_HAND)
    images = torch.tensor([[0.75, 0.25], [0.5, 0.0625]])
    # z1 - z0 = 2 x1 - x0 and z2 - z0 = 1/4 - 2 x0 + x1, each less the slope times the radius
    roots = [
        min(Fraction(1, 4) / 3, Fraction(1) / 3),
        min(Fraction(3, 8) / 3, Fraction(11, 16) / 3),
    ]
    for arithmetic in ARITHMETICS:
        result = acert.certified_radius(
            model, images, torch.tensor([0, 0]), max_radius=0.5, domain=None, arithmetic=arithmetic
        )
        assert names(result) == ["ROOT", "ROOT"]
        for value, root in zip(result.value.tolist(), roots, strict=True):
            # Compared as fractions: not even the last bit may exceed the root.
            assert Fraction(value) < root
            assert Fraction(value) > root * (1 - Fraction(4, 10**5))


def test_the_four_ways_a_radius_comes_about():
    model = linear([[1.0], [0.0]], [0.0, 0.5])  # class 0 where x > 0.5
    images = torch.tensor([[0.25], [0.5], [0.75], [0.625]])
    result = acert.certified_radius(model, images, torch.zeros(4, dtype=int), max_radius=0.2)
    # wrong, tied, margin -0.25 at distance 0.25 > max, margin -0.125
    assert names(result) == ["MISCLASSIFIED", "MISCLASSIFIED", "CERTIFIED_TO_MAX", "ROOT"]
    assert result.value.tolist()[:3] == [0.0, 0.0, 0.2]
    assert result.value[3].item() == pytest.approx(0.125, rel=2e-5)
    assert result.value[3].item() < 0.125
    assert result.prediction[[0, 2, 3]].tolist() == [1, 0, 0]
    assert result.steps[:2].tolist() == [0, 0]
    # Where the margin is no straight line, which a guess and its slope would find the root of.
    model, images, labels = random_net(8, samples=32)
    stopped = acert.certified_radius(
        model, images, labels, max_radius=0.5,
        solver=Bisection(xtol=1e-15, rtol=0.0, max_steps=2),
    )  # fmt: skip
    assert "UNCONVERGED" in names(stopped)


def test_types_and_shapes():
    model, images, labels = random_net(0)
    result = acert.certified_radius(model, images, labels, max_radius=0.1)
    assert result.value.dtype == torch.float64
    assert result.status.dtype == torch.uint8
    assert all(column.shape == (8,) for column in result)
    assert torch.equal(result.prediction, model(images).argmax(1))
    assert not result.value.requires_grad


def test_leftmost_root_on_a_plateau():
    # The domain ends at 0, so z1 - z0 = -x0 stays 0 from radius x0 on (Thm. A.1).
    model = linear([[1.0], [0.0]], [-2.0, -2.0])
    images = torch.tensor([[0.125], [0.1875]])
    result = acert.certified_radius(model, images, max_radius=0.5)
    assert names(result) == ["ROOT", "ROOT"]
    assert result.value.tolist() == pytest.approx([0.125, 0.1875], rel=2e-5)
    assert bool((result.value < images[:, 0]).all())


def test_a_plateau_just_below_zero_is_certified_throughout():
    model = linear([[1.0], [0.0]], [-2.0, -2.0 - 2.0**-20])
    result = acert.certified_radius(model, torch.tensor([[0.125]]), max_radius=0.5)
    assert names(result) == ["CERTIFIED_TO_MAX"]
    assert result.value.tolist() == [0.5]


# Some round up in float32 (8/255, 0.1), some down (0.4, 1/255); an integer is a number too.
@pytest.mark.parametrize("max_radius", [8 / 255, 0.1, 0.4, 1 / 255, 1e-6, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_certified_to_max_is_exactly_max_radius(max_radius, dtype):
    model = linear([[1.0], [0.0]], [5.0, 0.0])
    images = torch.tensor([[0.5]], dtype=dtype)
    for solver in (Brent(), Bisection(), TIGHT):
        result = acert.certified_radius(model, images, max_radius=max_radius, solver=solver)
        assert names(result) == ["CERTIFIED_TO_MAX"]
        assert result.value.tolist() == [float(max_radius)]


@pytest.mark.parametrize("max_radius", [8 / 255, 0.1, 0.2])
def test_no_radius_exceeds_max_radius_by_the_rounding_of_the_images_precision(max_radius):
    # The root lies between max_radius and max_radius rounded to float32.
    rounded = torch.tensor(max_radius).item()
    assert rounded > max_radius
    distance = (max_radius + rounded) / 2
    model = linear([[1.0], [0.0]], [0.0, 0.5 - distance], dtype=torch.float64)
    images = torch.tensor([[0.5]])
    for solver in (Brent(), TIGHT):
        result = acert.certified_radius(model, images, max_radius=max_radius, solver=solver)
        assert result.value.tolist() == [max_radius]
        assert names(result) == ["CERTIFIED_TO_MAX"]


# -- right or wrong ---------------------------------------------------------------------


@given(seeds, st.booleans(), st.sampled_from(ARITHMETICS))
def test_misclassified_exactly_where_the_margin_at_zero_is_not_negative(seed, elide, arithmetic):
    # Small integers and eighths: every sum is exact, so ties are ties.
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(3, [4], 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    images = torch.randint(9, (12, 3), generator=generator) / 8
    labels = torch.randint(3, (12,), generator=generator)
    # Off [0, 1]: rows of sum 1 would be taken for probabilities.
    with torch.no_grad():
        model[-1].bias -= 100
    result = acert.certified_radius(
        model, images, labels, max_radius=0.1, elide=elide, arithmetic=arithmetic
    )
    margin = acert.certified_margin(model, images, labels, 0.0, elide=elide)
    wrong = result.status == Status.MISCLASSIFIED
    assert torch.equal(wrong, margin >= 0)
    assert bool((result.value[wrong] == 0).all())


def test_the_integer_nets_do_tie():
    """Guards the test above: without ties it would show less than it says."""
    ties = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(-2, 3, (3, 3), generator=generator).float()
        logits = (torch.randint(9, (12, 3), generator=generator) / 8) @ weight.T
        ties += int((logits.topk(2, dim=1).values.diff(dim=1) == 0).sum())
    assert ties > 10


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("labels", [None, torch.tensor([0, 0]), torch.tensor([1, 1])])
def test_ties_are_misclassified(labels, arithmetic):
    model = linear([[1.0, 0.0], [0.0, 1.0]], [3.0, 3.0])
    images = torch.tensor([[0.5, 0.5], [0.25, 0.25]])
    result = acert.certified_radius(model, images, labels, max_radius=0.1, arithmetic=arithmetic)
    assert names(result) == ["MISCLASSIFIED", "MISCLASSIFIED"]
    assert result.value.tolist() == [0.0, 0.0]


def cancelling_model():
    # z0 - z1 = 1e8 x0 - 1e8 x1 + 1: float32 cannot tell its sign where x0 = x1.
    return linear([[1e8, -1e8], [0.0, 0.0]], [3.0, 2.0])


def test_right_but_unprovable_at_zero_is_unconverged():
    model, images = cancelling_model(), torch.tensor([[0.5, 0.5]])
    single = acert.certified_radius(model, images, max_radius=0.1, arithmetic="float32")
    assert (names(single), single.value.tolist()) == (["UNCONVERGED"], [0.0])
    exact = acert.certified_radius(model, images, max_radius=0.1, arithmetic="real")
    assert names(exact) == ["ROOT"]
    assert 0 < exact.value.item() < 1 / 2e8
    assert exact.value.item() == pytest.approx(1 / 2e8, rel=0.1)  # xtol is 2 % of it


@settings(max_examples=25)
@given(seeds)
def test_accuracy_does_not_depend_on_the_arithmetic(seed):
    generator = torch.Generator().manual_seed(seed)
    model = cancelling_model()
    images = torch.rand(10, 1, generator=generator).expand(10, 2).contiguous()
    images[5:] += 1e-8 * torch.randn(5, 2, generator=generator)
    images = images.clamp(0, 1)
    labels = torch.randint(2, (10,), generator=generator)
    wrong = [
        acert.certified_radius(model, images, labels, max_radius=0.1, arithmetic=arithmetic).status
        == Status.MISCLASSIFIED
        for arithmetic in ARITHMETICS
    ]
    assert torch.equal(wrong[0], wrong[1])


@pytest.mark.parametrize("bounds", ["ibp", "crown"])
@pytest.mark.parametrize("threshold", [-1.0, -3.0, 5.0])
def test_the_step_at_the_threshold_of_softplus_is_not_rounded_to_float32(threshold, bounds):
    """The smaller class is ahead by 1e-11 just behind the step, which no radius reaches into."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Softplus(1.0, threshold), nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(1), model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[1.0], [0.0]]))
        model[2].bias.copy_(torch.tensor([0.0, threshold + 1e-11], dtype=torch.float64))
    image = torch.tensor([[threshold + 1e-3]], dtype=torch.float64)
    radius = acert.certified_radius(
        model, image, torch.tensor([0]), max_radius=0.1, domain=None, bounds=bounds
    ).value
    assert 0.0009 < float(radius) < 0.001
    assert model(torch.full_like(image, threshold + 1e-12)).argmax(1) == 1


def test_a_radius_that_hangs_on_comparisons_has_no_gradient():
    model = nn.Sequential(Apply(lambda x: (x > 0.5).to(x.dtype)), nn.Linear(2, 2))
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        found = acert.certified_radius(
            model, torch.rand(4, 2), max_radius=0.3, differentiable=True
        ).value
        assert found.requires_grad != frozen
        if not frozen:
            found.sum().backward()
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_behind_the_threshold_of_softplus_the_prediction_is_the_models():
    model = nn.Sequential(nn.Softplus(threshold=2.0), nn.Linear(2, 2)).requires_grad_(False)
    model[1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    model[1].bias.copy_(torch.tensor([0.0, 0.49]))
    image = torch.tensor([[2.5, 2.0]])  # 2.5 as it is and 2.127 + 0.49: the second leads
    result = acert.certified_radius(model, image, max_radius=0.1, domain=None)
    assert result.prediction.item() == model(image).argmax().item() == 1
    image = torch.tensor([[2.5, 2.005]])  # 2.005 + 0.49, behind the threshold as well
    result = acert.certified_radius(model, image, max_radius=0.1, domain=None)
    assert result.prediction.item() == model(image).argmax().item() == 0
    assert result.value.item() == pytest.approx(0.0025, rel=1e-3)


def test_without_labels_the_prediction_is_certified():
    model, images, _ = random_net(4)
    result = acert.certified_radius(model, images, max_radius=0.1)
    labelled = acert.certified_radius(model, images, result.prediction, max_radius=0.1)
    assert all(torch.equal(one, other) for one, other in zip(result, labelled, strict=True))
    assert Status.MISCLASSIFIED not in result.status


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.int32]
)
@pytest.mark.parametrize("bounds", ["ibp", "crown-ibp"])
def test_labels_of_any_integer_type(dtype, bounds):
    model, images, labels = random_net(4)
    options = {"max_radius": 0.1, "bounds": bounds, "differentiable": True}
    result = acert.certified_radius(model, images, labels.to(dtype), **options)
    expected = acert.certified_radius(model, images, labels, **options)
    assert torch.equal(result.value, expected.value)


@pytest.mark.parametrize("classes", [200, 256, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_labels_whose_type_does_not_hold_the_number_of_classes(classes, dtype):
    model, images = nn.Linear(4, classes), torch.rand(6, 4)
    labels = torch.tensor([0, 1, 50, 99, 100, 127])
    narrow = acert.certified_margin(model, images, labels.to(dtype), 0.01)
    assert torch.equal(narrow, acert.certified_margin(model, images, labels, 0.01))


# -- the proof --------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    seeds,
    st.sampled_from([nn.ReLU, nn.Tanh]),
    st.sampled_from(ARITHMETICS),
    st.booleans(),
    st.sampled_from([1, 3, None]),
    st.sampled_from([Brent(), TIGHT, Brent(max_steps=1), Bisection(max_steps=3)]),
)
def test_the_proven_margin_is_negative_at_value_in_any_batch(
    seed, activation, arithmetic, elide, batch_size, solver
):
    model, images, labels = random_net(seed, activation=activation)
    result = acert.certified_radius(
        model, images, labels, max_radius=0.3, solver=solver, elide=elide,
        arithmetic=arithmetic, batch_size=batch_size,
    )  # fmt: skip
    positive = result.value > 0
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    for size in (1, 3, 8):
        margins = torch.empty(8, dtype=torch.float64)
        for part in order.split(size):
            margins[part] = proven(
                model, images[part], labels[part], result._replace(value=result.value[part]),
                arithmetic, elide=elide,
            )  # fmt: skip
        assert bool((margins[positive] < 0).all())


def test_the_law_about_batches_bites():
    """Sums in another order differ: room for that is why the law holds to the last bit."""
    model, images, labels = random_net(2, samples=16, dtype=torch.float64)
    radius = torch.full((16,), 0.01, dtype=torch.float64)
    rounding = ROUNDINGS["real"]
    together = proven_margin(model, images, labels, radius, rounding=rounding)
    alone = torch.cat(
        [
            proven_margin(
                model, *(t[i : i + 1] for t in (images, labels, radius)), rounding=rounding
            )
            for i in range(16)
        ]
    )
    assert not torch.equal(together, alone)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_batches_hardly_change_the_radii(batch_size):
    model, images, labels = random_net(6)
    whole = acert.certified_radius(model, images, labels, max_radius=0.3, solver=TIGHT)
    parts = acert.certified_radius(
        model, images, labels, max_radius=0.3, solver=TIGHT, batch_size=batch_size
    )
    assert torch.equal(parts.status, whole.status)
    assert torch.equal(parts.prediction, whole.prediction)
    torch.testing.assert_close(parts.value, whole.value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", [Brent(max_steps=1), Bisection(max_steps=1)])
def test_too_few_steps_leave_a_proven_value(solver):
    model, images, labels = random_net(8, samples=32)
    solver = type(solver)(xtol=1e-14, rtol=0.0, max_steps=solver.max_steps)
    result = acert.certified_radius(model, images, labels, max_radius=0.5, solver=solver)
    best = acert.certified_radius(model, images, labels, max_radius=0.5, solver=TIGHT)
    stopped = result.status == Status.UNCONVERGED
    assert int(stopped.sum()) > 5
    assert bool((result.value[stopped] <= best.value[stopped]).all())
    assert bool((result.value[stopped] > 0).any())
    margins = proven(model, images, labels, result)
    assert bool((margins[result.value > 0] < 0).all())


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_value_is_within_a_percent_of_the_root_of_the_proven_margin(arithmetic, elide):
    model, images, labels = random_net(9)
    result = acert.certified_radius(
        model, images, labels, max_radius=0.5, arithmetic=arithmetic, elide=elide
    )
    for i in (result.status == Status.ROOT).nonzero().flatten().tolist():
        low, high = 0.0, 0.5
        for _ in range(50):
            middle = torch.tensor([(low + high) / 2], dtype=torch.float64)
            margin = proven_margin(
                model, images[i : i + 1].double(), labels[i : i + 1], middle,
                rounding=ROUNDINGS[arithmetic], elide=elide,
            )  # fmt: skip
            low, high = (middle.item(), high) if margin.item() < 0 else (low, middle.item())
        assert 0.99 * low <= result.value[i].item() <= high


# -- against SciPy ----------------------------------------------------------------------


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("solver", [Brent(), Bisection()])
def test_radii_agree_with_brentq(solver, elide):
    model, images, labels = random_net(12, samples=16, dtype=torch.float64)
    result = acert.certified_radius(
        model, images, labels, max_radius=0.3, solver=solver, elide=elide
    )
    roots = 0
    for i, (value, status) in enumerate(zip(result.value.tolist(), names(result), strict=True)):

        def margin(radius, i=i):
            return acert.certified_margin(
                model, images[i : i + 1], labels[i : i + 1], radius, elide=elide
            ).item()

        if status == "MISCLASSIFIED":
            assert margin(0.0) >= 0
        elif status == "CERTIFIED_TO_MAX":
            assert margin(0.3) < 0
        else:
            roots += 1
            root = brentq(margin, 0.0, 0.3, xtol=1e-14, rtol=1e-14)
            assert value <= root * (1 + 1e-12)
            assert root - value <= solver.xtol + solver.rtol * root + 1e-12
    assert roots >= 5


def test_plain_radii_are_never_larger():
    model, images, labels = random_net(13, samples=32)
    elided = acert.certified_radius(model, images, labels, max_radius=0.3, solver=TIGHT)
    plain = acert.certified_radius(model, images, labels, max_radius=0.3, solver=TIGHT, elide=False)
    assert bool((plain.value <= elided.value * (1 + 1e-9)).all())
    assert bool((plain.value < elided.value).any())


def test_clamping_to_the_domain_enlarges_radii_near_its_border():
    # z1 - z0 = 0.25 - 2 x1 - x0 falls in both; an image at 0 has nothing below.
    model = linear([[1.0, 2.0], [0.0, 0.0]], [0.0, 0.25])
    images = torch.tensor([[0.0, 0.25], [0.5, 0.25]])
    options = {"max_radius": 0.5, "solver": TIGHT}
    clamped = acert.certified_radius(model, images, **options).value.tolist()
    free = acert.certified_radius(model, images, domain=None, **options).value.tolist()
    assert free == pytest.approx([0.25 / 3, 0.75 / 3])
    assert clamped == pytest.approx([0.125, 0.25])  # the second box does not reach the border
    held = acert.certified_radius(
        model, images, domain=(torch.tensor([0.0, 0.0625]), 1.0), **options
    ).value.tolist()
    # x1 >= 1/16 stops the second box at radius 3/16; then x0 alone falls, down to 1/8.
    assert held == pytest.approx([0.125, 0.375])


# -- gradients (Thm. 3.4, Remark 3.5) ---------------------------------------------------


def gradients_of(value, wanted):
    """One list of gradients a sample."""
    return [torch.autograd.grad(one, wanted, retain_graph=True) for one in value]


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_implicit_gradients_match_finite_differences(activation, elide):
    model, images, labels = random_net(21, activation=activation, samples=6, dtype=torch.float64)
    options = {"max_radius": 0.5, "solver": TIGHT, "elide": elide}
    images.requires_grad_()
    result = acert.certified_radius(model, images, labels, differentiable=True, **options)
    wanted = [*model.parameters(), images]
    gradients = gradients_of(result.value, wanted)
    inside = result.status == Status.ROOT
    assert int(inside.sum()) >= 3
    step = 1e-6
    for index, tensor in enumerate(wanted):
        direction = torch.randn_like(tensor)
        moved = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor += sign * step * direction
                moved.append(acert.certified_radius(model, images, labels, **options).value)
                tensor -= sign * step * direction
        difference = (moved[0] - moved[1]) / (2 * step)
        slope = torch.stack([(found[index] * direction).sum() for found in gradients])
        torch.testing.assert_close(slope[inside], difference[inside], rtol=1e-4, atol=1e-8)


def test_implicit_gradient_in_closed_form():
    model = linear(*BY_HAND)
    images = torch.tensor([[0.75, 0.25]], requires_grad=True)
    result = acert.certified_radius(
        model, images, torch.tensor([0]), max_radius=0.5, domain=None, differentiable=True
    )
    result.value.sum().backward()
    # value = (x0 - 2 x1) / 3, whose slope in the biases is (1, -1, 0) / 3
    assert images.grad.tolist()[0] == pytest.approx([1 / 3, -2 / 3], rel=1e-6)
    assert model.bias.grad.tolist() == pytest.approx([1 / 3, -1 / 3, 0.0], rel=1e-6)


@pytest.mark.parametrize("bounds", ["ibp", "crown-ibp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pixel_at_the_end_of_the_domain_does_not_move_that_end(dtype, bounds):
    # z_0 - z_1 = x0 + 2 x1 - 2 x2 + 1.75 is least at x0 - radius, x1 = 0 and x2 = 1, the ends.
    model = linear([[1.0, 2.0, -2.0], [0.0, 0.0, 0.0]], [1.75, 0.0]).to(dtype)
    images = torch.tensor([[0.5, 0.0, 1.0]], dtype=dtype, requires_grad=True)
    result = acert.certified_radius(
        model, images, max_radius=0.5, bounds=bounds, differentiable=True
    )
    assert result.value.item() == pytest.approx(0.25, rel=1e-4)
    result.value.sum().backward()
    assert images.grad.tolist()[0] == pytest.approx([1.0, 0.0, 0.0])


def test_gradient_is_a_positive_multiple_of_the_falling_margin():
    model, images, labels = random_net(22, samples=6, dtype=torch.float64)
    result = acert.certified_radius(
        model, images, labels, max_radius=0.5, solver=TIGHT, differentiable=True
    )
    value = result.value.detach()
    margins = acert.certified_margin(model, images, labels, value)
    step = 1e-7
    above, below = value + step, (value - step).clamp(min=0)
    slope = acert.certified_margin(model, images, labels, above)
    slope = (slope - acert.certified_margin(model, images, labels, below)) / (2 * step)
    parameters = list(model.parameters())
    inside = (result.status == Status.ROOT).nonzero().flatten().tolist()
    assert len(inside) >= 3
    of_radius, of_margin = (gradients_of(each, parameters) for each in (result.value, margins))
    for i in inside:
        grown, fallen = (
            torch.cat([gradient.flatten() for gradient in each[i]])
            for each in (of_radius, of_margin)
        )
        multiple = -(grown @ fallen) / (fallen @ fallen)
        assert multiple.item() > 0
        assert multiple.item() == pytest.approx(1 / slope[i].item(), rel=1e-5)
        torch.testing.assert_close(grown, -multiple * fallen, rtol=1e-9, atol=1e-12)


def flat_model():
    """The margin does not depend on the radius, but its float32 rounding error does."""
    # 2 (1 + 16) 2^-24 4 (0.5 + radius) crosses the distance of the logits near radius 0.24.
    return linear([[4.0], [4.0]], [0.0, -6e-6])


def test_gradient_is_zero_where_the_radius_does_not_move():
    model = linear([[1.0], [0.0]], [0.0, 0.5])
    images = torch.tensor([[0.25], [0.5], [0.75]], requires_grad=True)
    result = acert.certified_radius(
        model, images, torch.zeros(3, dtype=int), max_radius=0.2, differentiable=True
    )
    assert names(result) == ["MISCLASSIFIED", "MISCLASSIFIED", "CERTIFIED_TO_MAX"]
    result.value.sum().backward()
    for tensor in (images, *model.parameters()):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_gradient_is_zero_where_the_margin_is_flat():
    model, images = flat_model(), torch.tensor([[0.5]], requires_grad=True)
    result = acert.certified_radius(
        model, images, max_radius=0.5, arithmetic="float32", differentiable=True
    )
    assert names(result) == ["ROOT"]
    assert 0 < result.value.item() < 0.5
    result.value.sum().backward()
    for tensor in (images, *model.parameters()):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_gradient_of_a_mixed_batch_is_the_sum_over_its_samples():
    model, images, labels = random_net(26, samples=8)
    options = {"max_radius": 0.2, "differentiable": True, "solver": TIGHT}
    result = acert.certified_radius(model, images, labels, batch_size=3, **options)
    assert {"MISCLASSIFIED", "CERTIFIED_TO_MAX", "ROOT"} <= set(names(result))
    parameters = list(model.parameters())
    found = torch.autograd.grad(result.value.sum(), parameters)
    alone = [
        acert.certified_radius(model, images[i : i + 1], labels[i : i + 1], **options).value
        for i in range(8)
    ]
    expected = torch.autograd.grad(torch.cat(alone).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_differentiable_changes_no_value():
    model, images, labels = random_net(24)
    plain = acert.certified_radius(model, images, labels, max_radius=0.1)
    result = acert.certified_radius(model, images, labels, max_radius=0.1, differentiable=True)
    assert result.value.requires_grad
    assert torch.equal(result.value.detach(), plain.value)
    assert torch.equal(result.status, plain.status)


# -- what is left behind ----------------------------------------------------------------


@pytest.mark.parametrize("differentiable", [False, True])
def test_the_model_is_left_as_it_was(differentiable):
    model = models.small_resnet((1, 8, 8), 3, width=2).eval()
    before, images = copy.deepcopy(model.state_dict()), torch.rand(3, 1, 8, 8)
    result = acert.certified_radius(model, images, max_radius=0.01, differentiable=differentiable)
    assert result.value.shape == (3,)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert list(after) == list(before)
    for module in model.modules():
        assert not module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not images.requires_grad


class Witness(nn.Module):
    """A linear layer that notes the settings it runs under, and may fail."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.layer, self.fails, self.seen = nn.Linear(3, 2), fails, []

    def forward(self, x):
        if x.dtype == torch.float64:  # nothing else proves anything
            self.seen.append(settings_now())
        if self.fails:
            raise ZeroDivisionError("on purpose")
        return self.layer(x)


def settings_now():
    return (
        torch.backends.cudnn.enabled,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture
def loose_settings():
    """TF32 and cuDNN on, and back to what they were."""
    backends = torch.backends
    before = settings_now()
    backends.cudnn.enabled = True
    backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = "tf32"
    yield (True, "tf32", "tf32", True)
    backends.cudnn.enabled = before[0]
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = before[1:3]


@pytest.mark.parametrize("differentiable", [False, True])
def test_settings_are_off_inside_and_restored(loose_settings, differentiable):
    model, images = Witness(), torch.rand(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        acert.certified_radius(model, images, max_radius=0.1, differentiable=differentiable)
        assert settings_now() == loose_settings
    assert set(model.seen) == {(False, "ieee", "ieee", False)}


def test_a_rough_guess_ends_at_the_same_radius(monkeypatch):
    """On CUDA the guess is made in TF32; here it is made poor by hand, off by up to 1 %."""
    torch.manual_seed(1)
    model = acert.models.ibp_init_(acert.models.small_cnn((1, 8, 8), 10)).eval()
    images = torch.rand(32, 1, 8, 8)
    fine = acert.certified_radius(model, images, max_radius=0.3)
    plain = radius_module.proven_margin

    def blurred(model, images, labels, radius, *, rounding, **rest):
        if rounding is None:
            radius = radius * (1 + 0.01 * torch.linspace(-1, 1, len(radius)))
        return plain(model, images, labels, radius, rounding=rounding, **rest)

    monkeypatch.setattr(radius_module, "proven_margin", blurred)
    rough = acert.certified_radius(model, images, max_radius=0.3)
    assert torch.equal(rough.status, fine.status)
    assert torch.allclose(rough.value, fine.value, rtol=2e-5, atol=0)
    assert (rough.steps > fine.steps).any()


def test_a_guess_of_three_digits_is_made_finer_before_the_proof(monkeypatch):
    torch.manual_seed(1)
    model = acert.models.ibp_init_(acert.models.small_cnn((1, 8, 8), 10)).eval()
    images = torch.rand(32, 1, 8, 8)
    forms = []
    quick = radius_module.quick_arithmetic
    monkeypatch.setattr(
        radius_module, "quick_arithmetic", lambda form: forms.append(form) or quick(form)
    )
    rough = acert.certified_radius(model, images, max_radius=0.3)
    assert forms == ["tf32", "ieee"]
    monkeypatch.setattr(radius_module, "QUICK_ERROR", 0.0)
    fine = acert.certified_radius(model, images, max_radius=0.3)
    assert forms == ["tf32", "ieee", "tf32"]
    assert torch.equal(rough.status, fine.status)
    assert torch.allclose(rough.value, fine.value, rtol=2e-5, atol=0)
    assert rough.steps.sum() <= fine.steps.sum() + 2


def test_gradients_are_taken_a_batch_at_a_time(monkeypatch):
    """However many batches one search serves."""
    seen = []
    implicit = radius_module._implicit
    monkeypatch.setattr(
        radius_module,
        "_implicit",
        lambda model, images, *rest, **more: (
            seen.append(len(images)) or implicit(model, images, *rest, **more)
        ),
    )
    monkeypatch.setattr(radius_module, "_batches_together", lambda device: 16)
    torch.manual_seed(0)
    model, images = nn.Linear(3, 2), torch.rand(10, 3)
    acert.certified_radius(model, images, max_radius=0.1, batch_size=4, differentiable=True)
    assert seen == [4, 4, 2]


@pytest.mark.parametrize("labels", [False, True])
def test_several_batches_in_one_search_give_the_radii_of_each(monkeypatch, labels):
    """As on CUDA; the last batch is a smaller one, and in some batches nothing is left to do."""
    torch.manual_seed(2)
    model = acert.models.ibp_init_(acert.models.small_cnn((1, 8, 8), 10)).eval()
    images, classes = torch.rand(33, 1, 8, 8), torch.arange(33) % 10 if labels else None
    one_by_one = acert.certified_radius(model, images, classes, max_radius=0.3, batch_size=5)
    seen = []
    proven = radius_module.proven_margin
    monkeypatch.setattr(
        radius_module,
        "proven_margin",
        lambda model, images, *rest, **more: (
            seen.append(len(images)) or proven(model, images, *rest, **more)
        ),
    )
    monkeypatch.setattr(radius_module, "_batches_together", lambda device: 16)
    together = acert.certified_radius(model, images, classes, max_radius=0.3, batch_size=5)
    assert max(seen) <= 5
    assert torch.equal(together.status, one_by_one.status)
    assert torch.equal(together.prediction, one_by_one.prediction)
    assert torch.allclose(together.value, one_by_one.value, rtol=2e-5, atol=0)


def test_settings_are_restored_after_an_exception(loose_settings):
    model = Witness(fails=True)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            acert.certified_radius(model, torch.rand(4, 3), max_radius=0.1)
        assert settings_now() == loose_settings
    assert model.seen == [(False, "ieee", "ieee", False)]


def test_the_older_switches_of_pytorch_survive():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        acert.certified_radius(nn.Linear(3, 2), torch.rand(4, 3), max_radius=0.1)
        # PyTorch raises where old and new switches disagree.
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


def test_autocast_does_not_change_the_result():
    model, images, labels = random_net(25)
    expected = acert.certified_radius(model, images, labels, max_radius=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).dtype == torch.bfloat16  # it is on
        result = acert.certified_radius(model, images, labels, max_radius=0.1)
    assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


# -- models that are not what they seem -----------------------------------------------------


class Forward(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net = models.mlp(6, [8], 3)
        self.function = function

    def forward(self, x):
        return self.net(self.function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 3 if torch.is_tensor(x) else x,
        lambda x: x + 0.1 * torch.randn(x.shape),
        lambda x: x - x.mean(0, keepdim=True),
        lambda x: x + x[:1],
        lambda x: x + x[-1:],
        lambda x: x * torch.linspace(1, 2, len(x)).unsqueeze(1),
        lambda x: x * torch.nan if torch.is_tensor(x) else x,
    ],
    ids=[
        "asks for the type",
        "draws at random",
        "mixes the batch",
        "looks at the first",
        "looks at the last",
        "counts its samples",
        "is no number",
    ],
)
def test_a_model_that_is_another_one_for_intervals_is_refused(function):
    with pytest.raises(acert.UnsupportedOperation, match="computes something else of images"):
        acert.certified_radius(Forward(function), torch.rand(8, 6), max_radius=0.1)


@pytest.mark.parametrize(
    ("dtype", "inputs", "share"), [(torch.bfloat16, 300, 1.0), (torch.float32, 3000, 1e-4)]
)
def test_a_model_that_mixes_the_batch_is_refused_where_rounding_would_hide_it(dtype, inputs, share):
    torch.manual_seed(0)
    model = Forward(lambda x: x - share * x.mean(0, keepdim=True))
    model.net = models.mlp(inputs, [16], 3)
    images = torch.rand(4, inputs).to(dtype)
    with pytest.raises(acert.UnsupportedOperation, match="computes something else of images"):
        acert.certified_radius(model.to(dtype), images, max_radius=0.1)


class Squeezed(nn.Linear):
    def forward(self, x):
        return super().forward(x.squeeze())


def test_a_model_that_drops_the_axis_of_a_batch_of_one_is_refused():
    with pytest.raises(acert.InvalidInput, match=r"logits of shape \(1, classes\) .* got \(3,\)"):
        acert.certified_radius(Squeezed(6, 3), torch.rand(8, 1, 6), max_radius=0.1)


@pytest.mark.parametrize(("dtype", "max_radius"), [(torch.float32, 1e40), (torch.float16, 1e6)])
def test_the_largest_radius_may_be_beyond_the_images_precision(dtype, max_radius):
    model = nn.Linear(1, 2).requires_grad_(False)
    model.weight.copy_(torch.tensor([[1.0], [0.0]]))
    model.bias.copy_(torch.tensor([0.0, max_radius / 1e5]))
    image = torch.zeros(1, 1, dtype=dtype)
    result = acert.certified_radius(model, image, max_radius=max_radius, domain=None)
    assert result.value.item() == pytest.approx(model.bias[1].item(), rel=1e-4)
    assert result.value.item() < model.bias[1].item()
    model.weight.zero_()
    result = acert.certified_radius(model, image, max_radius=max_radius, domain=None)
    assert result.value.item() == max_radius


class Counting(nn.Module):
    """Grows with every call."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(x * self.calls)


def test_a_model_that_changes_from_call_to_call_is_refused_and_left_as_it_was():
    model = Counting()
    calls = model.calls
    with pytest.raises(acert.UnsupportedOperation, match="computes something else of images"):
        acert.certified_radius(model, torch.rand(8, 6), max_radius=0.1)
    assert model.calls is calls
    assert calls == 0


def test_constants_of_numpy_on_either_side():
    numpy = pytest.importorskip("numpy")
    images = torch.rand(5, 6)
    for function in (
        lambda x: numpy.float64(3) * x,
        lambda x: x * numpy.float32(3),
        lambda x: numpy.full(6, 3.0) * x if not torch.is_tensor(x) else 3.0 * x,
    ):
        model = Forward(function)
        plain = Forward(lambda x: 3.0 * x)
        plain.load_state_dict(model.state_dict())
        got, wanted = (
            acert.certified_radius(m, images, max_radius=0.1).value for m in (model, plain)
        )
        assert torch.equal(got, wanted)


def test_weights_that_are_not_numbers_are_refused():
    model = models.mlp(6, [8], 3)
    with torch.no_grad():
        model[-1].bias[1] = torch.nan
    with pytest.raises(acert.InvalidInput, match=r"NaN or infinity in `\d\.bias`"):
        acert.certified_radius(model, torch.rand(2, 6), max_radius=0.1)


def test_weights_without_a_shape_are_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(acert.InvalidInput, match="must be initialised"):
        acert.certified_radius(model, torch.rand(2, 6), max_radius=0.1)


def test_a_gradient_needs_gradients():
    with torch.no_grad(), pytest.raises(acert.InvalidInput, match="where gradients are off"):
        acert.certified_radius(
            models.mlp(6, [8], 3), torch.rand(2, 6), max_radius=0.1, differentiable=True
        )


@pytest.mark.parametrize(
    ("shape", "size", "by_crown"),
    [((3, 32, 32), 32, 8), ((1, 28, 28), 41, 8), ((3, 64, 64), 16, 2), ((3, 224, 224), 16, 1),
     ((1, 8, 8), 128, 8), ((20,), 128, 8)],
)  # fmt: skip
def test_a_batch_on_a_cpu_has_few_pixels(shape, size, by_crown):
    assert radius_module._default_batch(torch.zeros(1, *shape), "ibp") == size
    assert radius_module._default_batch(torch.zeros(1, *shape), "crown-ibp") == by_crown
