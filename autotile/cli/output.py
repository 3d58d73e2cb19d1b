"""Output of commands: results on standard output, laid out for the terminal, everything else on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from autotile.core.documents import encode_json
from autotile.core.text import NOTHING, RIGHT, Result, plain_heading, plural, shown_text
from autotile.database.paths import masked_message
from autotile.errors import AutotileError, DataWarning, InputError

if TYPE_CHECKING:
    from autotile.exchange.column_table import ColumnTable

NOTHING_FOUND = 1
BAD_INPUT = 2
SLOWER = 3
"""A candidate that is right, but slower than the winner; or a problem that is slower than in another database."""
UNEXPECTED = 70
"""``EX_SOFTWARE`` of sysexits.h: an internal error."""
INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""

_EXAMPLE_WIDTH = 70
"""Characters of an example, so that it fits in 80 columns with its indent and a backslash."""

_UNLIMITED_WIDTH = 10_000
"""Width in characters if the stream is no terminal: a line that a script reads is not wrapped."""


class CommandInterruptedError(AutotileError):
    """Ctrl-C ended a command before it had a result; the message states what is kept."""


def _answer(write: Callable[[], object]) -> bool:
    """Call a function that writes to standard output; end the process if that is a file on a full disk, for example.

    A closed pipe is none: who reads the answer, such as ``head``, has seen enough. False is returned then, and whatever
    else is written is discarded.
    """
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)  # Python would write it again at exit
        return False
    except OSError as error:
        sys.exit(unwritten(f"{error.strerror}: the answer cannot be written; what was stored is kept"))
    return True


def unwritten(message: str) -> int:
    """Say on standard error why standard output cannot be written; return the exit code."""
    discard_output(sys.stdout)  # Python would write it again at exit
    show_error(message, "", as_json=False)
    return NOTHING_FOUND


def show(result: Result, *, as_json: bool) -> None:
    """Print the result of a command: its parts, or one JSON document."""
    if as_json:
        print_json(result.to_json())
        return
    screen = console(sys.stdout)
    rendered = render(result, screen)
    screen.on_broken_pipe = partial(discard_output, sys.stdout)  # type: ignore[method-assign]  # Rich would exit
    _answer(lambda: print_trimmed(screen, rendered))


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print_line(encode_json(document, indent=2))


def print_line(text: str) -> bool:
    """Print a text as the answer of a command; return False if nobody reads it any more."""
    return _answer(lambda: print(text))


STANDARD_OUTPUT = "-"
"""Name of a file that stands for standard output."""


def write_table_file(file: str, columns: ColumnTable, row: str, *, as_parquet: bool = False) -> None:
    """Write a table to a file as CSV or Parquet, with a remark that says so, or as CSV to standard output.

    ``row`` is a word for one of its rows. It is an `InputError` if the file cannot be written, and a `ToolchainError`
    if pyarrow is not installed.
    """
    from io import TextIOWrapper

    from autotile.database.paths import atomic_write
    from autotile.settings import output_path

    if file == STANDARD_OUTPUT:
        if as_parquet:
            raise InputError("Parquet is not written to standard output; name a file")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have every character
        _answer(lambda: columns.write_csv(sys.stdout))
        return
    path = output_path(file)
    try:
        with atomic_write(path) as stream:
            if as_parquet:
                columns.write_parquet(stream)
            else:
                text = TextIOWrapper(stream, "utf-8", newline="", write_through=True)
                columns.write_csv(text)
                text.detach()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None
    notice(f"wrote {plural(len(columns), row)} to {path}")


def notice(text: str) -> None:
    """Print a remark for the user on standard error, unless it is empty."""
    if text:
        _print_remark(Text(shown_text(text, lines=True), style="dim"))


def show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Print a warning as a remark on standard error; stands in for `warnings.showwarning`."""
    notice(f"{'' if issubclass(category, DataWarning) else f'{category.__name__}: '}{message}")


def show_error(message: str, kind: str, *, as_json: bool, rescued: str = "") -> None:
    """Print an error on standard error, and with ``as_json`` as a document on standard output, too.

    The document states what is ``rescued``, as in `autotile.errors.RescuedRunError`.
    """
    message = masked_message(message)  # a URL may stand in any argument, such as in place of a kernel
    _print_remark(Text.assemble(("error: ", "bold red"), shown_text(message, lines=True)))
    if as_json:
        found = {"rescued": rescued} if rescued else {}
        print_json({"error": {"kind": kind, "message": message, **found}})


def _print_remark(text: Text) -> None:
    """Print a text on standard error, wrapped between words on a terminal only."""
    errors = error_console()
    errors.print(text, soft_wrap=not errors.is_terminal)


class _OptionalStream:
    """A text stream that may fail: after the first error, what is written to it is discarded.

    Rich ends the process if a pipe is broken; progress and remarks are not worth a session. The stream is None if the
    process has none.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, write: Callable[[IO[str]], object]) -> None:
        if (stream := self._stream) is not None:
            try:
                write(stream)
            except (OSError, ValueError):
                self._stream = None
                with contextlib.suppress(OSError, ValueError):
                    discard_output(stream)  # Python would write the buffer again at exit, and fail with exit code 120


def discard_output(stream: IO[str]) -> None:
    """Redirect the descriptor of a stream to the null device; an `OSError` or `ValueError` if it has none."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


