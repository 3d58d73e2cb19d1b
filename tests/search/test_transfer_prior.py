"""Transfer between simulated kernels that are similar, shifted or different."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from rows import advance_ahead, ok

from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.kernel.spec import Parameter
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.row_sampler import distributions_of
from autotile.search.samplers import Lookahead
from autotile.search.search import Search, Shortlist
from autotile.search.transfer import Source, TransferPrior
from autotile.space.search_space import SearchSpace

BM, BN, BK, VEC = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (8, 16, 32), (1, 4)
TimeOf = Callable[[Mapping[str, Any]], float]


def space_of(*lists: tuple[str, tuple[int, ...]]) -> SearchSpace:
    grid = np.indices([len(values) for _, values in lists]).reshape(len(lists), -1).T
    parameters = tuple(Parameter(name, values) for name, values in lists)
    return SearchSpace(parameters, np.asfortranarray(grid.astype(np.uint8)), len(grid), (), (), 0.0)


SPACE = space_of(("BM", BM), ("BN", BN), ("BK", BK), ("VEC", VEC))


def time_us(config: Mapping[str, Any], best: tuple[int, int] = (128, 64)) -> float:
    """Return the time, which is lowest at BM, BN = best, BK = 16, VEC = 4."""
    away = abs(np.log2(config["BM"] / best[0])) + abs(np.log2(config["BN"] / best[1]))
    return 10.0 * (1 + 0.3 * away + 0.2 * abs(np.log2(config["BK"] / 16)) + 0.1 * (config["VEC"] == 1))


def source_of(space: SearchSpace, time_of: TimeOf = time_us, every: int = 3) -> Source:
    configs = [space.config(row) for row in range(0, len(space), every)]
    return Source("another", configs, [time_of(config) for config in configs])


def test_rows_that_no_source_tried_are_answered() -> None:
    prior = TransferPrior(SPACE, [source_of(SPACE, every=4)])
    best = SPACE.config(int(prior.best[0]))
    assert time_us(best) <= 1.1 * 10.0
    assert len(set(prior.best[:50].tolist())) == 50


def test_a_source_of_another_version_is_read_by_what_it_shares() -> None:
    older = space_of(("BM", (16, 32, 64, 128, 512)), ("BN", BN), ("OLD", (1, 2)))
    prior = TransferPrior(SPACE, [source_of(older, lambda c: time_us({**c, "BK": 16, "VEC": 4}), every=1)])
    best = SPACE.config(int(prior.best[0]))
    assert (best["BM"], best["BN"]) == (128, 64)


@pytest.mark.parametrize(
    "source",
    [Source("few", [SPACE.config(0)] * 3, [1.0] * 3), Source("strange", [{"X": n} for n in range(9)], [1.0] * 9)],
)
def test_what_says_nothing_is_left_out(source: Source) -> None:
    assert not TransferPrior(SPACE, [source])
    assert TransferPrior(SPACE, [source, source_of(SPACE)])


def test_sources_count_by_how_well_they_predict() -> None:
    good, bad = source_of(SPACE, every=1), source_of(SPACE, lambda c: 1000.0 / time_us(c), every=1)
    prior = TransferPrior(SPACE, [bad, good])
    tried = np.random.default_rng(0).choice(len(SPACE), 20, replace=False)
    times = np.array([time_us(SPACE.config(int(row))) for row in tried])
    expected = prior.speeds(np.arange(len(SPACE)), tried, times)
    assert time_us(SPACE.config(int(np.argmax(expected)))) == 10.0


def test_expected_losses_follow_what_was_found_here() -> None:
    prior = TransferPrior(SPACE, [source_of(SPACE, every=1)])
    tried = np.arange(0, len(SPACE), 7)
    times = np.array([time_us(SPACE.config(int(row))) for row in tried])
    losses = times - times.mean()
    agreed = prior.losses(np.arange(len(SPACE)), tried, times, losses)
    assert np.corrcoef(agreed[tried], losses)[0, 1] > 0.9
    assert np.ptp(prior.losses(tried, tried, times, -losses)) == 0.0  # it predicts the contrary, so it is ignored


def search(sampler: FeasibleGPSampler, time_of: TimeOf, trials: int) -> list[float]:
    study = optuna.create_study(sampler=sampler)
    times = []
    for _ in range(trials):
        trial = study.ask(dict(distributions_of(SPACE.parameters)))
        times.append(time_of(trial.params))
        study.tell(trial, times[-1])
    return times


def test_a_second_tuning_takes_a_handful_of_measurements() -> None:
    elsewhere = source_of(SPACE, lambda c: 3 * time_us(c, best=(128, 128)))
    taught = [
        min(search(FeasibleGPSampler(SPACE, s, prior=TransferPrior(SPACE, [elsewhere])), time_us, 12)) for s in (0, 1)
    ]
    assert max(taught) == 10.0


def test_a_source_that_misleads_costs_little() -> None:
    misleading = source_of(SPACE, lambda c: 1000.0 / time_us(c))
    sampler = FeasibleGPSampler(SPACE, 0, prior=TransferPrior(SPACE, [misleading]))
    times = search(sampler, time_us, 40)
    assert min(times) == 10.0


def resistant(config: Mapping[str, Any]) -> float:
    return 1000.0 / time_us(config)


def test_a_source_that_misleads_is_dropped_and_named() -> None:
    searching = Search(SPACE, "feasible", 0, sources=[source_of(SPACE, resistant)])
    assert searching.learnt_from == ("another",)
    told = advance(searching, 4)
    assert searching.learnt_from == ()
    (misleading,) = searching.misleading_sources
    assert misleading.correlation < -0.5
    assert str(misleading).startswith("another (rank correlation -")
    assert misleading.to_json()["trials"] == len(told) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_misleads_costs_the_proposals_that_followed_it_only(seed: int) -> None:
    """The others are those of a search without it, in the same order."""
    rows = advance(Search(SPACE, "feasible", seed, sources=[source_of(SPACE, resistant)]), 30)
    alone = advance(Search(SPACE, "feasible", seed), 30)
    assert all(row in rows for row in alone[: len(rows) - 2])


def test_a_search_with_a_right_source_holds_the_one_without() -> None:
    """A row that both want is measured once, for both."""
    rows = advance(Search(SPACE, "feasible", 1, sources=[source_of(SPACE, every=1)]), 40)
    alone = advance(Search(SPACE, "feasible", 1), 20)
    assert all(row in rows for row in alone)


def test_a_right_source_is_kept_beside_one_that_misleads() -> None:
    wrong = source_of(SPACE, resistant)
    sources = [replace(wrong, name="wrong"), replace(source_of(SPACE), name="right")]
    searching = Search(SPACE, "feasible", 0, sources=sources)
    advance(searching, 25)
    assert searching.learnt_from == ("right",)
    assert [source.name for source in searching.misleading_sources] == ["wrong"]


@pytest.mark.parametrize("time_of", [time_us, resistant], ids=["right", "misleading"])
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_resumed_search_repeats_the_proposals(time_of: TimeOf, ahead: int) -> None:
    def searching() -> Search:
        return Search(SPACE, "feasible", 3, ahead=ahead, sources=[source_of(SPACE, time_of)])

    whole = advance_ahead(searching(), 40, lambda config: ok(config, time_us(config)), ahead)
    for done in (1, 7, 25):
        resumed = searching()
        resumed.replay(whole[:done])
        rest = advance_ahead(resumed, 40 - done, lambda config: ok(config, time_us(config)), ahead)
        known = {config_key(trial.config) for trial in whole[:done]}
        assert [trial.config for trial in rest] == [t.config for t in whole if config_key(t.config) not in known]


@pytest.mark.parametrize("time_of", [time_us, resistant], ids=["right", "misleading"])
def test_a_killed_session_goes_on_as_if_it_had_not_been_killed(time_of: TimeOf) -> None:
    def session(earlier: list[Trial], count: int) -> list[Config]:
        searching = Search(SPACE, "feasible", 2, ahead=6, sources=[source_of(SPACE, time_of)])
        shortlist = Shortlist(searching, Lookahead(6, per_measured=2), earlier=earlier)
        found = []
        while len(found) < count:
            while shortlist.propose() is not None:
                pass
            row = shortlist.choose({row: Trial(SPACE.config(row), Outcome.OK, "", "") for row in shortlist.ready()})
            found.append(SPACE.config(row))
            shortlist.tell(row, ok(found[-1], time_us(found[-1])))
        return found

    whole = session([], 40)
    for done in (1, 9, 30):
        earlier = [ok(config, time_us(config)) for config in whole[:done]]
        assert session(earlier, 40 - done) == whole[done:]


def advance(searching: Search, trials: int) -> list[int]:
    done = advance_ahead(searching, trials, lambda config: ok(config, time_us(config)), 1)
    return [int(SPACE.row_of(trial.config) or 0) for trial in done]


def test_proposals_are_repeatable_and_distinct() -> None:
    def rows() -> list[float]:
        return search(FeasibleGPSampler(SPACE, 5, prior=TransferPrior(SPACE, [source_of(SPACE)])), time_us, 20)

    assert rows() == rows()
