"""Searches that begin with estimated times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rows import advance_ahead, broken, ok, tile_space, tile_time_us

from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.exchange.recording import read_recording
from autotile.kernel.library import load_kernel
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.samplers import Lookahead
from autotile.search.search import Search, Shortlist
from autotile.search.transfer import Source, estimated_speeds
from autotile.space.search_space import SearchSpace
from autotile.space.time_estimate import estimate_times

SPACE = tile_space()
RECORDINGS = Path(__file__).parents[2] / "recordings"


def exact(space: SearchSpace) -> NDArray[np.float64]:
    return np.array([tile_time_us(space.config(row)) for row in range(len(space))])


def reverse(space: SearchSpace) -> NDArray[np.float64]:
    return 1e3 / exact(space)


def times(seed: int, trials: int, estimate: object = None) -> list[float]:
    search = Search(SPACE, "feasible", seed, estimate=estimate)  # type: ignore[arg-type]
    done = advance_ahead(search, trials, lambda config: ok(config, tile_time_us(config)), 1)
    return [trial.time_us or 0.0 for trial in done]


def test_the_first_rows_are_the_best_estimates_and_others_in_turn() -> None:
    found, least = times(0, 6, exact), np.sort(exact(SPACE))
    assert found[0] == least[0]
    assert found[2] in least[:2]
    assert found[4] in least[:3]
    assert min(found[1], found[3], found[5]) > least[5]


def test_a_right_estimate_saves_trials() -> None:
    assert np.mean([min(times(seed, 3, exact)) for seed in range(3)]) < np.mean([min(times(s, 10)) for s in range(3)])


def test_a_wrong_estimate_costs_little() -> None:
    least = float(exact(SPACE).min())
    wrong, none = ([least / min(times(seed, 30, of)) for seed in range(4)] for of in (reverse, None))
    assert np.mean(wrong) > np.mean(none) - 0.02


def test_an_estimate_that_says_nothing_changes_nothing() -> None:
    assert times(3, 15, lambda space: None) == times(3, 15)


def test_other_studies_take_its_place() -> None:
    configs = [SPACE.config(row) for row in range(0, len(SPACE), 3)]
    sources = [Source("another", configs, [tile_time_us(config) for config in configs])]
    plain, both = (Search(SPACE, "feasible", 1, sources=sources, estimate=of) for of in (None, reverse))
    rows = [
        [trial.config for trial in advance_ahead(s, 15, lambda c: ok(c, tile_time_us(c)), 1)] for s in (plain, both)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("estimate", [exact, reverse])
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_resumed_search_repeats_the_proposals(estimate: object, ahead: int) -> None:
    def searching() -> Search:
        return Search(SPACE, "feasible", 3, ahead=ahead, estimate=estimate)  # type: ignore[arg-type]

    whole = advance_ahead(searching(), 30, lambda config: ok(config, tile_time_us(config)), ahead)
    for done in (1, 7, 20):
        resumed = searching()
        resumed.replay(whole[:done])
        rest = advance_ahead(resumed, 30 - done, lambda config: ok(config, tile_time_us(config)), ahead)
        known = {config_key(trial.config) for trial in whole[:done]}
        assert [trial.config for trial in rest] == [t.config for t in whole if config_key(t.config) not in known]


def test_a_killed_session_goes_on_as_if_it_had_not_been_killed() -> None:
    def session(earlier: list[Trial], count: int) -> list[Config]:
        searching = Search(SPACE, "feasible", 2, ahead=6, estimate=exact)
        shortlist = Shortlist(searching, Lookahead(6, per_measured=2), earlier=earlier)
        found: list[Config] = []
        while len(found) < count:
            while shortlist.propose() is not None:
                pass
            row = shortlist.choose({row: Trial(SPACE.config(row), Outcome.OK, "", "") for row in shortlist.ready()})
            found.append(SPACE.config(row))
            shortlist.tell(row, ok(found[-1], tile_time_us(found[-1])))
        return found

    whole = session([], 30)
    for done in (1, 9, 20):
        assert session([ok(config, tile_time_us(config)) for config in whole[:done]], 30 - done) == whole[done:]


def test_configurations_that_go_first_do_not_take_the_place_of_estimates() -> None:
    first = [SPACE.config(row) for row in np.argsort(-exact(SPACE))[:2].tolist()]
    searching = Search(SPACE, "feasible", 0, first=first, estimate=exact)
    done = advance_ahead(searching, 5, lambda config: ok(config, tile_time_us(config)), 1)
    assert [trial.config for trial in done[:2]] == first
    assert [trial.time_us for trial in done[2:4]] == np.sort(exact(SPACE))[:2].tolist()


@pytest.mark.parametrize("sizes", ["1024x1024x1024", "128x4096x4096", "4096x4096x4096"])
def test_ten_trials_reach_nine_tenths_of_a_recorded_optimum(sizes: str) -> None:
    recording = read_recording(RECORDINGS / f"sgemm_2d-nvidia-h200-{sizes}-float32.npz")
    key, device, order = recording.header.key, recording.header.device, np.lexsort(recording.codes.T[::-1])
    assert device is not None
    codes = np.asfortranarray(recording.codes[order])
    space = SearchSpace(recording.header.parameters, codes, len(codes), (), (), 0.0)
    times_us = np.where(recording.ok, recording.columns["time_us"], np.nan)[order]

    def estimate(part: SearchSpace) -> NDArray[np.float64] | None:
        found = estimate_times(load_kernel("sgemm_2d").spec, key.sizes, device, part)
        return found.time_us if found is not None else None

    def trial_of(config: Config) -> Trial:
        time_us = float(times_us[space.row_of(config)])
        return ok(config, time_us) if time_us > 0 else broken(config)

    reached = []
    for seed in range(2):
        done = advance_ahead(Search(space, "feasible", seed, estimate=estimate), 10, trial_of, 1)
        reached.append(np.nanmin(times_us) / min(trial.time_us or np.inf for trial in done))
    assert np.mean(reached) > 0.9


def test_of_a_very_large_space_a_sample_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotile.search.transfer._MAX_ROWS", 20)
    counts = []

    def counted(space: SearchSpace) -> NDArray[np.float64]:
        counts.append(len(space))
        return exact(space)

    found = estimated_speeds(SPACE, counted)
    assert found is not None
    assert counts[0] <= 20 < len(SPACE)
    best = SPACE.config(int(found.best[0]))
    assert tile_time_us(best) == min(tile_time_us(SPACE.config(int(row))) for row in found.rows)
    assert len(found.speeds(np.arange(len(SPACE)), np.zeros(0, np.int64), np.zeros(0))) == len(SPACE)
    sampler = FeasibleGPSampler(SPACE, 0, estimate=found)
    assert sampler.candidates.remaining == len(SPACE)
    assert replace(SPACE, codes=SPACE.codes[found.rows]).config(0) == SPACE.config(int(found.rows[0]))
