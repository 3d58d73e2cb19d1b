"""Served contents of a database: winners, rules, verdicts and misses, their JSON, and the queries that read them.

Each query is stated once, as SQL text and a function of its rows. `autotile.database.database.Database.read` runs them
on every database. `read_file` and `write_file` run them on an SQLite file of the current schema without SQLAlchemy,
whose import takes longer than the rest of a process's first look-up; whatever else they meet they leave to `Database`.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import structs
from msgspec.structs import replace

from autotile.core.device import DeviceProperties
from autotile.core.documents import (
    JsonObject,
    Moment,
    Name,
    NonNegative,
    TimeUs,
    Whole,
    canonical_json,
    convert,
    json_cell,
    to_document,
)
from autotile.core.forks import FORK_LOCK
from autotile.core.model import Config, L2Mode, Measurement, Problem, Resources
from autotile.database.keys import TuningKey
from autotile.database.paths import looks_like_url, network_file_system
from autotile.errors import DataError, InputError
from autotile.settings import expand_path

if TYPE_CHECKING:
    from autotile.families.family import FamilyRule

Value = TypeVar("Value")
Row = Mapping[str, Any]

MEASUREMENT_COLUMNS = ("time_us", "low_us", "high_us", "l2")
RESOURCE_COLUMNS = Resources.__struct_fields__

WINNER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "studies": (*TuningKey.__struct_fields__, "device"),
    "trials": ("config", *RESOURCE_COLUMNS, *MEASUREMENT_COLUMNS, "created_at"),
    "runs": ("driver", "sampler"),
}
"""Columns that `Winner.from_row` reads, by table; no name occurs twice."""

RULE_COLUMNS = ("id", "key", "device", "rule", "learned_at")
"""Columns of the table ``families`` that `StoredRuleDocument` has, and the row's id."""

JSON_COLUMNS = frozenset({"options", "sizes", "device", "config", "key", "rule", "telemetry"})
"""Columns of winners, rules and digests that hold JSON."""

UNVERIFIED_SAMPLER = "sweep"
"""Sampler of the runs in which earlier versions measured a family of an operation. Their configurations were verified
at the measured sizes only, not at ragged ones, so that they are not served; the family measures them again."""

SERVER_TIMEOUT_S = 2.0
"""Timeout of a database server in serving: a program must not wait for it as a tuning session may."""
_BUSY_TIMEOUT_S = 1.0
"""In WAL mode a reader never waits; in the other modes a commit takes milliseconds."""


class Winner(msgspec.Struct, frozen=True):
    """The best configuration of one tuned problem."""

    key: TuningKey
    device: DeviceProperties | None
    """None if an imported result does not state it."""
    config: Config
    resources: Resources | None
    measurement: Measurement | None
    """Time without its samples; None if unknown."""
    tuned_at: Moment
    shipped: bool = False
    """Whether it ships with autotile rather than having been tuned by the user."""

    def to_json(self) -> JsonObject:
        """Return every field as a JSON object."""
        key, device = to_document([self.key, self.device])
        return {"key": key, "device": device, **self.result_to_json(), "shipped": self.shipped}

    def result_to_json(self) -> JsonObject:
        """Return the fields of one result, without key and device, as a JSON object."""
        return {
            **{name: to_document(getattr(self, name)) for name in ("config", "resources", "measurement")},
            "tuned_at": self.tuned_at.isoformat(timespec="seconds"),
        }

    @classmethod
    def from_row(cls, row: Row, device: DeviceProperties | None) -> Winner:
        """Return the winner in a row with the values of `WINNER_COLUMNS`, JSON decoded.

        The study's device is decoded by the caller since many rows share it. A study may outlive the driver that it was
        started with, so the driver of the winner's run takes the place of the device's. It is a `DataError` if a value
        does not match the schema, or the row is of a run of `UNVERIFIED_SAMPLER`.
        """
        if row.get("sampler") == UNVERIFIED_SAMPLER and row["config"]:
            raise DataError("the configuration was not verified at ragged sizes", field="sampler")
        driver = convert(row["driver"], str)
        if device is not None and driver and driver != device.driver:
            device = replace(device, driver=driver)
        parts = {
            "config": row["config"],
            "tuned_at": row["created_at"],
            "resources": part_of(row, RESOURCE_COLUMNS),
            "measurement": part_of(row, MEASUREMENT_COLUMNS),
        }
        return structs.replace(convert({"key": row, "device": None, **parts}, cls), device=device)


def part_of(row: Row, columns: Iterable[str]) -> Row | None:
    """Return a row if one of some columns, whose names are those of the fields, is not null, else None."""
    return row if any(row[name] is not None for name in columns) else None


