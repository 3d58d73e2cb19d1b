"""The application itself: how errors, interrupts and exit codes look, whatever the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from textwrap import wrap
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autotile import __version__
from autotile.cli.output import show_error
from autotile.errors import AutotileError, InputError

NOTHING_FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count."""

_EXAMPLE_WIDTH = 70
"""With what stands around it, a line of a terminal."""


class CommandInterruptedError(AutotileError):
    """Ctrl-C ended a command before it had an answer; the message says what is kept."""


class CommandLine(TyperGroup):
    """Turns whatever goes wrong into one message and an exit code, with a JSON document where one is expected."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command that was named; Ctrl-C becomes an error like others."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CommandInterruptedError("interrupted") from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code; ``standalone_mode`` makes no difference."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            show_error(_usage_text(error), "UsageError", as_json=as_json)
            code = error.exit_code
        except AutotileError as error:
            show_error(str(error), type(error).__name__, as_json=as_json)
            code = _exit_code(error)
        except OSError as error:  # such as an answer that goes to a file on a full disk
            show_error(_system_text(error), type(error).__name__, as_json=False)
            code = NOTHING_FOUND
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="autotile",
    cls=CommandLine,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find, prove, remember and serve the fastest tile sizes of CUDA C++ kernels."""
    if version:
        typer.echo(f"autotile {__version__}")
        raise typer.Exit
    help_without_command(context)


def help_without_command(context: typer.Context) -> None:
    """Show a group's help where none of its commands is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy, long ones broken as a shell joins them."""
    broken = (" \\\n      ".join(wrap(line, _EXAMPLE_WIDTH, break_on_hyphens=False)) for line in lines)
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in broken)])


def _exit_code(error: AutotileError) -> int:
    if isinstance(error, CommandInterruptedError):
        return INTERRUPTED
    return BAD_INPUT if isinstance(error, InputError) else NOTHING_FOUND


def _system_text(error: OSError) -> str:
    """What the system refused; where it was the answer, what is left of that is dropped."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries to write it again at its end
    return f"{error.strerror}: the answer cannot be written; what was stored is kept"


def _usage_text(error: typer.TyperException) -> str:
    """What was wrong with the words, and where the help is."""
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    return f"{message}; see `{context.command_path} --help`" if context is not None else message


def main() -> None:
    """Run the command named by ``sys.argv``; exit with 0 on success, 1 if nothing was found, 2 on bad input."""
    app(prog_name="autotile")


for _name in (
    "tune",
    "verify",
    "best",
    "list",
    "misses",
    "trials",
    "bundle",
    "space",
    "explain",
    "occupancy",
    "devices",
    "doctor",
    "exchange",
    "diff",
    "merge",
    "clean",
    "db",
):
    import_module(f"autotile.cli.{_name}").register(app)
