"""Open the database to read."""

from __future__ import annotations

from pathlib import Path

from autotile.files.settings import read_settings
from autotile.ground.errors import DatabaseError
from autotile.store.database import Database
from autotile.store.engine import parse_location


def open_to_read(database: str | None) -> Database | None:
    """The database that was named, or the user's own; None where the user's own is not there yet.

    Raises
    ------
    DatabaseError
        It cannot be read, or there is none of the name given: a mistyped path must not pass for an empty database.
    """
    opened = Database.open_readonly(database or read_settings().database)
    if opened is None and database is not None:
        place = parse_location(database)
        cure = "check its path, or leave out --db for your own" if isinstance(place, Path) else "check its URL"
        raise DatabaseError(f"there is no database {place}; {cure}")
    return opened
