"""The last race of an operation, and sweeps of a family of one, on a GPU of another machine that is simulated."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotile import __version__
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Outcome
from autotile.errors import ToolchainError, WorkerError
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.contest import Finalist, OperationLibrary, RacedTrial, hold_contest
from autotile.tuning.options import TuneOptions
from autotile.tuning.problem_queue import Lane
from autotile.workers.child import WorkerPool
from autotile.workers.protocol import Candidate, LibraryCall, RaceTimes, Workload

pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")

from autotile.tuning.cluster import gpus as cluster_gpus
from autotile.tuning.cluster import worker as cluster_worker
from autotile.tuning.cluster.client import AbsentGpuError, Cluster, Sent
from autotile.tuning.cluster.remote_sweep import RemoteSweepWorker, RemoteSweepWorkers
from autotile.tuning.cluster.worker import GpuPlugin, OfferedGpu, Reply, Request


class FakeGpu:
    """A GPU worker that notes what it is to race."""

    seen: list[Any]

    def __init__(self, workload: Workload, deadline_s: float) -> None:
        self.workload = workload

    def contest(
        self,
        entries: Sequence[tuple[Workload, Candidate]],
        libraries: Sequence[LibraryCall],
        rounds: int,
        seed: int,
        *,
        expected_s: float,
    ) -> list[RaceTimes]:
        for workload, candidate in entries:
            cubin = Path(candidate.cubin_path)
            assert hashlib.sha256(cubin.read_bytes()).hexdigest() == cubin.stem
            FakeGpu.seen.append((dict(workload.sizes), workload.device_index, dict(candidate.config)))
        return [RaceTimes((10.0 + number,) * rounds) for number in range(len(entries) + len(libraries))]

    def close(self) -> None:
        FakeGpu.seen.append("closed")


class NearCluster(Cluster):
    """A cluster of one GPU, whose process is this one."""

    def __init__(self, plugin: GpuPlugin) -> None:
        self.plugin = plugin
        self.absent: set[str] = set()

    def look(self) -> list[str]:
        return ["GPU-a"]

    def _submit(self, sent: Sent) -> None:
        reply = self.plugin.handle(decode_json(sent.request, Request), sent.cubins)
        sent.future = Future()
        sent.future.set_result(encode_json(msgspec.to_builtins(reply)))

    def result(self, sent: Sent, limit_s: float = math.inf, *, meanwhile: Any = None) -> Reply:
        if sent.gpu in self.absent:
            raise AbsentGpuError("it is gone")
        return decode_json(sent.future.result(), Reply)


@pytest.fixture
def race(bench: Any, judges: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Race two configurations of the tiny kernel and a library."""
    monkeypatch.setattr(cluster_worker, "Gpu", FakeGpu)
    monkeypatch.setattr(cluster_gpus, "_FIRST_GPU_S", 0.1)
    FakeGpu.seen = []

    def hold(*gpus: str) -> list[RacedTrial]:
        cluster = NearCluster(GpuPlugin(OfferedGpu("GPU-a", bench.device, 3)))
        configs = bench.configs()[:2]
        finalists = [Finalist(bench.kernel, bench.problem(), judges["by_threads"](config)) for config in configs]
        with WorkerPool() as worker_pool:
            return hold_contest(
                finalists,
                [OperationLibrary("cublas", "")],
                bench.problem(),
                device=bench.device,
                settings=read_settings(),
                options=TuneOptions(scheduler="tcp://127.0.0.1:1", workers=1),
                worker_pool=worker_pool,
                lane=Lane(gpus, None, cluster, bench.device),
            )

    return hold


def test_kernels_and_the_library_of_its_machine_are_raced(
    bench: Any, race: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_worker, "cublas_version", lambda: "13.1.0")
    raced = race("GPU-a")
    assert [one.trial.time_us for one in raced] == [10.0, 11.0, 12.0]
    assert [one.version for one in raced] == ["", "", "13.1.0"]
    assert FakeGpu.seen == [*(({"n": 4096}, 3, config) for config in bench.configs()[:2]), "closed"]


