"""The default sampler: results, robustness and repeatability."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from rows import broken, make_space, ok, tile_space, tile_time_us
from test_sampler_quality import best_us, time_us, wide_space

from autotile.search.gp_sampler import FeasibleGPSampler, due_fit
from autotile.search.row_sampler import Candidates, distributions_of, rows_to_evaluate
from autotile.search.search import Search, new_study


def large_space():
    """Build a space of 12,288 rows, of which a sample is evaluated."""
    powers = (1, 2, 4, 8)
    return make_space(dict.fromkeys("ABCDEF", powers) | {"G": (1, 2, 3)})


def test_the_minimum_of_a_landscape_with_interactions_is_found_with_any_seed() -> None:
    """A random search finds it in 60 of 1,248 once in twenty."""
    space = wide_space()
    least = min(time_us(space.config(row)) for row in range(len(space)))
    assert [best_us("feasible", seed, 70) for seed in range(3)] == [least] * 3


def test_the_minimum_of_a_smooth_landscape_is_found_at_once() -> None:
    for seed in range(4):
        search = Search(tile_space(), "feasible", seed)
        found = []
        for _ in range(25):
            row, config = search.propose() or pytest.fail("too few rows")
            found.append(tile_time_us(config))
            search.tell(row, ok(config, found[-1]))
        assert min(found) == 100.0


def test_it_turns_away_from_what_fails() -> None:
    space = wide_space()
    search = Search(space, "feasible", seed=0)
    failed = []
    for _ in range(60):
        row, config = search.propose() or pytest.fail("too few rows")
        failed.append(config["LAYOUT"] == "b")
        search.tell(row, broken(config) if failed[-1] else ok(config, time_us(config)))
    assert any(failed[:15])
    assert np.mean(failed[20:]) < 0.15  # a third of the rows


def test_it_bears_that_nothing_works_for_long() -> None:
    space = wide_space()
    search = Search(space, "feasible", seed=3)
    worked = []
    for _ in range(70):
        row, config = search.propose() or pytest.fail("too few rows")
        worked.append(config["BM"] == 32 and config["LAYOUT"] == "b")
        search.tell(row, ok(config, 10.0) if worked[-1] else broken(config))
    share = ((space.column("BM") == 32) & (space.column("LAYOUT") == "b")).mean()
    first = worked.index(True)
    assert np.mean(worked[first + 1 :]) > 2 * share


def test_proposals_made_at_the_same_time_differ_and_are_spread() -> None:
    space = wide_space()
    search = Search(space, "feasible", seed=0)
    for _ in range(20):
        row, config = search.propose() or pytest.fail("too few rows")
        search.tell(row, ok(config, time_us(config)))
    batch = [search.propose() or pytest.fail("too few rows") for _ in range(16)]
    assert len({row for row, _ in batch}) == 16
    assert len({(config["BM"], config["BN"]) for _, config in batch}) >= 4


def test_many_compiled_rows_are_chosen_between_two_results() -> None:
    space = wide_space()
    search = Search(space, "feasible", seed=0)
    rows = [row for row, _ in (search.nominate() or pytest.fail("too few rows") for _ in range(400))]
    for row in rows[:12]:
        search.ranking.begin(row)
        search.tell(row, ok(space.config(row), time_us(space.config(row))))
    waiting, chosen = rows[12:], []
    for _ in range(40):
        chosen.append(search.select(waiting))
        search.ranking.begin(chosen[-1])
        waiting.remove(chosen[-1])
    assert len(set(chosen)) == 40
    predicted, others = ([time_us(space.config(row)) for row in part] for part in (chosen, waiting))
    assert np.median(predicted) < np.median(others)
    again = search.select(waiting[-3:])  # none of which need be ranked yet
    assert again in waiting[-3:]


def test_a_large_space_is_searched_near_the_best_and_everywhere() -> None:
    space = large_space()
    candidates = Candidates(space)
    best = np.array([7000, 20])
    rows = rows_to_evaluate(candidates, best, np.array([7000, 20]), np.random.default_rng(0))
    assert len(np.unique(rows)) == len(rows) < len(space)
    assert rows.min() >= 0
    apart = (space.codes != space.codes[7000]).sum(axis=1)
    assert np.isin(np.flatnonzero(apart == 1), rows).all()
    assert np.bincount(rows // 1024, minlength=12).min() > 100


def test_the_best_of_a_large_space_is_found() -> None:
    space = large_space()
    places = {"A": 2, "B": 1, "C": 8, "D": 4, "E": 1, "F": 8}
    study = new_study(sampler=FeasibleGPSampler(space, 0))
    for _ in range(60):
        trial = study.ask(dict(distributions_of(space.parameters)))
        away = sum(abs(np.log2(trial.params[name] / place)) for name, place in places.items())
        study.tell(trial, float(np.exp(0.3 * away)) * trial.params["G"])
    assert study.best_value < 1.4


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_any_objective_of_either_direction(direction: str) -> None:
    space = tile_space()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=FeasibleGPSampler(space, 0))
    sign = 1 if direction == "minimize" else -1
    for _ in range(30):
        trial = study.ask(dict(distributions_of(space.parameters)))
        study.tell(trial, sign * (tile_time_us(trial.params) - 200))
    assert study.best_value == sign * -100


def test_several_objectives_find_both_ends_of_the_front() -> None:
    space = tile_space()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=FeasibleGPSampler(space, 0))
    for _ in range(50):
        trial = study.ask(dict(distributions_of(space.parameters)))
        study.tell(trial, [tile_time_us(trial.params), float(trial.params["BM"] * trial.params["BN"])])
    values = np.array([trial.values for trial in study.best_trials])
    assert values[:, 0].min() == 100.0
    assert values[:, 1].min() == min(space.column("BM") * space.column("BN"))


def test_fits_become_rarer() -> None:
    assert [due_fit(count) for count in (6, 7, 20, 100, 109, 110)] == [6, 6, 20, 94, 103, 103]
