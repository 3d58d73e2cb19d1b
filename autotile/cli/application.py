"""The application: its commands in panels, their help, and errors, interrupts and exit codes of all commands."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from autotile.cli.commands import CARE, COMMANDS, add_command
from autotile.cli.derivation import fill_in_replay
from autotile.cli.output import (
    BAD_INPUT,
    INTERRUPTED,
    NOTHING_FOUND,
    UNEXPECTED,
    CommandInterruptedError,
    help_without_command,
    replace_closed_streams,
    show_error,
    show_warning,
    unwritten,
)
from autotile.database.paths import has_password, masked_message
from autotile.errors import AutotileError, DataWarning, InputError, ProblemError, RescuedRunError
from autotile.version import __version__

_RENAMED = {
    "tune-family": "tune KERNEL SIZE=A..B",
    "tune-misses": "tune --misses",
    "plan": "export --format plan",
    "survey": "space --compile",
    "occupancy": "explain --threads N",
    "measure-device": "devices --measure",
    "misses": "list --misses",
    "check": "verify NEW.cu --like KERNEL",
    "record": "export --format recording --measure",
    "bundle": "export --format bundle",
    "diff": "db diff",
    "merge": "db merge",
    "clean": "db clean",
    "plot": "report",
}
"""Commands of earlier versions, and those that do the same."""


@cache
def made_command(name: str) -> TyperCommand | TyperGroup:
    """Return a command, made at the first call."""
    part = typer.Typer()
    add_command(part, name)
    command: Any = get_group(part).commands[name]
    command.rich_help_panel = COMMANDS[name].panel if name in COMMANDS else CARE
    lay_out_help(command)
    return command  # type: ignore[no-any-return]


_DIGITS = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)


def _prepare(parameters: Iterable[Any]) -> None:
    """Convert plain words without Pydantic, which takes longer to load than Python; Typer does so with all others.

    The help shows no type of flags and arguments: ``<bool>`` would read as if a flag took a value.
    """

    def plain(parameter: Any, by_pydantic: Callable[[], Any], value: Any, **context: Any) -> Any:
        if value is None:
            return () if parameter.multiple or parameter.nargs == -1 else None
        described = parameter.type_descriptor
        kind, bounds = described.annotation, described.parameter_info
        words = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(one, str) and one.isprintable() for one in words):  # hence no bytes that are not text
            if kind is str or (described.is_choice and not described.is_list and value in described.choices):
                return value
            if kind == list[str] and words is value:
                return list(words)
            if kind is int and _DIGITS.fullmatch(value):
                number = int(value)
                if (bounds.min or 0) <= number <= (number if bounds.max is None else bounds.max):
                    return number
        return value if value == parameter.default else by_pydantic().coerce(value, **context)

    for one in parameters:
        if "get_runtime_param" not in vars(one):
            made = SimpleNamespace(coerce=partial(plain, one, one.get_runtime_param))
            one.get_runtime_param = lambda made=made: made
            if getattr(one, "is_flag", True):
                one.display_type_rich = lambda ctx: None


class CommandLine(TyperGroup):
    """Group of all commands, which reports an error as one message, an exit code and, with ``--json``, a document."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        lay_out_help(self)
        if not self.commands:  # as of the application: making all of them takes as long as Python takes to start
            names = [*(name for name, one in COMMANDS.items() if one.panel), "db"]
            self.commands = dict.fromkeys(names)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, made when it is first asked for; None if there is none."""
        found: Any = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in self.commands:
            found = made_command(cmd_name)
        if ctx is not None and found is not None:
            for each in (found, *getattr(found, "commands", {}).values()):
                _prepare(each.get_params(ctx))
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the command."""
        _prepare(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def make_context(self, *given: Any, **named: Any) -> Any:
        """Parse the command line; Ctrl-C becomes a `CommandInterruptedError`."""
        with _interruptible():
            return super().make_context(*given, **named)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the named command; Ctrl-C becomes a `CommandInterruptedError`."""
        with _interruptible():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, **settings: Any) -> Any:  # type: ignore[override]
        """Run a command and exit with its code, whatever ``standalone_mode`` is."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            code = self._run(words, as_json, {**settings, "standalone_mode": False})
        except SystemExit as left:
            if not isinstance(left.__context__, BrokenPipeError):
                raise
            code = 0  # Rich ended the process as a pipe was closed, by ``head`` for example, while it showed a help
        sys.exit(code if isinstance(code, int) else 0)

    def _run(self, words: list[str], as_json: bool, settings: dict[str, Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning  # type: ignore[assignment]
                warnings.simplefilter("always", DataWarning)  # each is raised once
                if any(map(has_password, words)):
                    raise InputError(
                        "a password on the command line can be read by all users of this machine while the command "
                        "runs: leave it out of the URL, and keep it in ~/.pgpass or give it in the environment "
                        "variable PGPASSWORD; a whole URL may be given in AUTOTILE_DB, or as `database` in "
                        "autotile/config.toml in ~/.config"
                    )
                command = COMMANDS.get(next(iter(words), ""))
                is_optional = command is not None and command.forms.get("replay", "").startswith("[")
                given = fill_in_replay(words) if is_optional else words  # a bare --replay has a value of its own
                return super().main(given, **settings)
        except typer.TyperException as error:
            text = error.format_message().rstrip(".").replace(": Value error, ", ": ")
            text = re.sub(r", unable to parse string as .*", "", text.replace(": Input should be ", ": expected "))
            if (context := getattr(error, "ctx", None)) is not None:
                text = f"{text}; see `{context.command_path} --help`"
            named = next((word for word in words if not word.startswith("-")), "")
            if named in _RENAMED and "No such command" in text:
                text = f"there is no command {named!r}; it is `autotile {_RENAMED[named]}`"
            show_error(text, "UsageError", as_json=as_json)
            return error.exit_code
        except AutotileError as error:
            rescued = error.rescued if isinstance(error, RescuedRunError) else ""
            hint = self._option_hint(error, words) if isinstance(error, ProblemError) else ""
            show_error(f"{error}{hint}", type(error).__name__, as_json=as_json, rescued=rescued)
            if isinstance(error, CommandInterruptedError):
                return INTERRUPTED
            return BAD_INPUT if isinstance(error, InputError) else NOTHING_FOUND
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, OSError):
                *_, (frame, _) = traceback.walk_tb(error.__traceback__)
                if frame.f_globals["__name__"].split(".")[0] in ("rich", "typer"):  # they write nothing but the help
                    return unwritten(f"{error.strerror}: the help cannot be written")
                if error.filename is not None:
                    show_error(f"{error.filename}: {error.strerror}", kind, as_json=as_json)
                    return NOTHING_FOUND
            show_error(report_crash(error, words), kind, as_json=as_json)
            return UNEXPECTED

    def _option_hint(self, error: ProblemError, words: list[str]) -> str:
        """Return a hint if what was refused as a size is an option of the command that was written as in Python."""
        command = self.get_command(None, words[0])
        options = {form for parameter in (command.params if command else ()) for form in parameter.opts}
        for name, equals, value in (word.partition("=") for word in words[1:]):
            option = f"--{name.replace('_', '-')}"
            if equals and option in options and re.search(rf"\b{re.escape(name)}\b", str(error)):
                return f"; did you mean {option} {value}?"
        return ""


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise CommandInterruptedError("interrupted") from None


app = typer.Typer(
    name="autotile",
    cls=CommandLine,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find, verify, store and serve the fastest tile sizes of CUDA C++ kernels."""
    if version:
        typer.echo(f"autotile {__version__}")
        raise typer.Exit
    help_without_command(context)


def lay_out_help(command: TyperCommand | TyperGroup) -> None:
    """Prepare the texts of a command, and of all commands below it, for Rich.

    Rich keeps the line breaks of a text, removes its indentation and reads brackets as markup. So the lines of a
    paragraph are joined, a backspace, which Rich does not print, protects the indentation of examples, and markup is
    escaped.
    """
    command.rich_markup_mode = "rich"
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(escape(" ".join(paragraph.split())) for paragraph in paragraphs)
    command.epilog = escape(command.epilog or "").replace("\n ", "\n\b ")
    hidden = [(one.secondary_opts or one.opts)[-1] for one in command.params if getattr(one, "hidden", False)]
    if hidden:
        command.epilog += "\n\n" + escape(f"Further options, which the guide describes: {', '.join(hidden)}.")
    for parameter in command.params:
        parameter.help = escape(getattr(parameter, "help", None) or "")  # type: ignore[attr-defined]
    for inner in getattr(command, "commands", {}).values():
        lay_out_help(inner)


def main() -> None:
    """Run the command named by ``sys.argv``; exit with 0 on success, 1 if nothing was found, 2 on bad input.

    An exception that autotile does not foresee is a report file and exit code 70.
    """
    replace_closed_streams()
    try:
        app(prog_name="autotile")
    except KeyboardInterrupt:  # before the arguments were parsed, or while an error was reported
        show_error("interrupted", CommandInterruptedError.__name__, as_json="--json" in sys.argv)
        sys.exit(INTERRUPTED)


_MAX_LINE = 300
"""Characters of an exception's text in the message; the report has it whole."""


def report_crash(error: BaseException, words: Sequence[str]) -> str:
    """Write a report to a new file in the temporary folder, readable by its owner only; return the error message.

    Passwords among the words of the command line are masked, in the report and in the message.
    """
    name = f"{type(error).__name__}: {error}".rstrip(": ")
    summary = masked_message(" ".join(name.split()), words)[:_MAX_LINE]
    lines = (
        f"autotile {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: autotile {shlex.join(words)}",
        "",
        "".join(traceback.format_exception(error)),
    )
    try:
        descriptor, path = tempfile.mkstemp(prefix="autotile-report-", suffix=".txt")  # of mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(masked_message("\n".join(lines), words))
    except OSError as refused:
        return f"unexpected {summary}; no report could be written: {refused.strerror}"
    return f"unexpected {summary}; please report it with the file {path}"
