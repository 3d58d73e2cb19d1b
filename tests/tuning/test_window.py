"""Blocks of `autotile.tuning`: what they collect, tune and serve, by replay of recordings."""

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from feature_kernels import python_scale
from judges import BEST, DEFAULT, ending_at, timed

import autotile
from autotile.api import window as blocks
from autotile.api.plans import PlanEntry, PlanRun
from autotile.errors import InputError, NotTunedError, ProblemError
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, state_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import PlannedProblem
from autotile.tuning.progress_state import Progress

SIZES = [1024, 2048, 4096, 8192]
OPTIONS = TuneOptions(replay="auto", workers=1, trials=12)
THOUSAND = list(range(1, 1001))
CHANGES = {"database": "a.db", "device_index": 1, "l2": "hot", "fresh": True, "devices": (0, 1)}
DECIDED = {name: TuneOptions(**{name: value}) for name, value in CHANGES.items()}
"""Options that the program decides on."""


@pytest.fixture(autouse=True)
def _recorded(bench, recordings_found, monkeypatch):
    """A machine without a GPU, and with recordings of four problems in a folder that replay looks into."""
    monkeypatch.setattr(default_dispatcher, "_device_count", 0)
    monkeypatch.setattr(default_dispatcher, "only_device", None)
    monkeypatch.setattr("autotile.serving.dispatcher.device_count", lambda: 0)
    for n in SIZES:
        bench.record(n=n)


@pytest.fixture
def ask(scale_toml):
    return lambda n=4096, **options: autotile.get_best_kernel(str(scale_toml), n=n, **options)


def block(budget: float = 60, **given: Any) -> blocks.TuningWindow:
    return autotile.tuning(budget, **{"options": OPTIONS, **given})


def states(window: blocks.TuningWindow) -> dict[int, str]:
    return {entry.planned.problem.sizes["n"]: entry.state for entry in window.result.entries}


