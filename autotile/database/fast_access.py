"""Read winners and rules of a local database, and count its misses, with the standard library alone.

Importing SQLAlchemy takes longer than the rest of a process's first look-up, so serving reads an SQLite file of the
current schema directly. Every other case is left to `autotile.database.database.Database`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from autotile.core.device import DeviceProperties
from autotile.core.documents import canonical_json
from autotile.core.model import Problem
from autotile.database.paths import looks_like_url, network_file_system
from autotile.database.winners import JSON_COLUMNS, RULE_COLUMNS, WINNER_COLUMNS, StoredRule, Winner
from autotile.errors import InputError
from autotile.settings import expand_path

SCHEMA_REVISION = "0004"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be recognized."""

VERSION_TABLE = "autotile_schema"
"""Table of Alembic's revision; with Alembic's default name, another program's database could pass for ours."""

_BUSY_TIMEOUT_S = 1.0
"""In WAL mode a reader never waits; in the other modes a commit takes milliseconds."""


SERVER_TIMEOUT_S = 2.0
"""Timeout of a database server in serving: a program must not wait for it as a tuning session may."""


FORK_LOCK = threading.RLock()
"""Held while serving uses a database, and during a fork.

SQLite has locks of its own. A child that was forked while another thread held one would wait for it forever.
"""

os.register_at_fork(
    before=FORK_LOCK.acquire,
    after_in_parent=FORK_LOCK.release,
    after_in_child=FORK_LOCK.release,
)


def _names(columns: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{table}.{name}" for table, names in columns.items() for name in names)


WINNERS_SQL = f"""
    SELECT {_names(WINNER_COLUMNS)}
    FROM studies
    JOIN best ON studies.id = best.study_id
    JOIN trials ON trials.id = best.trial_id
    JOIN runs ON runs.id = trials.run_id
    WHERE studies.kernel = ? AND studies.dtype = ?
    ORDER BY trials.id DESC
"""
RULES_SQL = f"""
    SELECT {_names({"families": RULE_COLUMNS})}
    FROM families
    WHERE families.learned_at IS NOT NULL AND families.kernel = ? AND families.dtype = ?
    ORDER BY families.id DESC
"""
"""A test compares both statements with the ones that SQLAlchemy builds from the schema."""


def read_winners_fast(location: str, kernel: str, dtype: str) -> list[Winner] | None:
    """Return the winners of a kernel, newest first; an empty list if there is no database.

    Returns
    -------
    list of Winner or None
        None if the database is not a readable SQLite file of the current schema.
    """
    try:
        rows = _rows(location, WINNERS_SQL, kernel, dtype)
        return None if rows is None else [_winner(row) for row in rows]
    except (TypeError, ValueError, KeyError):
        return None


def read_rules_fast(location: str, kernel: str, dtype: str) -> list[StoredRule] | None:
    """Return the rules of a kernel's families, newest first; the cases are those of `read_winners_fast`."""
    try:
        rows = _rows(location, RULES_SQL, kernel, dtype)
        return None if rows is None else [StoredRule.from_json(_decoded(row, row.keys())) for row in rows]
    except (TypeError, ValueError, KeyError):
        return None


def _rows(location: str, query: str, kernel: str, dtype: str) -> list[dict[str, Any]] | None:
    if looks_like_url(location):
        return None
    try:
        path = expand_path(location, "a database")
    except InputError:
        return None
    if not path.exists():
        return []
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with FORK_LOCK, closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as connection:
            (revision,) = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
            if revision != SCHEMA_REVISION:
                return None
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(query, (kernel, dtype))]
    except sqlite3.Error:
        return None


def _winner(row: dict[str, Any]) -> Winner:
    return Winner.from_row(_decoded(row, row.keys() - {"device"}), _device(row["device"]))


def _decoded(row: dict[str, Any], columns: Set[str]) -> dict[str, Any]:
    """Return a row with the JSON of some columns decoded."""
    return row | {name: json.loads(row[name]) for name in columns & JSON_COLUMNS}


@lru_cache(maxsize=16)
def _device(text: str | None) -> DeviceProperties | None:
    """Decode the device of a study; most studies of a database share one."""
    device = json.loads(text) if text else None
    return DeviceProperties.from_json(device) if device else None


_ADD = """
    INSERT INTO misses (kernel, sizes, dtype, gpu_name, tier, count, last_at) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (kernel, sizes, dtype, gpu_name, tier)
    DO UPDATE SET count = count + excluded.count, last_at = excluded.last_at
"""


class Miss(NamedTuple):
    """Calls of a kernel that was served for a problem as a fallback."""

    problem: Problem
    gpu_name: str
    tier: str
    calls: int


def add_misses_fast(path: Path, misses: Iterable[Miss], *, timeout_s: float) -> bool:
    """Add to the counts of misses in an SQLite file, in one transaction; return whether they were written.

    The file is neither created nor migrated, and its journal mode stays as it is. Nothing is written if its schema is
    not the current one, or if it cannot be written now.

    Parameters
    ----------
    timeout_s
        Maximum time to wait for another process that is writing.
    """
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    rows = [
        (m.problem.kernel, canonical_json(dict(m.problem.sizes)), m.problem.dtype, m.gpu_name, m.tier, m.calls, now)
        for m in misses
    ]
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        with (
            FORK_LOCK,
            closing(sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)) as connection,
        ):
            (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
            if journal == "wal":
                if network_file_system(path):  # where several hosts would damage it
                    return False
                connection.execute("PRAGMA synchronous=NORMAL")  # as in Database
            connection.execute("BEGIN IMMEDIATE")
            (revision,) = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
            if revision != SCHEMA_REVISION:
                return False
            connection.executemany(_ADD, rows)
            connection.execute("COMMIT")
    except (sqlite3.Error, TypeError):  # TypeError: the version table is empty
        return False
    return True
