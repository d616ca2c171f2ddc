"""Transformers on scikit-learn's digits: what intervals prove through softmax and layer norm.

    python examples/transformer.py [--epochs 15] [--max-radius 0.02]

Two small classifiers of 16 patches: PyTorch's encoder layer as it is, and attention and an MLP
without layer norm. Each is trained plainly and by ACERT, and its test set certified in float32.
docs/transformers.md has the table.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import acert
from acert import data


class Block(nn.Module):
    """Attention and an MLP around shortcuts, without norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, places, width), as it came."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Patches of 2 x 2 pixels with their places, one block, and a linear head."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.block, self.head = block, nn.Linear(16 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, 10)."""
        x = torch.relu(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        return self.head(self.block(x).flatten(1))


def encoder(width: int) -> nn.Module:
    """PyTorch's layer: dropout off, because bounds of what is random have no meaning."""
    return nn.TransformerEncoderLayer(
        width, 2, 2 * width, dropout=0.0, norm_first=True, batch_first=True
    )


def main() -> None:
    """Trains, certifies and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--max-radius", type=float, default=0.02)
    options = parser.parse_args()
    train, test = data.load("digits").train, data.load_test("digits")
    print(f"{'block':<16}{'method':<10}{'Acc':>8}{'radius > 0':>12}{'mean radius':>13}{'s':>6}")
    for build in (encoder, Block):
        for method in (acert.Standard(), acert.Acert()):
            torch.manual_seed(0)
            began = time.perf_counter()
            model = Transformer(build(16), 16)
            acert.train(
                model, (train.images, train.labels), method=method, max_radius=options.max_radius,
                epochs=options.epochs, batch_size=32, learning_rate=3e-3, progress=False,
            )  # fmt: skip
            found = acert.certified_radius(
                model.eval(), test.images, test.labels, max_radius=options.max_radius,
                arithmetic="float32",
            )  # fmt: skip
            correct = (found.prediction == test.labels).double().mean()
            some, mean = (found.value > 0).double().mean(), found.value.mean()
            print(
                f"{'encoder' if build is encoder else 'without norms':<16}"
                f"{type(method).__name__:<10}{100 * correct:8.1f}{100 * some:12.1f}{mean:13.1e}"
                f"{time.perf_counter() - began:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
