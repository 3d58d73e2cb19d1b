"""New results reach what is served already: kernels that a program keeps, entries of operations, counts, the thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_runs import add_trial, end_run, start_run

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.winners import CHANGES, file_signature, read_file
from autotile.errors import CompileError
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import Library, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving import refresh as refreshing
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher, get_best_kernel
from autotile.serving.operations import _added
from autotile.settings import read_settings

BEST, BETTER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 2}


def poll() -> int:
    return default_dispatcher.refresher.poll()


def misses() -> list[tuple[str, int]]:
    default_dispatcher.misses.flush()
    with Database.open(read_settings().database) as database:
        return [(miss.tier, miss.count) for miss in database.misses()]


class Loaded:
    """A launcher that only records the launches of its configuration."""

    def __init__(self, kernel: BoundKernel) -> None:
        self.config = kernel.config
        self.launches = 0

    def launch_fast(self, arrays: Any) -> Any:
        self.launches += 1
        return arrays


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the loading of kernels; the list is of the threads that loaded."""
    threads = []

    def load(self: BoundKernel) -> Any:
        threads.append(threading.current_thread().name)
        self._launcher = Loaded(self)
        return self._launcher

    monkeypatch.setattr(BoundKernel, "_load", load)
    return threads


class TestKernels:
    def test_a_kept_kernel_serves_new_winners(self, store: Any) -> None:
        kernel = store.ask(4096)
        assert (poll(), kernel.tier) == (0, "default")
        store.put(4096, BEST)
        assert poll() == 1
        assert (kernel.tier, kernel.config) == ("exact", BEST)
        assert "tuned for exactly this problem" in kernel.explain()
        assert get_best_kernel(str(store.path), n=4096, device="h200") is kernel
        store.put(4096, BETTER)
        assert (poll(), kernel.config, kernel.geometry.threads) == (1, BETTER, 64)
        assert poll() == 0

    def test_a_kernel_that_the_dispatcher_forgot_too(self, store: Any) -> None:
        kernel = store.ask(4096)
        default_dispatcher.clear()
        store.put(4096, BEST)
        poll()
        assert kernel.config == BEST

    def test_the_nearest_result_is_one(self, store: Any) -> None:
        kernel = store.ask(4096)
        store.put(8192, BEST)
        poll()
        assert (kernel.tier, kernel.config) == ("nearest", BEST)

    def test_a_search_that_still_runs_changes_nothing(self, store: Any) -> None:
        kernel = store.ask(4096)
        poll()
        key = store.put(8192, BEST)
        poll()
        with Database.open(read_settings().database) as database:
            study = database.study(replace(key, sizes={"n": 4096}), device_profile("h200"))
            run = start_run(database, study, sampler="random")
            add_trial(database, study, run, Trial(BETTER, Outcome.OK, "", "measure"))
        assert (poll(), kernel.tier) == (0, "nearest")

    def test_results_of_other_kernels_choose_nothing(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = store.ask(4096)
        poll()
        store.put(4096, BEST, kernel="another")
        monkeypatch.setattr(default_dispatcher, "find", lambda *_, **__: pytest.fail("chosen"))
        assert (poll(), kernel.tier) == (0, "default")

    def test_a_failure_changes_nothing(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = store.ask(4096)
        store.put(4096, BEST)
        with monkeypatch.context() as patch:
            patch.setattr(default_dispatcher, "find", lambda *_, **__: 1 / 0)
            assert (poll(), kernel.tier) == (0, "default")
        Path(read_settings().database).write_bytes(b"no database at all" * 100)
        assert (poll(), kernel.tier) == (0, "default")

    def test_a_changed_kernel_file_is_not_taken_up(self, store: Any) -> None:
        """The program keeps the code that it was served; a result of other code is not for it."""
        kernel = store.ask(4096)
        source = store.path.with_suffix(".cu")
        source.write_text(source.read_text().replace("factor * x", "x"))
        store.put(4096, BEST)
        poll()
        assert (kernel.tier, kernel.config) == ("exact", BEST)
        assert "factor * x" in kernel.definition.source

    def test_arrays_keep_their_shapes(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = store.ask(4096)
        store.put(4096, BEST)
        shapes = {id(kernel): {"x": (4096,)}}
        monkeypatch.setattr(BoundKernel, "shapes", property(lambda self: shapes.get(id(self), {"x": (8192,)})))
        assert not kernel.has_shapes_of(store.ask(8192))
        assert (poll(), kernel.tier) == (0, "default")

    @pytest.mark.usefixtures("live_gpu")
    def test_counts_of_misses_follow(self, store: Any) -> None:
        store.put(8192, BEST)
        kernel = store.ask(4096, device=None)
        kernel.calls = 3
        store.put(4096, BETTER, default_ratio=None)
        poll()
        kernel.calls = 10
        assert (kernel.tier, misses()) == ("exact", [("nearest", 3)])
        with Database.open(read_settings().database) as database:  # the result is found to be wrong
            study = database.studies("scale")[-1]
            run = start_run(database, study.study_id, sampler="verify")
            wrong = Trial(BETTER, Outcome.WRONG_RESULT, "wrong", "verify")
            add_trial(database, study.study_id, run, wrong, phase="final")
            end_run(database, run)
        poll()
        kernel.calls = 12
        assert (kernel.tier, misses()) == ("nearest", [("nearest", 5)])


class TestLoading:
    @pytest.mark.usefixtures("live_gpu")
    def test_a_call_never_waits(self, store: Any, loads: list[str]) -> None:
        kernel = store.ask(4096, device=None)
        kernel.load()
        first: Any = kernel._launcher
        store.put(4096, BEST)
        thread = threading.Thread(target=poll, name="refresh")
        thread.start()
        thread.join()
        assert loads == ["MainThread", "refresh"]
        assert kernel._launcher is not first
        assert kernel._launcher.config == BEST
        assert kernel._retired == [first]  # a graph that the program captured may launch its code
        kernel(1.0, 2.0)
        assert (first.launches, kernel._launcher.launches) == (0, 1)

    @pytest.mark.usefixtures("live_gpu")
    def test_a_kernel_that_was_not_called_is_not_loaded(self, store: Any, loads: list[str]) -> None:
        kernel = store.ask(4096, device=None)
        store.put(4096, BEST)
        assert (poll(), kernel.config, loads) == (1, BEST, [])

    @pytest.mark.usefixtures("live_gpu")
    def test_code_that_does_not_compile_changes_nothing(
        self, store: Any, loads: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = store.ask(4096, device=None)
        kernel.load()
        store.put(4096, BEST)

        def fail(self: BoundKernel) -> None:
            raise CompileError("no")

        monkeypatch.setattr(BoundKernel, "load", fail)
        assert (poll(), kernel.tier, loads) == (0, "default", ["MainThread"])

    def test_a_kernel_that_was_loaded_meanwhile_stays(self, store: Any, loads: list[str]) -> None:
        kernel, other = store.ask(4096), store.ask(8192)
        store.put(4096, BEST)
        fresh = store.ask(4096)
        kernel._load()
        assert not kernel.adopt(fresh)
        assert (kernel.tier, other.tier) == ("default", "default")

    @pytest.mark.usefixtures("live_gpu")
    def test_threads_may_call_meanwhile(self, store: Any, loads: list[str]) -> None:
        kernel = store.ask(4096, device=None)
        kernel.load()
        done = threading.Event()
        failures: list[Exception] = []

        def call() -> None:
            while not done.is_set():
                try:
                    assert get_best_kernel(str(store.path), n=4096) is kernel
                    kernel(1.0, 2.0)
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for config in (BEST, BETTER, BEST):
            store.put(4096, config)
            assert poll() == 1
        done.set()
        for thread in threads:
            thread.join()
        assert (failures, kernel.config) == ([], BEST)


SIZES = {"M": 640, "N": 640, "K": 640}


def put_product(name: str, time_us: float) -> None:
    """Store the default of a kernel of products as the result of a session on an H200."""
    kernel, device = load_kernel(name), replace(device_profile("h200"), source="cuda")
    problem = resolve_problem(kernel.spec, SIZES, "float32")
    key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    measurement = Measurement(time_us, 0.99 * time_us, 1.01 * time_us)
    trial = Trial(kernel.spec.default, Outcome.OK, "", "finals", measurement=measurement)
    with Database.open(read_settings().database) as database:
        study = database.study(key, device)
        run = start_run(database, study, sampler="random")
        add_trial(database, study, run, trial, phase="final", rank=1)
        end_run(database, run)


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model of times, only measurements are known."""
    monkeypatch.setattr("autotile.serving.operations.model_of", lambda *_: None)


@pytest.mark.usefixtures("live_gpu", "_no_model")
class TestOperations:
    @pytest.fixture(autouse=True)
    def _without_a_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autotile.serving.operations.model_of", lambda *_: None)

    def test_another_kernel_takes_over(self, loads: list[str]) -> None:
        put_product("sgemm", 50.0)
        kernel = get_best_kernel("matmul", **SIZES, dtype="float32", library=False)
        assert (kernel.kernel, kernel.tier) == ("sgemm", "exact")
        kernel.load()
        poll()
        put_product("sgemm_ws", 20.0)
        assert poll() == 1
        assert (kernel.kernel, kernel.problem.kernel, kernel.tier) == ("sgemm_ws", "sgemm_ws", "exact")
        assert kernel._launcher.config == kernel.config == load_kernel("sgemm_ws").spec.default
        assert len(loads) == 2
        assert get_best_kernel("matmul", **SIZES, dtype="float32", library=False) is kernel

    def test_a_library_gives_way_to_a_kernel(self, loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        operation = load_operation("matmul")
        monkeypatch.setitem(_added, operation.name, {"mine": Library("mine", "1", print)})
        monkeypatch.setattr("autotile.serving.operations.LIBRARIES", ())
        served = get_best_kernel("matmul", **SIZES, dtype="float32", EMULATE=0)
        assert served.is_library
        poll()
        put_product("sgemm", 1.0)
        poll()
        assert get_best_kernel("matmul", **SIZES, dtype="float32", EMULATE=0) is served
        assert (served.kernel, served.tier, served.is_library) == ("sgemm", "exact", False)
        poll()
        put_product("sgemm_ws", 0.5)
        poll()
        assert served.kernel == "sgemm_ws"


class TestDatabase:
    def test_nothing_is_read_while_the_file_is_the_same(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.ask(4096)
        store.put(8192, BEST)
        poll()
        monkeypatch.setattr(refreshing, "read_file", lambda *_: pytest.fail("read"))
        assert poll() == 0

    def test_both_ways_of_reading_agree(self, store: Any) -> None:
        store.put(4096, BEST)
        location = read_settings().database
        with Database.open(location) as database:
            changes = database.read(CHANGES)
        assert changes == read_file(location, CHANGES)
        assert {row[:3] for row in changes} == {("scale", "float32", "run"), ("scale", "float32", "verdict")}

    def test_a_write_changes_the_signature(self, store: Any) -> None:
        location = read_settings().database
        assert file_signature(location) == ((0, 0, 0), (0, 0, 0))
        store.put(4096, BEST)
        first = file_signature(location)
        store.put(4096, BETTER)
        assert first != file_signature(location)
        assert file_signature("postgresql://host/name") is None

    def test_a_server_is_asked_rarely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = refreshing.WatchedDatabase("postgresql://host/name")
        asked: list[int] = []
        monkeypatch.setattr(refreshing, "read_server", lambda *_: asked.append(1) or frozenset())
        assert (place.read(), place.read(), len(asked)) == (frozenset(), None, 1)


PROGRAM = """
import os, sys, threading, time
from dataclasses import replace
from autotile.core.device import device_profile
from autotile.serving import dispatcher as serving, refresh
serving.default_dispatcher.current_device = lambda: 0
serving.live_device = lambda _: replace(device_profile("h200"), source="cuda")

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
for _ in range(200):
    if kernel.tier == "exact":
        break
    time.sleep(0.05)
print(kernel.tier, kernel.config)
"""


class TestThread:
    def test_another_process_tunes(self, store: Any) -> None:
        environment = {**os.environ, "AUTOTILE_REFRESH": "0.05"}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(store.path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            lines = [program.stdout.readline().strip() for _ in range(4)]
            store.put(4096, BEST)
            program.stdin.write("go\n")
            program.stdin.flush()
            lines.append(program.stdout.readline().strip())
        started = "['MainThread', 'autotile-refresh']"
        assert lines == ["['MainThread']", started, "0", "ready", f"exact {BEST}"]
        assert program.returncode == 0

    def test_a_long_refresh_ends_with_the_process(self, store: Any) -> None:
        thread = refreshing._RefreshThread()
        refresher = refreshing.Refresher(default_dispatcher.misses)
        refresher.poll = lambda pause: pause(1000.0)  # type: ignore[method-assign]
        thread._refreshers.add(refresher)
        thread._thread = threading.Thread(target=thread._run, args=(0.001,), daemon=True)
        thread._thread.start()
        time.sleep(0.05)
        thread.stop()
        assert not thread._thread.is_alive()

    @pytest.mark.usefixtures("live_gpu")
    def test_none_is_started_for_inspection_or_where_it_is_off(
        self, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(refreshing._thread, "watch", watched.append)
            store.ask(4096)
        assert watched == []
        thread = refreshing._RefreshThread()
        thread.watch(default_dispatcher.refresher)
        assert thread._thread is None


class Pauses(threading.Event):
    """An event that notes how long it is waited for, and lets nobody wait; it is set after a number of waits."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.times_s: list[float | None] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self.times_s.append(timeout)
        if len(self.times_s) > self._count:
            self.set()
        return self.is_set()


class TestPause:
    @pytest.mark.parametrize("setting", ["7.5", "0.25"])
    def test_between_two_looks_it_is_the_setting(self, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTILE_REFRESH", setting)
        thread, polled = refreshing._RefreshThread(), []
        thread._stop = pauses = Pauses(3)
        refresher = refreshing.Refresher(default_dispatcher.misses)
        monkeypatch.setattr(refresher, "poll", polled.append)
        thread.watch(refresher)
        assert thread._thread is not None
        thread._thread.join(60)
        assert not thread._thread.is_alive()
        assert pauses.times_s == [float(setting)] * 4
        assert len(polled) == 3

    def test_after_a_choice_it_is_nine_times_what_that_took(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.ask(4096)
        now_s, paused = [0.0], list[float]()
        monkeypatch.setattr(refreshing, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        choose = default_dispatcher.find

        def slow(*given: Any, **named: Any) -> BoundKernel:
            now_s[0] += 2.0
            return choose(*given, **named)

        monkeypatch.setattr(default_dispatcher, "find", slow)
        store.put(4096, BEST)
        assert default_dispatcher.refresher.poll(paused.append) == 1
        assert paused == [pytest.approx(18.0)]

    def test_the_thread_pauses_after_each_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTILE_REFRESH", "5")
        thread = refreshing._RefreshThread()
        thread._stop = pauses = Pauses(3)
        refresher = refreshing.Refresher(default_dispatcher.misses)
        monkeypatch.setattr(refresher, "poll", lambda pause: pause(18.0))
        thread.watch(refresher)
        assert thread._thread is not None
        thread._thread.join(60)
        assert pauses.times_s[:3] == [5.0, 18.0, 5.0]
