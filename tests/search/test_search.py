from __future__ import annotations

import numpy as np
import pytest
from rows import advance_ahead, broken, make_space, ok, tile_space, tile_time_us

from autotile.core.model import Config, Outcome, Trial
from autotile.errors import ConfigError, InputError
from autotile.search.samplers import SAMPLERS
from autotile.search.search import FAILED, Search

INSTALLED = [name for name, kind in SAMPLERS.items() if kind.missing_package is None]
DEFAULT: Config = {"BM": 64, "BN": 64, "TM": 2, "LAYOUT": "row", "ASYNC": False}


def trial_of(config: Config) -> Trial:
    """Return a trial of a simulated device: a quarter of the tiles fail, the slow ones are pruned."""
    if config["BM"] == 256:
        return broken(config)
    time_us = tile_time_us(config)
    return ok(config, time_us, Outcome.PRUNED if time_us > 300 else Outcome.OK)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_default_comes_first_and_then_every_other_row(name: str) -> None:
    space = make_space({"A": (1, 2, 4), "B": ("x", "y", "z"), "C": (5,)}, lambda c: c["A"] != 2 or c["B"] != "y")
    search = Search(space, name, seed=4, first=[{"A": 4, "B": "y", "C": 5}])
    done = advance_any(search, len(space))
    assert done[0] == {"A": 4, "B": "y", "C": 5}
    assert sorted(map(str, done)) == sorted(str(space.config(row)) for row in range(len(space)))
    assert search.propose() is None


def advance_any(search: Search, trials: int) -> list[Config]:
    proposals = []
    for index in range(trials):
        row, config = search.propose() or pytest.fail("too few rows")
        proposals.append(config)
        search.tell(row, ok(config, 10.0 + index) if index % 3 else broken(config))
    return proposals


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("ahead", [1, 16])
def test_a_resumed_search_goes_on_as_the_first_one_would_have(name: str, ahead: int) -> None:
    """Also with pending proposals: each knows the same results as in the first search."""
    space = tile_space()

    def go_on(earlier: list[Trial]) -> list[Trial]:
        search = Search(space, name, seed=7, first=[DEFAULT], ahead=ahead)
        assert search.replay(earlier) == len(earlier)
        return advance_ahead(search, 60 - len(earlier), trial_of, ahead)

    done = go_on([])
    for killed in (1, 15, 16, 17, 43, 59):
        assert [trial.config for trial in go_on(done[:killed])] == [trial.config for trial in done[killed:]]


def test_replayed_trials_that_left_the_space_are_ignored() -> None:
    space = make_space({"A": (1, 2, 4), "B": (1, 2)}, lambda c: c["A"] != 2)
    search = Search(space, "random", first=[{"A": 1, "B": 1}])
    earlier = [
        ok({"A": 1, "B": 1}, 5.0),
        ok({"A": 2, "B": 1}, 4.0),  # not valid any more
        ok({"A": 3, "B": 1}, 3.0),  # a value that the space lost
        ok({"A": 1}, 2.0),  # before B was a parameter
    ]
    assert search.replay(earlier) == 1
    assert len(search.study.trials) == 2
    assert {str(config) for config in advance_any(search, 3)} == {
        "{'A': 1, 'B': 2}",
        "{'A': 4, 'B': 1}",
        "{'A': 4, 'B': 2}",
    }
    assert search.propose() is None


def test_several_rows_can_be_pending() -> None:
    search = Search(tile_space(), "tpe", first=[DEFAULT])
    pending = [search.propose() for _ in range(16)]
    rows = [proposal[0] for proposal in pending if proposal]
    for row, config in [proposal for proposal in pending if proposal][::-1]:
        search.tell(row, trial_of(config))
    rows += [proposal[0] for _ in range(30) if (proposal := search.propose())]
    assert len(set(rows)) == 46


def test_a_default_that_cannot_be_proposed_is_skipped() -> None:
    space = tile_space()
    available = np.ones(len(space), np.bool_)
    available[space.row_of(DEFAULT)] = False
    proposal = Search(space, "brute-force", first=[DEFAULT, {"BM": 7}], available=available).propose()
    assert proposal is not None
    assert proposal[1] != DEFAULT


def test_each_proposal_is_told_once() -> None:
    search = Search(tile_space(), "random")
    row, config = search.propose() or pytest.fail("nothing proposed")
    search.tell(row, trial_of(config))
    with pytest.raises(ConfigError, match=f"row {row} was not proposed or was told already"):
        search.tell(row, trial_of(config))


