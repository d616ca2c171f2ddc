"""Checks of the arguments that the model factories share."""

from torch import nn

from acert.errors import InvalidInput
from acert.models.normalize import Normalize

__all__ = ["checked_count", "checked_image_shape", "checked_module"]


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """`value`, refused unless it is an integer of `at_least` or more."""
    # bool is an int to Python, but a width of True is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise InvalidInput(f"`{name}` must be an integer >= {at_least}; got {value!r}")
    return value


def checked_module(name: str, value: object) -> nn.Module:
    """`value`, refused unless it is a module."""
    if not isinstance(value, nn.Module):
        raise InvalidInput(f"`{name}` must be a torch.nn.Module; got {type(value).__name__}")
    return value


def checked_image_shape(in_shape: object, normalize: Normalize | None) -> tuple[int, int, int]:
    """`in_shape` as (channels, height, width), refused unless `normalize` fits its channels."""
    if not isinstance(in_shape, tuple | list) or len(in_shape) != 3:
        raise InvalidInput(f"`in_shape` must be (channels, height, width); got {in_shape!r}")
    channels, height, width = (
        checked_count(f"in_shape[{index}]", size, at_least=1) for index, size in enumerate(in_shape)
    )
    if normalize is not None and normalize.channels not in (1, channels):
        raise InvalidInput(
            f"`normalize` must have 1 channel or the {channels} of `in_shape`; "
            f"got {normalize.channels}"
        )
    return channels, height, width
