"""Intervals, ties and contenders of times, and objectives of trials."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.model import (
    OBJECTIVES,
    Measurement,
    Outcome,
    Resources,
    Trial,
    non_dominated,
    objective_values,
    split_objectives,
)
from autotile.core.statistics import Interval, contenders, is_decided, is_tie, median_interval, paired_ratio, ratio_of
from autotile.errors import InputError

times = st.floats(0.01, 1e6)


class TestIntervals:
    @pytest.mark.parametrize("n", [*range(1, 26), 50, 60, 100, 301, 1000])
    def test_ends_are_as_close_as_the_binomial_distribution_allows(self, n):
        def beyond(rank: int) -> float:
            return 2.0 * sum(math.comb(n, heads) for heads in range(rank)) / 2**n

        interval = median_interval(np.arange(1, n + 1))
        low, high = int(interval.low), int(interval.high)  # the ranks of the ends among the samples
        assert low + high == n + 1
        assert low == 1 or beyond(low) <= 0.05  # few samples give the range
        assert beyond(low + 1) > 0.05

    def test_one_wild_sample_moves_nothing_and_the_half_width_is_relative(self):
        calm = [10.0 + 0.01 * i for i in range(30)]
        assert median_interval([*calm[:-1], 1e6]) == median_interval(calm)
        assert Interval(100.0, 99.5, 100.5).relative_half_width == pytest.approx(0.005)
        assert median_interval([7.0] * 10).relative_half_width == 0.0

    @given(st.lists(times, min_size=1, max_size=40), st.floats(0.5, 8.0), st.randoms(use_true_random=False))
    def test_order_and_unit_do_not_matter(self, samples, unit, random):
        interval = median_interval(samples)
        assert interval.low <= interval.value <= interval.high
        shuffled = random.sample(samples, len(samples))
        assert median_interval(shuffled) == interval
        scaled = median_interval([unit * sample for sample in samples])
        assert scaled.low == pytest.approx(unit * interval.low)
        assert scaled.relative_half_width == pytest.approx(interval.relative_half_width, rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize("samples", [[], [[1.0, 2.0]], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.inf]])
    def test_samples_that_are_no_times_are_refused(self, samples):
        with pytest.raises(ValueError, match="samples must be"):
            median_interval(samples)

    def test_pairs_see_through_a_drift_that_hides_the_difference(self):
        rng = np.random.default_rng(3)
        drift = np.linspace(1.0, 1.2, 40)
        a = 100.0 * drift * rng.normal(1.0, 0.002, 40)
        b = 101.0 * drift * rng.normal(1.0, 0.002, 40)
        paired = paired_ratio(a, b)
        assert paired.contains(1.01)
        assert not is_tie(paired)
        assert is_tie(ratio_of(median_interval(a), median_interval(b)))

    def test_equal_kernels_tie_about_as_often_as_promised(self):
        rng = np.random.default_rng(5)
        a, b = rng.normal(100.0, 1.0, (2, 1500, 20))
        ties = sum(is_tie(paired_ratio(*rounds)) for rounds in zip(a, b, strict=True))
        assert 0.94 <= ties / 1500 < 1.0

    def test_paired_times_need_equal_rounds_and_tell_the_slower(self):
        assert paired_ratio([1.0] * 6, [2.0] * 6) == Interval(2.0, 2.0, 2.0)
        with pytest.raises(ValueError, match="equal numbers of rounds: 2 of a, 3 of b"):
            paired_ratio([1.0, 2.0], [1.0, 2.0, 3.0])

    @given(st.lists(times, min_size=3, max_size=3), st.lists(times, min_size=3, max_size=3), st.data())
    def test_ratio_of_holds_every_ratio_of_values_in_the_intervals(self, ends_a, ends_b, data):
        a, b = (Interval(value, low, high) for low, value, high in (sorted(ends_a), sorted(ends_b)))
        ratio = ratio_of(a, b)
        inside_a = data.draw(st.floats(a.low, a.high))
        inside_b = data.draw(st.floats(b.low, b.high))
        assert ratio.low * (1 - 1e-12) <= inside_b / inside_a <= ratio.high * (1 + 1e-12)
        assert ratio.low <= ratio.value <= ratio.high

    def test_ratio_of_needs_a_positive_divisor_and_one_that_holds_one_is_a_tie(self):
        with pytest.raises(ValueError, match="positive divisor"):
            ratio_of(Interval(1.0, 0.0, 2.0), Interval(1.0, 1.0, 1.0))
        ratios = Interval(1.0, 0.99, 1.01), Interval(1.02, 1.0, 1.04), Interval(1.02, 1.001, 1.04)
        assert [is_tie(ratio) for ratio in ratios] == [True, True, False]

    def test_contenders_are_those_that_may_still_win(self):
        noise = [1.0, 1.003, 0.998, 1.001, 0.999, 1.002, 0.997, 1.0, 1.004, 0.996, 1.0, 1.001, 0.999, 1.002, 0.998]
        times = [[ratio * n for n in noise] for ratio in (10.0, 10.05, 10.5, 30.0)]
        assert contenders(times, [0, 1, 2, 3]) == [0, 1]
        assert contenders(times, [2, 3]) == [2]
        assert contenders(times, [3]) == [3]

    def test_a_race_is_decided_when_more_rounds_would_show_nothing_new(self):
        noise = [1.0, 1.003, 0.998, 1.001, 0.999, 1.002]
        other = [1.004, 0.996, 1.001, 1.002, 0.998, 1.0]  # ratios to the noise from 0.993 to 1.004
        times = [[10.0 * n for n in noise], [10.0 * n for n in other], [10.5 * n for n in other]]
        assert is_decided(times, [0, 2], 0.005)  # clearly slower
        assert is_decided(times, [0, 1], 0.006)
        assert not is_decided(times, [0, 1], 0.005)  # a tie that is not known well enough
        assert not is_decided(times, [0], 0.001)
        assert not is_decided(times, [0, 2], 0.0)
        assert not is_decided([[61.44] * 6], [0], 0.0)  # equal by the resolution of the timer

    @given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=15, max_size=15), min_size=1, max_size=5))
    def test_the_fastest_candidate_is_always_a_contender(self, times):
        racing = list(range(len(times)))
        left = contenders(times, racing)
        assert set(left) <= set(racing)
        assert min(racing, key=lambda i: np.median(times[i])) in left


TRIAL = Trial(
    {"BM": 64},
    Outcome.OK,
    resources=Resources(40, 0, 0, 0, 0),
    measurement=Measurement(10.0, 9.9, 10.1),
    telemetry={"energy_mj": 3.5, "max_error": 0, "power_w": 300},
)
POINTS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5), min_size=width, max_size=width), min_size=1, max_size=40)
)


class TestObjectives:
    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            (([],), (("time",), None)),
            ((["registers"],), (("time", "registers"), None)),
            ((["registers,energy"],), (("time", "registers", "energy"), None)),
            ((["error", " energy", "time", "error"],), (("time", "error", "energy"), None)),
            ((["max(time_us, 3)"],), (("time",), "max(time_us, 3)")),
            ((["time", "rate"], ["rate"]), (("time",), "rate")),  # a metric of the kernel
        ],
    )
    def test_time_is_always_the_first_and_an_expression_is_apart(self, given, meant):
        assert split_objectives(*given) == meant
        for names, said in ((["rate"], "there is no objective 'rate'"), (["registers", "time_us / 2"], "the only one")):
            with pytest.raises(InputError, match=said):
                split_objectives(names)

    def test_values_come_in_the_order_asked_for_what_lacks_one_has_none_and_an_unknown_one_is_refused(self):
        known = r"no objective 'register'.*registers.*known: time, registers, energy, error"
        with pytest.raises(InputError, match=known):
            split_objectives(["time", "register"])
        assert objective_values(TRIAL, list(OBJECTIVES)) == (10.0, 40, 3.5, 0.0)
        assert objective_values(TRIAL, ["error", "time"]) == (0.0, 10.0)
        for missing in ("energy", "registers"):
            assert objective_values(Trial({}, Outcome.OK, measurement=TRIAL.measurement), ["time", missing]) is None
        assert objective_values(Trial({}, Outcome.CRASHED, resources=TRIAL.resources), ["registers"]) is None

    @given(POINTS)
    @settings(max_examples=100)
    def test_a_point_is_kept_where_no_other_dominates_it(self, points):
        values = np.array(points)
        expected = [not any((a <= b).all() and (a < b).any() for a in values) for b in values]
        assert non_dominated(points).tolist() == expected  # equal points stay together

    def test_no_points_and_ten_thousand_on_the_front(self):
        for width in (1, 3):
            assert non_dominated(np.zeros((0, width))).tolist() == []
        rising = np.arange(10_000.0)
        assert non_dominated(np.stack([rising, -rising], axis=1)).all()
