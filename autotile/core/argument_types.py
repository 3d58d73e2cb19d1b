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
    holds, expected = _expectation(hint)
    if holds(value):
        return
    try:
        text = repr(value)
    except Exception:
        text = type_text(type(value))
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    raise InputError(f"{name} is {shown}, expected {expected}")


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


_PLAIN: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((None, types.NoneType), (lambda value: value is None, "None")),
    bool: (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    float: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    collections.abc.Callable: (callable, "a function"),
}
"""Test and words of the hints that consist of nothing else."""


@functools.cache
def _expectation(hint: Any) -> tuple[Callable[[Any], bool], str]:
    """Return the test of a hint, and what it expects: ``"a whole number of at least 1 and at most 9 or None"``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        test, words = _expectation(inner[0])
        (bounds,) = (one for one in inner if isinstance(one, msgspec.Meta))
        least, most = bounds.ge, bounds.le
        limits = [f"at {word} {limit:,}" for word, limit in (("least", least), ("most", most)) if limit is not None]
        words = bounds.description or " of ".join(filter(None, (words, " and ".join(limits))))
        return lambda v: test(v) and (least is None or v >= least) and (most is None or v <= most), words
    if origin in (Union, types.UnionType):
        tests, words_of_each = zip(*map(_expectation, inner), strict=True)
        *first, last = dict.fromkeys(words_of_each)
        return lambda value: any(test(value) for test in tests), " or ".join(filter(None, (", ".join(first), last)))
    if origin is Literal:
        words = " or ".join(map(repr, inner))
        return lambda value: any(isinstance(value, type(one)) and value == one for one in inner), words
    known = origin or hint
    if known in _PLAIN:
        return _PLAIN[known]
    if known is Any or not isinstance(known, type):
        return lambda value: True, ""
    if issubclass(known, os.PathLike):
        return lambda value: isinstance(value, os.PathLike), "a path"
    if issubclass(known, Mapping):
        words = "a mapping by name"
        return lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value), words
    if not (inner and issubclass(known, Iterable)):
        return lambda value: isinstance(value, known), type_text(known)
    is_fixed = known is tuple and inner[-1] is not Ellipsis
    each = [_expectation(one) for one in (inner if is_fixed else inner[:1])]
    words = f"a tuple of {' and '.join(words for _, words in each)}" if is_fixed else "a list"
    further = f", each {each[0][1]}" if each[0][1] and not is_fixed else ""

    def holds(value: object) -> bool:
        if isinstance(value, list | tuple):
            tests = each if is_fixed else each * len(value)
            return len(tests) == len(value) and all(test(one) for (test, _), one in zip(tests, value, strict=True))
        is_one = isinstance(value, str | bytes | Mapping)
        return isinstance(value, Iterable if known is Iterable else Sequence) and not is_one

    return holds, words + further
