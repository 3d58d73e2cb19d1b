"""Output of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from textwrap import wrap
from typing import IO, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from autotile.cli.tables import Trimmed
from autotile.database.paths import masked_message
from autotile.errors import AutotileError

Result = TypeVar("Result")

NOTHING_FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""

_EXAMPLE_WIDTH = 70
"""Characters of an example, so that it fits in 80 columns with its indent and a backslash."""

_UNLIMITED_WIDTH = 10_000
"""Width in characters if the stream is no terminal: a line that a script reads is not wrapped."""


class CommandInterruptedError(AutotileError):
    """Ctrl-C ended a command before it had a result; the message states what is kept."""


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
        Functions that render it; only the one that is needed is called.
    as_json
        Whether to print the document.
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
    """Print a remark for the user on standard error, unless it is empty."""
    if text:
        _print_remark(Text(text, style="dim"))


def show_error(message: str, kind: str, *, as_json: bool) -> None:
    """Print an error on standard error, and with ``as_json`` as a document on standard output, too."""
    message = masked_message(message)  # a URL may stand in any argument, such as in place of a kernel
    _print_remark(Text.assemble(("error: ", "bold red"), message))
    if as_json:
        print_json({"error": {"kind": kind, "message": message}})


def _print_remark(text: Text) -> None:
    """Print a text on standard error, wrapped between words on a terminal only."""
    console(sys.stderr).print(text, soft_wrap=not sys.stderr.isatty())


def console(stream: IO[str]) -> Console:
    """Return a console that prints text as it is, without markup, emoji codes or highlighting."""
    width = None if stream.isatty() else _UNLIMITED_WIDTH
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


def examples(*lines: str) -> str:
    """Return the end of a command's help: command lines to copy, with long ones continued by a backslash."""
    broken = (" \\\n      ".join(wrap(line, _EXAMPLE_WIDTH, break_on_hyphens=False)) for line in lines)
    return "\n".join(["Examples:", *(f"  {line}" for line in broken)])


def help_without_command(context: typer.Context) -> None:
    """Print the help of a group if none of its commands is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
