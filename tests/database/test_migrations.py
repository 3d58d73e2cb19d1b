"""The migrations create the declared tables, and an older database keeps its rows."""

import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from autotile.database import schema, upgrade
from autotile.database.database import Database
from autotile.database.fast_access import SCHEMA_REVISION, VERSION_TABLE
from autotile.database.keys import TuningKey

NEWER = '''
"""Add a column."""
import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("studies", sa.Column("note", sa.Text))
'''


def test_the_migrations_make_the_declared_tables(database: Database, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/tuning.db")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, schema.METADATA) == []
    engine.dispose()


def test_the_declared_revision_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(upgrade._MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert script.get_heads() == [SCHEMA_REVISION]
    assert [step.revision for step in script.walk_revisions()] == ["0003", "0002", "0001"]


@pytest.mark.parametrize("readonly", [False, True])
def test_an_older_database_is_brought_up_to_date(
    tmp_path: Path, key: TuningKey, monkeypatch: pytest.MonkeyPatch, readonly: bool
) -> None:
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        database.study(key, None)
    folder = tmp_path / "100% migrations"
    shutil.copytree(upgrade._MIGRATIONS, folder)
    (folder / "versions" / "v0004_note.py").write_text(NEWER)
    monkeypatch.setattr(upgrade, "_MIGRATIONS", folder)
    monkeypatch.setattr(upgrade, "SCHEMA_REVISION", "0004")
    opened = Database.open_readonly(path) if readonly else Database.open(path)
    assert opened is not None
    with opened:
        assert [study.key for study in opened.studies()] == [key]
        assert opened.check().revision == "0004"


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    tmp_path: Path, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        database.study(key, None)
    folder = tmp_path / "migrations"
    shutil.copytree(upgrade._MIGRATIONS, folder)
    (folder / "versions" / "v0004_note.py").write_text(NEWER + '    raise RuntimeError("half way")\n')
    with monkeypatch.context() as patch:
        patch.setattr(upgrade, "_MIGRATIONS", folder)
        patch.setattr(upgrade, "SCHEMA_REVISION", "0004")
        with pytest.raises(RuntimeError, match="half way"):
            Database.open(path)
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        columns = connection.execute(text("SELECT name FROM pragma_table_info('studies')")).scalars().all()
    engine.dispose()
    assert "note" not in columns
    with Database.open(path) as database:
        assert database.find_study(key) == 1
