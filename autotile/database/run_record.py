"""One run as it is stored: its trials are read back at its end, and rescued where the database has lost them."""

from __future__ import annotations

import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from autotile.core.device import DeviceProperties
from autotile.core.forks import fork_guard
from autotile.core.model import Config, Trial, config_key, config_text
from autotile.core.text import plural, source_text, time_text
from autotile.database.claims import Claimed, Renewal, StudyClaims, forget_dead
from autotile.database.database import Database
from autotile.database.engine import DamagedDatabaseError, LostServerError, across_restarts
from autotile.database.keys import TuningKey
from autotile.database.rows import Phase, insert_trials, run_text, trial_row
from autotile.database.schema import RUNS, TRIALS, now_text
from autotile.database.studies import ensure_study, finish_run, insert_run
from autotile.errors import AutotileError, DatabaseError, RescuedRunError

_COMPARED = ("phase", "rank", "config_key", "outcome", "time_us", "created_at")
"""Columns of a trial that are compared when a run is read back."""

_STORED = (
    "SELECT id FROM trials "
    "WHERE run_id = :run_id AND phase = :phase AND config_key = :config_key AND created_at = :created_at"
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Entry:
    trial: Trial
    phase: Phase
    rank: int | None
    created_at: str

    def row(self, study_id: int, run_id: int) -> dict[str, Any]:
        """Return the row of the table ``trials``; the same in the database and in a rescue file, so that both merge."""
        position = {"phase": self.phase, "rank": self.rank, "created_at": self.created_at}
        return {"study_id": study_id, "run_id": run_id} | position | trial_row(self.trial)

    def compared(self) -> tuple[object, ...]:
        """Return the values of the columns `_COMPARED`."""
        trial = self.trial
        return self.phase, self.rank, config_key(trial.config), str(trial.outcome), trial.time_us, self.created_at


class RunRecord:
    """Stores one run of a study, and makes sure that the database holds it.

    An open SQLite file that is deleted, moved or overwritten takes further trials without an error. So the path is
    compared with the open file after each trial, and at the end the run is read back over a new connection. If the
    database lost the run, or cannot store a trial, the run is written to a new database beside it, or in the folder
    for temporary files, and `RescuedRunError` is raised.

    Use it in a ``with`` block after `start`: leaving the block reads back.

    Parameters
    ----------
    database
        Open for writing.
    key, device
        Study of the run, which is created if it does not exist.

    Attributes
    ----------
    study_id
        Id of the study.

    Raises
    ------
    DatabaseError
        The study cannot be stored.
    """

    def __init__(self, database: Database, key: TuningKey, device: DeviceProperties) -> None:
        self.study_id = database.study(key, device)
        self._database = database
        self._key = key
        self._device = device
        self._run: Mapping[str, Any] = {}
        self._run_id = 0
        self._entries: list[_Entry] = []
        self._summary: Mapping[str, Any] | None = None
        with database.reading() as connection:
            self._newest_id = connection.execute(select(func.max(TRIALS.c.id))).scalar() or 0
        self._claims: StudyClaims | None = None
        self._renewal: Renewal | None = None
        self._generation = fork_guard.generation
        """Fork before which the connection was opened."""
        self._connection: Connection | None = None
        """Connection to a file for the trials; None before the first one and after the last. A server may close one
        that is idle, so that each transaction there takes a connection from the pool, which checks it."""

    def start(
        self,
        *,
        sampler: str,
        seed: int | None,
        settings: Mapping[str, Any],
        driver: str,
        host: str,
        gates: Mapping[str, Any],
        shares: bool = False,
    ) -> int:
        """Record the start of the run; parameters are columns of the table ``runs``.

        Parameters
        ----------
        shares
            Whether the run shares the study with others that run at the same time, see `claim`.

        Returns
        -------
        int
            Number of configurations that other sessions are trying.
        """
        self._run = {
            "study_id": self.study_id,
            "started_at": now_text(),
            "sampler": sampler,
            "seed": seed,
            "settings": dict(settings),
            "driver": driver,
            "host": host,
            "gates": dict(gates),
        }
        with self._database.writing() as connection:
            self._run_id = insert_run(connection, self._run)
            others = forget_dead(connection, self.study_id) if shares else 0
        if shares:
            self._claims = StudyClaims(self.study_id, self._run_id, self._newest_id)
        return others

    @property
    def run_id(self) -> int:
        """Id of the run; 0 before `start`."""
        return self._run_id

    def claim(self, *configs: Config, room: int | None = None) -> Claimed:
        """Claim configurations, so that no other session tries them; see `autotile.database.claims.StudyClaims.take`.

        Without sharing, every configuration is this session's.
        """
        if self._claims is None:
            return Claimed((True,) * len(configs), (), 0)
        if self._renewal is None:
            self._renewal = Renewal(self._database, self._claims)
        claims, keys = self._claims, [config_key(config) for config in configs]
        claimed = self._write(lambda connection: claims.take(connection, keys, room))
        claims.deliver()
        return claimed

    def inherit(self) -> tuple[list[str], Claimed]:
        """Take over what sessions that died were trying; return the keys of its configurations, and news."""
        claims = self._claims
        if claims is None:
            return [], Claimed((), (), 0)

        def take_over() -> tuple[list[str], Claimed]:
            with fork_guard.use(), self._database.writing(self._held_connection()) as connection:
                keys = claims.inherit(connection)
                return keys, Claimed((), claims.look(connection), claims.count_others(connection))

        found = self._rescuing(lambda: across_restarts(take_over))
        claims.deliver()
        return found

    def disclaim(self, key: str) -> None:
        """End the claim of a configuration that is not tried."""
        claims = self._claims
        if claims is not None:
            self._write(lambda connection: claims.release(connection, key))

    def _write(self, action: Callable[[Connection], Result]) -> Result:
        """Run a transaction, again if a server restarts meanwhile; an error rescues the run."""
        return self._rescuing(lambda: across_restarts(lambda: self._transact(action)))

    def _transact(self, action: Callable[[Connection], Result]) -> Result:
        with fork_guard.use(), self._database.writing(self._held_connection()) as connection:
            return action(connection)

    def _rescuing(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except DatabaseError as error:
            raise self._rescued(error) from error

    def _held_connection(self) -> Connection | None:
        if self._generation != fork_guard.generation:
            self._release()  # it was closed before the process forked
        if self._connection is None and self._database.path is not None:
            self._connection, self._generation = self._database.connect(), fork_guard.generation
        return self._connection

    def add(self, *trials: Trial, phase: Phase = "search", rank: int | None = None) -> None:
        """Commit trials in one transaction; it ends the claims of those of a search.

        A trial whose claim ran out, and whose configuration another session has tried or is trying, is not stored.

        Raises
        ------
        RescuedRunError
            They cannot be stored; the run is in a rescue file.
        """
        entries = [_Entry(trial, phase, rank, now_text()) for trial in trials]
        self._entries += entries
        is_again = False

        def store(connection: Connection) -> list[_Entry]:
            nonlocal is_again
            stored = self._append(connection, entries, is_again=is_again)
            is_again = True  # the connection may be lost after the commit
            return stored

        stored = self._write(store)
        for entry in entries:
            if entry not in stored:
                self._entries.remove(entry)
        self._rescuing(self._database.check_in_place)

    def _append(self, connection: Connection, entries: Sequence[_Entry], *, is_again: bool) -> list[_Entry]:
        """Store trials and end their claims; return those that are stored."""
        rows = [one.row(self.study_id, self._run_id) for one in entries]
        if is_again and (
            stored := [one for one, row in zip(entries, rows, strict=True) if run_text(connection, _STORED, row)]
        ):
            return stored
        keys = [row["config_key"] for row in rows]
        is_claimed = self._claims is not None and entries[0].phase == "search"
        mine = self._claims.settle(connection, keys) if self._claims is not None and is_claimed else set(keys)
        insert_trials(connection, [row for row, key in zip(rows, keys, strict=True) if key in mine])
        return [one for one, key in zip(entries, keys, strict=True) if key in mine]

    def end(self, summary: Mapping[str, Any]) -> None:
        """Record the end of the run; the winner of its finals becomes the study's best. Errors as for `add`."""
        self._summary = summary
        self._release()
        try:
            across_restarts(self._store_end)
        except DatabaseError as error:
            raise self._rescued(error) from error

    def _store_end(self) -> None:
        with self._database.writing() as connection:
            found = finish_run(connection, self._run_id, self._summary or {})
        if not found:
            raise DatabaseError(
                f"{self._database.location} has no run {self._run_id} any more; it was deleted meanwhile"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_claims()
        self._release()
        if isinstance(error, RescuedRunError):
            return
        try:
            if isinstance(error, LostServerError):  # it was waited for already
                self._read_back()
            else:
                across_restarts(self._read_back)
        except DatabaseError as fault:
            raise self._rescued(fault, error) from fault

    def _end_claims(self) -> None:
        """End the claims that are left, so that other sessions need not wait for the leases."""
        if self._renewal is not None:
            self._renewal.close()
        if self._claims is not None:
            with suppress(DatabaseError):
                self._transact(self._claims.release_all)
        self._claims = self._renewal = None

    def _release(self) -> None:
        """Return the connection to the pool, from where it serves the database's other methods."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with fork_guard.use(), suppress(SQLAlchemyError):
                if self._generation != fork_guard.generation:
                    connection.invalidate()
                connection.close()

    def _read_back(self) -> None:
        """Raise `DatabaseError` unless the file at the path holds the run."""
        self._database.check_in_place()
        self._database.check_integrity()
        with self._database.reading() as connection:
            columns = (TRIALS.c[name] for name in _COMPARED)
            query = select(*columns).where(TRIALS.c.run_id == self._run_id).order_by(TRIALS.c.id)
            stored = [tuple(row) for row in connection.execute(query)]
            run = connection.execute(select(RUNS.c.started_at, RUNS.c.ended_at).where(RUNS.c.id == self._run_id))
            started_at, ended_at = run.one_or_none() or (None, None)
        ended = self._summary is None or ended_at is not None
        if started_at != self._run["started_at"] or not ended or stored != [one.compared() for one in self._entries]:
            raise DatabaseError(
                f"the database {self._database.location} does not hold what was stored in it: another program "
                "overwrote it or its log during the run"
            )
        self._database.check_in_place()

    def _rescued(self, fault: DatabaseError, error: BaseException | None = None) -> RescuedRunError:
        """Write the rescue file, and return the error that names it.

        Parameters
        ----------
        fault
            What is wrong with the database.
        error
            Another error that ended the run; its message is kept.
        """
        self._release()
        reason = f"{error}; and {fault}" if isinstance(error, AutotileError) else str(fault)
        if not self._entries:
            return RescuedRunError(f"{reason}; this session had measured nothing yet")
        trials = plural(len(self._entries), "trial")
        rescued = self._write_rescue_file()
        if rescued is None:
            folders = " and ".join(map(str, self._rescue_folders()))
            return RescuedRunError(f"{reason}; the {trials} of this session are lost: {folders} cannot be written")
        location = self._database.location
        command = f"autotile db merge {shlex.quote(str(rescued))} -o {shlex.quote(self._database.argument)}"
        first = f"move {location} away, then " if isinstance(fault, DamagedDatabaseError) else ""
        return RescuedRunError(
            f"{reason}; the {trials} of this session are kept in {rescued}{self._fastest()}; to have them in the "
            f"database: {first}`{command}`",
            rescued=str(rescued),
        )

    def _fastest(self) -> str:
        """Return the winner of the finals, else the fastest trial of the search, for a message."""
        measured = [one for one in self._entries if one.trial.outcome.has_time and one.trial.time_us is not None]
        if not measured:
            return ""
        best = min(measured, key=lambda one: (one.rank or len(self._entries), one.trial.time_us)).trial
        return f", the best of them {config_text(best.config)} with {source_text(time_text(best.time_us), best.source)}"

    def _rescue_folders(self) -> list[Path]:
        path = self._database.path
        beside = [path.parent] if path is not None and path.parent.is_dir() else []
        return [*beside, Path(tempfile.gettempdir())]

    def _write_rescue_file(self) -> Path | None:
        """Write the run to a new database, and return its path; None if no folder takes it."""
        path = self._database.path or Path("tuning.db")
        for folder in self._rescue_folders():
            rescued = folder / f"{path.stem}.rescued-{secrets.token_hex(8)}{path.suffix or '.db'}"
            try:
                with Database.open(rescued) as target:
                    self._copy_to(target)
                return rescued
            except (DatabaseError, OSError):
                for suffix in ("", "-wal", "-shm", "-journal"):
                    with suppress(OSError):
                        rescued.with_name(rescued.name + suffix).unlink(missing_ok=True)
        return None

    def _copy_to(self, target: Database) -> None:
        """Write the run to another database, and with it all that a deleted or replaced file still lets us read."""
        with target.writing() as connection:
            self._write_run(connection)
        try:
            self._database.check_in_place()
        except DatabaseError:  # the open connection is the last that leads to the file
            from autotile.database.merging import copy_missing_rows

            with suppress(DatabaseError, ValueError, TypeError, LookupError):
                copy_missing_rows(self._database, target)
        target.check_integrity()

    def _write_run(self, connection: Connection) -> None:
        study_id = ensure_study(connection, self._key, self._device)
        run_id = insert_run(connection, {**self._run, "study_id": study_id})
        insert_trials(connection, [one.row(study_id, run_id) for one in self._entries])
        if self._summary is not None:
            finish_run(connection, run_id, self._summary)
