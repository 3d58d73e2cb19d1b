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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, delete, func, select, text, update

from autotile.core.model import Trial, config_key
from autotile.database.rows import parsed_rows, stored_trial
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


# The statements of each trial are text, which takes a fraction of the time that expressions do.
_CLAIM = text(
    "INSERT INTO claims (study_id, config_key, owner, expires_at) VALUES (:study, :key, :owner, :until) "
    "ON CONFLICT (study_id, config_key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at "
    "WHERE claims.expires_at < :now OR claims.owner = :owner RETURNING id"
)
_HOLDER = text("SELECT owner FROM claims WHERE study_id = :study AND config_key = :key")
_TAKE_OVER = text(
    "UPDATE claims SET owner = :owner, expires_at = :until "
    "WHERE study_id = :study AND config_key = :key AND owner = :holder RETURNING id"
)
_OTHERS = text("SELECT id FROM claims WHERE study_id = :study AND owner <> :owner AND expires_at >= :now")
_NEWEST = text("SELECT max(id) FROM trials")
_NEWS = text(  # the sum keeps the database from an index of all trials of the study; those of the newest ids are few
    "SELECT id FROM trials WHERE id > :first AND study_id + 0 = :study AND run_id <> :run AND phase = 'search' "
    "ORDER BY id"
)
_LOCK = text("SELECT pg_advisory_xact_lock(:kind, :study)")
_SERVER_TIME = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
_RENEW = text("UPDATE claims SET expires_at = :until WHERE owner = :owner")
_RELEASE_ALL = text("DELETE FROM claims WHERE study_id = :study AND owner = :owner")
_RELEASE = text("DELETE FROM claims WHERE study_id = :study AND owner = :owner AND config_key = :key")


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim.

    Attributes
    ----------
    is_ours
        Whether this session may try the configuration.
    news
        Trials that other sessions have stored since the last look, oldest first.
    others
        Number of configurations that other sessions are trying now.
    """

    is_ours: bool
    news: Sequence[Trial]
    others: int


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

    def take(self, connection: Connection, key: str, room: int | None = None) -> Claimed:
        """Claim a configuration, unless another session has claimed or tried it.

        Parameters
        ----------
        room
            Number of trials that the study may still begin, by what this session knows; None for any number. What other
            sessions have stored since, and what they claimed before, counts against it.
        """
        self._lock(connection)
        now = _now(connection)
        mine = {"study": self._study_id, "key": key, "owner": self.owner, "now": now, "until": now + LEASE_S}
        number = connection.execute(_CLAIM, mine).scalar_one_or_none()
        if number is None:
            holder = connection.execute(_HOLDER, {"study": self._study_id, "key": key}).scalar_one_or_none()
            if holder is not None and is_gone(holder):
                number = connection.execute(_TAKE_OVER, {**mine, "holder": holder}).scalar_one_or_none()
        news = self.look(connection)  # after the claim: a trial that was stored until then is seen
        held_ids = (
            connection.execute(_OTHERS, {"study": self._study_id, "owner": self.owner, "now": now}).scalars().all()
        )
        is_ours = number is not None
        if number is not None:
            earlier = sum(held_id < number for held_id in held_ids)
            if key in self._tried or (room is not None and len(news) + earlier >= room):
                self.release(connection, key)
                is_ours = False
        return Claimed(is_ours, news, len(held_ids))

    def look(self, connection: Connection) -> list[Trial]:
        """Return the trials that other sessions have stored since the last `deliver`."""
        late = _LATE_IDS if connection.dialect.name == "postgresql" else 0
        first = max(self._first_id, self._newest_id - late)
        newest = connection.execute(_NEWEST).scalar() or 0
        if newest > first:
            where = {"first": first, "study": self._study_id, "run": self._run_id}
            unseen = [number for number in connection.execute(_NEWS, where).scalars() if number not in self._seen]
            self._newest_id = max(self._newest_id, newest)
            self._add_undelivered(connection, unseen)
        return list(self._undelivered)

    def _add_undelivered(self, connection: Connection, unseen: Sequence[int]) -> None:
        if not unseen:
            return
        query = select(TRIALS).where(TRIALS.c.id.in_(unseen)).order_by(TRIALS.c.id)
        found = [one.trial for one in parsed_rows(connection, query, stored_trial)]
        self._seen.update(unseen)
        self._tried.update(config_key(trial.config) for trial in found)
        self._undelivered += found

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
        """Renew the session's leases."""
        connection.execute(_RENEW, {"until": _now(connection) + LEASE_S, "owner": self.owner})

    def release(self, connection: Connection, key: str | None = None) -> bool:
        """End the claim of a configuration, or all of the session's; return whether there was one."""
        own = {"study": self._study_id, "owner": self.owner}
        ended = (
            connection.execute(_RELEASE_ALL, own) if key is None else connection.execute(_RELEASE, {**own, "key": key})
        )
        return ended.rowcount > 0

    def settle(self, connection: Connection, key: str) -> bool:
        """End the claim of a configuration that was tried; return whether its trial may be stored.

        It may not if the claim was lost, and another session has claimed or tried the configuration since.
        """
        self._lock(connection)
        return self.release(connection, key) or not self._is_taken_over(connection, key)

    def _is_taken_over(self, connection: Connection, key: str) -> bool:
        held = select(CLAIMS.c.id).where(CLAIMS.c.study_id == self._study_id, CLAIMS.c.config_key == key)
        if connection.execute(held).first() is not None:
            return True
        tried = select(TRIALS.c.id).where(
            TRIALS.c.id > self._first_id,
            TRIALS.c.study_id + 0 == self._study_id,
            TRIALS.c.config_key == key,
            TRIALS.c.run_id != self._run_id,
            TRIALS.c.phase == "search",
        )
        return connection.execute(tried.limit(1)).first() is not None

    def _lock(self, connection: Connection) -> None:
        """Let one session at a time claim and store: a server's transactions do not see each other's rows before.

        A writer of an SQLite file is alone anyway.
        """
        if connection.dialect.name == "postgresql":
            connection.execute(_LOCK, {"kind": _LOCK_KIND, "study": self._study_id})


def forget_dead(connection: Connection, study_id: int) -> int:
    """Delete the claims of processes of this machine that are gone; return how many others are left."""
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
            with suppress(DatabaseError), self._database.writing() as connection:  # the session meets the same error
                self._claims.renew(connection)


def is_gone(owner: str) -> bool:
    """Return whether a claim is of a process of this machine that has ended."""
    words = owner.split(" ")
    if len(words) != 4 or words[3] != _machine() or not words[1].isdecimal():
        return False
    return _start_time(int(words[1])) != words[2]


def _now(connection: Connection) -> float:
    """Return the time in seconds since 1970: a server's own, so that clocks of its clients do not matter."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(_SERVER_TIME).scalar_one())
    return time.time()


def _start_time(pid: int) -> str:
    """Return what tells a process from a later one of the same id: its start, in clock ticks; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


@cache
def _machine() -> str:
    """Return what tells this machine, since its last start, and this container from others."""
    parts = [platform.node() or "unknown"]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts).replace(" ", "-")
