"""The estimate of the time that a session still takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.model import Measurement, Outcome, Trial
from autotile.core.timeline import Pace
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import TimeLeft

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "time_left.json"
REPLAYED = Trial({"BM": 1}, Outcome.OK, source="replayed", measurement=Measurement(10.0, 9.0, 11.0))


def pace_of(ends_s: list[float]) -> float:
    pace = Pace()
    for end_s in ends_s:
        pace.add(end_s)
    assert pace.mean_s is not None
    return pace.mean_s


def left_after(ends_s: list[float], valid: int = 10_000, trial: Trial = REPLAYED, **options: object) -> TimeLeft:
    left = TimeLeft(TuneOptions(**options), valid)  # type: ignore[arg-type]
    for end_s in ends_s:
        left.add(end_s, trial)
    return left


class TestPace:
    def test_the_time_before_the_first_step_is_left_out(self):
        assert pace_of([60.0, 61.0, 62.0, 63.0]) == pytest.approx(1.0)

    def test_nothing_is_said_of_one_step(self):
        pace = Pace()
        assert pace.mean_s is None
        pace.add(3.0)
        assert pace.mean_s is None
        assert len(pace) == 0

    @pytest.mark.parametrize(("before_s", "after_s"), [(1.0, 4.0), (4.0, 0.5)])
    def test_it_follows_a_change_of_the_number_of_cores(self, before_s, after_s):
        noise = np.random.default_rng(0).lognormal(0.0, 0.3, 220)
        durations_s = noise * ([before_s] * 200 + [after_s] * 20)
        assert pace_of(np.cumsum(durations_s).tolist()) == pytest.approx(after_s, rel=0.3)

    def test_at_a_steady_speed_it_is_the_mean_of_many(self):
        errors = []
        for seed in range(20):
            durations_s = np.random.default_rng(seed).lognormal(0.0, 0.5, 300)
            errors.append(abs(np.log(pace_of(np.cumsum(durations_s).tolist()) / np.exp(0.125))))
        assert np.mean(errors) < 0.06  # of the newest 12 alone, 0.12

    @given(st.lists(st.floats(0.0, 1e4), min_size=2, max_size=80))
    def test_it_is_between_the_durations(self, durations_s):
        found = pace_of(np.cumsum(durations_s).tolist())
        assert -1e-6 <= found <= max(durations_s[1:]) * (1 + 1e-6) + 1e-6


ENDS = [10.0 + number for number in range(20)]


class TestSearch:
    def test_a_number_of_trials_ends_it(self):
        assert left_after(ENDS, trials=50).search_s(20, 30.0) == pytest.approx(30.0)

    def test_a_small_space_ends_it(self):
        assert left_after(ENDS, valid=25, trials=50).search_s(20, 30.0) == pytest.approx(5.0)

    def test_a_budget_ends_it(self):
        assert left_after(ENDS, budget_s=40.0).search_s(20, 30.0) == pytest.approx(10.0)
        assert left_after(ENDS, budget_s=40.0, trials=23).search_s(20, 30.0) == pytest.approx(3.0)
        assert left_after(ENDS, budget_s=20.0).search_s(20, 30.0) == 0.0

    def test_convergence_ends_it(self):
        assert left_after(ENDS, trials=500).search_s(20, 30.0, 12.5) == pytest.approx(12.5)
        assert left_after(ENDS, until=0.01).search_s(20, 30.0, 4.0) == pytest.approx(4.0)

    def test_an_unforeseen_gain_has_no_estimate(self):
        assert left_after(ENDS, until=0.01).search_s(20, 30.0) is None
        assert left_after(ENDS, until=0.01, budget_s=60.0).search_s(20, 30.0) == pytest.approx(30.0)

    def test_trials_of_earlier_sessions_count_towards_the_target(self):
        assert left_after(ENDS, trials=300).search_s(280, 30.0) == pytest.approx(20.0)
        assert left_after(ENDS, trials=200).search_s(280, 30.0) == 0.0

    def test_the_first_trials_say_nothing(self):
        assert left_after(ENDS[:4], trials=50).search_s(4, 14.0) is None
        assert left_after(ENDS[:4], budget_s=50.0).search_s(4, 14.0) == pytest.approx(36.0)
        assert left_after(ENDS[:5], trials=50).search_s(5, 15.0) == pytest.approx(45.0)

    def test_a_brute_force_search_ends_with_the_space(self):
        assert left_after(ENDS, valid=70, sampler="brute-force").search_s(20, 30.0) == pytest.approx(50.0)


class TestFinals:
    OK = Trial(
        {"BM": 1},
        Outcome.OK,
        measurement=Measurement(2000.0, 1990.0, 2010.0),
        seconds={"load": 0.01, "verify": 0.04},
    )

    def test_replayed_trials_have_none(self):
        assert left_after([1.0, 2.0, 3.0], trials=50).finals_s == 0.0

    def test_they_take_as_long_as_the_race_and_the_checks(self):
        few = left_after([1.0, 2.0], trial=self.OK).finals_s
        many = left_after([float(n) for n in range(40)], trial=self.OK).finals_s
        assert 0.4 < few < many < 3.5

    def test_those_of_a_session_that_only_resumes_have_one_too(self):
        left = TimeLeft(TuneOptions(), 100)
        left.remember([self.OK] * 20)
        assert left.finals_s == left_after([float(n) for n in range(20)], trial=self.OK).finals_s
        assert left.search_s(20, 1.0) is None  # they say nothing of the pace

    def test_they_can_be_left_out(self):
        assert left_after([1.0, 2.0], trial=self.OK, finals=0).finals_s == 0.0


@pytest.mark.skipif(not RECORD.exists(), reason="benchmarks/time_left.py was not recorded")
class TestRecord:
    def test_the_estimate_is_better_than_the_mean_since_the_start(self):
        rows = json.loads(RECORD.read_text())["rows"]
        before, after = (np.mean([row[name]["mean"] for row in rows]) for name in ("before", "after"))
        assert after < 0.7 * before
