"""Checks of a database: damaged pages, rows that refer to none, and rows that do not match their schema."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, literal_column, select, update

from autotile.core.device import device_profile
from autotile.core.documents import canonical_json
from autotile.core.model import Measurement, Trial, config_key
from autotile.core.statistics import Interval, ratio_of, widen_by_session_spread
from autotile.database.database import (
    BadRow,
    BadRowError,
    Database,
    StoredBest,
    StoredStudy,
    StoredTrial,
    bad_row,
    parsed_rows,
    rows_of,
    stored_run,
    stored_study,
    stored_trial,
    warn_of,
)
from autotile.database.engine import (
    BEST,
    CEILINGS,
    CLAIMS,
    FAMILIES,
    METADATA,
    MISSES,
    MODELS,
    RUNS,
    STUDIES,
    TRIALS,
    DamagedDatabaseError,
    insert_for,
    now_text,
    schema_revision,
)
from autotile.database.keys import TuningKey, space_hash
from autotile.database.learned import (
    check_family,
    check_model,
    copy_ceilings,
    copy_model,
    replace_family,
    stored_ceilings,
)
from autotile.database.runs import claiming_runs
from autotile.database.winners import STORED_MISSES, Row
from autotile.errors import AutotileError, DataError, InputError
from autotile.kernel.library import KernelName, kernel_names, load_kernel

_PARSERS: Mapping[str, Callable[[Row], object]] = {
    "studies": stored_study,
    "runs": stored_run,
    "trials": stored_trial,
    "misses": STORED_MISSES.parse,
    "families": check_family,
    "models": check_model,
    "ceilings": stored_ceilings,
}
"""Function that parses a row of each table; parents before the tables that refer to them."""

_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    """Result of an integrity check."""

    location: str
    revision: str
    counts: Mapping[str, int]
    """Number of rows by table."""
    unfinished_runs: int
    """Runs without an end: in progress, or killed."""
    problems: tuple[str, ...]
    """One line for each fault of the file; empty if there is none."""
    bad_rows: tuple[BadRow, ...] = ()
    """Rows that do not match their schema, which everything else skips."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.problems and not self.bad_rows

    @classmethod
    def damaged(cls, location: str, problems: Sequence[str]) -> DatabaseCheck:
        """Return the result for damage that makes the rest unreadable."""
        return cls(location, revision="unknown", counts={}, unfinished_runs=0, problems=tuple(problems))


def check_database(database: Database) -> DatabaseCheck:
    """Check for damaged pages, for rows whose study or run is missing, and for rows that do not match their schema."""
    try:
        with database.reading() as connection:
            return _checked(connection, database.location)
    except DamagedDatabaseError as error:  # so damaged that SQLite's check itself fails
        return DatabaseCheck.damaged(database.location, [str(error)])


def _checked(connection: Connection, location: str) -> DatabaseCheck:
    problems = _damaged_pages(connection)
    if problems:
        # Counting would read the damaged pages again and raise.
        return DatabaseCheck.damaged(location, problems)
    counts = {name: _count(connection, table) for name, table in METADATA.tables.items()}
    unfinished = connection.execute(select(func.count()).where(RUNS.c.ended_at.is_(None))).scalar_one()
    revision = schema_revision(connection, location) or "none"
    bad_rows = tuple(_bad_rows(connection))
    return DatabaseCheck(location, revision, counts, unfinished, tuple(_orphans(connection)), bad_rows)


def _damaged_pages(connection: Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return []
    lines = connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_PROBLEMS})").scalars()
    return [line for line in lines if line != "ok"]


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def _orphans(connection: Connection) -> list[str]:
    problems = []
    for child, column, parent in ((RUNS, "study_id", STUDIES), (TRIALS, "study_id", STUDIES), (TRIALS, "run_id", RUNS)):
        lost = child.outerjoin(parent, child.c[column] == parent.c.id)
        query = select(func.count()).select_from(lost).where(parent.c.id.is_(None))
        if number := connection.execute(query).scalar_one():
            problems.append(f"{number} rows of {child.name} name a row of {parent.name} that is missing")
    return problems


