"""Rows that do not match their schema: found, moved to a JSON file beside the database, and put back from it.

A study takes its runs and trials with it, and a run its trials, since these would refer to nothing.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, select

from autotile.core.documents import Format, decode_json, encode_json, read_regular
from autotile.database.ceiling_store import stored_ceilings
from autotile.database.learned_store import check_family, check_model
from autotile.database.misses import stored_miss
from autotile.database.paths import atomic_write
from autotile.database.rows import BadRow, BadRowError, Row, rows_of, stored_trial
from autotile.database.schema import METADATA, RUNS, TRIALS
from autotile.database.studies import stored_run, stored_study
from autotile.errors import DatabaseError, DataError

if TYPE_CHECKING:
    from autotile.database.database import Database

_FORMAT = 1
_MAX_BYTES = 2**30
_CHUNK = 500
"""Rows per statement: older versions of SQLite accept 999 values in one."""

_PARSERS: Mapping[str, Callable[[Row], object]] = {
    "studies": stored_study,
    "runs": stored_run,
    "trials": stored_trial,
    "misses": stored_miss,
    "families": check_family,
    "models": check_model,
    "ceilings": stored_ceilings,
}
"""Function that parses a row of each table; parents before the tables that refer to them."""


class _Cell(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Cell that JSON has no value for: bytes in base64, or an infinity."""

    blob: str | None = None
    text: str | None = None
    real: Literal["inf", "-inf"] | None = None

    def value(self) -> bytes | float:
        """Return the content; text that is not UTF-8 as its bytes."""
        if self.real is not None:
            return float(self.real)
        try:
            return base64.b64decode(self.blob or self.text or "", validate=True)
        except ValueError:
            raise DataError("a cell is not base64") from None


class _StoredRow(msgspec.Struct):
    table: Literal["studies", "runs", "trials", "misses", "families", "models", "ceilings"]
    columns: dict[str, int | float | str | _Cell | None]
    reason: str = ""


class _File(msgspec.Struct):
    """Schema of a file of quarantined rows, besides its format."""

    rows: list[_StoredRow]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Rows that were moved to a file, or put back.

    Attributes
    ----------
    path
        The file.
    counts
        Number of rows by table.
    """

    path: Path
    counts: Mapping[str, int]


def find_bad_rows(connection: Connection) -> Iterator[BadRow]:
    """Yield the rows of all tables that do not match their schemas."""
    for name, parse in _PARSERS.items():
        for row in rows_of(connection, select(METADATA.tables[name])):
            try:
                parse(row)
            except BadRowError as error:
                yield error.row


def quarantine_bad_rows(database: Database) -> Quarantine | None:
    """Move the rows that do not match their schemas, and those that refer to them, to a new file beside the database.

    The file is complete before a row is deleted.

    Returns
    -------
    Quarantine or None
        None if there is no such row.

    Raises
    ------
    DatabaseError
        The database is on a server, or it or the file cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    path = Path(f"{_file_of(database)}.quarantine-{stamp}.json")
    with database.writing() as connection:
        reasons = {(row.table, row.row_id): str(row) for row in find_bad_rows(connection)}
        if not reasons:
            return None
        ids = _with_dependents(connection, reasons)
        rows = [_raw_row(connection, table, one, reasons) for table in _PARSERS for one in sorted(ids[table])]
        document = {"format": _FORMAT, "database": database.location, "rows": rows}
        try:
            with atomic_write(path) as stream:
                stream.write(encode_json(document, indent=1).encode())
        except OSError as error:
            raise DatabaseError(f"cannot write {path}: {error.strerror}; no row was moved") from None
        for table in reversed(list(_PARSERS)):
            for some in _chunks(sorted(ids[table])):
                connection.execute(delete(METADATA.tables[table]).where(METADATA.tables[table].c.id.in_(some)))
    return Quarantine(path, {table: len(found) for table, found in ids.items() if found})


