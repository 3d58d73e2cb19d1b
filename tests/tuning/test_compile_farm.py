"""Compilation on other machines of a cluster: a farm of two cores, which NVRTC compiles on without a GPU."""

import json
import os
import signal
import threading
import time
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cache_settings import SLOW, cache_settings
from cluster_kit import ClusterKit, children
from processes import wait_until

from autotile.core.model import Outcome, Resources
from autotile.cuda.compiler import CompileJob
from autotile.errors import DataError, WorkerError
from autotile.tuning.cluster import compilers as cluster_compilers
from autotile.tuning.cluster.compilers import ClusterCompilers
from autotile.tuning.cluster.requests import Cluster
from autotile.workers.compile_pool import Compiled, CompilePool

SOURCE = '#include "value.h"\nextern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE + OTHER; }'
JOB = CompileJob(SOURCE.partition("\n")[2].replace(" + OTHER", ""), "hash", "/nowhere/x.cu", "fill", "sm_90", ())
COMPILE_WORKER = b"autotile.workers.compile_pool"


def job(value: int, **changes: Any) -> CompileJob:
    return replace(JOB, options=(f"-DVALUE={value}",), **changes)


def slow_job(depth: int, name: str = "") -> CompileJob:
    return replace(JOB, source=f"// {name}\n{SLOW}", source_hash=f"slow {name}", options=(f"-DDEPTH={depth}",))


@pytest.fixture(scope="module")
def kit(cluster):
    pytest.importorskip("cuda.bindings", reason="NVRTC is not installed")
    cluster.farm = cluster.worker("--compile", "2")
    return cluster


@pytest.fixture
def farm(kit):
    with closing(Cluster(kit.scheduler, insecure=False)) as cluster:
        wait_until(lambda: cluster.compilers.slots == 2)
        yield cluster.compilers


