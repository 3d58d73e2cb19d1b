"""The trial log, and the detection of a kernel that fails throughout."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from autotile.core.model import Outcome, Trial
from autotile.errors import InputError
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.progress_state import TrialLog, check_kernel_failure

BAD, WRONG, DEAD = Outcome.COMPILE_FAILED, Outcome.WRONG_RESULT, Outcome.CRASHED


@pytest.fixture
def space(bench: Any) -> SearchSpace:
    return feasible_space(bench.kernel.spec, {"n": 4096}, bench.device)


@pytest.fixture
def make(judges: dict[str, Any]) -> Callable[..., Trial]:
    def trial(threads: int, work: int, time_us: float, outcome: Outcome = Outcome.OK) -> Trial:
        return judges["timed"]({"THREADS": threads, "WORK": work}, time_us, outcome)

    return trial


def test_sums_follow_every_trial(space: SearchSpace, make: Callable[..., Trial], judges: dict[str, Any]) -> None:
    log = TrialLog(space, [])
    assert (len(log), log.best, log.resumed) == (0, None, 0)
    log.add(make(128, 1, 9.0))
    log.add(make(64, 1, 8.0))
    log.add(make(32, 1, 5.0, Outcome.PRUNED))
    log.add(judges["failed"]({"THREADS": 32, "WORK": 2}, Outcome.COMPILE_FAILED, stage="compile"))
    log.add(judges["failed"]({"THREADS": 32, "WORK": 4}, Outcome.RESOURCE_EXCEEDED, stage="resources"))
    assert log.best == make(64, 1, 8.0)
    assert log.outcomes[Outcome.OK] == 2
    assert log.outcomes.total() == len(log) == len(log.trials) == 5
    assert log.gates == {
        "combinations": 12,
        "rules": 12,
        "limits": 12,
        "compile_rejected": 1,
        "resources_rejected": 1,
        "same_code": 0,
        "launched": 3,
    }


def test_the_newest_earlier_trial_counts(space: SearchSpace, make: Callable[..., Trial]) -> None:
    log = TrialLog(space, [make(128, 1, 5.0), make(64, 1, 7.0), make(128, 1, 9.0)])
    assert log.resumed == 2
    assert log.best == make(64, 1, 7.0)
    found = log.find({"WORK": 1, "THREADS": 128})
    assert found is not None
    assert found.time_us == 9.0


def test_what_the_space_does_not_hold_is_left_out(space: SearchSpace, make: Callable[..., Trial]) -> None:
    log = TrialLog(space, [make(512, 1, 1.0), make(128, 1, 9.0), Trial({"OTHER": 1}, Outcome.OK)])
    assert log.resumed == 1
    assert log.best == make(128, 1, 9.0)


def test_what_it_gives_away_is_not_its_own(space: SearchSpace, make: Callable[..., Trial]) -> None:
    log = TrialLog(space, [make(128, 1, 9.0)])
    log.outcomes.clear()
    log.trials.clear()
    assert log.outcomes.total() == len(log.trials) == 1


@pytest.mark.parametrize(
    ("outcomes", "default_tried", "max_trials", "at_fault"),
    [
        ({BAD: 7}, True, 100, False),
        ({BAD: 8}, True, 100, True),
        ({WRONG: 8}, True, 100, True),
        ({DEAD: 8}, True, 100, False),
        ({BAD: 8, WRONG: 1}, True, 100, False),
        ({BAD: 100, Outcome.OK: 1}, True, 100, False),
        ({BAD: 3}, True, 3, True),
        ({BAD: 8}, False, 100, False),
        ({BAD: 100}, False, 100, True),
    ],
)
def test_a_failure_of_the_kernel_itself(
    outcomes: dict[Outcome, int], default_tried: bool, max_trials: int, at_fault: bool
) -> None:
    outcome = next(iter(outcomes))
    last = Trial({"TILE": 2}, outcome, "the last reason")
    default = Trial({"TILE": 1}, outcome, "the default's reason") if default_tried else None
    named = "TILE=1: the default's reason" if default_tried else "TILE=2: the last reason"
    with pytest.raises(InputError, match=f"^scale.toml: no candidate .* {named}$") if at_fault else nullcontext():
        check_kernel_failure("scale.toml", outcomes, last, default, max_trials)
