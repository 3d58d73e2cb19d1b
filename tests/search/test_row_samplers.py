"""Samplers by name, and properties of each: it proposes only rows, each once, all in the end, and repeatably."""

from collections.abc import Callable
from itertools import product

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import advance, broken, make_space, ok, spaces, tile_space, wide_space

from autotile.core.model import Config
from autotile.errors import InputError
from autotile.search import samplers
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.optuna_samplers import FeasibleSampler
from autotile.search.row_sampler import Candidates, RowSampler
from autotile.search.samplers import BRUTE_FORCE, SAMPLERS, Lookahead, lookahead_of
from autotile.search.search import Search

INSTALLED = [name for name, kind in SAMPLERS.items() if kind.missing_package is None]
QUICK = [name for name in INSTALLED if name != "gp"]


def run(sampler: RowSampler, trials: int) -> list[int]:
    rows = []
    for _ in range(trials):
        rows.append(sampler.propose())
        sampler.tell(rows[-1], (float(np.random.default_rng(rows[-1]).random()),))
    return rows


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=8)
@given(space=spaces(), skipped=st.integers(2, 9))
def test_all_available_rows_are_proposed_once_and_nothing_else(name, space, skipped):
    available = np.arange(len(space)) % skipped != 1
    sampler = Search(space, name, 3, available=available)._rows
    count = int(available.sum())
    trials = min(count, 60)
    rows = run(sampler, trials)
    assert len(set(rows)) == trials
    assert available[rows].all()
    assert sampler.candidates.remaining == count - trials


def test_brute_force_goes_in_order_and_random_is_uniform_over_the_rows_and_not_over_the_combinations():
    assert run(Search(tile_space(), "brute-force")._rows, 20) == list(range(20))
    space = make_space({"A": (1, 2, 3, 4), "B": (1, 2, 3, 4)}, lambda c: c["A"] == 1 or c["B"] == 1)
    first = [run(Search(space, "random", seed)._rows, 1)[0] for seed in range(700)]
    counts = np.bincount(first, minlength=len(space))
    assert counts.min() > 60  # 100 expected; a binomial count is under 60 once in 30,000
    assert counts.max() < 140


def test_trials_of_others_and_failed_ones_are_not_proposed_again():
    space = make_space({"A": tuple(range(12))})
    sampler = FeasibleSampler(space, 0, inner=optuna.samplers.NSGAIISampler, startup=2)
    for row in (3, 4, 5):
        assert sampler.propose(row) == row
    sampler.withdraw(3)
    sampler.tell(4, None)
    proposed = run(sampler, 9)
    sampler.tell(5, (0.0,))
    assert sorted([*proposed, 3, 4, 5]) == list(range(12))
    assert sampler.candidates.remaining == 0


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"no sampler 'tpee'; did you mean 'tpe'\? \(known: auto, feasible, tpe, gp"):
        Search(tile_space(), "tpee")
    assert {samplers.AUTO, *SAMPLERS} <= set(samplers.sampler_names())


def test_the_nearest_row_is_taken_when_no_draw_is_one():
    class Corner(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, param_name, param_distribution):
            return param_distribution.choices[-1]

    space = make_space({"A": (1, 2, 4, 8), "B": (1, 2, 4, 8)}, lambda c: int(c["A"]) + int(c["B"]) <= 12)
    sampler = FeasibleSampler(space, 0, inner=Corner, startup=1)
    sampler.tell(sampler.propose(space.row_of({"A": 1, "B": 1})), (1.0,))
    configs = [tuple(space.config(row).values()) for row in run(sampler, 5)]
    assert (set(configs[:2]), set(configs[2:])) == ({(8, 4), (4, 8)}, {(4, 4), (8, 2), (2, 8)})


