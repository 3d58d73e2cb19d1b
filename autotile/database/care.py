"""Care of databases: checking, merging, and deletion of stored trials."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Table, delete, func, inspect, select, update

from autotile.core.device import device_profile
from autotile.core.documents import attributes, canonical_json, to_document
from autotile.core.model import OBJECTIVE, Measurement, Trial
from autotile.core.statistics import Interval, ratio_of_times, widen_by_session_spread
from autotile.core.text import Facts, Part, Result, plural
from autotile.database.database import (
    BadRowError,
    Database,
    StoredBest,
    StoredTrial,
    parsed_rows,
    row_of,
    run_text,
    stored_run,
    stored_study,
    stored_trial,
    study_with,
)
from autotile.database.engine import (
    CEILINGS,
    FAMILIES,
    METADATA,
    MISSES,
    MODELS,
    RUNS,
    STUDIES,
    TRIALS,
    DamagedDatabaseError,
    identity_of,
    insert_for,
    schema_revision,
    stored_moment,
)
from autotile.database.keys import TuningKey, version_of
from autotile.database.learned import check_family, copy_learned, plausible, stored_ceilings, stored_model
from autotile.database.runs import TRIAL_IDENTITY, claiming_runs
from autotile.database.winners import STORED_MISSES, VERSION_TABLE, Row
from autotile.errors import AutotileError, InputError
from autotile.kernel.library import KernelName, kernel_names, load_kernel

_PARSERS: Mapping[str, Callable[[Row], object]] = {
    "studies": stored_study,
    "runs": stored_run,
    "trials": stored_trial,
    "misses": row_of(MISSES)(STORED_MISSES.parse),
    "families": check_family,
    "models": stored_model,
    "ceilings": stored_ceilings,
}
"""Function that parses a row of each table; parents before the tables that refer to them."""

_LINKS = (("runs", "study_id", "studies"), ("trials", "study_id", "studies"), ("trials", "run_id", "runs"))
"""Columns that refer to the rows of another table."""

_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseCheck(Result):
    """Result of an integrity check of a database, whose path or URL is without a password."""

    location: str
    problems: tuple[str, ...] = ()
    """One line for each fault of the file; empty if there is none. Damage makes the rest unreadable."""
    exists: bool = True
    revision: str = "unknown"
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by table."""
    unfinished_runs: int = 0
    """Runs without an end: in progress, or killed."""
    bad_rows: tuple[BadRowError, ...] = ()
    """Rows that do not match their schema, which everything else skips."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found; a database that does not exist yet has none."""
        return not self.problems and not self.bad_rows

    def _headline(self) -> str:
        if not self.exists:
            return f"{self.location} does not exist yet"
        return f"{self.location}: {'whole' if self.ok else plural(len(self.problems) + len(self.bad_rows), 'fault')}"

    def _parts(self) -> Iterator[Part]:
        if not self.exists:
            yield [("database", self.location), ("state", "not there yet; the first `autotile tune` makes it")]
            return
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        facts: Facts = [("database", self.location), ("schema", self.revision), ("rows", counts or "unknown")]
        if self.unfinished_runs:
            facts.append(("unfinished", f"{plural(self.unfinished_runs, 'run')}: still going, or killed"))
        facts.append(("state", [*self.problems, *map(str, self.bad_rows)] or ["whole"]))
        if self.bad_rows:
            cure = f"`autotile db merge {self.location} -o NEW.db` copies the other rows to a new database"
            facts.append(("cure", cure))
        yield facts

    def to_json(self) -> Any:
        """Return the numbers of rows and the faults."""
        return to_document(
            {
                "database": self.location,
                **attributes(self, "exists", "ok", "unfinished_runs", "problems"),
                "revision": self.revision if self.exists else None,
                "rows": self.counts,
                "bad_rows": [
                    {"table": row.table, "id": row.row_id, "field": row.field, "reason": row.fault}
                    for row in self.bad_rows
                ],
            }
        )