class MeasurementDocument(msgspec.Struct):
    """JSON of a measurement."""

    time_us: TimeUs
    interval_us: tuple[NonNegative, NonNegative]
    l2: L2Mode


class WinnerDocument(msgspec.Struct):
    """JSON of `Winner.to_json`."""

    key: TuningKey
    device: DeviceProperties | None
    config: Config
    resources: Resources | None
    measurement: MeasurementDocument | None
    tuned_at: Moment
    shipped: bool

    def winner(self) -> Winner:
        """Return the winner."""
        found = self.measurement
        measurement = Measurement(found.time_us, *found.interval_us, l2=found.l2) if found is not None else None
        return Winner(self.key, self.device, self.config, self.resources, measurement, self.tuned_at, self.shipped)


StoredVerdict = tuple[TuningKey, str, bool]
"""Verdict of finals or a verification that is not ranked: key, `config_key`, and whether the configuration passed."""


class StoredRule(msgspec.Struct, frozen=True):
    """The rule of a family with the key and device that it was learned on."""

    key: TuningKey
    """Its ``sizes`` are empty, since the rule states the family's."""
    device: DeviceProperties
    rule: FamilyRule
    learned_at: Moment
    shipped: bool = False
    """Whether it ships with autotile rather than having been learned by the user."""

    def to_json(self) -> JsonObject:
        """Return every field but `shipped` as a JSON object."""
        return {name: to_document(getattr(self, name)) for name in ("key", "device", "rule", "learned_at")}


class StoredRuleDocument(msgspec.Struct):
    """JSON of `StoredRule.to_json`, or columns of a row of the table ``families``."""

    key: TuningKey
    device: DeviceProperties
    rule: Any
    learned_at: Moment

    def stored_rule(self) -> StoredRule:
        """Return the rule; a `DataError` if ``rule`` does not match the schema of rules."""
        from autotile.families.family import FamilyRule  # most kernels have no rule

        try:
            rule = FamilyRule.from_json(self.rule)
        except DataError as error:
            raise DataError(error.fault, field=".".join(filter(None, ["rule", error.field]))) from None
        return StoredRule(self.key, self.device, rule, self.learned_at)


class StoredMiss(msgspec.Struct, frozen=True):
    """Number of calls of one problem on one GPU that a tier served in place of an exact result."""

    problem: Problem
    gpu_name: Name
    tier: Name
    count: Whole
    last_at: Moment


class Query(NamedTuple, Generic[Value]):
    """A statement that reads, with parameters such as ``:kernel``, for SQLite and PostgreSQL."""

    sql: str
    parse: Callable[[Row], Value]
    """Function of a row, whose JSON columns may be text, that raises `DataError` if it does not match its schema."""
    table: str | None = None
    """Table of the column ``id`` by which a row that does not match is named, and then skipped; None if it is not."""


