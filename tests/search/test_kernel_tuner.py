"""Kernel Tuner's strategies as samplers, their threads, and what they leave behind."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time

import numpy as np
import optuna
import pytest
from rows import advance_ahead, broken, make_space, ok, tile_space, tile_time_us

from autotile.core.model import Config, Trial
from autotile.core.objectives import TIME
from autotile.errors import InputError
from autotile.search import kernel_tuner as kernel_tuner_names
from autotile.search import kernel_tuner as kernel_tuner_turns
from autotile.search.kernel_tuner import PREFIX, KernelTunerSampler, Turns, kernel_tuner_samplers
from autotile.search.samplers import check_sampler, make_sampler
from autotile.search.search import Search
from autotile.search.study import distributions_of

DEFAULT: Config = {"BM": 64, "BN": 64, "TM": 2, "LAYOUT": "row", "ASYNC": False}


def runs(name: str) -> bool:
    try:
        check_sampler(name)
    except InputError:
        return False
    return True


RUNNING = [name for name in kernel_tuner_samplers() if runs(name)]
EXPECTED = {"genetic_algorithm", "pso", "simulated_annealing", "diff_evo", "firefly_algorithm", "dual_annealing", "mls"}


def trial_of(config: Config) -> Trial:
    return broken(config) if config["BM"] == 256 else ok(config, tile_time_us(config))


def advance(search: Search, trials: int, ahead: int = 1) -> list[Trial]:
    return advance_ahead(search, trials, trial_of, ahead)


def strategy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == kernel_tuner_turns.THREAD_NAME]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> None:
    yield
    gc.collect()
    for thread in strategy_threads():
        thread.join(5.0)
        assert not thread.is_alive()


def test_most_strategies_run() -> None:
    assert {name.removeprefix(PREFIX) for name in RUNNING} >= EXPECTED


@pytest.mark.parametrize("name", RUNNING)
def test_thirty_trials_are_distinct_rows_and_the_same_again(name: str) -> None:
    space = tile_space()
    outside = random.getstate(), np.random.get_state()[1].tolist(), np.random.default_rng
    courses = []
    for seed in (5, 5, 6):
        search = Search(space, name, seed, first=[DEFAULT], trials=30)
        courses.append([space.row_of(trial.config) for trial in advance(search, 30)])
    assert courses[0] == courses[1]
    assert courses[0] != courses[2] or name == f"{PREFIX}brute_force"
    assert courses[0][0] == space.row_of(DEFAULT)
    assert None not in courses[0]
    assert len(set(courses[0])) == 30
    assert (random.getstate(), np.random.get_state()[1].tolist(), np.random.default_rng) == outside


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("ahead", [1, 5])
def test_a_resumed_search_goes_on_as_the_first_one_would_have(name: str, ahead: int) -> None:
    def go_on(earlier: list[Trial]) -> list[Config]:
        search = Search(tile_space(), name, seed=7, first=[DEFAULT], trials=24, ahead=ahead)
        search.replay(earlier)
        return advance(search, 24 - len(earlier), ahead)

    done = go_on([])
    for killed in (1, 13, 20):
        assert [trial.config for trial in go_on(done[:killed])] == [trial.config for trial in done[killed:]]


@pytest.mark.parametrize("strategy", ["genetic_algorithm", "greedy_ils", "minimize", "pso"])
def test_a_strategy_that_ends_is_run_again_until_every_row_was_tried(strategy: str) -> None:
    space = make_space({"A": (1, 2, 4, 8), "B": ("x", "y", "z"), "C": (5,)}, lambda c: c["A"] != 2 or c["B"] != "y")
    search = Search(space, PREFIX + strategy, seed=1)
    configs = [
        config
        for _ in range(len(space))
        for row, config in [search.propose() or pytest.fail("too few rows")]
        if search.tell(row, ok(config, float(row + 1))) is None
    ]
    assert sorted(map(str, configs)) == sorted(str(space.config(row)) for row in range(len(space)))
    assert search.propose() is None


def test_only_available_rows_are_searched() -> None:
    space = tile_space()
    available = np.arange(len(space)) % 4 == 0
    search = Search(space, f"{PREFIX}genetic_algorithm", available=available)
    assert all(available[space.row_of(trial.config)] for trial in advance(search, int(available.sum())))


def test_a_strategy_learns_from_the_times() -> None:
    """Over ten seeds, a local search with 30 trials beats as many uniform draws."""

    def best(name: str, seed: int) -> float:
        return min(trial.time_us or np.inf for trial in advance(Search(tile_space(), name, seed, trials=30), 30))

    assert np.mean([best(f"{PREFIX}greedy_ils", seed) for seed in range(10)]) < np.mean(
        [best("random", seed) for seed in range(10)]
    )


def test_strings_do_not_make_it_differ_between_processes() -> None:
    """Sets of strings are in another order in each process."""
    code = (
        "from rows import *; from autotile.search.search import Search\n"
        "search = Search(tile_space(), 'kernel-tuner:greedy_mls', 3); rows = []\n"
        "for _ in range(25):\n"
        "    row, config = search.propose(); rows.append(row); search.tell(row, ok(config, tile_time_us(config)))\n"
        "print(rows)"
    )
    paths = ":".join(path for path in sys.path if path)
    courses = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(courses) == 1


def test_the_rest_of_a_generation_is_proposed_while_the_strategy_waits_and_then_its_neighbours() -> None:
    space = tile_space()
    sampler = KernelTunerSampler(space, "random_sample", 0, trials=12)
    study = optuna.create_study(sampler=sampler)
    asked = [study.ask(dict(distributions_of(space.parameters))) for _ in range(20)]
    rows = [space.row_of(trial.params) for trial in asked]
    assert rows[:12] == sampler._wanted  # which samples as many as there are trials, at once
    assert len(set(rows)) == 20


def test_dropping_a_sampler_ends_its_thread() -> None:
    search = Search(tile_space(), f"{PREFIX}pso")
    search.propose()
    (thread,) = strategy_threads()
    assert thread.daemon
    del search
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_process_ends_while_a_strategy_waits() -> None:
    code = (
        "from rows import tile_space; from autotile.search.search import Search\n"
        "search = Search(tile_space(), 'kernel-tuner:pso'); search.propose()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_listing_the_samplers_does_not_load_kernel_tuner() -> None:
    code = "import sys, autotile.search.search; sys.exit('kernel_tuner' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_strategy_that_cannot_run_over_rows_is_refused() -> None:
    with pytest.raises(InputError, match="pyatf_strategies' cannot be used: pyATF builds the space anew"):
        check_sampler(f"{PREFIX}pyatf_strategies")


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no sampler 'kernel-tuner:genetic'; did you mean 'kernel-tuner:genetic_alg"):
        make_sampler("kernel-tuner:genetic", tile_space(), 0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_tuner_names, "find_spec", lambda package: None)
    with pytest.raises(InputError, match="needs scikit-optimize: pip install scikit-optimize"):
        check_sampler("kernel-tuner:skopt")


def test_a_strategy_follows_one_objective() -> None:
    with pytest.raises(InputError, match="'kernel-tuner:pso' cannot follow several objectives"):
        check_sampler("kernel-tuner:pso", (TIME, "energy"))


def test_a_strategy_that_cannot_search_the_space_says_why() -> None:
    search = Search(make_space({"A": (1, 2, 4)}), f"{PREFIX}firefly_algorithm")
    with pytest.raises(InputError, match=r"firefly_algorithm cannot search these 3 configurations \(IndexError"):
        search.propose()


class TestTurns:
    def test_values_are_given_until_the_function_ends(self) -> None:
        turns = Turns(lambda give: [give(value) for value in "ab"], 0)
        assert [turns.next(), turns.next(), turns.next()] == ["a", "b", None]
        assert turns.failure == ""

    def test_a_failure_is_told(self) -> None:
        turns = Turns(lambda give: give(1 // 0), 0)
        assert turns.next() is None
        assert turns.failure == "ZeroDivisionError: integer division or modulo by zero"

    def test_random_states_are_its_own(self) -> None:
        def draw(give) -> None:
            while True:
                give((random.random(), np.random.rand(), np.random.default_rng().random()))

        one, other = Turns(draw, 1), Turns(draw, 1)
        drawn = [one.next(), other.next(), one.next(), other.next()]
        assert drawn[0] == drawn[1]
        assert drawn[2] == drawn[3]
        assert drawn[0] != drawn[2]

    def test_a_function_that_never_gives_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_tuner_turns, "_MOST_SECONDS", 0.2)

        def loop(give) -> None:
            while True:
                time.monotonic()

        turns = Turns(loop, 0)
        assert turns.next() is None
        assert "proposed nothing for 0.2 s" in turns.failure
        assert not turns.thread.is_alive()
