"""The worker's end of a cluster: its GPU worker between sessions, errors, last races, and sweeps of a family."""

import hashlib
import json
import math
import os
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from gpu_calls import GivenGpu, raced
from judges import BEST, by_threads
from processes import wait_until

from autotile.core.model import Outcome
from autotile.errors import InputError, ToolchainError, WorkerError
from autotile.kernel.operation import Library
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.cluster import gpus as cluster_gpus
from autotile.tuning.cluster import worker as cluster_worker
from autotile.tuning.cluster.gpus import RemoteGpu, jobs_on_cluster
from autotile.tuning.cluster.requests import AbsentGpuError, Cluster, SentRequest
from autotile.tuning.cluster.worker import GpuPlugin, GpuReply, GpuRequest, answer
from autotile.tuning.lanes import Lane
from autotile.tuning.operation_session import hold_contest
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.schedule import Schedule
from autotile.workers.child import is_running
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Candidate, Check, Entry, Race, Reading, Time


@pytest.fixture
def plugin(bench, monkeypatch):
    """A GPU of a cluster whose worker process needs no GPU."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "workers"), prepend=":")
    monkeypatch.setattr(cluster_worker, "Gpu", partial(Gpu, module="bad_worker"))
    made = GpuPlugin("GPU-a", bench.device)
    yield made
    made.teardown(None)


def timers() -> set[threading.Timer]:
    return {one for one in threading.enumerate() if isinstance(one, threading.Timer) and not one.finished.is_set()}


def test_requests_of_a_session_share_its_worker_the_next_takes_it_over_and_an_idle_one_ends(bench, plugin, monkeypatch):
    workload = workload_of(bench.kernel, bench.problem(), read_settings(), TuneOptions())
    workload = replace(workload, spec_source="")  # in which this worker reads what goes wrong

    def opened(session):
        plugin.handle(GpuRequest(bench.kernel.name, workload, 5.0, session, "open"), {})
        return plugin._backend, plugin._backend._child.pid

    def close(session):
        plugin.handle(GpuRequest(session=session, op="close"), {})

    monkeypatch.setattr(cluster_worker, "_IDLE_S", 1000.0)
    before = timers()  # of other tests, which end at any time
    (first, pid), *others = [opened("first") for _ in range(3)]
    assert others == [(first, pid)] * 2
    close("first")
    assert len(timers() - before) == 1
    second, same = opened("second")
    assert (second is first, same) == (False, pid)
    assert not timers() - before  # what would end it is called off
    close("second")
    assert opened("third")[1] == pid
    assert is_running(pid)
    monkeypatch.setattr(cluster_worker, "_IDLE_S", 0.5)
    close("third")
    wait_until(lambda: not is_running(pid))
    _, other = opened("fourth")
    assert other != pid
    assert is_running(other)
    close("fourth")
    plugin.teardown(None)
    wait_until(lambda: not is_running(other))


class FakeGpu(GivenGpu):
    """A GPU worker that notes what it is to race."""

    seen: list[Any]

    def __init__(self, *of: Any, **named: Any) -> None:
        """The problem does not matter."""

    def race(self, job: Race) -> list[Reading]:
        for entry in job.entries:
            if entry.candidate is not None:
                assert entry.problem is not None
                cubin = Path(entry.candidate.cubin_path)
                assert hashlib.sha256(cubin.read_bytes()).hexdigest() == cubin.stem
                config = dict(entry.candidate.config)
                workload = job.workloads[entry.problem]
                FakeGpu.seen.append((dict(workload.sizes), workload.device_index, config))
        readings = [raced((10.0 + number,) * job.rounds) for number in range(len(job.entries))]
        versions = [{} if entry.library is None else {LIBRARY_VERSION: "13.1.0"} for entry in job.entries]
        return [replace(one, telemetry=telemetry) for one, telemetry in zip(readings, versions, strict=True)]

    def close(self) -> None:
        FakeGpu.seen.append("closed")


class NearCluster(Cluster):
    """A cluster of one GPU, whose process is this one."""

    def __init__(self, plugin: GpuPlugin) -> None:
        self.connection = Mock(**{"is_lost.return_value": False, "absent_s.return_value": 0.0})
        self.plugin = plugin
        self.absent: set[str] = set()

    def look(self) -> list[str]:
        return ["GPU-a"]

    def _submit(self, sent: SentRequest) -> None:
        sent.future = Future()
        with pytest.MonkeyPatch.context() as patch:
            here = Mock(plugins={self.plugin.name: self.plugin})
            patch.setattr(cluster_worker.distributed, "get_worker", lambda: here)
            sent.future.set_result(answer(sent.request, sent.cubins))

    def result(self, sent: SentRequest, limit_s: float = math.inf, *, meanwhile: Any = lambda: None) -> GpuReply:
        if sent.gpu in self.absent:
            raise AbsentGpuError("it is gone")
        return super().result(sent, limit_s, meanwhile=meanwhile)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError, InputError),
        (ToolchainError, ToolchainError),
        (RecursionError, WorkerError),  # which Dask could not send
    ],
)
def test_an_error_of_a_gpu_reaches_the_session(bench, monkeypatch, error, expected):
    recording, seeds = bench.record(), list[int]()

    def fail(gpu, job):
        seeds.append(job.seed)
        raise error("the second inputs are too large")

    monkeypatch.setattr(ReplayBackend, "run", fail)
    workload = workload_of(bench.kernel, bench.problem(), read_settings(), TuneOptions())
    cluster = NearCluster(GpuPlugin("GPU-a", bench.device, recordings=[str(recording)]))
    job = Check((Entry(Candidate(BEST, "")),), 3, seed=7)
    request = cluster.send("GPU-a", "run", GpuRequest("scale", workload, 5.0), job)
    with pytest.raises(expected, match="the second inputs are too large"):
        cluster.result(request)
    assert seeds == [7]


def test_kernels_and_the_library_of_its_machine_are_raced_where_a_gpu_is_free(bench, monkeypatch):
    monkeypatch.setattr(cluster_worker, "Gpu", FakeGpu)
    monkeypatch.setattr(cluster_gpus, "_FIRST_GPU_S", 0.1)
    FakeGpu.seen = []

    def race(*gpus):
        cluster, problem = NearCluster(GpuPlugin("GPU-a", bench.device, 3)), bench.problem()
        finalists = [(bench.kernel, problem, by_threads(config)) for config in bench.configs()[:2]]
        options, lane = TuneOptions(scheduler="tcp://127.0.0.1:1", workers=1), Lane(gpus, None, cluster, bench.device)
        with Schedule.open(read_settings(), options, lambda _: None, lane) as schedule:
            return hold_contest(finalists, [Library("cublas", "")], problem, device=bench.device, schedule=schedule)

    raced = race("GPU-a")
    assert [trial.time_us for trial, _ in raced] == [10.0, 11.0, 12.0]
    assert [version for _, version in raced] == ["", "", "13.1.0"]
    assert FakeGpu.seen == [*(({"n": 4096}, 3, config) for config in bench.configs()[:2]), "closed"]
    with pytest.raises(WorkerError, match="no GPU of the cluster is free"):
        race("GPU-b")


GOOD = {"THREADS": 64, "WORK": 1}


class TestGrid:
    """Jobs of a grid, whose entries have problems of their own."""

    @pytest.fixture
    def near(self, bench, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        monkeypatch.setattr(cluster_worker, "Gpu", partial(Gpu, module="fake_sweep_worker"))
        plugin = GpuPlugin("GPU-a", bench.device, 3)
        yield NearCluster(plugin)
        plugin.teardown(None)

    @staticmethod
    def job(bench: Any, *configs: dict[str, int]) -> Time:
        workload = workload_of(bench.kernel, bench.problem(), read_settings(), TuneOptions())
        cubin = bench.folder / "one.cubin"
        cubin.write_bytes(b"cubin")
        entries = tuple(Entry(Candidate(config, str(cubin)), problem=0) for config in configs)
        return Time(entries, grid=True, workloads=(workload,))

    def test_cubins_for_ragged_sizes_go_along(self, near, bench, tmp_path, monkeypatch):
        monkeypatch.setenv("AUTOTILE_SWEEP_LOG", str(tmp_path / "entries.jsonl"))
        other = tmp_path / "other.cubin"
        other.write_bytes(b"for 1001 elements")
        job = self.job(bench, GOOD)
        candidate = replace(job.entries[0].candidate, others=(({"n": 1001}, str(other), {}),))
        with jobs_on_cluster(Lane(("GPU-a",), None, near, bench.device), 10.0) as run:
            (reading,) = run(replace(job, entries=(Entry(candidate, problem=0),)))
            assert reading.outcome is Outcome.OK
            (logged,) = map(json.loads, (tmp_path / "entries.jsonl").read_text().splitlines())
            ((sizes, sent, _),) = logged["others"]
            assert sizes == {"n": 1001}
            assert sent != str(other)
            assert Path(sent).read_bytes() == b"for 1001 elements"

    def test_a_death_is_blamed_on_its_entry_and_the_gpu_is_busy_until_it_is_closed(self, near, bench, monkeypatch):
        monkeypatch.setenv("AUTOTILE_FAULTY_SWEEP", "1")
        with jobs_on_cluster(Lane(("GPU-a",), None, near, bench.device), 10.0) as run:
            readings = run(self.job(bench, GOOD, {"THREADS": 64, "WORK": 4}, GOOD))
            assert near.plugin.handle(GpuRequest(session="other"), {}).is_busy
            other = RemoteGpu(near, "GPU-a", bench.device, GpuRequest(session="other"))
            with pytest.raises(AbsentGpuError, match="GPU-a works for another session"):  # it may come back
                other.wait()
        assert [one.outcome for one in readings] == [Outcome.OK, Outcome.CRASHED, Outcome.OK]
        assert "exit code 3" in readings[1].reason
        assert not near.plugin.handle(GpuRequest(session="other"), {}).is_busy

    def test_another_machine_goes_on(self, near, bench, monkeypatch):
        near.absent.add("GPU-b")
        looks = iter([["GPU-b"], ["GPU-a"]])
        monkeypatch.setattr(near, "look", lambda: next(looks))
        with jobs_on_cluster(Lane(("GPU-a", "GPU-b"), None, near, bench.device), 10.0) as run:
            assert len(run(self.job(bench, GOOD))) == 1
