import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from acert.errors import InvalidInput
from acert.models import Normalize, Residual, cnn7, ibp_init_, mlp, small_cnn, small_resnet

MODELS = {
    "cnn7": lambda **options: cnn7((3, 8, 8), 5, width=2, **options),
    "mlp": lambda **options: mlp(3 * 8 * 8, [7, 6], 5, **options),
    "small_cnn": lambda **options: small_cnn((3, 8, 8), 5, width=2, **options),
    "small_resnet": lambda **options: small_resnet((3, 8, 8), 5, width=2, **options),
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


# cnn7 ------------------------------------------------------------------------------------------


def cnn7_count(channels: int, features: int, classes: int, w: int) -> int:
    """Parameters of CNN7 with their biases, layer by layer as in the paper's Table 3."""
    convolutions = 9 * (channels * w + w * w + w * 2 * w + 2 * (2 * w * 2 * w)) + 8 * w
    batch_norms = 2 * (8 * w) + 2 * (8 * w)
    linear = (features + 1) * 8 * w + (8 * w + 1) * classes
    return convolutions + batch_norms + linear


def test_cnn7_on_cifar10_has_the_count_worked_out_by_hand():
    by_hand = (
        (1_792 + 36_928 + 73_856 + 147_584 + 147_584)  # convolutions
        + (2 * (64 + 64 + 128 + 128 + 128) + 2 * 512)  # batch norms
        + (32_768 * 512 + 512)
        + (512 * 10 + 10)
    )
    assert by_hand == 17_192_650
    assert cnn7_count(3, 32_768, 10, 64) == by_hand
    assert parameter_count(cnn7()) == by_hand


@pytest.mark.parametrize(
    ("in_shape", "classes", "strides", "features"),
    [
        ((1, 28, 28), 10, [1, 1, 2, 1, 1], 128 * 14**2),
        ((3, 32, 32), 10, [1, 1, 2, 1, 1], 128 * 16**2),
        ((3, 64, 64), 200, [1, 1, 2, 1, 2], 32_768),
        ((3, 56, 56), 200, [1, 1, 2, 1, 2], 128 * 14**2),
    ],
)
def test_cnn7_matches_the_papers_table(in_shape, classes, strides, features):
    with torch.device("meta"):  # shapes alone; no arithmetic
        model = cnn7(in_shape, classes)
        logits = model(torch.empty(2, *in_shape))
    convolutions = layers_of(model, nn.Conv2d)
    assert [layer.out_channels for layer in convolutions] == [64, 64, 128, 128, 128]
    assert [layer.stride for layer in convolutions] == [(stride, stride) for stride in strides]
    assert {(layer.kernel_size, layer.padding) for layer in convolutions} == {((3, 3), (1, 1))}
    linear = layers_of(model, nn.Linear)
    assert [layer.in_features for layer in linear] == [features, 512]
    assert parameter_count(model) == cnn7_count(in_shape[0], features, classes, 64)
    assert logits.shape == (2, classes)


def test_cnn7_has_batch_norm_and_relu_behind_all_but_the_last_layer():
    model = cnn7((1, 8, 8), width=1)
    kinds = [type(layer) for layer in model]
    convolution = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert kinds == [
        *(5 * convolution),
        nn.Flatten,
        *[nn.Linear, nn.BatchNorm1d, nn.ReLU],
        nn.Linear,
    ]
    norms = [*layers_of(model, nn.BatchNorm2d), *layers_of(model, nn.BatchNorm1d)]
    assert len(norms) == 6
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}


def test_width_scales_cnn7():
    model = cnn7((1, 12, 9), 3, width=5)
    assert [layer.out_channels for layer in layers_of(model, nn.Conv2d)] == [5, 5, 10, 10, 10]
    # 12x9 is halved once: ceil(12 / 2) * ceil(9 / 2) = 30 pixels.
    assert layers_of(model, nn.Linear)[0].weight.shape == (40, 10 * 30)
    assert model(torch.rand(2, 1, 12, 9)).shape == (2, 3)


