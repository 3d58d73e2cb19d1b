"""Check of a database, and the quarantine of rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotile.core.display import Displayed
from autotile.core.text import plural
from autotile.database.database import Database, database_location, location_text, open_for_reading
from autotile.database.engine import DamagedDatabaseError
from autotile.database.quarantine import Quarantine, quarantine_bad_rows, restore_rows
from autotile.database.upgrade import DatabaseCheck
from autotile.settings import expand_path


@dataclass(frozen=True, slots=True, repr=False)
class CheckResult(Displayed):
    """Result of a check of a database.

    Attributes
    ----------
    location
        Path or URL of the database, without a password.
    check
        Numbers of rows and faults found; None if there is no database yet.
    quarantine
        File that unusable rows were moved to, with their numbers; None if none were moved.
    """

    location: str
    check: DatabaseCheck | None
    quarantine: Quarantine | None = None

    @property
    def whole(self) -> bool:
        """Whether no fault was found; a database that does not exist yet has none."""
        return self.check is None or self.check.ok

    def _headline(self) -> str:
        if self.check is None:
            return f"{self.location} does not exist yet"
        faults = len(self.check.problems) + len(self.check.bad_rows)
        return f"{self.location}: {'whole' if self.whole else plural(faults, 'fault')}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        counts = self.check.counts if self.check is not None else {}
        return ("table", "rows"), [(name, f"{count:,}") for name, count in counts.items()]


def db_check(database: str | Path | None = None, *, quarantine: bool = False) -> CheckResult:
    """Check a database for damage, for rows without their study or run, and for rows that cannot be used.

    Parameters
    ----------
    database
        Path or URL; None for the user's own, which need not exist.
    quarantine
        Whether to move rows that cannot be used to a new file beside the database, from which `db_restore` puts them
        back.

    Raises
    ------
    InputError
        It cannot be read at all, is not a database, or a database given by name does not exist. The rows cannot be
        moved.
    """
    location, moved = location_text(database), None
    try:
        opened = open_for_reading(database)
    except DamagedDatabaseError as error:
        return CheckResult(location, DatabaseCheck.damaged(location, [str(error)]))
    if opened is None:
        return CheckResult(location, None)
    with opened:
        found = opened.check()
    if quarantine and found.bad_rows:
        with Database.open(database_location(database), set_damage_aside=False) as writable:
            moved = quarantine_bad_rows(writable)
            found = writable.check()
    return CheckResult(location, found, moved)


def db_restore(file: str | Path, database: str | Path | None = None) -> Quarantine:
    """Put the rows of a file of `db_check` back where they were, all or none.

    Parameters
    ----------
    file
        File that ``db_check(quarantine=True)`` wrote.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        The file cannot be read; or the database cannot be written, or has other rows with their ids by now.
    """
    path = expand_path(file, "a file of rows")
    with Database.open(database_location(database), set_damage_aside=False) as opened:
        return restore_rows(opened, path)


def db_path(database: str | Path | None = None) -> str:
    """Return the location of a database as it may be shown: the password of a URL is masked.

    Parameters
    ----------
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The URL is of an unsupported kind.
    """
    return location_text(database)
