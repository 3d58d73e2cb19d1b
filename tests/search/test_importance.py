"""Effects of the parameters in spaces where they are known: which matter, values of the best trials, thresholds."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rows import advance, make_space, ok

from autotile.core.model import Config, LaunchGeometry, Occupancy, Outcome, Trial
from autotile.search.importance import Effect, find_parameter_effects, importance_of
from autotile.search.search import Search
from autotile.space.search_space import SearchSpace

SIZES = (1, 2, 4, 8, 16)
SIX = dict.fromkeys("ABCDEF", SIZES)


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
def test_the_two_of_six_that_matter_and_by_how_much(count):
    found, _ = drawn(make_space(SIX), additive, count)
    effects = by_name(found)
    assert [effect.parameter for effect in found[:2]] == ["A", "B"]
    assert [effects[name].share for name in "AB"] == pytest.approx([0.8, 0.2], abs=0.06)
    assert effects["A"].alone == pytest.approx(effects["A"].share, abs=0.05)
    assert sum(effect.share for effect in found) <= 1.02
    assert [effects[name] for name in "CDEF"] == [Effect(name, 0.0, 0.0, False) for name in "CDEF"]


def test_what_two_do_together_is_halved_between_them():
    effects = by_name(drawn(make_space(SIX), opposed, 600)[0])
    assert [effects[name].share for name in "AB"] == pytest.approx([0.5, 0.5], abs=0.08)
    assert max(effects["A"].alone, effects["B"].alone) < 0.1
    assert not any(effects[name].matters for name in "CDEF")


def test_a_search_that_draws_where_it_is_fast_does_not_mislead():
    space = make_space(SIX, lambda c: int(c["A"]) * int(c["B"]) <= 128)
    done = advance(Search(space, "feasible", seed=1), 120, lambda config: ok(config, additive(config)))
    rows, times = [space.row_of(trial.config) for trial in done], [trial.time_us for trial in done]
    assert np.median(times) < np.median([additive(space.config(row)) for row in range(0, len(space), 50)]) / 1.5
    effects, _ = importance_of(space, rows, times)
    assert [effect.parameter for effect in effects[:2]] == ["A", "B"]
    assert effects[0].share > 2 * effects[1].share > 0.2
    assert sum(effect.share for effect in effects[2:]) < 0.1
    assert importance_of(space, rows, times)[0] == effects


@pytest.mark.parametrize("seed", range(3))
def test_of_noise_nothing_is_explained(seed):
    effects, doubt = drawn(make_space(SIX), lambda _: 100.0, 150, noise=0.3, seed=seed)
    assert effects == ()
    assert "no better than chance" in doubt


def test_a_corner_says_nothing_of_the_space():
    space = make_space(SIX)
    corner = np.flatnonzero((space.codes <= 1).all(axis=1))
    rng = np.random.default_rng(0)
    times = [float(np.exp(0.1 * space.codes[row].sum() + 0.05 * rng.normal())) for row in corner]
    assert "predict too little of the rest of the space" in importance_of(space, corner, times)[1]
    whole = rng.choice(len(space), len(corner), replace=False)
    assert importance_of(space, whole, [float(np.exp(0.1 * space.codes[row].sum())) for row in whole])[0]


def test_what_was_not_varied_is_not_judged():
    space = make_space(SIX)
    rows = np.flatnonzero(space.column("C") == 4)[::3]
    effects, _ = importance_of(space, rows, [additive(space.config(row)) for row in rows])
    assert "C" not in by_name(effects)
    assert effects[0].parameter == "A"


BLOCKS = make_space({"BM": (32, 64, 128, 256), "TM": (1, 2, 4, 8), "ASYNC": (False, True), "PAD": (0, 1, 2, 3, 4)})


def trials(time_us: Callable[[Config], float], count: int = 160) -> list[Trial]:
    """Return trials of random rows, each with a block of BM * TM threads, of which large ones fill half of an SM."""
    found = []
    for row in np.random.default_rng(0).permutation(len(BLOCKS))[:count]:
        config = BLOCKS.config(int(row))
        geometry = LaunchGeometry((64, 1, 1), (int(config["BM"]), int(config["TM"]), 1), 0)
        resident = Occupancy(1, 32, 0.5, (), {}) if geometry.threads > 256 else Occupancy(2, 48, 0.75, (), {})
        found.append(replace(ok(config, time_us(config)), geometry=geometry, occupancy=resident))
    return found


def by_block(config: Config) -> float:
    """Return a time that is 55.5 % longer with more than 256 threads, and a third shorter with BM=64."""
    crowded = int(config["BM"]) * int(config["TM"]) > 256
    return (155.5 if crowded else 100.0) * (1.0 if config["BM"] == 64 else 1.5) * (1 + 0.001 * int(config["PAD"]))


def test_the_sentence_and_the_document_and_every_trial_beyond_a_threshold_is_as_slow_as_they_say():
    measured = trials(by_block)
    effects = find_parameter_effects(BLOCKS, measured)
    assert effects.sentence.startswith("BM explains ")
    assert " % of the differences (best at 64), TM " in effects.sentence
    assert "ASYNC" in effects.sentence.split("; no effect is seen of ")[1]
    threshold = effects.thresholds[0]
    beyond = [t for t in measured if t.geometry is not None and t.geometry.threads > threshold.value]
    assert 0 < len(beyond) < len(measured)
    assert (threshold.quantity, threshold.side, threshold.value) == ("threads", "above", 256)
    assert (threshold.trials, threshold.loss) == (len(beyond), pytest.approx(0.555, abs=0.002))
    best, fastest = (min(trial.time_us or 0.0 for trial in some) for some in (measured, beyond))
    assert fastest == pytest.approx(best * (1 + threshold.loss))
    assert effects.sentence.endswith(
        f"none of {len(beyond)} trials beyond 256 threads a block came within 55 % of the best"
    )
    document = effects.to_json()
    assert set(document) == {"importance", "thresholds", "insight"}
    first = document["importance"][0]
    assert (first["parameter"], first["matters"], first["favoured"]) == ("BM", True, [64])
    assert 0 < first["alone"] <= first["share"] < 1
    assert {entry["parameter"] for entry in document["importance"]} == {"BM", "TM", "ASYNC", "PAD"}
    assert [entry["quantity"] for entry in document["thresholds"]].count("threads") == 1
    assert [one.text for one in effects.thresholds if one.quantity == "occupancy"] == ["an occupancy of 75 %"]


def test_what_few_trials_show_is_no_threshold_and_failures_are_left_aside():
    effects = find_parameter_effects(BLOCKS, trials(by_block, 45))
    assert effects.thresholds == ()
    assert effects.effects
    measured = trials(by_block)
    failed = [Trial(BLOCKS.config(row), Outcome.CRASHED, "dead", "measure") for row in range(20)]
    assert find_parameter_effects(BLOCKS, [*failed, *measured]) == find_parameter_effects(BLOCKS, measured)


def test_where_nothing_can_be_told_that_is_said():
    assert find_parameter_effects(BLOCKS, []).sentence == "0 times are too few to tell what matters: 30 are needed"
    assert find_parameter_effects(BLOCKS, trials(lambda _: 7.0)).sentence == "the times differ by less than 2 %"
    rng = np.random.default_rng(0)
    noise = find_parameter_effects(BLOCKS, trials(lambda _: float(np.exp(rng.normal()))))
    assert noise.sentence == "the parameters explain the differences no better than chance"
    assert noise.to_json()["importance"] == []


WIDE = make_space({"W": range(1, 17), "F": [each / 8 for each in range(1, 9)], "NAME": ("a", "b", "c", "d", "e", "f")})


def plain_trials(time_us: Callable[[Config], float], count: int = 400) -> list[Trial]:
    """Return trials of random rows, without a geometry, so that the parameters alone are known of them."""
    rows = np.random.default_rng(1).permutation(len(WIDE))[:count]
    configs = [WIDE.config(int(row)) for row in rows]
    return [ok(config, time_us(config) * (1 + 0.0001 * n / count)) for n, config in enumerate(configs)]


@pytest.mark.parametrize(("name", "side", "value"), [("W", "above", 8), ("W", "below", 9), ("F", "above", 0.625)])
def test_a_parameter_has_thresholds_of_its_own(name, side, value):
    def is_slow(config: Config) -> bool:
        return bool(config[name] > value if side == "above" else config[name] < value)

    measured = plain_trials(lambda config: 155.0 if is_slow(config) else 100.0)
    effects = find_parameter_effects(WIDE, measured)
    (found,) = effects.thresholds
    assert (found.quantity, found.side, found.value) == (name, side, value)
    assert found.trials == sum(is_slow(trial.config) for trial in measured)
    assert found.loss == pytest.approx(0.55, abs=0.001)
    assert f"{name}={value} came within" in effects.sentence


def test_a_loss_is_that_against_the_very_best():
    times = iter([95.0, *[100.0] * len(WIDE)])
    measured = plain_trials(lambda config: 155.0 if config["W"] < 9 else next(times))
    (found,) = find_parameter_effects(WIDE, measured).thresholds
    assert found.loss == pytest.approx(155 / 95 - 1, abs=0.001)


def test_a_parameter_of_texts_has_no_threshold():
    measured = plain_trials(lambda config: 155.0 if str(config["NAME"]) > "d" else 100.0)
    effects = find_parameter_effects(WIDE, measured)
    assert effects.effects[0].parameter == "NAME"
    assert effects.effects[0].matters
    assert effects.thresholds == ()
