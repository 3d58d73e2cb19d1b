"""Rows of the database, each parsed by the schema of its table; one that does not match is skipped and named once.

The names of most columns are those of the fields that they become, so that a row is a valid document of several
dataclasses at once.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Select

from autotile.core.documents import convert
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
        "`autotile db check` lists all, `autotile db check --quarantine` moves them to a file",
        DataWarning,
        stacklevel=2,
    )