# the other networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_images_in_logits_out(build):
    model = build()
    assert type(model) is nn.Sequential
    logits = model(torch.rand(4, 3, 8, 8))
    assert logits.shape == (4, 5)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_normalize_is_the_first_layer_and_does_its_work(build):
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    # In training mode, because the narrow CNN7 is all but constant in evaluation mode.
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    normalized = build(normalize=Normalize(mean, std))
    images = torch.rand(4, 3, 8, 8)
    by_hand = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert isinstance(normalized[0], Normalize)
    torch.testing.assert_close(normalized(images), plain(by_hand))
    assert not torch.allclose(normalized(images), plain(images))


def test_mlp_takes_features_and_images_alike():
    model = mlp(12, [7], 3)
    images = torch.rand(4, 3, 2, 2)
    assert torch.equal(model(images), model(images.reshape(4, 12)))
    assert parameter_count(model) == 12 * 7 + 7 + 7 * 3 + 3


def test_mlp_without_hidden_layers_is_linear():
    model = mlp(4, [], 3)
    assert [type(layer) for layer in model] == [nn.Flatten, nn.Linear]


@pytest.mark.parametrize("build", [MODELS["mlp"], MODELS["small_cnn"]], ids=["mlp", "small_cnn"])
def test_activation_replaces_every_relu(build):
    model = build(activation=nn.Tanh)
    assert not layers_of(model, nn.ReLU)
    assert len(layers_of(model, nn.Tanh)) == len(layers_of(build(), nn.ReLU)) > 1


@pytest.mark.parametrize("in_shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (1, 5, 7), (2, 1, 1)])
@pytest.mark.parametrize("build", [small_cnn, small_resnet])
def test_small_networks_take_any_image_size(build, in_shape):
    model = build(in_shape, 4, width=2)
    assert model(torch.rand(3, *in_shape)).shape == (3, 4)


def test_residual_adds_both_paths():
    double = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        double.weight.copy_(2 * torch.eye(2))
    inputs = torch.tensor([[1.0, -3.0]])
    assert Residual(double)(inputs).tolist() == [[3.0, -9.0]]
    assert Residual(double, double)(inputs).tolist() == [[4.0, -12.0]]


def test_small_resnet_by_hand():
    model = small_resnet((1, 8, 8), 10, width=4)
    # stem, block of 4, block of 8 and block of 16 with 1x1 shortcuts, linear
    convolutions = 9 * 4 + 9 * 2 * 16 + (9 * (32 + 64) + 32) + (9 * (128 + 256) + 128)
    batch_norms = 2 * (4 + 2 * 4 + 3 * 8 + 3 * 16)
    assert parameter_count(model) == convolutions + batch_norms + 16 * 10 + 10
    residuals = layers_of(model, Residual)
    assert [type(layer.shortcut) for layer in residuals] == [nn.Identity] + 2 * [nn.Sequential]


# Normalize -------------------------------------------------------------------------------------


def test_normalize_broadcasts_over_channels_of_any_rank_and_over_features():
    layer = Normalize([1.0, 2.0], [2.0, 4.0])
    assert layer(torch.tensor([[5.0, 6.0]])).tolist() == [[2.0, 1.0]]
    for trailing in [(3,), (3, 5), (3, 5, 2)]:
        images = torch.stack([torch.full(trailing, 5.0), torch.full(trailing, 6.0)])[None]
        normalized = layer(images)
        assert normalized.shape == (1, 2, *trailing)
        assert normalized[0, 0].unique().tolist() == [2.0]
        assert normalized[0, 1].unique().tolist() == [1.0]


def test_normalize_with_one_channel_fits_any_input():
    layer = Normalize(0.5, [0.25])
    assert layer(torch.ones(1, 3, 2, 2)).unique().tolist() == [2.0]
    assert layer(torch.ones(1, 7)).unique().tolist() == [2.0]


def test_normalize_moves_with_the_model_but_is_not_trained():
    layer = Normalize(torch.tensor([0.5, 0.5], dtype=torch.float64), 0.25)
    assert layer.mean.dtype == torch.float32
    assert list(layer.parameters()) == []
    assert set(layer.state_dict()) == {"mean", "std"}
    assert layer.double()(torch.rand(2, 2, dtype=torch.float64)).dtype == torch.float64


def test_normalize_copies_what_it_is_given():
    mean = torch.zeros(2)
    layer = Normalize(mean, 1.0)
    mean += 1
    assert layer.mean.tolist() == [0.0, 0.0]


def test_normalize_prints_its_numbers():
    assert repr(Normalize(0.5, [0.25, 0.5])) == "Normalize(mean=[0.5], std=[0.25, 0.5])"


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (0.0, 0.0, r"`std` must be > 0; got \[0.0\]"),
        ([0.0, 0.0], [1.0, -0.5], r"`std` must be > 0; got \[1.0, -0.5\]"),
        (0.0, 1e-60, r"`std` must be > 0; got \[0.0\]"),  # rounds to 0 in float32
        (0.0, math.nan, r"`std` must be finite; got nan"),
        (math.inf, 1.0, r"`mean` must be finite; got inf"),
        ([0.0, 0.0], [1.0, 1.0, 1.0], "same number of channels; got 2 and 3"),
        ([[0.0]], 1.0, r"`mean` must be a number or hold one entry a channel; got shape \(1, 1\)"),
        (0.0, [], r"`std` must be a number or hold one entry a channel; got shape \(0,\)"),
    ],
)
def test_normalize_refuses(mean, std, message):
    with pytest.raises(InvalidInput, match=message):
        Normalize(mean, std)


