from __future__ import annotations

import pytest

from autotile.core.model import (
    OBJECTIVES,
    Measurement,
    Outcome,
    Resources,
    Trial,
    normalize_objectives,
    objective_values,
)
from autotile.errors import InputError

TRIAL = Trial(
    {"BM": 64},
    Outcome.OK,
    resources=Resources(40, 0, 0, 0, 0),
    measurement=Measurement(10.0, 9.9, 10.1),
    telemetry={"energy_mj": 3.5, "max_error": 0, "power_w": 300},
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ("time",)),
        (["time"], ("time",)),
        (["registers"], ("time", "registers")),
        (["error", " energy", "time", "error"], ("time", "error", "energy")),
    ],
)
def test_time_is_always_the_first(given: list[str], meant: tuple[str, ...]) -> None:
    assert normalize_objectives(given) == meant


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"no objective 'register'.*registers.*known: time, registers, energy, error"):
        normalize_objectives(["time", "register"])


def test_values_come_in_the_order_asked_for() -> None:
    assert objective_values(TRIAL, list(OBJECTIVES)) == (10.0, 40, 3.5, 0.0)
    assert objective_values(TRIAL, ["error", "time"]) == (0.0, 10.0)


def test_what_lacks_one_has_none() -> None:
    assert objective_values(Trial({}, Outcome.OK, measurement=TRIAL.measurement), ["time", "energy"]) is None
    assert objective_values(Trial({}, Outcome.OK, measurement=TRIAL.measurement), ["time", "registers"]) is None
    assert objective_values(Trial({}, Outcome.CRASHED, resources=TRIAL.resources), ["registers"]) is None
