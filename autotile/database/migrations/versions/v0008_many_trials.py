"""Indexes with which a list of studies, and a look for new results, need not read every trial."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create two indexes, then drop the one that the first of them extends: dropping it keeps readers out."""
    finals = sa.text("phase = 'final'")
    op.create_index("trials_of_run", "trials", ["run_id", "id"])
    op.create_index("trials_of_finals", "trials", ["study_id", "id"], sqlite_where=finals, postgresql_where=finals)
    op.drop_index("trials_by_run", "trials")
