"""``autotile report``: a page of what is stored, and the comparison of two databases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption, complete_kernel
from autotile.cli.output import NOTHING_FOUND, SLOWER, examples, notice, show
from autotile.core.text import percent_text, plural
from autotile.database.keys import study_columns
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.report.comparison import DatabaseComparison

FailIfSlowerOption = Annotated[
    str | None,
    typer.Option(
        "--fail-if-slower",
        metavar="PERCENT",
        help="With two databases: exit with 3 if a problem is slower in the second by more than this, such as 5%, with "
        "95 % confidence; and with 1 if one fails there, or nothing can be compared.",
        show_default=False,
    ),
]

_PERCENTAGE = re.compile(r"\A([0-9]{1,4}(?:\.[0-9]{1,6})?) ?%\Z")
_DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
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


def are_databases(words: Sequence[str]) -> bool:
    """Return whether the arguments of ``autotile report`` are two databases, rather than a kernel and its sizes."""
    return len(words) == 2 and all(map(is_database, words))


def is_database(word: str) -> bool:
    """Return whether an argument is the path or URL of a database, which need not exist, rather than a kernel."""
    from autotile.database.paths import looks_like_url
    from autotile.settings import user_path

    if looks_like_url(word):
        return True
    path = user_path(word, "a database")
    return path.suffix in _DATABASE_SUFFIXES or (path.suffix != ".toml" and path.is_file())


def read_percentage(text: str) -> float:
    """Return the fraction that a percentage such as ``5%`` states.

    Raises
    ------
    InputError
        It is no percentage.
    """
    found = _PERCENTAGE.match(text.strip())
    if found is None:
        raise InputError(f"--fail-if-slower {text!r} is no percentage; expected one such as 5% or 2.5%")
    return float(found[1]) / 100.0


def report_comparison(
    a: str, b: str, *, output: str | None = None, fail_if_slower: str | None = None, as_json: bool = False
) -> None:
    """Compare two databases, and exit with the verdict.

    Parameters
    ----------
    a, b
        Paths or URLs.
    output
        Path of the page to write; None for none.
    fail_if_slower
        Value of ``--fail-if-slower``; without it the exit code is 0.
    as_json
        Whether to print a document rather than tables.
    """
    from autotile.report.comparison import compare

    limit = read_percentage(fail_if_slower) if fail_if_slower is not None else None
    found = replace(compare(a, b), limit=limit)
    if output is not None:
        _write_page(found, output)
    show(found, as_json=as_json)
    if limit is None:
        return
    failures = list(_failures(found, limit))
    for line, _ in failures:
        notice(line)
    if failures:
        raise typer.Exit(failures[0][1])


def _write_page(found: DatabaseComparison, output: str) -> None:
    from autotile.api.reporting import report_file
    from autotile.report.page import write_page

    path = report_file(output)
    write_page(found.page(), path)
    notice(f"page: {path}")


def _failures(found: DatabaseComparison, limit: float) -> Iterator[tuple[str, int]]:
    """Yield what ``--fail-if-slower`` fails for, each with its exit code, the worst first."""
    if found.broken:
        names = ", ".join(" ".join(study_columns(one.key)[:2]) for one in found.broken)
        yield f"failed: {plural(len(found.broken), 'problem')} with no valid result in B: {names}", NOTHING_FOUND
    if not any(one.ratio is not None for one in found.problems):
        yield "failed: the databases have no problem in common whose times can be compared", NOTHING_FOUND
    if slower := found.slower_by(limit):
        yield f"failed: {plural(len(slower), 'problem')} slower by more than {percent_text(limit)}", SLOWER


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile report sgemm_2d M=4096 N=4096 K=4096 -o report.html",
            "autotile report matmul",
            "autotile report before.db after.db --fail-if-slower 5%",
        )
    )(report)
