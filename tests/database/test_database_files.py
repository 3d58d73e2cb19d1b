"""Files at the path of a database: missing, foreign, damaged, altered, locked, shared, written by killed processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import alter_rows, altered
from sqlalchemy import select
from stored_rows import KERNEL, SIZES, make_database, sweep
from stored_runs import KEY, add_trial, add_trials, begin, change_file, measured, start_run

import autotile
from autotile.core.model import Problem
from autotile.database import winners
from autotile.database.care import _PARSERS, check_database
from autotile.database.database import Database, open_existing, rows_of
from autotile.database.engine import METADATA, _FileConnection
from autotile.database.keys import TuningKey
from autotile.database.learned import read_ceilings
from autotile.database.paths import atomic_write, network_file_system
from autotile.database.winners import ADD_MISSES, SCHEMA_REVISION, WINNERS, miss_row, read_file, write_file
from autotile.errors import DatabaseError, DataError, DataWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_reading_makes_nothing_and_opening_makes_a_folder_or_a_database_of_an_empty_file(tmp_path):
    path = tmp_path / "tuning.db"
    for location in (path, tmp_path / "nowhere" / "tuning.db"):
        assert Database.open_readonly(location) is None
    assert not [*tmp_path.iterdir()]
    path.touch()
    assert Database.open_readonly(path) is None
    assert [*tmp_path.iterdir()] == [path]
    with Database.open(path) as database:
        assert check_database(database).ok
    with Database.open(tmp_path / "a" / "b" / "tuning.db") as database:
        assert database.notices == ()
        assert database.studies() == []
    with Database.open(f"sqlite:///{tmp_path}/a/b/tuning.db") as again:
        assert check_database(again).ok


def is_left_to_the_engine(path: Path) -> bool:
    """Return whether the readers and writers of files without the engine give a file up."""
    miss = miss_row(Problem(KERNEL, SIZES, "float32"), "H200", "nearest", 1)
    found = read_file(str(path), WINNERS, kernel=KERNEL, dtype="float32")
    return found is None and not write_file(path, ADD_MISSES, [miss], timeout_s=0.05)


@pytest.mark.parametrize("opening", [Database.open, Database.open_readonly])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path, opening):
    text, other = tmp_path / "space.toml", tmp_path / "places.db"
    text.write_text("[kernel]\nname = 'sgemm'\n")
    change_file(other, "CREATE TABLE moz_places (id INTEGER)")
    before = text.read_bytes(), other.read_bytes()
    for path, message in (
        (text, r"space\.toml is not a database.*name another"),
        *((folder, "is a folder; expected the path of a database file") for folder in (tmp_path, Path("/"))),
        (other, "belongs to another program .*'moz_places'"),
    ):
        with pytest.raises(DatabaseError, match=message):
            opening(path)
        assert is_left_to_the_engine(path)
    assert (text.read_bytes(), other.read_bytes()) == before
    assert {*tmp_path.iterdir()} == {text, other}


def test_a_place_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "tuning.db", "/proc/tuning/autotile.db"):
        with pytest.raises(DatabaseError, match="cannot create the folder"):
            Database.open(path)
    (tmp_path / "tuning.db").touch()
    (log := tmp_path / "tuning.db-shm").touch()  # which a reader of a read-only file leaves, as read-only
    for closed in (tmp_path, *tmp_path.glob("tuning.db*")):  # as root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: mode != os.W_OK or path != closed)
        with pytest.raises(DatabaseError, match=rf"cannot write {re.escape(str(closed))}: change its permissions"):
            Database.open(tmp_path / "tuning.db")
    # the last connection of another process may end, and its log with it, during the check
    monkeypatch.setattr(os, "access", lambda path, mode: path != log or path.unlink())
    Database.open(tmp_path / "tuning.db").close()


def test_a_database_on_a_read_only_medium_can_be_read(study_db, key, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with open_existing(study_db) as reader:
        assert reader.find_study(key) == 1
        assert [*study_db.parent.iterdir()] == [study_db]


def test_the_log_of_a_database_behind_a_link_is_read_and_watched(study_db, key, tmp_path, monkeypatch):
    (folder := tmp_path / "links").mkdir()
    (link := folder / "team.db").symlink_to(study_db)
    before = winners.file_signature(str(link))
    with Database.open(study_db) as writer:  # while it is open, what it writes is in the log
        add_trials(writer, *begin(writer, key), [measured({"BM": 7}, 5.0)])
        assert winners.file_signature(str(link)) == winners.file_signature(str(study_db)) != before
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path != folder)
        with open_existing(link) as reader:
            assert {"BM": 7} in [trial.config for trial in reader.trials(1)]


def _damaged(path: Path, key: TuningKey, where: str) -> bytes:
    """Make a database, damage its start, middle or schema or cut it in half, and return what the file holds then."""
    with Database.open(path) as database:
        study, run = begin(database, key)
        add_trials(database, study, run, [measured({"BM": number}, 1.0 + number) for number in range(300)])
    data = bytearray(path.read_bytes())
    if where == "start":
        data[100:4096] = b"\xff" * 3996
    elif where == "middle":
        middle = len(data) // 2 // 4096 * 4096
        data[middle : middle + 8192] = b"\xa5" * 8192
    elif where == "schema":  # which SQLite quotes in its message
        data = data.replace(b"CREATE TABLE studies", b"CREAT\xb0 TABLE studies")
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("damage", ["start", "middle", "schema", "cut"])
def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(tmp_path, key, damage):
    path = tmp_path / "tuning.db"
    data = _damaged(path, key, damage)
    if damage == "start":
        assert is_left_to_the_engine(path)
    if damage == "middle":  # it is found while reading
        with open_existing(path) as reader:
            with pytest.raises(DatabaseError, match="damaged; `autotile db check` says where"):
                reader.trials(1)
            assert not check_database(reader).ok
        assert path.read_bytes() == data
    with Database.open(path) as database:
        assert database.studies() == []
        (notice,) = database.notices
    (kept,) = tmp_path.glob("tuning.db.corrupt-*")
    assert str(kept) in notice
    assert kept.read_bytes() == data
    with Database.open(path) as again:
        assert again.notices == ()


def test_network_file_systems_are_told_from_local_ones(tmp_path, monkeypatch):
    places = (f"server:/home {tmp_path} nfs4", f"map {tmp_path}/scratch nfs", f"/dev/b {tmp_path}/scratch ext4")
    mounts = "".join(f"{place} rw 0 0\n" for place in ("/dev/a / ext4", *places))
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    assert network_file_system(tmp_path / "tuning.db") == "nfs4"
    assert network_file_system(tmp_path / "scratch" / "tuning.db") == ""
    assert network_file_system(Path("/tuning.db")) == ""


VISIT = """
import sys, autotile.database.keys
assert "sqlalchemy" not in sys.modules
from autotile.database.database import Database
Database.open(sys.argv[1]).close()
Database.open_readonly(sys.argv[1]).close()
assert not {"alembic", "sqlalchemy.dialects.postgresql"} & {*sys.modules}
"""


def test_opening_it_again_loses_nothing_and_needs_no_alembic(tmp_path, key):
    """Closing the file outside of SQLite would drop this process's locks, and others would delete its log."""
    path = tmp_path / "tuning.db"
    with Database.open(path) as first:
        study = first.study(key, None)
        for opening in (Database.open, Database.open_readonly):
            again = opening(path)
            again.close()
        subprocess.run([sys.executable, "-c", VISIT, str(path)], check=True)
        start_run(first, study, sampler="kept")
    with Database.open(path) as last:
        assert len(last.runs(study)) == 1


