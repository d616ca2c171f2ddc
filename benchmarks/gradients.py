"""What each rounding of a number format does to the gradient of a training step.

    python benchmarks/gradients.py --data-dir data [--device cuda] [--epochs 40] [--images 18000]
    python benchmarks/gradients.py --quick          # made-up images, a small network

A network is trained with ACERT for some epochs of a shortened recipe. Then the gradient of the
robust loss, at radii that are held fixed, is computed in float32 with one kind of rounding put in
at every convolution and matrix product of the clean and of the bound pass: of inputs, of weights,
of outputs, of the gradients that come back. Noise is the relative error of a batch's gradient (root
mean square), bias that of the gradient's mean over all batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring  # noqa: E402
from benchmarks.certify import made_up  # noqa: E402

from acert import data, models  # noqa: E402
from acert.bounds import clean_pass  # noqa: E402
from acert.data import Split  # noqa: E402
from acert.experiments.recipes import recipe, with_epochs  # noqa: E402
from acert.losses import Scalars  # noqa: E402
from acert.methods import Acert  # noqa: E402
from acert.methods.base import Step  # noqa: E402
from acert.precision import float32_products  # noqa: E402
from acert.training import Batch, Trainer  # noqa: E402

Rounding = Callable[[Tensor], Tensor]
SCALE = 2.0**14  # of gradients in float16, where GradScaler starts here
PRODUCTS = (torch.conv2d, F.linear)


def tf32(x: Tensor) -> Tensor:
    """To 10 bits behind the leading one, as float32."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def float16(x: Tensor) -> Tensor:
    return x.half().float()


def scaled_float16(x: Tensor) -> Tensor:
    return (SCALE * x).half().float() / SCALE


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# What is rounded how: x, w and y are input, weight and output of a product, gx, gw and gy their
# gradients.
FORWARD: dict[str, Rounding] = {"x": float16, "w": float16, "y": float16}
BACKWARD: dict[str, Rounding] = {"gx": scaled_float16, "gw": scaled_float16, "gy": scaled_float16}
CASES: dict[str, dict[str, Rounding]] = {
    "TF32: inputs, weights, gradients of outputs": {"x": tf32, "w": tf32, "gy": tf32},
    "float16: all": FORWARD | BACKWARD,
    "float16: weights only": {"w": float16},
    "float16: inputs only": {"x": float16},
    "float16: outputs only": {"y": float16},
    "float16: all of the backward pass": BACKWARD,
    "bfloat16: all": dict.fromkeys(("x", "w", "y", "gx", "gw", "gy"), bfloat16),
}


