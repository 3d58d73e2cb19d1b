"""Choose the configuration of a kernel: exact, by a family's rule, nearest, transferred or default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Measurement, Problem, Resources, config_key
from autotile.database.keys import TuningKey, key_differences, key_of
from autotile.database.winners import Check, StoredRule, Winner
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance
from autotile.serving.untuned import Estimated, untuned_config
from autotile.space.limits import check_config, compiled_occupancy, meets_heuristics, resource_violation

if TYPE_CHECKING:
    from autotile.families.rule import FamilyRule

Tier = Literal["exact", "family", "model", "library", "nearest", "transferred", "default"]
_TIERS: tuple[Tier, ...] = ("exact", "family", "nearest", "transferred", "default")
"""Tiers of a kernel's own results, best first; ``model`` and ``library`` are those of operations."""
_NEAR_DOUBLINGS = 1.0
"""Distance up to which a tuned configuration is served even if a search would not try it for the requested sizes."""
_FREE_FIELDS = ("sizes", "nvrtc_version", "l2_mode")
"""Key fields in which a rule may differ from the request: its sizes are the family's, the others are reported."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel in one configuration, or a library, with its time for a problem of an operation.

    Attributes
    ----------
    kernel, config
        Name of the kernel and its configuration; for a library its name and no configuration.
    time_us
        Time, measured or expected; None if nothing is known of it.
    doubt
        One standard deviation of the logarithm of an expected time: 0.08 is 8 %. None for a measured time.
    is_library
        Whether it is a library.
    source
        ``replayed`` for a measured time from a recording; ``cuda`` otherwise.
    """

    kernel: str
    config: Config
    time_us: float | None
    doubt: float | None = None
    is_library: bool = False
    source: str = "cuda"

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {
            "kernel": self.kernel,
            "config": dict(self.config),
            "time_us": self.time_us,
            "doubt": self.doubt,
            "library": self.is_library,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration and its origin.

    Attributes
    ----------
    tier
        ``exact``: tuned for this problem on this GPU; ``family``: by a rule that was learned from other problems of its
        family on this GPU; ``model``: expected to be the fastest way to compute an operation, by a model of times on
        this GPU; ``library``: a library, as nothing is known of the kernels; ``nearest``: tuned for other sizes on this
        GPU; ``transferred``: tuned on another GPU; ``default``: not tuned, see
        `autotile.serving.untuned`.
    measurement, resources
        Time and compiled resources where it was tuned; None if unknown.
    source
        Source of the measurement: ``cuda``, ``replayed``, or empty for the default.
    tuned_on, tuned_at, tuned_sizes
        GPU, time (UTC) and problem of the measurement.
    differences
        Key fields in which the tuned problem differs from the requested one: name, tuned value, requested value.
    shipped
        Whether the result ships with autotile.
    aged
        Components that are newer here than where the result was measured, as text: the driver, NVRTC.
    packed
        Path of the bundle that it is served from and target of its cubin, as text; empty without a bundle.
    rule
        Description of the family's rule; empty if none chose.
    estimated
        Estimates for which a configuration is served in place of the default; None if none is.
    unread
        Reason why the user's database could not be read; empty if it was read or there is none.
    pinned
        File, or other origin, that pins the choice; empty if it is not pinned.
    contenders
        For an operation: the best ways to compute the problem, that which is served first.
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
    pinned: str = ""
    estimated: Estimated | None = None
    contenders: tuple[Contender, ...] = ()


def choose(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    nvrtc_version: str,
    stored: Iterable[Winner],
    *,
    rules: Iterable[StoredRule] = (),
    checks: Callable[[], Iterable[Check]] = tuple,
    estimates: bool = True,
) -> Choice:
    """Return the best stored configuration that may be served for a problem, else that of `untuned_config`.

    A result of another version of the kernel is never served, as it was not verified for this one. Neither is one that
    was tuned for distant sizes and that a search would not try at these. A configuration that breaks a rule or a limit
    at these sizes or on this device is skipped; so is one that, with the resources it was compiled to where it was
    tuned, could not run here or would violate the limits of the search-space file; and so is one that was found to be
    wrong for this problem.

    Parameters
    ----------
    kernel, problem, device, nvrtc_version
        The request.
    stored
        Winners of the kernel, the user's own newest first. Between equals, the user's own takes precedence over a
        shipped one; of the user's own the first, as dates depend on clocks, and of shipped ones the newest.
    rules
        Rules of the kernel's families, newest first.
    checks
        Function that reads the verdicts on configurations that are not ranked, oldest first; called only if there is no
        exact result, as a wrong one is not among the winners.
    estimates
        Whether a configuration may take the place of the default that is estimated to be far faster.
    """
    found = choose_stored(kernel, problem, device, nvrtc_version, stored, rules=rules, checks=checks)
    if found is not None:
        return found
    requested = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode="cold")
    wrong = wrong_configs(checks(), requested)

    def is_wrong(config: Config) -> bool:
        return config_key(config) in wrong

    config, estimated = untuned_config(kernel, problem, device, is_wrong=is_wrong, estimates=estimates)
    return Choice("default", config, estimated=estimated)


