"""Models of time of operations in the database: learned on this machine, and served in place of shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, delete, select

from autotile.core.device import DeviceProperties
from autotile.core.documents import Moment, Name
from autotile.core.frozen import dataclass
from autotile.database.rows import Row, parse_row, parsed_rows, rows_of
from autotile.database.schema import MODELS, now_text

if TYPE_CHECKING:
    from autotile.database.database import Database


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
