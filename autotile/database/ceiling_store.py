"""Ceilings of GPUs in the database: the newest measurement of each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select

from autotile.core.ceilings import DeviceCeilings, check_ceilings
from autotile.database.rows import Row, bad_row, parse_row, parsed_rows, rows_of
from autotile.database.schema import CEILINGS
from autotile.errors import DataError

if TYPE_CHECKING:
    from autotile.database.database import Database


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
        _replace(connection, row)


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
        _replace(ours, {name: value for name, value in row.items() if name != "id"})


def stored_ceilings(row: Row) -> DeviceCeilings:
    """Return what a row of the table holds.

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


def _replace(connection: Connection, row: Mapping[str, Any]) -> None:
    connection.execute(CEILINGS.delete().where(CEILINGS.c.gpu_uuid == row["gpu_uuid"]))
    connection.execute(CEILINGS.insert(), dict(row))
