"""What goes where: the answer to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from autotile.cli.tables import Trimmed
from autotile.report.base import Report

Result = TypeVar("Result")

_WIDE = 10_000
"""Columns where nobody looks: a line that a script reads is never broken."""


def show_report(report: Report, *, as_json: bool) -> None:
    """Print a report: as one JSON document, or as a person reads it."""
    if as_json:
        print_json(report.to_json())
    else:
        console(sys.stdout).print(Trimmed(report))
        sys.stdout.flush()


def show(
    result: Result,
    table: Callable[[Result], RenderableType],
    document: Callable[[Result], Any],
    *,
    as_json: bool,
) -> None:
    """Print the result of a command: as a table, or as one JSON document.

    Parameters
    ----------
    result
        Return value of a function of `autotile.api`.
    table, document
        The command's own renderings of it; only the one that is needed is called.
    as_json
        Print the document.
    """
    if as_json:
        print_json(document(result))
    else:
        console(sys.stdout).print(Trimmed(table(result)))
        sys.stdout.flush()


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2), flush=True)


def notice(text: str) -> None:
    """Tell the user something that is not the answer; nothing where ``text`` is empty."""
    if text:
        _tell(Text(text, style="dim"))


def show_error(message: str, kind: str, *, as_json: bool) -> None:
    """Say what went wrong; where a document is expected, as a document too."""
    _tell(Text.assemble(("error: ", "bold red"), message))
    if as_json:
        print_json({"error": {"kind": kind, "message": message}})


def _tell(text: Text) -> None:
    """Break lines between words on a terminal, and nowhere else."""
    console(sys.stderr).print(text, soft_wrap=not sys.stderr.isatty())


def console(stream: IO[str]) -> Console:
    """A console that prints text as it is: no markup, no emoji codes, no guessed colours."""
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)
