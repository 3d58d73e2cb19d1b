"""New results reach what is served already; calls of fallbacks are counted; what stands in while a kernel compiles."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_python import python
from made_models import ON_AN_H200, written_misses
from stored_runs import store_default

from autotile.core.device import device_profile
from autotile.core.model import Outcome, Trial
from autotile.cuda import compiler
from autotile.database.database import Database
from autotile.database.winners import CHANGES, file_signature, read_file
from autotile.errors import CompileError, InputError
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import Library, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving import aside, bound, launching
from autotile.serving import refresh as refreshing
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Choice, KernelCode, explain
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, get_best_kernel
from autotile.serving.operations import Products, _added
from autotile.settings import read_settings

BEST, BETTER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 2}


def poll() -> int:
    return default_dispatcher.refresher.poll()


def counted() -> dict[int, int]:
    return {n: count for n, *_, count in written_misses()}


def flushed() -> dict[int, int]:
    default_dispatcher.misses.flush()
    return counted()


class Loaded:
    """A launcher that only counts the launches of its configuration."""

    def __init__(self, of: BoundKernel | KernelCode) -> None:
        self.config, self.launches = of.config, 0

    def launch(self, arrays: Any, *_: Any) -> Any:
        self.launches += 1
        return arrays

    launch_fast = launch


@pytest.fixture
def loads(monkeypatch):
    """Replace the loading of kernels; the list is of the threads that loaded."""
    threads: list[str] = []

    def load(code: KernelCode, _: int) -> Loaded:
        threads.append(threading.current_thread().name)
        return Loaded(code)

    monkeypatch.setattr(launching, "KernelLauncher", load)
    return threads


class TestKernels:
    def test_a_kept_kernel_serves_new_winners_also_if_the_dispatcher_forgot_it(self, store):
        kernel = store.ask(4096)
        assert (poll(), kernel.tier) == (0, "default")
        store.put(8192, BETTER)
        assert (poll(), kernel.tier, kernel.config) == (1, "nearest", BETTER)
        store.put(4096, BEST)
        assert (poll(), kernel.tier, kernel.config) == (1, "exact", BEST)
        assert "tuned for exactly this problem" in kernel.explain()
        assert get_best_kernel(str(store.path), n=4096, device="h200") is kernel
        default_dispatcher.clear()
        store.put(4096, BETTER)
        assert (poll(), kernel.config, kernel.geometry.threads, poll()) == (1, BETTER, 64, 0)

    def test_results_of_others_and_failures_change_nothing(self, store, monkeypatch):
        kernel = store.ask(4096)
        poll()
        store.put(4096, BEST, kernel="another")
        with monkeypatch.context() as patch:
            patch.setattr(default_dispatcher, "find", lambda *_, **__: pytest.fail("chosen"))
            assert (poll(), kernel.tier) == (0, "default")
            store.put(4096, BEST)
            patch.setattr(default_dispatcher, "find", lambda *_, **__: 1 / 0)
            assert (poll(), kernel.tier) == (0, "default")
        Path(read_settings().database).write_bytes(b"no database at all" * 100)
        assert (poll(), kernel.tier) == (0, "default")

    def test_a_changed_kernel_file_is_not_taken_up(self, store):
        """The program keeps the code that it was served; a result of other code is not for it."""
        kernel = store.ask(4096)
        source = store.path.with_suffix(".cu")
        source.write_text(source.read_text().replace("factor * x", "x"))
        store.put(4096, BEST)
        poll()
        assert (kernel.tier, kernel.config) == ("exact", BEST)
        assert "factor * x" in kernel.definition.source

    def test_arrays_keep_their_shapes(self, store, monkeypatch):
        kernel = store.ask(4096)
        store.put(4096, BEST)
        shapes = {id(kernel): {"x": (4096,)}}
        monkeypatch.setattr(BoundKernel, "shapes", property(lambda self: shapes.get(id(self), {"x": (8192,)})))
        assert not kernel.has_shapes_of(store.ask(8192))
        assert (poll(), kernel.tier) == (0, "default")

    @pytest.mark.usefixtures("live_gpu")
    def test_counts_of_misses_follow(self, store):
        store.put(8192, BEST)
        kernel = store.ask(4096, device=None)
        kernel.calls = 3
        store.put(4096, BETTER, default_ratio=None)
        poll()
        kernel.calls = 10
        assert (kernel.tier, flushed()) == ("exact", {4096: 3})
        with Database.open(read_settings().database) as database:  # the result is found to be wrong
            wrong = Trial(BETTER, Outcome.WRONG_RESULT, "wrong", "verify")
            study = database.studies("scale")[-1].study_id
            database.add_run(study, [wrong], sampler="verify", driver="", phase="final")
        poll()
        kernel.calls = 12
        assert (kernel.tier, flushed()) == ("nearest", {4096: 5})


@pytest.mark.usefixtures("live_gpu")
class TestLoading:
    def test_a_call_never_waits(self, store, loads):
        kernel = store.ask(4096, device=None)
        kernel.load()
        first: Any = kernel._launcher
        store.put(4096, BEST)
        with ThreadPoolExecutor(1, "refresh") as threads:
            assert threads.submit(poll).result() == 1
        assert loads == ["MainThread", "refresh_0"]
        assert kernel._launcher is not first
        assert kernel._launcher.config == BEST
        assert kernel._retired == (first,)  # a graph that the program captured may launch its code
        kernel(1.0, 2.0)
        assert (first.launches, kernel._launcher.launches) == (0, 1)

    def test_code_that_is_not_called_or_does_not_compile_is_not_loaded(self, store, loads, monkeypatch):
        kernel = store.ask(4096, device=None)
        store.put(4096, BEST)
        assert (poll(), kernel.config, loads) == (1, BEST, [])
        kernel.load()
        store.put(4096, BETTER)

        def fail(self: BoundKernel) -> None:
            raise CompileError("no")

        monkeypatch.setattr(BoundKernel, "load", fail)
        assert (poll(), kernel.config, loads) == (0, BEST, ["MainThread"])

    @pytest.mark.usefixtures("loads")
    def test_a_kernel_that_was_loaded_meanwhile_stays(self, store):
        kernel = store.ask(4096, device=None)
        store.put(4096, BEST)
        fresh = store.ask(4096, device=None)
        kernel.load()
        assert not kernel.adopt(fresh)
        assert kernel.tier == "default"


SIZES = {"M": 640, "N": 640, "K": 640}


@pytest.mark.usefixtures("live_gpu")
class TestOperations:
    @pytest.fixture(autouse=True)
    def _without_a_model_only_measurements_are_known(self, monkeypatch):
        monkeypatch.setattr("autotile.serving.operations.model_of", lambda *_: None)

    def test_a_library_gives_way_to_a_kernel_and_that_to_another(self, loads, monkeypatch):
        operation = load_operation("matmul")
        monkeypatch.setitem(_added, operation.name, {"mine": Library("mine", "1", print)})
        monkeypatch.setattr("autotile.serving.operations.LIBRARIES", ())
        served = get_best_kernel("matmul", **SIZES, dtype="float32", EMULATE=0)
        assert served.is_library
        poll()
        store_default("sgemm", SIZES, "float32", 1.0)
        poll()
        assert get_best_kernel("matmul", **SIZES, dtype="float32", EMULATE=0) is served
        assert (served.kernel, served.tier, served.is_library) == ("sgemm", "exact", False)
        served.load()
        poll()
        store_default("sgemm_ws", SIZES, "float32", 0.5)
        assert (poll(), served.kernel, served.problem.kernel, served.tier) == (1, "sgemm_ws", "sgemm_ws", "exact")
        assert served._launcher.config == served.config == load_kernel("sgemm_ws").spec.default
        assert len(loads) == 2


class TestDatabase:
    def test_both_ways_of_reading_agree_and_nothing_is_read_while_the_file_is_the_same(self, store, monkeypatch):
        store.ask(4096)
        store.put(8192, BEST)
        location = read_settings().database
        with Database.open(location) as database:
            changes = database.read(CHANGES)
        assert changes == read_file(location, CHANGES)
        assert {row[:3] for row in changes} == {("scale", "float32", "run"), ("scale", "float32", "verdict")}
        poll()
        monkeypatch.setattr(refreshing, "read_file", lambda *_: pytest.fail("read"))
        assert poll() == 0

    def test_a_write_changes_the_signature(self, store):
        location = read_settings().database
        seen = [file_signature(location)]
        for config in (BEST, BETTER):
            store.put(4096, config)
            seen.append(file_signature(location))
        assert (seen[0], len(set(seen))) == (((0, 0, 0), (0, 0, 0)), 3)
        assert file_signature("postgresql://host/name") is None

    def test_a_server_is_asked_rarely(self, monkeypatch):
        place = refreshing.WatchedDatabase("postgresql://host/name")
        asked: list[int] = []
        monkeypatch.setattr(refreshing, "read_server", lambda *_: asked.append(1) or frozenset())
        assert (place.read(), place.read(), len(asked)) == (frozenset(), None, 1)


PROGRAM = f"""{ON_AN_H200}
def names():
    return sorted(thread.name for thread in threading.enumerate())

