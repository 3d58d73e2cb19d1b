"""Open the database to read."""

from __future__ import annotations

from pathlib import Path

from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.errors import DatabaseError
from autotile.settings import read_settings


def open_to_read(database: str | None) -> Database | None:
    """The database that was named, or the user's own; None where the user's own is not there yet.

    Raises
    ------
    DatabaseError
        It cannot be read, or there is none of the name given: a mistyped path must not pass for an empty database.
    """
    return open_named(database) if database is not None else Database.open_readonly(read_settings().database)


def open_named(database: str) -> Database:
    """The database of a path or URL.

    Raises
    ------
    DatabaseError
        There is none, or it cannot be read.
    """
    opened = Database.open_readonly(database)
    if opened is None:
        place = parse_location(database)
        missing = isinstance(place, Path) and not place.exists()
        what = f"there is no database {place}" if missing else f"{place} holds no tuning results, nor tables for them"
        raise DatabaseError(f"{what}; check its {'path' if isinstance(place, Path) else 'URL'}")
    return opened
