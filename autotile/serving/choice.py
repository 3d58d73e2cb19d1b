"""Choose the configuration to serve: exact, by a family's rule, nearest, transferred or default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Literal

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Measurement, Problem, Resources, config_key
from autotile.cuda.function import PackedCubin
from autotile.database.keys import TuningKey, key_differences, key_of
from autotile.database.winners import StoredRule, Winner
from autotile.errors import BundleError, SpecError
from autotile.exchange.bundle import FALLBACK, Bundle, BundledCubin, BundledKernel
from autotile.families.rule import FamilyRule
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_device, runs_on, size_distance
from autotile.space.limits import check_config, compiled_occupancy, is_worth_a_trial, resource_fault

_ANY = ("sizes", "nvrtc_version", "l2_mode")
"""Fields of the key in which a rule may differ from what is asked: its sizes are the family's, the others are told."""


def choose_by_rule(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    asked: TuningKey,
    *,
    rules: Iterable[StoredRule],
    may_serve: Callable[[Winner], bool],
) -> tuple[Winner, str] | None:
    """What the rule of a family that holds the problem serves; None where there is no such family.

    A rule of another version of the kernel, or learned on another GPU, is passed over.

    Parameters
    ----------
    kernel, problem, device, asked
        What is asked for, and its key.
    rules
        Rules of the kernel, the newest first.
    may_serve
        Whether a configuration keeps all rules and limits; where the best does not, the next best is taken.

    Returns
    -------
    tuple of Winner and str, or None
        The configuration, as a result at the nearest point where it was timed, and what is said of the rule.
    """
    for stored in rules:
        if _is_of_another(stored.key, asked) or problem.sizes not in stored.rule.family:
            continue
        for number in stored.rule.order(kernel.spec, device, problem.sizes):
            winner = _winner(stored, number, problem)
            if may_serve(winner):
                return winner, _said(stored.rule)
    return None


def _is_of_another(key: TuningKey, asked: TuningKey) -> bool:
    changes = {name: getattr(asked, name) for name in _ANY}
    return replace(key, **changes) != asked


def _winner(stored: StoredRule, number: int, problem: Problem) -> Winner:
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


def _said(rule: FamilyRule) -> str:
    learned = f"{rule.family}, learned from {len(rule.points)} of its problems"
    expected = rule.mean_held_out
    return learned if expected is None else f"{learned}, which lost {100 * expected:.1f} % on average when left out"


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
    from autotile.space.space import feasible_space

    try:
        return feasible_space(spec, sizes, device, problem.dtype).config(0)
    except SpecError:
        if is_valid:  # of a space too large to enumerate
            return dict(spec.default)
        raise


def choose_packed(
    bundle: Bundle, held: BundledKernel, problem: Problem, device: DeviceProperties
) -> tuple[Choice, PackedCubin]:
    """The best configuration that a bundle holds compiled for a device, ranked as `autotile.serving.choice` does.

    Raises
    ------
    BundleError
        It holds none: for another architecture, dtype or flags, or none that is valid for these sizes.
    DeviceError
        The kernel is not for the device.
    """
    check_device(held.kernel.spec, device)
    cubins = _loadable(bundle, held, problem, device)
    stored = [
        replace(winner, resources=cubins[key].resources)
        for winner in held.winners
        if (key := config_key(winner.config)) in cubins
    ]
    rules = [rule for rule in held.rules if all(config_key(one.config) in cubins for one in rule.rule.configs)]
    choice = choose(held.kernel, problem, device, held.nvrtc_version, stored, rules=rules)
    cubin = cubins.get(config_key(choice.config))
    if cubin is None:
        raise BundleError(
            f"{bundle.path} holds no configuration of {held.kernel.name} that is valid for {problem} on {device.name}; "
            f"tune that problem and make the bundle again. {FALLBACK}"
        )
    bundle.read(cubin.member)  # damage is told here, where a program can still do without the bundle
    packed = PackedCubin(cubin.resources, partial(bundle.read, cubin.member))
    return replace(choice, packed=f"{bundle.path}, compiled for {cubin.target} with NVRTC {held.nvrtc_version}"), packed


def _loadable(
    bundle: Bundle, held: BundledKernel, problem: Problem, device: DeviceProperties
) -> Mapping[str, BundledCubin]:
    """What runs on the device, by configuration; of several, the one for the nearest architecture."""
    running = [cubin for cubin in held.cubins if runs_on(cubin.target, device.compute_capability)]
    if not running:
        targets = ", ".join(sorted({cubin.target for cubin in held.cubins}))
        raise BundleError(
            f"{bundle.path} holds {held.kernel.name} for {targets}, which does not run on {device.name} "
            f"({device.architecture}); make the bundle with --arch {device.architecture}. {FALLBACK}"
        )
    flags = {name: problem.sizes[name] for name in held.kernel.spec.flags}
    fitting = [cubin for cubin in running if cubin.dtype == problem.dtype and dict(cubin.flags) == flags]
    if not fitting:
        raise BundleError(
            f"{bundle.path} holds {held.kernel.name} compiled for {_variants(running)}, and {problem} is asked for; "
            f"tune such a problem and make the bundle again. {FALLBACK}"
        )
    return {config_key(cubin.config): cubin for cubin in sorted(fitting, key=lambda cubin: _target_rank(cubin.target))}


def _target_rank(target: str) -> tuple[int, bool]:
    return int(target.strip("sm_a")), target.endswith("a")


def _variants(cubins: Sequence[BundledCubin]) -> str:
    found = {" ".join([cubin.dtype, *(f"{name}={value}" for name, value in cubin.flags.items())]) for cubin in cubins}
    return ", ".join(sorted(found))
