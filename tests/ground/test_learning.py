"""Learning a rule, on a made-up GPU whose times are known everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_costs import MOST, SPEC, MadeUpGpu, learned_from

from autotile.ground.costs import TimeModel
from autotile.ground.features import features_of
from autotile.ground.learning import UNSERVED, Measured, select_configs
from autotile.ground.problem import size_distance
from autotile.ground.tree import Leaf, Split, grow_trees, leaves_of, threshold_between, tree_from_json

FAMILY = ["M=64..8192", "N=64..8192", "K=128..4096"]
NOWHERE = np.ones((0, 9), np.bool_)
matrices = st.integers(0, 10**6).map(lambda seed: np.random.default_rng(seed).gamma(0.5, 0.3, (12, 9)))


def drawn(count: int, seed: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    ends = {"M": (64, 8192), "N": (64, 8192), "K": (128, 4096)}
    return [{n: int(low * (high / low) ** rng.random()) for n, (low, high) in ends.items()} for _ in range(count)]


class TestRule:
    def test_it_loses_little_where_it_was_not_tuned_and_less_than_the_nearest(self) -> None:
        """In the mean over several GPUs; of a single one, no rule can promise it."""
        by_rule, by_nearest = np.mean([self._losses_elsewhere(seed) for seed in range(6)], axis=0)
        assert by_rule < 0.06
        assert by_rule < by_nearest / 2

    @staticmethod
    def _losses_elsewhere(seed: int) -> tuple[float, float]:
        """Mean loss at sizes that were not tuned: by the rule, and by the nearest size's winner."""
        gpu = MadeUpGpu.make(seed)
        _, points, measured = gpu.measured(FAMILY, 20, seed)
        learned, unseen = learned_from(measured), drawn(60, seed)
        known = np.flatnonzero(measured.proposed_by.any(axis=0))
        times = np.array([gpu.times_us(sizes) for sizes in unseen])
        best = times[:, known].min(axis=1)
        by_rule = times[np.arange(60), gpu.served(learned, unseen)] / best - 1
        winners = measured.times_us.argmin(axis=1)
        nearest = [min(range(20), key=lambda i: size_distance(points[i], sizes)) for sizes in unseen]
        by_nearest = times[np.arange(60), winners[nearest]] / best - 1
        return float(by_rule.mean()), float(by_nearest.mean())

    @settings(max_examples=4, deadline=None)
    @given(st.integers(0, 1000))
    def test_it_never_loses_less_than_the_best_of_each_point(self, seed: int) -> None:
        _, _, measured = MadeUpGpu.make(seed, 20).measured(FAMILY, 8, seed)
        learned = learned_from(measured)
        least = measured.losses[:, learned.chosen].min(axis=1)
        assert (learned.losses >= least).all()
        assert (learned.held_out >= 0).all()

    def test_it_is_the_same_every_time(self) -> None:
        _, _, measured = MadeUpGpu.make(5, 20).measured(FAMILY, 8)
        first, second = learned_from(measured), learned_from(measured)
        assert (first.chosen, first.tree) == (second.chosen, second.tree)

    def test_what_cannot_be_served_is_never_counted_as_served(self) -> None:
        _, _, measured = MadeUpGpu.make(3, 20).measured(FAMILY, 10)
        rng = np.random.default_rng(0)
        holes = rng.random(measured.times_us.shape) < 0.4
        holes[:, 0] = False
        times_us = np.where(holes, np.nan, measured.times_us)
        holed = Measured(
            times_us, measured.proposed_by & ~holes, measured.traits, measured.between, measured.valid_between
        )
        learned = learned_from(holed)
        assert np.isfinite(learned.losses).all()
        for loss, row in zip(learned.losses, holed.losses[:, learned.chosen], strict=True):
            assert loss in row[np.isfinite(row)] or loss == UNSERVED

    def test_of_few_points_each_is_served_well_though_leaving_any_out_loses_much(self) -> None:
        """In the mean over several GPUs."""
        learned = [learned_from(MadeUpGpu.make(seed, 20).measured(FAMILY, 3, seed)[2]) for seed in range(20)]
        losses = np.mean([rule.losses.mean() for rule in learned])
        held_out = np.mean([rule.held_out.mean() for rule in learned])
        assert losses < 0.05
        assert losses < held_out / 4

    def test_it_loses_less_than_the_best_single_configuration(self) -> None:
        """In the mean over several GPUs."""
        ratios = []
        for seed in range(6):
            measured = MadeUpGpu.make(seed, 20).measured(FAMILY, 8, seed)[2]
            learned = learned_from(measured)
            ratios.append((learned.losses.mean(), measured.losses[:, learned.chosen].mean(axis=0).min()))
        by_rule, by_one = np.mean(ratios, axis=0)
        assert by_rule < by_one / 2

    def test_a_single_point_has_a_rule_and_no_held_out_loss(self) -> None:
        _, _, measured = MadeUpGpu.make(3, 10).measured(["M=512", "N=512", "K=512"], 4)
        learned = learned_from(measured)
        assert isinstance(learned.tree, Leaf)
        assert learned.losses.tolist() == [0.0]
        assert np.isnan(learned.held_out).all()


