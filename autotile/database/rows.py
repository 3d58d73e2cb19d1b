"""Rows of the database, each parsed by the schema of its table; one that does not match is skipped and named once.

The names of most columns are those of the fields that they become, so that a row is a valid document of several
dataclasses at once.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import JSON, Connection, Select, select

from autotile.core.documents import Count, Moment, NonNegative, Whole, convert, json_text, storable
from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, config_key
from autotile.database.schema import TRIALS
from autotile.database.winners import MEASUREMENT_COLUMNS, RESOURCE_COLUMNS, part_of
from autotile.errors import DataError, DataWarning

Value = TypeVar("Value")
Row = Mapping[str, Any]

LOCATION_OPTION = "autotile_location"
"""Execution option of a connection that holds the location of the database, for warnings."""

_NAMED_ROWS = 3
"""Rows that a warning names; `autotile db check` names all."""
_MAX_FAULT = 200
_PARTS = re.compile(r"\A(?:(?:key|problem|trial|geometry|resources|occupancy|measurement)\.)+")
"""Parts of the objects that a row becomes, which are no columns."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that does not match the schema of its table.

    Attributes
    ----------
    table, row_id
        Table and id.
    field
        Column, with the path of a value inside it; empty for the whole row.
    fault
        What was found, and what was expected.
    """

    table: str
    row_id: int
    field: str
    fault: str

    def __str__(self) -> str:
        return f"{self.table} {self.row_id}: {f'{self.field}: ' if self.field else ''}{self.fault}"


class BadRowError(DataError):
    """Row that does not match the schema of its table."""

    def __init__(self, row: BadRow) -> None:
        super().__init__(row.fault, field=row.field)
        self.row = row


def parse_row(table: str, row_id: int, value: Any, schema: type[Value]) -> Value:
    """Parse what a row holds.

    Parameters
    ----------
    value
        The row, or an object made of its columns.

    Raises
    ------
    BadRowError
        It does not match the schema.
    """
    try:
        return convert(value, schema)
    except DataError as error:
        raise bad_row(table, row_id, error) from None


def bad_row(table: str, row_id: int, error: DataError) -> BadRowError:
    """Return the error for a row whose content does not match a schema."""
    column = _PARTS.sub("", error.field) if table != "families" else error.field
    return BadRowError(BadRow(table, row_id, column, error.fault[:_MAX_FAULT]))


def parsed_rows(
    connection: Connection, query: Select[Any], parse: Callable[[Row], Value], bad: list[BadRow] | None = None
) -> list[Value]:
    """Run a query and parse its rows; skip those that do not match, with a `DataWarning`.

    Parameters
    ----------
    parse
        Function that returns what a row holds, or raises a `BadRowError`.
    bad
        List to which rows that do not match are added, instead of a warning.
    """
    found: list[Value] = []
    refused: list[BadRow] = [] if bad is None else bad
    for row in rows_of(connection, query):
        try:
            found.append(parse(row))
        except BadRowError as error:
            refused.append(error.row)
    if bad is None:
        warn_of(connection, refused)
    return found


def rows_of(connection: Connection, query: Select[Any]) -> Iterator[Row]:
    """Run a query, and yield its rows as dictionaries with plain strings as keys, which a schema needs."""
    result = connection.execute(query)
    names = [str(name) for name in result.keys()]  # noqa: SIM118 - it is no dictionary
    for row in result:
        yield dict(zip(names, row, strict=True))


_named: set[tuple[str, BadRow]] = set()
"""Rows that this process has named, with the location of their database."""


def warn_of(connection: Connection, rows: Sequence[BadRow]) -> None:
    """Warn of rows that are skipped, unless this process has done so already."""
    location = connection.get_execution_options().get(LOCATION_OPTION, "the database")
    new = [row for row in dict.fromkeys(rows) if (location, row) not in _named]
    if not new:
        return
    _named.update((location, row) for row in new)
    listed = "; ".join(map(str, new[:_NAMED_ROWS]))
    more = f"; and {len(new) - _NAMED_ROWS:,} more" if len(new) > _NAMED_ROWS else ""
    warnings.warn(
        f"{location}: skipped {len(new):,} unusable {'row' if len(new) == 1 else 'rows'}: {listed}{more}; "
        "`autotile db check` lists all",
        DataWarning,
        stacklevel=2,
    )


Phase = Literal["search", "final"]

_OCCUPANCY_COLUMNS = tuple(field.name for field in fields(Occupancy))


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with its position in the database and the time at which it was recorded."""

    trial_id: Whole
    study_id: Whole
    run_id: Whole
    phase: Phase
    rank: Count | None
    """Rank in the run's finals, 1 for the winner; None for trials of the search."""
    created_at: Moment
    trial: Trial

    @property
    def is_refusal(self) -> bool:
        """Whether finals have rejected the configuration, which the trials before it cannot win with any more."""
        return self.phase == "final" and self.trial.outcome is not Outcome.OK


def trial_row(trial: Trial) -> dict[str, Any]:
    """Return the columns of the table ``trials`` that the trial itself determines."""
    return {
        "config_key": config_key(trial.config),
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": storable(trial.reason),
        "cubin_hash": trial.cubin_hash,
        "telemetry": {name: value for name, value in trial.telemetry.items() if _is_storable(value)},
        "seconds": dict(trial.seconds),
        "source": trial.source,
        "gpu": trial.gpu,
        **_geometry_columns(trial.geometry),
        **_resource_columns(trial.resources),
        **_occupancy_columns(trial.occupancy),
        **_measurement_columns(trial.measurement),
    }


