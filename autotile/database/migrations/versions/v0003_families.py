"""Families of problems: the state of their tuning, and their rules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "families",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("kernel", sa.Text, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("key", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("device", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("family", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("progress", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("rule", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("learned_at", sa.Text),
    )
    op.create_index("families_by_kernel", "families", ["kernel"])