class TestSelection:
    @given(matrices, st.integers(1, 5))
    def test_more_configurations_never_lose_more(self, losses: np.ndarray, most: int) -> None:
        few, more = (losses[:, select_configs(losses, NOWHERE, count)].min(axis=1).mean() for count in (most, most + 1))
        assert more <= few + 1e-9
        assert few <= losses.mean(axis=0).min() + 1e-9

    def test_what_runs_everywhere_comes_before_what_does_not(self) -> None:
        losses = np.array([[0.0, 0.1], [np.nan, 0.1], [0.0, 0.1]])
        nowhere = np.ones((0, 2), np.bool_)
        assert select_configs(losses, nowhere, 1) == [1]
        assert sorted(select_configs(losses, nowhere, 2)) == [0, 1]

    def test_what_is_valid_in_more_of_the_family_makes_up_for_a_small_loss(self) -> None:
        losses = np.array([[0.0, 0.1], [0.0, 0.1]])
        everywhere = np.array([[True, True], [False, True]])
        assert select_configs(losses, everywhere[:1], 1) == [0]
        assert select_configs(losses, everywhere, 1) == [1]


class TestTree:
    def test_a_question_that_tells_them_apart_is_found(self) -> None:
        losses = np.array([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 5)
        table = np.stack([np.arange(10.0), np.ones(10)], axis=1)
        trees = grow_trees(losses, np.ones(10), features_of(SPEC, 0)[:2], table, 4)
        assert [leaves_of(tree) for tree in trees] == [1, 2]
        tree = trees[1]
        assert isinstance(tree, Split)
        assert 4 <= tree.at_most < 5
        assert (tree.then, tree.otherwise) == (Leaf((0, 1)), Leaf((1, 0)))

    @given(matrices)
    def test_it_reads_back(self, losses: np.ndarray) -> None:
        features = features_of(SPEC, losses.shape[1])
        table = np.random.default_rng(0).random((len(losses), len(features)))
        for tree in grow_trees(losses, np.ones(len(losses)), features, table, MOST):
            assert tree_from_json(tree.to_json(), tuple(SPEC.sizes), losses.shape[1]) == tree

    @pytest.mark.parametrize("order", [[0, 0], [0], [0, 2], "01", [0, 1, 2]])
    def test_a_damaged_leaf_is_refused(self, order: object) -> None:
        with pytest.raises(ValueError, match="expected every number below 2 once"):
            tree_from_json({"serve": order}, ("M",), 2)

    @given(st.floats(0, 1e9), st.floats(1e-6, 1e9))
    def test_thresholds_are_between(self, low: float, more: float) -> None:
        high = low + more
        if low < high:
            assert low <= threshold_between(low, high) < high


def test_the_time_model_tells_configurations_apart_where_it_was_not_fitted() -> None:
    gpu = MadeUpGpu.make(1, 12, noise=0.0)
    _, points, measured = gpu.measured(FAMILY, 24)
    unseen = drawn(50, 4)
    expected = TimeModel.fit(measured.times_us, measured.times_us.min(axis=1), gpu.traits(points)).predict(
        gpu.traits(unseen)
    )
    actual = np.array([gpu.times_us(sizes) for sizes in unseen])
    errors = np.log(expected / actual)
    differences = np.log(actual) - np.log(actual).mean(axis=1, keepdims=True)
    assert np.median(np.abs(errors - errors.mean(axis=1, keepdims=True))) < 0.25 * np.median(np.abs(differences))