def test_a_file_is_replaced_whole_or_not_at_all_and_what_is_no_file_or_a_database_never(tmp_path, study_db):
    before = study_db.read_bytes()  # naming it as an output by mistake would lose all measurements
    with pytest.raises(OSError, match="is a database"), atomic_write(study_db) as stream:
        stream.write(b"a bundle")
    assert study_db.read_bytes() == before
    study_db.unlink()
    path = tmp_path / "results.json"
    path.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(TypeError), atomic_write(path) as stream:
        stream.writelines([b"half of", None])
    assert path.read_text() == "old"
    with atomic_write(link) as stream:
        stream.write(b"new")
    assert path.read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "results.json"]
    with atomic_write(Path("/dev/null")) as stream:
        stream.write(b"away")
    assert Path("/dev/null").is_char_device()


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """Whoever may write the folder can guess the name of the process, and even the random one must not be followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "results.json"
    planted = tmp_path / f".results.json.{os.getpid()}.partial"
    planted.symlink_to(victim)
    with atomic_write(path) as stream:
        stream.write(b"new")
    assert path.read_text() == "new"
    assert planted.is_symlink()
    monkeypatch.setattr(os, "urandom", bytes)
    for target in (victim, tmp_path / "missing"):
        known = tmp_path / f".results.json.{'00' * 8}.partial"
        known.symlink_to(target)
        with pytest.raises(FileExistsError), atomic_write(path) as stream:
            stream.write(b"newer")
        assert known.is_symlink()
        known.unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "missing").exists()
    assert path.read_text() == "new"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_written_file_has_the_mode_of_the_umask(tmp_path, mask, mode):
    previous = os.umask(mask)
    try:
        with atomic_write(tmp_path / ("long" * 60)) as stream:
            stream.write(b"new")
    finally:
        os.umask(previous)
    assert (tmp_path / ("long" * 60)).stat().st_mode & 0o777 == mode


def test_reading_needs_no_room_beside_the_file(study_db, key, monkeypatch):
    """Without a log beside the file, it is read without the files that SQLite would have to create."""
    connect = sqlite3.connect

    class Refusing(_FileConnection):
        def execute(self, sql: str, *given: object) -> sqlite3.Cursor:
            if "schema_version" in sql:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
                raise error
            return super().execute(sql, *given)

    monkeypatch.setattr(sqlite3, "connect", lambda address, **named: connect(address, **{**named, "factory": Refusing}))
    with open_existing(study_db) as reader:
        assert reader.find_study(key) == 1


Writer = tuple[BaseProcess, "Connection[None, int]"]
"""A process that stores trials, and the end of a pipe that receives the number of each."""


def _start(path: Path, count: int, processes: int = 1) -> list[Writer]:
    """Start processes that open a database together, and store trials in it."""
    forks = multiprocessing.get_context("fork")
    barrier = forks.Barrier(processes)

    def write(pipe: Connection[int, None]) -> None:
        barrier.wait()
        with Database.open(path) as database:
            study, run = begin(database, KEY)
            for number in range(count):
                add_trial(database, study, run, measured({"worker": os.getpid(), "BM": number}, 1.0))
                pipe.send(number)

    started: list[Writer] = []
    for _ in range(processes):
        receiving, sending = forks.Pipe(duplex=False)
        process = forks.Process(target=write, args=(sending,))
        process.start()
        sending.close()  # so that its end is seen
        started.append((process, receiving))
    return started


def _received(pipe: Connection[None, int], count: int | None = None) -> int:
    """Return the number of messages until a process ends, or ``count`` of them have come."""
    number = 0
    with suppress(EOFError):
        while number != count:
            pipe.recv()
            number += 1
    return number


def test_processes_killed_at_any_moment_leave_a_whole_database_with_all_trials_that_had_ended(tmp_path):
    path, before = tmp_path / "tuning.db", 0
    for killed in (1, 2):
        ((process, pipe),) = _start(path, 100_000)
        seen = _received(pipe, 60)
        process.kill()
        seen += _received(pipe)
        process.join()
        with Database.open(path) as database:
            assert database.notices == ()
            report = check_database(database)
            assert (report.ok, report.unfinished_runs) == (True, killed)
            stored = len(database.trials(1)) - before
        assert seen <= stored <= seen + 1
        before += stored


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_begin_together_share_one_database(tmp_path, key, damaged):
    path = tmp_path / "tuning.db"
    if damaged:  # it is set aside once
        _damaged(path, key, "cut")
    for process, pipe in _start(path, 50, processes=3):
        assert _received(pipe) == 50
        process.join()
        assert process.exitcode == 0
    assert len(list(tmp_path.glob("tuning.db.corrupt-*[0-9]"))) == damaged
    with Database.open(path) as database:
        assert database.notices == ()
        (study,) = database.studies()
        assert (study.runs, study.trials) == (3, 150)


def test_a_damaged_one_that_another_process_sets_aside_meanwhile_is_replaced(tmp_path, key, monkeypatch):
    path = tmp_path / "tuning.db"
    _damaged(path, key, "cut")

    def set_aside_by_another(found: Path) -> list[object]:
        found.replace(tmp_path / "aside.db")
        return []

    monkeypatch.setattr("autotile.database.database.open_connections", set_aside_by_another)
    with Database.open(path) as database:
        assert (database.notices, database.studies()) == ((), [])


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("stored") / "template.db")


@pytest.fixture
def case(template, tmp_path):
    shutil.copy(template, tmp_path / "template.db")
    return Path(shutil.copy(template, tmp_path / "case.db"))


def content(case: Path) -> list[list[tuple[object, ...]]]:
    with closing(sqlite3.connect(case)) as connection:
        connection.text_factory = bytes
        return [connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall() for table in _PARSERS]


@pytest.mark.parametrize("seed", range(3))
def test_everything_goes_on_without_altered_rows(case, seed):
    assert len(alter_rows(case, Random(seed), 33)) > 9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        assert [(name, repr(error)) for name, error in sweep(case, case.parent)] == []


@pytest.mark.parametrize("table", _PARSERS)
def test_an_altered_row_is_parsed_or_bad(template, table):
    with Database.open(template) as database, database.reading() as connection:
        rows = list(rows_of(connection, select(METADATA.tables[table])))

    @settings(max_examples=60)
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


def test_a_bad_row_is_named_once(case):
    change_file(case, "UPDATE trials SET time_us = -1 WHERE id = 3", "UPDATE studies SET sizes = '[' WHERE id = 2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [study.study_id for study in autotile.list(database=case).studies] == [1, 3]
        autotile.list(database=case)
        trials = autotile.trials(KERNEL, database=case).trials
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
def test_a_kernel_is_served_whatever_a_row_holds(case, statement, is_exact):
    change_file(case, statement)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        kernel = autotile.get_best_kernel(KERNEL, **SIZES, device="h200", database=case)
        with Database.open(case) as database:
            best = database.best(KERNEL, sizes=SIZES)
    assert (kernel.tier == "exact") == bool(best) == is_exact


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("runs", "driver", b"\xff\xfe"),
        ("trials", "time_us", float("inf")),
        ("trials", "reason", b"\0\xff"),
        ("misses", "sizes", "null"),
        ("ceilings", "gpu_uuid", "<script>"),
        ("ceilings", "compute_capability", "nine"),
        ("ceilings", "measured_at", "soon"),
        ("ceilings", "ceilings", '[{"name": "dram_read", "value": -1.0, "low": 1.0, "high": 1.0, "method": ""}]'),
        ("ceilings", "ceilings", '[{"name": "warp", "value": 1.0, "low": 1.0, "high": 1.0, "method": ""}]'),
        ("ceilings", "ceilings", '{"dram_read": 1e12}'),
        ("ceilings", "warnings", "[1]"),
        ("families", "family", '{"M": "2..1"}'),
        ("families", "family", "{"),
        ("families", "digest", "A" * 64),
        ("families", "device", '{"name": "H200"}'),
        ("families", "key", '{"kernel": "sgemm"}'),
        ("families", "kernel", "k" * 2000),
        ("families", "progress", '{"tuned": "x"}'),
        ("families", "rule", '{"format": 99}'),
        ("families", "learned_at", "yesterday"),
    ],
)
def test_a_bad_row_is_listed_and_left_as_it_is(case, table, column, value):
    for row_id in (1, 3) if table == "families" else (1,):  # the first has a rule, the last has none
        shutil.copy(case.with_name("template.db"), case)
        with closing(sqlite3.connect(case)) as connection, connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (value, row_id))
        before = content(case)
        found = autotile.db_check(case)
        assert found.exists
        assert not found.ok
        (row,) = found.bad_rows
        assert (row.table, row.row_id) == (table, row_id)
        assert row.field.startswith("learned_at" if (column, row_id) == ("rule", 3) else column)  # a rule has its date
        if table == "ceilings":
            with Database.open(case) as database, pytest.warns(DataWarning, match="ceilings 1"):
                assert read_ceilings(database) == []
        assert content(case) == before


VIEW = "SELECT 1 AS study_id, 1 AS trial_id"
NEWER = rf"was written by a newer autotile \(schema 9999; this version knows {SCHEMA_REVISION}\): pip install"


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
        (["UPDATE autotile_schema SET version_num = '9999'"], NEWER),
        (["UPDATE autotile_schema SET version_num = '0001'"], "its view 'best' was changed"),
    ],
)
def test_a_changed_structure_is_refused(case, statements, message):
    change_file(case, *statements)
    before = case.read_bytes()
    assert is_left_to_the_engine(case) or "autotile_schema" not in statements[0]
    assert read_file(str(case), WINNERS, kernel=KERNEL, dtype="float32") in (None, []) or message.startswith(
        ("it lacks the t", "its t")
    )
    for open_database in (Database.open_readonly, Database.open):
        with pytest.raises(DatabaseError, match=message) as caught:
            open_database(case)
        assert "another database" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert case.read_bytes() == before
    assert autotile.get_best_kernel(KERNEL, **SIZES, device="h200", database=case).config
