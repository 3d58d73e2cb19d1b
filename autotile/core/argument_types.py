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

from autotile.errors import InputError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MAX_SHOWN = 80


def check_value(name: str, value: object, hint: Any) -> None:
    """Raise if a value does not match a type hint.

    Numbers of NumPy are accepted where those of Python are, a boolean is no number, any path is a `Path`, and a list is
    a tuple. Of a mapping, only the keys are checked. Raise `InputError` if the value has another type, or is out of its
    bounds.

    Parameters
    ----------
    name
        Name of the argument or the option.
    hint
        Its type hint. ``Annotated`` with a `msgspec.Meta` bounds a number; its ``description`` says what is expected.
    """
    if _matches(value, hint):
        return
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
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


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Check the arguments of a function against its type hints; decorator.

    Sizes and parameters that are given by keyword (``**``) are left to the function, which knows their names. So are
    hints that cannot be resolved, and the device, of which `autotile.api.targets` says what is expected.
    """
    return checked_except("device")(function)


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
    test = _TESTS.get(known, None if isinstance(known, type) else _TESTS[Any])
    if test is not None:
        return test(value)
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


_TESTS: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda _: True,
    None: lambda value: value is None,
    types.NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    collections.abc.Callable: callable,
}


_WORDS: Mapping[Any, str] = {
    None: "None",
    types.NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    collections.abc.Callable: "a function",
}


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
    if known in _WORDS:
        return _WORDS[known]
    if issubclass(known, os.PathLike):
        return "a path"
    if issubclass(known, Mapping):
        return "a mapping by name"
    if issubclass(known, Iterable) and inner:
        is_pair = known is tuple and inner[-1] is not Ellipsis
        return f"a tuple of {' and '.join(map(_expected, inner))}" if is_pair else f"a list, each {_expected(inner[0])}"
    return f"a {known.__name__}"
