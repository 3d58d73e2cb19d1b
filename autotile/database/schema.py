"""Tables of the tuning database; a test compares them with the migrations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    column,
    table,
    text,
)

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite


def insert_for(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an insert with ``ON CONFLICT``, which SQLite and PostgreSQL share, in the connection's dialect."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def now_text() -> str:
    """Return the current time (UTC) as it is stored: text whose order is that of time in every database."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


METADATA = MetaData()


def _json(name: str, *, nullable: bool = False) -> Column[object]:
    return Column(name, JSON(none_as_null=True), nullable=nullable)


STUDIES = Table(
    "studies",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("kernel", Text, nullable=False),
    Column("template_hash", Text, nullable=False),
    Column("space_hash", Text, nullable=False),
    _json("options"),
    Column("dtype", Text, nullable=False),
    _json("sizes"),
    Column("gpu_name", Text, nullable=False),
    Column("compute_capability", Text, nullable=False),
    Column("sm_count", Integer, nullable=False),
    Column("smem_per_block_optin_bytes", Integer, nullable=False),
    Column("nvrtc_version", Text, nullable=False),
    Column("l2_mode", Text, nullable=False),
    Column("source", Text, nullable=False),
    _json("device", nullable=True),
    Column("created_at", Text, nullable=False),
    Index("studies_by_kernel", "kernel"),
)
"""One row for each `TuningKey`, with the device's properties (null if an imported result does not state them)."""

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("started_at", Text, nullable=False),
    Column("ended_at", Text),
    Column("sampler", Text, nullable=False),
    Column("seed", BigInteger),
    _json("settings"),
    Column("driver", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("autotile_version", Text, nullable=False),
    _json("gates"),
    _json("summary"),
    Index("runs_by_study", "study_id"),
)
"""One row for each run; ``ended_at`` is null during the run, and stays null if it was killed."""

TRIALS = Table(
    "trials",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("run_id", Integer, ForeignKey("runs.id"), nullable=False),
    Column("phase", Text, nullable=False),
    Column("rank", Integer),
    Column("config_key", Text, nullable=False),
    _json("config"),
    Column("outcome", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("reason", Text, nullable=False),
    _json("grid", nullable=True),
    _json("block", nullable=True),
    Column("dynamic_smem_bytes", Integer),
    Column("registers", Integer),
    Column("spill_store_bytes", Integer),
    Column("spill_load_bytes", Integer),
    Column("stack_bytes", Integer),
    Column("static_smem_bytes", Integer),
    Column("blocks_per_sm", Integer),
    Column("warps_per_sm", Integer),
    Column("occupancy", Float(53)),
    _json("limited_by", nullable=True),
    _json("limits", nullable=True),
    Column("time_us", Float(53)),
    Column("low_us", Float(53)),
    Column("high_us", Float(53)),
    _json("samples_us", nullable=True),
    Column("l2", Text),
    Column("cubin_hash", Text, nullable=False),
    _json("telemetry"),
    _json("seconds"),
    Column("source", Text, nullable=False),
    Column("gpu", Text, nullable=False, server_default=""),
    Column("created_at", Text, nullable=False),
    Index("trials_by_time", "study_id", "outcome", "time_us"),
    Index("trials_by_rank", "study_id", "phase", "rank"),
    Index("trials_of_run", "run_id", "id"),
    Index(
        "trials_of_finals",
        "study_id",
        "id",
        sqlite_where=text("phase = 'final'"),
        postgresql_where=text("phase = 'final'"),
    ),
)
"""One row for each trial. ``config`` keeps the order of the parameters; ``config_key`` is canonical, for look-ups."""

CLAIMS = Table(
    "claims",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, nullable=False),
    Column("config_key", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("expires_at", Float(53), nullable=False),
    UniqueConstraint("study_id", "config_key", name="one_claim_a_configuration"),
)
"""One row for each configuration that a session is trying; ``expires_at`` is in seconds since 1970. After that another
session may try it."""

MISSES = Table(
    "misses",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("kernel", Text, nullable=False),
    Column("sizes", Text, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("gpu_name", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("count", Integer, nullable=False),
    Column("last_at", Text, nullable=False),
    UniqueConstraint("kernel", "sizes", "dtype", "gpu_name", "tier", name="one_row_a_miss"),
)
"""Requested problems that could not be served exactly; ``sizes`` is canonical JSON."""

FAMILIES = Table(
    "families",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("kernel", Text, nullable=False),
    Column("dtype", Text, nullable=False),
    _json("key"),
    _json("device"),
    _json("family"),
    _json("progress", nullable=True),
    _json("rule", nullable=True),
    Column("learned_at", Text),
    Index("families_by_kernel", "kernel"),
)
"""One row for each family of problems and device: ``key`` is a `TuningKey` without sizes, ``progress`` is null if no
tuning is unfinished, ``rule`` is null before the first rule is learned."""

MODELS = Table(
    "models",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("operation", Text, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("gpu_name", Text, nullable=False),
    _json("device"),
    _json("model"),
    Column("learned_at", Text, nullable=False),
    UniqueConstraint("operation", "dtype", "gpu_name", name="one_model_a_gpu"),
)
"""One row for each operation, element type and GPU: its newest model of time."""

CEILINGS = Table(
    "ceilings",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("gpu_uuid", Text, nullable=False, unique=True),
    Column("gpu_name", Text, nullable=False),
    Column("compute_capability", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("measured_at", Text, nullable=False),
    _json("ceilings"),
    _json("warnings"),
)
"""One row for each GPU: the newest measurement of its ceilings."""

BEST = table("best", column("study_id"), column("trial_id"))
"""View of the best result of each study; its other columns are for people who open the database by hand."""
