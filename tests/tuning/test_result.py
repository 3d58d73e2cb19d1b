"""The progress of a session."""

from dataclasses import replace

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Outcome
from autotile.tuning.result import Progress


class TestRemainingTime:
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