class _Rounded(torch.autograd.Function):
    """A tensor rounded on its way forward, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Rounding | None, back: Rounding | None) -> Tensor:
        ctx.back = back
        return x.clone() if there is None else there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        return gradient if ctx.back is None else ctx.back(gradient), None, None


class RoundedProducts(TorchFunctionMode):
    """Rounds around every convolution and matrix product of tensors; intervals come apart first."""

    def __init__(self, case: dict[str, Rounding]) -> None:
        super().__init__()
        self.case = case

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in PRODUCTS or not all(isinstance(each, Tensor) for each in args[:2]):
            return func(*args, **(kwargs or {}))
        case = self.case.get
        x = _Rounded.apply(args[0], case("x"), case("gx"))  # type: ignore[no-untyped-call]
        w = _Rounded.apply(args[1], case("w"), case("gw"))  # type: ignore[no-untyped-call]
        y = func(x, w, *args[2:], **(kwargs or {}))
        return _Rounded.apply(y, case("y"), case("gy"))  # type: ignore[no-untyped-call]


def prepared(trainer: Trainer, batch: Batch) -> Step:
    """The clean pass of a batch, as a method gets it."""
    images, labels = trainer.images(batch), trainer.train.labels[batch.index]
    logits, statistics = clean_pass(trainer.model, images)
    scalars = trainer.scalars(trainer.step).to(trainer.device)
    return Step(
        model=trainer.model, images=images, labels=labels, logits=logits, statistics=statistics,
        cap=scalars[Scalars.CAP], progress=scalars[Scalars.PROGRESS], least_radius=1e-6,
        anchors=images, domain=trainer.settings.domain, elide=True, observe=False,
    )  # fmt: skip


def gradient(
    trainer: Trainer, batch: Batch, radius: Tensor, case: dict[str, Rounding] | None
) -> Tensor:
    """The gradient of the robust loss at fixed radii, as one vector."""
    trainer.optimizer.zero_grad(set_to_none=True)
    with nullcontext() if case is None else RoundedProducts(case):
        step = prepared(trainer, batch)
        worst_case = step.worst_case(step.bounds(step.images, radius))
        loss = F.cross_entropy(worst_case, step.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in trainer.parameters if p.grad is not None])


def compared(trainer: Trainer, batches: int) -> list[dict[str, Any]]:
    """Noise and bias of each case over some batches, and how far radii move."""
    method = Acert()
    size = None
    total: dict[str, Tensor] = {}
    square: dict[str, float] = dict.fromkeys(CASES, 0.0)
    moved: dict[str, list[float]] = {name: [] for name in CASES}
    norm = 0.0
    epoch = trainer.epoch
    for number, batch in enumerate(trainer.batches(epoch)):
        if number == batches:
            break
        radius = method.radius(prepared(trainer, batch))
        exact = gradient(trainer, batch, radius, None)
        size = exact if size is None else size + exact
        norm += float(exact.square().sum())
        for name, case in CASES.items():
            error = gradient(trainer, batch, radius, case) - exact
            total[name] = total[name] + error if name in total else error
            square[name] += float(error.square().sum())
            with RoundedProducts(case), torch.no_grad():
                other = method.radius(prepared(trainer, batch))
            inside = radius > 0
            change = ((other - radius)[inside] / radius[inside]).abs()
            moved[name] += change.tolist()
        print(f"batch {number + 1} of {batches}", flush=True)
    assert size is not None
    return [
        {
            "rounded": name,
            "noise_percent": 100 * (square[name] / norm) ** 0.5,
            "bias_percent": 100 * float(total[name].norm() / size.norm()),
            "radius_percent": 100 * sum(moved[name]) / max(1, len(moved[name])),
        }
        for name in CASES
    ]


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    add("--data-dir", help="where CIFAR-10 lies")
    add("--quick", action="store_true", help="made-up images in place of CIFAR-10")
    add("--images", default=18_000, type=int, help="training images, from the first on")
    add("--width", default=64, type=int, help="CNN7's; 64 is the paper's")
    add("--epochs", default=40, type=int, help="trained before, of a recipe of five times as many")
    add("--batches", default=16, type=int, help="of 128 whose gradients are compared")
    add("--out", type=Path, help="default: results/gradients-DEVICE.json")
    options = parser.parse_args(words)
    options.out = options.out or ROOT / "results" / f"gradients-{options.device.type}.json"
    return options


def main(words: list[str] | None = None) -> None:
    options = parsed(words)
    if options.quick:
        train = made_up(options.images, seed=1)
    else:
        split = data.load("cifar10", data_dir=options.data_dir).train
        train = Split(split.images[: options.images], split.labels[: options.images])
    torch.manual_seed(0)
    experiment = with_epochs(recipe("cifar10", "acert"), 5 * options.epochs)
    normalize = models.Normalize([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
    model = models.cnn7((3, 32, 32), 10, width=options.width, normalize=normalize)
    trainer = Trainer(
        models.ibp_init_(model).to(options.device), train.to(options.device), experiment.settings
    )
    for _ in range(options.epochs):
        row = trainer.run_epoch()
        print(f"epoch {row['epoch']:.0f}, loss {row['loss']:.4f}", flush=True)
    with float32_products("ieee", benchmark=False):
        rows = compared(trainer, options.batches)
    print("\n" + measuring.table(rows))
    cap = float(trainer.scalars(trainer.step)[Scalars.CAP])
    measuring.write(
        options.out,
        {
            "rows": rows, "width": options.width, "images": len(train), "epochs": options.epochs,
            "batches": options.batches, "made_up": options.quick,
            "cap_share": cap / experiment.settings.max_radius,
            "environment": measuring.facts(options.device),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
