"""Read the winners and rules of a local database by the standard library alone.

Loading SQLAlchemy takes longer than all the rest of a process's first look-up, so dispatch reads an SQLite file of the
present schema directly. Whatever is out of the ordinary is left to `Database`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from autotile.core.device import DeviceProperties
from autotile.core.model import Measurement, Resources
from autotile.database.keys import TuningKey
from autotile.database.winners import Winner

if TYPE_CHECKING:
    from autotile.database.winners import StoredRule


SCHEMA_REVISION = "0003"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be told."""

VERSION_TABLE = "autotile_schema"
"""Where Alembic keeps the revision; its usual name would let another program's database pass for ours."""


_RESOURCES = tuple(field.name for field in fields(Resources))


def resources_of(row: Mapping[Any, Any]) -> Resources | None:
    """What a trial was compiled to, from its row; None where it was not."""
    return None if row["registers"] is None else Resources(**{name: row[name] for name in _RESOURCES})


_BUSY_S = 1.0
"""A reader waits for nobody in WAL mode; elsewhere a commit takes milliseconds."""
_WINNERS = """
    SELECT studies.kernel, studies.template_hash, studies.space_hash, studies.options, studies.dtype, studies.sizes,
        studies.gpu_name, studies.compute_capability, studies.sm_count, studies.smem_per_block_optin_bytes,
        studies.nvrtc_version, studies.l2_mode, studies.source, studies.device,
        trials.config, trials.registers, trials.spill_store_bytes, trials.spill_load_bytes, trials.stack_bytes,
        trials.static_smem_bytes, trials.time_us, trials.low_us, trials.high_us, trials.l2, trials.created_at,
        runs.driver
    FROM best JOIN trials ON trials.id = best.trial_id JOIN studies ON studies.id = best.study_id
        JOIN runs ON runs.id = trials.run_id
    WHERE studies.kernel = ? AND studies.dtype = ?
    ORDER BY trials.created_at DESC
"""
_RULES = """
    SELECT key, device, rule, learned_at FROM families
    WHERE kernel = ? AND dtype = ? AND learned_at IS NOT NULL
    ORDER BY learned_at DESC
"""


def read_winners_quickly(location: str, kernel: str, dtype: str) -> list[Winner] | None:
    """Winners of a kernel, newest first; empty where there is no database.

    Returns
    -------
    list of Winner or None
        None where the database is not an SQLite file of the present schema that can simply be read.
    """
    rows = _rows(location, _WINNERS, kernel, dtype)
    try:
        return [_winner(row) for row in rows] if rows is not None else None
    except (TypeError, ValueError, KeyError):
        return None


def read_rules_quickly(location: str, kernel: str, dtype: str) -> list[StoredRule] | None:
    """Rules of a kernel's families, newest first; what is returned where, as for `read_winners_quickly`."""
    rows = _rows(location, _RULES, kernel, dtype)
    try:
        return [_rule(row) for row in rows] if rows is not None else None
    except (TypeError, ValueError, KeyError):
        return None


def _rows(location: str, query: str, kernel: str, dtype: str) -> list[dict[str, Any]] | None:
    path = Path(location).expanduser()
    if "://" in location:
        return None
    if not path.exists():
        return []
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as connection:
            connection.row_factory = sqlite3.Row
            (revision,) = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
            if revision != SCHEMA_REVISION:
                return None
            return [dict(row) for row in connection.execute(query, (kernel, dtype))]
    except (sqlite3.Error, TypeError):
        return None


def _rule(row: Mapping[str, Any]) -> StoredRule:
    from autotile.database.winners import StoredRule

    read = {name: json.loads(row[name]) for name in ("key", "device", "rule")}
    return StoredRule.from_json({**read, "learned_at": row["learned_at"]})


def _winner(row: Mapping[str, Any]) -> Winner:
    key = {**row} | {name: json.loads(row[name]) for name in ("options", "sizes")}
    timed = row["time_us"] is not None
    return Winner(
        TuningKey.from_json(key),
        _device(row["device"], row["driver"]) if row["device"] else None,
        json.loads(row["config"]),
        resources_of(row),
        Measurement(row["time_us"], row["low_us"], row["high_us"], l2=row["l2"]) if timed else None,
        datetime.fromisoformat(row["created_at"]),
    )


@lru_cache(maxsize=16)
def _device(text: str, driver: str) -> DeviceProperties | None:
    """A study's device, which most studies share; a study may outlive the driver that it was begun with."""
    device = json.loads(text)
    return DeviceProperties.from_json({**device, "driver": driver or device.get("driver", "")}) if device else None
