"""The last race of an operation, and sweeps of a family of one, on a GPU of another machine that is simulated."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu_calls import raced

from autotile.core.documents import decode_json, encode_json, to_fields
from autotile.core.model import Outcome
from autotile.errors import WorkerError
from autotile.kernel.operation import Library
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.lanes import Lane
from autotile.tuning.operation_session import RacedTrial, hold_contest
from autotile.tuning.options import TuneOptions
from autotile.tuning.schedule import Schedule
from autotile.workers.child import WorkerPool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Candidate, Entry, Race, Reading, SizedCubin, Time, Workload

pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")

from autotile.tuning.cluster import gpus as cluster_gpus
from autotile.tuning.cluster import worker as cluster_worker
from autotile.tuning.cluster.gpus import FreeGpu
from autotile.tuning.cluster.requests import AbsentGpuError, Cluster, SentRequest
from autotile.tuning.cluster.worker import GpuPlugin, GpuReply, GpuRequest, OfferedGpu


class FakeGpu:
    """A GPU worker that notes what it is to race."""

    seen: list[Any]

    def __init__(self, workload: Workload | None, deadline_s: float, **named: Any) -> None:
        self.workload = workload

    def wait(self) -> None:
        """The problem is laid out."""

    def race(self, job: Race) -> list[Reading]:
        for entry in job.entries:
            assert entry.workload is not None
            if entry.candidate is not None:
                cubin = Path(entry.candidate.cubin_path)
                assert hashlib.sha256(cubin.read_bytes()).hexdigest() == cubin.stem
                config = dict(entry.candidate.config)
                FakeGpu.seen.append((dict(entry.workload.sizes), entry.workload.device_index, config))
        return [
            raced((10.0 + number,) * job.rounds)
            if entry.library is None
            else replace(raced((10.0 + number,) * job.rounds), telemetry={LIBRARY_VERSION: "13.1.0"})
            for number, entry in enumerate(job.entries)
        ]

    def close(self) -> None:
        FakeGpu.seen.append("closed")


class NearCluster(Cluster):
    """A cluster of one GPU, whose process is this one."""

    def __init__(self, plugin: GpuPlugin) -> None:
        self.plugin = plugin
        self.absent: set[str] = set()

    def look(self) -> list[str]:
        return ["GPU-a"]

    def _submit(self, sent: SentRequest) -> None:
        reply = self.plugin.handle(decode_json(sent.request, GpuRequest), sent.cubins)
        sent.future = Future()
        sent.future.set_result(encode_json(to_fields(reply)))

    def result(self, sent: SentRequest, limit_s: float = math.inf, *, meanwhile: Any = None) -> GpuReply:
        if sent.gpu in self.absent:
            raise AbsentGpuError("it is gone")
        return decode_json(sent.future.result(), GpuReply)


@pytest.fixture
def race(bench: Any, judges: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Race two configurations of the tiny kernel and a library."""
    monkeypatch.setattr(cluster_worker, "Gpu", FakeGpu)
    monkeypatch.setattr(cluster_gpus, "_FIRST_GPU_S", 0.1)
    FakeGpu.seen = []

    def hold(*gpus: str) -> list[RacedTrial]:
        cluster = NearCluster(GpuPlugin(OfferedGpu("GPU-a", bench.device, 3)))
        configs = bench.configs()[:2]
        finalists = [(bench.kernel, bench.problem(), judges["by_threads"](config)) for config in configs]
        options, lane = (
            TuneOptions(scheduler="tcp://127.0.0.1:1", workers=1),
            Lane(gpus, None, cluster, bench.device),
        )
        with Schedule.open(read_settings(), options, lambda _: None, lane) as schedule:
            return hold_contest(
                finalists, [Library("cublas", "")], bench.problem(), device=bench.device, schedule=schedule
            )

    return hold


def test_kernels_and_the_library_of_its_machine_are_raced(bench: Any, race: Any) -> None:
    raced = race("GPU-a")
    assert [one.trial.time_us for one in raced] == [10.0, 11.0, 12.0]
    assert [one.version for one in raced] == ["", "", "13.1.0"]
    assert FakeGpu.seen == [*(({"n": 4096}, 3, config) for config in bench.configs()[:2]), "closed"]


def test_a_gpu_that_is_not_there_is_an_error(race: Any) -> None:
    with pytest.raises(WorkerError, match="no GPU of the cluster is free"):
        race("GPU-b")


