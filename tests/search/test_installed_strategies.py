"""Kernel Tuner's strategies as samplers, their processes, and what they leave behind."""

import gc
import os
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from child_python import python
from rows import DEFAULT, advance, broken, make_space, ok, tile_ok, tile_space, tile_time_us

from autotile.core.model import TIME, Config, Trial
from autotile.errors import InputError, WorkerError
from autotile.kernel.spec import Parameter
from autotile.search import installed_strategies as strategies
from autotile.search import samplers
from autotile.search.installed_strategies import KernelTunerSampler
from autotile.search.samplers import STRATEGY_PREFIX, check_sampler, sampler_names
from autotile.search.search import Search
from autotile.space.search_space import SearchSpace


def runs(name: str) -> bool:
    try:
        check_sampler(name)
    except InputError:
        return False
    return True


RUNNING = [name for name in sampler_names() if name.startswith(STRATEGY_PREFIX) and runs(name)]
EXPECTED = {"genetic_algorithm", "pso", "simulated_annealing", "diff_evo", "firefly_algorithm", "dual_annealing", "mls"}


def trial_of(config: Config) -> Trial:
    return broken(config) if config["BM"] == 256 else ok(config, tile_time_us(config))


def child_pids() -> set[int]:
    """Return the ids of the strategies' processes that this process started."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if b"strategy_worker" in path.read_bytes() and parent == os.getpid():
                pids.add(int(path.parent.name))
        except OSError:  # the process ended meanwhile
            continue
    return pids


@pytest.fixture(autouse=True)
def _no_process_stays():
    before = child_pids()
    yield
    gc.collect()
    assert child_pids() <= before


def go_on(name: str, earlier: list[Trial], seed: int = 7, ahead: int = 5) -> list[Trial]:
    """Run a search up to 16 trials, those of an earlier session included."""
    search = Search(tile_space(), name, seed, first=[DEFAULT], trials=16)
    search.replay(earlier, ahead)
    try:
        return advance(search, 16 - len(earlier), trial_of, ahead)
    finally:
        search.close()


@pytest.mark.parametrize("name", RUNNING[::6])
def test_proposals_are_distinct_rows_which_depend_on_the_seed_and_the_trials_alone(name):
    outside = random.getstate(), np.random.get_state()[1].tolist(), np.random.default_rng
    for ahead, killed in ((5, 9), (1, 1)):
        done = go_on(name, [], ahead=ahead)
        rows = [tile_space().row_of(trial.config) for trial in done]
        assert rows[0] == tile_space().row_of(DEFAULT)
        assert None not in rows
        assert len(set(rows)) == 16
        resumed = go_on(name, done[:killed], ahead=ahead)
        assert [trial.config for trial in resumed] == [trial.config for trial in done[killed:]]
    assert name.endswith("brute_force") or go_on(name, [], seed=8) != go_on(name, [])
    assert (random.getstate(), np.random.get_state()[1].tolist(), np.random.default_rng) == outside


def test_a_strategy_that_ends_is_run_again_until_every_available_row_was_tried():
    space = make_space({"A": (1, 2, 4, 8), "B": ("x", "y", "z"), "C": (5,)}, lambda c: c["A"] != 2 or c["B"] != "y")
    available = np.arange(len(space)) % 4 > 0
    search = Search(space, f"{STRATEGY_PREFIX}minimize", seed=1, available=available)
    done = advance(search, available.sum(), lambda config: ok(config, float(space.row_of(config) + 1)))
    assert sorted(space.row_of(trial.config) for trial in done) == np.flatnonzero(available).tolist()
    assert search.propose() is None


ELSEWHERE = """
import sys
from autotile.search.samplers import sampler_names
assert "kernel-tuner:pso" in sampler_names()
from autotile.search.search import Search
assert "kernel_tuner" not in sys.modules
from rows import advance, tile_ok, tile_space
search = Search(tile_space(), "kernel-tuner:greedy_mls", 3)
for trial in advance(search, 25, tile_ok):
    print(trial.config)