def check_database(database: Database) -> DatabaseCheck:
    """Check for damaged pages, for rows whose study or run is missing, and for rows that do not match their schema."""
    location = database.location
    try:
        with database.reading() as connection:

            def count(rows: str) -> int:
                return int(connection.exec_driver_sql(f"SELECT count(*) FROM {rows}").scalar_one())

            problems: list[str] = []
            if connection.dialect.name == "sqlite":
                lines = connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_PROBLEMS})").scalars()
                if damage := tuple(line for line in lines if line != "ok"):  # counting would read it again and raise
                    return DatabaseCheck(location, damage)
                # a schema of a server may have other tables
                foreign = {*inspect(connection).get_table_names()} - {*METADATA.tables, VERSION_TABLE}
                problems = [f"it has a table {name!r:.80} that autotile did not create" for name in sorted(foreign)]
            for child, link, parent in _LINKS:
                lost = f"{child} LEFT JOIN {parent} ON {child}.{link} = {parent}.id WHERE {parent}.id IS NULL"
                if number := count(lost):
                    problems.append(f"{plural(number, 'row')} of {child} without a row of {parent}")
            bad: list[BadRowError] = []
            for name in _PARSERS:
                usable_rows(connection, METADATA.tables[name], bad=bad)
            return DatabaseCheck(
                location,
                tuple(problems),
                revision=schema_revision(connection, location) or "none",
                counts={name: count(name) for name in METADATA.tables},
                unfinished_runs=count("runs WHERE ended_at IS NULL"),
                bad_rows=tuple(bad),
            )
    except DamagedDatabaseError as error:  # so damaged that SQLite's check itself fails
        return DatabaseCheck(location, (str(error),))


def usable_rows(
    connection: Connection, table: Table, *conditions: ColumnElement[bool], bad: list[BadRowError] | None = None
) -> list[Row]:
    """Return the rows of a table that match its schema, as they are stored; others go to ``bad``, or are warned of."""

    def checked_row(row: Row) -> Row:
        _PARSERS[table.name](row)
        return row

    return parsed_rows(connection, select(table).where(*conditions).order_by(table.c.id), checked_row, bad)


_RUN_IDENTITY = ("started_at", "host", "sampler", "seed")
"""Columns that identify a run within its study; runs of a study begin at least a microsecond apart."""


@dataclass(frozen=True, slots=True)
class MergedStudy:
    """A study for which the merged databases named different winners."""

    key: TuningKey
    served: Trial
    """Of the configuration that is served from now on."""
    other: Trial
    """Of the configuration that it was compared with."""
    ratio: Interval
    """Time of the slower over time of the faster of the two."""
    decision: Literal["kept", "taken", "unresolved", "refused"]
    """The newest session's is served: it is faster, the intervals of the times overlap or a session had an objective of
    its own, or the faster one has failed verification once. Or the faster one is ``taken``."""


def merge_databases(target: Database, sources: Sequence[Database]) -> tuple[list[Counter[str]], list[MergedStudy]]:
    """Copy everything that the sources hold into the target, and choose what it serves where winners differ.

    Of several winners of a study, the fastest is served if the intervals of the times tell it from the one that would
    be served otherwise, that of the newest session: by the order of recording in one database, by date in several.
    Return, for each source, the numbers of its rows that were new as of `copy_missing_rows`, and the studies for which
    the databases named different winners.
    """
    winners: dict[str, list[StoredBest]] = {}
    for best in (best for database in (target, *sources) for best in database.best()):
        winners.setdefault(best.key.digest, []).append(best)
    copied = [copy_missing_rows(source, target) for source in sources]
    settled = [_settle(target, found) for found in winners.values()]
    return copied, [study for study in settled if study is not None]


def copy_missing_rows(source: Database, target: Database) -> Counter[str]:
    """Copy the studies, runs, trials, families, models, ceilings and misses that the target lacks, in one transaction.

    Return the numbers of new ``studies``, ``runs``, ``trials`` and ``rules``.
    Existing rows of the target change in three cases only: a run that has ended in the source ends in the target too, a
    family, a model or a GPU takes the newer row, and a miss that both have counted takes the greater count, as copies
    of one database have counted the same calls.
    """
    with source.reading() as theirs, target.writing() as ours:
        new = Counter(studies=0, runs=0, trials=0, rules=0)
        for row in usable_rows(theirs, STUDIES):
            study_id = study_with(ours, row["digest"])
            if study_id is None:
                insert = STUDIES.insert().returning(STUDIES.c.id)
                study_id = int(ours.execute(insert, _values(STUDIES, row)).scalar_one())
                new["studies"] += 1
            runs, trials = _copy_runs(theirs, ours, row["id"], study_id)
            new.update(runs=runs, trials=trials)
        for table in (FAMILIES, MODELS, CEILINGS):
            for row in usable_rows(theirs, table):
                new["rules"] += copy_learned(ours, table, row) and row.get("rule") is not None
        greater = func.greatest if ours.dialect.name == "postgresql" else func.max
        for row in usable_rows(theirs, MISSES):
            miss = insert_for(ours, MISSES).values(**_values(MISSES, row))
            change = {name: greater(MISSES.c[name], miss.excluded[name]) for name in ("count", "last_at")}
            ours.execute(miss.on_conflict_do_update(index_elements=identity_of(MISSES), set_=change))
        return new


