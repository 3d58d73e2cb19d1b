"""Problems that dispatch was asked for and had no exact result of, counted, so that they can be tuned later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from autotile.ground.model import Problem, canonical_json
from autotile.store.dialect import insert_for, now_text
from autotile.store.schema import MISSES


@dataclass(frozen=True, slots=True)
class StoredMiss:
    """One problem on one GPU, and what was served in place of an exact result."""

    problem: Problem
    gpu_name: str
    tier: str
    count: int
    last_at: datetime


def count_miss(connection: Connection, problem: Problem, gpu_name: str, tier: str, count: int) -> None:
    """Add to the count of a problem."""
    row = {
        "kernel": problem.kernel,
        "sizes": canonical_json(dict(problem.sizes)),
        "dtype": problem.dtype,
        "gpu_name": gpu_name,
        "tier": tier,
    }
    insert = insert_for(connection, MISSES).values(**row, count=count, last_at=now_text())
    change = {"count": MISSES.c.count + insert.excluded.count, "last_at": insert.excluded.last_at}
    connection.execute(insert.on_conflict_do_update(index_elements=list(row), set_=change))


def read_misses(connection: Connection, kernel: str | None) -> list[StoredMiss]:
    """Misses of one kernel, or of all, most frequent first."""
    query = select(MISSES).order_by(MISSES.c.count.desc(), MISSES.c.id)
    if kernel is not None:
        query = query.where(MISSES.c.kernel == kernel)
    return [
        StoredMiss(
            problem=Problem(row["kernel"], json.loads(row["sizes"]), row["dtype"]),
            gpu_name=row["gpu_name"],
            tier=row["tier"],
            count=row["count"],
            last_at=datetime.fromisoformat(row["last_at"]),
        )
        for row in connection.execute(query).mappings()
    ]
