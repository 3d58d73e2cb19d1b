"""The GPU of each trial, and claims of the configurations that sessions are trying."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column and create the table."""
    op.add_column("trials", sa.Column("gpu", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "claims",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, nullable=False),
        sa.Column("config_key", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.UniqueConstraint("study_id", "config_key", name="one_claim_a_configuration"),
    )