def error_console() -> Console:
    """Return a console of standard error, which discards what cannot be written."""
    return console(cast("IO[str]", _OptionalStream(sys.stderr)))


def replace_closed_streams() -> None:
    """Open the standard streams that this process was started without.

    Otherwise the next file that is opened, such as the database, would be standard output or error to any library that
    writes there. Input is empty, errors are discarded, and writing the answer fails.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)  # takes the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


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
        _answer(lambda: typer.echo(context.get_help()))
        raise typer.Exit


COLUMN_GAP = 3
"""Characters between two columns of a table: two of padding and one of the divider."""


def print_trimmed(console: Console, renderable: RenderableType) -> None:
    """Print without the trailing spaces that fill lines up to the width of the table or of the terminal.

    Characters that a terminal would act upon are escaped.
    """
    trimmed: list[Segment] = []
    for rendered in Segment.split_lines(console.render(renderable)):
        line = [segment._replace(text=shown_text(segment.text)) for segment in rendered if not segment.control]
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            last = line.pop()
            trimmed += [*line, Segment(last.text.rstrip(), last.style)]
        trimmed.append(Segment.line())
    console.print(Segments(trimmed))


def table(*headings: str, wrap: bool = True) -> Table:
    """Return an empty table with a thin line under its headings, of which the prefix `RIGHT` aligns a column there.

    Texts that are too long are wrapped or cut; figures never are.
    """
    empty = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        figures = heading.startswith(RIGHT)
        empty.add_column(
            plain_heading(heading),
            justify="right" if figures else "left",
            no_wrap=figures or not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    return empty


def render(result: Result, console: Console) -> RenderableType:
    """Render the heading and the parts of a result, as wide as a console."""
    parts: list[RenderableType] = []
    for part in result._parts():
        if isinstance(part, str):
            shown: RenderableType = Text(shown_text(part, lines=True))
        elif isinstance(part, list):
            shown = facts((label, text if isinstance(text, str) else lines(text)) for label, text in part)
        else:
            if part.is_wrapped:
                shown = table(*part.headings)
                for index, row in enumerate(part.rows):
                    cells = (shown_text(cell, lines=True) for cell in row)
                    shown.add_row(*cells, style=(part.styles[index] or None) if part.styles else None)
            else:
                shown = listing(console, part.headings, part.rows, part.movable)
            if part.caption:
                shown = Group(Text(shown_text(part.caption)), shown)
        parts.append(Padding(shown, (1, 0, 0, 0), expand=False) if parts else shown)
    if heading := result._heading():
        parts.insert(0, Padding(Text(shown_text(heading), style="bold"), (0, 0, 1, 0), expand=False))
    return Group(*parts)


def facts(rows: Iterable[tuple[str, RenderableType]], *, min_label_width: int = 0) -> Table:
    """Return labels, at least so many characters wide, with their values; one of several lines comes from `lines`."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=min_label_width)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(shown_text(label), shown_text(value, lines=True) if isinstance(value, str) else value)
    return grid


def lines(texts: Iterable[str]) -> RenderableType:
    """Return texts below one another; the wrapped lines of a text keep its indentation."""
    bare = [(shown_text(text.lstrip()), len(text) - len(text.lstrip())) for text in texts]
    return Group(*(Padding(Text(text, overflow="fold"), (0, 0, 0, indent), expand=False) for text, indent in bare))


_HEADING_LINES = 2
"""Headings, and the line under them."""
_INDENT = 2


def listing(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], movable: Sequence[str] = ()
) -> RenderableType:
    """Return a table that wraps no text: columns that do not fit move to lines of their own under each row.

    The ``movable`` ones move first, in this order, then the others from the right; the first column never moves.
    """
    names, shown = list(map(plain_heading, headings)), [tuple(map(shown_text, row)) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *shown, strict=True)]
    kept = list(range(len(widths)))
    first = [names.index(name) for name in movable if name in names]
    for index in first + [index for index in reversed(range(1, len(names))) if index not in first]:
        if sum(widths[column] for column in kept) + COLUMN_GAP * (len(kept) - 1) <= console.width:
            break
        kept.remove(index)
    filled = table(*(headings[index] for index in kept), wrap=False)
    for row in shown:
        filled.add_row(*(row[index] for index in kept))
    moved = [index for index in range(len(names)) if index not in kept]
    label_width = max((len(names[index]) for index in moved), default=0)
    parts: list[RenderableType] = []
    lines = console.render_lines(filled, pad=False)
    for number, line in enumerate(lines, start=-_HEADING_LINES):
        parts.append(Segments([*line, Segment.line()]))
        details = [(names[index], shown[number][index]) for index in moved] if number >= 0 else []
        if details := [(name, text) for name, text in details if text not in ("", NOTHING)]:
            parts.append(Padding(facts(details, min_label_width=label_width), (0, 0, 0, _INDENT), expand=False))
    return Group(*parts)
