"""Concurrent processes, and processes that are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from stored_runs import start_run

from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.keys import TuningKey

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
