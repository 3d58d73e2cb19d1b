"""The migrations create the declared tables, and an older database keeps its rows, also while others use it."""

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text, update
from stored_runs import add_trial, begin, change, measured, start_run

from autotile.database import engine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.engine import RUNS
from autotile.database.learned import FamilyState, family_state, save_family_state, save_rule
from autotile.database.migrations.versions.v0002_refused import BEST_VIEW as VIEW_BY_DATE
from autotile.database.winners import SCHEMA_REVISION, VERSION_TABLE, VIEW_DIGESTS, WINNER, view_digest
from autotile.errors import DatabaseError
from autotile.families.family import Extent, Family, FamilyRule, RuleConfig, RulePoint

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

NEWER = '''
"""Add a column."""
import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("studies", sa.Column("note", sa.Text))
'''


def structure_of(opened: Engine) -> dict[str, Any]:
    """Return the columns, keys and indexes of each table, the text of each view, and the revision."""
    found = inspect(opened)
    with opened.connect() as connection:
        columns = {
            table: sorted(tuple(row[1:]) for row in connection.exec_driver_sql(f"PRAGMA table_info({table})"))
            for table in found.get_table_names()
        }
        indexes = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'index'").all()
        revision = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").all()
    keys = {
        table: [
            found.get_pk_constraint(table),
            found.get_foreign_keys(table),
            sorted(found.get_unique_constraints(table), key=str),
        ]
        for table in columns
    }
    views = {view: view_digest(found.get_view_definition(view)) for view in found.get_view_names()}
    opened.dispose()
    return {"columns": columns, "keys": keys, "indexes": {*indexes}, "views": views, "revision": revision}


def test_a_new_database_is_what_the_migrations_leave(database, tmp_path):
    migrated = create_engine(f"sqlite:///{tmp_path}/migrated.db")
    with migrated.begin() as connection:
        engine._migrate(connection)
    assert structure_of(create_engine(f"sqlite:///{database.path}")) == structure_of(migrated)


