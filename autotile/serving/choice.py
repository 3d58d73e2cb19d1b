"""Choose the configuration of a kernel: exact, by a family's rule, nearest, transferred or default.

Results of other problems only displace what an empty database would serve if they are expected to be faster by more
than the doubt of that expectation (`autotile.families.preference`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import groupby, islice
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
    from autotile.families.preference import Expectation, Tuned
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
class Compared:
    """Comparison of a result of another problem, or GPU, with what an empty database would serve.

    Attributes
    ----------
    config, base
        Configurations of the result, and of what an empty database would serve.
    base_tier
        How the base was chosen: ``default``, or the tier of a result that ships with autotile.
    ratio, interval
        Expected time of the result over that of the base, and its interval; the upper end is infinite where nothing is
        known.
    tuned_sizes, tuned_on
        Problem and GPU that the result was measured at.
    serves
        Whether the result is served.
    is_nearest
        Whether it is the winner of the nearest tuned problem.
    """

    config: Config
    base: Config
    base_tier: Tier
    ratio: float
    interval: tuple[float, float]
    tuned_sizes: Mapping[str, int]
    tuned_on: str
    serves: bool
    is_nearest: bool = False

    @property
    def text(self) -> str:
        """The expectation as a clause."""
        low, high = self.interval
        if not math.isfinite(high):
            return "its time here cannot be estimated"
        base = f"what an empty database serves ({self.base_tier})"
        return f"it is expected to take {self.ratio:.2f} times as long here as {base}, {low:.2f} to {high:.2f} times"

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object; an interval without an upper end as null."""
        return {
            "config": dict(self.config),
            "base": dict(self.base),
            "base_tier": self.base_tier,
            "ratio": self.ratio,
            "interval": list(self.interval) if math.isfinite(self.interval[1]) else None,
            "tuned_sizes": dict(self.tuned_sizes),
            "tuned_on": self.tuned_on,
            "serves": self.serves,
            "is_nearest": self.is_nearest,
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
    compared
        Comparison by which it is served in place of what an empty database would serve, or the other way round; None if
        there was nothing to compare.
    unapplied
        Description of the newest rule of a family with the problem that is not in force, and the reason; empty if there
        is none, or another rule chose.
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
    compared: Compared | None = None
    unapplied: str = ""


Finalists = Callable[[Winner, Sequence[Config]], Mapping[str, Winner]]
"""Function that reads the finalists of a winner's study, and the results of some other configurations in it, by
`config_key`."""


def choose(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    nvrtc_version: str,
    stored: Iterable[Winner],
    *,
    rules: Iterable[StoredRule] = (),
    checks: Callable[[], Iterable[Check]] = tuple,
    finalists: Finalists = lambda _, __: {},
    estimates: bool = True,
    compares: bool = True,
    bundled: bool = False,
) -> Choice:
    """Return the best configuration that may be served for a problem.

    An exact result is served as it is. Otherwise, the configuration that an empty database would serve is compared with
    that of a family's rule, and with results of other sizes and GPUs, in this order of their tiers. A rule that is in
    force is served unless it is expected to be slower, by more than the doubt; a result of other sizes or of another
    GPU only if it is expected to be faster, by more than the doubt.

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
    finalists
        Function that reads the finalists of the study of one of the user's own winners, and the results of some other
        configurations in it.
    estimates
        Whether a configuration may take the place of the default that is estimated to be far faster.
    compares
        Whether results of other problems are compared; otherwise the nearest is served.
    bundled
        Whether the results come from a bundle, which has no times of the default.
    """
    selection = _Selection((kernel, problem, device, nvrtc_version), stored, checks)
    found = selection.exact()
    if found is not None:
        return found
    known = list(rules)
    if not compares:
        return selection.by_rule(known)[0] or selection.nearest() or selection.untuned(estimates=estimates)
    base, _ = selection.by_rule(rule for rule in known if rule.shipped)
    if base is None:  # else the space may have to be enumerated
        base = selection.displaced(selection.untuned(estimates=estimates), _none, shipped=True, trusted=True)
    by_rule, unapplied = selection.by_rule((rule for rule in known if not rule.shipped), base)
    if by_rule is not None:
        return by_rule
    return selection.displaced(replace(base, unapplied=unapplied), finalists, shipped=False, trusted=bundled)


def choose_stored(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    nvrtc_version: str,
    stored: Iterable[Winner],
    *,
    checks: Callable[[], Iterable[Check]] = tuple,
) -> Choice | None:
    """Return the nearest stored configuration that may be served, without a comparison; None if there is none."""
    selection = _Selection((kernel, problem, device, nvrtc_version), stored, checks)
    return selection.exact() or selection.nearest()


class _Selection:
    """The stored results of a kernel, as they may be served for a problem.

    Parameters
    ----------
    request
        Kernel, problem, device and version of NVRTC.
    stored, checks
        As for `choose`.
    """

    def __init__(
        self,
        request: tuple[Kernel, Problem, DeviceProperties, str],
        stored: Iterable[Winner],
        checks: Callable[[], Iterable[Check]],
    ) -> None:
        self._kernel, self._problem, self._device, nvrtc_version = request
        self._checks = checks
        self._requested = key_of(self._kernel, self._problem, self._device, nvrtc_version=nvrtc_version, l2_mode="cold")
        current = [
            winner
            for winner in stored
            if winner.key.dtype == self._requested.dtype
            and winner.key.template_hash == self._requested.template_hash
            and winner.key.space_hash == self._requested.space_hash
            and winner.key.options == self._requested.options
        ]
        ranked = sorted(current, key=lambda winner: _rank(winner, self._requested))
        self._exact = [winner for winner in ranked if _tier(winner.key, self._requested) == "exact"]
        self._others = ranked[len(self._exact) :]

    def exact(self) -> Choice | None:
        """Return the result of exactly this problem; None if there is none that may be served."""
        best = next(filter(self._is_possible, self._exact), None)
        return None if best is None else self._chosen(best)

    def nearest(self) -> Choice | None:
        """Return the nearest result, of this GPU before others; None if there is none that may be served."""
        best = next(filter(self._is_promising, self._others), None)  # lazily: usually the first is taken
        return None if best is None else self._chosen(best)

    def untuned(self, *, estimates: bool) -> Choice:
        """Return what is served where nothing is tuned."""
        config, estimated = untuned_config(
            self._kernel,
            self._problem,
            self._device,
            is_wrong=lambda config: config_key(config) in self._wrong,
            estimates=estimates,
        )
        return Choice("default", config, estimated=estimated)

    def by_rule(self, rules: Iterable[StoredRule], base: Choice | None = None) -> tuple[Choice | None, str]:
        """Return the choice of the first rule in force of a family that contains the problem.

        Parameters
        ----------
        rules
            Rules, those that take precedence first.
        base
            Choice without the rule. A rule whose choice is expected to be slower by more than the doubt is passed over.

        Returns
        -------
        tuple of Choice and str
            The choice, None if no rule is served; and if so, why the first of the rules for the problem is not.
        """
        reason = ""
        for stored in rules:
            if not _is_applicable(stored.key, self._requested) or self._problem.sizes not in stored.rule.family:
                continue
            if not stored.rule.in_force:
                reason = reason or _unapplied(stored.rule)
                continue
            found = self._choice_of_rule(stored)
            if found is None:
                continue
            winner, tuned = found
            chosen = replace(self._chosen(winner), tier="family", rule=_description(stored.rule))
            compared = (
                self._compared(base, [(tuned, dict.fromkeys(tuned.configs, winner))]) if base is not None else None
            )
            if compared is None:
                return chosen, ""
            verdict, expected = compared[1:]
            if not expected.is_slower:
                return replace(chosen, compared=replace(verdict, serves=True)), ""
            reason = reason or f"The rule of the family {stored.rule.family} is not followed here: {verdict.text}."
        return None, reason

    def displaced(self, base: Choice, finalists: Finalists, *, shipped: bool, trusted: bool = False) -> Choice:
        """Return the result that displaces a choice, of the first tier with one that is surely faster; else the choice.

        Parameters
        ----------
        base, finalists
            Choice without these results, and as for `choose`.
        shipped
            Whether the results that ship are compared, or the others.
        trusted
            Whether a result that may be faster displaces it, too: of near sizes if it is not surely slower, of distant
            ones if that is more likely than not. The default's time, which would make it sure, comes with none of them.
        """
        from autotile.families.preference import MAX_STUDIES, WITH_FINALISTS  # loads what an exact result does without

        among = [winner for winner in self._others if winner.shipped == shipped]
        for _, tier in groupby(among, key=lambda winner: _rank(winner, self._requested)[:2]):
            near = list(islice(filter(self._is_promising, tier), MAX_STUDIES))
            if near and self._is_of_problem(near[0]):  # with another compiler or L2 mode, or by replay
                return replace(self._chosen(near[0]), unapplied=base.unapplied)
            studies = [
                self._study(each, base.config, finalists if place < WITH_FINALISTS else _none)
                for place, each in enumerate(near)
            ]
            compared = self._compared(base, studies)
            if compared is not None:
                winner, verdict, expected = compared
                is_likely = not expected.is_slower if self._is_near(winner) else expected.log_ratio < 0
                if verdict.serves or (trusted and is_likely):
                    served_for = replace(verdict, serves=True, is_nearest=winner is near[0])
                    return replace(self._chosen(winner), compared=served_for, unapplied=base.unapplied)
                base = replace(base, compared=base.compared or verdict)
            same = next((each for each in near if each.config == base.config), None)
            if base.tier == "default" and same is not None:  # tuning found nothing faster there
                return replace(self._chosen(same), unapplied=base.unapplied)
        return base

    @cached_property
    def _wrong(self) -> set[str]:
        """The `config_key` of each configuration that was found to be wrong for the problem."""
        return wrong_configs(self._checks(), self._requested)

    def _is_possible(self, winner: Winner) -> bool:
        """Return whether a configuration satisfies the rules and limits for the problem."""
        spec, sizes = self._kernel.spec, self._problem.sizes
        return not check_config(spec, winner.config, sizes, self._device, self._problem.dtype) and not (
            _resource_violation(self._kernel, winner, self._problem, self._device)
        )

    def _may_serve(self, winner: Winner) -> bool:
        return config_key(winner.config) not in self._wrong and self._is_possible(winner)

    def _is_promising(self, winner: Winner) -> bool:
        """Return whether a configuration may be served, and is near, or a search would try it."""
        spec, sizes = self._kernel.spec, self._problem.sizes
        return (
            self._is_near(winner) or meets_heuristics(spec, winner.config, sizes, self._device)
        ) and self._may_serve(winner)

    def _is_of_problem(self, winner: Winner) -> bool:
        """Return whether a result was measured for the same problem on the same GPU model."""
        return winner.key.sizes == self._requested.sizes and _device_of(winner.key) == _device_of(self._requested)

    def _is_near(self, winner: Winner) -> bool:
        flags, doublings = size_distance(winner.key.sizes, self._problem.sizes)
        return not flags and doublings <= _NEAR_DOUBLINGS

    def _choice_of_rule(self, stored: StoredRule) -> tuple[Winner, Tuned] | None:
        """Return the first choice of a rule that may be served, and the nearest point at which it is the fastest."""
        from autotile.families.preference import Tuned

        for number in stored.rule.order(self._kernel.spec, self._device, self._problem.sizes):
            winner = _winner_of_rule(stored, number, self._problem)
            if self._may_serve(winner):
                point = stored.rule.nearest_win(number, self._problem.sizes)
                sizes = point.sizes if point is not None else winner.key.sizes
                times_us = point.times_by_config(stored.rule.configs) if point is not None else {}
                return winner, Tuned(sizes, stored.device, {config_key(winner.config): winner.config}, times_us)
        return None

    def _study(self, winner: Winner, base: Config, finalists: Finalists) -> tuple[Tuned, Mapping[str, Winner]]:
        """Return a winner and the finalists of its study, and their times and those of the default and of a base."""
        from autotile.families.preference import FINALISTS, Tuned

        default = dict(self._kernel.spec.default)
        found = finalists(winner, [default] if base == default else [default, base])
        key = config_key(winner.config)
        known = {**found, key: winner}
        times_us = {name: each.measurement.time_us for name, each in known.items() if each.measurement is not None}
        others = sorted((name for name in found if name != key), key=lambda name: times_us.get(name, math.inf))
        served = {name: known[name] for name in [key, *others[: FINALISTS - 1]]}
        return Tuned(
            winner.key.sizes, winner.device, {name: each.config for name, each in served.items()}, times_us
        ), served

    def _compared(
        self, base: Choice, studies: Sequence[tuple[Tuned, Mapping[str, Winner]]]
    ) -> tuple[Winner, Compared, Expectation] | None:
        """Return the most promising result and its comparison with a choice; None if all are that choice."""
        from autotile.families.preference import prefer

        spec, sizes, dtype = self._kernel.spec, self._problem.sizes, self._problem.dtype
        found = prefer(
            spec,
            sizes,
            self._device,
            base.config,
            [tuned for tuned, _ in studies],
            dtype=dtype,
            may_serve=lambda study, key: self._is_promising(studies[study][1][key]),
        )
        if found is None:
            return None
        winner, expected = studies[found.study][1][found.key], found.expectation
        verdict = Compared(
            winner.config,
            base.config,
            base.tier,
            expected.ratio,
            expected.interval,
            winner.key.sizes,
            winner.key.gpu_name,
            serves=expected.is_faster,
        )
        return winner, verdict, expected

    def _chosen(self, winner: Winner) -> Choice:
        return _choice(winner, self._requested, self._device)


def _none(_: Winner, __: Sequence[Config]) -> Mapping[str, Winner]:
    return {}


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


def _is_applicable(key: TuningKey, requested: TuningKey) -> bool:
    return replace(key, **{name: getattr(requested, name) for name in _FREE_FIELDS}) == requested


def _winner_of_rule(stored: StoredRule, number: int, problem: Problem) -> Winner:
    """Return a configuration of a rule as a result at the nearest point where it was timed."""
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


def _unapplied(rule: FamilyRule) -> str:
    """Return why a rule is not in force."""
    return f"A rule was learned for the family {rule.family}, but is not in force: {rule.verdict}."


def _description(rule: FamilyRule) -> str:
    learned = f"{rule.family}, learned from {len(rule.points)} of its problems"
    expected = rule.mean_held_out
    judged = f"; {rule.verdict}" if rule.verdict else ""
    lost = f", which lost {100 * expected:.1f} % on average when left out" if expected is not None else ""
    return f"{learned}{lost}{judged}"


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
