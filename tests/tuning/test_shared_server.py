"""Sessions that share a study on a PostgreSQL server: one of two processes is killed, or the server restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from postgresql_server import PostgresqlServer
from processes import PATIENCE_S, count_configs

from autotile.api.databases import db_merge as merge
from autotile.core.model import config_key
from autotile.database import engine, runs
from autotile.errors import AutotileError

SESSION = """
import sys
from pathlib import Path
from autotile.database import runs
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings
from autotile.tuning import backend
from autotile.tuning.options import TuneOptions
from autotile.tuning.session import tune

class Slow(backend.SimulatedGpu):
    def __init__(self, recording, notice="", *, uuid=""):
        super().__init__(recording, notice, uuid=uuid, seconds=float(sys.argv[3]))

backend.ReplayBackend = Slow
runs.LEASE_S = float(sys.argv[4])
runs.is_gone = lambda owner: False  # as for a process of another machine
kernel = load_kernel(sys.argv[1])
options = TuneOptions(replay=Path(sys.argv[2]), workers=1, sampler="brute-force")
result = tune(kernel, resolve_problem(kernel.spec, {"n": 4096}), read_settings(), options)
print(result.winner.config, sum(result.outcomes.values()))
"""
BEST = {"THREADS": 256, "WORK": 4}


@pytest.fixture
def location(postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> str:
    url = postgresql.new_database()
    monkeypatch.setenv("AUTOTILE_DB", url)
    return url


def start(scale_toml: Path, recording: Path, seconds: float, lease_s: float = 60.0) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SESSION, str(scale_toml), str(recording), str(seconds), str(lease_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(bench: Any, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if len(bench.stored()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} trials within {PATIENCE_S} s")


@pytest.mark.usefixtures("location")
def test_the_lease_of_a_killed_process_runs_out_and_the_other_tries_its_candidate(bench: Any, scale_toml: Path) -> None:
    recording = bench.record()
    doomed = start(scale_toml, recording, 0.4, lease_s=2.0)
    wait_for(bench, 1)
    other = start(scale_toml, recording, 0.1, lease_s=2.0)
    wait_for(bench, 4)
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    output, errors = other.communicate(timeout=60)
    assert output.split() == [*str(BEST).split(), "12"], errors
    assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}


@pytest.mark.usefixtures("location")
def test_sessions_go_on_after_restarts_and_crashes_of_the_server(
    bench: Any, scale_toml: Path, postgresql: PostgresqlServer
) -> None:
    recording = bench.record()
    sessions = [start(scale_toml, recording, 0.3) for _ in range(2)]
    for trials, how in ((2, signal.SIGINT), (6, signal.SIGQUIT)):
        wait_for(bench, trials)
        postgresql.stop(how)
        time.sleep(0.3)
        postgresql.start()
    for session in sessions:
        output, errors = session.communicate(timeout=60)
        assert output.split() == [*str(BEST).split(), "12"], errors
    assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}


def test_a_server_that_stays_away_ends_the_session_which_is_resumed_later(
    bench: Any, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, location: str, tmp_path: Path
) -> None:
    recording = bench.record()
    monkeypatch.setattr(engine, "RESTART_S", 0.2)
    monkeypatch.setattr(runs, "LEASE_S", 2.0)  # the same process holds it still, for the second session
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stop_after_three(progress: Any) -> None:
        if progress.done == 3:
            postgresql.stop()

    try:
        with pytest.raises(AutotileError, match=r"kept in .*rescued.*autotile db merge") as caught:
            bench.tune(recording, stop_after_three, sampler="brute-force")
    finally:
        postgresql.stop()
        postgresql.start()
    assert postgresql.password not in str(caught.value)
    assert len(bench.stored()) == 3
    (rescued,) = tmp_path.glob("tuning.rescued-*.db")
    merge([rescued], location)
    assert bench.tune(recording, sampler="brute-force").winner.config == BEST
    assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}
