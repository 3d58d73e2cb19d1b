"""Effects of the parameters: which ones matter, values of the best trials, thresholds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from autotile.core.model import Config, LaunchGeometry, Measurement, Outcome, Trial
from autotile.kernel.spec import Parameter
from autotile.search.importance import ParameterEffects, find_parameter_effects
from autotile.space.search_space import SearchSpace

PARAMETERS = (
    Parameter("BM", (32, 64, 128, 256)),
    Parameter("TM", (1, 2, 4, 8)),
    Parameter("ASYNC", (False, True)),
    Parameter("PAD", (0, 1, 2, 3, 4)),
)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    codes = np.array(list(product(*(range(len(each.values)) for each in PARAMETERS))), np.uint8)
    return SearchSpace(PARAMETERS, np.asfortranarray(codes), len(codes), rules=(), limits=(), seconds=0.0)


def trials(space: SearchSpace, time_us: Callable[[Config], float], count: int = 160) -> list[Trial]:
    """Return trials of random rows, each with a block of BM * TM threads."""
    found = []
    for row in np.random.default_rng(0).permutation(len(space))[:count]:
        config = space.config(int(row))
        geometry = LaunchGeometry((64, 1, 1), (int(config["BM"]), int(config["TM"]), 1), 0)
        time = time_us(config)
        measured = Measurement(time, 0.99 * time, 1.01 * time)
        found.append(Trial(config, Outcome.OK, "", "measure", geometry, measurement=measured))
    return found


def by_block(config: Config) -> float:
    """Return a time that is 55.5 % longer with more than 256 threads, and a third shorter with BM=64."""
    crowded = int(config["BM"]) * int(config["TM"]) > 256
    return (155.5 if crowded else 100.0) * (1.0 if config["BM"] == 64 else 1.5) * (1 + 0.001 * int(config["PAD"]))


def test_the_sentence(space: SearchSpace) -> None:
    effects = find_parameter_effects(space, trials(space, by_block))
    assert effects.sentence.startswith("BM explains ")
    assert " % of the differences (best at 64), TM " in effects.sentence
    assert "; no effect is seen of " in effects.sentence
    assert "ASYNC" in effects.sentence.split("no effect is seen of ")[1]
    beyond = effects.thresholds[0]
    assert (beyond.quantity, beyond.side, beyond.value) == ("threads", "above", 256)
    assert effects.sentence.endswith(
        f"none of {beyond.trials} trials beyond 256 threads a block came within 55 % of the best"
    )


def test_the_document(space: SearchSpace) -> None:
    document = find_parameter_effects(space, trials(space, by_block)).to_json()
    assert set(document) == {"importance", "thresholds", "insight"}
    first = document["importance"][0]
    assert (first["parameter"], first["matters"], first["favoured"]) == ("BM", True, [64])
    assert 0 < first["alone"] <= first["share"] < 1
    assert {entry["parameter"] for entry in document["importance"]} == {each.name for each in PARAMETERS}
    assert document["thresholds"][0]["quantity"] == "threads"


def test_every_trial_beyond_a_threshold_is_as_slow_as_is_said(space: SearchSpace) -> None:
    measured = trials(space, by_block)
    best = min(trial.time_us or 0.0 for trial in measured)
    (threshold,) = (one for one in find_parameter_effects(space, measured).thresholds if one.quantity == "threads")
    beyond = [t for t in measured if t.geometry is not None and t.geometry.threads > threshold.value]
    assert 0 < len(beyond) < len(measured)
    assert (threshold.side, threshold.value, threshold.trials) == ("above", 256, len(beyond))
    assert threshold.loss == pytest.approx(0.555, abs=0.002)
    assert min(t.time_us or 0.0 for t in beyond) == pytest.approx(best * (1 + threshold.loss))
    assert all((t.time_us or 0.0) >= best * (1 + threshold.loss) * 0.999 for t in beyond)


def test_what_few_trials_show_is_no_threshold(space: SearchSpace) -> None:
    effects = find_parameter_effects(space, trials(space, by_block, 45))
    assert effects.thresholds == ()
    assert effects.effects


def test_failures_are_left_aside(space: SearchSpace) -> None:
    measured = trials(space, by_block)
    failed = [Trial(space.config(row), Outcome.CRASHED, "dead", "measure") for row in range(20)]
    assert find_parameter_effects(space, [*failed, *measured]) == find_parameter_effects(space, measured)


def test_where_nothing_can_be_told_that_is_said(space: SearchSpace) -> None:
    assert find_parameter_effects(space, []).sentence == "0 times are too few to tell what matters: 30 are needed"
    assert find_parameter_effects(space, trials(space, lambda _: 7.0)).sentence == "the times differ by less than 2 %"
    rng = np.random.default_rng(0)
    noise = find_parameter_effects(space, trials(space, lambda _: float(np.exp(rng.normal()))))
    assert noise.sentence == "the parameters explain the differences no better than chance"
    assert isinstance(noise, ParameterEffects)
    assert noise.to_json()["importance"] == []


WIDE = (
    Parameter("W", tuple(range(1, 17))),
    Parameter("F", tuple(each / 8 for each in range(1, 9))),
    Parameter("NAME", ("a", "b", "c", "d", "e", "f")),
)


@pytest.fixture(scope="module")
def wide_space() -> SearchSpace:
    codes = np.array(list(product(*(range(len(each.values)) for each in WIDE))), np.uint8)
    return SearchSpace(WIDE, np.asfortranarray(codes), len(codes), rules=(), limits=(), seconds=0.0)


def plain_trials(space: SearchSpace, time_us: Callable[[Config], float], count: int = 400) -> list[Trial]:
    """Return trials of random rows, without a geometry, so that the parameters alone are known of them."""
    found = []
    for number, row in enumerate(np.random.default_rng(1).permutation(len(space))[:count]):
        config = space.config(int(row))
        time = time_us(config) * (1 + 0.0001 * number / count)
        found.append(Trial(config, Outcome.OK, "", "measure", measurement=Measurement(time, 0.99 * time, 1.01 * time)))
    return found


@pytest.mark.parametrize(
    ("expected", "slow"),
    [
        (("W", "above", 8, "W=8"), lambda config: config["W"] > 8),
        (("W", "below", 9, "W=9"), lambda config: config["W"] < 9),
        (("F", "above", 0.625, "F=0.625"), lambda config: config["F"] > 0.625),
    ],
)
def test_a_parameter_has_thresholds_of_its_own(
    wide_space: SearchSpace, expected: tuple[str, str, float, str], slow: Callable[[Config], bool]
) -> None:
    measured = plain_trials(wide_space, lambda config: 155.0 if slow(config) else 100.0)
    effects = find_parameter_effects(wide_space, measured)
    (found,) = effects.thresholds
    assert (found.quantity, found.side, found.value) == expected[:3]
    assert found.trials == sum(slow(trial.config) for trial in measured)
    assert found.loss == pytest.approx(0.55, abs=0.001)
    assert f"{expected[3]} came within" in effects.sentence


def test_a_loss_is_that_against_the_very_best(wide_space: SearchSpace) -> None:
    times = iter([95.0, *[100.0] * len(wide_space)])
    measured = plain_trials(wide_space, lambda config: 155.0 if config["W"] < 9 else next(times))
    (found,) = find_parameter_effects(wide_space, measured).thresholds
    assert found.loss == pytest.approx(155 / 95 - 1, abs=0.001)


def test_a_parameter_of_texts_has_no_threshold(wide_space: SearchSpace) -> None:
    measured = plain_trials(wide_space, lambda config: 155.0 if str(config["NAME"]) > "d" else 100.0)
    effects = find_parameter_effects(wide_space, measured)
    assert effects.effects[0].parameter == "NAME"
    assert effects.effects[0].matters
    assert effects.thresholds == ()