def test_normalize_refuses_images_with_other_channels():
    with pytest.raises(InvalidInput, match=r"`images` must have 3 channels.*got shape \(2, 1, 4\)"):
        Normalize([0.0, 0.0, 0.0], 1.0)(torch.rand(2, 1, 4))


# arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [cnn7, small_cnn, small_resnet])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "`num_classes` must be an integer >= 2; got 1"),
        ({"num_classes": 2.0}, "`num_classes` must be an integer >= 2; got 2.0"),
        ({"width": 0}, "`width` must be an integer >= 1; got 0"),
        ({"width": True}, "`width` must be an integer >= 1; got True"),
        ({"in_shape": (28, 28)}, r"`in_shape` must be \(channels, height, width\); got \(28, 28\)"),
        ({"in_shape": 28}, r"`in_shape` must be \(channels, height, width\); got 28"),
        ({"in_shape": (1, 0, 28)}, r"`in_shape\[1\]` must be an integer >= 1; got 0"),
        (
            {"in_shape": (1, 8, 8), "normalize": Normalize([0.0, 0.0], 1.0)},
            "`normalize` must have 1 channel or the 1 of `in_shape`; got 2",
        ),
    ],
)
def test_image_networks_refuse(build, options, message):
    with pytest.raises(InvalidInput, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [3], 2), "`in_features` must be an integer >= 1; got 0"),
        ((4, [3, 0], 2), r"`hidden\[1\]` must be an integer >= 1; got 0"),
        ((4, [3], 1), "`num_classes` must be an integer >= 2; got 1"),
    ],
)
def test_mlp_refuses(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        mlp(*arguments)


# IBP initialisation ----------------------------------------------------------------------------


def assert_drawn_from(weight: torch.Tensor, deviation: float) -> None:
    """Sample mean and deviation within five standard errors of N(0, deviation^2)."""
    count = weight.numel()
    assert abs(weight.mean().item()) < 5 * deviation / math.sqrt(count)
    assert abs(weight.std().item() / deviation - 1) < 5 / math.sqrt(2 * count)


def test_ibp_init_draws_all_but_the_last_linear_layer():
    model = cnn7((3, 8, 8), width=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert ibp_init_(model) is model
    affine = [*layers_of(model, nn.Conv2d), *layers_of(model, nn.Linear)]
    for layer, fan_in in zip(affine[:-1], [27, 144, 144, 288, 288, 512], strict=True):
        assert_drawn_from(layer.weight, math.sqrt(2 * math.pi) / fan_in)
    drawn = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    names = {module: name for name, module in model.named_modules()}
    assert drawn == {f"{names[layer]}.weight" for layer in affine[:-1]}


def test_ibp_init_keeps_interval_radii_level_through_relu():
    """What the initialisation is for: depth alone changes the mean radius by little."""
    model = ibp_init_(mlp(400, [400] * 6, 2))
    lower, upper = torch.full((1, 400), -1.0), torch.full((1, 400), 1.0)
    for layer in model[1:-1]:
        if isinstance(layer, nn.Linear):
            center, radius = (lower + upper) / 2, (upper - lower) / 2
            radius = radius @ layer.weight.abs().T
            center = layer(center)
            lower, upper = center - radius, center + radius
        else:
            lower, upper = layer(lower), layer(upper)
    assert 0.8 < ((upper - lower) / 2).mean().item() < 1.25


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (nn.Conv1d(64, 64, 5, groups=4), 16 * 5),
        (nn.Conv3d(16, 32, 3), 16 * 27),
        (nn.ConvTranspose1d(32, 64, 5), 32 * 5),
        (nn.ConvTranspose2d(32, 64, 3, groups=2), 16 * 9),
        (nn.ConvTranspose3d(8, 32, 3), 8 * 27),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_ibp_init_counts_the_inputs_of_each_output(layer, fan_in):
    ibp_init_(nn.Sequential(layer, nn.Flatten(), nn.Linear(2, 2)))
    assert_drawn_from(layer.weight, math.sqrt(2 * math.pi) / fan_in)


def test_ibp_init_draws_everything_where_no_layer_is_linear():
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1))
    ibp_init_(model)
    assert_drawn_from(model[2].weight, math.sqrt(2 * math.pi) / 64)


