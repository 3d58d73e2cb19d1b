"""Claims: which session tries which configuration of a study, so that several sessions share one.

A session claims a configuration before it tries it, and storing the trial ends the claim in the same transaction. A
claim is a lease, which a session renews while it lives; when it runs out, or its process on this machine is gone,
another session inherits it.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, delete, func, select, text, update

from autotile.core.model import Trial, config_key
from autotile.database.rows import parsed_rows, run_text, stored_trial
from autotile.database.schema import CLAIMS, TRIALS
from autotile.errors import DatabaseError

if TYPE_CHECKING:
    from autotile.database.database import Database

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
