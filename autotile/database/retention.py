"""Deletion of stored trials: old ones, those of other GPUs, those of other kernel versions. Winners stay by default.

Sessions go on meanwhile: a transaction deletes a few hundred trials of a study, so that nobody waits long for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, delete, exists, literal_column, select

from autotile.core.device import device_profile
from autotile.database.claims import claiming_runs
from autotile.database.database import Database
from autotile.database.keys import TuningKey, space_hash
from autotile.database.rows import parsed_rows
from autotile.database.schema import BEST, CLAIMS, RUNS, STUDIES, TRIALS
from autotile.database.studies import StoredStudy, stored_study
from autotile.errors import AutotileError, InputError
from autotile.kernel.library import KernelName, kernel_names, load_kernel

_MAX_RUN_AGE = timedelta(days=1)
"""A younger run without an end may still be going: its trials stay."""
_CHUNK = 500
"""Rows per transaction, and per statement: SQLite accepts 32,766 values in a statement, older versions 999."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """Trials to delete: a trial that any of the criteria selects is deleted.

    Attributes
    ----------
    before
        Trials recorded before this moment.
    keep_gpus
        Trials of all GPUs but these; empty for no criterion.
    versions
        Template hash and space hash of each kernel's current version, by name: trials of other versions. None for no
        criterion.
    winners
        Delete selected trials even if they are the best of their study, or verdicts on configurations that are not
        ranked, without which a wrong one could be served.
    """

    before: datetime | None = None
    keep_gpus: Collection[str] = ()
    versions: Mapping[str, tuple[str, str]] | None = None
    winners: bool = False


@dataclass(frozen=True, slots=True)
class CleanedStudy:
    """Deletions in one study.

    Attributes
    ----------
    key
        Key of the study.
    reasons
        Criteria that selected its trials: ``old``, ``other GPU``, ``other version``.
    deleted, total
        Number of deleted trials, and of trials before the deletion.
    emptied
        Whether the study was deleted too, as no trial is left.
    """

    key: TuningKey
    reasons: tuple[str, ...]
    deleted: int
    total: int
    emptied: bool


def clean_database(database: Database, kernel: str | None, criteria: Criteria, *, dry_run: bool) -> list[CleanedStudy]:
    """Delete trials, and runs and studies without any trial left.

    Trials of a run that may still be going are kept. If it is interrupted, some studies have been cleaned; the rest is
    cleaned by the same call.

    Parameters
    ----------
    database
        Database, open for writing unless ``dry_run``.
    kernel
        Name of the only kernel to consider; None for all.
    criteria
        Trials to delete.
    dry_run
        Delete nothing; return what would be deleted.

    Returns
    -------
    list of CleanedStudy
        Studies with deletions, by kernel and then oldest first.

    Raises
    ------
    DatabaseError
        The database cannot be read or written.
    """
    query = select(STUDIES).order_by(STUDIES.c.kernel, STUDIES.c.id)
    if kernel is not None:
        query = query.where(STUDIES.c.kernel == kernel)
    with database.reading() as connection:
        studies = parsed_rows(connection, query, stored_study)
    return [found for study in studies if (found := _clean_study(database, study, criteria, dry_run=dry_run))]


def stored_gpu_names(database: Database, names: Iterable[str]) -> Iterator[str]:
    """Yield names of GPUs as CUDA reports them: names in the database unchanged, others by their profiles.

    Raises
    ------
    InputError
        A name is neither in the database nor that of a profile: a mistyped name of a GPU to keep would delete the
        results of that GPU.
    """
    with database.reading() as connection:
        stored = set(connection.execute(select(STUDIES.c.gpu_name).distinct()).scalars())
    for name in names:
        try:
            yield name if name in stored else device_profile(name).name
        except InputError as error:
            held = ", ".join(sorted(stored)) or "no GPU"
            raise InputError(f"{error}; the database holds results of {held}") from None


def current_versions(kernel: KernelName | None) -> dict[str, tuple[str, str]]:
    """Return template hash and space hash by kernel name, of one kernel or of all that are found by name.

    Raises
    ------
    InputError
        The given kernel cannot be read; of all kernels, those that cannot be read are left out.
    """
    found = {}
    for name in [kernel] if kernel is not None else kernel_names():
        try:
            loaded = load_kernel(name)
        except AutotileError:
            if kernel is not None:
                raise
            continue
        found[loaded.name] = (loaded.source_hash, space_hash(loaded.spec))
    return found


def _clean_study(database: Database, study: StoredStudy, criteria: Criteria, *, dry_run: bool) -> CleanedStudy | None:
    study_id, study_reasons = study.study_id, tuple(_study_reasons(study.key, criteria))
    before = criteria.before.astimezone(UTC).isoformat(timespec="microseconds") if criteria.before else ""
    with database.reading() as connection:
        columns = (TRIALS.c.id, TRIALS.c.run_id, TRIALS.c.created_at)
        trials = connection.execute(select(*columns).where(TRIALS.c.study_id == study_id)).all()
        kept, open_runs = _kept(connection, study_id, criteria), _open_runs(connection, study_id)
    selected = [trial for trial in trials if study_reasons or str(trial.created_at) < before]
    selected = [trial for trial in selected if trial.id not in kept and trial.run_id not in open_runs]
    emptied = len(selected) == len(trials) and not open_runs
    if not selected and not (study_reasons and emptied):
        return None
    is_old = bool(before) and any(str(trial.created_at) < before for trial in selected)
    if not dry_run:
        _delete(database, study_id, [trial.id for trial in selected], criteria)
    reasons = (*study_reasons, *(("old",) if is_old else ()))
    return CleanedStudy(study.key, reasons, len(selected), len(trials), emptied)


def _study_reasons(key: TuningKey, criteria: Criteria) -> Iterator[str]:
    """Yield the criteria that select all trials of a study."""
    if criteria.keep_gpus and key.gpu_name not in criteria.keep_gpus:
        yield "other GPU"
    version = (criteria.versions or {}).get(key.kernel)
    if version is not None and version != (key.template_hash, key.space_hash):
        yield "other version"


def _kept(connection: Connection, study_id: int, criteria: Criteria) -> set[int]:
    """Return the trials of a study that are needed to serve: its winner, and verdicts on configurations."""
    if criteria.winners:
        return set()
    winner = select(BEST.c.trial_id).where(BEST.c.study_id == study_id)
    is_verdict = (TRIALS.c.phase == literal_column("'final'")) & TRIALS.c.rank.is_(None)
    verdicts = select(TRIALS.c.id).where(TRIALS.c.study_id == study_id, is_verdict)
    return {*connection.execute(winner).scalars(), *connection.execute(verdicts).scalars()}


def _open_runs(connection: Connection, study_id: int) -> set[int]:
    """Return the runs of a study that may still be going: young ones without an end, and those that hold claims."""
    now = datetime.now(UTC)
    since, until = ((now + age).isoformat(timespec="microseconds") for age in (-_MAX_RUN_AGE, _MAX_RUN_AGE))
    unfinished = select(RUNS.c.id).where(RUNS.c.study_id == study_id, RUNS.c.ended_at.is_(None))
    young = connection.execute(unfinished.where(RUNS.c.started_at.between(since, until))).scalars()
    return {*young, *claiming_runs(connection, study_id)}


def _delete(database: Database, study_id: int, trials: Sequence[int], criteria: Criteria) -> None:
    """Delete trials of a study, and then its runs without any trial, and the study without any run.

    What must stay is asked in each transaction, since others may decide something new between two.
    """
    for start in range(0, len(trials), _CHUNK):
        begun = time.monotonic()
        with database.writing() as connection:
            chosen = set(trials[start : start + _CHUNK]) - _kept(connection, study_id, criteria)
            connection.execute(delete(TRIALS).where(TRIALS.c.id.in_(sorted(chosen))))
        if (
            database.path is not None
        ):  # SQLite gives the lock to whoever asks first, and those who wait ask now and then
            time.sleep(time.monotonic() - begun)
    with database.writing() as connection:
        connection.execute(select(STUDIES.c.id).where(STUDIES.c.id == study_id).with_for_update())  # no run begins now
        has_trials = exists().where(TRIALS.c.run_id == RUNS.c.id)
        open_runs = sorted(_open_runs(connection, study_id))
        connection.execute(delete(RUNS).where(RUNS.c.study_id == study_id, ~has_trials, RUNS.c.id.not_in(open_runs)))
        has_runs = exists().where(RUNS.c.study_id == STUDIES.c.id)
        emptied = connection.execute(delete(STUDIES).where(STUDIES.c.id == study_id, ~has_runs)).rowcount
        if emptied:
            connection.execute(delete(CLAIMS).where(CLAIMS.c.study_id == study_id))
