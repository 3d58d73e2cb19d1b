"""Merging of databases: rows that the target lacks are copied, then one winner per study is chosen to be served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import Connection, Table, func, select, update

from autotile.core.documents import canonical_json
from autotile.core.model import Measurement, Trial, config_key
from autotile.core.statistics import Interval, ratio_of, widen_by_session_spread
from autotile.database.checking import usable_rows
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.learned_store import (
    copy_ceilings,
    copy_model,
    replace_family,
)
from autotile.database.rows import StoredTrial, rows_of
from autotile.database.schema import CEILINGS, FAMILIES, MISSES, MODELS, RUNS, STUDIES, TRIALS, insert_for, now_text
from autotile.database.studies import StoredBest

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
