"""A reader of one pickled dictionary of strings, lists and uint8 arrays that executes nothing.

Python's own unpickler calls whatever a file names. This one walks the opcodes itself, knows
only those that a batch of CIFAR-10 is made of (protocol 2, written by Python 2), and never
imports or calls anything: the three names in the pickle of a numpy array are markers to it,
every other name is refused.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from acert.errors import DataError

__all__ = ["Plain", "loads"]

Plain = bytes | int | list[bytes | int] | npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Marker:
    """What stands for a thing on the stack that is not data."""

    name: str


@dataclass
class _Array:
    """An array that the file has announced; `value` comes with its state."""

    value: npt.NDArray[np.uint8] | None = None


_MARK, _UINT8 = _Marker("mark"), _Marker("uint8")
_RECONSTRUCT = _Marker("numpy.core.multiarray._reconstruct")
_NDARRAY, _DTYPE = _Marker("numpy.ndarray"), _Marker("numpy.dtype")
_NAMES = {marker.name: marker for marker in (_RECONSTRUCT, _NDARRAY, _DTYPE)}

# Opcode to constant, to the format of an integer or of a length, and to a number of items.
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_INTEGERS = {b"K": "<B", b"M": "<H", b"J": "<i"}
_STRINGS = {b"U": "<B", b"T": "<i"}
_PUTS = {b"q": "<B", b"r": "<I"}
_GETS = {b"h": "<B", b"j": "<I"}
_MOST_DIMENSIONS = 8
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}


def loads(content: bytes) -> dict[bytes, Plain]:
    """The pickled dictionary: strings to strings, integers, flat lists of both, uint8 arrays.

    Anything else in the file raises a DataError that names it.
    """
    try:
        return {key: _plain(value) for key, value in _Machine(content).run().items()}
    # What a malformed file leads to: an empty stack, an unknown memo, a state of another form.
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise DataError(f"the pickled data cannot be read: {error}") from error


@final
class _Machine:
    """The pickle machine: a stack and a memo, with the few opcodes that build plain values."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> dict[bytes, Any]:
        """The dictionary that the last opcode leaves on the stack."""
        if self.bytes(2) != b"\x80\x02":
            raise ValueError("it does not start as protocol 2 does")
        while (opcode := self.bytes(1)) != b".":
            self.step(opcode)
        if self.position != len(self.content):
            raise ValueError("bytes follow its end")
        (result,) = self.stack
        if not isinstance(result, dict):
            raise ValueError("it does not hold a dictionary")
        return result

    def step(self, opcode: bytes) -> None:
        """One opcode, its name in Python's `pickletools` beside it."""
        push, pop = self.stack.append, self.pop
        if opcode in _INTEGERS:  # BININT1, BININT2, BININT
            push(self.number(_INTEGERS[opcode]))
        elif opcode in _STRINGS:  # SHORT_BINSTRING, BINSTRING
            push(self.bytes(self.number(_STRINGS[opcode])))
        elif opcode in _CONSTANTS:  # NONE, NEWTRUE, NEWFALSE
            push(_CONSTANTS[opcode])
        elif opcode in _PUTS:  # BINPUT, LONG_BINPUT
            self.memo[self.number(_PUTS[opcode])] = self.stack[-1]
        elif opcode in _GETS:  # BINGET, LONG_BINGET
            push(self.memo[self.number(_GETS[opcode])])
        elif opcode == b"(":  # MARK
            push(_MARK)
        elif opcode == b"]":  # EMPTY_LIST
            push([])
        elif opcode == b"}":  # EMPTY_DICT
            push({})
        elif opcode in _TUPLES:  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
            push(tuple(reversed([pop() for _ in range(_TUPLES[opcode])])))
        elif opcode == b"t":  # TUPLE
            push(tuple(self.since_mark()))
        elif opcode == b"e":  # APPENDS
            items = self.since_mark()
            self.top(list).extend(items)
        elif opcode == b"s":  # SETITEM
            value, key = pop(), pop()
            self.set_items([key, value])
        elif opcode == b"u":  # SETITEMS
            self.set_items(self.since_mark())
        elif opcode == b"c":  # GLOBAL
            push(_named(self.line() + "." + self.line()))
        elif opcode == b"R":  # REDUCE
            arguments, name = pop(), pop()
            push(_announced(name, arguments))
        elif opcode == b"b":  # BUILD
            state = pop()
            _build(self.stack[-1], state)
        else:
            raise ValueError(f"the opcode {opcode!r} is not one that plain data needs")

    def bytes(self, count: int) -> bytes:
        """The next bytes; a count that the file does not hold takes no memory."""
        if not 0 <= count <= len(self.content) - self.position:
            raise ValueError("it is cut off")
        self.position += count
        return self.content[self.position - count : self.position]

    def number(self, form: str) -> int:
        (number,) = struct.unpack(form, self.bytes(struct.calcsize(form)))
        return int(number)

    def line(self) -> str:
        end = self.content.index(b"\n", self.position)
        line = self.bytes(end - self.position)
        self.bytes(1)
        return line.decode("ascii")

    def pop(self) -> Any:
        if self.stack[-1] is _MARK:
            raise ValueError("a value is missing from its stack")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        items = []
        while self.stack[-1] is not _MARK:
            items.append(self.stack.pop())
        self.stack.pop()
        return items[::-1]

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"items come without a {kind.__name__} to hold them")
        return self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only strings: hashing a deeply nested key would be work that the file decides on.
            if not isinstance(key, bytes):
                raise ValueError("a key of its dictionary is not a string")
            target[key] = value


def _named(name: str) -> _Marker:
    if name not in _NAMES:
        raise ValueError(f"it names {name}, which is not data")
    return _NAMES[name]


def _announced(name: Any, arguments: Any) -> _Array | _Marker:
    """What a call in the pickle of an array stands for: compared by form, never made."""
    if name is _RECONSTRUCT and arguments == (_NDARRAY, (0,), b"b"):
        return _Array()
    if name is _DTYPE and arguments == (b"u1", 0, 1):
        return _UINT8
    raise ValueError("it calls something other than a uint8 array")


def _build(target: Any, state: Any) -> None:
    """Fill an announced array from its state; the state of uint8 itself says nothing new."""
    if target is _UINT8:
        return
    if not isinstance(target, _Array):
        raise ValueError("it sets the state of something other than a uint8 array")
    version, shape, dtype, fortran, content = state
    if version != 1 or dtype is not _UINT8 or not isinstance(content, bytes):
        raise ValueError("the state of its array is not that of uint8 numbers")
    # Of few sizes: the product of millions of them would take hours.
    few = isinstance(shape, tuple) and len(shape) <= _MOST_DIMENSIONS
    if not few or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape of its array is not made of sizes")
    if math.prod(shape) != len(content):
        raise ValueError(f"its array of shape {shape} comes with {len(content)} bytes")
    target.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _plain(value: Any) -> Plain:
    if isinstance(value, _Array) and value.value is not None:
        return value.value
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, bytes | int) for item in items):
        raise ValueError("a value of its dictionary is not a string, a number or a list of them")
    result: bytes | int | list[bytes | int] = value
    return result
