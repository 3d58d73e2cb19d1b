"""``autotile report A.db B.db``: what got slower between two databases, as a table, as JSON and as an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.output import NOTHING_FOUND, SLOWER, notice, show
from autotile.cli.tables import (
    RIGHT,
    STUDY_HEADINGS,
    Listing,
    below,
    facts,
    lines,
    ratio_document,
    study_columns,
    timed_config_document,
    versioned_document,
)
from autotile.core.model import config_text
from autotile.core.text import NOTHING, percent_text, plural
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.database.studies import StoredBest
    from autotile.report.comparison import ComparedProblem, Comparison, UnmatchedStudy

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
    found = compare(a, b)
    if output is not None:
        _write_page(found, limit, output)
    show(found, lambda one: comparison_table(one, limit), lambda one: comparison_document(one, limit), as_json=as_json)
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


def comparison_table(found: Comparison, limit: float | None) -> RenderableType:
    """Render what differs, one row per compared problem, and the problems that only one database has."""
    parts: list[RenderableType] = [facts(_facts(found))]
    if found.problems:
        times = (f"{RIGHT}A", f"{RIGHT}B", "B against A", "verdict", "configurations")
        rows = [_row(one, limit) for one in found.problems]
        parts.append(below(Listing((*STUDY_HEADINGS, *times), rows, ("configurations", "device"))))
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            columns = (f"only in {name}", *STUDY_HEADINGS[1:], f"{RIGHT}time", "remark")
            parts.append(below(Listing(columns, [_only_row(one) for one in only], ("device",))))
    return Group(*parts)


def _facts(found: Comparison) -> Iterator[tuple[str, RenderableType]]:
    yield "A", found.a
    yield "B", found.b
    yield "result", found.counts_text()
    total = len(found.problems)
    texts = [
        f"{one.name}: {one.a} -> {one.b}" + ("" if count == total else f" ({count} of {plural(total, 'problem')})")
        for one, count in found.differences
    ]
    if (clock := found.clock_ratio) is not None:
        change = f"{percent_text(abs(clock - 1))} {'longer' if clock > 1 else 'less'}"
        texts.append(f"clock: the reference kernel, which follows it, took {change} in B")
    if texts:
        yield "differs", lines(texts)
    if found.superseded:
        yield "left out", f"{plural(found.superseded, 'study', 'studies')} of older versions"
    if found.problems:
        yield "intervals", "95 % for all problems together"


def _row(one: ComparedProblem, limit: float | None) -> tuple[str, ...]:
    from autotile.report.comparison import best_time, change_text, device_pair

    kernel, problem, _ = study_columns(one.key)
    times = best_time(one.a), best_time(one.b)
    return kernel, problem, device_pair(one), *times, change_text(one.ratio), _verdict(one, limit), _configs(one)


def _verdict(one: ComparedProblem, limit: float | None) -> str:
    named = {"unresolved": "not told apart", "unknown": "too few samples"}
    beyond = f" by more than {percent_text(limit)}" if limit is not None and one.is_slower_by(limit) else ""
    return named.get(one.verdict, one.verdict) + beyond


def _configs(one: ComparedProblem) -> str:
    """Format the configurations, and how the times of the same ones changed."""
    from autotile.report.comparison import change_text

    config = config_text(one.a.trial.config) or NOTHING
    parts = [config if one.same_config else f"{config} -> {config_text(one.b.trial.config)}"]
    if one.retimed is not None and not one.same_config:
        parts.append(f"the former in both: {change_text(one.retimed)}")
    if one.common is not None:
        parts.append(f"all {one.common_count:,} that both measured: {change_text(one.common)}")
    return "; ".join(parts)


def _only_row(one: UnmatchedStudy) -> tuple[str, ...]:
    from autotile.report.comparison import best_time

    return *study_columns(one.key), best_time(one.best), "no configuration works in the other" if one.fails else NOTHING


def comparison_document(found: Comparison, limit: float | None) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        "a": found.a,
        "b": found.b,
        "limit": limit,
        "slower_than_limit": len(found.slower_by(limit)) if limit is not None else None,
        "problems": [_problem_document(one, limit) for one in found.problems],
        "only_a": [_only_document(one) for one in found.only_a],
        "only_b": [_only_document(one) for one in found.only_b],
        "superseded": found.superseded,
    }


def _problem_document(one: ComparedProblem, limit: float | None) -> dict[str, Any]:
    return {
        **versioned_document(one.key),
        "a": _best_document(one.a),
        "b": _best_document(one.b),
        "ratio": ratio_document(one.ratio),
        "verdict": one.verdict,
        "slower_than_limit": one.is_slower_by(limit) if limit is not None else None,
        "same_config": one.same_config,
        "retimed": ratio_document(one.retimed),
        "common": ratio_document(one.common),
        "common_configs": one.common_count,
        "repeat_spread": one.repeat_spread,
        "clock_ratio": one.clock_ratio,
        "differences": [{"name": each.name, "a": each.a, "b": each.b} for each in one.differences],
    }


def _best_document(best: StoredBest) -> dict[str, Any]:
    measurement = best.trial.measurement
    return {
        **timed_config_document(best.trial.config, measurement),
        "samples": len(measurement.samples_us) if measurement is not None else 0,
        "confirmed": best.confirmed,
        "device": best.key.gpu_name,
        "nvrtc_version": best.key.nvrtc_version,
        "driver": best.run.driver,
        "autotile_version": best.run.autotile_version,
        "host": best.run.host,
        "measured_at": best.created_at.isoformat(),
    }


def _only_document(one: UnmatchedStudy) -> dict[str, Any]:
    measurement = one.best.trial.measurement if one.best is not None else None
    config = one.best.trial.config if one.best is not None else {}
    return {**versioned_document(one.key), **timed_config_document(config, measurement), "fails_in_other": one.fails}
