"""Read winners and rules of a local database, and count its misses, with the standard library alone.

Importing SQLAlchemy takes longer than the rest of a process's first look-up, so serving reads an SQLite file of the
current schema directly. Every other case is left to `autotile.database.database.Database`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from autotile.core.device import DeviceProperties
from autotile.core.documents import canonical_json, convert, json_cell
from autotile.core.forks import FORK_LOCK
from autotile.core.model import Problem
from autotile.database.paths import looks_like_url, network_file_system
from autotile.database.structure import SCHEMA_REVISION, VERSION_TABLE, foreign_object
from autotile.database.winners import (
    CHECK_COLUMNS,
    JSON_COLUMNS,
    RULE_COLUMNS,
    WINNER_COLUMNS,
    Check,
    RuleDocument,
    StoredRule,
    Winner,
)
from autotile.errors import DataError, InputError
from autotile.settings import expand_path

_BUSY_TIMEOUT_S = 1.0
"""In WAL mode a reader never waits; in the other modes a commit takes milliseconds."""


SERVER_TIMEOUT_S = 2.0
"""Timeout of a database server in serving: a program must not wait for it as a tuning session may."""


def _names(columns: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{table}.{name}" for table, names in columns.items() for name in names)


_WINNERS = f"""
    SELECT {_names(WINNER_COLUMNS)}
    FROM studies
    JOIN best ON studies.id = best.study_id
    JOIN trials ON trials.id = best.trial_id
    JOIN runs ON runs.id = trials.run_id
"""
WINNERS_SQL = f"{_WINNERS} WHERE studies.kernel = :kernel AND studies.dtype = :dtype ORDER BY trials.id DESC"
WINNER_SQL = f"{_WINNERS} WHERE studies.digest = :digest"
RULES_SQL = f"""
    SELECT {_names({"families": RULE_COLUMNS})}
    FROM families
    WHERE families.learned_at IS NOT NULL AND families.kernel = :kernel AND families.dtype = :dtype
    ORDER BY families.id DESC
"""
CHECKS_SQL = f"""
    SELECT {_names(CHECK_COLUMNS)}
    FROM studies
    JOIN trials ON studies.id = trials.study_id
    WHERE studies.kernel = :kernel AND studies.dtype = :dtype AND trials.phase = 'final' AND trials.rank IS NULL
    ORDER BY trials.id
"""
MODEL_SQL = "SELECT models.model FROM models WHERE operation = :operation AND dtype = :dtype AND gpu_name = :gpu_name"
"""A test compares the statements with the ones that SQLAlchemy builds from the schema."""

DIGESTED_SQL = f"""
    SELECT {_names(WINNER_COLUMNS)}, trials.telemetry
    FROM studies
    JOIN trials ON studies.id = trials.study_id
    JOIN runs ON runs.id = trials.run_id
    WHERE studies.digest = :study AND trials.outcome = 'ok'
    AND ((trials.phase = 'final' AND trials.rank IS NOT NULL AND runs.ended_at IS NOT NULL)
         OR trials.config_key = :config)
    ORDER BY trials.id DESC
"""
"""Finalists of a study, and all trials of one configuration, newest first, with the digests of their outputs."""

CHANGES_SQL = """
    SELECT studies.kernel, studies.dtype, 'run', count(runs.id), max(runs.id), max(runs.ended_at)
    FROM studies JOIN runs ON runs.study_id = studies.id
    WHERE runs.ended_at IS NOT NULL GROUP BY studies.kernel, studies.dtype
    UNION ALL
    SELECT studies.kernel, studies.dtype, 'verdict', CAST(sum(finals.number) AS BIGINT), max(finals.newest),
           max(trials.created_at)
    FROM (SELECT study_id, count(*) AS number, max(id) AS newest FROM trials WHERE phase = 'final' GROUP BY study_id)
         AS finals
    JOIN studies ON studies.id = finals.study_id
    JOIN trials ON trials.id = finals.newest
    GROUP BY studies.kernel, studies.dtype
    UNION ALL
    SELECT kernel, dtype, 'rule', count(id), max(id), max(learned_at)
    FROM families WHERE learned_at IS NOT NULL GROUP BY kernel, dtype
    UNION ALL
    SELECT operation, dtype, 'model', count(id), max(id), max(learned_at) FROM models GROUP BY operation, dtype
