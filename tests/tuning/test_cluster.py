"""Sessions on the GPUs of a cluster: a scheduler of Dask and workers with simulated GPUs, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotile.core.model import config_key
from autotile.errors import InputError
from autotile.tuning.result import TuneResult

pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")

from autotile.tuning import cluster, cluster_lane, cluster_worker, connection
from autotile.tuning.scheduler import check_scheduler

BEST = {"THREADS": 256, "WORK": 4}
START_S = 120.0
Offer = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.terminate()
    for one in started:
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


@pytest.fixture
def scheduler(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    """Start a scheduler on the loopback address, and return its own."""
    file = tmp_path / "scheduler.json"
    words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    processes.append(subprocess.Popen([sys.executable, "-m", "dask", *words], stderr=subprocess.DEVNULL))
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if file.exists() and (text := file.read_text()).endswith("}"):
            return str(json.loads(text)["address"])
        time.sleep(0.1)
    raise AssertionError("the scheduler does not start")


@pytest.fixture
def offer(scheduler: str, processes: list[subprocess.Popen[bytes]]) -> Offer:
    """Return a function that starts `autotile worker` with a simulated GPU."""

    def start(recording: Path, number: int, seconds: float = 0.3) -> subprocess.Popen[bytes]:
        words = ["worker", scheduler, "--replay", str(recording), "--devices", str(number)]
        words += ["--replay-seconds", str(seconds)]
        processes.append(subprocess.Popen([sys.executable, "-m", "autotile", *words], stderr=subprocess.DEVNULL))
        return processes[-1]

    return start


def children(pid: int) -> list[int]:
    """Return the processes below one, of Dask and of multiprocessing."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(word) for file in found for word in file.read_text().split()]
    return [*direct, *(below for one in direct for below in children(one))]


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def check(result: TuneResult, bench: Any) -> None:
    """Assert that each configuration was tried once, and the best won."""
    assert result.winner is not None
    assert result.winner.config == BEST
    assert not result.interrupted
    assert sorted(config_key(trial.config) for trial in bench.stored()) == sorted(map(config_key, bench.configs()))
    assert {trial.outcome for trial in bench.stored()} <= {"ok", "pruned"}


@pytest.mark.parametrize("whole_machine", [False, True], ids=["process", "machine"])
def test_a_worker_that_is_killed_loses_no_candidate(
    bench: Any, scheduler: str, offer: Offer, monkeypatch: pytest.MonkeyPatch, whole_machine: bool
) -> None:
    monkeypatch.setattr(cluster, "_ABSENT_S", 2.0 if whole_machine else 60.0)
    recording = bench.record()
    workers = [offer(recording, number) for number in range(2)]
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: len(bench.stored()) >= 2)
        doomed = children(workers[0].pid)
        killed.extend(doomed)
        if whole_machine:
            workers[0].kill()
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = bench.tune(recording, sampler="brute-force", scheduler=scheduler)
    killer.join()
    assert killed
    check(result, bench)
    assert result.gpus


def test_a_worker_may_join_late(bench: Any, scheduler: str, offer: Offer) -> None:
    recording = bench.record()
    offer(recording, 0, 1.0)

    def join() -> None:
        wait_until(lambda: bool(bench.stored()))
        offer(recording, 1, 0.01)

    joiner = threading.Thread(target=join)
    joiner.start()
    result = bench.tune(recording, sampler="brute-force", scheduler=scheduler)
    joiner.join()
    check(result, bench)
    assert all(use.uuid.startswith(cluster_worker.SIMULATED) for use in result.gpus)


def test_a_scheduler_without_workers(bench: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_lane, "_FIRST_GPU_S", 1.0)
    with pytest.raises(InputError, match="none joined; start `autotile worker`"):
        bench.tune(bench.record(), scheduler=scheduler)


def test_no_scheduler(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    with pytest.raises(InputError, match="no scheduler answers"):
        bench.tune(bench.record(), scheduler="tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["tcp://node7:8786", "tcp://10.0.0.1:8786", "tcp://[2001:db8::1]:8786"])
def test_tls_is_required_off_the_machine(address: str) -> None:
    with pytest.raises(InputError, match=r"not encrypted.*--insecure"):
        check_scheduler(address, insecure=False)
    assert not check_scheduler(address, insecure=True).require_encryption


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tcp://localhost:8786", "tcp://[::1]:8786"])
def test_the_loopback_address_needs_no_tls(address: str) -> None:
    assert not check_scheduler(address, insecure=False).require_encryption


@pytest.mark.parametrize("address", ["", "node7", "node7:8786", "tcp://", "tls://node7", "http://a:1", "tcp://a:x"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InputError, match="cannot be read; expected tls://HOST:PORT"):
        check_scheduler(address, insecure=True)


def test_tls_needs_certificates() -> None:
    with pytest.raises(InputError, match=r"distributed\.comm\.tls\.ca-file"):
        check_scheduler("tls://node7:8786", insecure=False)


@pytest.mark.parametrize("options", [{"sanitize": True}, {"devices": (0, 1)}, {"captured": "somewhere"}])
def test_what_other_machines_lack_is_refused(bench: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="which other machines lack"):
        bench.tune(bench.record(), scheduler="tcp://127.0.0.1:1", **options)


def test_the_processes_of_dask_log_warnings_only() -> None:
    import dask

    assert dask.config.get("distributed.nanny.pre-spawn-environ")["DASK_LOGGING__DISTRIBUTED"] == "warning"
