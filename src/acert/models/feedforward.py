"""Networks without branches: the paper's CNN7 (Table 3), a small convolutional net and an MLP."""

from collections.abc import Callable, Sequence

from torch import nn

from acert.errors import InvalidInput
from acert.models.normalize import Normalize
from acert.models.validation import checked_count, checked_image_shape

__all__ = ["cnn7", "mlp", "small_cnn"]


def cnn7(
    in_shape: tuple[int, int, int] = (3, 32, 32),
    num_classes: int = 10,
    *,
    width: int = 64,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """The paper's network (Table 3): five convolutions, two linear layers, batch norm throughout.

    Widths are w, w, 2w, 2w, 2w and 8w; the paper's are those of `width=64`. The third convolution
    halves the image. Images larger than 32 pixels are halved by the fifth as well, which Table 3
    leaves out: at 64x64 the first linear layer then has 32,768 inputs, as at 32x32.

    >>> sum(parameter.numel() for parameter in cnn7().parameters())
    17192650
    """
    channels, height, image_width = checked_image_shape(in_shape, normalize)
    checked_count("num_classes", num_classes, at_least=2)
    checked_count("width", width, at_least=1)
    fifth_stride = 2 if max(height, image_width) > 32 else 1
    layers = _first(normalize)
    for out_channels, stride in (
        (width, 1),
        (width, 1),
        (2 * width, 2),
        (2 * width, 1),
        (2 * width, fifth_stride),
    ):
        layers += [
            nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        ]
        channels = out_channels
        height, image_width = _strided(height, stride), _strided(image_width, stride)
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels * height * image_width, 8 * width),
        nn.BatchNorm1d(8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, num_classes),
    )


def small_cnn(
    in_shape: tuple[int, int, int] = (1, 28, 28),
    num_classes: int = 10,
    *,
    width: int = 16,
    activation: Callable[[], nn.Module] = nn.ReLU,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """Two strided convolutions (w and 2w channels) and two linear layers (8w), no batch norm.

    >>> len(small_cnn((1, 8, 8), width=4))
    8
    """
    channels, height, image_width = checked_image_shape(in_shape, normalize)
    checked_count("num_classes", num_classes, at_least=2)
    checked_count("width", width, at_least=1)
    features = 2 * width * _strided(_strided(height, 2), 2) * _strided(_strided(image_width, 2), 2)
    return nn.Sequential(
        *_first(normalize),
        nn.Conv2d(channels, width, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(features, 8 * width),
        activation(),
        nn.Linear(8 * width, num_classes),
    )


def mlp(
    in_features: int,
    hidden: Sequence[int],
    num_classes: int,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """Linear layers of the `hidden` widths with `activation` between; images are flattened first.

    An empty `hidden` gives a linear classifier.

    >>> mlp(2, [8], 3)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=2, out_features=8, bias=True)
      (2): ReLU()
      (3): Linear(in_features=8, out_features=3, bias=True)
    )
    """
    features = checked_count("in_features", in_features, at_least=1)
    checked_count("num_classes", num_classes, at_least=2)
    if not isinstance(hidden, Sequence):
        raise InvalidInput(f"`hidden` must be a sequence of widths; got {hidden!r}")
    layers = [*_first(normalize), nn.Flatten()]
    for index, size in enumerate(hidden):
        checked_count(f"hidden[{index}]", size, at_least=1)
        layers += [nn.Linear(features, size), activation()]
        features = size
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


def _first(normalize: Normalize | None) -> list[nn.Module]:
    """The layers that come before the network proper."""
    return [] if normalize is None else [normalize]


def _strided(size: int, stride: int) -> int:
    """Side of the image behind a 3x3 convolution with padding 1."""
    return (size - 1) // stride + 1
