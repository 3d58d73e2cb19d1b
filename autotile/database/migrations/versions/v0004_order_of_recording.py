"""Order finals and rules as they were recorded rather than by date.

Dates depend on the clocks of the machines, and a clock that ran ahead made its winner the best forever. What was
served before the upgrade stays so, unless its date has yet to come.
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import BEST_VIEW

revision = "0004"
down_revision = "0003"

_FAMILIES = sa.table(
    "families",
    sa.column("id", sa.Integer),
    *(sa.column(name, sa.Text) for name in ("digest", "kernel", "dtype", "learned_at")),
    *(sa.column(name, sa.JSON(none_as_null=True)) for name in ("key", "device", "family", "progress", "rule")),
)


def upgrade() -> None:
    """Replace the view, and give trials and families new ids where the order of the ids is not the one by date."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    served = _best()
    op.execute("DROP VIEW best")
    op.execute(BEST_VIEW)
    _keep_served(served, now)
    _renumber_families(now)


def _best() -> dict[int, int]:
    return {row.study_id: row.trial_id for row in op.get_bind().execute(sa.text("SELECT study_id, trial_id FROM best"))}


def _keep_served(served: dict[int, int], now: str) -> None:
    """Record winners once more that have lower ids than finals of earlier dates, which were copied from elsewhere."""
    connection = op.get_bind()
    names = [column["name"] for column in sa.inspect(connection).get_columns("trials") if column["name"] != "id"]
    columns = ", ".join(f"trials.{name}" for name in names)
    copy = sa.text(
        f"INSERT INTO trials ({', '.join(names)}) SELECT {columns} FROM trials JOIN runs ON runs.id = trials.run_id "
        "WHERE trials.id = :id AND runs.ended_at <= :now"
    )
    for study, trial in _best().items():
        if served[study] != trial:
            connection.execute(copy, {"id": served[study], "now": now})


def _renumber_families(now: str) -> None:
    connection = op.get_bind()
    rows = connection.execute(sa.select(_FAMILIES).order_by(_FAMILIES.c.id)).mappings().all()
    dates = [row["learned_at"] or "" for row in rows]
    order = sorted(range(len(rows)), key=lambda number: "" if dates[number] > now else dates[number])
    if order == list(range(len(rows))):
        return
    connection.execute(_FAMILIES.delete())
    for number in order:
        row = {name: value for name, value in rows[number].items() if name != "id"}
        connection.execute(_FAMILIES.insert(), row)
