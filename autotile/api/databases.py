"""Databases as a whole: check, comparison, merging, and deletion of trials."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autotile.api.results import counted_text
from autotile.core.argument_types import checked
from autotile.core.documents import to_document
from autotile.core.model import config_key, config_text, timed_config
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import NOTHING, RIGHT, Facts, Part, Result, ResultTable, interval_text, plural, time_text
from autotile.database.care import (
    CleanedStudy,
    DatabaseCheck,
    MergedStudy,
    check_database,
    clean_database,
    current_versions,
    merge_databases,
    ratio_of_sessions,
    stored_gpu_names,
)
from autotile.database.database import (
    Database,
    database_location,
    location_text,
    open_existing,
    open_for_reading,
    rows_of_kernel,
)
from autotile.database.engine import DamagedDatabaseError, parse_location
from autotile.database.keys import STUDY_HEADINGS, key_differences, study_columns, versioned_document
from autotile.database.paths import looks_like_url
from autotile.database.winners import Winner
from autotile.errors import InputError
from autotile.exchange.shipped import read_winners
from autotile.kernel.library import KernelName
from autotile.settings import user_path


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseDiff(Result):
    """Differences between the winners of two databases, or of files of winners."""

    a: str
    b: str
    """Locations as given, without passwords."""
    only_a: tuple[tuple[Winner, tuple[str, ...]], ...]
    only_b: tuple[tuple[Winner, tuple[str, ...]], ...]
    """Winners without a counterpart in the other database, each with the fields in which its key differs from the
    nearest key there with the same problem on the same GPU; none if there is no such key."""
    both: tuple[tuple[Winner, Winner, bool, Interval | None], ...]
    """The two winners of a key; whether they are the same configuration; and the time of the second over that of the
    first, None if one has no measured time."""

    def _headline(self) -> str:
        keys = (*(a.key for a, *_ in self.both), *(one.key for one, _ in (*self.only_a, *self.only_b)))
        same = sum(is_same for _, _, is_same, _ in self.both)
        only = f"{len(self.only_a)} only in A, {len(self.only_b)} only in B"
        counts = f"{same} same, {len(self.both) - same} different, {only}"
        return f"A {self.a}, B {self.b}: {counted_text(keys, 'problem', 'problems')}: {counts}"

    def _parts(self) -> Iterator[Part]:
        same = [pair for pair in self.both if pair[2]]
        other = [pair for pair in self.both if not pair[2]]
        counts: Facts = [
            ("A", self.a),
            ("B", self.b),
            ("same configuration", plural(len(same), "problem")),
            ("another configuration", plural(len(other), "problem")),
            ("only in A", plural(len(self.only_a), "problem")),
            ("only in B", plural(len(self.only_b), "problem")),
        ]
        yield counts
        if shown := [*other, *(pair for pair in same if _verdict(pair[3]).endswith("faster"))]:
            headings = (*STUDY_HEADINGS, "A", "B", f"{RIGHT}B / A", "difference")
            rows = []
            for a, b, is_same, ratio in shown:
                configs = config_text(a.config), "the same" if is_same else config_text(b.config)
                sides = []
                for config, measured in zip(configs, (a.measurement, b.measurement), strict=True):
                    text = "not measured"
                    if measured is not None:
                        text = f"{time_text(measured.time_us)} ({interval_text(measured)})"
                    sides.append(f"{config}, {text}")
                found = f"{ratio.value:.3f}" if ratio is not None else NOTHING
                rows.append((*study_columns(a.key), *sides, found, _verdict(ratio)))
            yield ResultTable(headings, rows, ("device", "A", "B"))
        for name, only in (("A", self.only_a), ("B", self.only_b)):
            if only:
                columns = (f"only in {name}", "problem", "device", "configuration", f"{RIGHT}time", "differs in")
                alone = [
                    (
                        *study_columns(one.key),
                        config_text(one.config),
                        time_text(one.measurement.time_us if one.measurement else None),
                        ", ".join(differs) or NOTHING,
                    )
                    for one, differs in only
                ]
                yield ResultTable(columns, alone, ("configuration", "device"))

    def to_json(self) -> Any:
        """Return every problem, including those with the same winner."""

        def document(winner: Winner) -> dict[str, Any]:
            measured: dict[str, Any] = winner.measurement.to_json() if winner.measurement else {}
            return {"config": winner.config, "time_us": None, "interval_us": None, **measured}

        only_a, only_b = (
            [{**versioned_document(one.key), **document(one), "differs": differs} for one, differs in only]
            for only in (self.only_a, self.only_b)
        )
        both = [
            {
                **versioned_document(a.key),
                "same_config": is_same,
                "a": document(a),
                "b": document(b),
                "ratio": ratio.to_json("value") if ratio is not None else None,
                "verdict": _verdict(ratio),
            }
            for a, b, is_same, ratio in self.both
        ]
        return to_document({"a": self.a, "b": self.b, "only_a": only_a, "only_b": only_b, "both": both})


def _verdict(ratio: Interval | None) -> str:
    """Return the faster one, or ``unresolved`` if the intervals overlap, or ``unknown``."""
    if ratio is None:
        return "unknown"
    return "unresolved" if is_tie(ratio) else "A is faster" if ratio.value > 1.0 else "B is faster"


@dataclass(frozen=True, slots=True, repr=False)
class MergeResult(Result):
    """Result of a merge."""

    output: str
    """Location of the database that was merged into."""
    copied: tuple[tuple[str, Mapping[str, int]], ...]
    """Location of each source, with its numbers of new ``studies``, ``runs``, ``trials`` and ``rules``."""
    studies: tuple[MergedStudy, ...]

    def _headline(self) -> str:
        trials = plural(sum(rows["trials"] for _, rows in self.copied), "new trial")
        winners = counted_text((study.key for study in self.studies), "study", "studies")
        return f"{trials} in {self.output}, {winners} with several winners"

    def _parts(self) -> Iterator[Part]:
        facts: Facts = [("merged into", self.output)]
        for name, new in self.copied:
            found = f"{plural(new['trials'], 'new trial')} of {plural(new['runs'], 'run')}"
            facts.append(("from", f"{name}: {found}, {plural(new['studies'], 'new study', 'new studies')}"))
        yield facts
        if self.studies:
            headings = (*STUDY_HEADINGS, "served", f"{RIGHT}time", "other", f"{RIGHT}its time", "decision")
            rows = [
                (
                    *study_columns(study.key),
                    config_text(study.served.config),
                    time_text(study.served.time_us),
                    config_text(study.other.config),
                    time_text(study.other.time_us),
                    study.decision,
                )
                for study in self.studies
            ]
            yield ResultTable(headings, rows, ("device", "served", "other"))

    def to_json(self) -> Any:
        """Return the rows copied, and the decisions."""
        return {
            "output": self.output,
            "copied": [{"database": name, **rows} for name, rows in self.copied],
            "studies": [
                {
                    **versioned_document(study.key),
                    "decision": study.decision,
                    "served": timed_config(study.served.config, study.served.measurement),
                    "other": timed_config(study.other.config, study.other.measurement),
                    "ratio": study.ratio.to_json("value"),
                }
                for study in self.studies
            ],
        }


@dataclass(frozen=True, slots=True, repr=False)
class CleanResult(Result):
    """Result of a deletion."""

    location: str
    studies: tuple[CleanedStudy, ...]
    dry_run: bool
    """Whether the trials were only selected, and not deleted."""
    notices: tuple[str, ...] = ()
    """Remarks on what was not looked at."""

    @property
    def deleted(self) -> int:
        """Number of deleted trials."""
        return sum(study.deleted for study in self.studies)

    def _headline(self) -> str:
        studies = counted_text((study.key for study in self.studies), "study", "studies")
        done = "would be deleted" if self.dry_run else "deleted"
        return f"{plural(self.deleted, 'trial')} of {studies} {done} in {self.location}"

    def _parts(self) -> Iterator[Part]:
        if not self.studies:
            yield f"nothing to delete in {self.location}"
            return
        rows = [
            (
                *study_columns(study.key),
                f"{study.deleted:,}",
                f"{study.total:,}",
                ", ".join(study.reasons),
                "nothing" if study.emptied else plural(study.total - study.deleted, "trial"),
            )
            for study in self.studies
        ]
        yield ResultTable((*STUDY_HEADINGS, f"{RIGHT}trials", f"{RIGHT}of", "why", "left"), rows, ("device",))
        yield self._headline()

    def to_json(self) -> dict[str, Any]:
        """Return the studies with deleted trials."""
        return {
            "database": self.location,
            "dry_run": self.dry_run,
            "trials": self.deleted,
            "studies": [
                {
                    **versioned_document(study.key),
                    "reasons": list(study.reasons),
                    "trials": study.deleted,
                    "of": study.total,
                    "whole": study.emptied,
                }
                for study in self.studies
            ],
        }


@checked
def db_diff(a: str | Path, b: str | Path) -> DatabaseDiff:
    """Compare the best configurations in two databases.

    Shows the problems that only one of them has, those for which their configurations differ, and whether the intervals
    of the times tell which is faster.

    Parameters
    ----------
    a
        Database: an SQLite file or a postgresql:// URL; or a file of winners (.json).
    b
        The other one.

    Raises
    ------
    InputError
        One of them does not exist or cannot be read.
    """
    places, found = [], []
    for place in (a, b):
        is_url = looks_like_url(str(place))
        if str(place).endswith(".json") and not is_url:
            winners = read_winners(user_path(place, "a file of winners"))
        else:
            with open_existing(place) as opened:
                winners = [best.winner for best in opened.best()]
        places.append(location_text(place) if is_url else str(place))  # without a password
        found.append({winner.key.digest: winner for winner in winners})
    winners_a, winners_b = found
    both = []
    for first, second in ((winners_a[key], winners_b[key]) for key in winners_a if key in winners_b):
        ratio = None
        if first.measurement is not None and second.measurement is not None:
            ratio = ratio_of_sessions(first.measurement, second.measurement)
        both.append((first, second, config_key(first.config) == config_key(second.config), ratio))
    only = []
    for own, others in ((winners_a, winners_b), (winners_b, winners_a)):
        alone = []
        for key, one in ((one.key, one) for digest, one in own.items() if digest not in others):
            near = (other.key for other in others.values() if other.key.problem == key.problem)
            differences = [key_differences(key, other) for other in near if other.gpu_name == key.gpu_name]
            alone.append((one, tuple(name for name, *_ in min(differences, key=len, default=()))))
        only.append(tuple(alone))
    return DatabaseDiff(a=places[0], b=places[1], only_a=only[0], only_b=only[1], both=tuple(both))


@checked
def db_merge(sources: Sequence[str | Path], output: str | Path) -> MergeResult:
    """Copy everything that some databases hold into one.

    No trial is lost or duplicated. Where databases name different winners, the faster is served from then on if the
    intervals of their times tell them apart; otherwise that of the newest session is.

    Parameters
    ----------
    sources
        SQLite files or postgresql:// URLs.
    output
        Database to merge into; created if it does not exist, and what it holds is kept.

    Raises
    ------
    InputError
        There is no source but the output, one does not exist or cannot be read, or the output cannot be written.
    """
    target_location = parse_location(output)
    others = [source for source in sources if parse_location(source) != target_location]
    if not others:
        raise InputError(f"there is nothing to merge into {location_text(output)}; name one other database or more")
    with ExitStack() as stack:
        opened = [stack.enter_context(open_existing(other)) for other in others]  # all of them before any is written
        target = stack.enter_context(Database.open(output, set_damage_aside=False))
        copied, studies = merge_databases(target, opened)
        locations = (source.location for source in opened)
        return MergeResult(target.location, tuple(zip(locations, copied, strict=True)), tuple(studies))


_DAYS = re.compile(r"(\d{1,5})d")


@checked
def db_clean(
    kernel: KernelName | None = None,
    *,
    before: datetime | str | None = None,
    keep_gpus: Sequence[str] = (),
    stale: bool = False,
    winners: bool = False,
    dry_run: bool = False,
    database: str | Path | None = None,
) -> CleanResult:
    """Delete trials that are no longer wanted.

    It does not ask for confirmation. The best configuration of each study, and the verdicts on wrong ones, are kept
    unless ``winners`` is given; the trials of a session that may still be running are kept in any case.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file (path/to/mine.toml). Or a kernel from `autotile.kernel`.
    before
        Delete trials older than 90d, or than 2026-01-31. In Python, a `datetime` with a time zone, too. None for no.
    keep_gpus
        Delete trials of all other GPUs. May be given again. None for no.
    stale
        Delete trials of other versions of a kernel than the current one.
    winners
        Delete the best of each study, too; otherwise it is kept.
    dry_run
        Delete nothing; show what would be deleted.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        No criterion is given, a GPU to keep is neither in the database nor a profile, there is no such kernel, or the
        database cannot be read or written.
    """
    if before is None and not keep_gpus and not stale:
        raise InputError(
            "nothing selects the trials to delete; give --older-than, --keep-gpu or --stale; in Python, pass before, "
            "keep_gpus or stale"
        )
    if not isinstance(before, str):
        moment = before
    elif days := _DAYS.fullmatch(before.strip().lower()):
        moment = datetime.now(UTC) - timedelta(days=int(days[1]))
    else:
        try:
            moment = datetime.fromisoformat(before.strip()).astimezone()  # the beginning of a date in local time
        except (ValueError, OverflowError):
            raise InputError(
                f"an age of {before!r} cannot be read; expected days such as 90d, or a date such as 2026-01-31"
            ) from None
        if moment > datetime.now(UTC):
            raise InputError(f"{before} lies in the future, so everything is older; expected a date that has been")
    with open_for_reading(database) as opened:
        if opened is None:
            rows_of_kernel(lambda _: (), kernel)  # a misspelt name is an error
            return CleanResult(location_text(database), (), dry_run)
        kept = frozenset(stored_gpu_names(opened, keep_gpus))
        versions, unknown = current_versions(opened, kernel) if stale else (None, [])
        found = f"no result of {' or '.join(unknown)} is of a kernel that is found by this name"
        cure = "`autotile db clean path/to/mine.toml --stale` looks at the trials of a file"
        notices = (f"{found}; {cure}",) if unknown else ()
        chosen: Any = {"before": moment, "keep_gpus": kept, "versions": versions, "winners": winners}
        name = None
        if kernel is not None:
            studies = rows_of_kernel(opened.studies, kernel)
            if not studies:
                return CleanResult(opened.location, (), dry_run)
            name = studies[0].key.kernel
        if dry_run:
            cleaned = tuple(clean_database(opened, name, dry_run=True, **chosen))
            return CleanResult(opened.location, cleaned, dry_run, notices)
    with Database.open(database_location(database), set_damage_aside=False) as writable:
        return CleanResult(writable.location, tuple(clean_database(writable, name, **chosen)), dry_run, notices)


@checked
def db_check(database: str | Path | None = None) -> DatabaseCheck:
    """Check the database for damage, lost rows and rows that cannot be used.

    Parameters
    ----------
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        It cannot be read at all, is not a database, or a database given by name does not exist.
    """
    location = location_text(database)
    try:
        with open_for_reading(database) as opened:
            return check_database(opened) if opened is not None else DatabaseCheck(location, exists=False)
    except DamagedDatabaseError as error:
        return DatabaseCheck(location, (str(error),))


@checked
def db_path(database: str | Path | None = None) -> str:
    """Show where the database is.

    The password of a URL is masked.

    Parameters
    ----------
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        The URL is of an unsupported kind.
    """
    return location_text(database)
