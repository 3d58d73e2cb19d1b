"""Options of a session: refused values, and the number of trials at which the search ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.errors import InputError
from autotile.tuning.options import FamilyPlan, TuneOptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trials": 0}, "trials is 0, expected a whole number of at least 1"),
        ({"trials": "7"}, "trials is '7', expected a whole number"),
        ({"trials": True}, "trials is True, expected a whole number"),
        ({"finals": -1}, "finals is -1, expected a whole number of at least 0"),
        ({"workers": 0}, "workers is 0"),
        ({"device_index": -1}, "device_index is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"budget_s": -1.0}, "budget_s is -1.0, expected seconds, 0 or more"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"run_deadline_s": "1"}, "run_deadline_s is '1'"),
        ({"l2": "warm"}, "l2 is 'warm', expected 'cold' or 'hot'"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TuneOptions(**options)


@pytest.mark.parametrize("plan", [{"points": 0}, {"points": "x"}, {"max_configs": 0}])
def test_a_family_needs_points_and_configurations(plan: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected a whole number of at least 1"):
        FamilyPlan(**plan)


def test_numpys_numbers_are_numbers() -> None:
    assert TuneOptions(trials=np.int64(7), budget_s=np.float32(2.0)).trial_target == 7  # type: ignore[arg-type]


def test_what_leaves_the_choice_to_autotile() -> None:
    assert TuneOptions(trials=None, workers=None, budget_s=None).trial_target == 200
    assert TuneOptions(budget_s=0).trial_target is None


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
