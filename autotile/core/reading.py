"""Bounded reading of input files: regular files only, and TOML whose keys have few parts."""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_KEY_PARTS = 16
"""Maximum number of parts of a dotted key; `tomllib` takes time and memory that grow with its square."""

_DOT = r"[ \t]*+\.[ \t]*+"
_PART = r"""(?:[A-Za-z0-9_-]++|"(?!"")(?:[^"\\\n]++|\\[^\n])*+"|'(?!'')[^'\n]*+')"""
_KEY = rf"{_PART}(?:{_DOT}{_PART}){{0,{MAX_KEY_PARTS - 1}}}+(?!{_DOT})"
_COMMENT = r"\#[^\n]*+"
_BASIC = r'''"""(?:[^"\\]++|\\.|"{1,2}(?!"))*+"{3,5}'''
_LITERAL = r"""'''(?:[^']++|'{1,2}(?!'))*+'{3,5}"""
_REST = r"""[^A-Za-z0-9_\-"'\#]++"""
_SHALLOW = rf"(?s:{_REST}|{_COMMENT}|{_BASIC}|{_LITERAL}|{_KEY})*+"
"""Longest start of a text without a dotted key of too many parts.

It follows the lexical rules of https://toml.io/en/v1.0.0. Where it ends early for another reason, such as an open
string, the text is not TOML, and `tomllib` reads it no further.
"""
_DEEP = rf"{_PART}(?:{_DOT}{_PART}){{{MAX_KEY_PARTS}}}"


class NotRegularError(OSError):
    """Input path of something other than a regular file or a folder, such as a named pipe or a device."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a named pipe or device, which could block or never end, is refused.

    Raises
    ------
    NotRegularError, IsADirectoryError
        The path is something else; ``strerror`` says what.
    OSError
        The file cannot be opened.
    """
    _check_regular(path, path.stat().st_mode)  # opening some devices has effects
    # Without O_NONBLOCK, opening a named pipe waits for a writer; it has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        stream = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with stream:
        yield stream


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises
    ------
    NotRegularError, IsADirectoryError
        As in `open_regular`.
    OSError
        The file cannot be read, or has more than ``max_bytes`` (``EFBIG``).
    """
    with open_regular(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML in time and memory proportional to its length.

    Raises
    ------
    ValueError
        The text is not TOML, a whole number has more digits than Python converts, a dotted key has more than
        `MAX_KEY_PARTS` parts, or values are nested too deeply.
    """
    if any(line.count(".") >= MAX_KEY_PARTS for line in text.split("\n")):  # else the patterns need not be compiled
        _check_dotted_keys(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the values are nested too deeply; use plain tables and lists") from None


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise NotRegularError(errno.EINVAL, f"it is a {kind}, expected a regular file", str(path))


def _check_dotted_keys(text: str) -> None:
    shallow = re.match(_SHALLOW, text)
    end = shallow.end() if shallow else 0
    if re.compile(_DEEP).match(text, end):
        line = text.count("\n", 0, end) + 1
        column = end - text.rfind("\n", 0, end)
        raise ValueError(f"a dotted key has more than {MAX_KEY_PARTS} parts (at line {line}, column {column})")