def restore_rows(database: Database, path: Path) -> Quarantine:
    """Insert the rows of a file of quarantined rows with the ids that they had, all or none.

    Raises
    ------
    DataError
        The file cannot be read, or is not such a file.
    DatabaseError
        The database is on a server, cannot be written, or has other rows with these ids by now.
    """
    _file_of(database)
    counts = dict.fromkeys(_PARSERS, 0)
    stored = _read(path)
    with database.writing() as connection:
        for table in _PARSERS:
            for row in (row for row in stored if row.table == table):
                _insert(connection, row, path)
                counts[table] += 1
    return Quarantine(path, {table: count for table, count in counts.items() if count})


def _file_of(database: Database) -> Path:
    path = database.path
    if path is None:
        raise DatabaseError(
            f"{database.location} is on a server, whose rows are not moved to a file; correct or delete them with SQL"
        )
    return path


def _with_dependents(connection: Connection, reasons: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    """Return the ids of rows by table, with the rows that refer to them."""
    ids: dict[str, set[int]] = {table: set() for table in _PARSERS}
    for table, row_id in reasons:
        ids[table].add(row_id)
    for child, column, parent in ((RUNS, RUNS.c.study_id, "studies"), (TRIALS, TRIALS.c.study_id, "studies")):
        ids[child.name] |= _referring(connection, child.c.id, column, ids[parent])
    ids["trials"] |= _referring(connection, TRIALS.c.id, TRIALS.c.run_id, ids["runs"])
    return ids


def _referring(
    connection: Connection, row_id: ColumnElement[int], column: ColumnElement[int], ids: Iterable[int]
) -> set[int]:
    chunks = _chunks(sorted(ids))
    return {one for some in chunks for one in connection.execute(select(row_id).where(column.in_(some))).scalars()}


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))


def _raw_row(connection: Connection, table: str, row_id: int, reasons: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Return a row as it is stored, without the conversions of its columns."""
    names = [str(name) for name in METADATA.tables[table].columns.keys()]  # noqa: SIM118 - plain strings
    selected = ", ".join([f'"{name}"' for name in names] + [f'typeof("{name}")' for name in names])
    cells = connection.exec_driver_sql(f"SELECT {selected} FROM {table} WHERE id = ?", (row_id,)).one()
    columns = {name: _cell(cells[place], cells[len(names) + place]) for place, name in enumerate(names)}
    reason = reasons.get((table, row_id), "it refers to a row that was moved")
    return {"table": table, "reason": reason, "columns": columns}


def _cell(value: Any, kind: str) -> Any:
    if isinstance(value, bytes):
        return {kind: base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"real": "inf" if value > 0 else "-inf"}
    return value


def _read(path: Path) -> list[_StoredRow]:
    try:
        text = read_regular(path, _MAX_BYTES)
        if decode_json(text, Format).format == _FORMAT:
            return decode_json(text, _File).rows
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path} is not a file of quarantined rows: {error}") from None
    raise DataError(f"{path} is not a file of quarantined rows of format {_FORMAT}: upgrade autotile")


def _insert(connection: Connection, row: _StoredRow, path: Path) -> None:
    known = METADATA.tables[row.table].c
    if unknown := sorted(row.columns.keys() - set(known.keys())):
        raise DataError(f"{path}: the table {row.table} has no column {unknown[0]!r:.80}")
    cells = row.columns.values()
    places = ", ".join("CAST(? AS TEXT)" if isinstance(c, _Cell) and c.text is not None else "?" for c in cells)
    values = tuple(cell.value() if isinstance(cell, _Cell) else cell for cell in cells)
    names = ", ".join(f'"{name}"' for name in row.columns)
    try:
        connection.exec_driver_sql(f"INSERT INTO {row.table} ({names}) VALUES ({places})", values)
    except OverflowError:
        raise DataError(f"{path}: an integer of {row.table} has more than 64 bits") from None
