"""Knowledge in the database: rules of families, models of time of operations, and measured ceilings of GPUs.

What was learned on this machine is served in place of what ships.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import Annotated, Any

import msgspec
from sqlalchemy import Connection, delete, select

from autotile.core.ceilings import DeviceCeilings, check_ceilings
from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Moment, Name, NonNegative, canonical_json
from autotile.core.model import Outcome, Problem, config_key
from autotile.database.database import Database, bad_row, parse_row, parsed_rows, rows_of
from autotile.database.engine import CEILINGS, FAMILIES, MODELS, insert_for, now_text
from autotile.database.keys import TuningKey, space_hash
from autotile.database.winners import RULES, Row, RuleDocument, StoredMiss, StoredRule
from autotile.errors import DataError
from autotile.families.family import Family, FamilyRule
from autotile.kernel.expressions import Expression
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance


@dataclass(frozen=True, slots=True)
class FamilyState:
    """State of a family whose tuning has not finished, from which a killed run is resumed.

    Attributes
    ----------
    plan
        The points and the effort at each, as JSON values. A run with another plan starts over.
    tuned, measured
        Number of points, in the plan's order, that were tuned, and at which the best configurations of all points were
        measured.
    seconds
        Wall time spent.
    """

    plan: Mapping[str, Any]
    tuned: Count = 0
    measured: Count = 0
    seconds: NonNegative = 0.0


class FamilyStore:
    """Access to the families of a database; each method is one transaction.

    Parameters
    ----------
    database
        An open database; methods that write need one that was opened for writing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def state(self, key: TuningKey, family: Family) -> FamilyState | None:
        """Return the state of a family; None if its tuning never started, or has finished."""
        query = select(FAMILIES.c.id, FAMILIES.c.progress).where(FAMILIES.c.digest == _digest(key, family))
        with self._database.reading() as connection:
            found = parsed_rows(connection, query, _state)
        return found[0] if found else None

    def save_state(self, key: TuningKey, family: Family, device: DeviceProperties, state: FamilyState) -> None:
        """Store the state of a family; a rule that the family already has remains in effect."""
        row = {
            **_identity(key, family),
            "device": device.to_json(),
            "progress": asdict(state),
        }
        with self._database.writing() as connection:
            insert = insert_for(connection, FAMILIES).values(**row)
            change = {"progress": insert.excluded.progress}
            connection.execute(insert.on_conflict_do_update(index_elements=["digest"], set_=change))

    def save_rule(self, key: TuningKey, device: DeviceProperties, rule: FamilyRule) -> None:
        """Store the rule of a family that has a state, replacing an older rule, and clear the state."""
        row = {
            **_identity(key, rule.family),
            "device": device.to_json(),
            "rule": rule.to_json(),
            "progress": None,
            "learned_at": now_text(),
        }
        with self._database.writing() as connection:
            replace_family(connection, row)

    def rules(self, kernel: str | None = None, dtype: str | None = None) -> list[StoredRule]:
        """Return the rules of a kernel, or of all, newest first."""
        return self._database.read(RULES, kernel=kernel, dtype=dtype)


def replace_family(connection: Connection, row: Mapping[str, Any]) -> None:
    """Replace the row of a family by one with a new id, so that its rule is the newest, if there is one."""
    if connection.execute(delete(FAMILIES).where(FAMILIES.c.digest == row["digest"])).rowcount:
        connection.execute(FAMILIES.insert(), row)


def stored_rule(row: Row) -> StoredRule:
    """Return the rule in a row of the table; a `BadRowError` if it does not match the schema."""
    document = parse_row("families", row["id"], row, RuleDocument)
    try:
        return document.stored_rule()
    except DataError as error:
        raise bad_row("families", row["id"], error) from None


def check_family(row: Row) -> None:
    """Raise a `BadRowError` if a complete row of the table does not match the schema."""
    _state(row)
    parse_row("families", row["id"], row, _FamilyRow)
    try:
        Family.from_json(row["family"])
    except DataError as error:
        raise bad_row("families", row["id"], DataError(error.fault, field="family")) from None
    if row["learned_at"] is not None or row["rule"] is not None:
        stored_rule(row)