@given(spaces(), st.randoms(use_true_random=False))
def test_codes_lead_to_their_row_exactly_when_it_is_free(space, random):
    candidates = Candidates(space)
    for row in random.sample(range(len(space)), len(space) // 2):
        candidates.take(row)
    grid = np.array(list(product(*(range(len(each.values)) for each in space.parameters))))
    for codes, row in zip(grid, candidates.free_rows_of(grid), strict=True):
        config = {each.name: each.values[code] for each, code in zip(space.parameters, codes, strict=True)}
        expected = space.row_of(config)
        assert row == (-1 if expected is None or not candidates.free[expected] else expected)
    assert candidates.remaining == np.count_nonzero(candidates.free) == len(space) - len(space) // 2


def test_only_available_rows_count():
    space = make_space({"A": (1, 2, 3)})
    candidates = Candidates(space, [False, True, True])
    for row in (0, 2, 2):
        candidates.take(row)
    assert (candidates.remaining, candidates.uniform(np.random.default_rng(0))) == (1, 1)
    with pytest.raises(ValueError, match="broadcast"):
        Candidates(space, [True, True])


def test_a_doubling_is_one_step_and_a_name_differs_or_not():
    space = make_space({"A": (8, 16, 32, 64, 128), "B": ("x", "y")})
    candidates, rng, wanted, order = Candidates(space), np.random.default_rng(0), {"A": 32, "B": "x"}, []
    while candidates.remaining:
        row = candidates.nearest(space.codes[space.row_of(wanted)].astype(np.int64), rng)
        order.append(space.config(row))
        candidates.take(row)
    assert (order[0], order[5]) == (wanted, {"A": 32, "B": "y"})
    assert [{config["A"] for config in order[at : at + 2]} for at in (1, 3)] == [{16, 64}, {8, 128}]
    assert [config["B"] for config in order] == ["x"] * 5 + ["y"] * 5


def test_ties_are_broken_by_the_generator_alone():
    space = make_space({"A": (1, 2, 4), "B": (1, 2, 4)}, lambda c: c != {"A": 2, "B": 2})

    def nearest(seed: int) -> int:
        return Candidates(space).nearest(np.array([1, 1]), np.random.default_rng(seed))

    chosen = [nearest(seed) for seed in range(40)]
    assert chosen == [nearest(seed) for seed in range(40)]
    assert {tuple(space.config(row).values()) for row in chosen} == {(1, 2), (2, 1), (2, 4), (4, 2)}


def shares(works: Callable[[Config], bool], name: str, seed: int, trials: int) -> tuple[list[bool], float]:
    """Return which proposals of a sampler work, and the share of the rows that do."""
    space = wide_space()
    search = Search(space, name, seed)
    done = advance(search, trials, lambda c: ok(c, 10.0 + space.row_of(c) % 7) if works(c) else broken(c))
    rows = [works(space.config(row)) for row in range(len(space))]
    return [works(trial.config) for trial in done], float(np.mean(rows))


@pytest.mark.parametrize(("name", "learnt", "most"), [("tpe", 40, 0.5), ("feasible", 20, 0.45)])
def test_it_turns_away_from_what_fails_and_finds_the_few_that_run(name, learnt, most):
    worked, share = shares(lambda config: config["LAYOUT"] != "a", name, 0, 50 + learnt)
    assert not all(worked[:10])
    assert 1 - np.mean(worked[learnt:]) < most * (1 - share)
    worked, share = shares(lambda config: config["BM"] == 32 and config["LAYOUT"] == "b", name, 1, 80)
    assert np.mean(worked[40:]) > 2 * share


@pytest.mark.parametrize(
    ("name", "available", "trials", "expected"),
    [
        ("auto", None, 116, "brute-force"),
        ("auto", None, 115, "feasible"),
        ("auto", None, None, "feasible"),
        ("auto", 10, 10, "brute-force"),
        ("gp", None, 116, "gp"),
    ],
)
def test_auto_is_brute_force_for_whole_spaces(name, available, trials, expected):
    space = tile_space()
    mask = None if available is None else np.arange(len(space)) < available
    assert samplers.resolve_sampler(name, space, mask, trials) == expected


@pytest.mark.parametrize("name", [name for name, entry in SAMPLERS.items() if entry.packages])
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(samplers, "find_spec", lambda package: None)
    _, package, install = SAMPLERS[name].packages[0]
    with pytest.raises(InputError, match=f"needs {package}: pip install {install}, or choose tpe"):
        Search(tile_space(), name)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_sampler_can_what_its_lookahead_asks_for(name):
    assert isinstance(Search(tile_space(), name)._rows, FeasibleGPSampler) == SAMPLERS[name].lookahead.ranks


def test_only_samplers_that_do_not_learn_look_further_ahead_with_more_workers():
    assert lookahead_of("feasible", 64) == lookahead_of("feasible", 1) == Lookahead(32, per_measured=2, queued=1)
    assert lookahead_of("tpe", 64) == Lookahead(16)
    assert lookahead_of("kernel-tuner:pso", 64) == Lookahead(1)
    for name in ("random", BRUTE_FORCE):
        assert (lookahead_of(name, 1), lookahead_of(name, 64)) == (Lookahead(16, queued=1), Lookahead(256, queued=1))


def delay_of(nominated: list[int], compiled: int, begun: int) -> int:
    """Return after how many trials the newest of the compiled candidates may be chosen."""
    return next(count for count in range(begun) if nominated[begun - count] <= compiled)


def test_several_gpus_look_as_many_times_further_ahead():
    one, four = lookahead_of("feasible", 64), lookahead_of("feasible", 64, gpu_count=4)
    assert [one.held(begun) for begun in (0, 23, 24)] == [1, 1, 1]
    assert [four.held(begun) for begun in (0, 23, 24)] == [3, 3, 7]  # at first, no GPU has a second candidate
    assert (four.compiling, four.queued) == (4 * one.compiling, 7)
    assert lookahead_of("kernel-tuner:pso", 64, gpu_count=4) == Lookahead(1)
    nominated = [four.nominated(begun) for begun in range(400)]
    for begun in range(14, 400):
        compiled = four.compiled(begun)
        assert begun < compiled <= nominated[begun]
        assert delay_of(nominated, compiled, begun) <= min(max(8, begun // 2), 64)
    for begun in range(30, 400):
        assert nominated[begun] - four.compiled(begun) >= 2 * (one.nominated(begun) - one.compiled(begun))


def test_a_choice_among_ranked_candidates_lacks_a_bounded_share_of_the_results():
    lookahead = lookahead_of("feasible", 16)
    nominated = [lookahead.nominated(begun) for begun in range(700)]
    compiled = [lookahead.compiled(begun) for begun in range(700)]
    assert compiled[:7] == list(range(1, 8))  # the first ones in the order of the proposals
    assert nominated == sorted(nominated)
    assert compiled == sorted(compiled)
    for begun in range(7, 700):
        assert begun < compiled[begun] <= nominated[begun]
        assert delay_of(nominated, compiled[begun], begun) <= min(max(2, begun // 6), 16)
        assert nominated[begun] - compiled[begun] <= lookahead.compiling
    assert nominated[699] - nominated[695] == 8


def test_the_traits_that_sessions_ask_for():
    assert [name for name, entry in samplers.SAMPLERS.items() if entry.predicts_gain] == ["feasible"]
    assert [name for name, entry in samplers.SAMPLERS.items() if entry.exhaustive] == [BRUTE_FORCE]
    assert [name for name in SAMPLERS if "sources" in samplers.sampler_entry(name).takes] == ["feasible"]