def _copy_runs(theirs: Connection, ours: Connection, from_study: int, study_id: int) -> tuple[int, int]:
    """Copy the runs of a study with their trials, in the order they were recorded; return the numbers of new rows."""
    known = {_identity(row, _RUN_IDENTITY): row for row in usable_rows(ours, RUNS, RUNS.c.study_id == study_id)}
    run_ids: dict[int, int] = {}
    new_runs = 0
    for row in usable_rows(theirs, RUNS, RUNS.c.study_id == from_study):
        mine = known.get(_identity(row, _RUN_IDENTITY))
        if mine is None:
            values = _values(RUNS, row) | {"study_id": study_id}
            run_ids[row["id"]] = int(ours.execute(RUNS.insert().returning(RUNS.c.id), values).scalar_one())
            new_runs += 1
            continue
        run_ids[row["id"]] = mine["id"]
        if mine["ended_at"] is None and row["ended_at"] is not None:
            change = {"ended_at": row["ended_at"], "summary": row["summary"]}
            ours.execute(update(RUNS).where(RUNS.c.id == mine["id"]).values(**change))
    present = {
        (row["run_id"], _identity(row, TRIAL_IDENTITY))
        for row in usable_rows(ours, TRIALS, TRIALS.c.study_id == study_id)
    }
    trials = [
        _values(TRIALS, row) | {"study_id": study_id, "run_id": run_ids[row["run_id"]]}
        for row in usable_rows(theirs, TRIALS, TRIALS.c.study_id == from_study)
        if row["run_id"] in run_ids and (run_ids[row["run_id"]], _identity(row, TRIAL_IDENTITY)) not in present
    ]
    if trials:
        ours.execute(TRIALS.insert(), trials)
    return new_runs, len(trials)


def _values(table: Table, row: Row) -> dict[str, Any]:
    return {column.name: row[column.name] for column in table.c if column.name != "id"}


def _identity(row: Row, names: Iterable[str]) -> str:
    return canonical_json([row[name] for name in names])


def ratio_of_sessions(a: Measurement, b: Measurement) -> Interval:
    """Return the ratio of time ``b`` to time ``a``, measured in different sessions, with its 95 % interval."""
    return widen_by_session_spread(ratio_of_times(a, b))


def _settle(target: Database, winners: Sequence[StoredBest]) -> MergedStudy | None:
    """Choose which of several winners of a study the target serves; None if there was only one."""
    key = winners[0].key
    study_id = target.find_study(key)
    confirmed = [best for best in winners if best.confirmed] or winners
    candidates = {best.trial.config_key: best.trial for best in confirmed if best.trial.measurement}
    served = _served(target, study_id, confirmed) if study_id is not None else None
    if study_id is None or len(candidates) < 2 or served is None or served.measurement is None:
        return None
    fastest, second = sorted(candidates.values(), key=lambda trial: trial.time_us or 0.0)[:2]
    assert fastest.measurement is not None
    assert second.measurement is not None
    if fastest.config_key == served.config_key:
        ratio = ratio_of_sessions(served.measurement, second.measurement)
        return MergedStudy(key, served, second, ratio, "kept" if ratio.low > 1.0 else "unresolved")
    ratio = ratio_of_sessions(fastest.measurement, served.measurement)
    if ratio.low <= 1.0 or OBJECTIVE in fastest.scores | served.scores:  # an objective of one's own is not the time
        return MergedStudy(key, served, fastest, ratio, "unresolved")
    if _refusals(target, study_id, fastest):
        return MergedStudy(key, served, fastest, ratio, "refused")
    _record_decision(target, study_id, fastest, is_winner=True)
    return MergedStudy(key, fastest, served, ratio, "taken")


