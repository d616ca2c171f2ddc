"""Which layers of torch.nn have bounds, by intervals and by CROWN: the lists of docs/layers.md.

    python benchmarks/layers.py

Every layer is built small, in evaluation, and gets a box around random numbers. What has no rule is
refused by name, and the page says so too.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

import acert  # noqa: E402
from acert.bounds.refusals import operation_name  # noqa: E402
from acert.bounds.table import RULES  # noqa: E402
from acert.errors import UnsupportedOperation  # noqa: E402
from acert.experiments.paper.comparison import filled  # noqa: E402

PAGE = ROOT / "docs" / "layers.md"
RADIUS = 1e-3

# Layers by the shape of one sample.
LAYERS: dict[tuple[int, ...], str] = {
    (8,): """
        Linear(8, 3); Bilinear(8, 8, 3); Identity(); Unflatten(1, (2, 4)); Dropout(); AlphaDropout()
        RNNCell(8, 3); GRUCell(8, 3); LSTMCell(8, 3); BatchNorm1d(8); SyncBatchNorm(8)
        CosineSimilarity(); PairwiseDistance()
    """,
    (4, 8): """
        Conv1d(4, 3, 2); ConvTranspose1d(4, 3, 2); MaxPool1d(2); AvgPool1d(2); LPPool1d(2, 2)
        AdaptiveAvgPool1d(2); AdaptiveMaxPool1d(2); MaxUnpool1d(2); InstanceNorm1d(4); Dropout1d()
        CircularPad1d(1); ConstantPad1d(1, 0.5); ReflectionPad1d(1); ReplicationPad1d(1)
        ZeroPad1d(1); RNN(8, 3, batch_first=True); GRU(8, 3, batch_first=True)
        LSTM(8, 3, batch_first=True); MultiheadAttention(8, 2, batch_first=True)
        TransformerEncoderLayer(8, 2, 8, batch_first=True)
        TransformerDecoderLayer(8, 2, 8, batch_first=True)
        TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 2)
        Transformer(8, 2, 1, 1, 8, batch_first=True)
    """,
    (4, 8, 8): """
        ReLU(); ReLU6(); LeakyReLU(); PReLU(); RReLU(); ELU(); SELU(); CELU(); GELU(); SiLU()
        Mish(); Sigmoid(); Tanh(); Softplus(); Softsign(); LogSigmoid(); Hardtanh(); Hardsigmoid()
        Hardswish(); Threshold(0.1, 0.0); Hardshrink(); Softshrink(); Tanhshrink(); GLU(1)
        Softmax(1); Softmax2d(); Softmin(1); LogSoftmax(1)
        Conv2d(4, 3, 2); ConvTranspose2d(4, 3, 2); MaxPool2d(2); AvgPool2d(2); LPPool2d(2, 2)
        AdaptiveAvgPool2d(2); AdaptiveMaxPool2d(2); MaxUnpool2d(2); BatchNorm2d(4)
        FractionalMaxPool2d(2, output_size=3); InstanceNorm2d(4, affine=True); GroupNorm(2, 4)
        LayerNorm(8); RMSNorm(8); LocalResponseNorm(2); CrossMapLRN2d(2); Dropout2d()
        FeatureAlphaDropout(); CircularPad2d(1); ConstantPad2d(1, 0.5); ReflectionPad2d(1)
        ReplicationPad2d(1); ZeroPad2d(1); PixelShuffle(2); PixelUnshuffle(2); ChannelShuffle(2)
        Flatten(); Unfold(2); Upsample(scale_factor=2); UpsamplingNearest2d(scale_factor=2)
        UpsamplingBilinear2d(scale_factor=2)
    """,
    (4, 4): "Fold((3, 3), (2, 2))",
    (2, 4, 4, 4): """
        Conv3d(2, 3, 2); ConvTranspose3d(2, 3, 2); MaxPool3d(2); AvgPool3d(2); LPPool3d(2, 2)
        AdaptiveAvgPool3d(2); AdaptiveMaxPool3d(2); MaxUnpool3d(2); BatchNorm3d(2)
        FractionalMaxPool3d(2, output_size=2); InstanceNorm3d(2); Dropout3d(); CircularPad3d(1)
        ConstantPad3d(1, 0.5); ReflectionPad3d(1); ReplicationPad3d(1); ZeroPad3d(1)
    """,
}
# How layers are called that take more than one tensor, or return more than one.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(
        ("Bilinear", "PairwiseDistance", "TransformerDecoder", "TransformerDecoderLayer",
         "Transformer"),
        lambda layer, x: layer(x, x),
    ),
    **dict.fromkeys(("RNN", "GRU", "LSTM", "LSTMCell"), lambda layer, x: layer(x)[0]),
    "CosineSimilarity": lambda layer, x: layer(x, torch.ones(8)),
    "MultiheadAttention": lambda layer, x: layer(x, x, x, need_weights=False)[0],
    "MaxUnpool1d": lambda layer, x: layer(*nn.functional.max_pool1d(x, 2, return_indices=True)),
    "MaxUnpool2d": lambda layer, x: layer(*nn.functional.max_pool2d(x, 2, return_indices=True)),
    "MaxUnpool3d": lambda layer, x: layer(*nn.functional.max_pool3d(x, 2, return_indices=True)),
}  # fmt: skip
# Containers, what takes indices, and classes that others are made of; losses and lazy layers go by
# their names.
OTHERS = {
    "Module", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "Container", "DataParallel", "Embedding", "EmbeddingBag", "RNNBase", "RNNCellBase",
}  # fmt: skip


class Headed(nn.Module):
    """A layer with a linear one behind it, which is where CROWN's walk starts."""

    def __init__(self, kind: str, layer: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer
        self.head = nn.Linear(self.behind(example).shape[1], 3)

    def behind(self, x: Any) -> Any:
        """What comes out of the layer, flat."""
        output = CALLS[self.kind](self.layer, x) if self.kind in CALLS else self.layer(x)
        return output.reshape(len(output), -1)

    def forward(self, x: Any) -> Any:
        return self.head(self.behind(x))


def layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, construction and sample of every layer."""
    for shape, table in LAYERS.items():
        for words in table.replace("\n", ";").split(";"):
            if words.strip():
                yield words.strip().partition("(")[0], words.strip(), shape


def unlisted() -> set[str]:
    """Classes of torch.nn that no list here has."""
    known = {name for name, _, _ in layers()} | OTHERS
    found = {name for name, kind in vars(nn).items() if isinstance(kind, type)}
    modules = {name for name in found if issubclass(getattr(nn, name), nn.Module)}
    return {
        name for name in modules - known
        if not name.startswith("Lazy") and "Loss" not in name
    }  # fmt: skip


def verdict(name: str, words: str, shape: tuple[int, ...]) -> str:
    """`both`, `intervals`, or why the layer is refused."""
    torch.manual_seed(0)
    images = torch.rand(2, *shape) + 0.1
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = Headed(name, eval(f"nn.{words}").eval(), images).eval()
        labels = torch.zeros(2, dtype=torch.long)

        def logits(bounds: str) -> Tensor:
            return acert.worst_case_logits(
                model, images, labels, RADIUS, domain=None, bounds=bounds
            )

        try:
            assert bool(logits("ibp").isfinite().all()), f"{name}: no finite bounds"
        except UnsupportedOperation as problem:
            return str(problem).partition(" (in ")[0]
        try:
            logits("crown")
        except UnsupportedOperation:
            return "intervals"
    return "both"


def functions() -> list[str]:
    """Names of all operations with a rule; methods and what overwrites go with their functions."""
    names = set()
    for function in RULES:
        name = operation_name(function).replace("torch.nn.functional.", "F.")
        place, _, last = name.replace("torch.functional.", "torch.").rpartition(".")
        last = "mm" if last == "spmm" else last  # one object under two names
        if place in ("F", "torch", "torch.linalg", "torch.special", "torch.Tensor"):
            names.add((place, last))
    plain = {last for place, last in names if place != "torch.Tensor"}
    kept = {
        f"{place}.{last}" for place, last in names
        if not last.startswith("_") and not last.endswith(("_", "_with_indices"))
        and not (place == "torch.Tensor" and last in plain)
    }  # fmt: skip
    return sorted(kept, key=str.lower)


def listed() -> dict[str, str]:
    """The lists as Markdown."""
    found = defaultdict(list)
    for each in layers():
        found[verdict(*each)].append(each[0])

    def names(of: str) -> str:
        return ", ".join(f"`{name}`" for name in sorted(found.pop(of, []), key=str.lower))

    total = sum(map(len, found.values()))
    bounded = len(found["both"]) + len(found["intervals"])
    lines = [
        f"**{bounded} of {total}** have bounds.",
        "",
        f"- By intervals and by CROWN: {names('both')}.",
        f"- By intervals: {names('intervals')}.",
        *(f"- Refused, {why}: {names(why)}." for why in sorted(found)),
    ]
    return {
        "layers": "\n".join(lines),
        "functions": ", ".join(f"`{name}`" for name in functions()) + ".",
    }


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), listed()), encoding="utf-8")


if __name__ == "__main__":
    main()
