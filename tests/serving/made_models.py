"""A model of times that expects what a test says, and a rule that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from autotile.core.model import Config, Resources
from autotile.families.family import Family, FamilyRule, RuleConfig, RulePoint, Tree
from autotile.kernel.library import load_kernel


class Model:
    """A model of times that expects what it is given, and records what it is asked."""

    gpu_name = "NVIDIA H200"

    def __init__(self, *expected: Any) -> None:
        self.expected = list(expected)
        self.asked: list[tuple[dict[str, int], set[str], list[str]]] = []

    def choose(
        self, sizes: Mapping[str, int], fits: Mapping[str, Any], specs: Any, device: Any, **options: Any
    ) -> list[Any]:
        self.asked.append((dict(sizes), set(fits), list(options["libraries"])))
        known = {*fits, *options["libraries"]}
        return [one for one in self.expected if one.candidate.kernel in known]


def expect(kernel: str, time_us: float, doubt: float = 0.05) -> SimpleNamespace:
    config = {} if kernel == "cublas" else dict(load_kernel(kernel).spec.default)
    return SimpleNamespace(candidate=SimpleNamespace(kernel=kernel, config=config), time_us=time_us, doubt=doubt)


def rule_of(family: Family, configs: tuple[Config, ...], tree: Tree, resources: Resources | None = None) -> FamilyRule:
    timed = tuple((10.0 + number, 9.0, 12.0) for number in range(len(configs)))
    point = RulePoint(family.largest, timed, 10.0, 0.0, 0.02)
    return FamilyRule(family, tuple(RuleConfig(config, resources, 8) for config in configs), tree, (point,))
