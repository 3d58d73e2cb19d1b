"""Studies, runs, trials and misses, and the view of the best result of each study."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

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
    _studies()
    _runs()
    _trials()
    _misses()
    op.execute(BEST_VIEW)


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer) for name in names]


def _floats(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Float(53)) for name in names]


def _json(*names: str, nullable: bool = False) -> list[sa.Column[object]]:
    return [sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable) for name in names]


def _studies() -> None:
    op.create_table(
        "studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        *_text("kernel", "template_hash", "space_hash"),
        *_json("options"),
        *_text("dtype"),
        *_json("sizes"),
        *_text("gpu_name", "compute_capability"),
        sa.Column("sm_count", sa.Integer, nullable=False),
        sa.Column("smem_per_block_optin_bytes", sa.Integer, nullable=False),
        *_text("nvrtc_version", "l2_mode", "source"),
        *_json("device", nullable=True),
        *_text("created_at"),
    )
    op.create_index("studies_by_kernel", "studies", ["kernel"])


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        *_text("started_at"),
        sa.Column("ended_at", sa.Text),
        *_text("sampler"),
        sa.Column("seed", sa.BigInteger),
        *_json("settings"),
        *_text("driver", "host", "autotile_version"),
        *_json("gates", "summary"),
    )
    op.create_index("runs_by_study", "runs", ["study_id"])


def _trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id"), nullable=False),
        *_text("phase"),
        *_integers("rank"),
        *_text("config_key"),
        *_json("config"),
        *_text("outcome", "stage", "reason"),
        *_json("grid", "block", nullable=True),
        *_integers("dynamic_smem_bytes"),
        *_integers("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes"),
        *_integers("blocks_per_sm", "warps_per_sm"),
        *_floats("occupancy"),
        *_json("limited_by", "limits", nullable=True),
        *_floats("time_us", "low_us", "high_us"),
        *_json("samples_us", nullable=True),
        sa.Column("l2", sa.Text),
        *_text("cubin_hash"),
        *_json("telemetry", "seconds"),
        *_text("source", "created_at"),
    )
    op.create_index("trials_by_time", "trials", ["study_id", "outcome", "time_us"])
    op.create_index("trials_by_rank", "trials", ["study_id", "phase", "rank"])
    op.create_index("trials_by_run", "trials", ["run_id"])


def _misses() -> None:
    op.create_table(
        "misses",
        sa.Column("id", sa.Integer, primary_key=True),
        *_text("kernel", "sizes", "dtype", "gpu_name", "tier"),
        sa.Column("count", sa.Integer, nullable=False),
        *_text("last_at"),
        sa.UniqueConstraint("kernel", "sizes", "dtype", "gpu_name", "tier", name="one_row_a_miss"),
    )
