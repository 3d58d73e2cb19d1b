"""Tune a family of problems: a few of them, then a rule for all the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.display import Displayed
from autotile.core.model import Config, Problem, config_key, config_text
from autotile.core.text import NOTHING, device_text, percent_text, plural, sizes_text, time_text
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.families import Families, FamilyProgress
from autotile.database.keys import TuningKey, key_of
from autotile.errors import InputError
from autotile.families.family import Family, members_of
from autotile.families.features import Traits, features_of, meet_rules
from autotile.families.learning import Learned, Measured, learn
from autotile.families.rule import FamilyRule, RulePoint
from autotile.kernel.library import Kernel
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.tuning.family_study import FamilyMatrix, family_points, proposals, read_matrix, union
from autotile.tuning.options import BRUTE_FORCE, TuneOptions, check_whole
from autotile.tuning.result import Progress, TuneResult
from autotile.tuning.session import tune
from autotile.workers.child import Shelf

if TYPE_CHECKING:
    from autotile.database.database import Database


FamilyPhase = Literal["tuning", "measuring"]


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """How a family is tuned, beside how each of its points is.

    Attributes
    ----------
    points
        Problems of the family to tune.
    max_configs
        Configurations that the rule chooses between, at most.
    """

    points: int = 24
    max_configs: int = 8

    def __post_init__(self) -> None:
        """Refuse what is no whole number of at least 1.

        Raises
        ------
        InputError
            One of the two is not.
        """
        check_whole("points", self.points, 1)
        check_whole("max_configs", self.max_configs, 1)


@dataclass(frozen=True, slots=True)
class FamilyStep:
    """Where a family's tuning stands.

    Attributes
    ----------
    phase
        ``tuning`` each point, or ``measuring`` there the best that all points have found.
    number, count
        Of the point, from 1.
    progress
        Of its session.
    """

    phase: FamilyPhase
    number: int
    count: int
    problem: Problem
    progress: Progress


@dataclass(frozen=True, slots=True, repr=False)
class FamilyResult(Displayed):
    """A family that was tuned.

    Attributes
    ----------
    rule
        What is served from now on; None where the user interrupted: the same command goes on.
    candidates
        Configurations that were measured at every point.
    default_loss
        Mean loss of the default configuration over the points where it runs; None where it runs at none.
    resumed
        Points that an earlier, killed run had tuned.
    """

    kernel: str
    dtype: str
    family: str
    device: DeviceProperties
    rule: FamilyRule | None
    candidates: int
    default_loss: float | None
    seconds: float
    resumed: int
    database: str
    notices: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it before there was a rule."""
        return self.rule is None

    def _headline(self) -> str:
        rule = self.rule
        found = "interrupted before there was a rule"
        if rule is not None:
            found = f"{plural(len(rule.configs), 'configuration')}, {percent_text(rule.mean_loss)} mean loss"
        return f"{self.kernel} {self.family} {self.dtype} on {device_text(self.device)}: {found}"

    def _facts(self) -> Iterable[tuple[str, str]]:
        rule = self.rule
        if rule is not None:
            yield from ((f"#{number}", config_text(one.config)) for number, one in enumerate(rule.configs))
            worst = f"{percent_text(rule.worst.loss)} at {sizes_text(rule.worst.sizes)}"
            yield "loss at the points", f"{percent_text(rule.mean_loss)} on average, at most {worst}"
        yield "database", self.database

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        points = self.rule.points if self.rule is not None else ()
        held_out = (NOTHING if point.held_out is None else percent_text(point.held_out) for point in points)
        return ("point", "best", "loss", "loss when left out"), [
            (sizes_text(point.sizes), time_text(point.best_us), percent_text(point.loss), left_out)
            for point, left_out in zip(points, held_out, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """The document that ``autotile tune-family --json`` prints."""
        rule = self.rule
        held_out = rule.held_out_losses if rule is not None else []
        return {
            "kernel": self.kernel,
            "family": self.family,
            "dtype": self.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
            "loss": {"mean": rule.mean_loss, "worst": rule.worst.loss, "worst_at": dict(rule.worst.sizes)}
            if rule is not None
            else None,
            "held_out_loss": {"mean": sum(held_out) / len(held_out), "worst": max(held_out)} if held_out else None,
            "default_loss": self.default_loss,
            "candidates": self.candidates,
            "rule": rule.to_json() if rule is not None else None,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
        }


Observer = Callable[[FamilyStep], None]

_TUNING_SHARE = 0.8
"""Of a budget; the rest is for measuring the best of all points at each of them."""
_OVERHEAD_S = 6.0
"""What a session takes beside its search (start, reference, finals, proof), before one has shown it."""
_LEAST_SEARCH_S = 1.0


def tune_family(
    kernel: Kernel,
    family: Family,
    dtype: str,
    settings: Settings,
    options: TuneOptions,
    *,
    plan: FamilyPlan | None = None,
    observe: Observer = lambda _: None,
) -> FamilyResult:
    """Tune representatives of a family, measure their best everywhere, learn a rule, and keep it.

    Each point is a study like any other: it is served exactly, and what it taught is there for the next ones. A run
    that was killed or interrupted goes on.

    Parameters
    ----------
    kernel, family, dtype
        What to tune.
    settings, options
        As for `autotile.tuning.session.tune`, for each point; but ``budget_s`` is for all of them together.
    plan
        How many points and configurations.
    observe
        Called as the sessions go on.

    Raises
    ------
    InputError
        The family cannot be covered, nothing runs at any point, or as for `autotile.tuning.session.tune`.
    ToolchainError
        As for `autotile.tuning.session.tune`.
    """
    from autotile.database.database import Database

    plan = plan or FamilyPlan()
    device, points = family_points(kernel, family, dtype, settings, options, count=plan.points)
    with Database.open(options.database or settings.database) as database, Shelf() as shelf:
        return _Run(kernel, family, dtype, settings, options, plan, observe, device, points, database, shelf).run()


@dataclass
class _Run:
    """One family's run."""

    kernel: Kernel
    family: Family
    dtype: str
    settings: Settings
    options: TuneOptions
    plan: FamilyPlan
    observe: Observer
    device: DeviceProperties
    points: Sequence[Mapping[str, int]]
    database: Database
    shelf: Shelf
    _notices: dict[str, None] = field(default_factory=dict)
    _overhead_s: float = _OVERHEAD_S

    def run(self) -> FamilyResult:
        """Go on from where the last run of the same plan stopped."""
        self._begun = time.monotonic()
        kept = Families(self.database).progress(self.key, self.family)
        self._progress = kept if kept is not None and kept.plan == self._intent else FamilyProgress(self._intent)
        self._before_s, resumed = self._progress.seconds, self._progress.tuned
        self._save()
        keys = [self._key_at(sizes) for sizes in self.points]
        if not self._tune_points():
            return self._result(None, None, resumed)
        proposed = proposals(self.database, keys)
        candidates = union(proposed, self.kernel.spec.default)
        if not self._measure(candidates):
            return self._result(None, None, resumed)
        matrix = read_matrix(self.database, keys, proposed, candidates)
        if not matrix.points:
            raise InputError(f"no configuration of {self.kernel.name} ran at any point of {self.family}")
        rule = self._learn(matrix)
        Families(self.database).save_rule(self.key, self.device, rule)
        return self._result(rule, matrix, resumed)

    @property
    def key(self) -> TuningKey:
        """What the rule belongs to."""
        return self._key_at({})

    def _key_at(self, sizes: Mapping[str, int]) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self.options.l2
        return key_of(self.kernel, self._problem(sizes), self.device, nvrtc_version=nvrtc, l2_mode=l2)

    @property
    def _intent(self) -> dict[str, object]:
        options = self.options
        effort = {"trials": options.trials, "budget_s": options.budget_s, "until": options.until}
        return {"points": [dict(sizes) for sizes in self.points], **effort, "max_configs": self.plan.max_configs}

    @property
    def _elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._begun

    def _problem(self, sizes: Mapping[str, int]) -> Problem:
        return Problem(self.kernel.name, sizes, self.dtype)

    def _tune_points(self) -> bool:
        """Tune what is left to tune; False where the user interrupted."""
        count = len(self.points)
        for number in range(self._progress.tuned, count):
            share_s = self._share_s(_TUNING_SHARE, count - number)
            search_s = None if share_s is None else max(share_s - self._overhead_s, _LEAST_SEARCH_S)
            started = time.monotonic()
            result = self._session("tuning", number, replace(self.options, budget_s=search_s))
            searched_s = sum(result.phases.get(phase, 0.0) for phase in ("start", "search"))
            self._overhead_s = time.monotonic() - started - searched_s
            if result.interrupted:
                return False
            self._progress = replace(self._progress, tuned=number + 1)
            self._save()
        return True

    def _measure(self, candidates: Sequence[Config]) -> bool:
        """Measure all candidates at every point; False where the user interrupted."""
        count = len(self.points)
        for number in range(self._progress.measured, count):
            if not self._is_unmeasured(candidates, self.points[number]):
                continue
            options = replace(
                self.options,
                sampler=BRUTE_FORCE,
                trials=None,
                until=None,
                budget_s=self._share_s(1.0, count - number),
                only=tuple(candidates),
                finals=0,
                transfer=False,
                fresh=False,
            )
            if self._session("measuring", number, options).interrupted:
                return False
            self._progress = replace(self._progress, measured=number + 1)
            self._save()
        return True

    def _is_unmeasured(self, candidates: Sequence[Config], sizes: Mapping[str, int]) -> bool:
        """Whether any candidate that is valid at a point was not tried there."""
        study_id = self.database.find_study(self._key_at(sizes))
        tried = self.database.tried(study_id) if study_id is not None else {}
        left = [config for config in candidates if config_key(config) not in tried]
        return any(not check_config(self.kernel.spec, config, sizes, self.device, self.dtype) for config in left)

    def _share_s(self, share: float, left: int) -> float | None:
        """A point's part of what is left of the budget's share; None without a budget."""
        if self.options.budget_s is None:
            return None
        return max((share * self.options.budget_s - self._elapsed_s) / left, _LEAST_SEARCH_S)

    def _session(self, phase: FamilyPhase, number: int, options: TuneOptions) -> TuneResult:
        problem, count = self._problem(self.points[number]), len(self.points)
        result = tune(
            self.kernel,
            problem,
            self.settings,
            options,
            lambda progress: self.observe(FamilyStep(phase, number + 1, count, problem, progress)),
            shelf=self.shelf,
        )
        self._notices.update(dict.fromkeys(result.notices))
        return result

    def _save(self) -> None:
        self._progress = replace(self._progress, seconds=self._elapsed_s)
        Families(self.database).save_progress(self.key, self.family, self.device, self._progress)

    def _learn(self, matrix: FamilyMatrix) -> FamilyRule:
        spec, most = self.kernel.spec, self.plan.max_configs
        configs, resident = [one.config for one in matrix.configs], [one.blocks_per_sm for one in matrix.configs]

        def traits(problems: Sequence[Mapping[str, int]]) -> Traits:
            return Traits.of(spec, self.device, configs, resident, problems)

        members = members_of(self.family)
        valid = meet_rules(spec, self.device, configs, members)
        measured = Measured(matrix.times_us, matrix.proposed_by, traits(matrix.points), traits(members), valid)
        learned = learn(measured, features_of(spec, most), most)
        chosen = tuple(matrix.configs[column] for column in learned.chosen)
        return FamilyRule(self.family, chosen, learned.tree, _rule_points(matrix, learned))

    def _result(self, rule: FamilyRule | None, matrix: FamilyMatrix | None, resumed: int) -> FamilyResult:
        return FamilyResult(
            kernel=self.kernel.name,
            dtype=self.dtype,
            family=str(self.family),
            device=self.device,
            rule=rule,
            candidates=len(matrix.configs) if matrix is not None else 0,
            default_loss=_loss_of(matrix, self.kernel.spec.default) if matrix is not None else None,
            seconds=self._elapsed_s,
            resumed=resumed,
            database=self.database.location,
            notices=tuple(self._notices),
        )


def _rule_points(matrix: FamilyMatrix, learned: Learned) -> tuple[RulePoint, ...]:
    chosen = list(learned.chosen)
    return tuple(
        RulePoint(
            sizes=dict(sizes),
            times_us=tuple(_measured(triple) for triple in matrix.measurements[row, chosen]),
            best_us=float(np.nanmin(matrix.times_us[row])),
            loss=float(learned.losses[row]),
            held_out=float(learned.held_out[row]) if np.isfinite(learned.held_out[row]) else None,
        )
        for row, sizes in enumerate(matrix.points)
    )


def _measured(triple: Sequence[float]) -> tuple[float, float, float] | None:
    time_us, low_us, high_us = (float(value) for value in triple)
    return (time_us, low_us, high_us) if np.isfinite(time_us) else None


def _loss_of(matrix: FamilyMatrix, config: Config) -> float | None:
    """Mean loss of one configuration where it runs."""
    column = next((c for c, one in enumerate(matrix.configs) if config_key(one.config) == config_key(config)), None)
    if column is None:
        return None
    times_us = matrix.times_us
    return float(np.nanmean(times_us[:, column] / np.nanmin(times_us, axis=1) - 1.0))
