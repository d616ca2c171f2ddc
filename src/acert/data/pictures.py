"""Image files as uint8 arrays, by Pillow: nothing is decoded before its header is judged."""

import io
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from acert.errors import DataError
from acert.extras import needs
from acert.untrusted import size_limit

__all__ = ["Form", "decode", "form_of"]

# Modes that hold 8 bits a channel and no transparency. A palette of colours becomes RGB.
_CHANNELS = {"L": 1, "RGB": 3, "P": 3}
# A pixel takes some bytes, more than once; with 4 GiB allowed this is Pillow's own limit.
_PIXEL_SHARE = 48
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "WEBP")


@dataclass(frozen=True)
class Form:
    """Size and channels of an image."""

    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        colour = "grey" if self.channels == 1 else "colour"
        return f"{self.width} x {self.height} in {colour}"


def form_of(content: bytes, *, source: Path | str) -> Form:
    """Size and channels that the image's header declares."""
    return _form(_opened(content, source, _FORMATS), source)


def decode(
    content: bytes,
    *,
    form: Form,
    source: Path | str,
    formats: Sequence[str] = _FORMATS,
    grey_as_colour: bool = False,
) -> npt.NDArray[np.uint8]:
    """The image, (channels, height, width); one of another form than `form` is refused.

    With `grey_as_colour`, a grey image may stand where colour is asked for.
    """
    image = _opened(content, source, formats)
    found = _form(image, source)
    if grey_as_colour:
        found = Form(form.channels, found.height, found.width)
    if found != form:
        raise DataError(f"{source} is {found}, the others are {form}")
    try:
        pixels = np.asarray(image.convert("L" if form.channels == 1 else "RGB"))
    # Pillow has no error of its own for damaged content.
    except (OSError, ValueError, SyntaxError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is damaged: {error}") from error
    return pixels.reshape(form.height, form.width, form.channels).transpose(2, 0, 1)


def _opened(content: bytes, source: Path | str, formats: Sequence[str]) -> Any:
    pillow: Any = _pillow()
    before, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, size_limit() // _PIXEL_SHARE
    try:
        with warnings.catch_warnings():
            # Pillow only warns of the smaller of the images that are too large.
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            return pillow.open(io.BytesIO(content), formats=list(formats))
    except (
        OSError,
        ValueError,
        SyntaxError,
        pillow.DecompressionBombError,
        pillow.DecompressionBombWarning,
    ) as error:
        detail = str(error).split(" <")[0]
        if isinstance(error, (pillow.DecompressionBombError, pillow.DecompressionBombWarning)):
            detail = (
                f"it declares more than {pillow.MAX_IMAGE_PIXELS} pixels; raise "
                f"ACERT_MAX_BYTES, {size_limit()} now, if you trust it"
            )
        raise DataError(f"{source} is not a readable image: {detail}") from error
    finally:
        pillow.MAX_IMAGE_PIXELS = before


def _form(image: Any, source: Path | str) -> Form:
    if image.mode not in _CHANNELS or "transparency" in image.info:
        raise DataError(f"{source} must be 8-bit grey or RGB without transparency; is {image.mode}")
    # Pillow would drop half of the bits, or all images but the first, without a word.
    if _is_deep(image):
        raise DataError(f"{source} must be 8-bit grey or RGB; is RGB with 16 bits a channel")
    if getattr(image, "n_frames", 1) > 1:
        raise DataError(f"{source} must be a single image; is an animation of {image.n_frames}")
    width, height = image.size
    return Form(_CHANNELS[image.mode], height, width)


def _is_deep(image: Any) -> bool:
    """Whether the colours of a PNG or a PPM have more than 8 bits, which its mode does not tell."""
    coding = image.tile[0][3] if image.tile else None
    if image.format == "PPM" and isinstance(coding, tuple):
        return bool(coding[1] > 255)
    return image.format == "PNG" and coding == "RGB;16B"


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading image files {needs('PIL')}") from None
    return Image
