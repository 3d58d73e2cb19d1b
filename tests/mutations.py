"""Altered documents and rows: entries that are dropped, retyped, nested, or have extreme values and odd strings."""

import copy
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

DEEP = "nested a hundred thousand times"
"""Stands for a list that `json.dumps` could not write."""

ODD_TEXTS = (
    "", "x", "1", "None", "ok", "\n", "a\nb", "\x1b[31mred", "\x1b]0;title\x07", "\u202egnp.exe", "\u2066x", "\u200b",
    "\x00", "\ud800", "a\udfffb", "\ufeff", "café", "x" * 2000, "../../etc/passwd", "'; DROP TABLE",
    "2025-01-01", "2025-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999-12:00", "NaN",
    "{}", "[]", "nan", "1e400", "9.0", "0.0", "999.999", "9.0\n", "float32", "cuda", "final", "search",
)  # fmt: skip
ODD_NUMBERS = (
    0, 1, -1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), -(2**70), 10**400,
    0.0, -0.0, 0.5, -0.5, 1e-320, 1e-9, 1e18, 1.7e308, -1e308, float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    *ODD_TEXTS, *ODD_NUMBERS, None, [], {}, [[]], [{}], {"a": 1}, {"": []}, [1, 2, 3], [0] * 100, [None], DEEP,
)  # fmt: skip


def altered(document: Any, random: Random) -> Any:
    """Return a copy of a JSON document with one to three alterations."""
    changed = {"": copy.deepcopy(document)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        holder, name = random.choice(list(_places(changed)))
        match random.randrange(6):
            case 0 if name != "":
                del holder[name]
            case 1 if isinstance(holder, dict) and name != "":
                holder[random.choice(ODD_TEXTS)] = holder.pop(name)
            case 2:
                one = holder[name]
                holder[name] = random.choice(([one], {"a": one}, str(one), [one] * 2))
            case _:
                holder[name] = copy.deepcopy(random.choice(ODD_VALUES))
    return changed.get("")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield value, name
        yield from _places(entry)


def as_json(document: Any) -> str:
    """Return JSON text as a careless program would write it, with NaN and lone surrogates."""
    return json.dumps(document).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def alter_rows(path: Path, random: Random, count: int) -> list[tuple[str, int, str, Any]]:
    """Alter one cell of up to ``count`` rows of a database, as another program could; return what was done."""
    done = []
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA foreign_keys=OFF")
    for _ in range(count):
        table = random.choice(("studies", "runs", "trials", "trials", "trials", "misses", "families"))
        ids = [one for (one,) in connection.execute(f"SELECT id FROM {table}")]
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
        row_id, column = random.choice(ids), random.choice(columns)
        (cell,) = connection.execute(f"SELECT {column} FROM {table} WHERE id = ?", (row_id,)).fetchone()
        value = _odd_cell(cell, random)
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (value, row_id))
        except (sqlite3.IntegrityError, OverflowError, UnicodeEncodeError):
            continue
        done.append((table, row_id, column, value if not isinstance(value, str | bytes) else value[:80]))
    connection.close()
    return done


def _odd_cell(cell: Any, random: Random) -> Any:
    if isinstance(cell, str) and cell[:1] in ("{", "[") and len(cell) < 10_000 and random.random() < 0.7:
        return as_json(altered(json.loads(cell), random))
    value = random.choice((*ODD_VALUES, b"\xff\xfe", b"bytes", "y" * 2_000_000))
    return as_json(value) if isinstance(value, dict | list) else value