def choose_stored(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    nvrtc_version: str,
    stored: Iterable[Winner],
    *,
    rules: Iterable[StoredRule] = (),
    checks: Callable[[], Iterable[Check]] = tuple,
) -> Choice | None:
    """Return the best stored configuration that may be served, as `choose` does; None if there is none."""
    requested = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode="cold")

    def may_serve(winner: Winner) -> bool:
        return not check_config(kernel.spec, winner.config, problem.sizes, device, problem.dtype) and not (
            _resource_violation(kernel, winner, problem, device)
        )

    current = [
        winner
        for winner in stored
        if winner.key.dtype == requested.dtype
        and (winner.key.template_hash, winner.key.space_hash) == (requested.template_hash, requested.space_hash)
        and winner.key.options == requested.options
    ]
    ranked = sorted(current, key=lambda winner: _rank(winner, requested))
    exact = [winner for winner in ranked if _tier(winner.key, requested) == "exact"]
    best = next(filter(may_serve, exact), None)
    if best is not None:
        return _choice(best, requested, device)
    wrong = wrong_configs(checks(), requested)

    def is_not_wrong(winner: Winner) -> bool:
        return config_key(winner.config) not in wrong and may_serve(winner)

    if known_rules := list(rules):
        by_rule = choose_by_rule(kernel, problem, device, requested, rules=known_rules, may_serve=is_not_wrong)
        if by_rule is not None:
            chosen, description = by_rule
            return replace(_choice(chosen, requested, device), tier="family", rule=description)

    def is_promising(winner: Winner) -> bool:
        flags, doublings = size_distance(winner.key.sizes, requested.sizes)
        is_near = not flags and doublings <= _NEAR_DOUBLINGS
        return (is_near or meets_heuristics(kernel.spec, winner.config, problem.sizes, device)) and is_not_wrong(winner)

    best = next(filter(is_promising, ranked[len(exact) :]), None)  # lazily: usually the first is taken
    return None if best is None else _choice(best, requested, device)


def wrong_configs(checks: Iterable[Check], requested: TuningKey) -> set[str]:
    """Return the `config_key` of each configuration whose newest verdict for a problem is that it is wrong.

    A verdict holds for every compiler, and for both L2 modes.
    """
    newest = {
        check.config: check.passed
        for check in checks
        if replace(check.key, nvrtc_version=requested.nvrtc_version, l2_mode=requested.l2_mode) == requested
    }
    return {config for config, passed in newest.items() if not passed}


def choose_by_rule(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    requested: TuningKey,
    *,
    rules: Iterable[StoredRule],
    may_serve: Callable[[Winner], bool],
) -> tuple[Winner, str] | None:
    """Return the choice of the rule of a family that contains the problem; None if there is no such family.

    A rule of another version of the kernel, or learned on another GPU, is skipped.

    Parameters
    ----------
    kernel, problem, device, requested
        The request and its key.
    rules
        Rules of the kernel, newest first.
    may_serve
        Predicate: whether a configuration satisfies all rules and limits. If the best one does not, the next is taken.

    Returns
    -------
    tuple of Winner and str, or None
        The configuration, as a result at the nearest point where it was timed, and a description of the rule.
    """
    for stored in rules:
        if not _is_applicable(stored.key, requested) or problem.sizes not in stored.rule.family:
            continue
        for number in stored.rule.order(kernel.spec, device, problem.sizes):
            winner = _winner_of_rule(stored, number, problem)
            if may_serve(winner):
                return winner, _description(stored.rule)
    return None