def _names(columns: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{table}.{name}" for table, names in columns.items() for name in names)


def _decoded(row: Row) -> Row:
    """Return a row with the values of its JSON columns; the driver of PostgreSQL has decoded them."""
    return {name: json_cell(v) if name in JSON_COLUMNS and isinstance(v, str | bytes) else v for name, v in row.items()}


def _winner(row: Row) -> Winner:
    device = row["device"]
    if not isinstance(device, str):
        return Winner.from_row(_decoded(row), convert(device, DeviceProperties) if device is not None else None)
    return Winner.from_row(_decoded(row), _device(device))


@lru_cache(maxsize=16)
def _device(cell: str) -> DeviceProperties | None:
    """Parse the device of a study; most studies of a database share one."""
    value = json_cell(cell)
    return convert(value, DeviceProperties) if value is not None else None


_WINNERS = f"""
    SELECT {_names(WINNER_COLUMNS)}
    FROM studies
    JOIN best ON studies.id = best.study_id
    JOIN trials ON trials.id = best.trial_id
    JOIN runs ON runs.id = trials.run_id
"""
WINNERS = Query(
    f"{_WINNERS} WHERE studies.kernel = :kernel AND studies.dtype = :dtype ORDER BY trials.id DESC", _winner
)
"""Winners of the studies of a kernel, newest first: in the order of recording, as dates depend on clocks."""

WINNER = Query(f"{_WINNERS} WHERE studies.digest = :digest", _winner)
"""Winner of the study of a key."""

RULES: Query[StoredRule] = Query(
    f"""
    SELECT {_names({"families": RULE_COLUMNS})}
    FROM families
    WHERE learned_at IS NOT NULL AND (CAST(:kernel AS TEXT) IS NULL OR kernel = :kernel)
    AND (CAST(:dtype AS TEXT) IS NULL OR dtype = :dtype)
    ORDER BY families.id DESC
    """,
    lambda row: convert(_decoded(row), StoredRuleDocument).stored_rule(),
    "families",
)
"""Rules of the families of a kernel, or of all, newest first: in the order of learning."""

CHECKS: Query[StoredVerdict] = Query(
    f"""
    SELECT {_names({"studies": TuningKey.__struct_fields__})}, trials.id, trials.config_key,
           trials.outcome
    FROM studies
    JOIN trials ON studies.id = trials.study_id
    WHERE studies.kernel = :kernel AND studies.dtype = :dtype AND trials.phase = 'final' AND trials.rank IS NULL
    ORDER BY trials.id
    """,
    lambda row: (convert(_decoded(row), TuningKey), str(row["config_key"]), row["outcome"] == "ok"),
    "trials",
)
"""Verdicts of finals and verifications on configurations of a kernel that are not ranked, oldest first."""

MODEL: Query[Any] = Query(
    "SELECT model FROM models WHERE operation = :operation AND dtype = :dtype AND gpu_name = :gpu_name",
    lambda row: json_cell(row["model"]) if isinstance(row["model"], str | bytes) else row["model"],
)
"""JSON of the model of an operation for a GPU."""

DIGESTED: Query[Row] = Query(
    f"""
    SELECT {_names(WINNER_COLUMNS)}, trials.telemetry
    FROM studies
    JOIN trials ON studies.id = trials.study_id
    JOIN runs ON runs.id = trials.run_id
    WHERE studies.digest = :study AND trials.outcome = 'ok'
    AND ((trials.phase = 'final' AND trials.rank IS NOT NULL AND runs.ended_at IS NOT NULL)
         OR trials.config_key = :config)
    ORDER BY trials.id DESC
    """,
    _decoded,
)
"""Finalists of a study, and all trials of one configuration, newest first, with the digests of their outputs."""

CHANGES: Query[tuple[Any, ...]] = Query(
    """
    SELECT studies.kernel AS kernel, studies.dtype AS dtype, 'run' AS kind, count(runs.id) AS number,
           max(runs.id) AS newest, max(runs.ended_at) AS decided_at
    FROM studies JOIN runs ON runs.study_id = studies.id
    WHERE runs.ended_at IS NOT NULL GROUP BY studies.kernel, studies.dtype
    UNION ALL
    SELECT studies.kernel, studies.dtype, 'verdict', CAST(sum(finals.number) AS BIGINT), max(finals.newest),
           max(trials.created_at)
    FROM (SELECT study_id, count(*) AS number, max(id) AS newest FROM trials WHERE phase = 'final' GROUP BY study_id)
         AS finals
    JOIN studies ON studies.id = finals.study_id
    JOIN trials ON trials.id = finals.newest
    GROUP BY studies.kernel, studies.dtype
    UNION ALL
    SELECT kernel, dtype, 'rule', count(id), max(id), max(learned_at)
    FROM families WHERE learned_at IS NOT NULL GROUP BY kernel, dtype
    UNION ALL
    SELECT operation, dtype, 'model', count(id), max(id), max(learned_at) FROM models GROUP BY operation, dtype
    """,
    lambda row: tuple(row.values()),
)
"""Decisions for each kernel and dtype: ended runs, verdicts, rules and models, each with their number and the
newest. Trials of a search that still runs are left out: they would change what is served with every improvement."""

Changes = frozenset[tuple[Any, ...]]
"""Rows of `CHANGES`; kernel and dtype are their first two columns."""

ADD_MISSES = """
    INSERT INTO misses (kernel, sizes, dtype, gpu_name, tier, count, last_at)
    VALUES (:kernel, :sizes, :dtype, :gpu_name, :tier, :count, :last_at)
    ON CONFLICT (kernel, sizes, dtype, gpu_name, tier)
    DO UPDATE SET count = misses.count + excluded.count, last_at = excluded.last_at
"""


def miss_row(problem: Problem, gpu_name: str, tier: str, calls: int = 1) -> Row:
    """Return the parameters of `ADD_MISSES`: calls of a problem that a fallback of a tier has served."""
    return {
        "kernel": problem.kernel,
        "sizes": canonical_json(dict(problem.sizes)),
        "dtype": problem.dtype,
        "gpu_name": gpu_name,
        "tier": tier,
        "count": calls,
        "last_at": datetime.now(UTC).isoformat(timespec="microseconds"),
    }


STORED_MISSES: Query[StoredMiss] = Query(
    """
    SELECT id, kernel, sizes, dtype, gpu_name, tier, count, last_at
    FROM misses
    WHERE CAST(:kernel AS TEXT) IS NULL OR kernel = :kernel
    ORDER BY count DESC, id
    """,
    lambda row: convert({**row, "problem": {**row, "sizes": json_cell(row["sizes"])}}, StoredMiss),
    "misses",
)
"""Misses of one kernel, or of all, most frequent first."""


def file_signature(location: str) -> tuple[tuple[int, int, int], ...] | None:
    """Return i-node, size and time of an SQLite file and of its log, which change when it is written to.

    They are zeros for a file that is missing or empty, as reading alone creates an empty log. None for a database on a
    server, which has no file.
    """
    if looks_like_url(location):
        return None
    states = [(0, 0, 0)] * 2
    with suppress(InputError):
        file = os.path.realpath(expand_path(location, "a database"))  # beside which SQLite's log is
        for number, name in enumerate((file, f"{file}-wal")):
            with suppress(OSError):
                if (state := os.stat(name)).st_size:  # noqa: PTH116
                    states[number] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return tuple(states)


def read_file(location: str, query: Query[Value], **parameters: str) -> list[Value] | None:
    """Run a query on an SQLite file; return an empty list if there is none.

    None if the database is not a readable SQLite file of the current schema, or a row does not match its schema.
    """
    if looks_like_url(location):
        return None
    try:
        path = expand_path(location, "a database")
    except InputError:
        return None
    if not path.exists():
        return []
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with FORK_LOCK, closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as connection:
            if not _is_current(connection):
                return None
            connection.row_factory = sqlite3.Row
            rows = connection.execute(query.sql, parameters).fetchall()
        return [query.parse(dict(row)) for row in rows]
    except (sqlite3.Error, DataError):
        return None


def write_file(path: Path, statement: str, rows: Sequence[Row], *, timeout_s: float) -> bool:
    """Run a statement on an SQLite file for each of some rows, in one transaction; return whether it was committed.

    The file is neither created nor migrated, and its journal mode stays as it is. Nothing is written if its schema is
    not the current one, or if it cannot be written within ``timeout_s`` because another process is writing.
    """
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        with FORK_LOCK, closing(sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)) as connection:
            (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
            if journal == "wal":
                if network_file_system(path):  # where several hosts would damage it
                    return False
                connection.execute("PRAGMA synchronous=NORMAL")  # as in Database
            connection.execute("BEGIN IMMEDIATE")
            if not _is_current(connection):
                return False
            connection.executemany(statement, rows)
            connection.execute("COMMIT")
    except sqlite3.Error:
        return False
    return True


def _is_current(connection: sqlite3.Connection) -> bool:
    """Return True if a file has the current schema, and no view or trigger that autotile did not create."""
    if foreign_object(connection.execute, SCHEMA_REVISION):
        return False
    return connection.execute(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2").fetchall() == [(SCHEMA_REVISION,)]


SCHEMA_REVISION = "0008"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be recognized."""

VERSION_TABLE = "autotile_schema"
"""Table of Alembic's revision; with Alembic's default name, another program's database could pass for ours."""

VIEW = "best"

VIEW_DIGESTS: Mapping[str, str] = {
    "0001": "ec16a4c3503805458126ce71ab2d1bed56aaf05263e81b35ee087dcacd5699c0",
    "0002": "28518ae42dedd64b506ea0dc6365ffc82573b666f781d43ffb3f49b14ee536be",
    "0003": "28518ae42dedd64b506ea0dc6365ffc82573b666f781d43ffb3f49b14ee536be",
    **dict.fromkeys(
        ("0004", "0005", "0006", "0007", "0008"), "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92"
    ),
}
"""SHA-256 of the text of the view, with single spaces, after each migration; a test compares them."""

Execute = Callable[[str], Iterable[Sequence[Any]]]
"""Function that runs a statement and returns its rows."""


def foreign_object(execute: Execute, revision: str | None) -> str:
    """Return the first view or trigger of a file that autotile did not create; empty if there is none.

    ``revision`` is the one whose view the file must have; None for any, before the revision is read.
    """
    views = []
    for kind, name, text in execute("SELECT type, name, sql FROM sqlite_master WHERE type IN ('view', 'trigger')"):
        if kind == "trigger" or name != VIEW:
            return f"it has a {kind} {name!r:.80} that autotile did not create"
        views.append(text)
    if not views and revision is not None:
        return f"it lacks the view {VIEW!r}"
    known = VIEW_DIGESTS.values() if revision is None else (VIEW_DIGESTS[revision],)
    return "" if all(view_digest(text) in known for text in views) else f"its view {VIEW!r} was changed"


def view_digest(text: str) -> str:
    """Return the SHA-256 of a view's text with single spaces."""
    return hashlib.sha256(" ".join(str(text).split()).encode("utf-8", "replace")).hexdigest()
