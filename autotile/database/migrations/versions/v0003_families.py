"""Families of problems: the state of their tuning, and their rules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import JSON_VALUE, columns

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "families",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        *columns(sa.Text, "kernel", "dtype"),
        *columns(JSON_VALUE, "key", "device", "family"),
        *columns(JSON_VALUE, "progress", "rule", nullable=True),
        *columns(sa.Text, "learned_at", nullable=True),
    )
    op.create_index("families_by_kernel", "families", ["kernel"])
