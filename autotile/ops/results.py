"""Read the tuning database."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.core.model import Outcome
from autotile.database.database import Database
from autotile.database.engine import DamagedDatabaseError, parse_location
from autotile.database.studies import StudySummary
from autotile.database.upgrade import DatabaseCheck
from autotile.errors import ProblemError
from autotile.exchange.recording import list_recordings
from autotile.kernel.library import load_kernel
from autotile.ops.reading import open_to_read
from autotile.report.health import DatabaseReport, LocationReport
from autotile.report.results import RecordingsReport, StudiesReport, StudyTrial, TrialsReport
from autotile.settings import read_settings


def database_location(database: str | None = None) -> LocationReport:
    """Where the database lies: the path or URL given, else the user's own, without a password."""
    return LocationReport(str(parse_location(database or read_settings().database)))


def list_studies(kernel: str | None = None, *, database: str | None = None) -> StudiesReport:
    """Every study with its best, or those of one kernel; none where the user has no database yet.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    opened = open_to_read(database)
    if opened is None:
        return StudiesReport([], str(parse_location(read_settings().database)))
    with opened:
        return StudiesReport(_studies(opened, kernel), opened.location)


def installed_recordings(kernel: str | None = None) -> RecordingsReport:
    """The recordings that ``--replay`` finds by itself, or those of one kernel.

    Raises
    ------
    InputError
        There is no such kernel.
    """
    found = list_recordings(read_settings().recording_folders)
    if kernel is None:
        return RecordingsReport(found)
    name = load_kernel(kernel).name
    return RecordingsReport([one for one in found if one.header is not None and one.header.key.kernel == name])


def list_trials(
    kernel: str,
    sizes: Mapping[str, int],
    *,
    dtype: str | None = None,
    outcome: Outcome | None = None,
    limit: int | None = None,
    database: str | None = None,
) -> TrialsReport:
    """Trials of a kernel, fastest first.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file.
    sizes
        Only studies of these sizes; sizes that are not named may be any.
    outcome
        Only trials that ended like this.
    limit
        At most so many.

    Raises
    ------
    InputError
        The database cannot be read, there is no such kernel, or it has no such size.
    """
    opened = open_to_read(database)
    if opened is None:
        load_kernel(kernel)  # a misspelt name is worth more than an empty answer
        return TrialsReport([])
    with opened:
        studies = [study for study in _studies(opened, kernel) if dtype in (None, study.key.dtype)]
        _check_sizes(sizes, studies)
        found = [
            StudyTrial(study.key, stored)
            for study in studies
            if all(study.key.sizes.get(name) == value for name, value in sizes.items())
            for stored in opened.stored_trials(study.study_id)
            if outcome in (None, stored.trial.outcome)
        ]
    return TrialsReport(sorted(found, key=_by_time)[:limit])


def check_database(database: str | None = None) -> DatabaseReport:
    """Look for damage; a database that is not there yet is not damaged.

    Raises
    ------
    InputError
        It cannot be read at all, or is no database.
    """
    shown = str(parse_location(database or read_settings().database))
    try:
        opened = open_to_read(database)
    except DamagedDatabaseError as error:
        return DatabaseReport(shown, DatabaseCheck.damaged(shown, [str(error)]))
    if opened is None:
        return DatabaseReport(shown, None)
    with opened:
        return DatabaseReport(shown, opened.check())


def _studies(database: Database, kernel: str | None) -> list[StudySummary]:
    if kernel is None:
        return database.studies()
    known = database.studies(kernel)  # a kernel that was deleted since is still in the database
    return known or database.studies(load_kernel(kernel).name)


def _check_sizes(sizes: Mapping[str, int], studies: list[StudySummary]) -> None:
    for name in sizes:
        if studies and not any(name in study.key.sizes for study in studies):
            known = ", ".join(dict.fromkeys(size for study in studies for size in study.key.sizes))
            raise ProblemError(f"{studies[0].key.kernel} has no size {name!r}; its sizes are {known}")


def _by_time(entry: StudyTrial) -> tuple[bool, float, int]:
    time_us = entry.stored.trial.time_us
    return time_us is None, time_us or 0.0, entry.stored.trial_id