def test_auto_says_what_it_became() -> None:
    space = tile_space()
    assert Search(space, trials=10_000).sampler == "brute-force"
    assert Search(space, trials=50).sampler == "feasible"
    with pytest.raises(InputError, match="no sampler 'best'"):
        Search(space, "best")
    with pytest.raises(InputError, match="the seed is -1, expected 0 or more"):
        Search(space, "random", seed=-1)


def test_the_study_shows_times_in_microseconds_and_failures_as_the_worst() -> None:
    search = Search(make_space({"A": (1, 2, 3, 4, 5)}), "brute-force")
    for trial in (
        broken({"A": 1}),
        ok({"A": 2}, 20.0),
        ok({"A": 3}, 50.0, Outcome.PRUNED),
        broken({"A": 4}, Outcome.CRASHED),
        Trial({"A": 5}, Outcome.NOT_AVAILABLE, "not in the recording"),
    ):
        row, config = search.propose() or pytest.fail("nothing proposed")
        assert config == trial.config
        search.tell(row, trial)
    trials = search.study.trials
    assert [trial.value for trial in trials] == [1e6, 20.0, 50.0, 100.0, None]
    assert [trial.constraints[FAILED] for trial in trials] == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert [trial.user_attrs["outcome"] for trial in trials] == [
        "wrong_result",
        "ok",
        "pruned",
        "crashed",
        "not_available",
    ]
    assert trials[0].user_attrs["reason"] == "element 3 is 7, expected 5"
    assert search.study.best_params == {"A": 2}
    assert search.study.metric_names == ["time_us"]


def test_the_gain_of_many_proposals_is_known_when_all_had_a_model() -> None:
    search = Search(tile_space(), "feasible", 0, ahead=4)
    for told in range(40):
        row, config = search.propose() or pytest.fail("too few rows")
        assert search.gain_of() is None
        search.tell(row, ok(config, 100.0 + told % 7))
    gains = list(search._gains)
    assert search.gain_of(4) == pytest.approx(sum(gains[-4:]))
    search._gains.extend([0.25] * 256)
    assert search.gain_of() == pytest.approx(64)


@pytest.mark.parametrize("compiles_first", [False, True])
def test_nothing_is_known_of_proposals_when_no_row_is_left(compiles_first: bool) -> None:
    space = tile_space()
    search = Search(space, "feasible", 0, ahead=4)
    for told in range(len(space)):
        if compiles_first and told == 40:
            break
        row, config = search.propose() or pytest.fail("too few rows")
        search.tell(row, ok(config, 100.0 + told % 7))
    while compiles_first and search.nominate() is not None:
        pass
    assert search.gain_of(4) is None if compiles_first else search.gain_of(4) is not None
    assert compiles_first or search.propose() is None
    assert search.gain_of(4) is None
    assert search.gain_of(1) is None


def test_each_nomination_has_its_gain_and_its_row_once() -> None:
    space = tile_space()
    search = Search(space, "feasible", 0, ahead=4)
    for told in range(40):
        row, config = search.propose() or pytest.fail("too few rows")
        search.tell(row, ok(config, 100.0 + told % 7))
    before, rows = list(search._gains), set()
    while (nominated := search.nominate()) is not None:
        rows.add(nominated[0])
        assert search.gain_of(1) is not None
        assert list(search._gains)[: len(before)] == before, "one more"
        assert len(search._gains) == len(before) + len(rows)
    assert len(rows) == len(space) - 40
    row = min(rows)
    search.tell(row, ok(space.config(row), 90.0))  # as one that was nominated
    with pytest.raises(ConfigError, match="was told already"):
        search.tell(row, ok(space.config(row), 90.0))


def test_the_end_of_a_search_is_foreseen_from_the_gains_that_leave_the_window() -> None:
    search = Search(tile_space(), "feasible", 0, ahead=4)
    assert search.proposals_until(0.1, 8) is None  # nothing was proposed
    search._gains.extend([None, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert search.proposals_until(0.5, 8) == 2  # when that without a model and the first gain have left
    assert search.proposals_until(0.1, 8) == 3
    search._gains.extend([0.01] * 8)
    assert search.proposals_until(0.1, 8) == 0
    assert search.proposals_until(0.05, 8) is None  # as much is added as leaves
