"""Processes and threads that share a database file do not harm each other, nor does a process that is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stored_runs import add_trials, measured, start_run

from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.engine import _FileConnection
from autotile.database.keys import TuningKey
from autotile.database.paths import atomic_write

VISIT = "import sys; from autotile.database.database import Database; Database.open(sys.argv[1]).close()"

BEGIN = """
import sys, time
from stored_runs import start_run
from autotile.database.database import Database
from autotile.database.keys import TuningKey
import autotile.database.migrations.versions.v0001_first_tables
key = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
with Database.open(sys.argv[1]) as opened:
    start_run(opened, opened.study(key, None), sampler="after")
"""


def test_opening_it_again_in_one_process_loses_nothing(tmp_path: Path, key: TuningKey) -> None:
    """Closing the file outside of SQLite would drop this process's locks, and others would delete its log."""
    path = tmp_path / "tuning.db"
    with Database.open(path) as first:
        study = first.study(key, None)
        for opening in (Database.open, Database.open_readonly):
            again = opening(path)
            assert again is not None
            again.close()
            subprocess.run([sys.executable, "-c", VISIT, str(path)], check=True)
            start_run(first, study, sampler="kept")
    with Database.open(path) as last:
        assert len(last.runs(study)) == 2


def test_a_damaged_file_is_set_aside_once_by_many(tmp_path: Path, key: TuningKey) -> None:
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        run = start_run(database, database.study(key, None), sampler="random")
        add_trials(database, 1, run, [measured({"BM": number}, 1.0) for number in range(100)])
    path.write_bytes(path.read_bytes()[:8192])
    together = str(time.time() + 2)  # all have finished importing by then
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", BEGIN, str(path), together]
    visitors = [subprocess.Popen(words, env=environment) for _ in range(4)]
    assert [visitor.wait(60) for visitor in visitors] == [0] * 4
    assert len(list(tmp_path.glob("tuning.db.corrupt-*[0-9]"))) == 1
    with Database.open(path) as after:
        assert len(after.runs(1)) == 4


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(TypeError), atomic_write(path) as stream:
        stream.writelines([b"half of", None])  # type: ignore[list-item]
    assert path.read_text() == "old"
    with atomic_write(link) as stream:
        stream.write(b"new")
    assert path.read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "results.json"]


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_written_file_has_the_mode_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    previous = os.umask(mask)
    try:
        with atomic_write(tmp_path / ("long" * 60)) as stream:
            stream.write(b"new")
    finally:
        os.umask(previous)
    assert (tmp_path / ("long" * 60)).stat().st_mode & 0o777 == mode


def test_a_database_is_never_replaced(tmp_path: Path, key: TuningKey) -> None:
    """Naming the database as an output by mistake would otherwise lose all measurements."""
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        database.study(key, None)
    before = path.read_bytes()
    with pytest.raises(OSError, match="is a database"), atomic_write(path) as stream:
        stream.write(b"a bundle")
    assert path.read_bytes() == before


def test_what_is_no_ordinary_file_is_not_replaced() -> None:
    with atomic_write(Path("/dev/null")) as stream:
        stream.write(b"away")
    assert Path("/dev/null").is_char_device()


def test_reading_needs_no_room_beside_the_file(tmp_path: Path, key: TuningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log beside the file, it is read without the files that SQLite would have to create."""
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        database.study(key, None)
    connect = sqlite3.connect

    class Refusing(_FileConnection):
        def execute(self, sql: str, *given: object) -> sqlite3.Cursor:  # type: ignore[override]
            if "schema_version" in sql:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
                raise error
            return super().execute(sql, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", lambda address, **named: connect(address, **{**named, "factory": Refusing}))
    reader = Database.open_readonly(path)
    assert reader is not None
    with reader:
        assert reader.find_study(key) == 1


WRITER = """
import os, signal, sys
from stored_runs import add_trial, start_run
from autotile.core.model import Measurement, Outcome, Trial
from autotile.database.database import Database
from autotile.database.keys import TuningKey

path, count, deadly = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "kill"
database = Database.open(path)
key = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
study = database.study(key, None)
run = start_run(database, study, sampler="random")
for number in range(count):
    trial = Trial({"worker": os.getpid(), "BM": number}, Outcome.OK, measurement=Measurement(1.0, 1.0, 1.0))
    add_trial(database, study, run, trial)
    print(number, flush=True)
if deadly:
    os.kill(os.getpid(), signal.SIGKILL)
database.close()
"""


def _start(path: Path, count: int, end: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), str(count), end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_process_loses_no_trial_that_had_ended(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    for round_number in range(1, 3):
        process = _start(path, 40, "kill")
        output, _ = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        assert output.split()[-1] == "39"
        with Database.open(path) as database:
            assert database.notices == ()
            assert len(database.trials(1)) == 40 * round_number
            assert check_database(database).unfinished_runs == round_number


def test_a_process_killed_at_any_moment_leaves_a_whole_database(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    process = _start(path, 100_000, "kill")
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(100)]
    process.kill()
    seen += process.stdout.read().split()
    process.wait(timeout=30)
    process.stdout.close()
    with Database.open(path) as database:
        assert check_database(database).ok
        assert len(seen) <= len(database.trials(1)) <= len(seen) + 1


def test_processes_that_begin_together_share_one_database(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    processes = [_start(path, 50, "close") for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with Database.open(path) as database:
        assert database.notices == ()
        (study,) = database.studies()
        assert (study.runs, study.trials) == (4, 200)


def test_a_forked_child_has_connections_of_its_own(database: Database, key: TuningKey) -> None:
    study = database.study(key, None)
    child = os.fork()
    if child == 0:
        ended_well = False
        try:
            start_run(database, study, sampler="child")
            ended_well = True
        finally:
            os._exit(0 if ended_well else 1)
    assert os.waitpid(child, 0)[1] == 0
    start_run(database, study, sampler="parent")
    assert sorted(run.sampler for run in database.runs(study)) == ["child", "parent"]
