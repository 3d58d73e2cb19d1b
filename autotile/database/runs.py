"""Runs of a session: what it tries and stores, shared with other sessions, and rescued where the database has lost it.

Sessions that share a study claim a configuration before they try it, and storing the trial ends the claim in the same
transaction. A claim is a lease, which a session renews while it lives; when it runs out, or its process on this machine
is gone, another session inherits it.
"""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from autotile.core.device import DeviceProperties
from autotile.core.documents import encode_json
from autotile.core.forks import fork_guard
from autotile.core.model import Config, Outcome, Trial, config_key, config_text
from autotile.core.text import plural, time_text
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
from autotile.database.engine import TRIALS, DamagedDatabaseError, LostServerError, across_restarts, now_text
from autotile.database.keys import TuningKey
from autotile.errors import AutotileError, DatabaseError, RescuedRunError

Result = TypeVar("Result")

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

_FILE_KEYS = "json_each(:keys)"
_SERVER_KEYS = "json_array_elements_text(CAST(:keys AS json)) AS listed(value)"
"""Table of the listed keys of configurations, in its column ``value``."""
_CLAIM = (
    "INSERT INTO claims (study_id, config_key, owner, expires_at) SELECT :study, value, :owner, :until FROM {} "
    "WHERE true ON CONFLICT (study_id, config_key) DO UPDATE SET owner = excluded.owner, "
    "expires_at = excluded.expires_at WHERE claims.expires_at < :now OR claims.owner = :owner RETURNING config_key, id"
)
_CLAIM_IN_FILE = _CLAIM.format(_FILE_KEYS)
_HOLDER = "SELECT owner FROM claims WHERE study_id = :study AND config_key = :key"
_TAKE_OVER = (
    "UPDATE claims SET owner = :owner, expires_at = :until "
    "WHERE study_id = :study AND config_key = :key AND owner = :holder RETURNING id"
)
_OF_OTHERS = "SELECT config_key, owner, expires_at FROM claims WHERE study_id = :study AND owner <> :owner ORDER BY id"
_OTHERS = "SELECT id FROM claims WHERE study_id = :study AND owner <> :owner AND expires_at >= :now"
_NEWEST = "SELECT coalesce(max(id), 0) FROM trials"
_NEWS = (  # the sum keeps the database from an index of all trials of the study; those of the newest ids are few
    "SELECT id FROM trials WHERE id > :first AND study_id + 0 = :study AND run_id <> :run AND phase = 'search' "
    "ORDER BY id"
)
_CLAIM_AND_LOOK = (  # on a server, where each statement is a round trip, during which no other session can claim
    f"WITH claimed AS ({_CLAIM.format(_SERVER_KEYS)}) "
    "SELECT ARRAY(SELECT config_key FROM claimed ORDER BY id), ARRAY(SELECT id FROM claimed ORDER BY id), "
    f"({_NEWEST}), ARRAY({_NEWS}), ARRAY({_OTHERS})"
)
_LOCK = "SELECT pg_advisory_xact_lock(:kind, :study), CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_LOCK_UNFLUSHED = _LOCK + ", set_config('synchronous_commit', 'off', true)"
"""The commit waits for no disk: a crash of the server may undo claims, and a trial is not stored twice for that."""
_FLUSHED = "SET LOCAL synchronous_commit TO DEFAULT"
"""The commit waits for the disk, which then holds all earlier commits, too."""
_SERVER_TIME = "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_RENEW = "UPDATE claims SET expires_at = :until WHERE study_id = :study AND owner = :owner"
_RELEASE_ALL = "DELETE FROM claims WHERE study_id = :study AND owner = :owner"
_RELEASE = f"{_RELEASE_ALL} AND config_key IN (SELECT value FROM {{}}) RETURNING config_key"
_RELEASE_IN_FILE, _RELEASE_ON_SERVER = _RELEASE.format(_FILE_KEYS), _RELEASE.format(_SERVER_KEYS)
_TRIED = (
    "SELECT id FROM trials WHERE id > :first AND study_id + 0 = :study AND config_key = :key AND run_id <> :run "
    "AND phase = 'search' LIMIT 1"
)
TRIAL_IDENTITY = ("phase", "rank", "config_key", "outcome", "time_us", "created_at")
"""Columns of a trial that identify it within its run."""
_STORED_TRIALS = f"SELECT {', '.join(TRIAL_IDENTITY)} FROM trials WHERE run_id = :run ORDER BY id"
_ENDED_RUN = "SELECT id FROM runs WHERE id = :run AND started_at = :started_at AND ended_at IS NOT NULL"

