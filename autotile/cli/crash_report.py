"""Reports of unforeseen exceptions: a file for whoever mends them, and one line for the user."""

from __future__ import annotations

import os
import platform
import re
import shlex
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from autotile import __version__

_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*:)(\S*)(?=@)")
"""User and password of a URL; greedy, as a password may hold any character."""
_NAMED_PASSWORD = re.compile(r"((?:password|passwd|pwd)=)([^\s&]+)", re.IGNORECASE)
_MAX_LINE = 300
"""Characters of an exception's text in the message; the report has it whole."""


def report_crash(error: BaseException, words: Sequence[str]) -> str:
    """Write a report to a new file in the temporary folder, readable by its owner only; return the error message.

    Passwords of the command line are masked, in the report and in the message.

    Parameters
    ----------
    error
        The exception.
    words
        Arguments of the command line.
    """
    passwords = set(_passwords_in(words))
    name = f"{type(error).__name__}: {error}".rstrip(": ")
    summary = _masked(" ".join(name.split()), passwords)[:_MAX_LINE]
    lines = (
        f"autotile {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: autotile {shlex.join(words)}",
        "",
        "".join(traceback.format_exception(error)),
    )
    try:
        descriptor, path = tempfile.mkstemp(prefix="autotile-report-", suffix=".txt")  # of mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_masked("\n".join(lines), passwords))
    except OSError as refused:
        return f"unexpected {summary}; no report could be written: {refused.strerror}"
    return f"unexpected {summary}; please report it with the file {path}"


def _passwords_in(words: Sequence[str]) -> Iterable[str]:
    for word in words:
        for pattern in (_URL_PASSWORD, _NAMED_PASSWORD):
            for match in pattern.finditer(word):
                yield from filter(None, (match[2], unquote(match[2])))


def _masked(text: str, passwords: Iterable[str]) -> str:
    """Replace the passwords, of URLs and by name, and those of the command line wherever they stand."""
    for pattern in (_URL_PASSWORD, _NAMED_PASSWORD):
        text = pattern.sub(r"\1***", text)
    for password in sorted(passwords, key=len, reverse=True):
        text = text.replace(password, "***")
    return text
