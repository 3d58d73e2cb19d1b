"""Knowledge in the database: rules of families, models of time of operations, ceilings of GPUs, and what misses cost.

Of each there is one row, the newest, which is found by what it is of. What was learned on this machine is served in
place of what ships. A miss is a call of a problem for which no exact result was stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, delete, select

from autotile.core.ceilings import DeviceCeilings, check_ceilings
from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, JsonObject, Moment, Name, NonNegative, convert, json_hash
from autotile.core.model import Config, Outcome, Problem, Sizes, config_key
from autotile.database.database import Database, StoredBest, row_of, standing_trials
from autotile.database.engine import CEILINGS, FAMILIES, MODELS, identity_of, insert_for, now_text, stored_moment
from autotile.database.keys import TuningKey, version_of
from autotile.database.winners import Row, StoredMiss, StoredRuleDocument
from autotile.errors import DataError
from autotile.families.family import Family, FamilyRule
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance


def _same(table: Table, row: Row) -> list[ColumnElement[bool]]:
    return [column == row[column.name] for column in identity_of(table)]


def _replace(connection: Connection, table: Table, row: Row) -> None:
    """Store a row in place of an older one; its id is new, so that it is the newest."""
    connection.execute(delete(table).where(*_same(table, row)))
    connection.execute(table.insert(), {name: value for name, value in row.items() if name != "id"})


def copy_learned(ours: Connection, table: Table, row: Row) -> bool:
    """Copy a row of another database, unless ours is as new; return whether it was copied."""
    date = table.c["measured_at" if table is CEILINGS else "learned_at"]
    known = ours.execute(select(date).where(*_same(table, row))).all()
    theirs = row[date.name]
    if known and (theirs is None or (isinstance(known[0][0], str) and plausible(known[0][0]) >= plausible(theirs))):
        return False
    _replace(ours, table, row)
    return True


def plausible(moment: str) -> str:
    """Return a date for comparison with those of another machine: one that has yet to come counts as the oldest."""
    return "" if moment > now_text() else moment


@dataclass(frozen=True, slots=True)
class FamilyState:
    """State of a family whose tuning has not finished, from which a killed run is resumed."""

    plan: Mapping[str, Any]
    """The points and the effort at each, as JSON values. A run with another plan starts over."""
    tuned: Count = 0
    """Number of points, in the plan's order, that were tuned."""
    measured: Count = 0
    """Number of points at which the best configurations of all points were measured."""
    seconds: NonNegative = 0.0


class _FamilyRow(msgspec.Struct):
    """Columns of a row, besides the family and the rule."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    kernel: Name
    dtype: Name
    key: TuningKey
    device: DeviceProperties
    progress: FamilyState | None
    learned_at: Moment | None


@row_of(FAMILIES)
def check_family(row: Row) -> FamilyState | None:
    """Return the state in a complete row of the table, after a check of all that it holds."""
    found = convert(row, _FamilyRow)
    try:
        Family.from_json(row["family"])
    except DataError as error:
        raise DataError(error.fault, field="family") from None
    if row["learned_at"] is not None or row["rule"] is not None:
        convert(row, StoredRuleDocument).stored_rule()
    return found.progress


def _family_row(key: TuningKey, family: Family, device: DeviceProperties) -> Row:
    of = {"digest": json_hash([key.to_json(), family.to_json()]), "kernel": key.kernel, "dtype": key.dtype}
    return {**of, "key": key.to_json(), "family": family.to_json(), "device": device.to_json()}


def family_state(database: Database, key: TuningKey, family: Family) -> FamilyState | None:
    """Return the state of a family; None if its tuning never started, or has finished."""
    found = database.rows(FAMILIES, check_family, digest=json_hash([key.to_json(), family.to_json()]))
    return found[0] if found else None


def save_family_state(
    database: Database, key: TuningKey, family: Family, device: DeviceProperties, state: FamilyState
) -> None:
    """Store the state of a family; a rule that the family already has remains in effect."""
    with database.writing() as connection:
        insert = insert_for(connection, FAMILIES).values(**_family_row(key, family, device), progress=asdict(state))
        change = {"progress": insert.excluded.progress}
        connection.execute(insert.on_conflict_do_update(index_elements=identity_of(FAMILIES), set_=change))


def save_rule(database: Database, key: TuningKey, device: DeviceProperties, rule: FamilyRule) -> None:
    """Store the rule of a family in place of an older rule and of the state."""
    learned = {"rule": rule.to_json(), "progress": None, "learned_at": now_text()}
    with database.writing() as connection:
        _replace(connection, FAMILIES, {**_family_row(key, rule.family, device), **learned})


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of an operation for a GPU; `autotile.families.operation_model.OperationModel` reads it."""

    operation: Name
    dtype: Name
    gpu_name: Name
    device: DeviceProperties
    model: JsonObject
    learned_at: Moment


@row_of(MODELS)
def stored_model(row: Row) -> StoredModel:
    """Return the model in a complete row of the table."""
    return convert(row, StoredModel)


def save_model(database: Database, operation: str, dtype: str, device: DeviceProperties, document: JsonObject) -> None:
    """Store the model of an operation for a GPU, in place of an older one."""
    of = {"operation": operation, "dtype": dtype, "gpu_name": device.name}
    with database.writing() as connection:
        _replace(connection, MODELS, {**of, "device": device.to_json(), "model": document, "learned_at": now_text()})


