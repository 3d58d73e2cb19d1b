"""Delete what is old, of other GPUs or of other versions of a kernel; winners are kept unless they are meant too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, delete, exists, select

from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.schema import BEST, RUNS, STUDIES, TRIALS

_UNDER_WAY = timedelta(days=1)
"""A run without an end that began since may still be going: what it needs stays."""
_CHUNK = 500
"""Rows a statement: SQLite takes 32,766 values at most, and older ones 999."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What to delete; whatever one of them names goes.

    Attributes
    ----------
    before
        Trials that were recorded before.
    keep_gpus
        All trials of other GPUs than these; empty for no such wish.
    versions
        Template hash and space hash of kernels as they are now: all trials of their other versions.
    winners
        The best of each study too.
    """

    before: datetime | None = None
    keep_gpus: Collection[str] = ()
    versions: Mapping[str, tuple[str, str]] | None = None
    winners: bool = False


@dataclass(frozen=True, slots=True)
class Pruned:
    """What is deleted of one study.

    Attributes
    ----------
    reasons
        Which of the criteria name it: ``old``, ``other GPU``, ``other version``.
    trials, of
        Trials that go, of so many.
    whole
        Whether nothing is left of it.
    """

    key: TuningKey
    reasons: tuple[str, ...]
    trials: int
    of: int
    whole: bool


def prune(database: Database, kernel: str | None, criteria: Criteria, *, dry_run: bool) -> list[Pruned]:
    """Delete trials, then runs and studies that are left empty, in one transaction.

    Parameters
    ----------
    kernel
        Only this one's; None for all.
    dry_run
        Delete nothing, and say what would be.

    Raises
    ------
    DatabaseError
        The database cannot be read or written.
    """
    opening = database.reading() if dry_run else database.writing()
    with opening as connection:
        query = select(STUDIES).order_by(STUDIES.c.kernel, STUDIES.c.id)
        if kernel is not None:
            query = query.where(STUDIES.c.kernel == kernel)
        studies = list(connection.execute(query).mappings())
        return [found for row in studies if (found := _prune_study(connection, row, criteria, dry_run=dry_run))]


def _prune_study(
    connection: Connection, study: Mapping[Any, Any], criteria: Criteria, *, dry_run: bool
) -> Pruned | None:
    whole = tuple(_reasons(study, criteria))
    columns = (TRIALS.c.id, TRIALS.c.run_id, TRIALS.c.created_at)
    trials = connection.execute(select(*columns).where(TRIALS.c.study_id == study["id"])).all()
    before = criteria.before.astimezone(UTC).isoformat(timespec="microseconds") if criteria.before else ""
    going = [trial for trial in trials if whole or trial.created_at < before]
    kept = set() if criteria.winners else set(_winners(connection, study["id"]))
    running = set(_running(connection, study["id"]))
    going = [trial for trial in going if trial.id not in kept and trial.run_id not in running]
    empty = len(going) == len(trials) and not running
    if not going and not (whole and empty):
        return None
    reasons = whole + (("old",) if before and any(trial.created_at < before for trial in going) else ())
    if not dry_run:
        _delete(connection, study["id"], [trial.id for trial in going], running)
    return Pruned(TuningKey.from_json(study), reasons, len(going), len(trials), empty)


def _reasons(study: Mapping[Any, Any], criteria: Criteria) -> Iterator[str]:
    """Why all of a study goes."""
    if criteria.keep_gpus and study["gpu_name"] not in criteria.keep_gpus:
        yield "other GPU"
    version = (criteria.versions or {}).get(study["kernel"])
    if version is not None and version != (study["template_hash"], study["space_hash"]):
        yield "other version"


def _winners(connection: Connection, study_id: int) -> Iterable[int]:
    return connection.execute(select(BEST.c.trial_id).where(BEST.c.study_id == study_id)).scalars()


def _running(connection: Connection, study_id: int) -> Iterable[int]:
    since = (datetime.now(UTC) - _UNDER_WAY).isoformat(timespec="microseconds")
    open_runs = select(RUNS.c.id).where(RUNS.c.study_id == study_id, RUNS.c.ended_at.is_(None))
    return connection.execute(open_runs.where(RUNS.c.started_at >= since)).scalars()


def _delete(connection: Connection, study_id: int, trials: Sequence[int], running: Collection[int]) -> None:
    for start in range(0, len(trials), _CHUNK):
        connection.execute(delete(TRIALS).where(TRIALS.c.id.in_(trials[start : start + _CHUNK])))
    used = exists().where(TRIALS.c.run_id == RUNS.c.id)
    unused = delete(RUNS).where(RUNS.c.study_id == study_id, ~used, RUNS.c.id.not_in(sorted(running)))
    connection.execute(unused)
    begun = exists().where(RUNS.c.study_id == STUDIES.c.id)
    connection.execute(delete(STUDIES).where(STUDIES.c.id == study_id, ~begun))
