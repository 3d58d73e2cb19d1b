"""Exclude configurations that later finals refused from the view of the best results."""

from __future__ import annotations

from alembic import op

from autotile.database.migrations import best_view

revision = "0002"
down_revision = "0001"

BEST_VIEW = best_view("runs.ended_at DESC, finals.id DESC")


def upgrade() -> None:
    """Replace the view."""
    op.execute("DROP VIEW best")
    op.execute(BEST_VIEW)
