"""Write the counts of misses to a local database with the standard library alone.

A program that only serves kernels imports no SQL engine; importing one within a call of a kernel would block that call
for longer than loading the kernel does. Every other case is left to `autotile.database.database.Database`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from autotile.core.model import Problem, canonical_json
from autotile.database.fast_read import SCHEMA_REVISION, VERSION_TABLE
from autotile.database.paths import network_file_system

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
        with closing(sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)) as connection:
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