print(names())
kernel = serving.get_best_kernel(sys.argv[1], n=4096)
print(names())
child = os.fork()
if child == 0:
    before = names()
    serving.get_best_kernel(sys.argv[1], n=2048)
    os._exit(0 if (before, names()) == (["MainThread"], ["MainThread", "autotile-refresh"]) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2000):
    if kernel.tier == "exact":
        break
    time.sleep(0.05)
print(kernel.tier, kernel.config)
"""


class TestThread:
    def test_another_process_tunes(self, store):
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        environment = {**os.environ, "AUTOTILE_REFRESH": "0.05"}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(store.path)]
        with subprocess.Popen(command, text=True, env=environment, **pipes) as program:
            lines = [program.stdout.readline().strip() for _ in range(4)]
            store.put(4096, BEST)
            lines += program.communicate("go\n", timeout=120)[0].splitlines()
        started = "['MainThread', 'autotile-refresh']"
        assert (lines, program.returncode) == (["['MainThread']", started, "0", "ready", f"exact {BEST}"], 0)

    def test_a_long_refresh_ends_with_the_process(self, store):
        thread = refreshing._RefreshThread()
        refresher = refreshing.Refresher(default_dispatcher.misses, lambda kernel: kernel)
        began = threading.Event()
        refresher.poll = lambda pause: began.set() or pause(1000.0)  # type: ignore[method-assign]
        thread._refreshers.add(refresher)
        thread.add(partial(thread._poll, 0.001))
        assert began.wait(60)
        thread.stop()
        assert not thread._threads[0].is_alive()

    @pytest.mark.usefixtures("live_gpu")
    def test_none_is_started_for_inspection_or_when_off(self, store, monkeypatch):
        watched: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(refreshing._thread, "watch", watched.append)
            store.ask(4096)
        assert watched == []
        thread = refreshing._RefreshThread()
        thread.watch(default_dispatcher.refresher)
        assert thread._threads == []


class TestPause:
    @pytest.mark.parametrize(
        ("setting", "pause_s", "expected", "polls"),
        [("7.5", None, [7.5] * 4, 3), ("0.25", None, [0.25] * 4, 3), ("5", 18.0, [5.0, 18.0, 5.0, 18.0], 1)],
    )
    def test_between_looks_it_is_the_setting_and_after_a_choice_what_it_asks_for(
        self, setting, pause_s, expected, polls, monkeypatch
    ):
        monkeypatch.setenv("AUTOTILE_REFRESH", setting)
        thread, polled, waits_s = refreshing._RefreshThread(), [], list[float]()

        def wait(time_s: float) -> bool:  # for no time; the fourth time is the end
            waits_s.append(time_s)
            if len(waits_s) > 3:
                thread._stop.set()
            return thread._stop.is_set()

        monkeypatch.setattr(thread._stop, "wait", wait)
        refresher = refreshing.Refresher(default_dispatcher.misses, lambda kernel: kernel)
        monkeypatch.setattr(refresher, "poll", lambda pause: polled.append(pause_s and pause(pause_s)))
        thread.watch(refresher)
        thread._threads[0].join(60)
        assert not thread._threads[0].is_alive()
        assert (waits_s[:4], len(polled)) == (expected, polls)

    def test_after_a_choice_it_is_nine_times_what_that_took(self, store, clock, monkeypatch):
        store.ask(4096)
        paused, choose = list[float](), default_dispatcher.find

        def slow(*given: Any, **named: Any) -> BoundKernel:
            clock.now_s += 2.0
            return choose(*given, **named)

        monkeypatch.setattr(default_dispatcher, "find", slow)
        store.put(4096, BEST)
        assert (default_dispatcher.refresher.poll(paused.append), paused) == (1, [pytest.approx(18.0)])


PROCESSES = f"""{ON_AN_H200}
def served(n, calls):
    kernel = serving.get_best_kernel(sys.argv[1], n=n)
    kernel._launcher = SimpleNamespace(launch_fast=lambda arrays: arrays)
    for _ in range(calls):
        kernel(None, None)
    return kernel

