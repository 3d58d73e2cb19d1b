"""Ceilings of GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import JSON_VALUE, columns

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "ceilings",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("gpu_uuid", sa.Text, nullable=False, unique=True),
        *columns(sa.Text, "gpu_name", "compute_capability", "driver", "measured_at"),
        *columns(JSON_VALUE, "ceilings", "warnings"),
    )
