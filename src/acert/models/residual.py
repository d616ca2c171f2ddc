"""Networks with branches: the residual sum as a layer, and a small residual network."""

from typing import final

from torch import Tensor, nn

from acert.models.normalize import Normalize
from acert.models.validation import checked_count, checked_image_shape, checked_module

__all__ = ["Residual", "small_resnet"]


@final
class Residual(nn.Module):
    """`shortcut(inputs) + branch(inputs)`; the shortcut is the identity unless given.

    The sum is a layer of its own, so that a network is a plain sequence of layers and `ibp_init_`
    sees which weights follow a sum.
    """

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = checked_module("branch", branch)
        self.shortcut = checked_module("shortcut", nn.Identity() if shortcut is None else shortcut)

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of both paths."""
        skipped: Tensor = self.shortcut(inputs)
        branched: Tensor = self.branch(inputs)
        return skipped + branched


def small_resnet(
    in_shape: tuple[int, int, int] = (3, 32, 32),
    num_classes: int = 10,
    *,
    width: int = 16,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """Residual network with batch norm: a convolution, three blocks (w, 2w, 4w), mean, linear.

    The second and third block halve the image; their shortcut is a strided 1x1 convolution.

    >>> sum(isinstance(layer, Residual) for layer in small_resnet((1, 8, 8)))
    3
    """
    channels, _, _ = checked_image_shape(in_shape, normalize)
    checked_count("num_classes", num_classes, at_least=2)
    checked_count("width", width, at_least=1)
    return nn.Sequential(
        *([] if normalize is None else [normalize]),
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _block(width, width, stride=1),
        nn.ReLU(),
        _block(width, 2 * width, stride=2),
        nn.ReLU(),
        _block(2 * width, 4 * width, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


def _block(in_channels: int, out_channels: int, *, stride: int) -> Residual:
    """Two convolutions beside a shortcut. No biases, because batch norm would take them out."""
    branch = nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
    )
    if stride == 1 and in_channels == out_channels:
        return Residual(branch)
    shortcut = nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )
    return Residual(branch, shortcut)
