"""A process may fork while another of its threads reads or writes a database."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotile.core.model import Problem
from autotile.database.database import Database
from autotile.database.fast_access import FORK_LOCK, Miss, add_misses_fast, read_rules_fast, read_winners_fast
from autotile.serving.dispatcher import Dispatcher

_FORKS = 12
_CHILD_TIMEOUT_S = 20.0

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
MISS = Miss(Problem("scale", {"n": 4096}, "float32"), "NVIDIA H200", "nearest", 1)


def _read_and_write(path: Path) -> bool:
    winners = read_winners_fast(str(path), "scale", "float32")
    rules = read_rules_fast(str(path), "scale", "float32")
    return winners == [] and rules == [] and add_misses_fast(path, [MISS], timeout_s=10.0)


def _look_up(path: Path) -> bool:
    kernel = Dispatcher(database=path).get_best_kernel("matmul_naive", M=64, N=64, K=64, device="a100")
    return not kernel.choice.unread


def _look_up_with_an_sql_engine(path: Path) -> bool:
    kernel = Dispatcher(database=f"sqlite:///{path}").get_best_kernel("matmul_naive", M=64, N=64, K=64, device="a100")
    return not kernel.choice.unread


def _fork(work: Callable[[Path], bool], path: Path) -> int:
    child = os.fork()
    if child == 0:  # nothing of the tests may run on
        try:
            os._exit(0 if work(path) else 1)
        finally:
            os._exit(2)
    return child


def _exit_code(child: int) -> int | None:
    """Return the exit code of a child; None if it did not end in time and was killed."""
    deadline = time.monotonic() + _CHILD_TIMEOUT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Database.open(tmp_path / "tuning.db").close()
    return tmp_path / "tuning.db"


@pytest.mark.parametrize("work", [_read_and_write, _look_up, _look_up_with_an_sql_engine])
def test_children_work_that_were_forked_during_look_ups(work: Callable[[Path], bool], path: Path) -> None:
    stop = threading.Event()
    done = [work(path)]

    def repeat() -> None:
        while not stop.is_set():
            done.append(work(path))

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        codes = []
        while len(codes) < _FORKS and codes == [0] * len(codes):
            codes.append(_exit_code(_fork(work, path)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * _FORKS
    assert len(done) > 1
    assert all(done)


def test_a_fork_waits_for_the_database(path: Path) -> None:
    with FORK_LOCK:  # by the thread that forks
        assert _exit_code(_fork(_read_and_write, path)) == 0
    held, forked = threading.Event(), threading.Event()
    children: list[int] = []

    def fork() -> None:
        held.wait()
        children.append(_fork(_read_and_write, path))
        forked.set()

    thread = threading.Thread(target=fork)
    thread.start()
    with FORK_LOCK:
        held.set()
        assert not forked.wait(0.2)
    thread.join()
    assert _exit_code(children[0]) == 0