class _FamilyRow(msgspec.Struct):
    """Columns of a row, besides the state, the family and the rule."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    kernel: Name
    dtype: Name
    key: TuningKey
    device: DeviceProperties
    learned_at: Moment | None


def _state(row: Row) -> FamilyState | None:
    return parse_row("families", row["id"], row, _StateRow).progress


class _StateRow(msgspec.Struct):
    progress: FamilyState | None


def _identity(key: TuningKey, family: Family) -> dict[str, Any]:
    """Return the columns that identify a family."""
    return {
        "digest": _digest(key, family),
        "kernel": key.kernel,
        "dtype": key.dtype,
        "key": key.to_json(),
        "family": family.to_json(),
    }


def _digest(key: TuningKey, family: Family) -> str:
    return hashlib.sha256(canonical_json([key.to_json(), family.to_json()]).encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model as it is stored.

    Attributes
    ----------
    operation, dtype, gpu_name
        What it is of.
    document
        JSON of `autotile.families.operation_model.OperationModel`, which reads it with ``from_json``.
    learned_at
        Time at which it was learned (UTC).
    """

    operation: str
    dtype: str
    gpu_name: str
    document: Any
    learned_at: str


def save_model(
    database: Database, operation: str, dtype: str, device: DeviceProperties, document: dict[str, Any]
) -> None:
    """Store the model of an operation for a GPU, in place of an older one."""
    row = {
        "operation": operation,
        "dtype": dtype,
        "gpu_name": device.name,
        "device": device.to_json(),
        "model": document,
        "learned_at": now_text(),
    }
    with database.writing() as connection:
        _replace(connection, row)


def copy_model(ours: Connection, row: Mapping[str, Any]) -> None:
    """Copy the row of a model to another database, unless that has a newer one."""
    known = list(rows_of(ours, select(MODELS.c.learned_at).where(*_same(row))))
    if not known or str(known[0]["learned_at"]) < str(row["learned_at"]):
        _replace(ours, {name: value for name, value in row.items() if name != "id"})


def check_model(row: Row) -> None:
    """Raise a `BadRowError` if a complete row of the table does not match the schema."""
    parse_row("models", row["id"], row, _ModelRow)


class _ModelRow(msgspec.Struct):
    operation: Name
    dtype: Name
    gpu_name: Name
    device: DeviceProperties
    model: dict[str, Any]
    learned_at: Moment


def _same(row: Mapping[str, Any]) -> list[Any]:
    return [MODELS.c[name] == row[name] for name in ("operation", "dtype", "gpu_name")]


def _replace(connection: Connection, row: Mapping[str, Any]) -> None:
    connection.execute(delete(MODELS).where(*_same(row)))
    connection.execute(MODELS.insert(), dict(row))


def read_models(
    database: Database, operation: str | None = None, dtype: str | None = None, gpu_name: str | None = None
) -> list[StoredModel]:
    """Return the stored models, newest first; None selects all."""
    filters = ((MODELS.c.operation, operation), (MODELS.c.dtype, dtype), (MODELS.c.gpu_name, gpu_name))
    query = select(MODELS).order_by(MODELS.c.id.desc())
    query = query.where(*(column == value for column, value in filters if value is not None))
    with database.reading() as connection:
        return parsed_rows(connection, query, _stored_model)


def _stored_model(row: Row) -> StoredModel:
    check_model(row)
    return StoredModel(row["operation"], row["dtype"], row["gpu_name"], row["model"], row["learned_at"])