def _served(target: Database, study_id: int, winners: Sequence[StoredBest]) -> Trial | None:
    """Return the trial that a study serves, after newer refusals and the newest session have taken effect.

    Copied trials get their ids in the order of copying. A refusal applies to the trials with lower ids, and may have
    been copied before the trial that it refuses; it is then recorded once more. So is the winner of the newest session
    if an older session's was copied after it.
    """
    newest = max(winners, key=lambda best: plausible(stored_moment(best.winner.tuned_at)))
    while found := target.best(study_id=study_id):
        best = found[0]
        if refusals := _refusals(target, study_id, best.trial, after=best.winner.tuned_at):
            _record_decision(target, study_id, refusals[-1].trial, is_winner=False)
        elif (
            newest.confirmed
            and newest.trial.config_key != best.trial.config_key
            and not _refusals(target, study_id, newest.trial, after=newest.winner.tuned_at)
        ):
            _record_decision(target, study_id, newest.trial, is_winner=True, created_at=newest.winner.tuned_at)
            return newest.trial
        else:
            return best.trial
    return None


def _refusals(target: Database, study_id: int, trial: Trial, after: datetime | None = None) -> list[StoredTrial]:
    """Return the finals in which a configuration failed, optionally only those after a date."""
    since = plausible(stored_moment(after)) if after is not None else ""
    return [
        stored
        for stored in target.stored_trials(study_id, phase="final")
        if not stored.trial.outcome.has_time
        and stored.trial.config_key == trial.config_key
        and stored_moment(stored.created_at) > since
    ]


def _record_decision(
    target: Database, study_id: int, trial: Trial, *, is_winner: bool, created_at: datetime | None = None
) -> None:
    driver = next((run.driver for run in reversed(target.runs(study_id)) if run.driver), "")
    of_run: Any = {"sampler": "merge", "driver": driver, "phase": "final"}
    target.add_run(study_id, [trial], is_ranked=is_winner, created_at=created_at, **of_run)


_MAX_RUN_AGE = timedelta(days=1)
"""A younger run without an end may still be going: its trials stay."""
_CHUNK = 500
"""Rows per transaction, and per statement: SQLite accepts 32,766 values in a statement, older versions 999."""


_RECORDED = "SELECT id, run_id, created_at FROM trials WHERE study_id = :study"
_KEPT = (
    "SELECT trial_id FROM best WHERE study_id = :study UNION ALL "
    "SELECT id FROM trials WHERE study_id = :study AND phase = 'final' AND rank IS NULL"
)
_YOUNG_RUNS = (
    "SELECT id FROM runs WHERE study_id = :study AND ended_at IS NULL AND started_at BETWEEN :since AND :until"
)
_EMPTY_RUNS = (
    "SELECT id FROM runs WHERE study_id = :study AND NOT EXISTS (SELECT 1 FROM trials WHERE trials.run_id = runs.id)"
)
_DELETE_EMPTY = (
    "DELETE FROM studies WHERE id = :study AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.study_id = studies.id) "
    "RETURNING id"
)


@dataclass(frozen=True, slots=True)
class CleanedStudy:
    """Deletions in one study."""

    key: TuningKey
    reasons: tuple[str, ...]
    """Criteria that selected its trials: ``old``, ``other GPU``, ``other version``."""
    deleted: int
    total: int
    """Number of trials before the deletion."""
    emptied: bool
    """Whether the study was deleted too, as no trial is left."""


def clean_database(
    database: Database,
    kernel: str | None,
    *,
    before: datetime | None = None,
    keep_gpus: Collection[str] = (),
    versions: Mapping[str, tuple[str, str]] | None = None,
    winners: bool = False,
    dry_run: bool = False,
) -> list[CleanedStudy]:
    """Delete trials of a kernel or of all, and runs and studies without any trial left; return the studies concerned.

    A trial is selected if it was recorded before a moment, on another GPU than those to keep, or for another version of
    its kernel than the template hash and space hash by the kernel's name. The best of each study, and verdicts on
    configurations that are not ranked, without which a wrong one could be served, are deleted only with ``winners``.
    Trials of a run that may still be going are kept. An interrupted call is repeated.
    """
    limit = stored_moment(before) if before else ""
    cleaned = []
    for study in database.rows(STUDIES, stored_study, STUDIES.c.kernel, kernel=kernel):
        study_id, key = study.study_id, study.key
        reasons = []  # that select all trials of the study
        if keep_gpus and key.gpu_name not in keep_gpus:
            reasons.append("other GPU")
        if (versions or {}).get(key.kernel, key.version) != key.version:
            reasons.append("other version")
        with database.reading() as connection:
            trials = run_text(connection, _RECORDED, {"study": study_id})
            kept = set() if winners else _kept(connection, study_id)
            open_runs = _open_runs(connection, study_id)
        free = [(number, str(at)) for number, run_id, at in trials if number not in kept and run_id not in open_runs]
        selected = [(number, at) for number, at in free if reasons or at < limit]
        emptied = len(selected) == len(trials) and not open_runs
        if selected or (reasons and emptied):
            if any(at < limit for _, at in selected):
                reasons.append("old")
            if not dry_run:
                _delete(database, study_id, [number for number, _ in selected], winners=winners)
            cleaned.append(CleanedStudy(key, tuple(reasons), len(selected), len(trials), emptied))
    return cleaned


