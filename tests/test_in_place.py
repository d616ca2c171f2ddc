"""Models that overwrite their input, as `x.sub_(mean).div_(std)` does: the caller's is left alone.

What is certified, attacked, trained on and written is the image that was given, not what the model
made of it.
"""

import pytest
import torch
from torch import nn

import acert
from acert import CertifiedClassifier
from acert.attack import attack_radius
from acert.bounds.propagation import evaluation_logits
from acert.data import Split
from acert.deploy import write_benchmark
from acert.evaluation import evaluate
from acert.methods import Sabr

IMAGES = 0.2 + 0.6 * torch.rand(6, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Normalises its input, in place or not."""

    def __init__(self, *, in_place):
        super().__init__()
        self.in_place = in_place
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            nn.init.normal_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = x.sub_(0.4).mul_(3.0) if self.in_place else (x - 0.4) * 3.0
        return self.head(self.norm(x))


def labels():
    with torch.no_grad():
        return Model(in_place=False).eval()(IMAGES).argmax(1)


def trained(model, images, method):
    acert.train(
        model, (images, labels()), method=method, max_radius=0.05, epochs=2, batch_size=3,
        progress=False,
    )  # fmt: skip
    return model.head.weight.detach()


def written(model, images, folder):
    folder = folder / str(model.in_place)
    write_benchmark(model.eval(), images, labels(), folder, name="model", radius=0.01)
    return [path.read_text() for path in sorted(folder.glob("vnnlib/*"))]


CALLS = {
    "radius": lambda m, x, _: acert.certified_radius(m.eval(), x, max_radius=0.2).value,
    "one radius": lambda m, x, _: acert.certified_radius(m.eval(), x[:1], max_radius=0.2).value,
    "classifier": lambda m, x, _: CertifiedClassifier(m.eval(), max_radius=0.2)(x)[2],
    "attack": lambda m, x, _: attack_radius(m, x, labels(), max_radius=0.2, steps=5).points,
    "evaluation": lambda m, x, _: evaluate(m, Split(x, labels()), max_radius=0.2),
    "clean pass": lambda m, x, _: acert.clean_pass(m, x)[0],
    "evaluation logits": lambda m, x, _: evaluation_logits(m, x),
    "training": lambda m, x, _: trained(m, x, acert.Acert()),
    "training with an attack": lambda m, x, _: trained(m, x, Sabr()),
    "properties": written,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_model_that_works_in_place_is_the_same_model(call, tmp_path):
    expected, images = call(Model(in_place=False), IMAGES.clone(), tmp_path), IMAGES.clone()
    found = call(Model(in_place=True), images, tmp_path)
    assert torch.equal(images, IMAGES)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected
