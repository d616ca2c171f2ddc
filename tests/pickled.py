"""Pickles as Python 2 wrote them: protocol 2, strings as bytes, arrays by `_reconstruct`."""

import struct
from typing import Literal

import numpy as np

START, STOP = b"\x80\x02", b"."


def string(value: bytes) -> bytes:
    if len(value) < 256:
        return b"U" + bytes([len(value)]) + value
    return b"T" + struct.pack("<i", len(value)) + value


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return (
        b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
    )


def items(values: list[bytes]) -> bytes:
    """A list of values that are already pickled."""
    return b"](" + b"".join(values) + b"e"


def array(value: np.ndarray) -> bytes:
    order: Literal["F", "C"] = "F" if value.flags.fnc else "C"
    shape = b"(" + b"".join(integer(n) for n in value.shape) + b"t"
    state = (
        b"("
        + integer(1)
        + shape
        # dtype('u1'), its own state, and the memo used as Python 2 did.
        + b"cnumpy\ndtype\nq\x07("
        + string(b"u1")
        + integer(0)
        + integer(1)
        + b"tq\x08Rq\x09"
        + b"("
        + integer(3)
        + string(b"|")
        + b"NNN"
        + integer(-1)
        + integer(-1)
        + integer(0)
        + b"tb"
        + (b"\x88" if order == "F" else b"\x89")
        + string(value.tobytes(order))
        + b"t"
    )
    start = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02"
    return start + integer(0) + b"\x85" + string(b"b") + b"\x87Rq\x06" + state + b"b"


def dictionary(entries: dict[bytes, bytes]) -> bytes:
    body = b"".join(string(key) + value for key, value in entries.items())
    return b"}q\x00(" + body + b"u"


def batch(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch of CIFAR-10 in the pickled version."""
    entries = {
        b"batch_label": string(b"training batch 1 of 5"),
        b"labels": items([integer(label) for label in labels]),
        b"data": array(images),
        b"filenames": items([string(b"picture_%d.png" % i) for i in range(len(labels))]),
    }
    return START + dictionary(entries) + STOP
