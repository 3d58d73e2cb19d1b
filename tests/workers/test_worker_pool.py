"""Workers that outlive a session; needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob
from autotile.workers import child as shelves
from autotile.workers import gpu as gpus
from autotile.workers.child import Child, Shelf
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.gpu import Gpu
from autotile.workers.protocol import Candidate, Workload

MODULE = "bad_worker"
JOB = CompileJob("", "hash", "/nowhere/fill.cu", "compiled", "sm_90", ())
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Every child that had to be started."""
    monkeypatch.setattr("autotile.workers.child._GRACE_S", 0.3)
    children: list[Child] = []

    def start(module: str) -> Child:
        children.append(Child(module))
        return children[-1]

    monkeypatch.setattr(shelves, "Child", start)
    monkeypatch.setattr(gpus, "Child", start)
    return children


@pytest.fixture
def shelf(started: list[Child]) -> Iterator[Shelf]:
    with Shelf() as shelf:
        yield shelf


@pytest.fixture
def gpu(shelf: Shelf, tmp_path: Path) -> Callable[..., Gpu]:
    def start(*openings: str) -> Gpu:
        workload = Workload("", " ".join(openings), {}, "float32", "cold", str(tmp_path), 0, 0.1)
        return Gpu(workload, 0.5, MODULE, shelf=shelf)

    return start


def evaluate(gpu: Gpu, deed: str) -> Outcome:
    return gpu.evaluate(Candidate({"DO": deed}, "a.cubin"), None).outcome


def compile_in(shelf: Shelf, folder: Path, *deeds: str) -> list[Compiled]:
    """What a pool of one worker makes of its jobs, one after another."""
    pool = CompilePool(folder, 10**6, 1, 0.5, module=MODULE, shelf=shelf)
    try:
        return [pool.submit(lambda deed=deed: replace(JOB, entry=deed)).result() for deed in deeds]  # type: ignore[misc]
    finally:
        pool.close()


def test_what_was_put_is_taken_again_and_ended_at_last(started: list[Child]) -> None:
    with Shelf() as shelf:
        child = shelf.take(MODULE)
        shelf.put(child)
        assert shelf.take(MODULE) is child
        shelf.put(child)
    assert not child.is_running()
    assert len(started) == 1


def test_only_a_child_of_the_same_module_is_taken(shelf: Shelf) -> None:
    other = shelf.take("echo_worker")
    shelf.put(other)
    child = shelf.take(MODULE)
    assert child is not other
    child.kill()


def test_a_child_that_died_on_the_shelf_is_replaced(shelf: Shelf) -> None:
    child = shelf.take(MODULE)
    shelf.put(child)
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    fresh = shelf.take(MODULE)
    assert fresh.pid != child.pid
    fresh.kill()


def test_the_next_session_lays_its_problem_out_in_the_same_worker(
    gpu: Callable[..., Gpu], started: list[Child], tmp_path: Path
) -> None:
    for _ in range(3):
        session = gpu()
        assert evaluate(session, "ok") is Outcome.OK
        session.close()
    assert len(started) == 1
    assert (tmp_path / "openings").stat().st_size == 3


def test_a_kept_worker_that_cannot_lay_the_next_problem_out_is_replaced(
    gpu: Callable[..., Gpu], started: list[Child]
) -> None:
    for openings in ((), ("well", "setup_error"), ()):
        session = gpu(*openings)
        assert evaluate(session, "ok") is Outcome.OK
        session.close()
    assert len(started) == 2


def test_what_is_put_on_a_closed_shelf_is_ended(started: list[Child]) -> None:
    with Shelf() as shelf:
        child = shelf.take(MODULE)
    shelf.put(child)
    assert not child.is_running()


@pytest.mark.parametrize("deed", ["die_in_verify", "spent", "sleep"])
def test_a_worker_that_a_candidate_broke_is_not_kept(gpu: Callable[..., Gpu], started: list[Child], deed: str) -> None:
    first = gpu()
    evaluate(first, deed)
    first.close()
    second = gpu()
    assert evaluate(second, "ok") is Outcome.OK
    second.close()
    assert len(started) == 2


def test_a_worker_that_is_still_laying_out_is_not_kept(gpu: Callable[..., Gpu], started: list[Child]) -> None:
    gpu("sleep").close()
    second = gpu()
    second.wait()
    second.close()
    assert len(started) == 2


def test_compile_workers_are_kept_but_for_those_that_died(shelf: Shelf, started: list[Child], tmp_path: Path) -> None:
    for _ in range(3):
        assert compile_in(shelf, tmp_path, "compiled", "compiled")[1].outcome is Outcome.OK
    assert len(started) == 1
    outcomes = [compiled.outcome for compiled in compile_in(shelf, tmp_path, "exit", "compiled")]
    assert outcomes == [Outcome.COMPILE_FAILED, Outcome.OK]
    assert len(started) == 2


def test_a_worker_that_still_compiles_is_killed(shelf: Shelf, started: list[Child], tmp_path: Path) -> None:
    pool = CompilePool(tmp_path, 10**6, 1, 60.0, module=MODULE, shelf=shelf)
    future = pool.submit(lambda: replace(JOB, entry="sleep"))
    while not pool._asked:
        assert not future.done()
    pool.close()
    assert future.result().outcome is Outcome.COMPILE_FAILED
    assert not started[0].is_running()
    assert compile_in(shelf, tmp_path, "compiled")[0].outcome is Outcome.OK
    assert len(started) == 2
