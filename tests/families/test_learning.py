"""Learning of a rule, on a synthetic GPU whose times are known everywhere."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_gpu import MAX_CONFIGS, SPEC, SyntheticGpu, learned_from

from autotile.core.documents import convert
from autotile.families import family
from autotile.families.family import Split, fit_times, learn_rule, learn_tree, predict_times, select_configs
from autotile.families.features import Feature, Traits, list_features
from autotile.kernel.problem import size_distance

FAMILY = ["M=64..8192", "N=64..8192", "K=128..4096"]
CUBE = {"M": 4096, "N": 4096, "K": 4096}
matrices = st.integers(0, 10**6).map(lambda seed: np.random.default_rng(seed).gamma(0.5, 0.3, (12, 9)))


def drawn(count: int, seed: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    ends = {"M": (64, 8192), "N": (64, 8192), "K": (128, 4096)}
    return [{n: int(low * (high / low) ** rng.random()) for n, (low, high) in ends.items()} for _ in range(count)]


def measured_by(seed: int, count: int, points: int, words: list[str] = FAMILY) -> family.TrainingData:
    return SyntheticGpu.make(seed, count).measured(words, points, seed)[2]


def number_of_leaves(tree: family.Tree) -> int:
    return 1 if isinstance(tree, tuple) else number_of_leaves(tree.then) + number_of_leaves(tree.otherwise)


class TestRule:
    def test_it_loses_little_where_it_was_not_tuned_and_less_than_the_nearest(self):
        """On average over two GPUs; it need not hold for a single one."""
        by_rule, by_nearest = [], []
        for seed in range(2):
            gpu, unseen = SyntheticGpu.make(seed, 30), drawn(60, seed)
            _, points, measured = gpu.measured(FAMILY, 14, seed)
            times = np.array([gpu.times_us(sizes) for sizes in unseen])
            best = times[:, np.flatnonzero(measured.proposed_by.any(axis=0))].min(axis=1)
            by_rule.append(times[np.arange(60), gpu.served(learned_from(measured), unseen)] / best - 1)
            nearest = [min(range(14), key=lambda i: size_distance(points[i], sizes)) for sizes in unseen]
            by_nearest.append(times[np.arange(60), measured.times_us.argmin(axis=1)[nearest]] / best - 1)
        assert np.mean(by_rule) < 0.04
        assert np.mean(by_rule) < np.mean(by_nearest) / 2

    def test_a_single_point_has_a_rule_and_no_held_out_loss(self):
        _, tree, losses, held_out = learned_from(measured_by(3, 10, 4, ["M=512", "N=512", "K=512"]))
        assert isinstance(tree, tuple)
        assert (losses.tolist(), np.isnan(held_out).all()) == ([0.0], True)

    @pytest.mark.filterwarnings("error")
    def test_where_nothing_can_be_served_between_the_points_there_is_a_rule_all_the_same(self):
        measured = measured_by(3, 10, 12)
        _, _, losses, _ = learned_from(measured._replace(is_valid=np.zeros_like(measured.is_valid)))
        assert np.isfinite(losses).all()

    def test_configurations_are_chosen_for_the_problems_between_the_points_too(self):
        """Of two equal ones at the points, the one that is valid for more of the other problems is selected."""
        measured = SyntheticGpu.make(1, 2, noise=0.0).measured(FAMILY, 12)[2]
        equal = {"times_us": np.ones_like(measured.times_us), "proposed_by": np.ones_like(measured.proposed_by)}
        for other in (0, 1):
            valid = np.ones_like(measured.is_valid)
            valid[: len(valid) // 2, other] = False
            found = measured._replace(**equal, is_valid=valid)
            assert learn_rule(found, list_features(SPEC, 1), 1)[0] == (1 - other,)


class TestSelection:
    @given(matrices, st.integers(1, 5))
    def test_more_configurations_never_lose_more(self, losses, most):
        weights = np.ones(len(losses))
        few, more = (losses[:, select_configs(losses, weights, n)].min(axis=1).mean() for n in (most, most + 1))
        assert more <= few + 1e-9
        assert few <= losses.mean(axis=0).min() + 1e-9

    def test_what_can_be_served_everywhere_comes_before_what_cannot_and_weights_count(self):
        unserved = np.array([[0.0, 0.1], [family.UNSERVED_LOSS, 0.1], [0.0, 0.1]])
        assert [sorted(select_configs(unserved, np.ones(3), most)) for most in (1, 2)] == [[1], [0, 1]]
        losses = np.array([[0.0, 0.3], [0.2, 0.0]])
        assert [select_configs(losses, np.array([1.0, second]), 1) for second in (1.0, 2.0)] == [[0], [1]]


class TestTree:
    @pytest.mark.parametrize(("gain", "is_split"), [(1.0, True), (1e-5, False)])
    def test_a_question_that_tells_them_apart_is_asked_unless_it_gains_little(self, gain, is_split):
        losses = np.array([[0.0, gain]] * 5 + [[gain, 0.0]] * 5)
        table = np.stack([np.arange(10.0), np.ones(10)], axis=1)
        tree = learn_tree(losses, np.ones(10), list_features(SPEC, 0)[:2], table, 4)
        assert isinstance(tree, Split) == is_split
        if isinstance(tree, Split):
            assert 4 <= tree.at_most < 5
            assert (tree.then, tree.otherwise) == ((0, 1), (1, 0))

    def test_a_leaf_serves_what_is_best_in_it_though_elsewhere_it_is_bad(self):
        """The winner of 6 of 100 problems, by 5 %, loses 200 % at all others."""
        few = np.arange(100) < 6
        losses = np.stack([np.where(few, 0.05, 0.0), np.where(few, 0.0, 2.0)], axis=1)
        tree = learn_tree(losses, np.ones(100), [Feature("size", "M")], np.arange(100.0)[:, None], 4)
        assert tree.then == (1, 0)

    @given(matrices, st.integers(1, MAX_CONFIGS))
    def test_it_reads_back_and_is_no_larger_than_asked(self, losses, most):
        features = list_features(SPEC, losses.shape[1])
        table = np.random.default_rng(0).random((len(losses), len(features)))
        tree = learn_tree(losses, np.ones(len(losses)), features, table, most)
        assert number_of_leaves(tree) <= most
        assert convert(family.tree_to_json(tree), family.TreeDocument).tree(tuple(SPEC.sizes), losses.shape[1]) == tree

    @pytest.mark.parametrize("order", [[0, 0], [0], [0, 2], "01", [0, 1, 2]])
    def test_a_damaged_leaf_is_refused(self, order):
        with pytest.raises(ValueError, match="expected"):
            convert({"serve": order}, family.TreeDocument).tree(("M",), 2)

    @given(st.floats(0, 1e9), st.floats(1e-6, 1e9))
    def test_thresholds_are_between(self, low, more):
        high = low + more
        if low < high:
            assert low <= family.threshold_between(low, high) < high

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            *[(120, 137, 128), (128, 137, 128), (129, 191, 160), (1, 3, 2), (250, 900, 512), (1, 300, 32)],
            *[(0.5, 2.5, 1.1), (0.1 + 0.2, 0.3000000000000001, 0.1 + 0.2)],  # the last with nothing in between
        ],
    )
    def test_a_threshold_of_sizes_is_where_a_row_of_tiles_ends(self, low, high, expected):
        assert family.threshold_between(float(low), float(high)) == expected


def expected_us(times_us: Any, best_us: Any, points: Traits, others: Traits) -> Any:
    return predict_times(*fit_times(times_us, best_us, points), times_us, points, others)


class TestTimes:
    def test_configurations_that_were_measured_once_are_hardly_believed_to_be_the_best(self):
        """At unseen sizes, on average over two GPUs, for the configuration with the least expected time."""
        once, unseen, lost = np.arange(20, 40), drawn(50, 4), []
        for seed in range(2):
            gpu = SyntheticGpu.make(seed, 40, noise=0.0)
            _, points, measured = gpu.measured(FAMILY, 24)
            known = np.tile(np.arange(40) < 20, (24, 1))
            known[measured.losses[:, once].argmin(axis=0), once] = True
            times_us = np.where(known, measured.times_us, np.nan)
            expected = expected_us(times_us, measured.times_us.min(axis=1), gpu.traits(points), gpu.traits(unseen))
            actual = np.array([gpu.times_us(sizes) for sizes in unseen])
            lost.append((actual[np.arange(50), expected.argmin(axis=1)] / actual.min(axis=1) - 1).mean())
        assert np.mean(lost) < 0.3

    def test_a_wave_that_is_begun_is_a_whole_one(self):
        """With many resident blocks per SM, one block more than a wave takes the time of two waves."""
        traits = SyntheticGpu.make(2, 1, noise=0.0).traits([{"M": M, "N": 128, "K": 64} for M in range(16, 60000, 400)])
        waves = traits.waves[:, 0]
        times_us = 10.0 * np.ceil(waves)[:, None]
        even = np.arange(len(waves)) % 2 == 0
        points, others = (traits.rows(np.flatnonzero(which)) for which in (even, ~even))
        expected = expected_us(times_us[even], times_us[even, 0], points, others)[:, 0]
        assert waves.max() > 2
        assert np.abs(expected / times_us[~even, 0] - 1).max() < 0.02


class TestBounds:
    """Measured times bound others, also those of a model whose time is that of the bytes, and more if ragged."""

    GPU = SyntheticGpu.make(2, 1, noise=0.0)

    def traits(self, **changes: int) -> Traits:
        return self.GPU.traits([{**CUBE, **changes}])

    def expected(self, measured: dict[str, int], time_us: float, asked: dict[str, int], modelled: float) -> float:
        """Return the time at a problem, given that of another, if the model takes so many times as long as it should.

        Each ragged size costs half of the time of aligned ones.
        """
        aligned = self.traits()
        per_byte = 100.0 * modelled / float(aligned.bytes[0])
        work = float(aligned.rounds[0, 0] * aligned.flops[0] / aligned.outputs[0])
        weights = np.array([[*[0.0] * 5, per_byte, *[0.5 * 100.0 * modelled / work] * 3]])
        points, others = self.traits(**measured), self.traits(**asked)
        return float(predict_times(weights, np.zeros((1, 1)), np.array([[time_us]]), points, others)[0, 0])

    @pytest.mark.parametrize("ragged", [{"N": 4095}, {"K": 4090}, {"M": 4092}, {"M": 4001, "N": 4001, "K": 4001}])
    def test_a_time_of_aligned_sizes_bounds_ragged_ones_with_their_cost(self, ragged):
        """Ragged sizes take half as long again; a measured time of aligned ones does not hide that, nor the reverse."""
        cost_us = 100.0 * (1 + 0.5 * len(ragged))
        larger = {name: size + 8 for name, size in CUBE.items()}
        assert self.expected({}, 100.0, ragged, 10.0) == pytest.approx(cost_us, rel=0.02)
        assert self.expected(ragged, cost_us, larger, 0.1) == pytest.approx(100.0, rel=0.02)

    @pytest.mark.parametrize("name", ["M", "N", "K"])
    def test_equally_ragged_problems_bound_each_other_as_they_are(self, name):
        """An upper bound is not lowered by the alignment, and a lower one is not raised."""
        for measured, asked, modelled in ((4095, (4093, 4088), 10.0), (4096, (4104, 4101), 0.1)):
            for size in asked:
                found = self.expected({name: measured}, 60.0, {name: size}, modelled)
                assert found == pytest.approx(60.0, rel=0.02)
