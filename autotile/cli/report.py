"""``autotile report``: a page of what is stored, and the comparison of two databases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import RenderableType

from autotile.cli.arguments import DatabaseOption, JsonOption, complete_kernel
from autotile.cli.comparing import FailIfSlowerOption, are_databases, report_comparison
from autotile.cli.output import examples, show
from autotile.cli.tables import facts
from autotile.errors import InputError

_WHAT = (
    "Kernel or operation, with sizes that select its problems; or a recording (FILE.npz); or two databases to compare."
)


def report(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KERNEL [SIZE=N ...] | A.db B.db]",
            help=_WHAT,
            show_default="everything that is stored",
            autocompletion=complete_kernel,
        ),
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Page to write.", show_default="report.html"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Only problems of this element type.", show_default="all")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only problems tuned on the GPU of this name.", show_default="all"),
    ] = None,
    fail_if_slower: FailIfSlowerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page with charts and tables of what is stored.

    It is one file, which opens offline in a browser.

    Of two databases, show what got slower in the second, by how much, and with which certainty; a page is then written
    with -o only.
    """
    given = words or []
    if are_databases(given):
        _check_unused(dtype=dtype, device=device, db=database)
        report_comparison(given[0], given[1], output=output, fail_if_slower=fail_if_slower, as_json=as_json)
        return
    if fail_if_slower is not None:
        raise InputError("--fail-if-slower compares two databases; give them as A.db B.db")
    kernel, sizes = _kernel_and_sizes(given)
    from autotile.api import reporting
    from autotile.api.reporting import WrittenReport

    def table(written: WrittenReport) -> RenderableType:
        return facts([("page", str(written.path)), ("title", written.title), ("shows", written.summary)])

    written = reporting.report(
        kernel, sizes, output=output or "report.html", dtype=dtype, device=device, database=database
    )
    show(written, as_json=as_json)


def _check_unused(**options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} selects problems of one database; leave it out to compare two")


def _kernel_and_sizes(words: Sequence[str]) -> tuple[str | None, dict[str, int]]:
    from autotile.cli.assignments import read_sizes

    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise InputError(f"one kernel, expected KERNEL SIZE=N ...; {names[1]!r} is another, or a size without a value")
    if not names and words:
        raise InputError(f"{words[0]!r} stands before any kernel; expected KERNEL SIZE=N ...")
    return (names[0] if names else None), read_sizes([word for word in words if "=" in word])


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile report sgemm_2d M=4096 N=4096 K=4096 -o report.html",
            "autotile report matmul",
            "autotile report before.db after.db --fail-if-slower 5%",
        )
    )(report)
