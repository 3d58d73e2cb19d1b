from collections.abc import Callable
from typing import Any

import pytest

from autotile.core.model import Outcome, Trial
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.trial_log import Ledger


@pytest.fixture
def space(bench: Any) -> SearchSpace:
    return feasible_space(bench.kernel.spec, {"n": 4096}, bench.device)


@pytest.fixture
def make(judges: dict[str, Any]) -> Callable[..., Trial]:
    def trial(threads: int, work: int, time_us: float, outcome: Outcome = Outcome.OK) -> Trial:
        return judges["timed"]({"THREADS": threads, "WORK": work}, time_us, outcome)

    return trial


def test_sums_follow_every_trial(space: SearchSpace, make: Callable[..., Trial], judges: dict[str, Any]) -> None:
    ledger = Ledger(space, [])
    assert (len(ledger), ledger.best, ledger.resumed) == (0, None, 0)
    ledger.add(make(128, 1, 9.0))
    ledger.add(make(64, 1, 8.0))
    ledger.add(make(32, 1, 5.0, Outcome.PRUNED))
    ledger.add(judges["failed"]({"THREADS": 32, "WORK": 2}, Outcome.COMPILE_FAILED, stage="compile"))
    ledger.add(judges["failed"]({"THREADS": 32, "WORK": 4}, Outcome.RESOURCE_EXCEEDED, stage="resources"))
    assert ledger.best == make(64, 1, 8.0)
    assert ledger.outcomes[Outcome.OK] == 2
    assert ledger.outcomes.total() == len(ledger) == len(ledger.trials) == 5
    assert ledger.gates == {
        "combinations": 12,
        "rules": 12,
        "limits": 12,
        "compile_rejected": 1,
        "resources_rejected": 1,
        "same_code": 0,
        "launched": 3,
    }


def test_the_newest_earlier_trial_counts(space: SearchSpace, make: Callable[..., Trial]) -> None:
    ledger = Ledger(space, [make(128, 1, 5.0), make(64, 1, 7.0), make(128, 1, 9.0)])
    assert ledger.resumed == 2
    assert ledger.best == make(64, 1, 7.0)
    found = ledger.find({"WORK": 1, "THREADS": 128})
    assert found is not None
    assert found.time_us == 9.0


def test_what_the_space_does_not_hold_is_left_out(space: SearchSpace, make: Callable[..., Trial]) -> None:
    ledger = Ledger(space, [make(512, 1, 1.0), make(128, 1, 9.0), Trial({"OTHER": 1}, Outcome.OK)])
    assert ledger.resumed == 1
    assert ledger.best == make(128, 1, 9.0)


def test_what_it_gives_away_is_not_its_own(space: SearchSpace, make: Callable[..., Trial]) -> None:
    ledger = Ledger(space, [make(128, 1, 9.0)])
    ledger.outcomes.clear()
    ledger.trials.clear()
    assert ledger.outcomes.total() == len(ledger.trials) == 1
