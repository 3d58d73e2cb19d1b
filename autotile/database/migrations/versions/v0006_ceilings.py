"""Ceilings of GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "ceilings",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("gpu_uuid", sa.Text, nullable=False, unique=True),
        sa.Column("gpu_name", sa.Text, nullable=False),
        sa.Column("compute_capability", sa.Text, nullable=False),
        sa.Column("driver", sa.Text, nullable=False),
        sa.Column("measured_at", sa.Text, nullable=False),
        sa.Column("ceilings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("warnings", sa.JSON(none_as_null=True), nullable=False),
    )
