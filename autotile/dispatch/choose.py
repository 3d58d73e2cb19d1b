"""Choose the configuration to serve: exact, by a family's rule, nearest, transferred or default, and say why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from autotile.files.library import Kernel
from autotile.ground.config_check import check_config, is_worth_a_trial
from autotile.ground.errors import SpecError
from autotile.ground.frozen import dataclass
from autotile.ground.geometry import launch_geometry
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, Measurement, Problem, Resources
from autotile.ground.problem import size_distance
from autotile.ground.resource_gate import compiled_occupancy, resource_fault
from autotile.store.keys import TuningKey, key_differences, key_of
from autotile.store.winners import Winner

if TYPE_CHECKING:
    from autotile.store.rules import StoredRule

Tier = Literal["exact", "family", "nearest", "transferred", "default"]
_TIERS: tuple[Tier, ...] = ("exact", "family", "nearest", "transferred", "default")
_NEAR_DOUBLINGS = 1.0
"""So far from where it was tuned, a configuration is believed though a search would not try it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration with what is known of it.

    Attributes
    ----------
    tier
        ``exact``: tuned for this very problem on this GPU; ``family``: by a rule that was learned from other problems
        of its family on this GPU; ``nearest``: for other sizes on this GPU; ``transferred``: on another GPU;
        ``default``: not tuned.
    differences
        Key fields in which the tuned problem differs from the asked one: name, tuned value, asked value.
    shipped
        Whether the result came with autotile.
    aged
        What is newer here than where the result was measured, a few words each: the driver, NVRTC.
    packed
        The bundle that it is served from, and for what its cubin was compiled; empty where it is none.
    rule
        What is said of the family's rule; empty where none chose.
    unread
        Why the user's database could not be read; empty where it could, or there is none.
    """

    tier: Tier
    config: Config
    measurement: Measurement | None = None
    resources: Resources | None = None
    source: Literal["cuda", "replayed", ""] = ""
    tuned_on: str = ""
    tuned_at: datetime | None = None
    tuned_sizes: Mapping[str, int] | None = None
    differences: tuple[tuple[str, str, str], ...] = ()
    shipped: bool = False
    aged: tuple[str, ...] = ()
    packed: str = ""
    rule: str = ""
    unread: str = ""


def choose(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    nvrtc_version: str,
    stored: Iterable[Winner],
    *,
    rules: Iterable[StoredRule] = (),
) -> Choice:
    """The best stored result that may be served for a problem, else the default configuration.

    A result of another version of the kernel is never served: it was not verified for this one. Nor is one that was
    tuned far away and that a search would not try at these sizes. A configuration that breaks a rule or a limit at
    these sizes or on this device is passed over; so is one that, with the resources it was compiled to where it was
    tuned, could not run here or not as its author asks.

    Parameters
    ----------
    kernel, problem, device, nvrtc_version
        What is asked for.
    stored
        Winners of the kernel, in any order. Of equals, the user's own goes before one that came with autotile.
    rules
        Rules of the kernel's families, the newest first.
    """
    asked = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode="cold")

    def may_serve(best: Winner) -> bool:
        return not check_config(kernel.spec, best.config, problem.sizes, device, problem.dtype) and not _resource_fault(
            kernel, best, problem, device
        )

    current = [
        best
        for best in stored
        if best.key.dtype == asked.dtype
        and (best.key.template_hash, best.key.space_hash) == (asked.template_hash, asked.space_hash)
        and best.key.options == asked.options
    ]
    ranked = sorted(current, key=lambda best: _rank(best, asked))
    exact = [best for best in ranked if _tier(best.key, asked) == "exact"]
    best = next(filter(may_serve, exact), None)
    if best is not None:
        return _choice(best, asked, device)
    if known_rules := list(rules):
        from autotile.dispatch.rules import choose_by_rule  # trees and families are for who has tuned families

        by_rule = choose_by_rule(kernel, problem, device, asked, rules=known_rules, may_serve=may_serve)
        if by_rule is not None:
            chosen, said = by_rule
            return replace(_choice(chosen, asked, device), tier="family", rule=said)

    def is_promising(best: Winner) -> bool:
        flags, doublings = size_distance(best.key.sizes, asked.sizes)
        is_near = not flags and doublings <= _NEAR_DOUBLINGS
        return (is_near or is_worth_a_trial(kernel.spec, best.config, problem.sizes, device)) and may_serve(best)

    best = next(filter(is_promising, ranked[len(exact) :]), None)  # most often the first; the others need no look
    if best is not None:
        return _choice(best, asked, device)
    return Choice("default", _default_config(kernel, problem, device))


def _resource_fault(kernel: Kernel, best: Winner, problem: Problem, device: DeviceProperties) -> str:
    if best.resources is None:
        return ""
    geometry = launch_geometry(kernel.spec, best.config, problem.sizes, device)
    found = compiled_occupancy(geometry, best.resources, device)
    return resource_fault(kernel.spec.limits, geometry, best.resources, found, device)


def _rank(best: Winner, asked: TuningKey) -> tuple[int, bool, int, float, int, bool, float]:
    """Lower is better: tier, another architecture, flags, distance in size, other differences, shipped, age."""
    tier = _TIERS.index(_tier(best.key, asked))
    other = sum(1 for name, _, _ in key_differences(best.key, asked) if name not in ("sizes", "gpu_name"))
    foreign = best.key.compute_capability != asked.compute_capability
    flags, doublings = size_distance(best.key.sizes, asked.sizes)
    return tier, foreign, flags, doublings, other, best.shipped, -best.tuned_at.timestamp()


def _tier(key: TuningKey, asked: TuningKey) -> Tier:
    if _device_of(key) != _device_of(asked) or key.source != asked.source:
        return "transferred"
    return "exact" if key == asked else "nearest"


def _device_of(key: TuningKey) -> tuple[str, str, int, int]:
    return key.gpu_name, key.compute_capability, key.sm_count, key.smem_per_block_optin_bytes


def _aged(best: Winner, asked: TuningKey, device: DeviceProperties) -> tuple[str, ...]:
    """What has changed on this GPU since the result was measured on it, as far as both are known."""
    if _device_of(best.key) != _device_of(asked) or best.device is None:
        return ()
    versions = (
        ("NVRTC", best.key.nvrtc_version, asked.nvrtc_version),
        ("driver", best.device.driver, device.driver),
    )
    return tuple(f"{what} {then}, now {now}" for what, then, now in versions if then and now and then != now)


def _choice(best: Winner, asked: TuningKey, device: DeviceProperties) -> Choice:
    return Choice(
        tier=_tier(best.key, asked),
        config=best.config,
        measurement=best.measurement,
        resources=best.resources,
        source=best.key.source,
        tuned_on=best.key.gpu_name,
        tuned_at=best.tuned_at,
        tuned_sizes=best.key.sizes,
        differences=key_differences(best.key, asked),
        shipped=best.shipped,
        aged=_aged(best, asked, device),
    )


def _default_config(kernel: Kernel, problem: Problem, device: DeviceProperties) -> Config:
    """The declared default; where it cannot run here or is not worth a trial, the first configuration that is."""
    spec, sizes = kernel.spec, problem.sizes
    is_valid = not check_config(spec, spec.default, sizes, device, problem.dtype)
    if is_valid and is_worth_a_trial(spec, spec.default, sizes, device):
        return dict(spec.default)
    from autotile.ground.space import feasible_space  # tables are for who needs all configurations

    try:
        return feasible_space(spec, sizes, device, problem.dtype).config(0)
    except SpecError:
        if is_valid:  # of a space too large to enumerate
            return dict(spec.default)
        raise