def test_ibp_init_halves_weights_that_read_a_residual_sum():
    model = ibp_init_(small_resnet((3, 8, 8), width=16))
    stem, first, second, third = model[0], model[3], model[5], model[7]
    for layer, fan_in in [
        (stem, 27),
        (first.branch[0], 144),  # reads the stem, not a sum
        (first.branch[3], 144),
        (second.branch[3], 288),
        (third.branch[3], 576),
    ]:
        assert_drawn_from(layer.weight, math.sqrt(2 * math.pi) / fan_in)
    for layer, fan_in in [
        (second.branch[0], 144),
        (second.shortcut[0], 16),
        (third.branch[0], 288),
        (third.shortcut[0], 32),
    ]:
        assert_drawn_from(layer.weight, math.sqrt(2 * math.pi) / fan_in / 2)


class Adder(nn.Module):
    """A user's model that adds in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.inner = nn.Sequential(Residual(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.second(inputs + self.first(inputs))))


def test_ibp_init_halves_what_the_caller_names_and_finds_sums_inside_other_modules():
    model = Adder()
    ibp_init_(model, after_add=[model.second])
    whole = math.sqrt(2 * math.pi) / 64
    assert_drawn_from(model.first.weight, whole)
    assert_drawn_from(model.second.weight, whole / 2)
    assert_drawn_from(model.inner[0].branch.weight, whole)
    assert_drawn_from(model.inner[2].weight, whole / 2)


def test_ibp_init_does_not_carry_a_sum_across_a_module_of_unknown_inside():
    inner = Adder()
    model = nn.Sequential(Residual(nn.Linear(64, 64)), inner, nn.Linear(2, 2))
    ibp_init_(model)
    assert_drawn_from(inner.first.weight, math.sqrt(2 * math.pi) / 64)


def test_ibp_init_repeats_with_a_generator():
    first, second = (
        ibp_init_(mlp(8, [8], 2), generator=torch.Generator().manual_seed(5)) for _ in "ab"
    )
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[3].weight, second[3].weight)  # untouched: PyTorch's two draws


def test_ibp_init_refuses_layers_that_are_not_the_models():
    with pytest.raises(InvalidInput, match=r"`after_add` must hold .* layers of `model`; got ReLU"):
        ibp_init_(mlp(4, [4], 2), after_add=[nn.ReLU()])


def test_ibp_init_refuses_weights_without_a_shape():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(InvalidInput, match="`model` must be initialised; got a weight without"):
        ibp_init_(model)


def test_ibp_init_refuses_parametrised_weights_before_it_draws():
    model = mlp(4, [4, 4], 2)
    weight_norm(model[3])
    before = model[1].weight.clone()
    with pytest.raises(InvalidInput, match="`model` must have plain weights; got a parametrised"):
        ibp_init_(model)
    assert torch.equal(model[1].weight, before)
