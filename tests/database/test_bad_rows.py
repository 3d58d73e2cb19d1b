"""Altered rows are skipped, named once, listed and moved aside; foreign views, triggers and revisions are refused."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import sqlite3
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import alter_rows, altered
from sqlalchemy import select
from stored_rows import KERNEL, SIZES, make_database, sweep

import autotile
from autotile.database.care import _PARSERS
from autotile.database.database import Database, rows_of
from autotile.database.engine import METADATA
from autotile.database.migrations import versions
from autotile.database.winners import VIEW_DIGESTS, WINNERS, read_file, view_digest
from autotile.errors import DatabaseError, DataError, DataWarning


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("stored") / "template.db")


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    shutil.copy(template, tmp_path / "template.db")
    return Path(shutil.copy(template, tmp_path / "case.db"))


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA foreign_keys=OFF", *statements):
        connection.execute(statement)
    connection.close()


def content(path: Path) -> list[list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    connection.text_factory = bytes
    found = [connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall() for table in _PARSERS]
    connection.close()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_everything_goes_on_without_altered_rows(path: Path, seed: int) -> None:
    assert len(alter_rows(path, Random(seed), 15)) > 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        assert [(name, repr(error)) for name, error in sweep(path, path.parent)] == []


@pytest.mark.parametrize("table", _PARSERS)
def test_an_altered_row_is_parsed_or_bad(template: Path, table: str) -> None:
    with Database.open(template) as database, database.reading() as connection:
        rows = list(rows_of(connection, select(METADATA.tables[table])))

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def parse(seed: int) -> None:
        random = Random(seed)
        for _ in range(8):
            row = dict(random.choice(rows))
            column = random.choice([name for name in row if name != "id"])
            row[column] = altered({"cell": row[column]}, random)
            if isinstance(row[column], dict) and random.random() < 0.9:
                row[column] = row[column].get("cell")
            with suppress(DataError):  # a `BadRowError`, or the fault of a row that its reader names
                _PARSERS[table](row)

    for row in rows:
        _PARSERS[table](row)
    parse()


def test_a_bad_row_is_named_once(path: Path) -> None:
    change(path, "UPDATE trials SET time_us = -1 WHERE id = 3", "UPDATE studies SET sizes = '[' WHERE id = 2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [study.study_id for study in autotile.list(database=path).studies] == [1, 3]
        autotile.list(database=path)
        trials = autotile.trials(KERNEL, database=path).trials
    texts = [str(one.message) for one in caught if one.category is DataWarning]
    assert 3 not in [entry.stored.trial_id for entry in trials]
    assert sum("studies 2: sizes: expected object" in text for text in texts) == 1
    assert sum("trials 3: time_us: expected float >= 1e-06" in text for text in texts) == 1


@pytest.mark.parametrize(
    ("statement", "is_exact"),
    [
        ("UPDATE trials SET low_us = 'soon' WHERE phase = 'final' AND rank = 1", True),  # others of the study are left
        ("UPDATE trials SET config = '{\"BM\": {}}' WHERE phase = 'final'", True),
        ("UPDATE trials SET created_at = x'ff'", False),
        ("UPDATE runs SET driver = x'ff'", False),
        ("UPDATE studies SET device = '[1]'", False),
    ],
)
def test_a_kernel_is_served_whatever_a_row_holds(path: Path, statement: str, is_exact: bool) -> None:
    change(path, statement)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        kernel = autotile.get_best_kernel(KERNEL, **SIZES, device="h200", database=path)
        with Database.open(path) as database:
            best = database.best(KERNEL, sizes=SIZES)
    assert (kernel.tier == "exact") == bool(best) == is_exact


def test_bad_rows_are_listed_and_left_as_they_are(path: Path) -> None:
    change(
        path,
        "UPDATE runs SET driver = CAST(x'fffe' AS TEXT) WHERE id = 2",
        "UPDATE trials SET time_us = 9e999, reason = x'00ff' WHERE id = 1",
        "UPDATE misses SET sizes = 'null' WHERE id = 1",
    )
    before = content(path)
    found = autotile.db_check(path)
    assert found.check is not None
    assert not found.whole
    assert [(row.table, row.row_id, row.field) for row in found.check.bad_rows] == [
        ("runs", 2, "driver"),
        ("trials", 1, "reason"),
        ("misses", 1, "sizes"),
    ]
    assert content(path) == before


VIEW = "SELECT 1 AS study_id, 1 AS trial_id"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["CREATE TRIGGER t AFTER INSERT ON misses BEGIN DELETE FROM trials; END"], "it has a trigger 't'"),
        (["CREATE VIEW spy AS SELECT * FROM trials"], "it has a view 'spy'"),
        (['CREATE VIEW "a\nb" AS SELECT 1'], r"it has a view 'a\\nb'"),
        (["DROP VIEW best", f"CREATE VIEW best AS {VIEW}"], "its view 'best' was changed"),
        (["DROP VIEW best"], "it lacks the view 'best'"),
        (["DROP TABLE misses"], "it lacks the table 'misses'"),
        (["ALTER TABLE runs ADD COLUMN mood TEXT"], "its table 'runs' has other columns than autotile's: 'mood'"),
        (["ALTER TABLE runs RENAME COLUMN host TO hosts"], "its table 'runs' has other columns"),
        (["DELETE FROM autotile_schema"], "autotile_schema has 0 rows, expected one"),
        (["INSERT INTO autotile_schema VALUES ('0001')"], "autotile_schema has 2 rows, expected one"),
        (["UPDATE autotile_schema SET version_num = 'head'"], "the revision 'head', expected one such as"),
        (["UPDATE autotile_schema SET version_num = x'30'"], "the revision b'0'"),
        (["UPDATE autotile_schema SET version_num = '0000'"], "the revision '0000', which no version"),
        (["UPDATE autotile_schema SET version_num = '9999'"], "was written by a newer autotile"),
        (["UPDATE autotile_schema SET version_num = '0001'"], "its view 'best' was changed"),
    ],
)
def test_a_changed_structure_is_refused(path: Path, statements: list[str], message: str) -> None:
    change(path, *statements)
    before = path.read_bytes()
    assert read_file(str(path), WINNERS, kernel=KERNEL, dtype="float32") in (None, []) or message.startswith(
        ("it lacks the t", "its t")
    )
    for open_database in (Database.open_readonly, Database.open):
        with pytest.raises(DatabaseError, match=message) as caught:
            open_database(path)
        assert "another database" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert autotile.get_best_kernel(KERNEL, **SIZES, device="h200", database=path).config


def test_the_views_are_those_of_the_migrations() -> None:
    text, digests = "", {}
    names = [module.name for module in pkgutil.iter_modules(versions.__path__)]
    for name in sorted(names):
        module = importlib.import_module(f"{versions.__name__}.{name}")
        text = getattr(module, "BEST_VIEW", text)
        digests[module.revision] = view_digest(text)
    assert digests == VIEW_DIGESTS
