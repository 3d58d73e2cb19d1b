"""Conversion of ``NAME=VALUE`` words of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotile.errors import InputError, ProblemError
from autotile.kernel.problem import MAX_SIZE

if TYPE_CHECKING:
    from autotile.core.model import Value
    from autotile.kernel.spec import KernelSpec, Parameter

_MAX_SIZE_DIGITS = 18
"""Maximum number of digits converted to a size: more than any size has, and the value fits in 64 bits."""
_MAX_VALUE_LENGTH = 7
"""Maximum number of characters converted to a parameter's integer value; longer words are none of its values."""
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def read_assignments(words: Iterable[str]) -> dict[str, str]:
    """Split ``NAME=VALUE`` words.

    Raises
    ------
    InputError
        A word has no name, no value or no ``=``, or a name is given twice.
    """
    assignments: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or not text:
            raise InputError(f"cannot read {word!r}: expected NAME=VALUE, such as M=4096")
        if name in assignments:
            raise InputError(f"{name} is given twice, as {assignments[name]} and as {text}; give it once")
        assignments[name] = text
    return assignments


def read_sizes(words: Iterable[str]) -> dict[str, int]:
    """Split ``NAME=VALUE`` words and convert the values to problem sizes.

    Raises
    ------
    InputError
        As for `read_assignments` and `read_size`.
    """
    return {name: read_size(name, text) for name, text in read_assignments(words).items()}


def read_size(name: str, text: str) -> int:
    """Convert a word to a problem size or flag.

    The range is not checked here, since only the kernel distinguishes sizes from flags.

    Raises
    ------
    ProblemError
        The word is not a decimal integer.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_SIZE_DIGITS):
        shown = text if len(text) <= 2 * _MAX_SIZE_DIGITS else f"{text[:_MAX_SIZE_DIGITS]}..."
        raise ProblemError(
            f"{name} is {shown!r}, expected a whole number from 1 to {MAX_SIZE}, such as {name}=4096; a flag is 0 or 1"
        )
    return int(text)


def read_values(spec: KernelSpec, words: Iterable[str]) -> dict[str, Value]:
    """Split ``NAME=VALUE`` words and convert the values of parameters and sizes to their types.

    A value that does not have the type of its parameter, and the value of an unknown name, remain text.

    Raises
    ------
    InputError
        As for `read_assignments` and `read_size`.
    """
    parameters = {parameter.name: parameter for parameter in spec.parameters}
    values: dict[str, Value] = {}
    for name, text in read_assignments(words).items():
        if name in parameters:
            values[name] = _read_value(parameters[name], text)
        else:
            values[name] = read_size(name, text) if name in spec.sizes else text
    return values


_REAL = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"


def _read_value(parameter: Parameter, text: str) -> Value:
    """Convert a word to the type of a parameter's values, which all have the same type."""
    own = parameter.values[0]
    if isinstance(own, bool):
        return _BOOLEANS.get(text.lower(), text)
    if isinstance(own, int) and text.removeprefix("-").isdecimal() and len(text) <= _MAX_VALUE_LENGTH:
        return int(text)
    if isinstance(own, float) and re.fullmatch(_REAL, text, re.ASCII) and len(text) <= _MAX_VALUE_LENGTH:
        return float(text)
    return text
