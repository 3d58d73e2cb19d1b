"""Read what was typed as ``NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Iterable

from autotile.errors import InputError, ProblemError
from autotile.kernel.problem import MAX_SIZE

_MOST_DIGITS = 18
"""More digits than any size has, few enough to fit in 64 bits."""


def read_assignments(words: Iterable[str]) -> dict[str, str]:
    """Split ``NAME=VALUE`` words.

    Raises
    ------
    InputError
        A word has no name, no value or no ``=``, or a name comes twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or not text:
            raise InputError(f"cannot read {word!r}: expected NAME=VALUE, such as M=4096")
        if name in found:
            raise InputError(f"{name} is given twice, as {found[name]} and as {text}; give it once")
        found[name] = text
    return found


def read_sizes(words: Iterable[str]) -> dict[str, int]:
    """Split and read problem sizes.

    Raises
    ------
    InputError
        As `read_assignments` and `read_size`.
    """
    return {name: read_size(name, text) for name, text in read_assignments(words).items()}


def read_size(name: str, text: str) -> int:
    """Read one size, or a flag: 0 or 1; which of them it is, the kernel knows.

    Raises
    ------
    ProblemError
        It is not a whole number.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        shown = text if len(text) <= 2 * _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        raise ProblemError(
            f"{name} is {shown!r}, expected a whole number from 1 to {MAX_SIZE}, such as {name}=4096; a flag is 0 or 1"
        )
    return int(text)
