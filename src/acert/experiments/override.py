"""Changes to an experiment by the name of a field: what `--set name=value` does.

>>> from acert.experiments.recipes import mnist_acert
>>> override(mnist_acert(), "settings.max_radius", "8/255").settings.max_radius
0.03137254901960784
>>> override(mnist_acert(), "radius_schedule", "FullRadius").settings.radius_schedule
FullRadius()
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from inspect import isabstract
from types import NoneType, UnionType
from typing import Any

from acert.errors import InvalidInput
from acert.experiments.experiment import Experiment, needed_fields
from acert.fields import check_fields
from acert.methods import METHODS, method_name

__all__ = ["field_names", "nearest", "number", "override"]

_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def override(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with one field changed; unknown names are refused with the nearest one.

    `name` is a path such as `settings.method.kappa`, or its end where only one field ends so
    (`kappa`). A string is read as the field's type asks: numbers may be fractions (8/255),
    tuples are separated by commas, `none` is None, and a field that holds a value such as a
    schedule takes the name of its class (`FullRadius`, `StepDecay(epochs=(60, 70))`): what it has
    in common with the value before, and is not given, stays (not the kappa of standard training).
    Anything but a string is taken as it is.
    """
    path = _resolved(experiment, name)
    return typing.cast(Experiment, _replaced(experiment, path.split("."), path, value))


def field_names(experiment: Experiment) -> dict[str, Any]:
    """Every field of the experiment by its path, with its value; the outer ones come first."""
    return dict(_fields(experiment, ""))


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the name most like this one; empty if none is like it."""
    plain = {known.lower(): known for known in names}
    found = get_close_matches(name.lower(), plain, n=1)
    return f"; did you mean {plain[found[0]]!r}?" if found else ""


def number(text: str) -> float:
    """The number a text stands for: `0.1`, `1e-3` or a fraction, `8/255`."""
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError):
        raise InvalidInput(f"a number is needed, such as 0.1 or 8/255; got {text!r}") from None


def _fields(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for entry in fields(value):
        inner = getattr(value, entry.name)
        yield prefix + entry.name, inner
        if is_dataclass(inner):
            yield from _fields(inner, f"{prefix}{entry.name}.")


def _resolved(experiment: Experiment, name: str) -> str:
    """The full path of a field from its path or the end of it."""
    paths = list(field_names(experiment))
    if name in paths:
        return name
    found = [path for path in paths if path.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInput(f"`{name}` may be {' or '.join(found)}: write one of them out")
    owners = [
        method
        for method, cls in METHODS.items()
        if any(f".settings.method.{path}".endswith(f".{name}") for path, _ in _fields(cls(), ""))
    ]
    if owners:
        raise InvalidInput(
            f"{name!r} is no field of the recipe of {method_name(experiment.settings.method)}, "
            f"only of {', '.join(owners)}"
        )
    ends = [path.rpartition(".")[2] for path in paths]
    raise InvalidInput(f"{name!r} is no field of the recipe{nearest(name, [*paths, *ends])}")


def _replaced(owner: Any, names: list[str], path: str, value: Any) -> Any:
    name, *rest = names
    if rest:
        value = _replaced(getattr(owner, name), rest, path, value)
    elif isinstance(value, str):
        kind = typing.get_type_hints(type(owner))[name]
        value = _parsed(value, kind, path, before=getattr(owner, name))
    return replace(owner, **{name: value})


def _parsed(text: str, kind: Any, path: str, before: Any = None) -> Any:
    """The value that a text stands for in a field of this type, which holds `before`."""
    inner = [part for part in typing.get_args(kind) if part is not NoneType]
    if isinstance(kind, UnionType):
        return None if text.lower() == "none" else _parsed(text, inner[0], path, before)
    if typing.get_origin(kind) is tuple:
        parts = [part for part in text.strip("()").split(",") if part.strip()]
        if Ellipsis not in inner and len(parts) != len(inner):
            raise InvalidInput(f"`{path}` must be {len(inner)} values; got {text!r}")
        return tuple(_parsed(part.strip(), inner[0], path) for part in parts)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise InvalidInput(f"`{path}` must be true or false; got {text!r}")
        return _TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return int(text) if kind is int else number(text)
        except ValueError:
            word = "a whole number" if kind is int else "a number such as 0.1 or 8/255"
            raise InvalidInput(f"`{path}` must be {word}; got {text!r}") from None
    return _value(text, kind, path, before)


def _value(text: str, kind: type, path: str, before: Any) -> Any:
    """A value such as a schedule, from `Name` or `Name(field=1, ...)`; nothing is executed."""
    choices = {cls.__name__: cls for cls in _kinds(kind)}
    try:
        tree = ast.parse(text, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else text
    except SyntaxError:
        name, call = text, ast.Call(ast.Name(text), [], [])
    if name not in choices:
        raise InvalidInput(
            f"`{path}` must be one of {', '.join(sorted(choices))}; got {text!r}"
            f"{nearest(name, choices)}"
        )
    cls = choices[name]
    known = [entry.name for entry in fields(cls)]
    kept = {} if before is None else _shared(before, cls)
    words = {word.arg for word in call.keywords}
    once = len(words) == len(call.keywords) and not call.args
    if not once or not words <= {*known} or not {*needed_fields(cls)} <= {*words, *kept}:
        raise InvalidInput(
            f"`{path}` must be written as {name}({', '.join(f'{word}=...' for word in known)}); "
            f"got {text!r}"
        )
    given = {str(word.arg): _plain(word, path) for word in call.keywords}
    check_fields(cls, given)
    return cls(**{**kept, **given})


def _kinds(kind: type) -> list[type]:
    """A class and those below it, but for what several have in common alone."""
    below: list[type] = kind.__subclasses__()
    own = [] if isabstract(kind) else [kind]
    return own + [each for one in below for each in _kinds(one)]


def _plain(word: ast.keyword, path: str) -> Any:
    """What brackets give a field: a number, which may be a fraction, text or a tuple."""
    text = ast.unparse(word.value)
    try:
        return ast.literal_eval(word.value)
    except (TypeError, ValueError):
        pass
    try:
        return number(text)
    except InvalidInput:
        raise InvalidInput(
            f"`{path}` must have plain values such as 2, 8/255 or (60, 70) in brackets; got "
            f"{word.arg}={text}. What is no plain value has a name of its own: "
            f"{path}.{word.arg}={text}"
        ) from None


def _shared(before: Any, cls: type) -> dict[str, Any]:
    """The fields of a value that mean the same in `cls`, as they are.

    Another default says another meaning: standard training has kappa 1 by definition.
    """
    defaults = {entry.name: entry.default for entry in fields(before)}
    return {
        entry.name: getattr(before, entry.name)
        for entry in fields(cls)
        if entry.name in defaults and defaults[entry.name] == entry.default
    }
