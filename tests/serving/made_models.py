"""A model of times that expects what a test says, a rule that serves it, programs on an H200, results that agree."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from autotile.core.model import Config, Resources
from autotile.database.database import Database
from autotile.families.family import Family, FamilyRule, RuleConfig, RulePoint, Tree
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings

ON_AN_H200 = """
import os, signal, sys, threading, time
from msgspec.structs import replace
from types import SimpleNamespace
from autotile.core.device import device_profile
from autotile.serving import dispatcher as serving

serving.default_dispatcher.current_device = lambda: 0
serving.live_device = lambda _: replace(device_profile("h200"), source="cuda")
"""
"""The beginning of a program that serves as on such a machine; nothing can be launched."""


def written_misses() -> list[tuple[int, str, str, int]]:
    """Return size, GPU, tier and count of the misses in the user's database."""
    with Database.open(read_settings().database) as database:
        return [(one.problem.sizes["n"], one.gpu_name, one.tier, one.count) for one in database.misses()]


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
    return FamilyRule(family, tuple(RuleConfig(config, 8, resources) for config in configs), tree, (point,))


def close(found: Any, expected: Any) -> bool:
    """Whether a tensor agrees with one of a wider type, by the norm of the difference."""
    limit = 1e-5 if str(found.dtype) == "torch.float32" else 1e-2
    return bool((found.double() - expected.double()).norm() <= limit * expected.double().norm())
