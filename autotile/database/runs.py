"""Claims: which session tries which configuration of a study, so that several sessions share one.

A session claims a configuration before it tries it, and storing the trial ends the claim in the same transaction. A
claim is a lease, which a session renews while it lives; when it runs out, or its process on this machine is gone,
another session inherits it.
"""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, delete, func, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from autotile.core.device import DeviceProperties
from autotile.core.forks import fork_guard
from autotile.core.model import Config, Trial, config_key, config_text
from autotile.core.text import plural, source_text, time_text
from autotile.database.database import (
    Database,
    Phase,
    ensure_study,
    finish_run,
    insert_run,
    insert_trials,
    parsed_rows,
    run_text,
    stored_trial,
    trial_row,
)
from autotile.database.engine import (
    CLAIMS,
    RUNS,
    TRIALS,
    DamagedDatabaseError,
    LostServerError,
    across_restarts,
    now_text,
)
from autotile.database.keys import TuningKey
from autotile.errors import AutotileError, DatabaseError, RescuedRunError

LEASE_S = 60.0
"""Time after its last renewal at which a claim runs out, in seconds."""
_RENEWALS = 4
"""Renewals in that time."""
_LATE_IDS = 256
"""Trials before the newest that are looked at again: on a server, transactions end in another order than they begin."""
_LOCK_KIND = 0x636C6169
"""First key of PostgreSQL's advisory locks on studies, the second is the study's id: "clai" in ASCII."""
_INHERITED = 16
"""Claims that a session takes over at once, at most."""


_CLAIM = (
    "INSERT INTO claims (study_id, config_key, owner, expires_at) VALUES (:study, :key, :owner, :until) "
    "ON CONFLICT (study_id, config_key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at "
    "WHERE claims.expires_at < :now OR claims.owner = :owner RETURNING id"
)
_HOLDER = "SELECT owner FROM claims WHERE study_id = :study AND config_key = :key"
_TAKE_OVER = (
    "UPDATE claims SET owner = :owner, expires_at = :until "
    "WHERE study_id = :study AND config_key = :key AND owner = :holder RETURNING id"
)
_OTHERS = "SELECT id FROM claims WHERE study_id = :study AND owner <> :owner AND expires_at >= :now"
_NEWEST = "SELECT coalesce(max(id), 0) FROM trials"
_NEWS = (  # the sum keeps the database from an index of all trials of the study; those of the newest ids are few
    "SELECT id FROM trials WHERE id > :first AND study_id + 0 = :study AND run_id <> :run AND phase = 'search' "
    "ORDER BY id"
)
_CLAIM_AND_LOOK = (  # on a server, where each statement is a round trip, during which no other session can claim
    "WITH claimed AS (INSERT INTO claims (study_id, config_key, owner, expires_at) "
    "SELECT :study, wanted, :owner, :until FROM unnest(CAST(:keys AS text[])) AS wanted "
    "ON CONFLICT (study_id, config_key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at "
    "WHERE claims.expires_at < :now OR claims.owner = :owner RETURNING id, config_key) "
    "SELECT ARRAY(SELECT config_key FROM claimed ORDER BY id), ARRAY(SELECT id FROM claimed ORDER BY id), "
    f"({_NEWEST}), ARRAY({_NEWS}), ARRAY({_OTHERS})"
)
_LOCK = "SELECT pg_advisory_xact_lock(:kind, :study), CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_LOCK_UNFLUSHED = _LOCK + ", set_config('synchronous_commit', 'off', true)"
"""The commit waits for no disk: a crash of the server may undo claims, and a trial is not stored twice for that."""
_SERVER_TIME = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
_RENEW = "UPDATE claims SET expires_at = :until WHERE study_id = :study AND owner = :owner"
_RELEASE_ALL = "DELETE FROM claims WHERE study_id = :study AND owner = :owner"
_RELEASE = "DELETE FROM claims WHERE study_id = :study AND owner = :owner AND config_key = :key RETURNING config_key"
_RELEASE_SEVERAL = (
    "DELETE FROM claims WHERE study_id = :study AND owner = :owner AND config_key = ANY(CAST(:keys AS text[])) "
    "RETURNING config_key"
)
_TRIED = (
    "SELECT id FROM trials WHERE id > :first AND study_id + 0 = :study AND config_key = :key AND run_id <> :run "
    "AND phase = 'search' LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim.

    Attributes
    ----------
    ours
        Whether this session may try each configuration.
    news
        Trials that other sessions have stored since the last look, oldest first.
    others
        Number of configurations that other sessions are trying now.
    """

    ours: tuple[bool, ...]
    news: Sequence[Trial]
    others: int

    @property
    def is_ours(self) -> bool:
        """Whether this session may try all of them."""
        return all(self.ours)


class StudyClaims:
    """The claims of one session on a study.

    Parameters
    ----------
    study_id, run_id
        Ids of the study and of the session's run.
    newest_id
        Id of the newest trial that the session knows.
    """

    def __init__(self, study_id: int, run_id: int, newest_id: int) -> None:
        self._study_id = study_id
        self._run_id = run_id
        self._first_id = newest_id
        self._newest_id = newest_id
        self._seen: set[int] = set()
        self._undelivered: list[Trial] = []
        self._tried: set[str] = set()
        """Configurations that other sessions have tried since this one began."""
        self.owner = f"{run_id} {os.getpid()} {_start_time(os.getpid())} {_machine()}"

    def take(self, connection: Connection, keys: Sequence[str], room: int | None = None) -> Claimed:
        """Claim configurations, but for those that another session has claimed or tried.

        Parameters
        ----------
        room
            Number of trials that the study may still begin, by what this session knows; None for any number. What other
            sessions have stored since, and what they claimed before, counts against it.
        """
        now = self._lock(connection, _LOCK_UNFLUSHED)
        mine = {"study": self._study_id, "owner": self.owner, "now": now, "until": now + LEASE_S}
        if _is_server(connection):
            where = {**mine, "keys": list(keys), "run": self._run_id, "first": self._looked_at(connection)}
            claimed, numbers, newest, found, held_ids = run_text(connection, _CLAIM_AND_LOOK, where)[0]
            granted = dict(zip(claimed, numbers, strict=True))
            self._note(connection, newest, found)
        else:
            granted = {key: row[0] for key in keys for row in run_text(connection, _CLAIM, {**mine, "key": key})}
            self.look(connection)  # after the claim: a trial that was stored until then is seen
            held_ids = [row[0] for row in run_text(connection, _OTHERS, mine)]
        for key in keys:
            if key not in granted and (number := self._taken_over(connection, {**mine, "key": key})) is not None:
                granted[key] = number
        ours: dict[str, bool] = {}
        for key in keys:
            earlier = sum(held_id < granted[key] for held_id in held_ids) if key in granted else 0
            before = len(self._undelivered) + earlier + sum(ours.values())
            ours[key] = key in granted and key not in self._tried and (room is None or before < room)
        self._release(connection, [key for key in granted if not ours[key]])
        return Claimed(tuple(ours[key] for key in keys), list(self._undelivered), len(held_ids))

    def _taken_over(self, connection: Connection, claim: Mapping[str, Any]) -> int | None:
        """Take over a claim whose process is gone; return its id."""
        for (holder,) in run_text(connection, _HOLDER, claim):
            if is_gone(holder):
                return next((row[0] for row in run_text(connection, _TAKE_OVER, {**claim, "holder": holder})), None)
        return None

    def look(self, connection: Connection) -> list[Trial]:
        """Return the trials that other sessions have stored since the last `deliver`."""
        first = self._looked_at(connection)
        newest = run_text(connection, _NEWEST, {})[0][0]
        if newest > first:
            where = {"first": first, "study": self._study_id, "run": self._run_id}
            self._note(connection, newest, [row[0] for row in run_text(connection, _NEWS, where)])
        return list(self._undelivered)

    def _looked_at(self, connection: Connection) -> int:
        """Return the id after which trials may be new."""
        return max(self._first_id, self._newest_id - (_LATE_IDS if _is_server(connection) else 0))

    def _note(self, connection: Connection, newest: int, found: Sequence[int]) -> None:
        """Take note of the newest id, and of the trials of others that were found after the last look."""
        self._newest_id = max(self._newest_id, newest)
        unseen = [number for number in found if number not in self._seen]
        if not unseen:
            return
        trials = [
            one.trial
            for one in parsed_rows(
                connection, select(TRIALS).where(TRIALS.c.id.in_(unseen)).order_by(TRIALS.c.id), stored_trial
            )
        ]
        self._seen.update(unseen)
        self._tried.update(config_key(trial.config) for trial in trials)
        self._undelivered += trials

    def deliver(self) -> None:
        """Note that the session has what the last `look` returned: its transaction has ended."""
        self._undelivered.clear()

    def inherit(self, connection: Connection) -> list[str]:
        """Take over claims of sessions that died; return the keys of their configurations."""
        now = _now(connection)
        others = select(CLAIMS.c.id, CLAIMS.c.config_key, CLAIMS.c.owner, CLAIMS.c.expires_at < now).where(
            CLAIMS.c.study_id == self._study_id, CLAIMS.c.owner != self.owner
        )
        rows = connection.execute(others.order_by(CLAIMS.c.id).with_for_update(skip_locked=True)).all()
        dead = [row for row in rows if row[3] or is_gone(row[2])][:_INHERITED]
        if dead:
            mine = {"owner": self.owner, "expires_at": now + LEASE_S}
            connection.execute(update(CLAIMS).where(CLAIMS.c.id.in_([row[0] for row in dead])).values(**mine))
        return [row[1] for row in dead]

    def count_others(self, connection: Connection) -> int:
        """Return the number of configurations that other sessions are trying, or died with."""
        query = select(func.count()).where(CLAIMS.c.study_id == self._study_id, CLAIMS.c.owner != self.owner)
        return int(connection.execute(query).scalar_one())

    def renew(self, connection: Connection) -> None:
        """Renew the session's leases.

        It is a turn of its own, as ending claims is: two transactions that change the same claims in different orders
        would wait for each other, and the server would end one of them with an error.
        """
        until = self._lock(connection) + LEASE_S
        run_text(connection, _RENEW, {"study": self._study_id, "owner": self.owner, "until": until})

    def release_all(self, connection: Connection) -> None:
        """End the session's claims."""
        self._lock(connection)
        run_text(connection, _RELEASE_ALL, {"study": self._study_id, "owner": self.owner})

    def release(self, connection: Connection, key: str) -> None:
        """End the claim of a configuration."""
        self._release(connection, [key])

    def settle(self, connection: Connection, keys: Sequence[str]) -> set[str]:
        """End the claims of configurations that were tried; return those whose trials may be stored.

        Not those whose claim was lost if another session has claimed or tried the configuration since.
        """
        self._lock(connection)
        ended = self._release(connection, keys)
        return {key for key in keys if key in ended or not self._is_taken_over(connection, key)}

    def _release(self, connection: Connection, keys: Sequence[str]) -> set[str]:
        """End claims; return those that there were."""
        own = {"study": self._study_id, "owner": self.owner}
        if _is_server(connection):
            rows = run_text(connection, _RELEASE_SEVERAL, {**own, "keys": list(keys)}) if keys else ()
        else:
            rows = [row for key in keys for row in run_text(connection, _RELEASE, {**own, "key": key})]
        return {row[0] for row in rows}

    def _is_taken_over(self, connection: Connection, key: str) -> bool:
        where = {"study": self._study_id, "key": key, "first": self._first_id, "run": self._run_id}
        return bool(run_text(connection, _HOLDER, where) or run_text(connection, _TRIED, where))

    def _lock(self, connection: Connection, statement: str = _LOCK) -> float:
        """Let one session at a time claim and store; return the time in seconds since 1970, as `_now` does.

        A server's transactions do not see each other's rows before they end. A writer of an SQLite file is alone.
        """
        if _is_server(connection):
            return float(run_text(connection, statement, {"kind": _LOCK_KIND, "study": self._study_id})[0][1])
        return time.time()


def forget_dead(connection: Connection, study_id: int) -> int:
    """Delete the claims of processes of this machine that are gone; return how many others are left."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(_LOCK), {"kind": _LOCK_KIND, "study": study_id})
    query = select(CLAIMS.c.id, CLAIMS.c.owner, CLAIMS.c.expires_at).where(CLAIMS.c.study_id == study_id)
    rows = connection.execute(query).all()
    gone = [row[0] for row in rows if is_gone(row[1])]
    if gone:
        connection.execute(delete(CLAIMS).where(CLAIMS.c.id.in_(gone)))
    return len(rows) - len(gone)


def claiming_runs(connection: Connection, study_id: int) -> set[int]:
    """Return the ids of the runs whose sessions are trying configurations of a study now."""
    held = select(CLAIMS.c.owner).where(CLAIMS.c.study_id == study_id, CLAIMS.c.expires_at >= _now(connection))
    runs = (owner.partition(" ")[0] for owner in connection.execute(held).scalars() if not is_gone(owner))
    return {int(run) for run in runs if run.isdecimal()}


class Renewal:
    """Renews the leases of a session in a thread, until it is closed."""

    def __init__(self, database: Database, claims: StudyClaims) -> None:
        self._database = database
        self._claims = claims
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LEASE_S / _RENEWALS):
            with suppress(DatabaseError), self._database.writing() as connection:
                self._claims.renew(connection)  # the session meets the same error


def is_gone(owner: str) -> bool:
    """Return whether a claim is of a process of this machine that has ended."""
    words = owner.split(" ")
    if len(words) != 4 or words[3] != _machine() or not words[1].isdecimal():
        return False
    return _start_time(int(words[1])) != words[2]


def _is_server(connection: Connection) -> bool:
    """Return whether the database is on a server, where others write too, and each statement is a round trip."""
    return connection.dialect.name == "postgresql"


def _now(connection: Connection) -> float:
    """Return the time in seconds since 1970: a server's own, so that clocks of its clients do not matter."""
    if _is_server(connection):
        return float(connection.execute(_SERVER_TIME).scalar_one())
    return time.time()


def _start_time(pid: int) -> str:
    """Return the start of a process, in clock ticks, which tells it from a later one of its id; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


@cache
def _machine() -> str:
    """Return an identifier of this machine, since its last start, and of this container."""
    parts = [platform.node() or "unknown"]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts).replace(" ", "-")


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
        """Claim configurations, so that no other session tries them; see `autotile.database.runs.StudyClaims.take`.

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
            from autotile.database.care import copy_missing_rows

            with suppress(DatabaseError, ValueError, TypeError, LookupError):
                copy_missing_rows(self._database, target)
        target.check_integrity()

    def _write_run(self, connection: Connection) -> None:
        study_id = ensure_study(connection, self._key, self._device)
        run_id = insert_run(connection, {**self._run, "study_id": study_id})
        insert_trials(connection, [one.row(study_id, run_id) for one in self._entries])
        if self._summary is not None:
            finish_run(connection, run_id, self._summary)
