"""Copy everything that one database holds into another; what both hold is not doubled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, func, select, update

from autotile.core.model import canonical_json
from autotile.database.database import Database
from autotile.database.schema import FAMILIES, MISSES, RUNS, STUDIES, TRIALS, insert_for

_OF_A_RUN = ("started_at", "host", "sampler", "seed")
"""What tells the runs of a study apart, beside the study; they begin a microsecond apart at least."""
_OF_A_TRIAL = ("phase", "rank", "config_key", "outcome", "created_at", "time_us")


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows that were new."""

    studies: int
    runs: int
    trials: int
    rules: int


def copy_all(source: Database, target: Database) -> Copied:
    """Copy studies, runs, trials, families and misses that the target lacks, in one transaction.

    Nothing in the target is changed but these: a run that has ended meanwhile ends there too; a family takes the newer
    rule; of misses that both count, the greater count stays, as a copied database counts the same ones.

    Raises
    ------
    DatabaseError
        One of them cannot be read or the other not be written.
    """
    with source.reading() as theirs, target.writing() as ours:
        studies = runs = trials = 0
        for row in theirs.execute(select(STUDIES).order_by(STUDIES.c.id)).mappings():
            study_id, is_new = _copy_study(ours, row)
            studies += is_new
            new_runs, new_trials = _copy_runs(theirs, ours, row["id"], study_id)
            runs, trials = runs + new_runs, trials + new_trials
        rules = sum(_copy_family(ours, row) for row in theirs.execute(select(FAMILIES)).mappings())
        for row in theirs.execute(select(MISSES)).mappings():
            _copy_miss(ours, row)
        return Copied(studies, runs, trials, rules)


def _copy_study(ours: Connection, row: Mapping[Any, Any]) -> tuple[int, bool]:
    wanted = select(STUDIES.c.id).where(STUDIES.c.digest == row["digest"])
    known = ours.execute(wanted).scalar_one_or_none()
    if known is not None:
        return known, False
    return int(ours.execute(STUDIES.insert().returning(STUDIES.c.id), _values(STUDIES, row)).scalar_one()), True


def _copy_runs(theirs: Connection, ours: Connection, from_study: int, study_id: int) -> tuple[int, int]:
    """Runs of a study with their trials, each in the order it was recorded."""
    known = {_identity(row, _OF_A_RUN): row for row in _rows(ours, RUNS, study_id)}
    run_ids: dict[int, int] = {}
    new = 0
    for row in _rows(theirs, RUNS, from_study):
        mine = known.get(_identity(row, _OF_A_RUN))
        if mine is None:
            values = _values(RUNS, row) | {"study_id": study_id}
            run_ids[row["id"]] = int(ours.execute(RUNS.insert().returning(RUNS.c.id), values).scalar_one())
            new += 1
            continue
        run_ids[row["id"]] = mine["id"]
        if mine["ended_at"] is None and row["ended_at"] is not None:
            change = {"ended_at": row["ended_at"], "summary": row["summary"]}
            ours.execute(update(RUNS).where(RUNS.c.id == mine["id"]).values(**change))
    held = {(row["run_id"], _identity(row, _OF_A_TRIAL)) for row in _rows(ours, TRIALS, study_id)}
    trials = [
        _values(TRIALS, row) | {"study_id": study_id, "run_id": run_ids[row["run_id"]]}
        for row in _rows(theirs, TRIALS, from_study)
        if (run_ids[row["run_id"]], _identity(row, _OF_A_TRIAL)) not in held
    ]
    if trials:
        ours.execute(TRIALS.insert(), trials)
    return new, len(trials)


def _copy_family(ours: Connection, row: Mapping[Any, Any]) -> bool:
    """Whether a rule was taken over: one that the target lacks, or a newer one."""
    known = ours.execute(select(FAMILIES).where(FAMILIES.c.digest == row["digest"])).mappings().one_or_none()
    if known is None:
        ours.execute(FAMILIES.insert(), _values(FAMILIES, row))
        return row["rule"] is not None
    if row["learned_at"] is None or (known["learned_at"] or "") >= row["learned_at"]:
        return False
    change = {name: row[name] for name in ("rule", "device", "progress", "learned_at")}
    ours.execute(update(FAMILIES).where(FAMILIES.c.id == known["id"]).values(**change))
    return True


def _copy_miss(ours: Connection, row: Mapping[Any, Any]) -> None:
    insert = insert_for(ours, MISSES).values(**_values(MISSES, row))
    greater = func.greatest if ours.dialect.name == "postgresql" else func.max
    change = {
        "count": greater(MISSES.c.count, insert.excluded.count),
        "last_at": greater(MISSES.c.last_at, insert.excluded.last_at),
    }
    unique = ["kernel", "sizes", "dtype", "gpu_name", "tier"]
    ours.execute(insert.on_conflict_do_update(index_elements=unique, set_=change))


def _rows(connection: Connection, table: Table, study_id: int) -> list[Mapping[Any, Any]]:
    query = select(table).where(table.c.study_id == study_id).order_by(table.c.id)
    return list(connection.execute(query).mappings())


def _values(table: Table, row: Mapping[Any, Any]) -> dict[str, Any]:
    return {column.name: row[column.name] for column in table.c if column.name != "id"}


def _identity(row: Mapping[Any, Any], names: tuple[str, ...]) -> str:
    return canonical_json([row[name] for name in names])
