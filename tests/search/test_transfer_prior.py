"""Searches that begin with expected speeds: of simulated kernels, similar, shifted or different, or estimated."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from rows import advance, check_ranked_resuming, check_resuming, make_space, ok, tile_ok, tile_space, tile_time_us

from autotile.core.model import Config, Trial
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.samplers import Lookahead
from autotile.search.search import Search, Shortlist
from autotile.search.transfer import Source, estimated_speeds, transferred_speeds
from autotile.space.search_space import SearchSpace

BM, BN, BK, VEC = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (8, 16, 32), (1, 4)
SPACE = make_space({"BM": BM, "BN": BN, "BK": BK, "VEC": VEC})
TimeOf = Callable[[Mapping[str, Any]], float]


def time_us(config: Mapping[str, Any], best: tuple[int, int] = (128, 64)) -> float:
    """Return the time, which is lowest at BM, BN = best, BK = 16, VEC = 4."""
    away = abs(np.log2(config["BM"] / best[0])) + abs(np.log2(config["BN"] / best[1]))
    return 10.0 * (1 + 0.3 * away + 0.2 * abs(np.log2(config["BK"] / 16)) + 0.1 * (config["VEC"] == 1))


def contrary(config: Mapping[str, Any]) -> float:
    return 1000.0 / time_us(config)


def trial_of(config: Config) -> Trial:
    return ok(config, time_us(config))


def source_of(time_of: TimeOf = time_us, every: int = 3, space: SearchSpace = SPACE) -> Source:
    configs = [space.config(row) for row in range(0, len(space), every)]
    return "another", [(config, time_of(config)) for config in configs]


def test_a_source_of_another_version_is_read_by_what_it_shares():
    older = make_space({"BM": (16, 32, 64, 128, 512), "BN": BN, "OLD": (1, 2)})
    prior = transferred_speeds(SPACE, [source_of(lambda c: time_us({**c, "BK": 16, "VEC": 4}), 1, older)])
    best = SPACE.config(int(prior.best[0]))
    assert (best["BM"], best["BN"]) == (128, 64)


@pytest.mark.parametrize(
    "source", [("few", [(SPACE.config(0), 1.0)] * 3), ("strange", [({"X": n}, 1.0) for n in range(9)])]
)
def test_what_says_nothing_is_left_out(source):
    assert transferred_speeds(SPACE, [source]) is None
    assert transferred_speeds(SPACE, [source, source_of()])


def test_sources_count_by_how_well_they_predict():
    prior = transferred_speeds(SPACE, [source_of(contrary, 1), source_of(every=1)])
    tried = np.random.default_rng(0).choice(len(SPACE), 20, replace=False)
    times = np.array([time_us(SPACE.config(int(row))) for row in tried])
    expected = prior.speeds(np.arange(len(SPACE)), tried, times)
    assert time_us(SPACE.config(int(np.argmax(expected)))) == 10.0


def test_expected_losses_follow_what_was_found_here():
    prior = transferred_speeds(SPACE, [source_of(every=1)])
    tried = np.arange(0, len(SPACE), 7)
    times = np.array([time_us(SPACE.config(int(row))) for row in tried])
    losses = times - times.mean()
    agreed = prior.losses(np.arange(len(SPACE)), tried, times, losses)
    assert np.corrcoef(agreed[tried], losses)[0, 1] > 0.9
    assert np.ptp(prior.losses(tried, tried, times, -losses)) == 0.0  # it predicts the contrary, so it is ignored


def search_with(*sources: Source, seed: int = 0) -> Search:
    return Search(SPACE, "feasible", seed, sources=sources)


def rows_of(search: Search, trials: int) -> list[int]:
    return [int(SPACE.row_of(trial.config) or 0) for trial in advance(search, trials, trial_of)]


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_misleads_costs_the_proposals_that_followed_it_only(seed):
    """The others are those of a search without it, in the same order."""
    rows, alone = rows_of(search_with(source_of(contrary), seed=seed), 30), rows_of(search_with(seed=seed), 30)
    assert all(row in rows for row in alone[: len(rows) - 2])


def test_a_source_that_misleads_is_dropped_and_named_and_a_right_one_beside_it_is_kept():
    search = search_with(source_of(contrary))
    assert search.learnt_from == ("another",)
    advance(search, 4, trial_of)
    assert search.learnt_from == ()
    (misleading,) = search.misleading_sources
    assert misleading.correlation < -0.5
    assert str(misleading).startswith("another (rank correlation -")
    assert misleading.to_json()["trials"] == 4
    search = search_with(("wrong", source_of(contrary)[1]), ("right", source_of()[1]))
    advance(search, 25, trial_of)
    assert search.learnt_from == ("right",)
    assert [source.name for source in search.misleading_sources] == ["wrong"]


TILES = tile_space()


def exact(space: SearchSpace) -> NDArray[np.float64]:
    return np.array([tile_time_us(space.config(row)) for row in range(len(space))])


def reverse(space: SearchSpace) -> NDArray[np.float64]:
    return 1e3 / exact(space)


def estimating(estimate: Any, seed: int, **options: Any) -> Search:
    return Search(TILES, "feasible", seed, estimate=estimate, **options)


def times_by(estimate: Any, seed: int, trials: int) -> list[float]:
    return [trial.time_us or 0.0 for trial in advance(estimating(estimate, seed), trials, tile_ok)]


LIKELY_US = np.sort(exact(TILES))[: max(8, int(0.03 * len(TILES)))].tolist()
"""Times of the rows that are spread first, ascending."""


def test_the_first_rows_are_likely_ones_and_others_in_turn():
    found = times_by(exact, 0, 6)
    assert found[0] == LIKELY_US[0]
    assert {found[2], found[4]} <= {*LIKELY_US}
    assert not {found[1], found[3], found[5]} & {*LIKELY_US}


def test_an_estimate_that_says_nothing_changes_nothing_and_other_studies_take_the_place_of_one():
    assert times_by(lambda space: None, 3, 15) == times_by(None, 3, 15)
    sources = [source_of(tile_time_us, space=TILES)]
    plain, both = (advance(estimating(of, 1, sources=sources), 15, tile_ok) for of in (None, reverse))
    assert plain == both


BEGINNINGS: dict[str, tuple[Callable[..., Search], TimeOf]] = {
    "right source": (partial(search_with, source_of()), time_us),
    "misleading source": (partial(search_with, source_of(contrary)), time_us),
    "right estimate": (partial(estimating, exact), tile_time_us),
    "wrong estimate": (partial(estimating, reverse), tile_time_us),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_resumed_search_and_a_killed_session_go_on_as_they_would_have(beginning):
    make, time_of = BEGINNINGS[beginning]
    check_resuming(lambda: make(seed=3), lambda c: ok(c, time_of(c)), 4, {7, 25})

    def ranked(earlier: list[Trial]) -> Shortlist:
        return Shortlist(make(seed=2), Lookahead(6, per_measured=2), earlier=earlier)

    check_ranked_resuming(ranked, lambda c: ok(c, time_of(c)), 40, (9, 30))


def test_configurations_that_go_first_do_not_take_the_place_of_estimates():
    first = [TILES.config(row) for row in np.argsort(-exact(TILES))[:2].tolist()]
    done = advance(estimating(exact, 0, first=first), 5, tile_ok)
    assert [trial.config for trial in done[:2]] == first
    assert done[2].time_us == LIKELY_US[0]
    assert done[3].time_us in LIKELY_US


def test_of_a_very_large_space_a_sample_is_estimated(monkeypatch):
    monkeypatch.setattr("autotile.search.transfer._MAX_ROWS", 20)
    counts = []

    def counted(space: SearchSpace) -> NDArray[np.float64]:
        counts.append(len(space))
        return exact(space)

    found = estimated_speeds(TILES, counted)
    assert counts[0] <= 20 < len(TILES)
    best = TILES.config(int(found.best[0]))
    assert tile_time_us(best) == min(tile_time_us(TILES.config(int(row))) for row in found.rows)
    assert len(found.speeds(np.arange(len(TILES)), np.zeros(0, np.int64), np.zeros(0))) == len(TILES)
    assert FeasibleGPSampler(TILES, 0, estimate=counted).candidates.remaining == len(TILES)
    assert structs.replace(TILES, codes=TILES.codes[found.rows]).config(0) == TILES.config(int(found.rows[0]))