search.propose()
advance(Search(tile_space(), "feasible"), 8, tile_ok)
assert "optuna" not in sys.modules  # which only its own samplers need
"""


def test_strings_do_not_make_it_differ_between_processes_which_end_while_a_strategy_waits(monkeypatch):
    """The order of sets of strings differs between processes."""
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))  # with the modules of these tests
    other = python("-c", ELSEWHERE, env={"PYTHONHASHSEED": "1"})
    assert (other.returncode, other.stderr) == (0, "")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    here = advance(Search(tile_space(), f"{STRATEGY_PREFIX}greedy_mls", 3), 25, tile_ok)
    assert [str(trial.config) for trial in here] == other.stdout.splitlines()


def test_the_rest_of_a_generation_is_proposed_while_the_strategy_waits_and_then_its_neighbours():
    sampler = KernelTunerSampler(tile_space(), 0, strategy="random_sample", trials=12)
    rows = [sampler.propose() for _ in range(20)]
    assert rows[:12] == list(sampler._wanted)  # which samples as many as there are trials, at once
    assert len(set(rows)) == 20


@pytest.mark.parametrize("closes", [True, False])
def test_closing_a_search_or_dropping_it_ends_the_process_of_its_sampler(closes):
    before = child_pids()
    search = Search(tile_space(), f"{STRATEGY_PREFIX}pso")
    if not closes:
        search.propose()
    give_up = time.monotonic() + 10.0
    while not (own := child_pids() - before) and time.monotonic() < give_up:  # until it has become another program
        time.sleep(0.01)
    assert own
    if closes:
        search.close()
    else:
        del search
        gc.collect()
    assert not own & child_pids()


@pytest.mark.parametrize(
    ("strategy", "objectives", "expected"),
    [
        ("pyatf_strategies", (TIME,), "pyatf_strategies' cannot be used: pyATF builds the space anew"),
        ("genetic", (TIME,), r"no sampler 'kernel-tuner:genetic'; did you mean 'kernel-tuner:genetic_alg"),
        ("pso", (TIME, "energy"), "'kernel-tuner:pso' cannot follow several objectives"),
    ],
)
def test_what_cannot_be_used_is_refused(strategy, objectives, expected):
    with pytest.raises(InputError, match=expected):
        check_sampler(STRATEGY_PREFIX + strategy, objectives)


def test_the_strategies_are_those_of_the_installed_kernel_tuner_and_most_run():
    interface = pytest.importorskip("kernel_tuner.interface")
    assert {name.removeprefix(STRATEGY_PREFIX) for name in RUNNING} >= EXPECTED
    names = {name.removeprefix(STRATEGY_PREFIX) for name in sampler_names() if name.startswith(STRATEGY_PREFIX)}
    assert names == set(interface.strategy_map) - {"pyatf_strategies"}


def test_the_strategies_are_read_from_a_source_without_running_it(tmp_path):
    interface = tmp_path / "interface.py"
    interface.write_text("import nowhere\nstrategy_map = {'pso': nowhere.pso, 'mls': nowhere.mls}\n")
    assert samplers._strategies_in(interface) == ("pso", "mls")
    for number, text in enumerate(("strategy_map = dict()", "strategy_map = {", "\0")):
        other = tmp_path / f"{number}.py"
        other.write_text(text)
        assert samplers._strategies_in(other) == ()
    assert samplers._strategies_in(tmp_path / "missing.py") == ()


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None if name in packages else find_spec(name))


@pytest.mark.parametrize("strategy", ["genetic_algorithm", "skopt", "no_such_strategy"])
def test_missing_packages_are_named(strategy, monkeypatch):
    hide(monkeypatch, "skopt")
    expected = "needs scikit-optimize: pip install scikit-optimize, or choose another strategy"
    with pytest.raises(InputError, match=expected):
        check_sampler("kernel-tuner:skopt")
    hide(monkeypatch, "kernel_tuner", "skopt")
    expected = r'needs kernel_tuner: pip install "autotile\[kernel-tuner\]", or choose another sampler'
    with pytest.raises(InputError, match=expected):
        check_sampler(STRATEGY_PREFIX + strategy)
    assert "feasible" in sampler_names()
    assert not [name for name in sampler_names() if name.startswith(STRATEGY_PREFIX)]


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    """Run a worker of a few lines in place of the one that runs strategies."""

    def use(body: str) -> None:
        (tmp_path / "strange_strategy.py").write_text(
            "import os, time\nfrom autotile.workers.child import Channel\n"
            f"channel = Channel()\nwhile request := channel.receive():\n    {body}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(strategies, "_WORKER_MODULE", "strange_strategy")

    return use


SILENT = "channel.reply({}) if request['op'] == 'open' else time.sleep(60)"
DYING = "channel.reply({}) if request['op'] == 'open' else os._exit(3)"
DYING_LATER = (
    "channel.reply({'wanted': [7]} if request['op'] == 'run' else {}) if request['op'] != 'resume' else os._exit(3)"
)


class TestProcess:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (SILENT, r"it proposed nothing for 0.3 s"),
            (DYING, r"the worker died with exit code 3"),
            ("channel.reply({'mood': 'good'})", r"the worker's reply is malformed: .*'mood'"),
        ],
    )
    def test_a_process_that_fails_at_once_says_why(self, child_module, monkeypatch, body, reason):
        child_module(body)
        monkeypatch.setattr(strategies, "_MAX_SILENCE_S", 0.3 if body == SILENT else 60.0)
        with pytest.raises(InputError, match=rf"pso cannot search these 116 .* \({reason}"):
            Search(tile_space(), f"{STRATEGY_PREFIX}pso").propose()

    def test_a_strategy_that_dies_after_it_proposed_is_started_again(self, child_module):
        child_module(DYING_LATER)
        space = tile_space()
        search = Search(space, f"{STRATEGY_PREFIX}pso", seed=1)
        rows = [space.row_of(trial.config) for trial in advance(search, 6, trial_of)]
        assert rows[0] == 7
        assert len(set(rows)) == 6  # drawn uniformly once the strategy is given up

    def test_output_of_a_strategy_is_no_message(self, child_module):
        child_module("print('noise', flush=True); channel.reply({} if request['op'] == 'open' else {'wanted': [5]})")
        assert KernelTunerSampler(tile_space(), 0, strategy="pso")._step()[0] == [5]

    def test_an_unknown_strategy_is_a_failure_of_the_run(self):
        sampler = KernelTunerSampler(tile_space(), 0, strategy="no_such_strategy")
        assert sampler._step() == ([], 0, "KeyError: 'no_such_strategy'")
        sampler.close()
        with pytest.raises(WorkerError):
            sampler._step()

    def test_a_large_generation_comes_in_parts(self):
        codes = np.array([(a, b, c) for c in range(2) for a in range(256) for b in range(256)][:65_600], np.uint8)
        parameters = tuple(Parameter(name, tuple(range(count))) for name, count in (("A", 256), ("B", 256), ("C", 2)))
        space = SearchSpace(parameters, codes, len(codes), rules=(), limits=(), seconds=0.0)
        sampler = KernelTunerSampler(space, 0, strategy="brute_force")
        first = sampler._step()[0]
        sampler._is_running, sampler._unsent = True, dict.fromkeys(first, 1.0)
        second = sampler._step()[0]
        assert (len(first), len(second)) == (1 << 16, 64)
        assert sorted([*first, *second]) == list(range(len(codes)))
        sampler._unsent = dict.fromkeys(second)
        assert sampler._step() == ([], len(codes), "")

    def test_starting_one_does_not_wait_for_kernel_tuner(self, child_module, tmp_path):
        child_module("channel.reply({} if request['op'] == 'open' else {'wanted': [5]})")
        imported, module = tmp_path / "imported", tmp_path / "strange_strategy.py"
        os.mkfifo(imported)
        module.write_text(f"open({str(imported)!r}).read()\n{module.read_text()}")  # an import that lasts until then
        sampler = KernelTunerSampler(tile_space(), 0, strategy="pso")
        imported.write_text("")
        assert sampler._step()[0] == [5]
        sampler.close()