class TestOneBlock:
    def test_what_it_asks_for_is_tuned_and_served_by_the_objects_that_it_has(self, ask, bench):
        before = ask()
        with block() as window:
            kernel, other = ask(), ask(2048)
            assert (kernel.tier, kernel.config, window.result) == ("default", DEFAULT, None)
            assert bench.stored() == []
        assert states(window) == {4096: "tuned", 2048: "tuned"}
        assert kernel is before is ask()
        assert [(one.tier, one.config) for one in (kernel, other)] == [("exact", BEST)] * 2
        assert repr(window.result).startswith("<PlanResult: plan tuning: 2 problems: 2 tuned, in ")
        with block(strict=True) as window:
            assert ask() is kernel
            ask(1024)
        assert states(window) == {4096: "done", 1024: "tuned"}

    def test_calls_of_what_it_holds_count_and_decide_on_the_order_and_the_time(self, ask):
        held, idle, often = ask(), ask(1024), ask(2048)
        held.calls = idle.calls = 10**6
        steps: list[Progress] = []
        with block(100, progress=steps.append) as window:
            held.calls += 1
            often.calls += 100
        assert states(window) == {2048: "tuned", 4096: "tuned"}
        assert list(states(window)) == [2048, 4096]
        begun = {step.path[0].number: step for step in reversed(steps) if step.gates}
        first, last = begun[1], begun[2]
        assert 80 < first.budget_s < 100
        assert 60 < last.budget_s < 100  # what is left

    def test_all_threads_count_and_other_dispatchers_which_have_their_own_database(self, ask, scale_toml, tmp_path):
        with block() as window, ThreadPoolExecutor(1) as thread:
            thread.submit(ask, 2048).result()
        assert states(window) == {2048: "tuned"}
        own = Dispatcher(database=tmp_path / "own.db")
        with block() as window:
            kernel, other = ask(), own.get_best_kernel(str(scale_toml), n=4096)
        assert [entry.state for entry in window.result.entries] == ["tuned"] * 2
        assert str(tmp_path / "own.db") in window.result.database
        assert kernel.tier == other.tier == "exact"

    def test_a_kernel_in_python_is_tuned_by_its_object(self):
        kernel = python_scale()
        with block(sizes={"n": [2048]}) as window:
            served = kernel.best(n=4096)
        assert states(window) == {4096: "tuned", 2048: "tuned"}
        assert (served.tier, served.config) == ("exact", BEST)

    def test_an_operation_is_tuned_as_one(self, operation_of_copies, record_copies, scale_toml):
        record_copies(operation_of_copies("first", "second"), first=1.0, second=0.5)
        path = str(scale_toml.with_name("scaling.toml"))
        with block() as window:
            kernel = autotile.get_best_kernel(path, n=4096)
        assert [str(entry.planned.problem) for entry in window.result.entries] == ["scaling n=4096 float32"]
        assert (kernel.kernel, kernel.tier, kernel.config) == ("second", "exact", BEST)

    def test_what_is_deployed_with_a_hot_cache_is_measured_and_served_so(self, ask, bench, monkeypatch):
        with block():
            kernel = ask()
        bench.record(lambda config: timed(config, 2.0 + int(config["THREADS"])), l2="hot")
        monkeypatch.setattr(default_dispatcher, "_l2", None)
        with block(l2="hot") as window:
            assert ask() is kernel
        assert states(window) == {4096: "tuned"}
        assert (kernel.tier, kernel.config["THREADS"]) == ("exact", 32)
        assert "hot L2" in kernel.explain()
        default_dispatcher.l2 = "cold"
        default_dispatcher.refresher.refresh()
        assert (kernel.tier, kernel.config) == ("exact", BEST)
        other = Dispatcher(l2="hot").get_best_kernel(kernel.lookup.name, n=4096)
        assert (other.tier, other.config["THREADS"]) == ("exact", 32)

    def test_what_the_host_launches_is_measured_hot_where_no_gpu_compares_launches(self, ask, bench, monkeypatch):
        bench.record(lambda config: timed(config, 2.0 + int(config["THREADS"])), l2="hot")
        monkeypatch.setattr(default_dispatcher, "_l2", None)
        for state in ("tuned", "done"):
            with block(deployment="eager") as window:
                kernel = ask()
            assert states(window) == {4096: state}
            assert (kernel.tier, kernel.config["THREADS"]) == ("nearest", 32)
            assert "L2 mode hot instead of eager" in kernel.explain()

    @pytest.mark.parametrize(
        ("l2", "deployment", "state"),
        [
            (None, None, None),
            ("hot", None, "hot"),
            (None, "graph", "cold"),
            ("hot", "graph", "hot"),
            (None, "eager", "eager"),
            ("hot", "eager", "eager"),
        ],
    )
    def test_arguments_state_how_launches_are_repeated(self, l2, deployment, state):
        assert state_of(l2, deployment) == state

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"l2": "warm"}, "l2 is 'warm', expected 'cold' or 'hot'"),
            ({"deployment": "lazy"}, "deployment is 'lazy', expected 'graph' or 'eager'"),
            ({"l2": "cold", "deployment": "eager"}, "leave l2='cold' out"),
            ({"mode": "measure"}, "mode is 'measure', expected 'tune' or 'replay'"),
            ({"sizes": {"M": "x"}}, "M=x cannot be read"),
            ({"sizes": {"M": THOUSAND, "N": THOUSAND}}, "1,000,000 for each problem, expected 10,000 at most"),
            *(({"options": options}, f"option {name} follows from") for name, options in DECIDED.items()),
        ],
    )
    def test_others_are_refused(self, given, message):
        for open_one in (autotile.tuning, Dispatcher) if given.keys() <= {"l2", "deployment"} else (autotile.tuning,):
            with pytest.raises(InputError, match=message):
                open_one(**given)

    def test_one_that_raises_tunes_nothing_nor_what_only_inspects_another_gpu(self, ask, bench):
        with block() as window:
            ask(device="a100")
        assert states(window) == {}
        window = block()
        with suppress(KeyError), window:
            ask()
            raise KeyError
        assert (window.result, bench.stored()) == (None, [])
        with pytest.raises(InputError, match="entered once"), window:
            pass

    def test_what_cannot_be_tuned_is_said_and_refused_if_strict(self, ask):
        window = block(strict=True)
        with pytest.raises(NotTunedError, match="1 problem of the block is not tuned: scale n=77 float32;"), window:
            _ = ask(77), ask()
        assert states(window) == {77: "failed", 4096: "tuned"}


class TestSizes:
    def test_each_problem_is_tuned_at_further_sizes_too(self, ask, bench):
        with block(sizes={"n": "1024..4096"}) as window:
            ask()
        assert states(window) == dict.fromkeys([1024, 2048, 4096], "tuned")
        assert ask(2048).tier == "exact"
        with block(sizes={"n": [1024, 8192]}) as window:
            ask()
        assert states(window) == {1024: "done", 4096: "done", 8192: "tuned"}

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("1..64", (1, 2, 4, 8, 16, 32, 64)),
            (range(3, 21), (3, 4, 8, 16, 20)),
            ([7, 5, 7], (5, 7)),
            ("1..3,100", (1, 2, 3, 100)),
            (12, (12,)),
        ],
    )
    def test_a_range_is_its_ends_and_powers_of_two(self, given, expected):
        assert blocks.tuning(sizes={"M": given})._sizes == {"M": expected}

    def test_an_unknown_one_is_an_error(self, ask):
        with pytest.raises(ProblemError, match="has a size 'm'; the sizes are n"), block(sizes={"m": 8}):
            ask()