def stored_gpu_names(database: Database, names: Iterable[str]) -> Iterator[str]:
    """Yield names of GPUs as CUDA reports them: names in the database unchanged, others by their profiles.

    Any other name is an `InputError`: a mistyped name of a GPU to keep would delete the results of that GPU.
    """
    with database.reading() as connection:
        found = connection.execute(select(STUDIES.c.gpu_name).distinct()).scalars()
        stored = {name for name in found if isinstance(name, str)}  # of an unusable row it may be bytes
    for name in names:
        try:
            yield name if name in stored else device_profile(name).name
        except InputError as error:
            held = ", ".join(sorted(stored)) or "no GPU"
            raise InputError(f"{error}; the database holds results of {held}") from None


def current_versions(database: Database, kernel: KernelName | None) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return template hash and space hash by name, of one kernel or of all that are found by name; and other names.

    These are of kernels in the database, without libraries, that are not found, cannot be read, or may be of another
    file of the same name: nothing in the database is of the version of the file.
    """
    if kernel is not None:
        return {(loaded := load_kernel(kernel)).name: version_of(loaded)}, []
    found: dict[str, tuple[str, str]] = {}
    with database.reading() as connection:
        columns = STUDIES.c.kernel, STUDIES.c.template_hash, STUDIES.c.space_hash
        stored = {tuple(row) for row in connection.execute(select(*columns).distinct()) if isinstance(row.kernel, str)}
    for name in kernel_names():
        with suppress(AutotileError):
            loaded = load_kernel(name)
            if (loaded.name, *version_of(loaded)) in stored:
                found[loaded.name] = version_of(loaded)
    return found, sorted({name for name, *_ in stored if name not in found and ":" not in name})


def _kept(connection: Connection, study_id: int) -> set[int]:
    """Return the trials of a study that are needed to serve: its winner, and verdicts on configurations."""
    return {row[0] for row in run_text(connection, _KEPT, {"study": study_id})}


def _open_runs(connection: Connection, study_id: int) -> set[int]:
    """Return the runs of a study that may still be going: young ones without an end, and those that hold claims."""
    now = datetime.now(UTC)
    ages = {"since": stored_moment(now - _MAX_RUN_AGE), "until": stored_moment(now + _MAX_RUN_AGE)}
    young = run_text(connection, _YOUNG_RUNS, {"study": study_id, **ages})
    return {*(row[0] for row in young), *claiming_runs(connection, study_id)}


def _delete(database: Database, study_id: int, trials: Sequence[int], *, winners: bool) -> None:
    """Delete trials of a study, and then its runs without any trial, and the study without any run.

    What must stay is asked in each transaction, since others may decide something new between two.
    """
    for start in range(0, len(trials), _CHUNK):
        begun = time.monotonic()
        with database.writing() as connection:
            kept = set() if winners else _kept(connection, study_id)
            chosen = set(trials[start : start + _CHUNK]) - kept
            connection.execute(delete(TRIALS).where(TRIALS.c.id.in_(sorted(chosen))))
        if database.path is not None:
            # SQLite gives the lock to whoever asks first, and those who wait ask now and then
            time.sleep(time.monotonic() - begun)
    with database.writing() as connection:
        study = {"study": study_id}
        connection.execute(select(STUDIES.c.id).where(STUDIES.c.id == study_id).with_for_update())  # no run begins now
        open_runs = _open_runs(connection, study_id)
        for (run_id,) in run_text(connection, _EMPTY_RUNS, study):
            if run_id not in open_runs:
                run_text(connection, "DELETE FROM runs WHERE id = :run", {"run": run_id})
        if run_text(connection, _DELETE_EMPTY, study):
            run_text(connection, "DELETE FROM claims WHERE study_id = :study", study)
