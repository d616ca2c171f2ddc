"""Small images as PNG files in text, without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["data_uri", "png"]

# PNG's colour types by the number of channels: grey and RGB.
_COLOUR_TYPES = {1: 0, 3: 2}


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of an image of shape (channels, height, width) with 1 or 3 channels."""
    channels, height, width = image.shape
    rows = image.transpose(1, 2, 0).reshape(height, width * channels)
    # Each row starts with its filter; 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = (("IHDR", header), ("IDAT", zlib.compress(lines.tobytes(), 9)), ("IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind.encode(), body) for kind, body in parts)


def data_uri(image: npt.NDArray[Any]) -> str:
    """The image as an address that holds its own content.

    >>> data_uri(np.zeros((1, 2, 2), np.uint8))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(kind))
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)
