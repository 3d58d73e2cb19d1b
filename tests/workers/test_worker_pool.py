"""Reuse of workers by later sessions; needs no GPU."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cache_settings import cache_settings
from gpu_calls import evaluate

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob
from autotile.errors import WorkerError
from autotile.workers import child as child_module
from autotile.workers.child import EARLY, Child, WorkerPool, is_running, start_child, start_early
from autotile.workers.compile_pool import CompilePool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Workload

MODULE = "bad_worker"
JOB = CompileJob("", "hash", "/nowhere/fill.cu", "compiled", "sm_90", ())
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr("autotile.workers.child._EXIT_GRACE_S", 0.3)
    children: list[Child] = []

    def start(module: str, place: str = "") -> Child:
        children.append(Child(module, place))
        return children[-1]

    monkeypatch.setattr(child_module, "Child", start)
    return children


@pytest.fixture
def worker_pool(started):
    with WorkerPool() as worker_pool:
        yield worker_pool


@pytest.fixture
def gpu(worker_pool, tmp_path):
    def start(*openings: str) -> Gpu:
        workload = Workload("", " ".join(openings), {}, "float32", "cold", str(tmp_path), 0, 0.1)
        return Gpu(workload, 0.5, MODULE, worker_pool=worker_pool)

    return start


def session(gpu: Gpu, deed: str = "ok") -> Outcome:
    with closing(gpu):
        return evaluate(gpu, Candidate({"DO": deed}, "a.cubin")).outcome


def compile_in(worker_pool: WorkerPool, folder: Path, *deeds: str) -> list[Outcome]:
    """Compile with a pool of one worker, one job after another."""
    settings = cache_settings(folder, 10**6)
    with closing(CompilePool(settings, 1, 0.5, module=MODULE, worker_pool=worker_pool)) as pool:
        return [pool.submit(replace(JOB, entry=deed)).result().outcome for deed in deeds]


def test_a_released_child_is_acquired_again_and_ended_with_the_pool(started):
    with WorkerPool() as worker_pool:
        child, late = (worker_pool.acquire_idle(MODULE) or start_child(MODULE) for _ in range(2))
        worker_pool.release(child)
        assert worker_pool.acquire_idle(MODULE) is child
        worker_pool.release(child)
    worker_pool.release(late)  # to a closed pool
    assert (is_running(child.pid), is_running(late.pid), len(started)) == (False, False, 2)


def test_a_child_that_was_started_early_is_the_first_that_is_asked_for(started):
    start_early(MODULE, "0")
    with closing(start_child(MODULE, "1")) as elsewhere, closing(start_child(MODULE, "0")) as early:
        assert started == [early, elsewhere]
    with closing(start_child(MODULE, "0")) as next_one:
        assert next_one is not early
    start_early(MODULE)
    EARLY.kill_idle()
    assert not is_running(started[-1].pid)


def test_an_early_start_that_fails_is_left_to_the_session(monkeypatch):
    monkeypatch.setattr("autotile.workers.child.sys.executable", "/nowhere/python")
    start_early(MODULE)
    with pytest.raises(WorkerError, match="cannot start bad_worker: No such file"):
        start_child(MODULE)


def test_only_a_child_of_the_same_module_that_lives_is_acquired(worker_pool):
    other = start_child("echo_worker")
    worker_pool.release(other)
    child = worker_pool.acquire_idle(MODULE) or start_child(MODULE)
    assert child is not other
    worker_pool.release(child)
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    fresh = worker_pool.acquire_idle(MODULE) or start_child(MODULE)
    assert fresh.pid != child.pid
    fresh.kill()


def test_the_next_session_sets_up_its_problem_in_the_same_worker_which_is_replaced_if_it_cannot(gpu, started, tmp_path):
    assert [session(gpu(*openings)) for openings in ((), ("well", "setup_error"), (), ())] == [Outcome.OK] * 4
    assert (len(started), (tmp_path / "openings").stat().st_size) == (2, 5)


def test_a_worker_that_is_still_setting_up_is_not_kept(gpu, started):
    gpu("sleep").close()
    with closing(gpu()) as second:
        second.wait()
    assert len(started) == 2


def test_workers_that_still_compile_are_killed_and_what_waits_is_cancelled(worker_pool, started, tmp_path):
    pool = CompilePool(cache_settings(tmp_path, 10**6), 2, 60.0, module=MODULE, worker_pool=worker_pool)
    *running, waiting = (pool.submit(replace(JOB, entry="sleep")) for _ in range(3))
    while len(pool._compiling) < 2:
        assert not any(future.done() for future in running)
    pool.close()
    assert waiting.cancelled()
    assert [future.result(0).outcome for future in running] == [Outcome.NOT_COMPILED] * 2
    assert not any(is_running(child.pid) for child in started)
    assert compile_in(worker_pool, tmp_path, "compiled") == [Outcome.OK]
    assert len(started) == 3