def save_ceilings(database: Database, measured: DeviceCeilings) -> None:
    """Store the ceilings of a GPU, in place of older ones of the same UUID.

    Raises
    ------
    DataError
        They are of no GPU, such as those of a datasheet.
    """
    check_ceilings(measured)
    assert measured.measured_at is not None
    row = {
        **{name: getattr(measured, name) for name in ("gpu_uuid", "gpu_name", "compute_capability", "driver")},
        "measured_at": measured.measured_at.astimezone(UTC).isoformat(timespec="microseconds"),
        "ceilings": measured.to_json()["ceilings"],
        "warnings": list(measured.warnings),
    }
    with database.writing() as connection:
        _replace_ceilings(connection, row)


def read_ceilings(database: Database, gpu_name: str | None = None, gpu_uuid: str | None = None) -> list[DeviceCeilings]:
    """Return the ceilings of the GPUs of a model, of one GPU, or of all, newest first."""
    filters = ((CEILINGS.c.gpu_name, gpu_name), (CEILINGS.c.gpu_uuid, gpu_uuid))
    query = select(CEILINGS).order_by(CEILINGS.c.measured_at.desc(), CEILINGS.c.id.desc())
    query = query.where(*(column == value for column, value in filters if value is not None))
    with database.reading() as connection:
        return parsed_rows(connection, query, stored_ceilings)


def copy_ceilings(ours: Connection, row: Mapping[str, Any]) -> None:
    """Copy the row of a GPU to another database, unless that has a newer one."""
    known = list(rows_of(ours, select(CEILINGS.c.measured_at).where(CEILINGS.c.gpu_uuid == row["gpu_uuid"])))
    if not known or str(known[0]["measured_at"]) < str(row["measured_at"]):
        _replace_ceilings(ours, {name: value for name, value in row.items() if name != "id"})


def stored_ceilings(row: Row) -> DeviceCeilings:
    """Return the ceilings in a row of the table.

    Raises
    ------
    BadRowError
        It does not match the schema.
    """
    measured = parse_row("ceilings", row["id"], row, DeviceCeilings)
    try:
        check_ceilings(measured)
    except DataError as error:
        raise bad_row("ceilings", row["id"], error) from None
    return measured


def _replace_ceilings(connection: Connection, row: Mapping[str, Any]) -> None:
    connection.execute(CEILINGS.delete().where(CEILINGS.c.gpu_uuid == row["gpu_uuid"]))
    connection.execute(CEILINGS.insert(), dict(row))


@dataclass(frozen=True, slots=True)
class MissCost:
    """Cost of one missed call.

    Attributes
    ----------
    call_us
        Time of the call, in microseconds.
    lost_us
        Part of it that the best configuration would have saved, in microseconds.
    measured
        Whether both times were measured at this problem rather than estimated from others.
    """

    call_us: float
    lost_us: float
    measured: bool


