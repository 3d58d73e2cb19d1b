"""Properties of every sampler: it proposes only rows, each once, all in the end, and repeatably."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from rows import TILES, make_space, spaces, tile_space, tile_time_us

from autotile.errors import InputError
from autotile.search import gp_sampler, optuna_samplers
from autotile.search.optuna_samplers import FeasibleSampler
from autotile.search.row_sampler import RowSampler, distributions_of
from autotile.search.samplers import SAMPLERS, make_sampler
from autotile.space.search_space import SearchSpace

INSTALLED = [name for name, kind in SAMPLERS.items() if kind.missing_package is None]
QUICK = [name for name in INSTALLED if name != "gp"]


def ask(study: optuna.Study, space: SearchSpace) -> optuna.Trial:
    """Ask for a trial with all parameters."""
    return study.ask(dict(distributions_of(space.parameters)))


def run(sampler: RowSampler, trials: int, study: optuna.Study | None = None) -> list[int]:
    """Return the rows that are proposed to a study."""
    study = study or optuna.create_study(sampler=sampler)
    space = sampler.candidates.space
    rows = []
    for _ in range(trials):
        trial = ask(study, space)
        row = space.row_of(trial.params)
        assert row is not None
        rows.append(row)
        study.tell(trial, float(np.random.default_rng(row).random()))
    return rows


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.mark.parametrize("name", QUICK)
@settings(deadline=None, max_examples=8)
@given(space=spaces())
def test_all_rows_are_proposed_once_and_nothing_else(name: str, space: SearchSpace) -> None:
    sampler = make_sampler(name, space, seed=3)
    study = optuna.create_study(sampler=sampler)
    trials = min(len(space), 60)
    rows = run(sampler, trials, study)
    assert len(set(rows)) == trials
    assert sampler.remaining(study) == len(space) - trials
    if trials == len(space) and any(len(each.values) > 1 for each in space.parameters):
        with pytest.raises(InputError, match="every configuration of the space was tried"):
            ask(study, space)


@pytest.mark.parametrize("name", INSTALLED)
def test_proposals_depend_on_the_seed_alone(name: str) -> None:
    space = tile_space()
    first, again, other = (run(make_sampler(name, space, seed), 35) for seed in (1, 1, 2))
    assert first == again
    assert first != other or name == "brute-force"


@pytest.mark.parametrize("name", QUICK)
def test_only_available_rows_are_proposed(name: str) -> None:
    space = tile_space()
    available = np.zeros(len(space), np.bool_)
    available[::5] = True
    rows = run(make_sampler(name, space, 0, available), int(available.sum()))
    assert sorted(rows) == np.flatnonzero(available).tolist()


def test_brute_force_goes_in_order() -> None:
    assert run(make_sampler("brute-force", tile_space(), 0), 20) == list(range(20))


def test_random_is_uniform_over_the_rows_and_not_over_the_combinations() -> None:
    space = make_space({"A": (1, 2, 3, 4), "B": (1, 2, 3, 4)}, lambda c: c["A"] == 1 or c["B"] == 1)
    first = [run(make_sampler("random", space, seed), 1)[0] for seed in range(700)]
    counts = np.bincount(first, minlength=len(space))
    assert counts.min() > 60  # 100 expected; a binomial count is under 60 once in 30,000
    assert counts.max() < 140


@pytest.mark.parametrize(
    "inner",
    [
        optuna.samplers.RandomSampler,
        optuna.samplers.TPESampler,
        partial(optuna.samplers.TPESampler, multivariate=False),
        optuna.samplers.NSGAIISampler,
        optuna.samplers.QMCSampler,
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_any_sampler_can_be_wrapped_in_anyones_study(inner, ordered: bool) -> None:
    space = tile_space()
    study = optuna.create_study(sampler=FeasibleSampler(space, inner, 5, ordered=ordered))
    seen = []

    def objective(trial: optuna.Trial) -> float:
        config = {name: trial.suggest_categorical(name, values) for name, values in TILES.items()}
        seen.append(space.row_of(config))
        return tile_time_us(config)

    study.optimize(objective, n_trials=40)
    assert None not in seen
    assert len(set(seen)) == 40


def test_a_study_ends_by_itself_when_every_row_was_tried() -> None:
    space = make_space({"A": (1, 2, 3), "B": (1, 2, 3)}, lambda c: int(c["A"]) <= int(c["B"]))
    study = optuna.create_study(sampler=FeasibleSampler(space, optuna.samplers.TPESampler, 0))
    study.optimize(lambda t: t.suggest_categorical("A", (1, 2, 3)) * t.suggest_categorical("B", (1, 2, 3)))
    assert len(study.trials) == 6
    assert study.best_params == {"A": 1, "B": 1}


def test_threads_share_a_sampler() -> None:
    space = tile_space()
    study = optuna.create_study(sampler=make_sampler("tpe", space, 0))
    study.optimize(
        lambda t: tile_time_us({n: t.suggest_categorical(n, v) for n, v in TILES.items()}), n_trials=60, n_jobs=4
    )
    assert len({space.row_of(trial.params) for trial in study.trials}) == 60


def test_trials_of_others_and_failed_ones_are_not_proposed_again() -> None:
    space = make_space({"A": tuple(range(12))})
    sampler = FeasibleSampler(space, optuna.samplers.NSGAIISampler, 0, startup=2)
    study = optuna.create_study(sampler=sampler)
    for value, state in ((3, optuna.trial.TrialState.FAIL), (4, optuna.trial.TrialState.PRUNED)):
        study.enqueue_trial({"A": value})
        study.tell(ask(study, space), state=state)
    study.enqueue_trial({"A": 5})
    waiting = ask(study, space)
    proposed = []
    for _ in range(9):
        trial = ask(study, space)
        proposed.append(trial.params["A"])
        study.tell(trial, float(trial.params["A"]))
    study.tell(waiting, 0.0)
    assert sorted([*proposed, 3, 4, 5]) == list(range(12))
    assert sampler.remaining(study) == 0


def test_several_objectives_are_passed_on() -> None:
    space = tile_space()
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FeasibleSampler(space, optuna.samplers.NSGAIISampler, 0)
    )
    for _ in range(30):
        trial = ask(study, space)
        study.tell(trial, [tile_time_us(trial.params), float(trial.params["BM"])])
    assert len({space.row_of(trial.params) for trial in study.trials}) == 30


def test_a_parameter_that_the_space_lacks_is_refused() -> None:
    study = optuna.create_study(sampler=make_sampler("random", make_space({"A": (1, 2)}), 0))
    with pytest.raises(InputError, match="'C' is not a parameter of the space"):
        study.ask({"C": optuna.distributions.CategoricalDistribution((1, 2))})


def test_the_nearest_row_is_taken_when_no_draw_is_one() -> None:
    class Corner(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, param_name, param_distribution):
            return param_distribution.choices[-1]

    space = make_space({"A": (1, 2, 4, 8), "B": (1, 2, 4, 8)}, lambda c: int(c["A"]) + int(c["B"]) <= 12)
    study = optuna.create_study(sampler=FeasibleSampler(space, Corner, 0, startup=1))
    study.enqueue_trial({"A": 1, "B": 1})
    configs = [tuple(space.config(row).values()) for row in run(study.sampler, 6, study)][1:]
    assert set(configs[:2]) == {(8, 4), (4, 8)}
    assert set(configs[2:]) == {(4, 4), (8, 2), (2, 8)}


@pytest.mark.parametrize("module", [optuna_samplers, gp_sampler])
def test_the_docstring_example_holds(module: ModuleType) -> None:
    import doctest

    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted
