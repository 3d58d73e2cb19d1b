"""Studies, runs, trials and misses, and the view of the best result of each study."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autotile.database.migrations import JSON_VALUE, columns

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BEST_VIEW = """
CREATE VIEW best AS
SELECT studies.id AS study_id, trials.id AS trial_id, studies.kernel, studies.sizes, studies.dtype, studies.gpu_name,
       studies.l2_mode, studies.source, trials.config, trials.time_us, trials.low_us, trials.high_us, trials.phase,
       trials.run_id, trials.created_at
FROM studies
JOIN trials ON trials.id = COALESCE(
    (SELECT finals.id
     FROM trials AS finals
     JOIN runs ON runs.id = finals.run_id
     WHERE finals.study_id = studies.id AND finals.phase = 'final' AND finals.rank = 1
       AND finals.outcome = 'ok' AND runs.ended_at IS NOT NULL
     ORDER BY runs.ended_at DESC, finals.id DESC
     LIMIT 1),
    (SELECT tried.id
     FROM trials AS tried
     WHERE tried.study_id = studies.id AND tried.outcome = 'ok' AND tried.time_us IS NOT NULL
     ORDER BY tried.time_us, tried.id
     LIMIT 1))
"""


def upgrade() -> None:
    """Create the tables and the view."""
    op.create_table(
        "studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        *columns(sa.Text, "kernel", "template_hash", "space_hash"),
        *columns(JSON_VALUE, "options"),
        *columns(sa.Text, "dtype"),
        *columns(JSON_VALUE, "sizes"),
        *columns(sa.Text, "gpu_name", "compute_capability"),
        *columns(sa.Integer, "sm_count", "smem_per_block_optin_bytes"),
        *columns(sa.Text, "nvrtc_version", "l2_mode", "source"),
        *columns(JSON_VALUE, "device", nullable=True),
        *columns(sa.Text, "created_at"),
    )
    op.create_index("studies_by_kernel", "studies", ["kernel"])
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        *columns(sa.Text, "started_at"),
        *columns(sa.Text, "ended_at", nullable=True),
        *columns(sa.Text, "sampler"),
        *columns(sa.BigInteger, "seed", nullable=True),
        *columns(JSON_VALUE, "settings"),
        *columns(sa.Text, "driver", "host", "autotile_version"),
        *columns(JSON_VALUE, "gates", "summary"),
    )
    op.create_index("runs_by_study", "runs", ["study_id"])
    resources = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes")
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id"), nullable=False),
        *columns(sa.Text, "phase"),
        *columns(sa.Integer, "rank", nullable=True),
        *columns(sa.Text, "config_key"),
        *columns(JSON_VALUE, "config"),
        *columns(sa.Text, "outcome", "stage", "reason"),
        *columns(JSON_VALUE, "grid", "block", nullable=True),
        *columns(sa.Integer, "dynamic_smem_bytes", *resources, "blocks_per_sm", "warps_per_sm", nullable=True),
        *columns(sa.Float(53), "occupancy", nullable=True),
        *columns(JSON_VALUE, "limited_by", "limits", nullable=True),
        *columns(sa.Float(53), "time_us", "low_us", "high_us", nullable=True),
        *columns(JSON_VALUE, "samples_us", nullable=True),
        *columns(sa.Text, "l2", nullable=True),
        *columns(sa.Text, "cubin_hash"),
        *columns(JSON_VALUE, "telemetry", "seconds"),
        *columns(sa.Text, "source", "created_at"),
    )
    op.create_index("trials_by_time", "trials", ["study_id", "outcome", "time_us"])
    op.create_index("trials_by_rank", "trials", ["study_id", "phase", "rank"])
    op.create_index("trials_by_run", "trials", ["run_id"])
    op.create_table(
        "misses",
        sa.Column("id", sa.Integer, primary_key=True),
        *columns(sa.Text, "kernel", "sizes", "dtype", "gpu_name", "tier"),
        *columns(sa.Integer, "count"),
        *columns(sa.Text, "last_at"),
        sa.UniqueConstraint("kernel", "sizes", "dtype", "gpu_name", "tier", name="one_row_a_miss"),
    )
    op.execute(BEST_VIEW)