def _is_applicable(key: TuningKey, requested: TuningKey) -> bool:
    return replace(key, **{name: getattr(requested, name) for name in _FREE_FIELDS}) == requested


def _winner_of_rule(stored: StoredRule, number: int, problem: Problem) -> Winner:
    chosen, point = stored.rule.configs[number], stored.rule.nearest_point(number, problem.sizes)
    timed = point.times_us[number] if point is not None else None
    return Winner(
        key=replace(stored.key, sizes=point.sizes if point is not None else stored.rule.family.largest),
        device=stored.device,
        config=chosen.config,
        resources=chosen.resources,
        measurement=Measurement(*timed, l2=stored.key.l2_mode) if timed is not None else None,
        tuned_at=stored.learned_at,
        shipped=stored.shipped,
    )


def _description(rule: FamilyRule) -> str:
    learned = f"{rule.family}, learned from {len(rule.points)} of its problems"
    expected = rule.mean_held_out
    return learned if expected is None else f"{learned}, which lost {100 * expected:.1f} % on average when left out"


def _resource_violation(kernel: Kernel, winner: Winner, problem: Problem, device: DeviceProperties) -> str:
    if winner.resources is None or not kernel.spec.has_one_launch:  # of several steps those of one are stored
        return ""
    geometry = launch_geometry(kernel.spec, winner.config, problem.sizes, device)
    found = compiled_occupancy(geometry, winner.resources, device)
    return resource_violation(kernel.spec.limits, geometry, winner.resources, found, device)


def _rank(winner: Winner, requested: TuningKey) -> tuple[int, bool, int, float, int, bool, float]:
    """Return a sort key: tier, other architecture, flags, distance in size, other differences, shipped and its age."""
    tier = _TIERS.index(_tier(winner.key, requested))
    other = sum(1 for name, _, _ in key_differences(winner.key, requested) if name not in ("sizes", "gpu_name"))
    foreign = winner.key.compute_capability != requested.compute_capability
    flags, doublings = size_distance(winner.key.sizes, requested.sizes)
    age = -winner.tuned_at.timestamp() if winner.shipped else 0.0
    return tier, foreign, flags, doublings, other, winner.shipped, age


def _tier(key: TuningKey, requested: TuningKey) -> Tier:
    if _device_of(key) != _device_of(requested) or key.source != requested.source:
        return "transferred"
    return "exact" if key == requested else "nearest"


def _device_of(key: TuningKey) -> tuple[str, str, int, int]:
    return key.gpu_name, key.compute_capability, key.sm_count, key.smem_per_block_optin_bytes


def _aged(winner: Winner, requested: TuningKey, device: DeviceProperties) -> tuple[str, ...]:
    """Return what has changed on this GPU since the result was measured on it, as far as both are known."""
    if _device_of(winner.key) != _device_of(requested) or winner.device is None:
        return ()
    versions = (
        ("NVRTC", winner.key.nvrtc_version, requested.nvrtc_version),
        ("driver", winner.device.driver, device.driver),
    )
    return tuple(f"{what} {then}, now {now}" for what, then, now in versions if then and now and then != now)


def _choice(winner: Winner, requested: TuningKey, device: DeviceProperties) -> Choice:
    return Choice(
        tier=_tier(winner.key, requested),
        config=winner.config,
        measurement=winner.measurement,
        resources=winner.resources,
        source=winner.key.source,
        tuned_on=winner.key.gpu_name,
        tuned_at=winner.tuned_at,
        tuned_sizes=winner.key.sizes,
        differences=key_differences(winner.key, requested),
        shipped=winner.shipped,
        aged=_aged(winner, requested, device),
    )
