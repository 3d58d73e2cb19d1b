"""Reuse of workers by later sessions; needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cache_settings import cache_settings
from gpu_calls import evaluate

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob
from autotile.workers import child as child_module
from autotile.workers import gpu as gpus
from autotile.workers.child import Child, WorkerPool
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Workload

MODULE = "bad_worker"
JOB = CompileJob("", "hash", "/nowhere/fill.cu", "compiled", "sm_90", ())
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Every child that was started."""
    monkeypatch.setattr("autotile.workers.child._EXIT_GRACE_S", 0.3)
    children: list[Child] = []

    def start(module: str, place: str = "") -> Child:
        children.append(Child(module, place))
        return children[-1]

    monkeypatch.setattr(child_module, "Child", start)
    monkeypatch.setattr(gpus, "Child", start)
    return children


@pytest.fixture
def worker_pool(started: list[Child]) -> Iterator[WorkerPool]:
    with WorkerPool() as worker_pool:
        yield worker_pool


@pytest.fixture
def gpu(worker_pool: WorkerPool, tmp_path: Path) -> Callable[..., Gpu]:
    def start(*openings: str) -> Gpu:
        workload = Workload("", " ".join(openings), {}, "float32", "cold", str(tmp_path), 0, 0.1)
        return Gpu(workload, 0.5, MODULE, worker_pool=worker_pool)

    return start


def run(gpu: Gpu, deed: str) -> Outcome:
    return evaluate(gpu, Candidate({"DO": deed}, "a.cubin")).outcome


def compile_in(worker_pool: WorkerPool, folder: Path, *deeds: str) -> list[Compiled]:
    """Compile with a pool of one worker, one job after another."""
    pool = CompilePool(cache_settings(folder, 10**6), 1, 0.5, module=MODULE, worker_pool=worker_pool)
    try:
        return [pool.submit(lambda deed=deed: replace(JOB, entry=deed)).result() for deed in deeds]  # type: ignore[misc]
    finally:
        pool.close()


def test_a_released_child_is_acquired_again_and_ended_with_the_pool(started: list[Child]) -> None:
    with WorkerPool() as worker_pool:
        child = worker_pool.acquire(MODULE)
        worker_pool.release(child)
        assert worker_pool.acquire(MODULE) is child
        worker_pool.release(child)
    assert not child.is_running()
    assert len(started) == 1


def test_only_a_child_of_the_same_module_is_acquired(worker_pool: WorkerPool) -> None:
    other = worker_pool.acquire("echo_worker")
    worker_pool.release(other)
    child = worker_pool.acquire(MODULE)
    assert child is not other
    child.kill()


def test_an_idle_child_that_died_is_replaced(worker_pool: WorkerPool) -> None:
    child = worker_pool.acquire(MODULE)
    worker_pool.release(child)
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    fresh = worker_pool.acquire(MODULE)
    assert fresh.pid != child.pid
    fresh.kill()


def test_the_next_session_sets_up_its_problem_in_the_same_worker(
    gpu: Callable[..., Gpu], started: list[Child], tmp_path: Path
) -> None:
    for _ in range(3):
        session = gpu()
        assert run(session, "ok") is Outcome.OK
        session.close()
    assert len(started) == 1
    assert (tmp_path / "openings").stat().st_size == 3


def test_a_reused_worker_that_cannot_set_up_the_next_problem_is_replaced(
    gpu: Callable[..., Gpu], started: list[Child]
) -> None:
    for openings in ((), ("well", "setup_error"), ()):
        session = gpu(*openings)
        assert run(session, "ok") is Outcome.OK
        session.close()
    assert len(started) == 2


def test_a_child_released_to_a_closed_pool_is_ended(started: list[Child]) -> None:
    with WorkerPool() as worker_pool:
        child = worker_pool.acquire(MODULE)
    worker_pool.release(child)
    assert not child.is_running()


@pytest.mark.parametrize("deed", ["fault_in_verify", "spent", "sleep"])
def test_a_worker_that_a_candidate_broke_is_not_kept(gpu: Callable[..., Gpu], started: list[Child], deed: str) -> None:
    first = gpu()
    run(first, deed)
    first.close()
    second = gpu()
    assert run(second, "ok") is Outcome.OK
    second.close()
    assert len(started) == 2


def test_a_worker_that_is_still_setting_up_is_not_kept(gpu: Callable[..., Gpu], started: list[Child]) -> None:
    gpu("sleep").close()
    second = gpu()
    second.wait()
    second.close()
    assert len(started) == 2


def test_compile_workers_are_kept_but_for_those_that_died(
    worker_pool: WorkerPool, started: list[Child], tmp_path: Path
) -> None:
    for _ in range(3):
        assert compile_in(worker_pool, tmp_path, "compiled", "compiled")[1].outcome is Outcome.OK
    assert len(started) == 1
    outcomes = [compiled.outcome for compiled in compile_in(worker_pool, tmp_path, "exit", "compiled")]
    assert outcomes == [Outcome.COMPILE_FAILED, Outcome.OK]
    assert len(started) == 2


def test_a_worker_that_still_compiles_is_killed(worker_pool: WorkerPool, started: list[Child], tmp_path: Path) -> None:
    pool = CompilePool(cache_settings(tmp_path, 10**6), 1, 60.0, module=MODULE, worker_pool=worker_pool)
    future = pool.submit(lambda: replace(JOB, entry="sleep"))
    while not pool._compiling:
        assert not future.done()
    pool.close()
    assert future.result().outcome is Outcome.NOT_COMPILED
    assert not started[0].is_running()
    assert compile_in(worker_pool, tmp_path, "compiled")[0].outcome is Outcome.OK
    assert len(started) == 2