def start(method, n):
    if method == "os.fork":
        number = os.fork()
        if number == 0:
            served(n, 10)
            sys.exit()
        os.waitpid(number, 0)
        return
    import multiprocessing  # not before: what is counted then is written by `atexit`
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=served, args=(n, calls)) for calls in (10, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

if __name__ == "__main__":
    methods, alone = sys.argv[2].split(), sys.argv[3] == "alone"
    if not alone:
        kernel = served(8192, 3)
    if methods == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    for n, method in enumerate(methods, 500):
        start(method, n)
    if not alone:
        for _ in range(4):
            kernel(None, None)
"""


def call(kernel: BoundKernel, times: int = 1) -> None:
    """Call a kernel as a launch on the fast path does, without a GPU."""
    kernel._launcher = Loaded(kernel)  # type: ignore[assignment]
    for _ in range(times):
        kernel(None, None)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(refreshing, "time", clock)
    return clock


@pytest.fixture
def slow_writes(clock, monkeypatch):
    write = refreshing._write

    def slowly(*arguments: Any) -> bool:
        clock.now_s += 1.0
        return write(*arguments)

    monkeypatch.setattr(refreshing, "_write", slowly)


@pytest.fixture
def of_another_size(store, live_gpu):
    store.put(4096, BEST)


@pytest.mark.usefixtures("of_another_size")
class TestWhenCountsAreWritten:
    def test_serving_writes_nothing_and_a_kernel_that_was_never_called_counts_as_one_call(self, store, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(refreshing, "_write", lambda *_: pytest.fail("written while serving"))
            called, never_called = store.ask(8192, device=None), store.ask(500, device=None)
        assert called.tier == "nearest"
        call(called, 7)
        assert flushed() == {8192: 7, 500: 1}
        call(never_called, 1)
        call(called, 2)
        assert flushed() == flushed() == {8192: 9, 500: 1}

    @pytest.mark.usefixtures("clock")
    def test_the_first_call_and_each_doubling_without_an_sql_engine(self, store, monkeypatch):
        """If writing takes no time; a killed process then loses less than half of its calls."""
        kernel = store.ask(8192, device=None)
        for calls in range(1, 18):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "autotile.database.database", None)
                call(kernel)
            assert counted() == {8192: 2 ** (calls.bit_length() - 1)}

    @pytest.mark.usefixtures("slow_writes")
    def test_writing_takes_one_percent_of_the_time(self, store, clock):
        kernel = store.ask(8192, device=None)
        for pause_s, calls, written in ((0.0, 1000, 1), (99.0, 1000, 1), (2.0, 48, 2048)):
            clock.now_s += pause_s
            call(kernel, calls)
            assert counted() == {8192: written}

    @pytest.mark.usefixtures("slow_writes")
    def test_first_calls_are_written_at_any_time(self, store):
        for n in (8192, 500, 700):
            call(store.ask(n, device=None), 3)
        assert counted() == {8192: 1, 500: 1, 700: 1}

    @pytest.mark.usefixtures("slow_writes")
    def test_a_write_includes_the_other_kernels(self, store, clock):
        """Otherwise, of several kernels that are called alternately, always the same one would be written."""
        kernels = [store.ask(n, device=None) for n in (8192, 500)]
        for kernel in kernels:
            call(kernel, 100)
        clock.now_s += 200.0
        call(kernels[0], 28)
        assert counted() == {8192: 128, 500: 100}

    def test_bound_launches_are_counted(self, store):
        kernel = store.ask(8192, device=None)
        launched: list[None] = []
        kernel._launcher = SimpleNamespace(bind=lambda *_: lambda: launched.append(None))
        launch = kernel.bind(None, None)
        launch()
        assert counted() == {8192: 1}
        launch()
        assert (flushed(), len(launched)) == ({8192: 2}, 2)


class TestDatabases:
    @pytest.mark.usefixtures("live_gpu", "clock")  # without a pause after what cannot be written
    def test_none_is_made_and_one_may_be_named_by_the_url_of_its_file(self, store):
        call(store.ask(8192, device=None))
        default_dispatcher.misses.flush()
        assert not Path(read_settings().database).exists()
        store.put(4096, BEST)
        call(store.ask(8192, device=None, database=f"sqlite:///{read_settings().database}"))
        assert counted() == {8192: 1}

    @pytest.mark.usefixtures("live_gpu")
    def test_a_server_is_waited_for_a_few_seconds_at_most(self, store, monkeypatch):
        opened: list[tuple[str, float]] = []

        def note(location: str, *, server_timeout_s: float) -> None:
            opened.append((location, server_timeout_s))

        kernel = store.ask(8192, device=None)
        monkeypatch.setattr(Database, "open_readonly", note)
        default_dispatcher.misses.watch("postgresql://me:secret@far.away/db", kernel)
        call(kernel)
        assert opened == [("postgresql://me:secret@far.away/db", 2.0)]

    @pytest.mark.usefixtures("of_another_size")
    def test_counts_that_cannot_be_written_are_kept_and_no_error_reaches_the_caller(self, store, monkeypatch):
        kernel = store.ask(8192, device=None)
        for write in (lambda *_, **__: False, lambda *_, **__: 1 / 0):
            with monkeypatch.context() as patch:
                patch.setattr(refreshing, "write_file", write)
                call(kernel, 5)
                assert flushed() == {}
        assert (kernel.calls, flushed()) == (10, {8192: 10})

    @pytest.mark.usefixtures("of_another_size", "slow_writes")
    def test_a_locked_one_delays_one_call_for_a_moment(self, store, monkeypatch):
        kernels, waits_s = [store.ask(n, device=None) for n in (8192, 500, 700)], list[float]()
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect
        with closing(connect(read_settings().database, isolation_level=None)) as other, monkeypatch.context() as patch:
            other.execute("BEGIN IMMEDIATE")
            patch.setattr(
                sqlite3, "connect", lambda *given, **named: waits_s.append(named["timeout"]) or connect(*given, **named)
            )
            for kernel in kernels:
                call(kernel, 1000)
            other.execute("ROLLBACK")
        assert (waits_s, counted(), flushed()) == ([0.05], {}, {8192: 1000, 500: 1000, 700: 1000})

    @pytest.mark.usefixtures("of_another_size")
    def test_a_call_does_not_wait_for_another_thread(self, store, monkeypatch):
        kernel, other = store.ask(8192, device=None), store.ask(500, device=None)
        writing, go_on = threading.Event(), threading.Event()
        add_misses: Callable[..., bool] = refreshing.write_file

        def slowly(*arguments: Any, **named: Any) -> bool:
            writing.set()
            assert go_on.wait(30)
            return add_misses(*arguments, **named)

        monkeypatch.setattr(refreshing, "write_file", slowly)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(call, kernel)
            assert writing.wait(30)
            call(other, 10)  # returns at once
            go_on.set()
        assert flushed() == {8192: 1, 500: 10}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "processes.py"
    script.write_text(PROCESSES)
    return python("-W", "ignore::DeprecationWarning", script, *words)


class TestProcesses:
    @pytest.mark.parametrize(
        ("methods", "alone", "expected"),
        [
            ("fork os.fork", True, {500: 110, 501: 10}),  # a process that is not forked has nothing of another
            ("fork os.fork forkserver spawn", False, {500: 110, 501: 10, 502: 110, 503: 110, 8192: 7}),
        ],
    )
    def test_every_process_writes_its_calls_at_its_end(self, store, tmp_path, methods, alone, expected):
        """Each writes its own calls once; a child does not write the unwritten counts of its parent."""
        store.put(4096, BEST)
        done = run(tmp_path, str(store.path), methods, "alone" if alone else "with its parent")
        assert (done.returncode, done.stderr, counted()) == (0, "", expected)

    def test_no_miss_of_a_killed_process_is_lost(self, store, tmp_path):
        store.put(4096, BEST)
        done = run(tmp_path, str(store.path), "kill", "with its parent")
        assert (done.returncode, counted().keys()) == (-signal.SIGKILL, {8192})


DEVICE = device_profile("h200")
KERNEL = load_kernel("matmul_tiled")
PROBLEM = resolve_problem(KERNEL.spec, {"M": 64, "N": 64, "K": 64}, None)


class Code(KernelCode):
    """A kernel's code whose compilation is let go on by the test, and fails if there is a fault."""

    def __init__(self, tile: int, *, is_compiled: bool) -> None:
        super().__init__(KERNEL, PROBLEM, DEVICE, {**KERNEL.spec.default, "TILE": tile})
        self.is_compiled, self.may_end = is_compiled, threading.Event()
        self.fault: Exception | None = None

    def needs_compiler(self, *, looks: bool = True) -> bool:
        return not self.is_compiled

    def load(self, device_index: int) -> Any:
        if not self.is_compiled:
            assert self.may_end.wait(60)
        if self.fault is not None:
            raise self.fault
        return Loaded(self)


@pytest.fixture(autouse=True)
def code_loads_itself(monkeypatch):
    load = launching.KernelLauncher
    monkeypatch.setattr(launching, "KernelLauncher", lambda code, at: getattr(code, "load", partial(load, code))(at))


def served(code: Code) -> BoundKernel:
    return BoundKernel(code, Choice("default", code.config), DEVICE, 0)


@pytest.fixture
def chosen():
    return Code(32, is_compiled=False)


@pytest.fixture
def kernel(chosen):
    """What was chosen, with another kernel that may stand in for it."""
    kernel, other = served(chosen), served(Code(16, is_compiled=True))
    kernel.find_stand_in = lambda: other
    return kernel


def end_compilation(code: Code) -> None:
    code.may_end.set()
    assert aside.wait_for_compilations(60)


class TestAside:
    def test_as_many_jobs_run_at_once_as_there_may_be_threads(self):
        together, ended = threading.Barrier(3), list[int]()
        threads = aside.AsideThreads("test", limit=3)
        for number in range(3):
            threads.add(lambda number=number: ended.append(together.wait(60) * 0 + number))
        assert threads.wait(60)
        assert sorted(ended) == [0, 1, 2]
        threads.add(lambda: 1 / 0)
        assert threads.wait(60)  # a fault ends neither a thread nor the process
        threads.stop()
        assert not any(thread.is_alive() for thread in threads._threads)

    @pytest.mark.parametrize("own", [None, 0.02])
    def test_threads_take_short_turns_while_jobs_run_and_what_the_program_sets_stays(self, own):
        before, together, seen = sys.getswitchinterval(), threading.Barrier(3), list[float]()
        threads = aside.AsideThreads("test", limit=2, gives_way=True)

        def run() -> None:
            seen.append(sys.getswitchinterval())
            together.wait(60)
            together.wait(60)

        try:
            for _ in range(2):
                threads.add(run)
            together.wait(60)
            if own is not None:
                sys.setswitchinterval(own)
            together.wait(60)
            assert threads.wait(60)
            assert (seen, sys.getswitchinterval()) == ([0.0005] * 2, own or before)
        finally:
            sys.setswitchinterval(before)
            threads.stop()

    @pytest.mark.parametrize("fault", [None, InputError("no kernel computes it")])
    def test_a_product_is_chosen_aside_once_and_faults_are_of_the_next_call(self, fault, chosen):
        chosen.is_compiled, asked, may_choose = True, list[int](), threading.Event()

        def serve() -> BoundKernel:
            asked.append(1)
            may_choose.wait(60)
            if fault is not None:
                raise fault
            return served(chosen)

        products = Products(10, serve, lambda device: True)
        for _ in range(3):
            products.choose_aside("a product", serve, partial(products.kernels.keep, ("a product",)))
        may_choose.set()
        assert aside.wait_for_compilations(60)
        assert asked == [1]
        kernel = products.kernels.get(("a product",))
        assert (kernel is not None and kernel.is_loaded) == (fault is None)
        assert products._deferred == ({} if fault is None else {"a product": False})


class TestStandIns:
    def test_what_is_compiled_serves_until_the_choice_takes_over(self, chosen, kernel):
        reports: list[int] = []
        kernel.report_calls(lambda calls: reports.append(calls) or 10**9)
        kernel("A", "B", "C")
        assert kernel.config["TILE"] == 16
        said = r"It stands in for matmul_tiled TILE=32.*takes over when it is ready"
        assert re.search(said, explain(PROBLEM, DEVICE, kernel.choice))
        assert reports == []
        end_compilation(chosen)
        assert (kernel.config["TILE"], kernel.calls) == (32, 1)
        assert "stands in" not in explain(PROBLEM, DEVICE, kernel.choice)
        kernel("A", "B", "C")
        assert reports == [2]

    @pytest.mark.parametrize("way", ["nothing else", "is compiled", "load", "bind", "load later", "bind later"])
    def test_a_call_waits_where_it_must_or_may(self, chosen, kernel, way, monkeypatch):
        chosen.is_compiled = way == "is compiled"
        if way == "nothing else":
            kernel.find_stand_in = lambda: None
        if "later" in way:  # something stands in for the choice already
            kernel("A", "B", "C")
            monkeypatch.setattr(bound, "wait_for_compilations", partial(end_compilation, chosen))
        else:
            chosen.may_end.set()
        if "load" in way:
            kernel.load()
        elif "bind" in way:
            with pytest.raises(AttributeError, match="bind"):  # of the launcher of this test, which has none
                kernel.bind("A", "B", "C")
        else:
            kernel("A", "B", "C")
        assert kernel.config["TILE"] == 32
        assert kernel.is_loaded

    def test_a_choice_that_cannot_be_loaded_says_so_and_never_serves(self, chosen, kernel):
        chosen.fault = InputError("the compiler refused it")
        kernel("A", "B", "C")
        end_compilation(chosen)
        assert kernel.config["TILE"] == 16
        assert "which cannot be loaded: the compiler refused it" in explain(PROBLEM, DEVICE, kernel.choice)

    def test_what_was_adopted_meanwhile_stays(self, chosen, kernel):
        newer = served(Code(8, is_compiled=True))
        kernel("A", "B", "C")
        newer.load()
        kernel.adopt(newer)
        end_compilation(chosen)
        assert kernel.config["TILE"] == 8

    def test_a_race_waits_for_arrays_that_allow_it(self):
        first, fastest = (served(Code(tile, is_compiled=True)) for tile in (16, 8))
        raced: list[object] = []

        def race(kernel: BoundKernel, arrays: Any, **_: Any) -> None:
            raced.append(arrays[0])
            assert kernel("in another thread meanwhile", "B", "C") == "C"
            if arrays[0] != "captured":
                fastest.load()
                kernel.adopt(fastest)

        kernel = BoundKernel(first._code, first.choice, DEVICE, 0)
        kernel.first_use = first, race
        kernel.load()
        assert (kernel.is_loaded, kernel.launch_at(0, (1, 2, 3), starts=True), raced) == (True, False, [])
        tiles = [kernel(name, "B", "C") and kernel.config["TILE"] for name in ("captured", "A", "B")]
        assert (tiles, raced) == ([16, 8, 8], ["captured", "A"])
        assert len(kernel._retired) == 1  # what was launched before may be part of a graph

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_new_sizes_need_no_compiler(self, dtype, tmp_path, monkeypatch):
        import cupy

        monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path))
        dispatcher = Dispatcher(database=tmp_path / "empty.db")
        torch = pytest.importorskip("torch")
        a, b = (torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in ((210, 331), (331, 171)))
        expected = a.double() @ b.double()

        def error(result: Any) -> float:
            return float((result.double() - expected).norm() / expected.norm())

        compiled_by: list[threading.Thread] = []

        def compile_cubin(job: compiler.CompileJob, compile_as_before: Any = compiler.compile_cubin) -> Any:
            compiled_by.append(threading.current_thread())
            return compile_as_before(job)

        monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
        assert error(dispatcher.matmul(a, b)) < 1e-2
        assert aside.wait_for_compilations(60)
        (kernel,) = dispatcher.products.kernels.values()  # chosen and loaded aside, while PyTorch computed the first
        assert kernel.calls == 0
        assert error(dispatcher.matmul(a, b)) < 1e-2
        assert kernel.calls == 1
        assert threading.current_thread() not in compiled_by
        assert error(dispatcher.matmul(a, b)) < 1e-2
        waited = Dispatcher(database=tmp_path / "empty.db")
        assert error(waited.matmul(a, b, wait=True)) < 1e-2
        cupy.cuda.get_current_stream().synchronize()
