"""The choice among compiled candidates, and what happens to the others."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from rows import DEFAULT, broken, chosen, make_space, ok, tile_space, tile_time_us, wide_space, wide_time_us

from autotile.core.model import Config, LaunchGeometry, Occupancy, Outcome, Resources, Trial
from autotile.errors import ConfigError
from autotile.search.gaussian_process import features_of
from autotile.search.samplers import Lookahead
from autotile.search.search import Search, Shortlist
from autotile.space.search_space import SearchSpace

RANKED = Lookahead(compiling=8, per_measured=2, queued=1)


def compiled_trial(config: Config, registers: int = 32) -> Trial:
    geometry = LaunchGeometry((100, 1, 1), (128, 1, 1), 0)
    occupancy = Occupancy(4, 16, 0.25, ("registers",), {"registers": 4})
    return Trial(config, Outcome.OK, "", "compile", geometry, Resources(registers, 0, 0, 0, 0), occupancy)


def rejected(config: Config) -> Trial:
    return replace(compiled_trial(config), outcome=Outcome.RESOURCE_EXCEEDED, reason="no block fits", stage="resources")


def answer(config: Config) -> Trial:
    """Return a trial of a simulated device: a fifth do not fit, some fail, the slow ones are pruned."""
    if config["BM"] == 256 and config["TM"] == 2:
        return rejected(config)
    if config["BN"] == 256 and config["TM"] == 8:
        return broken(config)
    time = tile_time_us(config)
    return ok(config, time, Outcome.PRUNED if time > 300 else Outcome.OK)


def go(shortlist: Shortlist, trials: int, done: int = 0) -> tuple[list[Trial], int]:
    """Run a session, which has the next candidate at hand while one runs; return its trials and compilations."""
    compiled = 0
    ended: list[Trial] = []
    running: deque[int] = deque()
    config = shortlist._search.space.config
    while (room := trials - done - len(ended) - len(running)) or running:
        while shortlist.propose(room) is not None:
            compiled += 1
        ready = shortlist.ready() if room else []
        bad = [row for row in ready if answer(config(row)).stage == "resources"]
        if ready and not bad:
            running.append(shortlist.choose({row: compiled_trial(config(row)) for row in ready}))
            continue
        if not bad and not running:
            break
        row = bad[0] if bad else running.popleft()
        ended.append(answer(config(row)))
        shortlist.tell(row, ended[-1])
    return ended, compiled


def shortlist_of(space: SearchSpace, earlier: list[Trial], lookahead: Lookahead = RANKED, seed: int = 5) -> Shortlist:
    return Shortlist(Search(space, "feasible", seed, first=[DEFAULT], ahead=8), lookahead, earlier=earlier)


def configs(trials: list[Trial]) -> list[Config]:
    return [trial.config for trial in trials]


def test_without_a_choice_candidates_are_measured_as_they_were_proposed() -> None:
    space = tile_space()
    search = Search(space, "tpe", 3, ahead=4)
    shortlist = Shortlist(Search(space, "tpe", 3, ahead=4), Lookahead(4))
    waiting = []
    for _ in range(40):
        while len(waiting) < 4:
            waiting.append(search.propose() or pytest.fail("too few rows"))
        while shortlist.propose() is not None:
            pass
        row, config = waiting.pop(0)
        assert shortlist.ready() == [row]
        assert shortlist.choose({row: compiled_trial(config)}) == row
        search.tell(row, answer(config))
        shortlist.tell(row, answer(config))


def test_more_are_compiled_than_are_measured_the_default_first_and_none_is_lost_or_measured_twice() -> None:
    space = tile_space()
    ended, compiled = go(shortlist_of(space, []), 60)
    assert ended[0].config == DEFAULT
    assert len(ended) == 60
    assert compiled >= 90
    ended, compiled = go(shortlist_of(space, []), 1000)
    assert len(ended) == compiled == len(space)
    assert {space.row_of(config) for config in configs(ended)} == set(range(len(space)))


def test_what_is_set_aside_is_tried_in_the_end_and_survives_a_kill() -> None:
    space = tile_space()
    few = Lookahead(compiling=8, per_measured=3, queued=1, max_waiting=5)
    whole, compiled = go(shortlist_of(space, [], few), 1000)
    assert len(whole) == len(space) < compiled
    assert {space.row_of(config) for config in configs(whole)} == set(range(len(space)))
    for killed in (20, 110):
        rest, _ = go(shortlist_of(space, whole[:killed], few), 1000, done=killed)
        assert configs(rest) == configs(whole[killed:]), killed


@pytest.mark.parametrize("lookahead", [RANKED, Lookahead(32, per_measured=2, queued=7, gpus=4)], ids=["1", "4"])
def test_a_killed_session_goes_on_as_if_it_had_not_been_killed(lookahead: Lookahead) -> None:
    space = tile_space()
    whole, _ = go(shortlist_of(space, [], lookahead), 70)
    for killed in (1, 6, 7, 27, 69):
        rest, _ = go(shortlist_of(space, whole[:killed], lookahead), 70, done=killed)
        assert configs(rest) == configs(whole[killed:]), killed


def test_only_rows_that_this_session_proposed_wait() -> None:
    space = tile_space()
    earlier, _ = go(shortlist_of(space, []), 24)
    resumed = shortlist_of(space, earlier)
    proposed: set[int] = set()
    while (next_one := resumed.propose(24)) is not None:
        assert set(resumed.waiting()) <= (proposed := {*proposed, next_one[0]})
    assert set(resumed.ready()) <= set(resumed.waiting()) == proposed


def test_a_session_that_is_granted_more_goes_on_as_if_it_had_been_from_the_start() -> None:
    space = tile_space()
    short, _ = go(shortlist_of(space, []), 40)
    rest, _ = go(shortlist_of(space, short), 70, done=40)
    whole, _ = go(shortlist_of(space, []), 70)
    measured = [[each for each in trials if each.stage != "resources"] for trials in (short + rest, whole)]
    assert configs(measured[0]) == configs(measured[1])
    assert len(short + rest) == len(whole)


def test_trials_of_another_seed_are_learnt_from_and_not_made_again() -> None:
    space = tile_space()
    others, _ = go(shortlist_of(space, [], seed=1), 50)
    rest, _ = go(shortlist_of(space, others, seed=2), 80, done=50)
    assert len({space.row_of(config) for config in configs(others + rest)}) == 80
    assert min(trial.time_us or np.inf for trial in others) < 200
    again, _ = go(shortlist_of(space, others + rest[:10], seed=2), 80, done=60)
    assert configs(again) == configs(rest[10:])


def test_what_the_compiler_says_decides_among_candidates_alike() -> None:
    """The time depends on the registers, which are random and known from the compiler only."""
    space = make_space({"A": tuple(range(2, 26)), "B": (1, 2, 4, 8, 16)})
    registers = np.random.default_rng(0).permutation(np.linspace(16, 255, len(space)).astype(int))
    found = []
    for ended in (True, False):
        taken = []
        for seed in range(2):
            shortlist = Shortlist(Search(space, "feasible", seed, ahead=4), Lookahead(4, per_measured=2))

            def compiled(config: Config, known: bool = ended) -> Trial:
                return compiled_trial(config, int(registers[space.row_of(config)]) if known else 32)

            for _ in range(40):
                row = chosen(shortlist, compiled)
                taken.append(registers[row])
                time = ok({}, float(registers[row])).measurement
                shortlist.tell(row, replace(compiled(space.config(row)), stage="measure", measurement=time))
        found.append(np.mean(taken))
    assert found[0] < 0.85 * found[1]


def test_it_finds_the_best_of_a_landscape_with_interactions() -> None:
    space = wide_space()
    least = min(wide_time_us(space.config(row)) for row in range(len(space)))
    shortlist = Shortlist(Search(space, "feasible", 0, ahead=16), Lookahead(32, per_measured=2))
    best = np.inf
    for _ in range(90):
        row = chosen(shortlist, compiled_trial)
        time = wide_time_us(space.config(row))
        best = min(best, time)
        shortlist.tell(row, ok(space.config(row), time))
    assert best <= 1.02 * least


def test_no_room_proposes_nothing_and_a_sampler_without_a_model_cannot_rank() -> None:
    shortlist = shortlist_of(tile_space(), [answer(DEFAULT)])
    assert shortlist.propose(0) is None
    assert shortlist.ready() == []
    proposed = [shortlist.propose(1) for _ in range(20)]
    assert [each[0] for each in proposed if each is not None] == shortlist.ready()
    with pytest.raises(ConfigError, match="'random' cannot rank"):
        Search(tile_space(), "random").nominate()


def test_features_are_of_one_scale_and_need_a_compiler() -> None:
    features = features_of(compiled_trial({}, registers=255), sm_count=132)
    assert features is not None
    assert features.min() >= 0
    assert features.max() <= 1
    assert features_of(replace(compiled_trial({}), resources=None), sm_count=132) is None
