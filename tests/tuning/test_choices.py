"""Small decisions of a session: when to stop, and when the kernel is at fault."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Outcome, Trial
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import Progress
from autotile.tuning.trial_log import kernel_fault

BAD, WRONG, DEAD = Outcome.COMPILE_FAILED, Outcome.WRONG_RESULT, Outcome.CRASHED


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (TuneOptions(), 200),
        (TuneOptions(trials=7), 7),
        (TuneOptions(budget_s=60.0), None),
        (TuneOptions(budget_s=60.0, trials=7), 7),
        (TuneOptions(sampler="brute-force"), None),
        (TuneOptions(sampler="brute-force", trials=7), 7),
        (TuneOptions(sampler="random"), 200),
        (TuneOptions(replay=Path("x.npz")), 200),
    ],
)
def test_trials_to_stop_at(options: TuneOptions, target: int | None) -> None:
    assert options.trial_target == target


@pytest.mark.parametrize(
    ("outcomes", "default_tried", "most", "at_fault"),
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
def test_the_kernel_is_at_fault(outcomes: dict[Outcome, int], default_tried: bool, most: int, at_fault: bool) -> None:
    outcome = next(iter(outcomes))
    last = Trial({"TILE": 2}, outcome, "the last reason")
    default = Trial({"TILE": 1}, outcome, "the default's reason") if default_tried else None
    fault = kernel_fault(outcomes, last, default, most)
    assert bool(fault) is at_fault
    if at_fault:
        assert ("TILE=1: the default's reason" if default_tried else "TILE=2: the last reason") in fault


class TestTimeLeft:
    @pytest.fixture
    def progress(self) -> Progress:
        empty = Progress("searching", device_profile("h200"), 0, None, 10.0, None, {}, {"limits": 50}, None)
        return replace(empty, done=10, outcomes={Outcome.OK: 30})

    def test_by_trials(self, progress: Progress) -> None:
        assert replace(progress, target=40).remaining_s == pytest.approx(10.0)
        assert replace(progress, target=1000).remaining_s == pytest.approx(20.0)
        assert replace(progress, target=20).remaining_s == 0.0
        assert replace(progress, target=40, done=4).remaining_s is None

    def test_by_budget(self, progress: Progress) -> None:
        assert progress.remaining_s is None
        assert replace(progress, budget_s=25.0).remaining_s == 15.0
        assert replace(progress, budget_s=5.0).remaining_s == 0.0
        assert replace(progress, budget_s=12.0, target=40).remaining_s == pytest.approx(2.0)