class MissCostEstimator:
    """Costs of the misses of one kernel.

    Parameters
    ----------
    kernel
        Kernel in its current version; studies and rules of other versions are ignored.
    studies
        Measured times of the kernel's studies.
    rules
        Rules of the kernel's families, newest first.
    """

    def __init__(self, kernel: Kernel, studies: Iterable[StudyTimes], rules: Iterable[StoredRule]) -> None:
        version = (kernel.source_hash, space_hash(kernel.spec))
        self._kernel = kernel
        self._default = config_key(kernel.spec.default)
        self._studies = [
            study
            for study in studies
            if (study.key.template_hash, study.key.space_hash) == version and study.key.l2_mode == "cold"
        ]
        self._rules = [rule for rule in rules if (rule.key.template_hash, rule.key.space_hash) == version]

    def cost(self, miss: StoredMiss) -> MissCost | None:
        """Return the cost of one call of a missed problem; None if too little is tuned to tell."""
        same_dtype = [study for study in self._studies if study.key.dtype == miss.problem.dtype]
        same_gpu = [study for study in same_dtype if study.key.gpu_name == miss.gpu_name]
        own = next((study for study in same_gpu if dict(study.key.sizes) == dict(miss.problem.sizes)), None)
        if own is not None:
            loss = self._loss_at(own, miss.tier, same_dtype)
            return MissCost(own.best_us * (1.0 + loss), own.best_us * loss, True) if loss is not None else None
        loss = self._expected_loss(miss, same_gpu, same_dtype)
        nearest = _nearest(same_gpu, miss.problem)
        if loss is None or nearest is None:
            return None
        best_us = nearest.best_us * self._work_ratio(miss.problem, nearest.key.problem)
        return MissCost(best_us * (1.0 + loss), best_us * loss, False)

    def _expected_loss(
        self, miss: StoredMiss, same_gpu: Sequence[StudyTimes], same_dtype: Sequence[StudyTimes]
    ) -> float | None:
        """Return the mean relative loss of a fallback of this tier; None if unknown."""
        if miss.tier == "family":
            return next((stored.rule.mean_held_out for stored in self._rules if _applies(stored, miss)), None)
        losses = [loss for study in same_gpu if (loss := self._loss_at(study, miss.tier, same_dtype)) is not None]
        return sum(losses) / len(losses) if losses else None

    def _loss_at(self, study: StudyTimes, tier: str, same_dtype: Sequence[StudyTimes]) -> float | None:
        """Return the relative loss of a fallback at a tuned problem, as if that problem were not tuned."""
        if tier == "default":
            return study.loss(self._default)
        wants_same_gpu = tier != "transferred"
        others = [
            other
            for other in same_dtype
            if dict(other.key.sizes) != dict(study.key.sizes)
            and (other.key.gpu_name == study.key.gpu_name) == wants_same_gpu
        ]
        served = _nearest(others, study.key.problem)
        return study.loss(served.best) if served is not None else None

    def _work_ratio(self, asked: Problem, tuned: Problem) -> float:
        """Return the ratio of the work of two problems.

        It is the larger of the ratios of operations and of bytes, or the ratio of the products of the sizes if the
        search-space file states neither.
        """
        work = self._kernel.spec.work
        ratios = [
            self._value(expression, asked) / self._value(expression, tuned)
            for expression in (work.flops, work.bytes)
            if expression is not None and self._value(expression, tuned) > 0
        ]
        return max(ratios) if ratios else _volume(asked) / _volume(tuned)

    def _value(self, expression: Expression, problem: Problem) -> float:
        """Return the work of a problem, in the default configuration if it depends on parameters."""
        return float(expression.evaluate({**self._kernel.spec.default, **problem.sizes}))


def _nearest(studies: Sequence[StudyTimes], problem: Problem) -> StudyTimes | None:
    return min(studies, key=lambda study: size_distance(study.key.sizes, problem.sizes), default=None)


def _applies(stored: StoredRule, miss: StoredMiss) -> bool:
    return stored.key.gpu_name == miss.gpu_name and dict(miss.problem.sizes) in stored.rule.family


def _volume(problem: Problem) -> float:
    return float(math.prod(max(size, 1) for size in problem.sizes.values()))


@dataclass(frozen=True, slots=True)
class StudyTimes:
    """Times of one problem's configurations.

    Attributes
    ----------
    best
        `config_key` of the winner.
    times_us
        Newest time of each successful configuration, by `config_key`; a time of the finals precedes one of the search.
    """

    key: TuningKey
    best: str
    times_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        """Time of the winner."""
        return self.times_us[self.best]

    def loss(self, config: str) -> float | None:
        """Return the time of a configuration over the winner's, minus 1, at least 0; None if it was not measured."""
        time_us = self.times_us.get(config)
        return None if time_us is None else max(0.0, time_us / self.best_us - 1.0)


def study_times(database: Database, kernel: str) -> list[StudyTimes]:
    """Return the times of every study of a kernel that has a winner.

    Raises
    ------
    DatabaseError
        The database cannot be read.
    """
    return [
        StudyTimes(best.key, config_key(best.trial.config), _times(database, best.study_id))
        for best in database.best(kernel)
        if best.trial.time_us is not None
    ]


def _times(database: Database, study_id: int) -> dict[str, float]:
    trials = (stored.trial for stored in database.standing_trials(study_id))
    return {config_key(t.config): t.time_us for t in trials if t.outcome is Outcome.OK and t.time_us is not None}
