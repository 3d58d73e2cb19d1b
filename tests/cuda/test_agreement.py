"""Verification without a reference."""

from __future__ import annotations

from typing import Any

from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.cuda.expected_outputs import Agreement, launch_key
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.parser import parse_spec


class Results:
    """Offers plain numbers as outputs."""

    def __init__(self) -> None:
        self.agreement: Any = Agreement()

    def offer(self, launch: object, value: float) -> Any:
        return self.agreement.offer(launch, lambda other: other == value, lambda: value)


def test_two_launches_must_agree() -> None:
    results = Results()
    assert results.offer("64", 1.0) is None
    assert results.offer("64", 1.0) is None  # the same launch confirms nothing
    assert results.offer("128", 2.0) is None
    assert results.offer("256", 1.0) == 1.0


def test_wrong_results_give_way() -> None:
    results = Results()
    assert [results.offer(str(n), float(n)) for n in range(20)] == [None] * 20
    assert results.offer("again", 3.0) is None
    assert results.offer("again", 19.0) == 19.0


def test_the_launch_tells_configurations_apart() -> None:
    spec, device = parse_spec(SGEMM, "sgemm.toml"), device_profile("h100")
    parameter = next(p for p in spec.parameters if len(p.values) > 1)
    keys = set()
    for value in parameter.values:
        config = {**spec.default, parameter.name: value}
        keys.add(launch_key(spec, config, LaunchPlan.of(spec, config, spec.sizes, device)))
    assert len(keys) > 1