def read_models(database: Database, operation: str | None = None, dtype: str | None = None) -> list[StoredModel]:
    """Return the stored models, newest first; None selects all."""
    return database.rows(MODELS, stored_model, MODELS.c.id.desc(), operation=operation, dtype=dtype)


@row_of(CEILINGS)
def stored_ceilings(row: Row) -> DeviceCeilings:
    """Return the ceilings in a row of the table."""
    measured = convert(row, DeviceCeilings)
    check_ceilings(measured)
    return measured


def save_ceilings(database: Database, measured: DeviceCeilings) -> None:
    """Store the ceilings of a GPU, in place of older ones of its UUID; a `DataError` for those of a datasheet."""
    check_ceilings(measured)
    assert measured.measured_at is not None
    row = {name: value for name, value in measured.to_json().items() if name in CEILINGS.c}
    with database.writing() as connection:
        _replace(connection, CEILINGS, row | {"measured_at": stored_moment(measured.measured_at)})


def read_ceilings(database: Database, gpu_name: str | None = None) -> list[DeviceCeilings]:
    """Return the ceilings of the GPUs of a model, or of all, newest first."""
    newest = (CEILINGS.c.measured_at.desc(), CEILINGS.c.id.desc())
    return database.rows(CEILINGS, stored_ceilings, *newest, gpu_name=gpu_name)


def miss_costs(database: Database, kernel: Kernel) -> Callable[[StoredMiss], tuple[float, float, bool] | None]:
    """Return a function that gives the cost of one call of a missed problem of a kernel; None if too little is tuned.

    The cost is the time of the call and the part of it that the best configuration would have saved, in microseconds,
    and whether both were measured at this problem rather than estimated from others, by the studies and the rules of
    the kernel's current version; docs/serving.md says how.
    """
    version, work, default = version_of(kernel), kernel.spec.work, kernel.spec.default
    rules = [one for one in database.rules(kernel.name) if one.key.version == version]
    studies = [
        best
        for best in database.best(kernel.name)
        if best.key.version == version and best.key.l2_mode == "cold" and best.trial.time_us is not None
    ]
    times_us = {
        study.study_id: {
            one.trial.config_key: one.trial.time_us
            for one in standing_trials(database.stored_trials(study.study_id))
            if one.trial.outcome is Outcome.OK and one.trial.time_us is not None
        }
        for study in studies
    }
    """Standing time of each successful configuration, by `config_key`, of each study."""

    def cost(miss: StoredMiss) -> tuple[float, float, bool] | None:
        same_dtype = [study for study in studies if study.key.dtype == miss.problem.dtype]
        same_gpu = [study for study in same_dtype if study.key.gpu_name == miss.gpu_name]
        sizes = dict(miss.problem.sizes)

        def nearest_to(sizes: Sizes, among: Sequence[StoredBest]) -> StoredBest | None:
            return min(among, key=lambda study: size_distance(study.key.sizes, sizes), default=None)

        def loss_at(study: StoredBest) -> float | None:
            """Return the relative loss of the tier at a tuned problem, as if that problem were not tuned."""
            served: Config | None = default
            if miss.tier != "default":
                elsewhere = [one for one in same_dtype if one.key.gpu_name != miss.gpu_name]
                others = elsewhere if miss.tier == "transferred" else same_gpu
                other = nearest_to(study.key.sizes, [one for one in others if one.key.sizes != study.key.sizes])
                served = other.trial.config if other is not None else None
            known = times_us[study.study_id]
            served_us = known.get(config_key(served)) if served is not None else None
            best_us = known.get(study.trial.config_key)
            return max(0.0, served_us / best_us - 1.0) if served_us is not None and best_us is not None else None

        own = next((study for study in same_gpu if dict(study.key.sizes) == sizes), None)
        nearest = own or nearest_to(sizes, same_gpu)
        if nearest is None:
            return None
        if own is not None:
            loss = loss_at(own)
        elif miss.tier == "family":
            of_gpu = (stored.rule for stored in rules if stored.key.gpu_name == miss.gpu_name)
            loss = next((rule.mean_held_out for rule in of_gpu if sizes in rule.family), None)
        else:
            losses = [each for study in same_gpu if (each := loss_at(study)) is not None]
            loss = sum(losses) / len(losses) if losses else None
        best_us = times_us[nearest.study_id].get(nearest.trial.config_key)
        if loss is None or best_us is None:
            return None
        best_us *= 1.0 if own else work_ratio(miss.problem, nearest.key.problem)
        return best_us * (1.0 + loss), best_us * loss, own is not None

    def work_ratio(asked: Problem, tuned: Problem) -> float:
        """Return the ratio of the work of two problems, in the default configuration if it depends on parameters.

        It is the larger of the ratios of operations and of bytes, or the ratio of the products of the sizes if the
        search-space file states neither.
        """
        ratios = []
        for expression in filter(None, (work.flops, work.bytes)):
            of_asked, of_tuned = (float(expression.evaluate({**default, **one.names})) for one in (asked, tuned))
            ratios += [of_asked / of_tuned] if of_tuned > 0 else []
        volumes = [float(math.prod(max(size, 1) for size in problem.sizes.values())) for problem in (asked, tuned)]
        return max(ratios) if ratios else volumes[0] / volumes[1]

    return cost