class TestGrid:
    """Jobs of a grid, whose entries have problems of their own."""

    @pytest.fixture
    def near(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[NearCluster]:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        monkeypatch.setattr(cluster_worker, "Gpu", partial(Gpu, module="fake_sweep_worker"))
        plugin = GpuPlugin(OfferedGpu("GPU-a", bench.device, 3))
        yield NearCluster(plugin)
        plugin.teardown(None)

    @staticmethod
    def job(bench: Any, *configs: dict[str, int]) -> Time:
        workload = workload_of(bench.kernel, bench.problem(), read_settings(), TuneOptions())
        cubin = bench.folder / "one.cubin"
        cubin.write_bytes(b"cubin")
        return Time(tuple(Entry(Candidate(config, str(cubin)), workload=workload) for config in configs), grid=True)

    def test_the_worker_of_its_machine_answers(self, near: NearCluster, bench: Any) -> None:
        gpu = FreeGpu(Lane(("GPU-a",), None, near, bench.device), 10.0)
        (first,) = gpu.time(self.job(bench, {"THREADS": 64, "WORK": 1}))
        assert first.outcome is Outcome.OK
        assert near.plugin.handle(GpuRequest(session="other"), {}).is_busy
        gpu.close()
        assert not near.plugin.handle(GpuRequest(session="other"), {}).is_busy

    def test_cubins_for_ragged_sizes_go_along(
        self, near: NearCluster, bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTOTILE_SWEEP_LOG", str(tmp_path / "entries.jsonl"))
        other = tmp_path / "other.cubin"
        other.write_bytes(b"for 1001 elements")
        (entry,) = self.job(bench, {"THREADS": 64, "WORK": 1}).entries
        assert entry.candidate is not None
        candidate = replace(entry.candidate, others=(SizedCubin({"n": 1001}, str(other), {}),))
        gpu = FreeGpu(Lane(("GPU-a",), None, near, bench.device), 10.0)
        (reading,) = gpu.time(Time((replace(entry, candidate=candidate),), grid=True))
        assert reading.outcome is Outcome.OK
        (logged,) = map(json.loads, (tmp_path / "entries.jsonl").read_text().splitlines())
        (sent,) = logged["others"]
        assert sent["sizes"] == {"n": 1001}
        assert sent["cubin_path"] != str(other)
        assert Path(sent["cubin_path"]).read_bytes() == b"for 1001 elements"
        gpu.close()

    def test_a_death_is_blamed_on_its_entry(
        self, near: NearCluster, bench: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTOTILE_FAULTY_SWEEP", "1")
        gpu = FreeGpu(Lane(("GPU-a",), None, near, bench.device), 10.0)
        good = {"THREADS": 64, "WORK": 1}
        readings = gpu.time(self.job(bench, good, {"THREADS": 64, "WORK": 4}, good))
        assert [one.outcome for one in readings] == [Outcome.OK, Outcome.CRASHED, Outcome.OK]
        assert "exit code 3" in readings[1].reason
        gpu.close()

    def test_another_machine_goes_on(self, near: NearCluster, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        near.absent.add("GPU-b")
        looks = iter([["GPU-b"], ["GPU-a"]])
        monkeypatch.setattr(near, "look", lambda: next(looks))
        gpu = FreeGpu(Lane(("GPU-a", "GPU-b"), None, near, bench.device), 10.0)
        assert len(gpu.time(self.job(bench, {"THREADS": 64, "WORK": 1}))) == 1
        gpu.close()


def test_the_worker_process_waits_for_the_next_session(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[WorkerPool] = []

    class OpenGpu(FakeGpu):
        def __init__(self, workload: Workload, deadline_s: float, *, worker_pool: WorkerPool, uuid: str) -> None:
            pools.append(worker_pool)

    FakeGpu.seen = []
    monkeypatch.setattr(cluster_worker, "Gpu", OpenGpu)
    options = TuneOptions(scheduler="tcp://127.0.0.1:1")
    workload = workload_of(bench.kernel, bench.problem(), read_settings(), options)
    plugin = GpuPlugin(OfferedGpu("GPU-a", bench.device))
    for session in ("first", "second"):
        plugin.handle(GpuRequest(session=session, op="open", workload=workload), {})
        monkeypatch.setattr(cluster_worker, "_IDLE_S", 60.0 if session == "first" else 0.01)
        plugin.handle(GpuRequest(session=session, op="close"), {})
    assert pools[0] is pools[1]
    end = time.monotonic() + 10
    while plugin._workers is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert plugin._workers is None
    plugin.teardown(None)
