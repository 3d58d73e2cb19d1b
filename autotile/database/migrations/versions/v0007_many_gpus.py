"""The GPU of each trial, and claims of the configurations that sessions are trying."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import columns

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column and create the table."""
    op.add_column("trials", sa.Column("gpu", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "claims",
        sa.Column("id", sa.Integer, primary_key=True),
        *columns(sa.Integer, "study_id"),
        *columns(sa.Text, "config_key", "owner"),
        *columns(sa.Float(53), "expires_at"),
        sa.UniqueConstraint("study_id", "config_key", name="one_claim_a_configuration"),
    )