"""
"""What was decided for each kernel and dtype: ended runs, verdicts, rules and models, each with their number and the
newest. Trials of a search that still runs are left out: they would change what is served with every improvement."""

Changes = frozenset[tuple[Any, ...]]
"""Rows of `CHANGES_SQL`; kernel and dtype are their first two columns."""


def file_signature(location: str) -> tuple[tuple[int, int, int], ...] | None:
    """Return what tells whether an SQLite file was written to: i-node, size and time of it and of its log.

    None for a database on a server, which has no file.
    """
    if looks_like_url(location):
        return None
    return tuple(_state(f"{location}{suffix}") for suffix in ("", "-wal"))


def _state(path: str) -> tuple[int, int, int]:
    """Return i-node, size and time of a file; zeros if it is empty, as reading alone creates an empty log."""
    try:
        state = os.stat(expand_path(path, "a database"))  # noqa: PTH116
    except (OSError, InputError):
        return (0, 0, 0)
    return (state.st_ino, state.st_size, state.st_mtime_ns) if state.st_size else (0, 0, 0)


def read_changes_fast(location: str) -> Changes | None:
    """Return what has been decided in a database; the cases are those of `read_winners_fast`."""
    rows = _tuples(location, CHANGES_SQL)
    return None if rows is None else frozenset(map(tuple, rows))


def read_winners_fast(location: str, kernel: str, dtype: str) -> list[Winner] | None:
    """Return the winners of a kernel, newest first; an empty list if there is no database.

    Returns
    -------
    list of Winner or None
        None if the database is not a readable SQLite file of the current schema, or a row does not match its schema.
    """
    try:
        rows = _rows(location, WINNERS_SQL, kernel=kernel, dtype=dtype)
        return None if rows is None else [parsed_winner(row) for row in rows]
    except DataError:
        return None


def read_winner_fast(location: str, study: str) -> list[Winner] | None:
    """Return the winner of the study with a digest, as a list of one; the cases are those of `read_winners_fast`."""
    try:
        rows = _rows(location, WINNER_SQL, digest=study)
        return None if rows is None else [parsed_winner(row) for row in rows]
    except DataError:
        return None


def read_rules_fast(location: str, kernel: str, dtype: str) -> list[StoredRule] | None:
    """Return the rules of a kernel's families, newest first; the cases are those of `read_winners_fast`."""
    try:
        rows = _rows(location, RULES_SQL, kernel=kernel, dtype=dtype)
        return None if rows is None else [convert(_decoded(row), RuleDocument).stored_rule() for row in rows]
    except DataError:
        return None


def read_model_fast(location: str, operation: str, dtype: str, gpu_name: str) -> Any:
    """Return the JSON of the model of an operation for a GPU; None if there is none, or in the cases of winners."""
    try:
        rows = _rows(location, MODEL_SQL, operation=operation, dtype=dtype, gpu_name=gpu_name)
        return json_cell(rows[0]["model"]) if rows else None
    except DataError:
        return None


def read_checks_fast(location: str, kernel: str, dtype: str) -> list[Check] | None:
    """Return the verdicts on unranked configurations of a kernel, oldest first; cases as for `read_winners_fast`."""
    try:
        rows = _rows(location, CHECKS_SQL, kernel=kernel, dtype=dtype)
        return None if rows is None else [Check.from_row(_decoded(row)) for row in rows]
    except DataError:
        return None


def read_digested_rows_fast(location: str, study: str, config: str) -> list[dict[str, Any]] | None:
    """Return the rows of `DIGESTED_SQL`; the cases are those of `read_winners_fast`.

    Parameters
    ----------
    study, config
        Digest of the study's key, and `config_key` of the configuration.
    """
    rows = _tuples(location, DIGESTED_SQL, {"study": study, "config": config})
    return None if rows is None else [_decoded(dict(row)) for row in rows]


def _rows(location: str, query: str, **parameters: str) -> list[dict[str, Any]] | None:
    rows = _tuples(location, query, parameters)
    return None if rows is None else [dict(row) for row in rows]


def _tuples(location: str, query: str, parameters: Mapping[str, str] | None = None) -> list[Any] | None:
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
            if not _is_current(connection):
                return None
            connection.row_factory = sqlite3.Row
            return connection.execute(query, parameters or {}).fetchall()
    except sqlite3.Error:
        return None


def _is_current(connection: sqlite3.Connection) -> bool:
    """Return whether a file has the current schema, and no view or trigger that autotile did not create."""
    if foreign_object(connection.execute, SCHEMA_REVISION):
        return False
    return connection.execute(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2").fetchall() == [(SCHEMA_REVISION,)]


def parsed_winner(row: Mapping[str, Any]) -> Winner:
    """Return the winner in a row of `WINNERS_SQL`, whose JSON columns may be text.

    Raises
    ------
    DataError
        It does not match the schema.
    """
    device = row["device"]
    if not isinstance(device, str):
        return Winner.from_row(row, convert(device, DeviceProperties) if device is not None else None)
    return Winner.from_row(_decoded(row), _device(device))


def _decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the values of its JSON columns."""
    return {**row, **{name: json_cell(row[name]) for name in row.keys() & JSON_COLUMNS}}


@lru_cache(maxsize=16)
def _device(cell: Any) -> DeviceProperties | None:
    """Parse the device of a study; most studies of a database share one."""
    return convert(json_cell(cell), DeviceProperties) if cell is not None else None


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
            if not _is_current(connection):
                return False
            connection.executemany(_ADD, rows)
            connection.execute("COMMIT")
    except sqlite3.Error:
        return False
    return True