class _Figures(msgspec.Struct):
    """Telemetry that other modules calculate with."""

    energy_mj: NonNegative | None = None
    max_error: NonNegative | None = None
    reference_us: NonNegative | None = None
    repeats: NonNegative | None = None


class _TrialRow(msgspec.Struct):
    telemetry: _Figures


def stored_trial(row: Row) -> StoredTrial:
    """Invert `trial_row`, for a complete row of the table.

    Raises
    ------
    BadRowError
        It does not match the schema.
    """
    columns = {**row, "samples_us": row["samples_us"] if row["samples_us"] is not None else ()}
    parts = {
        "resources": part_of(row, RESOURCE_COLUMNS),
        "measurement": columns if part_of(row, ("samples_us", *MEASUREMENT_COLUMNS)) else None,
        "geometry": part_of(row, ("grid", "block", "dynamic_smem_bytes")),
        "occupancy": part_of(row, _OCCUPANCY_COLUMNS),
    }
    value = {**columns, "trial_id": row["id"], "trial": {**columns, **parts}}
    found = parse_row("trials", row["id"], value, StoredTrial)
    parse_row("trials", row["id"], row, _TrialRow)
    if row["config_key"] != config_key(found.trial.config):
        raise bad_row("trials", row["id"], DataError("it is not that of the configuration", field="config_key"))
    return found


_COLUMNS = [column.name for column in TRIALS.c if not column.primary_key]
_JSON_COLUMNS = [column.name for column in TRIALS.c if isinstance(column.type, JSON)]
_INSERT = f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"
_PARAMETER = re.compile(r"(?<!:):(\w+)")


def run_text(
    connection: Connection, statement: str, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> Sequence[tuple[Any, ...]]:
    """Run a statement with values by their names, ``:name``; return its rows, none of one without ``RETURNING``.

    A session commits several short transactions for each batch of trials. SQLAlchemy's statements would take several
    times as long as the database itself.
    """
    is_server = connection.dialect.name == "postgresql"
    result = connection.exec_driver_sql(_server_text(statement) if is_server else statement, values)
    return [tuple(row) for row in result] if result.returns_rows else ()


@cache
def _server_text(statement: str) -> str:
    """Return a statement with the parameters of PostgreSQL's driver, ``%(name)s``."""
    return _PARAMETER.sub(r"%(\1)s", statement)


def insert_trials(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert trials, given by all of their columns but the id."""
    if rows:
        encoded = (
            {name: None if row[name] is None else json_text(row[name]) for name in _JSON_COLUMNS} for row in rows
        )
        run_text(connection, _INSERT, [{**row, **cells} for row, cells in zip(rows, encoded, strict=True)])


def read_trials(connection: Connection, study_id: int, run_id: int | None, phase: Phase | None) -> list[StoredTrial]:
    """Return the trials of a study, optionally of one run or one phase, oldest first."""
    query = select(TRIALS).where(TRIALS.c.study_id == study_id).order_by(TRIALS.c.id)
    if run_id is not None:
        query = query.where(TRIALS.c.run_id == run_id)
    if phase is not None:
        query = query.where(TRIALS.c.phase == phase)
    return parsed_rows(connection, query, stored_trial)


def standing_trials(stored: Iterable[StoredTrial]) -> list[StoredTrial]:
    """Return one trial of each configuration, the one to show, in the order in which they were first tried.

    A study has several rows of a configuration that was in the finals, was tried by several sessions or was measured
    anew. The newest finals stand, as they compare the times in turn, unless the configuration was tried again since
    then and either of both failed.

    Parameters
    ----------
    stored
        Trials of one study, oldest first.
    """
    found: dict[str, StoredTrial] = {}
    for one in stored:
        key = config_key(one.trial.config)
        before = found.get(key)
        is_kept = before is not None and before.phase == "final" and one.phase == "search"
        if not (is_kept and before is not None and before.trial.outcome is one.trial.outcome is Outcome.OK):
            found[key] = one
    return list(found.values())


def _is_storable(value: object) -> bool:
    """Return whether JSON has a value: it has no infinity and no NaN."""
    return not isinstance(value, float) or math.isfinite(value)


def _geometry_columns(geometry: LaunchGeometry | None) -> dict[str, Any]:
    return {
        "grid": list(geometry.grid) if geometry else None,
        "block": list(geometry.block) if geometry else None,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes if geometry else None,
    }


def _resource_columns(resources: Resources | None) -> dict[str, Any]:
    return {name: getattr(resources, name) if resources else None for name in RESOURCE_COLUMNS}


def _occupancy_columns(occupancy: Occupancy | None) -> dict[str, Any]:
    return {
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
        "warps_per_sm": occupancy.warps_per_sm if occupancy else None,
        "occupancy": occupancy.occupancy if occupancy else None,
        "limited_by": list(occupancy.limited_by) if occupancy else None,
        "limits": dict(occupancy.limits) if occupancy else None,
    }


def _measurement_columns(measurement: Measurement | None) -> dict[str, Any]:
    return {
        "time_us": measurement.time_us if measurement else None,
        "low_us": measurement.low_us if measurement else None,
        "high_us": measurement.high_us if measurement else None,
        "samples_us": list(measurement.samples_us) if measurement else None,
        "l2": measurement.l2 if measurement else None,
    }
