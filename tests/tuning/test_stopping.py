"""The stopping rule for a small expected gain, and the reason for the end of a search."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.core.model import Config, Measurement, Outcome, Trial
from autotile.errors import InputError
from autotile.search import search
from autotile.space.search_space import feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Clock, StoppingRules, StopRequest, TrialLog, check_until

MANY = {
    "THREADS = [32, 64, 128, 256]": f"THREADS = {list(range(32, 1025, 32))}",
    "WORK = [1, 2, 4]": "WORK = [1, 2, 3, 4, 5, 6]",
}


@pytest.fixture(scope="module")
def smooth() -> Callable[[Config], Trial]:
    """Times with a single minimum over both parameters, 192 configurations, at THREADS=512 WORK=4."""

    def judge(config: Config) -> Trial:
        away = abs(np.log2(int(config["THREADS"]) / 512)) + abs(int(config["WORK"]) - 4)
        time_us = float(100 * 1.2**away)
        measurement = Measurement(time_us, 0.999 * time_us, 1.001 * time_us)
        return Trial(config, Outcome.OK, "", "measure", measurement=measurement)

    return judge


@pytest.fixture
def valley(rewrite: Callable[[Mapping[str, str]], Any], smooth: Callable[[Config], Trial]) -> tuple[Any, Path]:
    bench = rewrite(MANY)
    return bench, bench.record(smooth)


@pytest.mark.usefixtures("compiled_once")
class TestSession:
    def test_it_stops_early_and_says_why_and_goes_no_further(self, valley: tuple[Any, Path]) -> None:
        bench, recording = valley
        first = bench.tune(recording, until=0.01)
        assert first.stopped.rule == "until"
        assert 0 <= first.stopped.expected_gain < 0.01
        assert first.winner.config == {"THREADS": 512, "WORK": 4}
        assert 16 < len(bench.stored()) < 100

        again = bench.tune(recording, until=0.01)
        assert again.to_json()["stopped"] == {
            "rule": "until",
            "expected_gain": again.stopped.expected_gain,
            "more_trials": 32,
        }
        assert again.stopped.expected_gain == pytest.approx(first.stopped.expected_gain)
        assert len(bench.stored()) == again.resumed == first.outcomes.total()

    def test_a_smaller_gain_goes_on(self, valley: tuple[Any, Path]) -> None:
        bench, recording = valley
        few = bench.tune(recording, until=0.05).outcomes.total()
        assert bench.tune(recording, until=1e-4).outcomes.total() > few

    def test_whichever_rule_holds_first(self, valley: tuple[Any, Path]) -> None:
        bench, recording = valley
        result = bench.tune(recording, until=0.01, trials=8)
        assert (result.stopped.rule, result.outcomes.total()) == ("trials", 8)
        assert bench.tune(recording, until=0.01, budget_s=0.0).stopped.rule == "budget"

    def test_a_space_that_is_soon_tried_is_tried_whole(self, bench: Any) -> None:
        result = bench.tune(bench.record(), until=0.01)
        assert result.stopped.rule == "space"
        assert result.outcomes.total() == 12

    def test_other_ends_have_their_names(self, bench: Any) -> None:
        recording = bench.record()
        assert bench.tune(recording, trials=5).to_json()["stopped"] == {
            "rule": "trials",
            "expected_gain": None,
            "more_trials": None,
        }
        assert bench.tune(recording).stopped.rule == "space"

    def test_a_search_that_expects_nothing_ends_before_its_limits(
        self,
        rewrite: Callable[[Mapping[str, str]], Any],
        smooth: Callable[[Config], Trial],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(search, "_SETTLED_PROPOSALS", 64)  # not to try most of so small a space
        bench = rewrite({**MANY, "WORK = [1, 2, 4]": f"WORK = {list(range(1, 25))}"})
        recording = bench.record(smooth)
        result = bench.tune(recording, trials=150, budget_s=600.0)
        assert result.stopped.rule == "settled"
        assert result.winner.config == {"THREADS": 512, "WORK": 4}
        assert 50 <= result.outcomes.total() < 150
        assert 0 <= result.stopped.expected_gain < 1e-3
        again = bench.tune(recording, trials=150)
        assert (again.stopped.rule, again.outcomes.total()) == ("settled", result.outcomes.total())

        more = result.outcomes.total() + 4
        spent = bench.tune(recording, trials=more, spend=True)
        assert (spent.stopped.rule, spent.outcomes.total()) == ("trials", more)

    def test_a_session_that_is_broken_off_names_none(self, bench: Any) -> None:
        def break_off(progress: Any) -> None:
            raise KeyboardInterrupt

        result = bench.tune(bench.record(), break_off)
        assert (result.stopped, result.insight) == (None, None)


class TestRule:
    @pytest.mark.parametrize(("gain", "rule"), [(None, None), (0.02, None), (0.01, None), (0.0099, "until")])
    def test_less_than_the_gain_that_is_asked_for(self, gain: float | None, rule: str | None) -> None:
        log: Any = ()
        rules = StoppingRules(TuneOptions(until=0.01), log, Clock(), StopRequest())
        rules.expected_gain = gain
        assert (rules.stopped.rule if rules.stopped is not None else None) == rule
        assert rules.room == (0 if rule else None)

    def test_it_holds_for_none_unless_asked_for(self) -> None:
        log: Any = ()
        rules = StoppingRules(TuneOptions(), log, Clock(), StopRequest())
        rules.expected_gain = 0.0
        assert (rules.stopped, rules.room) == (None, 200)

    @pytest.mark.parametrize(
        ("options", "trials", "gain", "rule"),
        [
            ({}, 50, 0.9e-3, "settled"),
            ({}, 50, 1.1e-3, None),
            ({}, 50, None, None),
            ({}, 49, 0.0, None),
            ({"budget_s": 60.0}, 50, 0.0, "settled"),
            ({"spend": True}, 50, 0.0, None),
            ({"until": 1e-9}, 50, 0.0, None),
        ],
    )
    def test_nothing_more_is_expected(
        self, options: dict[str, Any], trials: int, gain: float | None, rule: str | None
    ) -> None:
        log: Any = range(trials)
        rules = StoppingRules(TuneOptions(**options), log, Clock(), StopRequest())
        rules.settled_gain = gain
        assert (rules.stopped.rule if rules.stopped is not None else None) == rule

    @pytest.mark.parametrize("sampler", ["tpe", "random", "brute-force", "gp", "cmaes", "nsga2"])
    def test_a_sampler_without_a_model_is_refused(self, sampler: str) -> None:
        with pytest.raises(InputError, match=f"'{sampler}' does not: choose auto or feasible"):
            check_until(TuneOptions(until=0.01, sampler=sampler))

    @pytest.mark.parametrize("until", [0.0, -0.1, 1.0, float("nan")])
    def test_no_gain_to_stop_at(self, until: float) -> None:
        with pytest.raises(InputError, match="expected more than 0 and less than 1"):
            check_until(TuneOptions(until=until))

    def test_several_objectives_have_no_best(self) -> None:
        with pytest.raises(InputError, match="several objectives"):
            check_until(TuneOptions(until=0.01, objectives=("time", "registers")))


def test_trials_that_run_take_up_room(valley: tuple[Any, Path]) -> None:
    """They are not in the log yet; on several GPUs many run at once."""
    bench, _ = valley
    space = feasible_space(bench.kernel.spec, {"n": 4096}, bench.device)
    log = TrialLog(space, [Trial(space.config(row), Outcome.CRASHED) for row in range(3)])
    rules = StoppingRules(TuneOptions(trials=10), log, Clock(), StopRequest())
    assert rules.room == 7
    rules.running = 5
    assert rules.room == 2
    assert rules.stopped is None
    rules.running = 7
    assert rules.room == 0
    assert rules.stopped is not None
    assert rules.stopped.rule == "trials"
