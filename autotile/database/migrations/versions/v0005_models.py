"""Models of time of operations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "models",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("operation", sa.Text, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("gpu_name", sa.Text, nullable=False),
        sa.Column("device", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("model", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("learned_at", sa.Text, nullable=False),
        sa.UniqueConstraint("operation", "dtype", "gpu_name", name="one_model_a_gpu"),
    )
