"""Checks of arguments and options against their type hints, for values that a program passes."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

import msgspec
import numpy as np

from autotile.errors import InputError, type_text

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MAX_SHOWN = 80


def check_value(name: str, value: object, hint: Any) -> None:
    """Raise an `InputError` if the value of an argument or an option does not match its type hint, or its bounds.

    Numbers of NumPy are accepted where those of Python are, a boolean is no number, any path is a `Path`, and a list is
    a tuple. Of a mapping, only the keys are checked. In a hint, ``Annotated`` with a `msgspec.Meta` bounds a number;
    its ``description`` says what is expected.
    """
    if _matches(value, hint):
        return
    try:
        text = repr(value)
    except Exception:
        text = type_text(type(value))
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    raise InputError(f"{name} is {shown}, expected {_expected(hint)}")


def checked_except(*names: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return the decorator `checked` for a function that checks the named arguments itself, with words of its own."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # raises the same, from the function itself
            hints = _hints(function)
            for name, value in given.items():
                kind = signature.parameters[name].kind
                if name in hints and name not in names and kind is not inspect.Parameter.VAR_KEYWORD:
                    for one in value if kind is inspect.Parameter.VAR_POSITIONAL else (value,):
                        check_value(name, one, hints[name])
            return function(*args, **kwargs)

        return call

    return decorate


checked = checked_except("device")
"""Decorator that checks the arguments of a function against its type hints.

Sizes and parameters that are given by keyword (``**``) are left to the function, which knows their names. So are hints
that cannot be resolved, and the device, of which `autotile.api.targets` says what is expected.
"""


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    found = {}
    for name, text in function.__annotations__.items():
        try:
            found[name] = typing.get_type_hints(
                types.SimpleNamespace(__annotations__={name: text}), function.__globals__, include_extras=True
            )[name]
        except NameError:  # imported for type checking only
            continue
    return found


def _matches(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        number: Any = value
        bounds = [one for one in inner[1:] if isinstance(one, msgspec.Meta)]
        return _matches(value, inner[0]) and all(
            (one.ge is None or number >= one.ge) and (one.le is None or number <= one.le) for one in bounds
        )
    if origin in (Union, types.UnionType):
        return any(_matches(value, one) for one in inner)
    if origin is Literal:
        return any(isinstance(value, type(one)) and value == one for one in inner)
    known = origin or hint
    if known in _PLAIN:
        return _PLAIN[known][0](value)
    if known is Any or not isinstance(known, type):
        return True
    if issubclass(known, os.PathLike):
        return isinstance(value, os.PathLike)
    if issubclass(known, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if not (inner and issubclass(known, Iterable)):
        return isinstance(value, known)
    if isinstance(value, list | tuple):
        hints = inner if known is tuple and inner[-1] is not Ellipsis else inner[:1] * len(value)
        return len(hints) == len(value) and all(map(_matches, value, hints))
    is_one = isinstance(value, str | bytes | Mapping)
    return isinstance(value, Iterable if known is Iterable else Sequence) and not is_one


_PLAIN: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((None, types.NoneType), (lambda value: value is None, "None")),
    bool: (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    float: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    collections.abc.Callable: (callable, "a function"),
}
"""Test and words of the hints that consist of nothing else."""


def _expected(hint: Any) -> str:
    """Describe what matches a hint: ``"a whole number of at least 1 and at most 9 or None"``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (bounds,) = (one for one in inner if isinstance(one, msgspec.Meta))
        given = (("least", bounds.ge), ("most", bounds.le))
        limits = [f"at {word} {limit:,}" for word, limit in given if limit is not None]
        return bounds.description or " and ".join([f"{_expected(inner[0])} of {limits[0]}", *limits[1:]])
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(map(_expected, inner)))
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    known = origin or hint
    if known in _PLAIN:
        return _PLAIN[known][1]
    if issubclass(known, os.PathLike):
        return "a path"
    if issubclass(known, Mapping):
        return "a mapping by name"
    if issubclass(known, Iterable) and inner:
        is_pair = known is tuple and inner[-1] is not Ellipsis
        each = "" if inner[0] is Any else f", each {_expected(inner[0])}"
        return f"a tuple of {' and '.join(map(_expected, inner))}" if is_pair else f"a list{each}"
    return type_text(known)