def test_the_declared_revision_and_views_are_those_of_the_migrations():
    config = Config()
    config.set_main_option("script_location", str(engine._MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert script.get_heads() == [SCHEMA_REVISION]
    steps = [*script.walk_revisions()][::-1]
    assert [int(step.revision) for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    view, digests = "", {}
    for step in steps:
        view = getattr(step.module, "BEST_VIEW", view)
        digests[step.revision] = view_digest(view)
    assert digests == VIEW_DIGESTS


def add_migration(folder: Path, patch: pytest.MonkeyPatch, text: str) -> None:
    """Let a folder of migrations with one more take the place of autotile's."""
    shutil.copytree(engine._MIGRATIONS, folder)
    (folder / "versions" / "v0009_note.py").write_text(text)
    patch.setattr(engine, "_MIGRATIONS", folder)
    patch.setattr(engine, "SCHEMA_REVISION", "0009")
    patch.setitem(engine.VIEW_DIGESTS, "0009", engine.VIEW_DIGESTS["0008"])


@pytest.mark.parametrize("opening", [Database.open, Database.open_readonly])
def test_an_older_database_is_brought_up_to_date_or_stays_as_it_was_if_that_fails(study_db, key, monkeypatch, opening):
    before = structure_of(create_engine(f"sqlite:///{study_db}"))
    with monkeypatch.context() as patch:
        add_migration(study_db.parent / "migrations", patch, NEWER + '    raise RuntimeError("half way")\n')
        with pytest.raises(RuntimeError, match="half way"):
            opening(study_db)
    assert structure_of(create_engine(f"sqlite:///{study_db}")) == before
    add_migration(study_db.parent / "100% migrations", monkeypatch, NEWER)
    opened = opening(study_db)
    with opened:
        assert [study.key for study in opened.studies()] == [key]
        assert check_database(opened).revision == "0009"


def make_older(database: Database, revision: str = "0007") -> None:
    """Give a database the indexes before revision 0008, and the number of a revision."""
    change(
        database,
        *("DROP INDEX trials_of_run", "DROP INDEX trials_of_finals"),
        "CREATE INDEX trials_by_run ON trials (run_id)",
        f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'",
    )


NO_GPU = "ALTER TABLE trials DROP COLUMN gpu"
"""Completes `_downgrade`; from then on the rows cannot be read."""


def _downgrade(database: Database) -> None:
    """Restore the schema of revision 0003, but for columns that rows are read with."""
    change(database, "DROP VIEW best", *(f"DROP TABLE {table}" for table in ("models", "ceilings", "claims")))
    make_older(database, "0003")
    change(database, VIEW_BY_DATE)


@pytest.mark.parametrize(
    ("ends", "served"),
    [
        (("2026-01-01", "2026-01-02"), (2, 2)),
        (("2140-01-01", "2026-01-02"), (1, 2)),  # by a clock that was ahead
        (("2026-01-02", "2026-01-01"), (1, 1)),  # copied from elsewhere
    ],
)
def test_the_order_of_finals_is_upgraded(tmp_path, key, ends, served):
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        study = database.study(key, None)
        for number, end in enumerate(ends, 1):
            run = start_run(database, study, sampler="tpe")
            trial = measured({"BM": number}, 10.0)
            add_trial(database, study, run, trial, phase="final", rank=1)
            change(database, update(RUNS).where(RUNS.c.id == run).values(ended_at=f"{end}T00:00:00.000000+00:00"))
        _downgrade(database)
        assert [best.trial.config["BM"] for best in database.best()] == [served[0]]
        trials = database.trials(study)
        change(database, NO_GPU)
    with Database.open(path) as database:
        assert [best.trial.config["BM"] for best in database.best()] == [served[1]]
        assert database.trials(study)[: len(trials)] == trials
        assert check_database(database).revision == SCHEMA_REVISION
        database.add_run(study, [measured({"BM": 3}, 10.0)], sampler="tpe", phase="final", is_ranked=True)
        assert [best.trial.config["BM"] for best in database.best()] == [3]


def test_the_order_of_rules_is_upgraded(tmp_path, key, device):
    path = tmp_path / "tuning.db"
    families = [Family({"M": Extent(((1, largest),))}) for largest in (10, 20, 30)]
    rules = [
        FamilyRule(family, (RuleConfig({"BM": 64}, 1, None),), (0,), (RulePoint({"M": 1}, (None,), 1.0, 0.0, None),))
        for family in families
    ]
    with Database.open(path) as database:
        for rule, year in zip(rules, (2025, 2140, 2024), strict=True):
            save_family_state(database, key, rule.family, device, FamilyState({}))
            save_rule(database, key, device, rule)
            date = f"'{year}-01-01T00:00:00.000000+00:00'"
            change(database, f"UPDATE families SET learned_at = {date} WHERE id = (SELECT max(id) FROM families)")
        save_family_state(database, key, families[0], device, FamilyState({}, tuned=1))
        _downgrade(database)
        change(database, NO_GPU)
    with Database.open(path) as database:
        assert [stored.rule for stored in database.rules()] == [rules[0], rules[2], rules[1]]
        assert family_state(database, key, families[0]) == FamilyState({}, tuned=1)


def upgrade(location: str, pipe: Connection) -> None:
    """Open a database, and wait for a message half way through its upgrade."""
    drop_index = op.drop_index

    def pause(*given: Any) -> None:
        pipe.send("half way")
        pipe.recv()
        drop_index(*given)

    op.drop_index = pause
    pipe.send("opening")
    with Database.open(location) as database:
        pipe.send(check_database(database).revision)


def start(location: str) -> Connection:
    """Start a process that upgrades a database, and return the end of its pipe."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe()
    forks.Process(target=upgrade, args=(location, theirs), daemon=True).start()
    theirs.close()  # so that the end of the process is seen
    return ours


def test_one_upgrades_another_waits_a_reader_reads_and_a_writer_goes_on(location, key, monkeypatch):
    with Database.open(location) as older:
        study, run = begin(older, key)
        add_trial(older, study, run, measured({"BM": 1}, 10.0))
        make_older(older)
        first = start(location)
        assert [first.recv() for _ in range(2)] == ["opening", "half way"]
        second = start(location)
        assert second.recv() == "opening"
        writing = threading.Thread(target=add_trial, args=(older, study, run, measured({"BM": 2}, 9.0)))
        writing.start()
        assert [best.trial.config for best in older.best(study_id=study)] == [{"BM": 1}]
        assert older.read(WINNER, digest=key.digest)
        writing.join(0.1)
        assert writing.is_alive()
        first.send("go on")
        assert [first.recv(), second.recv()] == [SCHEMA_REVISION] * 2
        writing.join(60)
        assert [best.trial.config for best in older.best(study_id=study)] == [{"BM": 2}]
        monkeypatch.setattr(engine, "SCHEMA_REVISION", "0007")
        for open_database in (Database.open, Database.open_readonly):
            with pytest.raises(DatabaseError, match=r"written by a newer autotile.*pip install --upgrade autotile"):
                open_database(location)


def test_a_long_upgrade_is_not_ended_and_waits_no_longer_for_locks_than_others(server_url, monkeypatch):
    with Database.open(server_url) as database:
        make_older(database)
    found = []

    def migrate(connection: object, run: Callable[..., None] = engine._migrate) -> None:
        run(connection)
        names = ("statement_timeout", "lock_timeout")
        found.extend(connection.execute(text(f"SHOW {name}")).scalar_one() for name in names)

    monkeypatch.setattr(engine, "_migrate", migrate)
    Database.open(server_url).close()
    assert found == ["10min", "30s"]
