"""A process may fork while another of its threads reads or writes a database."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import autotile
from autotile.core.forks import FORK_LOCK, fork_guard
from autotile.core.model import Problem
from autotile.database.database import Database, open_existing
from autotile.database.engine import is_healthy, open_connections, set_aside
from autotile.database.paths import file_identity
from autotile.database.winners import ADD_MISSES, RULES, WINNERS, miss_row, read_file, write_file
from autotile.errors import DatabaseError
from autotile.serving.dispatcher import Dispatcher
from autotile.tuning.options import TuneOptions

_FORKS = 12
_CHILD_TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def miss_of(n: int) -> dict[str, Any]:
    return miss_row(Problem("scale", {"n": n}, "float32"), "NVIDIA H200", "nearest", 1)


def _read_and_write(path: Path) -> bool:
    winners = read_file(str(path), WINNERS, kernel="scale", dtype="float32")
    rules = read_file(str(path), RULES, kernel="scale", dtype="float32")
    return winners == [] and rules == [] and write_file(path, ADD_MISSES, [miss_of(4096)], timeout_s=10.0)


def _look_up(path: Path) -> bool:
    kernel = Dispatcher(database=path).get_best_kernel("matmul_naive", M=64, N=64, K=64, device="a100")
    return not kernel.choice.unread


def _fork(work: Callable[[Path], bool], path: Path) -> BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not work(path)))
    child.start()
    return child


def _exit_code(child: BaseProcess) -> int | None:
    """Return the exit code of a child; None if it did not end in time and was killed."""
    child.join(_CHILD_TIMEOUT_S)
    code = child.exitcode
    child.kill()
    child.join()
    return code


@contextmanager
def repeating(*works: Callable[[], object]) -> Iterator[None]:
    """Do work over and over during the ``with`` block, each in a thread of its own; errors are raised at its end."""
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(len(works)) as threads:
        repeated = [threads.submit(repeat, work) for work in works]
        try:
            yield
        finally:
            stop.set()
        assert [one.result() for one in repeated] == [None] * len(works)


@pytest.fixture
def path(tuning_db):
    return tuning_db


@pytest.mark.parametrize("work", [_read_and_write, _look_up])
def test_children_work_that_were_forked_during_look_ups(work, path):
    done, codes = [work(path)], list[int | None]()
    with repeating(*[lambda: done.append(work(path))] * 2):
        while len(codes) < _FORKS and codes == [0] * len(codes):
            codes.append(_exit_code(_fork(work, path)))
    assert codes == [0] * _FORKS
    assert len(done) > 1
    assert all(done)


def test_a_fork_waits_for_the_database(path):
    with FORK_LOCK:  # by the thread that forks
        assert _exit_code(_fork(_read_and_write, path)) == 0
    held, forked = threading.Event(), threading.Event()
    children: list[BaseProcess] = []

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


def _add_miss(path: Path, n: int) -> None:
    with Database.open(path) as database:
        database.add_misses([miss_of(n)])


def _misses(path: Path) -> set[int]:
    with open_existing(path) as database:
        return {one.problem.sizes["n"] for one in database.misses()}


def _is_sound(path: Path) -> bool:
    return is_healthy(path) and not list(path.parent.glob("*.corrupt-*"))


def test_a_child_inherits_no_connection(path):
    with Database.open(path) as database:
        assert database.studies() == []
        assert open_connections(path) == 1

        def work(path: Path) -> bool:
            none = open_connections(path) == 0
            database.add_misses([miss_of(8)])
            return none and database.studies() == [] and len(database.misses()) == 1

        assert _exit_code(_fork(work, path)) == 0
        _add_miss(path, 7)
        assert {one.problem.sizes["n"] for one in database.misses()} == {7, 8}
    assert _is_sound(path)


def test_a_fork_waits_for_the_end_of_a_transaction(path):
    begun = threading.Event()

    def write() -> None:
        with Database.open(path) as database, database.writing() as connection:
            connection.execute(text(ADD_MISSES), miss_of(1))
            begun.set()
            while not fork_guard._is_forking:
                time.sleep(0.001)
            connection.execute(text(ADD_MISSES), miss_of(2))

    def work(path: Path) -> bool:
        seen = _misses(path)  # all or nothing of the transaction, which has ended
        _add_miss(path, 3)
        return seen == {1, 2}

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    assert _exit_code(_fork(work, path)) == 0
    thread.join()
    assert _misses(path) == {1, 2, 3}
    assert _is_sound(path)


def test_a_session_goes_on_after_forks_and_its_children_tune_and_list(tmp_path, scale_toml, recording):
    """Threads that tune and write, a main thread that forks, and children that tune and list the same database."""
    options = TuneOptions(replay=recording, workers=1, database=str(tmp_path / "shared.db"), fresh=True)
    path, results, numbers = tmp_path / "shared.db", list[int](), iter(range(10**6))
    tune = partial(autotile.tune, str(scale_toml), n=1048576, options=options, progress=False)

    def session() -> None:
        results.append(sum(tune().outcomes.values()))

    def work(path: Path) -> bool:
        sizes = {one.key.problem.sizes["n"] for one in autotile.list(database=str(path)).studies}
        return sizes == {1048576} and sum(tune().outcomes.values()) == 12

    session()
    with repeating(session, lambda: _add_miss(path, next(numbers))):
        codes = [_exit_code(_fork(work, path)) for _ in range(6)]
    assert codes == [0] * 6
    assert set(results) == {12}
    assert _is_sound(path)
    with Database.open(path) as database:
        (study,) = database.studies()
        runs = database.runs(study.study_id)
        assert len(runs) == len(results) + 6
        assert all(run.ended_at is not None for run in runs)
        assert len(database.trials(study.study_id, phase="search")) == 12 * len(runs)
    assert _misses(path) == set(range(next(numbers)))


def test_a_database_is_not_renamed_if_it_is_healthy_or_another_process_uses_it(path):
    _add_miss(path, 5)
    seen = file_identity(path)
    assert seen is not None
    assert set_aside(path, seen) == ()
    assert _is_sound(path)
    ready, stop = os.pipe(), os.pipe()

    def use(path: Path) -> bool:
        with Database.open(path) as database:
            database.misses()
            os.write(ready[1], b"x")
            return os.read(stop[0], 1) == b"x"

    child = _fork(use, path)
    os.read(ready[0], 1)
    with path.open("r+b") as file:  # beyond the header, so that it is a database still
        file.seek(1024)
        file.write(b"\xff" * (path.stat().st_size - 1024))
    try:
        with pytest.raises(DatabaseError, match=rf"is damaged, and process {child.pid} uses it"):
            Database.open(path)
        assert not list(path.parent.glob("*.corrupt-*"))
    finally:
        os.write(stop[1], b"x")
        assert _exit_code(child) == 0
    with Database.open(path) as database:
        assert "was damaged: it is kept as" in database.notices[0]
    assert len(list(path.parent.glob("*.corrupt-*[0-9]"))) == 1
