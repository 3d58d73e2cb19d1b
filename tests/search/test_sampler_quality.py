"""Samplers with a model are better than random ones, and avoid failures."""

from __future__ import annotations

import numpy as np
import pytest
from rows import broken, make_space, ok

from autotile.core.model import Config
from autotile.search.optuna_samplers import FeasibleTPESampler
from autotile.search.row_sampler import distributions_of
from autotile.search.search import Search, new_study
from autotile.space.search_space import SearchSpace


def wide_space() -> SearchSpace:
    """Build a space of 1,296 of 13,824 combinations: one in ten, a typical share of valid ones."""
    powers = (1, 2, 4, 8, 16, 32)
    values = {
        "BM": powers,
        "BN": powers,
        "TM": (1, 2, 4, 8),
        "TN": (1, 2, 4, 8),
        "LAYOUT": ("a", "b", "c"),
        "VEC": (1, 2, 4, 8)[:2],
    }

    def keep(c: Config) -> bool:
        return (
            int(c["BM"]) % int(c["TM"]) == 0 and int(c["BN"]) % int(c["TN"]) == 0 and int(c["BM"]) * int(c["BN"]) >= 64
        )

    return make_space(values, keep)


def time_us(config: Config) -> float:
    """Return a time with interactions: of the area and the shape of the tile, and of both thread tiles."""
    bm, bn, tm, tn = (np.log2(int(config[name])) for name in ("BM", "BN", "TM", "TN"))
    distance = abs(bm + bn - 8) + 0.5 * abs(bm - bn) + 0.7 * abs(tm + tn - 4) + 0.3 * abs(tm - tn)
    return float(
        10 * (1 + distance) * {"a": 1.3, "b": 1.0, "c": 1.6}[str(config["LAYOUT"])] / (1 + 0.1 * int(config["VEC"]))
    )


def best_us(name: str, seed: int, trials: int) -> float:
    search = Search(wide_space(), name, seed)
    best = np.inf
    for _ in range(trials):
        row, config = search.propose() or pytest.fail("too few rows")
        search.tell(row, ok(config, time_us(config)))
        best = min(best, time_us(config))
    return float(best)


@pytest.mark.parametrize(("name", "trials"), [("tpe", 60), ("nsga2", 80)])
def test_better_than_chance_on_average(name: str, trials: int) -> None:
    model, chance = (np.log([best_us(each, seed, trials) for seed in range(5)]).mean() for each in (name, "random"))
    assert model < chance - 0.02


def test_tpe_turns_away_from_what_fails() -> None:
    space = wide_space()
    search = Search(space, "tpe", seed=0)
    layouts = []
    for _ in range(90):
        row, config = search.propose() or pytest.fail("too few rows")
        layouts.append(config["LAYOUT"])
        search.tell(row, broken(config) if config["LAYOUT"] == "a" else ok(config, 10.0 + row % 7))
    among_rows = float(np.mean(space.column("LAYOUT") == "a"))
    assert layouts[:10].count("a") > 0
    assert layouts[40:].count("a") / 50 < 0.5 * among_rows


def test_tpe_finds_the_few_that_run_among_failures() -> None:
    space = wide_space()
    search = Search(space, "tpe", seed=1)
    runs = []
    for _ in range(80):
        row, config = search.propose() or pytest.fail("too few rows")
        runs.append(config["BM"] == 32 and config["LAYOUT"] == "b")
        search.tell(row, ok(config, 10.0 + row % 7) if runs[-1] else broken(config))
    valid = (space.column("BM") == 32) & (space.column("LAYOUT") == "b")
    assert np.mean(runs[40:]) > 2 * valid.mean()


def test_tpe_compares_free_rows_only() -> None:
    """Guards the hook by which Optuna's estimator is replaced."""
    space = wide_space()
    sampler = FeasibleTPESampler(space, seed=0)
    kept = []
    estimator = sampler._estimator

    class Watched(estimator):  # type: ignore[misc, valid-type]
        def sample(self, rng, size):
            drawn = super().sample(rng, size)
            codes = np.stack([drawn[each.name] for each in space.parameters], axis=1).astype(np.int64)
            kept.append(float(np.mean(sampler.candidates.free_rows_of(codes) >= 0)))
            return drawn

    sampler._estimator = Watched
    study = new_study(sampler=sampler)
    for _ in range(30):
        trial = study.ask(dict(distributions_of(space.parameters)))
        study.tell(trial, time_us(trial.params))
    assert len(kept) == 20
    assert min(kept) == 1.0
