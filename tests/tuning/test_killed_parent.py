"""`autotile tune` killed at random moments: nothing is lost, no worker is left, and the same command ends with the
result of an undisturbed session. ``benchmarks/durability.py`` repeats this a hundred times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from endurance.crowd import run_crowd
from endurance.kills import Scenario, kill_and_resume
from faults.traces import descendants, settles

TUNE = ("matmul_tiled", "M=2048", "N=2048", "K=2048", "--replay", "--workers", "2", "--sampler", "tpe")

DIES_AT_ONCE = """
import os, signal, threading, time
from autotile.workers.child import Child
child = Child("echo_worker")
threading.Thread(target=child.request, args=({"do": "hang"}, 60), daemon=True).start()
time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("scenario", "kills"),
    [
        (Scenario("searching", (*TUNE, "--trials", "10")), 1),
        (Scenario("compiling", (*TUNE, "--trials", "4"), cold=True), 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_killed_session_ends_like_one_that_was_not(
    tmp_path: Path, cubin_cache_folder: Path, scenario: Scenario, kills: int
) -> None:
    done = list(kill_and_resume(tmp_path, [scenario], kills, seed=2, cache=cubin_cache_folder))
    assert [series.faults for series in done] == [[]] * len(done)
    assert sum(len(series.kills) for series in done) == kills


def test_a_worker_that_was_still_starting_leaves_too(tmp_path: Path) -> None:
    """A worker with a long request pending, which has never seen its parent alive."""
    mark = f"AUTOTILE_TEST_MARK={tmp_path}"
    workers = Path(__file__).parents[1] / "workers"
    paths = os.pathsep.join(map(str, [*filter(None, sys.path), workers]))
    environment = {**os.environ, "AUTOTILE_TEST_MARK": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", DIES_AT_ONCE], env=environment, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert settles(lambda: not descendants(mark))


def test_a_crowd_shares_one_database(tmp_path: Path, cubin_cache_folder: Path) -> None:
    crowd = run_crowd(tmp_path, 4, 0.3, cubin_cache_folder, large=False)
    assert crowd.faults == []
    assert crowd.acknowledged > 0
    assert {"import", "export"} & crowd.commands.keys()
