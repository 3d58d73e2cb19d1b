"""Counting the calls of fallbacks: when counts are written, by which process, and to databases in any state."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotile.database.database import Database
from autotile.serving import refresh as miss_counter
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.settings import child_environment, read_settings

BEST = {"THREADS": 256, "WORK": 4}

PROCESSES = """
import multiprocessing, os, signal, sys
from dataclasses import replace
from types import SimpleNamespace
from autotile.core.device import device_profile
from autotile.serving import dispatcher

dispatcher.default_dispatcher.current_device = lambda: 0
dispatcher.live_device = lambda _: replace(device_profile("h200"), source="cuda")

def served(n, calls):
    kernel = dispatcher.get_best_kernel(sys.argv[1], n=n)
    kernel._launcher = SimpleNamespace(launch_fast=lambda arrays: arrays)
    for _ in range(calls):
        kernel(None, None)
    return kernel

def start(method):
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=served, args=(500, calls)) for calls in (10, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

def fork():
    number = os.fork()
    if number == 0:
        served(500, 10)
        sys.exit()
    os.waitpid(number, 0)

if __name__ == "__main__":
    how, alone = sys.argv[2], sys.argv[3] == "alone"
    if not alone:
        kernel = served(8192, 3)
    if how == "os.fork":
        fork()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        start(how)
    if not alone:
        for _ in range(4):
            kernel(None, None)
"""


def counted() -> dict[int, int]:
    with Database.open(read_settings().database) as database:
        return {miss.problem.sizes["n"]: miss.count for miss in database.misses()}


def call(kernel: BoundKernel, times: int = 1) -> None:
    """Call a kernel as a launch on the fast path does, without a GPU."""
    kernel._launcher = SimpleNamespace(launch_fast=lambda arrays: arrays)  # type: ignore[assignment]
    for _ in range(times):
        kernel(None, None)


class Clock:
    """A clock that is set by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(miss_counter, "time", clock)
    return clock


@pytest.fixture
def slow_writes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that take a second."""
    write = miss_counter._write

    def slowly(*arguments: Any) -> bool:
        clock.now_s += 1.0
        return write(*arguments)

    monkeypatch.setattr(miss_counter, "_write", slowly)


@pytest.mark.usefixtures("live_gpu")
class TestWhenCountsAreWritten:
    def test_serving_writes_nothing(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        monkeypatch.setattr(miss_counter, "_write", lambda *_: pytest.fail("written while serving"))
        assert store.ask(8192, device=None).tier == "nearest"

    def test_a_kernel_that_was_never_called_counts_as_one_call(self, store: Any) -> None:
        store.put(4096, BEST)
        called, never_called = store.ask(8192, device=None), store.ask(500, device=None)
        call(called, 7)
        default_dispatcher.misses.flush()
        assert counted() == {8192: 7, 500: 1}
        call(never_called, 1)
        call(called, 2)
        for _ in range(2):
            default_dispatcher.misses.flush()
        assert counted() == {8192: 9, 500: 1}

    @pytest.mark.usefixtures("clock")
    def test_the_first_call_and_each_doubling(self, store: Any) -> None:
        """If writing takes no time; a killed process then loses less than half of its calls."""
        store.put(4096, BEST)
        kernel = store.ask(8192, device=None)
        for calls in range(1, 70):
            call(kernel)
            assert counted() == {8192: 2 ** (calls.bit_length() - 1)}

    @pytest.mark.usefixtures("slow_writes")
    def test_writing_takes_one_percent_of_the_time(self, store: Any, clock: Clock) -> None:
        store.put(4096, BEST)
        kernel = store.ask(8192, device=None)
        call(kernel, 1000)
        assert counted() == {8192: 1}
        clock.now_s += 99.0
        call(kernel, 1000)
        assert counted() == {8192: 1}
        clock.now_s += 2.0
        call(kernel, 48)
        assert counted() == {8192: 2048}

    @pytest.mark.usefixtures("slow_writes")
    def test_first_calls_are_written_at_any_time(self, store: Any) -> None:
        store.put(4096, BEST)
        for n in (8192, 500, 700):
            call(store.ask(n, device=None), 3)
        assert counted() == {8192: 1, 500: 1, 700: 1}

    @pytest.mark.usefixtures("slow_writes")
    def test_a_write_includes_the_other_kernels(self, store: Any, clock: Clock) -> None:
        """Otherwise, of several kernels that are called alternately, always the same one would be written."""
        store.put(4096, BEST)
        kernels = [store.ask(n, device=None) for n in (8192, 500)]
        for kernel in kernels:
            call(kernel, 100)
        clock.now_s += 200.0
        call(kernels[0], 28)
        assert counted() == {8192: 128, 500: 100}

    def test_bound_launches_are_counted(self, store: Any) -> None:
        store.put(4096, BEST)
        kernel = store.ask(8192, device=None)
        launched: list[None] = []
        kernel._launcher = SimpleNamespace(bind=lambda *_: lambda: launched.append(None))
        launch = kernel.bind(None, None)
        launch()
        assert counted() == {8192: 1}
        launch()
        default_dispatcher.misses.flush()
        assert counted() == {8192: 2}
        assert len(launched) == 2


@pytest.mark.usefixtures("live_gpu")
class TestDatabases:
    def test_none_is_made(self, store: Any) -> None:
        call(store.ask(8192, device=None))
        default_dispatcher.misses.flush()
        assert not Path(read_settings().database).exists()

    def test_a_url_of_a_file(self, store: Any) -> None:
        store.put(4096, BEST)
        call(store.ask(8192, device=None, database=f"sqlite:///{read_settings().database}"))
        assert counted() == {8192: 1}

    def test_a_server_is_waited_for_a_few_seconds_at_most(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[tuple[str, float]] = []

        def note(location: str, *, server_timeout_s: float) -> None:
            opened.append((location, server_timeout_s))

        kernel = store.ask(8192, device=None)
        monkeypatch.setattr(Database, "open_readonly", note)
        default_dispatcher.misses.watch("postgresql://me:secret@far.away/db", kernel)
        call(kernel)
        assert opened == [("postgresql+psycopg://me:secret@far.away/db", 2.0)]

    def test_no_sql_engine_is_needed(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "autotile.database.database", None)
            call(store.ask(8192, device=None))
        assert counted() == {8192: 1}

    def test_counts_that_cannot_be_written_are_kept(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        kernel = store.ask(8192, device=None)
        with monkeypatch.context() as patch:
            patch.setattr(miss_counter, "write_file", lambda *_, **__: False)
            call(kernel, 5)
            default_dispatcher.misses.flush()
        assert counted() == {}
        default_dispatcher.misses.flush()
        assert counted() == {8192: 5}

    def test_no_error_reaches_the_caller(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of order")

        store.put(4096, BEST)
        kernel = store.ask(8192, device=None)
        monkeypatch.setattr(miss_counter, "write_file", fail)
        call(kernel, 5)
        default_dispatcher.misses.flush()
        assert kernel.calls == 5

    def test_a_locked_one_delays_one_call_for_a_moment(self, store: Any) -> None:
        store.put(4096, BEST)
        kernels = [store.ask(n, device=None) for n in (8192, 500, 700)]
        with closing(sqlite3.connect(read_settings().database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            start_s = time.monotonic()
            for kernel in kernels:
                call(kernel, 1000)
            assert time.monotonic() - start_s < 2.0
            other.execute("ROLLBACK")
        assert counted() == {}
        default_dispatcher.misses.flush()
        assert counted() == {8192: 1000, 500: 1000, 700: 1000}

    def test_a_call_does_not_wait_for_another_thread(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        kernel, other = store.ask(8192, device=None), store.ask(500, device=None)
        writing, go_on = threading.Event(), threading.Event()
        add_misses: Callable[..., bool] = miss_counter.write_file

        def slowly(*arguments: Any, **named: Any) -> bool:
            writing.set()
            assert go_on.wait(30)
            return add_misses(*arguments, **named)

        monkeypatch.setattr(miss_counter, "write_file", slowly)
        thread = threading.Thread(target=call, args=(kernel,))
        thread.start()
        assert writing.wait(30)
        call(other, 10)  # returns at once
        go_on.set()
        thread.join()
        default_dispatcher.misses.flush()
        assert counted() == {8192: 1, 500: 10}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "processes.py"
    script.write_text(PROCESSES)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), *words]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(("how", "in_children"), [("fork", 110), ("forkserver", 110), ("spawn", 110), ("os.fork", 10)])
@pytest.mark.parametrize("alone", [False, True])
def test_every_process_writes_its_calls_at_its_end(
    store: Any, tmp_path: Path, how: str, in_children: int, alone: bool
) -> None:
    """Each writes its own calls once; a child does not write the unwritten counts of its parent."""
    store.put(4096, BEST)
    done = run(tmp_path, str(store.path), how, "alone" if alone else "with its parent")
    assert (done.returncode, done.stderr) == (0, "")
    assert counted() == {500: in_children} | ({} if alone else {8192: 7})


def test_no_miss_of_a_killed_process_is_lost(store: Any, tmp_path: Path) -> None:
    store.put(4096, BEST)
    done = run(tmp_path, str(store.path), "kill", "with its parent")
    assert done.returncode == -signal.SIGKILL
    assert counted().keys() == {8192}