@pytest.fixture
def busy_pool(farm, tmp_path, monkeypatch):
    """A pool whose own core is busy, so that everything goes to the farm."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "workers"), prepend=":")
    with closing(CompilePool(cache_settings(tmp_path / "cache"), 1, 60.0, module="bad_worker", farm=farm)) as pool:
        pool.submit(replace(JOB, entry="sleep"))
        yield pool


def compile_workers(kit: ClusterKit) -> list[int]:
    below = children(kit.farm.pid)
    return [pid for pid in below if COMPILE_WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_cubins_come_back_into_the_own_cache(busy_pool, tmp_path):
    futures = [busy_pool.submit(job(value)) for value in range(6)]
    compiled = [future.result() for future in futures]
    with closing(CompilePool(cache_settings(tmp_path / "other"), 1, 60.0)) as local:
        expected = local.submit(job(0)).result()
    cubins = [one.cubin for one in compiled if one.cubin is not None]
    assert len({one.cubin_hash for one in cubins}) == 6
    assert all(one.path.is_relative_to(tmp_path / "cache") and one.path.is_file() for one in cubins)
    assert cubins[0].cubin_hash == expected.cubin.cubin_hash
    assert cubins[0].functions == expected.cubin.functions
    again = busy_pool.submit(job(0))
    assert again.done()
    assert again.result().cubin == cubins[0]


def test_headers_are_sent_along(busy_pool, tmp_path):
    found = []
    for other in (1, 2):
        header = tmp_path / f"headers{other}" / "value.h"
        header.parent.mkdir()
        header.write_text(f"#define OTHER {other}\n")
        place = str(header.parent / "kernel.cu")
        sent = {"source": SOURCE, "source_hash": f"with header {other}", "template_path": place}
        found.append(busy_pool.submit(job(0, **sent)).result())
        header.unlink()
        found.append(busy_pool.submit(job(1, **sent)).result())
    assert [one.outcome for one in found] == [Outcome.OK] * 4, [one.reason for one in found]
    assert len({one.cubin.cubin_hash for one in found}) == 3  # 0 + 2 is 1 + 1


def test_failures_are_those_of_one_candidate(busy_pool, kit):
    wrong = busy_pool.submit(replace(JOB, options=("-DVALUE=oops",))).result()
    assert wrong.outcome is Outcome.COMPILE_FAILED
    assert "oops" in wrong.reason
    late = busy_pool.submit(slow_job(16, "late"), 1.0).result()
    assert (late.outcome, late.reason) == (Outcome.TIMED_OUT, "the compiler was stopped after 1 s")
    crashed = busy_pool.submit(slow_job(16, "crashed"))
    wait_until(lambda: bool(compile_workers(kit)))
    while not crashed.done():  # until the signal meets the one that compiles
        for pid in compile_workers(kit):
            os.kill(pid, signal.SIGSEGV)
        time.sleep(0.1)
    assert crashed.result().outcome is Outcome.COMPILE_FAILED
    assert "SIGSEGV" in crashed.result().reason
    assert busy_pool.submit(job(101)).result().outcome is Outcome.OK


def test_a_machine_that_dies_costs_no_candidate(busy_pool, kit, monkeypatch):
    """Its process of Dask is replaced, and compiles again."""
    monkeypatch.setattr(cluster_compilers, "_MIN_PATIENCE_S", 60.0)
    futures = [busy_pool.submit(slow_job(11, f"killed {n}")) for n in range(2)]
    wait_until(lambda: len(compile_workers(kit)) == 2)
    for pid in children(kit.farm.pid):
        os.kill(pid, signal.SIGKILL)
    assert [future.result(60).outcome for future in futures] == [Outcome.OK] * 2


def test_what_the_farm_has_not_done_is_compiled_here(farm, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_compilers, "_MIN_PATIENCE_S", 0.0)
    monkeypatch.setattr(cluster_compilers, "_CHECK_S", 0.05)
    monkeypatch.setattr(farm, "submit", submit := Mock(wraps=farm.submit))
    with closing(CompilePool(cache_settings(tmp_path / "cache"), 1, 60.0, farm=farm)) as pool:
        futures = [pool.submit(slow_job(10, f"given back {n}")) for n in range(3)]
        assert [future.result(60).outcome for future in futures] == [Outcome.OK] * 3
    assert submit.called


def test_a_session_that_ends_waits_for_nothing(busy_pool, kit):
    futures = [busy_pool.submit(slow_job(16, f"left {n}"), 5.0) for n in range(4)]
    busy_pool.close()
    assert all(future.done() for future in futures)
    assert {future.result().outcome for future in futures if not future.cancelled()} == {Outcome.NOT_COMPILED}
    for pid in compile_workers(kit):
        os.kill(pid, signal.SIGSEGV)  # which would compile on until their deadline


def test_another_toolchain_is_not_used(kit, monkeypatch):
    monkeypatch.setattr(cluster_compilers, "toolchain", lambda: "autotile 0.0 and NVRTC 1.0")
    with closing(Cluster(kit.scheduler, insecure=False)) as cluster:
        farm = cluster.compilers
        wait_until(lambda: bool(farm.notices))
        assert (farm.slots, farm.room) == (0, 0)
        (notice,) = farm.notices
    assert notice.startswith("2 cores of the scheduler compile with autotile")
    assert notice.endswith("and this session with autotile 0.0 and NVRTC 1.0: they are not used")


def test_a_session_uses_simulated_gpus_and_the_farm(bench, kit, farm, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_compilers, "_MIN_PATIENCE_S", 60.0)
    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "cache"))
    recording = bench.record()
    kit.simulated(recording, 0)
    before = set(kit.cache.glob("cubins/*.cubin"))
    result = bench.tune(recording, sampler="brute-force", scheduler=kit.scheduler)
    assert len(set(kit.cache.glob("cubins/*.cubin"))) > len(before)
    assert result.winner.config == {"THREADS": 256, "WORK": 4}
    assert sum(result.outcomes.values()) == len(bench.configs())


def test_without_a_connection_and_what_other_machines_lack_is_compiled_here(tmp_path, monkeypatch):
    lost: Any = Mock()
    lost.offers.return_value = [{cluster_compilers.COMPILERS + cluster_compilers.toolchain(): 4}]
    lost.submit.side_effect = WorkerError("the scheduler is lost")
    with (
        closing(ClusterCompilers(lost)) as farm,
        closing(CompilePool(cache_settings(tmp_path / "cache"), 1, 60.0, farm=farm)) as pool,
    ):
        futures = [pool.submit(job(value)) for value in range(3)]
        assert {future.result().outcome for future in futures} == {Outcome.OK}
        # many that are given back at once
        compiled, went_on = Compiled(None), threading.Event()
        monkeypatch.setattr(CompilePool, "_attempt", lambda *_: went_on.wait(60) and compiled)
        pool._farm = None
        waiting = [pool.submit(job(value)) for value in range(10, 510)]
        pool._farm = farm  # its machines join when all of them wait
        waiting.append(pool.submit(job(510)))
        went_on.set()
        assert not wait(waiting, 30).not_done
    assert farm.room == 4
    assert farm.accepts(JOB)
    assert not farm.accepts(replace(JOB, compiler="nvcc"))
    assert not farm.accepts(replace(JOB, files=(("controls.txt", "00"),)))


FUNCTION = {"symbol": "f", "resources": dict.fromkeys(Resources.__struct_fields__, 8)}
FUNCTIONS = ({}, {"f": {"symbol": "f"}}, {"f": FUNCTION})
CUBINS = [{"path": "", "cubin_hash": "00", "functions": one} for one in FUNCTIONS]
DAMAGED = [json.dumps([{"cubin": one}, ""]).encode() + b"\ncubin" for one in CUBINS]
NO_RESULT = [b"{}\n", b'[{"cubin": null}, ""]\ncubin', b'[{"cubin": null, "outcome": "splendid"}, ""]\n']


@pytest.mark.parametrize("answer", [None, b"", *NO_RESULT, *DAMAGED])
def test_damaged_answers_are_refused(answer):
    with pytest.raises(DataError):
        cluster_compilers._read(answer)