def usable_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> list[Row]:
    """Return the rows of a table that match its schema, as they are stored; the others are skipped with a warning."""
    bad: list[BadRow] = []
    found = list(_matching(connection, table, bad, *conditions))
    warn_of(connection, bad)
    return found


def _bad_rows(connection: Connection) -> list[BadRow]:
    """Return the rows of all tables that do not match their schemas."""
    bad: list[BadRow] = []
    for name in _PARSERS:
        for _ in _matching(connection, METADATA.tables[name], bad):
            pass
    return bad


def _matching(
    connection: Connection, table: Table, bad: list[BadRow], *conditions: ColumnElement[bool]
) -> Iterator[Row]:
    for row in rows_of(connection, select(table).where(*conditions).order_by(table.c.id)):
        try:
            _PARSERS[table.name](row)
        except DataError as error:
            bad.append((error if isinstance(error, BadRowError) else bad_row(table.name, row["id"], error)).row)
        else:
            yield row


_RUN_IDENTITY = ("started_at", "host", "sampler", "seed")
"""Columns that identify a run within its study; runs of a study begin at least a microsecond apart."""
_TRIAL_IDENTITY = ("phase", "rank", "config_key", "outcome", "created_at", "time_us")

Decision = Literal["kept", "taken", "unresolved", "refused"]


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Numbers of rows that were new to the target."""

    studies: int
    runs: int
    trials: int
    rules: int


@dataclass(frozen=True, slots=True)
class MergedStudy:
    """A study for which the merged databases named different winners.

    Attributes
    ----------
    key
        Key of the study.
    served
        Trial of the configuration that is served from now on.
    other
        Trial of the configuration that it was compared with.
    ratio
        Time of the slower over time of the faster of the two.
    decision
        ``kept``: the configuration that was served already is faster. ``taken``: the faster one of another database is
        served now. ``unresolved``: the intervals of the times overlap, so the newest session's is served. ``refused``:
        the faster one has failed verification once, and is not served.
    """

    key: TuningKey
    served: Trial
    other: Trial
    ratio: Interval
    decision: Decision


def merge_databases(target: Database, sources: Sequence[Database]) -> tuple[list[CopiedRows], list[MergedStudy]]:
    """Copy everything that the sources hold into the target, and choose what it serves where winners differ.

    No trial is lost or duplicated. Of several winners of a study, the fastest is served if the intervals of the times
    tell it from the one that would be served otherwise, that of the newest session. Sessions of one database are in the
    order of recording. Those of several can be ordered only by date: a date that has yet to come, by a clock that was
    ahead, counts as the oldest.

    Returns
    -------
    copied : list of CopiedRows
        Rows that were new, one entry per source.
    merged : list of MergedStudy
        Studies for which the databases named different winners.

    Raises
    ------
    DatabaseError
        A source cannot be read, or the target cannot be written.
    """
    winners: dict[str, list[StoredBest]] = {}
    for best in (best for database in (target, *sources) for best in database.best()):
        winners.setdefault(best.key.digest, []).append(best)
    copied = [copy_missing_rows(source, target) for source in sources]
    settled = [_settle(target, found) for found in winners.values()]
    return copied, [study for study in settled if study is not None]


def copy_missing_rows(source: Database, target: Database) -> CopiedRows:
    """Copy the studies, runs, trials, families and misses that the target lacks, in one transaction.

    Existing rows of the target change in three cases only: a run that has ended in the source ends in the target too, a
    family takes the newer rule, and a miss that both have counted takes the greater count, as copies of one database
    have counted the same calls.

    Raises
    ------
    DatabaseError
        The source cannot be read, or the target cannot be written.
    """
    with source.reading() as theirs, target.writing() as ours:
        studies = runs = trials = 0
        for row in usable_rows(theirs, STUDIES):
            study_id, is_new = _copy_study(ours, row)
            studies += is_new
            new_runs, new_trials = _copy_runs(theirs, ours, row["id"], study_id)
            runs, trials = runs + new_runs, trials + new_trials
        families = usable_rows(theirs, FAMILIES)
        rules = sum(_copy_family(ours, row) for row in families)
        for row in usable_rows(theirs, MODELS):
            copy_model(ours, row)
        for row in usable_rows(theirs, CEILINGS):
            copy_ceilings(ours, row)
        for row in usable_rows(theirs, MISSES):
            _copy_miss(ours, row)
        return CopiedRows(studies, runs, trials, rules)


def ratio_of_sessions(a: Measurement, b: Measurement) -> Interval:
    """Return the ratio of time ``b`` to time ``a``, measured in different sessions, with its 95 % interval."""
    first, second = (Interval(measured.time_us, measured.low_us, measured.high_us) for measured in (a, b))
    return widen_by_session_spread(ratio_of(first, second))


def _copy_study(ours: Connection, row: Mapping[Any, Any]) -> tuple[int, bool]:
    """Return the number of a study in the target, and whether it is new there."""
    known = ours.execute(select(STUDIES.c.id).where(STUDIES.c.digest == row["digest"])).scalar_one_or_none()
    if known is not None:
        return known, False
    return int(ours.execute(STUDIES.insert().returning(STUDIES.c.id), _values(STUDIES, row)).scalar_one()), True


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
        (row["run_id"], _identity(row, _TRIAL_IDENTITY))
        for row in usable_rows(ours, TRIALS, TRIALS.c.study_id == study_id)
    }
    trials = [
        _values(TRIALS, row) | {"study_id": study_id, "run_id": run_ids[row["run_id"]]}
        for row in usable_rows(theirs, TRIALS, TRIALS.c.study_id == from_study)
        if row["run_id"] in run_ids and (run_ids[row["run_id"]], _identity(row, _TRIAL_IDENTITY)) not in present
    ]
    if trials:
        ours.execute(TRIALS.insert(), trials)
    return new_runs, len(trials)


def _copy_family(ours: Connection, row: Mapping[Any, Any]) -> bool:
    """Copy a family that the target lacks, or its rule if it is newer; return whether a rule was copied."""
    known = list(rows_of(ours, select(FAMILIES.c.learned_at).where(FAMILIES.c.digest == row["digest"])))
    if not known:
        ours.execute(FAMILIES.insert(), _values(FAMILIES, row))
        return row["rule"] is not None
    learned_at = known[0]["learned_at"]
    if row["learned_at"] is None:
        return False
    if isinstance(learned_at, str) and _plausible(learned_at) >= _plausible(row["learned_at"]):
        return False
    replace_family(ours, _values(FAMILIES, row))
    return True


def _plausible(moment: str) -> str:
    """Return a date for comparison with those of another machine: one that has yet to come counts as the oldest."""
    return "" if moment > now_text() else moment


def _copy_miss(ours: Connection, row: Mapping[Any, Any]) -> None:
    insert = insert_for(ours, MISSES).values(**_values(MISSES, row))
    greater = func.greatest if ours.dialect.name == "postgresql" else func.max
    change = {
        "count": greater(MISSES.c.count, insert.excluded.count),
        "last_at": greater(MISSES.c.last_at, insert.excluded.last_at),
    }
    unique = ["kernel", "sizes", "dtype", "gpu_name", "tier"]
    ours.execute(insert.on_conflict_do_update(index_elements=unique, set_=change))


def _values(table: Table, row: Mapping[Any, Any]) -> dict[str, Any]:
    return {column.name: row[column.name] for column in table.c if column.name != "id"}


def _identity(row: Mapping[Any, Any], names: Iterable[str]) -> str:
    return canonical_json([row[name] for name in names])


def _settle(target: Database, winners: Sequence[StoredBest]) -> MergedStudy | None:
    """Choose which of several winners of a study the target serves; None if there was only one."""
    key = winners[0].key
    study_id = target.find_study(key)
    confirmed = [best for best in winners if best.confirmed] or winners
    candidates = {config_key(best.trial.config): best.trial for best in confirmed if best.trial.measurement}
    served = _served(target, study_id, confirmed) if study_id is not None else None
    if study_id is None or len(candidates) < 2 or served is None or served.measurement is None:
        return None
    fastest = min(candidates.values(), key=_time_us)
    if config_key(fastest.config) == config_key(served.config):
        second = min((trial for trial in candidates.values() if trial is not fastest), key=_time_us)
        ratio = _ratio(served, second)
        return MergedStudy(key, served, second, ratio, "kept" if ratio.low > 1.0 else "unresolved")
    ratio = _ratio(fastest, served)
    if ratio.low <= 1.0:
        return MergedStudy(key, served, fastest, ratio, "unresolved")
    if _was_refused(target, study_id, fastest):
        return MergedStudy(key, served, fastest, ratio, "refused")
    _record_decision(target, study_id, fastest, is_winner=True)
    return MergedStudy(key, fastest, served, ratio, "taken")


def _served(target: Database, study_id: int, winners: Sequence[StoredBest]) -> Trial | None:
    """Return the trial that a study serves, after newer refusals and the newest session have taken effect.

    Copied trials get their ids in the order of copying. A refusal applies to the trials with lower ids, and may have
    been copied before the trial that it refuses; it is then recorded once more. So is the winner of the newest session
    if an older session's was copied after it.
    """
    newest = max(winners, key=lambda best: _plausible(_moment(best.created_at)))
    while found := target.best(study_id=study_id):
        best = found[0]
        if refusals := _refusals(target, study_id, best):
            _record_decision(target, study_id, refusals[-1].trial, is_winner=False)
        elif (
            newest.confirmed
            and config_key(newest.trial.config) != config_key(best.trial.config)
            and not _refusals(target, study_id, newest)
        ):
            _record_decision(target, study_id, newest.trial, is_winner=True, moment=_moment(newest.created_at))
            return newest.trial
        else:
            return best.trial
    return None


def _refusals(target: Database, study_id: int, best: StoredBest) -> list[StoredTrial]:
    """Return the later finals in which the configuration of a result failed."""
    tuned = _plausible(_moment(best.created_at))
    return [
        stored
        for stored in target.stored_trials(study_id, phase="final")
        if not stored.trial.outcome.has_time
        and config_key(stored.trial.config) == config_key(best.trial.config)
        and _moment(stored.created_at) > tuned
    ]


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _was_refused(target: Database, study_id: int, trial: Trial) -> bool:
    finals = target.trials(study_id, phase="final")
    return any(not t.outcome.has_time and config_key(t.config) == config_key(trial.config) for t in finals)


def _record_decision(
    target: Database, study_id: int, trial: Trial, *, is_winner: bool, moment: str | None = None
) -> None:
    """Record a run of its own with a copy of the trial, a winner or a refusal.

    Parameters
    ----------
    moment
        Date of the copy; None for now.
    """
    run = next((run for run in reversed(target.runs(study_id)) if run.driver), None)
    driver = run.driver if run else ""
    target.add_run(
        study_id, [trial], sampler="merge", driver=driver, phase="final", is_ranked=is_winner, created_at=moment
    )


def _ratio(a: Trial, b: Trial) -> Interval:
    return ratio_of_sessions(_measured(a), _measured(b))


def _measured(trial: Trial) -> Measurement:
    if trial.measurement is None:
        raise ValueError(f"a winner has no measurement: {trial.config}")
    return trial.measurement


def _time_us(trial: Trial) -> float:
    return _measured(trial).time_us


_MAX_RUN_AGE = timedelta(days=1)
"""A younger run without an end may still be going: its trials stay."""
_CHUNK = 500
"""Rows per transaction, and per statement: SQLite accepts 32,766 values in a statement, older versions 999."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """Trials to delete: a trial that any of the criteria selects is deleted.

    Attributes
    ----------
    before
        Trials recorded before this moment.
    keep_gpus
        Trials of all GPUs but these; empty for no criterion.
    versions
        Template hash and space hash of each kernel's current version, by name: trials of other versions. None for no
        criterion.
    winners
        Delete selected trials even if they are the best of their study, or verdicts on configurations that are not
        ranked, without which a wrong one could be served.
    """

    before: datetime | None = None
    keep_gpus: Collection[str] = ()
    versions: Mapping[str, tuple[str, str]] | None = None
    winners: bool = False


@dataclass(frozen=True, slots=True)
class CleanedStudy:
    """Deletions in one study.

    Attributes
    ----------
    key
        Key of the study.
    reasons
        Criteria that selected its trials: ``old``, ``other GPU``, ``other version``.
    deleted, total
        Number of deleted trials, and of trials before the deletion.
    emptied
        Whether the study was deleted too, as no trial is left.
    """

    key: TuningKey
    reasons: tuple[str, ...]
    deleted: int
    total: int
    emptied: bool


def clean_database(database: Database, kernel: str | None, criteria: Criteria, *, dry_run: bool) -> list[CleanedStudy]:
    """Delete trials, and runs and studies without any trial left.

    Trials of a run that may still be going are kept. If it is interrupted, some studies have been cleaned; the rest is
    cleaned by the same call.

    Parameters
    ----------
    database
        Database, open for writing unless ``dry_run``.
    kernel
        Name of the only kernel to consider; None for all.
    criteria
        Trials to delete.
    dry_run
        Delete nothing; return what would be deleted.

    Returns
    -------
    list of CleanedStudy
        Studies with deletions, by kernel and then oldest first.

    Raises
    ------
    DatabaseError
        The database cannot be read or written.
    """
    query = select(STUDIES).order_by(STUDIES.c.kernel, STUDIES.c.id)
    if kernel is not None:
        query = query.where(STUDIES.c.kernel == kernel)
    with database.reading() as connection:
        studies = parsed_rows(connection, query, stored_study)
    return [found for study in studies if (found := _clean_study(database, study, criteria, dry_run=dry_run))]


def stored_gpu_names(database: Database, names: Iterable[str]) -> Iterator[str]:
    """Yield names of GPUs as CUDA reports them: names in the database unchanged, others by their profiles.

    Raises
    ------
    InputError
        A name is neither in the database nor that of a profile: a mistyped name of a GPU to keep would delete the
        results of that GPU.
    """
    with database.reading() as connection:
        stored = set(connection.execute(select(STUDIES.c.gpu_name).distinct()).scalars())
    for name in names:
        try:
            yield name if name in stored else device_profile(name).name
        except InputError as error:
            held = ", ".join(sorted(stored)) or "no GPU"
            raise InputError(f"{error}; the database holds results of {held}") from None


def current_versions(kernel: KernelName | None) -> dict[str, tuple[str, str]]:
    """Return template hash and space hash by kernel name, of one kernel or of all that are found by name.

    Raises
    ------
    InputError
        The given kernel cannot be read; of all kernels, those that cannot be read are left out.
    """
    found = {}
    for name in [kernel] if kernel is not None else kernel_names():
        try:
            loaded = load_kernel(name)
        except AutotileError:
            if kernel is not None:
                raise
            continue
        found[loaded.name] = (loaded.source_hash, space_hash(loaded.spec))
    return found


def _clean_study(database: Database, study: StoredStudy, criteria: Criteria, *, dry_run: bool) -> CleanedStudy | None:
    study_id, study_reasons = study.study_id, tuple(_study_reasons(study.key, criteria))
    before = criteria.before.astimezone(UTC).isoformat(timespec="microseconds") if criteria.before else ""
    with database.reading() as connection:
        columns = (TRIALS.c.id, TRIALS.c.run_id, TRIALS.c.created_at)
        trials = connection.execute(select(*columns).where(TRIALS.c.study_id == study_id)).all()
        kept, open_runs = _kept(connection, study_id, criteria), _open_runs(connection, study_id)
    selected = [trial for trial in trials if study_reasons or str(trial.created_at) < before]
    selected = [trial for trial in selected if trial.id not in kept and trial.run_id not in open_runs]
    emptied = len(selected) == len(trials) and not open_runs
    if not selected and not (study_reasons and emptied):
        return None
    is_old = bool(before) and any(str(trial.created_at) < before for trial in selected)
    if not dry_run:
        _delete(database, study_id, [trial.id for trial in selected], criteria)
    reasons = (*study_reasons, *(("old",) if is_old else ()))
    return CleanedStudy(study.key, reasons, len(selected), len(trials), emptied)


def _study_reasons(key: TuningKey, criteria: Criteria) -> Iterator[str]:
    """Yield the criteria that select all trials of a study."""
    if criteria.keep_gpus and key.gpu_name not in criteria.keep_gpus:
        yield "other GPU"
    version = (criteria.versions or {}).get(key.kernel)
    if version is not None and version != (key.template_hash, key.space_hash):
        yield "other version"


def _kept(connection: Connection, study_id: int, criteria: Criteria) -> set[int]:
    """Return the trials of a study that are needed to serve: its winner, and verdicts on configurations."""
    if criteria.winners:
        return set()
    winner = select(BEST.c.trial_id).where(BEST.c.study_id == study_id)
    is_verdict = (TRIALS.c.phase == literal_column("'final'")) & TRIALS.c.rank.is_(None)
    verdicts = select(TRIALS.c.id).where(TRIALS.c.study_id == study_id, is_verdict)
    return {*connection.execute(winner).scalars(), *connection.execute(verdicts).scalars()}


def _open_runs(connection: Connection, study_id: int) -> set[int]:
    """Return the runs of a study that may still be going: young ones without an end, and those that hold claims."""
    now = datetime.now(UTC)
    since, until = ((now + age).isoformat(timespec="microseconds") for age in (-_MAX_RUN_AGE, _MAX_RUN_AGE))
    unfinished = select(RUNS.c.id).where(RUNS.c.study_id == study_id, RUNS.c.ended_at.is_(None))
    young = connection.execute(unfinished.where(RUNS.c.started_at.between(since, until))).scalars()
    return {*young, *claiming_runs(connection, study_id)}


def _delete(database: Database, study_id: int, trials: Sequence[int], criteria: Criteria) -> None:
    """Delete trials of a study, and then its runs without any trial, and the study without any run.

    What must stay is asked in each transaction, since others may decide something new between two.
    """
    for start in range(0, len(trials), _CHUNK):
        begun = time.monotonic()
        with database.writing() as connection:
            chosen = set(trials[start : start + _CHUNK]) - _kept(connection, study_id, criteria)
            connection.execute(delete(TRIALS).where(TRIALS.c.id.in_(sorted(chosen))))
        if (
            database.path is not None
        ):  # SQLite gives the lock to whoever asks first, and those who wait ask now and then
            time.sleep(time.monotonic() - begun)
    with database.writing() as connection:
        connection.execute(select(STUDIES.c.id).where(STUDIES.c.id == study_id).with_for_update())  # no run begins now
        has_trials = exists().where(TRIALS.c.run_id == RUNS.c.id)
        open_runs = sorted(_open_runs(connection, study_id))
        connection.execute(delete(RUNS).where(RUNS.c.study_id == study_id, ~has_trials, RUNS.c.id.not_in(open_runs)))
        has_runs = exists().where(RUNS.c.study_id == STUDIES.c.id)
        emptied = connection.execute(delete(STUDIES).where(STUDIES.c.id == study_id, ~has_runs)).rowcount
        if emptied:
            connection.execute(delete(CLAIMS).where(CLAIMS.c.study_id == study_id))