def test_a_library_that_the_machine_lacks_is_left_out(race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise ToolchainError("cuBLAS is not installed")

    monkeypatch.setattr(cluster_worker, "cublas_version", absent)
    raced = race("GPU-a")
    assert [one.trial.outcome for one in raced] == [Outcome.OK, Outcome.OK, Outcome.CRASHED]
    assert "does not have it" in raced[2].trial.reason


def test_a_gpu_that_is_not_there_is_an_error(race: Any) -> None:
    with pytest.raises(WorkerError, match="no GPU of the cluster is free"):
        race("GPU-b")


class TestSweep:
    """Sweeps for a family of an operation."""

    @pytest.fixture
    def near(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[NearCluster]:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        monkeypatch.setattr(cluster_worker, "GPU_WORKER", "fake_sweep_worker")
        plugin = GpuPlugin(OfferedGpu("GPU-a", bench.device, 3))
        yield NearCluster(plugin)
        plugin.teardown(None)

    @staticmethod
    def message(folder: Path, *configs: dict[str, int]) -> dict[str, Any]:
        cubin = folder / "one.cubin"
        cubin.write_bytes(b"cubin")
        entries = [{"kernel": 0, "cubin_path": str(cubin), "config": config} for config in configs]
        return {"op": "sweep", "setup": {}, "sizes": [{"n": 4096}], "libraries": [], "entries": entries}

    def test_the_worker_of_its_machine_answers(self, near: NearCluster, tmp_path: Path) -> None:
        workers = RemoteSweepWorkers(Lane(("GPU-a",), None, near), {})
        worker = workers.acquire("of this machine")
        first = worker.request(self.message(tmp_path, {"THREADS": 64, "WORK": 1}), 30.0)
        assert [one["outcome"] for one in first["swept"]] == ["ok"]
        assert near.plugin.handle(Request("describe", __version__, "other"), {}).is_busy
        workers.release(worker)
        assert not near.plugin.handle(Request("describe", __version__, "other"), {}).is_busy

    def test_a_death_is_blamed_on_its_stage(
        self, near: NearCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTOTILE_FAULTY_SWEEP", "1")
        worker = RemoteSweepWorker(Lane(("GPU-a",), None, near), {})
        with pytest.raises(WorkerError, match="exit code 3") as raised:
            worker.request(self.message(tmp_path, {"THREADS": 64, "WORK": 1}, {"THREADS": 64, "WORK": 4}), 30.0)
        assert raised.value.stage == "sweep 1"
        assert len(worker.request(self.message(tmp_path, {"THREADS": 64, "WORK": 1}), 30.0)["swept"]) == 1

    def test_another_machine_goes_on(self, near: NearCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        near.absent.add("GPU-b")
        looks = iter([["GPU-b"], ["GPU-a"]])
        monkeypatch.setattr(near, "look", lambda: next(looks))
        worker = RemoteSweepWorker(Lane(("GPU-a", "GPU-b"), None, near), {})
        assert len(worker.request(self.message(tmp_path, {"THREADS": 64, "WORK": 1}), 30.0)["swept"]) == 1

    def test_its_library_must_be_the_same(
        self, near: NearCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cluster_worker, "cublas_version", lambda: "13.1.0")
        worker = RemoteSweepWorker(Lane(("GPU-a",), None, near), {"cublas": "12.8.4"})
        with pytest.raises(ToolchainError, match=r"has cublas 13\.1\.0, and the session 12\.8\.4"):
            worker.request(self.message(tmp_path), 30.0)


def test_the_worker_process_waits_for_the_next_session(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[WorkerPool] = []

    class OpenGpu(FakeGpu):
        def __init__(self, workload: Workload, deadline_s: float, worker_pool: WorkerPool) -> None:
            pools.append(worker_pool)

        def wait(self) -> None:
            return

    FakeGpu.seen = []
    monkeypatch.setattr(cluster_worker, "Gpu", OpenGpu)
    options = TuneOptions(scheduler="tcp://127.0.0.1:1")
    workload = workload_of(bench.kernel, bench.problem(), read_settings(), options)
    plugin = GpuPlugin(OfferedGpu("GPU-a", bench.device))
    for session in ("first", "second"):
        asked = Request("evaluate", __version__, session, workload=workload)
        plugin.handle(asked, {})
        monkeypatch.setattr(cluster_worker, "_IDLE_S", 60.0 if session == "first" else 0.01)
        plugin.handle(Request("close", __version__, session), {})
    assert pools[0] is pools[1]
    end = time.monotonic() + 10
    while plugin._workers is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert plugin._workers is None
    plugin.teardown(None)
