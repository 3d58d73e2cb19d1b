"""``autotile report A.db B.db``: what got slower between two databases, as a table, as JSON and as an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autotile.cli.output import NOTHING_FOUND, SLOWER, notice, show
from autotile.core.text import percent_text, plural
from autotile.database.keys import study_columns
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.report.comparison import Comparison

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
        _write_page(found, limit, output)
    show(found, as_json=as_json)
    if limit is None:
        return
    failures = list(_failures(found, limit))
    for line, _ in failures:
        notice(line)
    if failures:
        raise typer.Exit(failures[0][1])


def _write_page(found: Comparison, limit: float | None, output: str) -> None:
    from autotile.api.reporting import report_file
    from autotile.report.comparison_page import comparison_page
    from autotile.report.page import write_page

    path = report_file(output)
    write_page(comparison_page(found, limit), path)
    notice(f"page: {path}")


def _failures(found: Comparison, limit: float) -> Iterator[tuple[str, int]]:
    """Yield what ``--fail-if-slower`` fails for, each with its exit code, the worst first."""
    if found.broken:
        names = ", ".join(" ".join(study_columns(one.key)[:2]) for one in found.broken)
        yield f"failed: {plural(len(found.broken), 'problem')} with no valid result in B: {names}", NOTHING_FOUND
    if not any(one.ratio is not None for one in found.problems):
        yield "failed: the databases have no problem in common whose times can be compared", NOTHING_FOUND
    if slower := found.slower_by(limit):
        yield f"failed: {plural(len(slower), 'problem')} slower by more than {percent_text(limit)}", SLOWER
