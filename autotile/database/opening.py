"""The database and the kernel that a caller names: a path, a URL or neither; a kernel's name or its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.errors import DatabaseError
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings

Row = TypeVar("Row")


def database_location(database: str | Path | None) -> str | Path:
    """Return the given path or URL, or the location of the user's own database if it is None."""
    return database if database is not None else read_settings().database


def location_text(database: str | Path | None) -> str:
    """Return the location of a database as it may be shown: the password of a URL is masked.

    Raises
    ------
    DatabaseError
        The URL is of an unsupported kind.
    """
    return str(parse_location(database_location(database)))


def open_for_reading(database: str | Path | None) -> Database | None:
    """Open a database for reading; return None if the user's own does not exist yet.

    Parameters
    ----------
    database
        Path or URL; None for the user's own.

    Raises
    ------
    DatabaseError
        It cannot be read, or a database given by name does not exist: a mistyped path must not pass for an empty
        database.
    """
    return open_existing(database) if database is not None else Database.open_readonly(read_settings().database)


def open_existing(database: str | Path) -> Database:
    """Open the database at a path or URL for reading.

    Raises
    ------
    DatabaseError
        It does not exist, or cannot be read.
    """
    opened = Database.open_readonly(database)
    if opened is None:
        location = parse_location(database)
        missing = isinstance(location, Path) and not location.exists()
        fault = f"there is no database {location}" if missing else f"{location} holds no tuning results and no tables"
        raise DatabaseError(f"{fault}; check its {'path' if isinstance(location, Path) else 'URL'}")
    return opened


def rows_of_kernel(read: Callable[[str | None], Sequence[Row]], kernel: str | Path | None) -> Sequence[Row]:
    """Return what a query finds for a kernel, even if the kernel's files have been deleted since.

    Parameters
    ----------
    read
        Query by the kernel's name; None selects all kernels.
    kernel
        Name, or path of a search-space file; None for all kernels.

    Raises
    ------
    InputError
        The query finds nothing under this name, and there is no such kernel either.
    """
    if kernel is None:
        return read(None)
    return read(str(kernel)) or read(load_kernel(str(kernel)).name)
