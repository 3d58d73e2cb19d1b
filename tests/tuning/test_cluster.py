"""Sessions on the GPUs of a cluster: a scheduler of Dask and workers with simulated GPUs, in processes of their own."""

import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from cluster_kit import children, kill_all, listening, loopback_host, not_loopback, running_cluster
from judges import BEST
from processes import PATIENCE_S, wait_until
from rich.console import Console

from autotile.cli.progress import TuneProgress
from autotile.core.model import config_key
from autotile.errors import InputError, WorkerError
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.cluster import connection
from autotile.tuning.cluster import gpus as cluster_gpus
from autotile.tuning.cluster import requests as cluster_requests
from autotile.tuning.cluster.connection import Connection, check_scheduler
from autotile.tuning.cluster.requests import Cluster
from autotile.tuning.cluster.worker import GpuReply, GpuRequest
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import TuneResult

SECONDS = 0.3
"""Time that a simulated GPU takes for a candidate."""


@pytest.fixture
def secure_kit(tmp_path, tls):
    with running_cluster(tmp_path, tls, loopback_host()) as kit:
        yield kit


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread during the ``with`` block."""
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(act)
        yield
        doing.result()


def check(result: TuneResult, bench: Any) -> None:
    """Assert that each configuration was tried once, and the best won."""
    assert (result.winner.config, result.interrupted) == (BEST, False)
    assert sorted(config_key(trial.config) for trial in bench.stored()) == sorted(map(config_key, bench.configs()))
    assert {trial.outcome for trial in bench.stored()} <= {"ok", "pruned"}


def test_machines_may_join_late_and_all_be_killed_and_all_ports_are_of_the_loopback(bench, secure_kit, monkeypatch):
    monkeypatch.setattr(cluster_requests, "_ABSENT_S", 1.0)
    recording, seen = bench.record(), list[str]()
    slow, own, ports = secure_kit.simulated(recording, 0, 3.0), listening(os.getpid()), set[tuple[str, int]]()

    def replace():
        wait_until(lambda: bool(seen))
        late = secure_kit.simulated(recording, 1, SECONDS)
        wait_until(lambda: any(trial.gpu.endswith("-1") for trial in bench.stored()))
        ports.update(listening(slow.pid), listening(late.pid), listening(os.getpid()) - own)
        assert min(kill_all(slow), kill_all(late)) > 1
        wait_until(lambda: any(seen))
        secure_kit.simulated(recording, 2)

    def observe(progress):
        seen.append(progress.waiting)

    with meanwhile(replace):
        result = bench.tune(recording, observe, sampler="brute-force", scheduler=secure_kit.scheduler)
    assert secure_kit.scheduler.startswith("tls://")
    check(result, bench)
    assert [use.uuid.rpartition("-")[2] for use in result.gpus] == ["0", "1", "2"]
    assert [bool(use.lost) for use in result.gpus] == [True, True, False]
    assert {*seen} == {"", "no GPU of the scheduler is left; one is waited for, 5 min at most"}
    assert seen[-1] == ""
    assert len(ports) >= 6  # of two processes, their nannies, and their HTTP servers
    assert not_loopback(ports) == []


def test_a_process_and_a_scheduler_that_are_killed_lose_no_candidate_and_are_waited_for(bench, cluster, monkeypatch):
    """A worker waits for its scheduler when it starts, too."""
    monkeypatch.setattr(cluster_requests, "_ABSENT_S", PATIENCE_S)
    recording, seen, threads = bench.record(), list[str](), set[int]()
    cluster.restore()
    cluster.kill_scheduler()
    worker = cluster.simulated(recording, 0, SECONDS, stderr=subprocess.PIPE, text=True)
    lines = iter(worker.stderr.readline, "")  # Dask may report the death of its process, too
    assert next(lines).startswith(f"no scheduler answers at {cluster.scheduler} yet; it is tried for")
    cluster.start_scheduler()
    offered = f"offered to {cluster.scheduler}\n"
    assert next(lines).endswith(offered)
    cluster.simulated(recording, 1, SECONDS)
    console = Console(file=io.StringIO(), width=400, markup=False)
    shown = TuneProgress(console)

    def observe(progress):
        shown(progress)
        seen.append(progress.waiting)
        threads.add(threading.get_ident())

    def kill():
        wait_until(lambda: len(bench.stored()) >= 1)
        for pid in children(worker.pid):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(bench.stored()) >= 2)
        cluster.kill_scheduler()
        wait_until(lambda: any(seen))
        cluster.start_scheduler()

    with meanwhile(kill):
        result = bench.tune(recording, observe, sampler="brute-force", scheduler=cluster.scheduler)
    check(result, bench)
    assert not any(use.lost for use in result.gpus)
    waiting = f"the scheduler {cluster.scheduler} does not answer; it is waited for, 5 min at most"
    # A trial that ends meanwhile is reported with the same remark: what counts is that it begins and ends once.
    assert [text for text, _ in itertools.groupby(seen)] == ["", waiting, ""]
    assert threads == {threading.get_ident()}
    shown_lines = console.file.getvalue().splitlines()
    (number,) = [number for number, line in enumerate(shown_lines) if line.startswith(f"{waiting}; searching: ")]
    assert shown_lines[number + 1].startswith("searching: ")
    assert any(line.endswith("the scheduler is lost; it joins again when it is back\n") for line in lines)
    assert any(line.endswith(offered) for line in lines)
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 0


def wait_forever(connected: Connection) -> None:
    while True:
        connected.await_look()


def test_a_scheduler_without_workers_that_does_not_come_back(bench, cluster, monkeypatch):
    monkeypatch.setattr(cluster_gpus, "_FIRST_GPU_S", 1.0)
    cluster.restore()
    with pytest.raises(InputError, match="none joined; start `autotile worker`"):
        bench.tune(bench.record(), scheduler=cluster.scheduler)
    for name, seconds in {"_RECONNECT_S": 0.2, "_CONNECT_S": 0.5, "_LOOK_S": 0.5, "_POLL_S": 0.05}.items():
        monkeypatch.setattr(connection, name, seconds)
    with closing(Connection(cluster.scheduler, insecure=False)) as connected:
        task = connected.submit(len, "ab", resource="nobody offers it")
        cluster.kill_scheduler()
        with pytest.raises(WorkerError, match="all trials are stored: start `dask scheduler` again, and repeat"):
            wait_forever(connected)
        assert task.cancelled()
        assert connected.offers() == []
        assert not logging.getLogger("distributed.client").isEnabledFor(logging.ERROR)
    assert logging.getLogger("distributed.client").isEnabledFor(logging.ERROR)
    with pytest.raises(InputError, match="no scheduler answers"):
        bench.tune(bench.record(), scheduler=cluster.scheduler)


def connection_of(*ends: str | Exception | None, status: str = "finished") -> Any:
    """Return a connection whose tasks end one after the other as given: with a reply, with an error, or cancelled."""
    futures: list[Any] = [Future() for _ in ends]
    for end, future in zip(ends, futures, strict=True):
        future.status = status
        if end is None:
            future.cancel()
        elif isinstance(end, str):
            future.set_result(end)
        else:
            future.set_exception(end)
    return Mock(**{"submit.side_effect": futures, "is_lost.return_value": False})


def asked(bench: Any, connected: Any) -> GpuReply:
    """Send a request over a connection, and return the reply."""
    one = Cluster.__new__(Cluster)
    one.connection = connected
    options = TuneOptions()
    work = GpuRequest(bench.kernel.name, workload_of(bench.kernel, bench.problem(), read_settings(), options), 1.0)
    return one.result(one.send("GPU-7", "describe", work))


def test_a_request_that_was_lost_is_sent_again(bench):
    connected = connection_of(None, OSError("the process is gone"), None, '{"is_busy": true}')
    assert asked(bench, connected).is_busy
    assert connected.submit.call_count == 4
    for ends, status in (([OSError("gone")], "error"), ([OSError("gone")] * 11, "finished")):  # until it is given up
        connected = connection_of(*ends, status=status)
        with pytest.raises(WorkerError, match="GPU-7: OSError: gone"):
            asked(bench, connected)
        assert connected.submit.call_count == len(ends)


HOSTS = ("node7", "10.0.0.1", "[2001:db8::1]", "0.0.0.0", "[::]", "127.0.0.1.example", "[::ffff:10.1.2.3]")
NOT_LOCAL = [f"tcp://{host}:8786" for host in HOSTS]
LOCAL = ("tcp://127.0.0.1:8786", "tcp://localhost:8786", "tcp://[::1]:8786")
MALFORMED = (
    "", "node7", "node7:8786", "tcp://", "tls://node7", "http://a:1", "tcp://a:x", "tcp://[::1", "unix:///tmp/socket",
    *(f"{scheme}://127.0.0.1:8786" for scheme in ("inproc", "ucx", "ws", "wss", "TCP")), "127.0.0.1:8786",
    "tcp://node7:8786@127.0.0.1:8786", *(f"tcp://127.0.0.1:8786{end}" for end in ("/", "?host=node7", "\n")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("address", "insecure", "said"),
    [
        *((address, False, r"not encrypted.*use tls://, or --insecure") for address in NOT_LOCAL),
        *((address, True, "cannot be read; expected tls:// or tcp://, a host and a port") for address in MALFORMED),
        ("tls://node7:8786", False, r"distributed\.comm\.tls\.ca-file"),
        *((address, address in NOT_LOCAL, None) for address in (*LOCAL, *NOT_LOCAL)),
    ],
)
def test_a_scheduler_that_is_refused_or_needs_no_tls(address, insecure, said):
    with pytest.raises(InputError, match=said) if said else nullcontext():
        assert not check_scheduler(address, insecure=insecure).require_encryption


@pytest.mark.parametrize("options", [{"sanitize": True}, {"devices": (0, 1)}, {"captured": "somewhere"}])
def test_what_other_machines_lack_is_refused(bench, options):
    with pytest.raises(InputError, match="which other machines lack"):
        bench.tune(bench.record(), scheduler="tcp://127.0.0.1:1", **options)


def test_the_processes_of_dask_log_warnings_only():
    code = """
import dask, logging, autotile.tuning.cluster.connection
print(logging.getLogger("distributed").level, dask.config.get("distributed.nanny.pre-spawn-environ"))
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"{logging.WARNING} ")
    assert "'DASK_LOGGING__DISTRIBUTED': 'warning'" in said