def test_in_replay_nothing_is_measured_and_strict_names_all_that_is_not_tuned(ask, bench):
    with block() as window:
        ask()
    stored = len(bench.stored())
    with autotile.tuning(mode="replay") as window:
        ask(), ask(2048)
        assert not default_dispatcher.may_race
    assert default_dispatcher.may_race
    assert states(window) == {2048: "left", 4096: "done"}
    strict = autotile.tuning(mode="replay", strict=True, sizes={"n": [4096, 8192]})
    with pytest.raises(NotTunedError, match="2 problems of the block are not tuned") as error, strict:
        ask(2048)
    assert "scale n=2048 float32" in str(error.value)
    assert "scale n=8192 float32" in str(error.value)
    with autotile.tuning(mode=type("Word", (str,), {})("replay"), strict=True):
        ask()
    assert len(bench.stored()) == stored


class TestNested:
    def test_the_outermost_tunes_for_all(self, ask, bench):
        with block() as outer:
            ask()
            with block(sizes={"n": [1024]}) as inner:
                ask(2048)
            assert (inner.result, bench.stored()) == (None, [])
        assert states(outer) == dict.fromkeys([1024, 2048, 4096], "tuned")
        assert inner.result is outer.result

    def test_what_one_that_replays_or_raises_asks_for_is_not_tuned(self, ask, bench):
        with autotile.tuning(mode="replay") as outer, block():
            ask()
        assert (states(outer), bench.stored()) == ({4096: "left"}, [])
        with block() as outer:
            with autotile.tuning(mode="replay") as inner:
                _ = ask(1024), ask(8192)
            ask(8192)
            with suppress(KeyError), block():
                ask(2048)
                raise KeyError
            ask()
        assert (states(inner), states(outer)) == ({1024: "left", 8192: "left"}, {4096: "tuned", 8192: "tuned"})

    def test_the_last_to_end_tunes_for_those_of_other_threads(self, ask):
        first, second = block(), block()
        with first:
            ask()
            second.__enter__()
            ask(2048)
        assert first.result is None
        second.__exit__(None, None, None)
        assert states(second) == {2048: "tuned", 4096: "tuned"}
        assert first.result is second.result


class TestEnds:
    def test_an_interrupt_leaves_what_is_tuned(self, ask):
        def observe(progress):
            if progress.path[0].number == 2 and progress.done == 3:
                signal.raise_signal(signal.SIGINT)

        with pytest.warns(RuntimeWarning, match="2 problems: 1 tuned, 1 left"), block(progress=observe) as window:
            kernels = [ask(), ask(2048)]
        assert window.result.interrupted
        (tuned,) = [entry.planned.problem for entry in window.result.entries if entry.state == "tuned"]
        assert [kernel.config for kernel in kernels if kernel.problem == tuned] == [BEST]

    def test_a_second_one_too(self, ask):
        stop = ending_at(3)

        def observe(progress):
            if progress.path[0].number == 2:
                stop(progress)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            window = block(progress=observe)
            with pytest.raises(KeyboardInterrupt), window:
                kernels = [ask(), ask(2048)]
        assert sorted(states(window).values()) == ["left", "tuned"]
        assert "exact" in [kernel.tier for kernel in kernels]

    def test_a_forked_child_leaves_the_block_to_its_parent(self, ask, bench):
        with block() as window:
            ask()
            child = os.fork()
            if not child:
                status = 1
                with suppress(BaseException):
                    window.__exit__(None, None, None)
                    with autotile.tuning(mode="replay") as own:  # is not within that of the parent
                        pass
                    status = 0 if window.result is None and own.result is not None else 2
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert bench.stored() == []
        assert states(window) == {4096: "tuned"}


def test_ranks_begin_with_different_problems(ask, monkeypatch):
    orders = []

    class Planned(PlanRun):
        def run(self):
            orders.append([planned.problem.sizes["n"] for planned in self._plan.problems])
            return self.result

    monkeypatch.setattr(blocks, "PlanRun", Planned)
    for rank in (0, 1, 2):
        monkeypatch.setattr(blocks, "_rank", lambda rank=rank: (rank, 3))
        with block(sizes={"n": [1000, 2000, 3000, 4000, 6000]}):
            ask(5000)
    assert [sorted(order) for order in orders] == [[1000, 2000, 3000, 4000, 5000, 6000]] * 3
    assert len({order[0] for order in orders}) == len({order[1] for order in orders}) == 3


def test_a_failure_for_want_of_memory_says_what_the_program_leaves(bench, monkeypatch):
    runtime = SimpleNamespace(memGetInfo=lambda: (3 << 29, 141 << 30))
    cuda = SimpleNamespace(Device={1: nullcontext()}.__getitem__, runtime=runtime)
    monkeypatch.setattr(blocks, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
    planned = PlannedProblem("scale", bench.kernel, bench.problem(), (1,))
    entry = PlanEntry(planned, "NVIDIA H200", "failed", reason="the problem does not fit in the device's memory")
    assert "1.5 of 141.0 GiB are free beside the program" in blocks._with_memory(entry).reason
    assert blocks._with_memory(replace(entry, reason="another")).reason == "another"
