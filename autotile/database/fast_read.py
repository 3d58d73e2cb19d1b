"""Read winners and rules from a local database with the standard library alone.

Importing SQLAlchemy takes longer than the rest of a process's first look-up, so serving reads an SQLite file of the
current schema directly. Every other case is left to `autotile.database.database.Database`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autotile.core.device import DeviceProperties
from autotile.database.winners import JSON_COLUMNS, RULE_COLUMNS, WINNER_COLUMNS, StoredRule, Winner

SCHEMA_REVISION = "0003"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be recognized."""

VERSION_TABLE = "autotile_schema"
"""Table of Alembic's revision; with Alembic's default name, another program's database could pass for ours."""

_BUSY_TIMEOUT_S = 1.0
"""In WAL mode a reader never waits; in the other modes a commit takes milliseconds."""


def _names(columns: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{table}.{name}" for table, names in columns.items() for name in names)


WINNERS_SQL = f"""
    SELECT {_names(WINNER_COLUMNS)}
    FROM studies
    JOIN best ON studies.id = best.study_id
    JOIN trials ON trials.id = best.trial_id
    JOIN runs ON runs.id = trials.run_id
    WHERE studies.kernel = ? AND studies.dtype = ?
    ORDER BY trials.created_at DESC
"""
RULES_SQL = f"""
    SELECT {_names({"families": RULE_COLUMNS})}
    FROM families
    WHERE families.learned_at IS NOT NULL AND families.kernel = ? AND families.dtype = ?
    ORDER BY families.learned_at DESC
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
    if "://" in location:
        return None
    path = Path(location).expanduser()
    if not path.exists():
        return []
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as connection:
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
