"""Models with norms and attention from end to end: certified, attacked inside, trained."""

import copy
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acert


class NormedBlock(nn.Module):
    """A residual block whose convolutions are followed by group norm."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.before, self.after = (nn.GroupNorm(2, channels) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.after(self.second(F.relu(self.before(self.first(x))))))


def group_norm_resnet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.PReLU(8), NormedBlock(8),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


class VisionTransformer(nn.Module):
    """Sixteen patches of 2 x 2 pixels, one block of attention and one of GELU, the mean, a head."""

    def __init__(self, *, fused, width=16, heads=2):
        super().__init__()
        self.fused, self.heads = fused, heads
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.1 * torch.randn(1, 16, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 4)

    def attention(self, x):
        batch, places, _ = x.shape
        parts = self.projection(x).reshape(batch, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
            mixed = torch.matmul(scores.softmax(-1), value)
        return self.output(mixed.transpose(1, 2).reshape(batch, places, -1))

    def forward(self, x):
        x = x.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.patches(x) + self.places
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))


class EncoderTransformer(nn.Module):
    """The same patches through PyTorch's own encoder."""

    def __init__(self, *, width=16, layers=1, norm_first=True):
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.1 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 32, dropout=0.0, activation="gelu", norm_first=norm_first, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = x.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        return self.head(self.encoder(self.patches(x) + self.places).mean(1))


MODELS = {
    "group norm": group_norm_resnet,
    "attention": lambda: VisionTransformer(fused=False),
    "fused attention": lambda: VisionTransformer(fused=True),
    "encoder": EncoderTransformer,
}


def samples(count):
    """Noisy copies of four images."""
    labels = torch.arange(count) % 4
    return 0.7 * torch.rand(4, 1, 8, 8)[labels] + 0.3 * torch.rand(count, 1, 8, 8), labels


def flips(model, images, labels, radius, *, steps=20):
    """How many predictions signed gradient steps inside the radius change, in both precisions."""
    found = 0
    for dtype in (torch.float32, torch.float64):
        network = copy.deepcopy(model).to(dtype)
        center, reach = images.to(dtype), radius.to(dtype)
        reach = reach.reshape(-1, *[1] * (images.ndim - 1))
        lower, upper = (center - reach).clamp(0, 1), (center + reach).clamp(0, 1)
        points = lower + (upper - lower) * torch.rand_like(lower).round()
        for step in range(steps):
            points.requires_grad_()
            logits = network(points)
            found += int((logits.argmax(1) != labels).sum())
            (gradient,) = torch.autograd.grad(-F.cross_entropy(logits, labels), points)
            move = (upper - lower) * (0.5 * 0.85**step) * gradient.sign()
            points = torch.clamp(points.detach() - move, lower, upper)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_attack_inside_the_certified_radii(name):
    model = MODELS[name]().eval()
    images, _ = samples(16)
    values = {
        arithmetic: acert.certified_radius(model, images, max_radius=0.1, arithmetic=arithmetic)
        for arithmetic in ("nearest", "real", "float32")
    }
    plain, real, single = (result.value for result in values.values())
    assert bool((real > 0).all())
    assert bool((single > 0).any())
    assert bool((single <= real).all())
    torch.testing.assert_close(real, plain, rtol=1e-4, atol=0)
    for result in (values["real"], values["float32"]):
        assert flips(model, images, result.prediction, result.value) == 0


@pytest.mark.parametrize("name", MODELS)
def test_they_train_with_acert(name):
    model = MODELS[name]()
    before = copy.deepcopy(model.state_dict())
    images, labels = samples(64)
    acert.train(
        model, (images, labels), method=acert.Acert(kappa=0.5), max_radius=0.02, epochs=2,
        batch_size=16, progress=False,
    )  # fmt: skip
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert bool((acert.certified_radius(model.eval(), images, max_radius=0.02).value > 0).all())


@pytest.mark.parametrize("name", ["attention", "encoder"])
def test_a_transformer_compiles_whole(name):
    torch._dynamo.reset()
    model = MODELS[name]()
    images, labels = samples(4)

    def margins(images, radius):
        return acert.certified_margin(model, images, labels, radius)

    radius = torch.full((4,), 1e-4)
    compiled = torch.compile(margins, backend="aot_eager", fullgraph=True)(images, radius)
    torch.testing.assert_close(compiled, margins(images, radius), rtol=1e-4, atol=1e-5)


def test_the_example_learns_what_intervals_can_prove(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["transformer.py", "--epochs", "1", "--max-radius", "0.005"])
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "transformer.py"), None, "__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    methods, means = [line[-5] for line in lines], [float(line[-2]) for line in lines]
    assert methods == ["Standard", "Acert", "Standard", "Acert"]
    assert means[1] > means[0]
    assert means[3] > means[2]
