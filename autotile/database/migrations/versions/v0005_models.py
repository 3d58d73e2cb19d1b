"""Models of time of operations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import JSON_VALUE, columns

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "models",
        sa.Column("id", sa.Integer, primary_key=True),
        *columns(sa.Text, "operation", "dtype", "gpu_name"),
        *columns(JSON_VALUE, "device", "model"),
        *columns(sa.Text, "learned_at"),
        sa.UniqueConstraint("operation", "dtype", "gpu_name", name="one_model_a_gpu"),
    )
