"""Importance of parameters in spaces where it is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rows import make_space, ok

from autotile.core.model import Config
from autotile.search.importance import Effect, importance_of
from autotile.search.search import Search
from autotile.space.search_space import SearchSpace

SIZES = (1, 2, 4, 8, 16)
SIX = dict.fromkeys("ABCDEF", SIZES)


def six() -> SearchSpace:
    return make_space(SIX, lambda c: int(c["A"]) * int(c["B"]) <= 128)


def additive(config: Config) -> float:
    """A spreads the logarithm of the time twice as far as B does, so four times as much of its variance."""
    return float(np.exp(0.5 * np.log2(int(config["A"])) + 0.25 * np.log2(int(config["B"]))))


def opposed(config: Config) -> float:
    """Neither A nor B does anything alone: it matters whether they are on the same side of 4."""
    return float(np.exp(np.sign(np.log2(int(config["A"])) - 2) * np.sign(np.log2(int(config["B"])) - 2)))


def drawn(
    space: SearchSpace, time_us: Callable[[Config], float], count: int, noise: float = 0.02, seed: int = 0
) -> tuple[tuple[Effect, ...], str]:
    """Effects by random trials, or why there are none."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(space), count, replace=False)
    times = [time_us(space.config(row)) * np.exp(noise * rng.normal()) for row in rows]
    return importance_of(space, rows, times)


def by_name(effects: tuple[Effect, ...]) -> dict[str, Effect]:
    return {effect.parameter: effect for effect in effects}


@pytest.mark.parametrize("count", [60, 200, 1000])
def test_the_two_of_six_that_matter_and_by_how_much(count: int) -> None:
    found, _ = drawn(make_space(SIX), additive, count)
    effects = by_name(found)
    assert [effect.parameter for effect in found[:2]] == ["A", "B"]
    assert effects["A"].share == pytest.approx(0.8, abs=0.06)
    assert effects["B"].share == pytest.approx(0.2, abs=0.06)
    assert effects["A"].alone == pytest.approx(effects["A"].share, abs=0.05)
    assert sum(effect.share for effect in found) <= 1.02
    assert [effects[name] for name in "CDEF"] == [Effect(name, 0.0, 0.0, False) for name in "CDEF"]


def test_what_two_do_together_is_halved_between_them() -> None:
    effects = by_name(drawn(make_space(SIX), opposed, 600)[0])
    assert effects["A"].share == pytest.approx(0.5, abs=0.08)
    assert effects["B"].share == pytest.approx(0.5, abs=0.08)
    assert max(effects["A"].alone, effects["B"].alone) < 0.1
    assert not any(effects[name].matters for name in "CDEF")


@pytest.mark.parametrize("sampler", ["feasible", "tpe"])
def test_a_search_that_draws_where_it_is_fast_does_not_mislead(sampler: str) -> None:
    space = six()
    search = Search(space, sampler, seed=1)
    rows, times = [], []
    for _ in range(120):
        row, config = search.propose() or pytest.fail("too few rows")
        search.tell(row, ok(config, additive(config)))
        rows.append(row)
        times.append(additive(config))
    assert np.median(times) < np.median([additive(space.config(row)) for row in range(0, len(space), 50)]) / 1.5
    effects, _ = importance_of(space, rows, times)
    assert [effect.parameter for effect in effects[:2]] == ["A", "B"]
    assert effects[0].share > 2 * effects[1].share > 0.2
    assert sum(effect.share for effect in effects[2:]) < 0.1


def test_choices_and_switches_matter_too() -> None:
    space = make_space({"LAYOUT": ("row", "column", "tiled"), "ASYNC": (False, True), "BM": SIZES, "BN": SIZES})
    effects, _ = drawn(space, lambda c: {"row": 1.0, "column": 3.0, "tiled": 2.0}[str(c["LAYOUT"])], 100)
    assert [effect.parameter for effect in effects if effect.matters] == ["LAYOUT"]
    assert sum(effect.share for effect in effects) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_of_noise_nothing_is_explained(seed: int) -> None:
    effects, doubt = drawn(make_space(SIX), lambda _: 100.0, 150, noise=0.3, seed=seed)
    assert effects == ()
    assert "no better than chance" in doubt


def test_too_few_trials_say_nothing() -> None:
    effects, doubt = drawn(make_space(SIX), additive, 20)
    assert effects == ()
    assert "20 times are too few" in doubt
    assert importance_of(make_space(SIX), [], [])[1]


def test_a_corner_says_nothing_of_the_space() -> None:
    space = make_space(SIX)
    corner = np.flatnonzero((space.codes <= 1).all(axis=1))
    rng = np.random.default_rng(0)
    times = [float(np.exp(0.1 * space.codes[row].sum() + 0.05 * rng.normal())) for row in corner]
    assert "predict too little of the rest of the space" in importance_of(space, corner, times)[1]
    whole = rng.choice(len(space), len(corner), replace=False)
    assert importance_of(space, whole, [float(np.exp(0.1 * space.codes[row].sum())) for row in whole])[0]


def test_no_difference_is_not_explained() -> None:
    assert "differ by less than 2 %" in drawn(make_space(SIX), lambda _: 5.0, 100, noise=1e-4)[1]


def test_what_was_not_varied_is_not_judged() -> None:
    space = make_space(SIX)
    rows = np.flatnonzero(space.column("C") == 4)[::3]
    effects, _ = importance_of(space, rows, [additive(space.config(row)) for row in rows])
    assert "C" not in by_name(effects)
    assert effects[0].parameter == "A"


def test_the_same_trials_give_the_same_answer() -> None:
    assert drawn(six(), additive, 100) == drawn(six(), additive, 100)
