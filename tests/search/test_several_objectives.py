"""Searches that minimise time and registers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from rows import broken, make_space, ok, tile_space, tile_time_us

from autotile.core.model import Config, Outcome, Resources, Trial, non_dominated, objective_values
from autotile.errors import InputError
from autotile.search.row_sampler import quiet_optuna
from autotile.search.samplers import SAMPLERS, check_sampler
from autotile.search.search import Search, study_to_storage

OBJECTIVES = ("time", "registers")
FOLLOWING = [name for name, kind in SAMPLERS.items() if kind.multi_objective and kind.missing_package is None]


def registers_of(config: Config) -> int:
    """Return the registers, which are few for small tiles, where the time is not the lowest."""
    return 16 * int(config["TM"]) + int(config["BM"]) // 8 + (20 if config["ASYNC"] else 0)


def judged(config: Config) -> Trial:
    if config["BM"] == config["BN"] == 32:
        return broken(config)
    return replace(ok(config, tile_time_us(config)), resources=Resources(registers_of(config), 0, 0, 0, 0))


def run(search: Search, trials: int) -> list[Trial]:
    ended = []
    for _ in range(trials):
        row, config = search.propose() or pytest.fail("nothing proposed")
        ended.append(judged(config))
        search.tell(row, ended[-1])
    return ended


def volume(trials: Iterable[Trial]) -> float:
    """Return the dominated area, up to 600 us and 200 registers."""
    points = np.array([values for trial in trials if (values := objective_values(trial, OBJECTIVES)) is not None])
    front = points[non_dominated(points)]
    front = front[np.argsort(front[:, 0])]
    lower = np.append(200.0, front[:-1, 1])
    return float(((600.0 - front[:, 0]) * np.maximum(lower - front[:, 1], 0.0)).sum())


@pytest.mark.parametrize("sampler", FOLLOWING)
def test_every_sampler_but_those_refused_follows_both(sampler: str) -> None:
    search = Search(tile_space(), sampler, objectives=OBJECTIVES)
    ended = run(search, 40)
    assert [trial.values for trial in search.study.trials if trial.user_attrs["outcome"] == "ok"] == [
        list(values) for trial in ended if (values := objective_values(trial, OBJECTIVES)) is not None
    ]
    assert search.study.metric_names == ["time_us", "registers"]


@pytest.mark.parametrize("sampler", ["feasible", "tpe"])
def test_a_model_finds_more_of_the_front_than_chance(sampler: str) -> None:
    def found(name: str) -> float:
        return float(
            np.mean([volume(run(Search(tile_space(), name, seed, objectives=OBJECTIVES), 40)) for seed in (1, 2)])
        )

    assert found(sampler) > found("random")


def test_one_that_follows_a_single_objective_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"'cmaes' cannot follow several objectives \(time, registers\); feasible, tpe"
    ):
        check_sampler("cmaes", OBJECTIVES)
    with pytest.raises(InputError, match="several objectives"):
        Search(tile_space(), "cmaes", objectives=OBJECTIVES)


@pytest.mark.parametrize("sampler", ["feasible", "tpe", "nsga2"])
def test_a_search_that_is_built_again_goes_on_as_the_first(sampler: str) -> None:
    whole = run(Search(tile_space(), sampler, 3, objectives=OBJECTIVES), 40)
    again = Search(tile_space(), sampler, 3, objectives=OBJECTIVES)
    assert again.replay(whole[:25]) == 25
    assert [trial.config for trial in run(again, 15)] == [trial.config for trial in whole[25:]]


def test_a_failure_is_told_worse_than_all_in_everything() -> None:
    search = Search(make_space({"TM": (2, 4, 8, 1)}), "brute-force", objectives=OBJECTIVES)
    small, large = Resources(40, 0, 0, 0, 0), Resources(90, 0, 0, 0, 0)
    for trial in (
        broken({"TM": 2}, Outcome.CRASHED),
        replace(ok({"TM": 4}, 20.0), resources=large),
        replace(ok({"TM": 8}, 30.0), resources=small),
        broken({"TM": 1}),
    ):
        row, config = search.propose() or pytest.fail("nothing proposed")
        assert config == trial.config
        search.tell(row, trial)
    assert [trial.values for trial in search.study.trials] == [[1e6, 1e6], [20.0, 90.0], [30.0, 40.0], [60.0, 180.0]]
    assert [trial.params["TM"] for trial in search.study.best_trials] == [4, 8]


def test_the_study_is_exported_with_both(tmp_path: Path) -> None:
    search = Search(tile_space(), "random", objectives=OBJECTIVES)
    run(search, 10)
    study_to_storage(search.study, tmp_path / "study.db")
    with quiet_optuna():
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
        loaded = optuna.load_study(study_name=search.study.study_name, storage=storage)
        assert [trial.values for trial in loaded.trials] == [trial.values for trial in search.study.trials]
        assert loaded.metric_names == ["time_us", "registers"]
    storage.remove_session()
    storage.engine.dispose()