_STORED = (
    "SELECT id FROM trials "
    "WHERE run_id = :run_id AND phase = :phase AND config_key = :config_key AND created_at = :created_at"
)


class RunRecord(AbstractContextManager["RunRecord"]):
    """One run of a study: stores what a session tries, and makes sure that the database holds it.

    If the database has lost the run, or cannot store a trial, the run is written to a new database beside it, or in the
    folder for temporary files, and `RescuedRunError` is raised.

    Use it in a ``with`` block after `start`: leaving the block ends the run, without a summary unless `end` gave one,
    and reads it back. The study is created if it does not exist; ``run_id`` is 0 before `start`.
    """

    def __init__(self, database: Database, key: TuningKey, device: DeviceProperties) -> None:
        self.study_id = database.study(key, device)
        self.run_id = 0
        self._database = database
        self._key = key
        self._device = device
        self._run: Mapping[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        """Rows of the table ``trials``, without the ids: the same in a rescue file, so that both merge."""
        self._unsure = 0
        """Number of the last of these that may not be stored, as Ctrl-C came meanwhile."""
        self._summary: Mapping[str, Any] | None = None
        self._has_ended = self._is_rescued = False
        with database.reading() as connection:
            self._first_id = self._newest_id = int(run_text(connection, _NEWEST, {})[0][0])
        self._generation = fork_guard.generation
        """Fork before which the connection was opened."""
        self._connection: Connection | None = None
        """Connection to a file for the trials; None before the first one and after the last. A server may close one
        that is idle, so that each transaction there takes a connection from the pool, which checks it."""
        self._owner = ""
        """This session as the owner of claims; empty if it does not share the study."""
        self._renewal: threading.Thread | None = None
        self._ended = threading.Event()
        self.others = 0
        """Number of configurations that other sessions were trying at the last claim or look for inheritances."""
        self._seen: set[int] = set()
        self._undelivered: list[Trial] = []
        self._tried: set[str] = set()
        """Configurations that other sessions have tried since this one began."""

    def start(self, *, shares: bool = False, **columns: Any) -> int:
        """Record the start of the run with columns of the table ``runs``; return what other sessions are trying.

        That is a number of configurations, 0 unless the run ``shares`` the study with others at the same time.
        """
        self._run = {"study_id": self.study_id, "started_at": now_text(), **columns}

        def begin() -> int:
            with self._database.writing() as connection:
                self.run_id = insert_run(connection, self._run)
                return forget_dead(connection, self.study_id) if shares else 0

        others = across_restarts(begin)  # a run whose commit was lost with the connection stays empty
        if shares:
            self._owner = f"{self.run_id} {os.getpid()} {_start_time(os.getpid())} {_machine()}"
        return others

    def claim(self, *configs: Config, room: int | None = None) -> list[bool]:
        """Claim configurations, but for those that another session has claimed or tried; return which are this one's.

        Without sharing, every configuration is this session's. ``room`` is the number of trials that the study may
        still begin, by what this session knows; None for any number. What other sessions have stored since the last
        `take_news`, and what they claimed before, counts against it.
        """
        if not self._owner:
            return [True] * len(configs)
        if self._renewal is None:
            self._renewal = threading.Thread(target=self._renew, name="leases", daemon=True)
            self._renewal.start()
        keys = [config_key(config) for config in configs]
        return self._write(lambda connection: self._take(connection, keys, room))

    def take_news(self) -> list[Trial]:
        """Return the trials of other sessions that claims and looks have met since the last call, oldest first."""
        news, self._undelivered = self._undelivered, []
        return news

    def forget(self, trial: Trial) -> None:
        """Let the configuration of another session's trial, which is of no use to this one, be claimed."""
        self._tried.discard(trial.config_key)

    def inherit(self) -> list[str]:
        """Take over what sessions that died were trying; return the keys of its configurations."""
        if not self._owner:
            return []

        def take_over(connection: Connection) -> list[str]:
            now, keys = _now(connection), list[str]()
            mine = {"study": self.study_id, "owner": self._owner, "until": now + LEASE_S}
            unlocked = _OF_OTHERS + (" FOR UPDATE SKIP LOCKED" if _is_server(connection) else "")
            for key, holder, expires_at in run_text(connection, unlocked, mine):
                if len(keys) < _INHERITED and (expires_at < now or is_gone(holder)):
                    run_text(connection, _TAKE_OVER, {**mine, "key": key, "holder": holder})
                    keys.append(key)
            self.others = len(run_text(connection, _OF_OTHERS, mine))
            self._look(connection)  # after the count: of a claim that has ended, the trial is seen
            return keys

        return self._write(take_over)

    def disclaim(self, key: str) -> None:
        """End the claim of a configuration that is not tried."""
        if self._owner:
            self._write(lambda connection: self._release_claims(connection, [key]))

    def add(self, *trials: Trial, phase: Phase = "search", rank: int | None = None) -> None:
        """Commit trials in one transaction; it ends the claims of those of a search.

        A trial whose claim ran out, and whose configuration another session has tried or is trying, is not stored.
        """
        rows = [{"phase": phase, "rank": rank, "created_at": now_text(), **trial_row(trial)} for trial in trials]
        self._rows += rows
        ids = {"study_id": self.study_id, "run_id": self.run_id}
        is_again = False

        def store(connection: Connection) -> list[dict[str, Any]]:
            nonlocal is_again
            if is_again and (stored := [row for row in rows if run_text(connection, _STORED, row | ids)]):
                return stored
            is_again = True  # the connection may be lost after the commit
            keys = [row["config_key"] for row in rows]
            mine = self._settle(connection, keys) if self._owner and phase == "search" else set(keys)
            kept = [row for row in rows if row["config_key"] in mine]
            insert_trials(connection, [row | ids for row in kept])
            return kept

        try:
            stored = self._write(store)
        except KeyboardInterrupt:
            self._unsure = len(rows)
            raise
        for row in rows:
            if row not in stored:
                self._rows.remove(row)
        with self._rescuing():
            self._database.check_in_place()  # an open SQLite file that was replaced takes trials without an error

    def end(self, summary: Mapping[str, Any]) -> None:
        """Record the end of the run; the winner of its finals becomes the study's best."""
        self._summary = summary
        self._release()
        with self._rescuing():
            across_restarts(self._finish)

    def _finish(self) -> None:
        with self._database.writing() as connection:
            if not finish_run(connection, self.run_id, self._summary or {}):
                raise DatabaseError(
                    f"{self._database.location} has no run {self.run_id} any more; it was deleted meanwhile"
                )
        self._has_ended = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end_claims()
        self._release()
        if self._is_rescued:
            return

        def complete() -> None:
            self._database.check_in_place()
            if not self._has_ended:
                self._finish()
            self._database.check_integrity()
            with self._database.reading() as connection:
                stored = [*run_text(connection, _STORED_TRIALS, {"run": self.run_id})]
                runs = run_text(connection, _ENDED_RUN, {"run": self.run_id, "started_at": self._run["started_at"]})
            expected = [tuple(row[name] for name in TRIAL_IDENTITY) for row in self._rows]
            if not runs or stored not in (expected, expected[: len(expected) - self._unsure]):
                raise DatabaseError(
                    f"the database {self._database.location} does not hold what was stored in it: another program "
                    "overwrote it or its log during the run"
                )
            self._database.check_in_place()

        try:
            if isinstance(error, LostServerError):  # it was waited for already
                complete()
            else:
                across_restarts(complete)
        except DatabaseError as fault:
            raise self._rescued(fault, error) from fault

    def _write(self, action: Callable[[Connection], Result]) -> Result:
        """Run a transaction, again if a server restarts meanwhile; an error rescues the run."""
        with self._rescuing():
            return across_restarts(lambda: self._transact(action))

    def _transact(self, action: Callable[[Connection], Result]) -> Result:
        with fork_guard.use():
            if self._generation != fork_guard.generation:
                self._release()  # it was closed before the process forked
            if self._connection is None and self._database.path is not None:
                self._connection, self._generation = self._database.connect(), fork_guard.generation
            with self._database.writing(self._connection) as connection:
                return action(connection)

    def _release(self) -> None:
        """Return the connection to the pool, from where it serves the database's other methods."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with fork_guard.use(), suppress(SQLAlchemyError):
                if self._generation != fork_guard.generation:
                    connection.invalidate()
                connection.close()

    def _take(self, connection: Connection, keys: Sequence[str], room: int | None = None) -> list[bool]:
        now = _lock(connection, self.study_id, _LOCK_UNFLUSHED)
        own = {"study": self.study_id, "owner": self._owner, "keys": encode_json(keys)}
        mine = {**own, "now": now, "until": now + LEASE_S}
        if _is_server(connection):
            where = {**mine, "run": self.run_id, "first": max(self._first_id, self._newest_id - _LATE_IDS)}
            claimed, numbers, newest, found, held_ids = run_text(connection, _CLAIM_AND_LOOK, where)[0]
            granted = dict(zip(claimed, numbers, strict=True))
            self._note(connection, newest, found)
            if len(granted) < len(keys):  # what is left to another session must still be its own after a crash
                run_text(connection, _FLUSHED, {})
        else:
            granted = dict(run_text(connection, _CLAIM_IN_FILE, mine))
            self._look(connection)  # after the claim: a trial that was stored until then is seen
            held_ids = [row[0] for row in run_text(connection, _OTHERS, mine)]
        for key in keys:
            claim = {**mine, "key": key}
            holders = run_text(connection, _HOLDER, claim) if key not in granted else ()
            for (holder,) in holders:
                if is_gone(holder):
                    for (number,) in run_text(connection, _TAKE_OVER, {**claim, "holder": holder}):
                        granted[key] = number
        ours: dict[str, bool] = {}
        for key in keys:
            earlier = sum(held_id < granted[key] for held_id in held_ids) if key in granted else 0
            before = len(self._undelivered) + earlier + sum(ours.values())
            ours[key] = key in granted and key not in self._tried and (room is None or before < room)
        self._release_claims(connection, [key for key in granted if not ours[key]])
        self.others = len(held_ids)
        return [ours[key] for key in keys]

    def _look(self, connection: Connection) -> None:
        """Take note of the trials that other sessions have stored; they are undelivered until the transaction ends."""
        first = max(self._first_id, self._newest_id - (_LATE_IDS if _is_server(connection) else 0))
        newest = run_text(connection, _NEWEST, {})[0][0]
        if newest > first:
            where = {"first": first, "study": self.study_id, "run": self.run_id}
            self._note(connection, newest, [row[0] for row in run_text(connection, _NEWS, where)])

    def _note(self, connection: Connection, newest: int, found: Sequence[int]) -> None:
        """Take note of the newest id, and of the trials of others that were found after the last look."""
        self._newest_id = max(self._newest_id, newest)
        unseen = [number for number in found if number not in self._seen]
        if unseen:
            query = select(TRIALS).where(TRIALS.c.id.in_(unseen)).order_by(TRIALS.c.id)
            trials = [one.trial for one in parsed_rows(connection, query, stored_trial)]
            self._seen.update(unseen)
            self._tried.update(trial.config_key for trial in trials)
            self._undelivered += trials

    def _settle(self, connection: Connection, keys: Sequence[str]) -> set[str]:
        """End the claims of configurations that were tried; return those whose trials may be stored.

        Not those whose claim was lost if another session has claimed or tried the configuration since.
        """
        _lock(connection, self.study_id)
        mine = self._release_claims(connection, keys)
        for key in keys:
            where = {"study": self.study_id, "key": key, "first": self._first_id, "run": self.run_id}
            if not (key in mine or run_text(connection, _HOLDER, where) or run_text(connection, _TRIED, where)):
                mine.add(key)
        return mine

    def _release_claims(self, connection: Connection, keys: Sequence[str]) -> set[str]:
        """End claims; return those that there were."""
        if not keys:
            return set()
        statement = _RELEASE_ON_SERVER if _is_server(connection) else _RELEASE_IN_FILE
        where = {"study": self.study_id, "owner": self._owner, "keys": encode_json(keys)}
        return {row[0] for row in run_text(connection, statement, where)}

    def _renew(self) -> None:
        """Renew the session's leases until it ends.

        It is a turn of its own, as ending claims is: two transactions that change the same claims in different orders
        would wait for each other, and the server would end one of them with an error.
        """
        while not self._ended.wait(LEASE_S / _RENEWALS):
            with suppress(DatabaseError), self._database.writing() as connection:  # the session meets the same error
                until = _lock(connection, self.study_id) + LEASE_S
                run_text(connection, _RENEW, {"study": self.study_id, "owner": self._owner, "until": until})

    def _end_claims(self) -> None:
        """End the claims that are left, so that other sessions need not wait for the leases."""
        self._ended.set()
        if self._renewal is not None:
            self._renewal.join()
        if self._owner:

            def release_all(connection: Connection) -> None:
                _lock(connection, self.study_id)
                run_text(connection, _RELEASE_ALL, {"study": self.study_id, "owner": self._owner})

            with suppress(DatabaseError):
                self._transact(release_all)
        self._owner = ""

    @contextmanager
    def _rescuing(self) -> Iterator[None]:
        try:
            yield
        except DatabaseError as error:
            raise self._rescued(error) from error

    def _rescued(self, fault: DatabaseError, error: BaseException | None = None) -> RescuedRunError:
        """Write the rescue file, and return the error that names it, with the message of what ended the run before."""
        self._is_rescued = True
        self._release()
        reason = f"{error}; and {fault}" if isinstance(error, AutotileError) else str(fault)
        if not self._rows:
            return RescuedRunError(f"{reason}; this session had measured nothing yet")
        trials, database = plural(len(self._rows), "trial"), self._database
        beside = [database.path.parent] if database.path is not None and database.path.parent.is_dir() else []
        folders = [*beside, Path(tempfile.gettempdir())]
        rescued = self._write_rescue_file(folders)
        if rescued is None:
            named = " and ".join(map(str, folders))
            return RescuedRunError(f"{reason}; the {trials} of this session are lost: {named} cannot be written")
        fastest = ""
        # the winner of the finals, else the fastest trial of the search
        measured = [row for row in self._rows if Outcome(row["outcome"]).has_time and row["time_us"] is not None]
        if measured:
            best = min(measured, key=lambda row: (row["rank"] or len(self._rows), row["time_us"]))
            time_us = time_text(best["time_us"], best["source"])
            fastest = f", the best of them {config_text(best['config'])} with {time_us}"
        command = f"autotile db merge {shlex.quote(str(rescued))} -o {shlex.quote(database.argument)}"
        first = f"move {database.location} away, then " if isinstance(fault, DamagedDatabaseError) else ""
        return RescuedRunError(
            f"{reason}; the {trials} of this session are kept in {rescued}{fastest}; to have them in the "
            f"database: {first}`{command}`",
            rescued=str(rescued),
        )

    def _write_rescue_file(self, folders: Sequence[Path]) -> Path | None:
        """Write the run, and what can be read of a deleted or replaced file, to a new database; return its path."""
        path = self._database.path or Path("tuning.db")
        for folder in folders:
            rescued = folder / f"{path.stem}.rescued-{secrets.token_hex(8)}{path.suffix or '.db'}"
            try:
                with Database.open(rescued) as target:
                    with target.writing() as connection:
                        self._write_run(connection)
                    try:
                        self._database.check_in_place()
                    except DatabaseError:  # the open connection is the last that leads to the file
                        from autotile.database.care import copy_missing_rows

                        with suppress(DatabaseError, ValueError, TypeError, LookupError):
                            copy_missing_rows(self._database, target)
                    target.check_integrity()
                return rescued
            except (DatabaseError, OSError):
                for suffix in ("", "-wal", "-shm", "-journal"):
                    with suppress(OSError):
                        rescued.with_name(rescued.name + suffix).unlink(missing_ok=True)
        return None

    def _write_run(self, connection: Connection) -> None:
        ids = {"study_id": ensure_study(connection, self._key, self._device)}
        ended = {"ended_at": now_text(), "summary": self._summary or {}}
        ids["run_id"] = insert_run(connection, {**self._run, **ended, **ids})
        insert_trials(connection, [row | ids for row in self._rows])


def forget_dead(connection: Connection, study_id: int) -> int:
    """Delete the claims of processes of this machine that are gone; return how many others are left."""
    _lock(connection, study_id)
    claims = run_text(connection, _OF_OTHERS, {"study": study_id, "owner": ""})
    gone = {owner for _, owner, _ in claims if is_gone(owner)}
    for owner in gone:
        run_text(connection, _RELEASE_ALL, {"study": study_id, "owner": owner})
    return sum(owner not in gone for _, owner, _ in claims)


def claiming_runs(connection: Connection, study_id: int) -> set[int]:
    """Return the ids of the runs whose sessions are trying configurations of a study now."""
    now, claims = _now(connection), run_text(connection, _OF_OTHERS, {"study": study_id, "owner": ""})
    runs = (owner.partition(" ")[0] for _, owner, until in claims if until >= now and not is_gone(owner))
    return {int(run) for run in runs if run.isdecimal()}


def is_gone(owner: str) -> bool:
    """Return True if a claim is of a process of this machine that has ended."""
    words = owner.split(" ")
    if len(words) != 4 or words[3] != _machine() or not words[1].isdecimal():
        return False
    return _start_time(int(words[1])) != words[2]


def _is_server(connection: Connection) -> bool:
    """Return True if the database is on a server, where others write too, and each statement is a round trip."""
    return connection.dialect.name == "postgresql"


def _now(connection: Connection) -> float:
    """Return the time in seconds since 1970: a server's own, so that clocks of its clients do not matter."""
    return float(run_text(connection, _SERVER_TIME, {})[0][0]) if _is_server(connection) else time.time()


def _lock(connection: Connection, study_id: int, statement: str = _LOCK) -> float:
    """Let one session at a time claim and store; return the time, as `_now` does.

    A server's transactions do not see each other's rows before they end. A writer of an SQLite file is alone.
    """
    if _is_server(connection):
        return float(run_text(connection, statement, {"kind": _LOCK_KIND, "study": study_id})[0][1])
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
