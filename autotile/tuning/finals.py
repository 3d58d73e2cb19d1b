"""The finals: an interleaved race of the best candidates and the default, and the checks of all that take part."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from autotile.core.model import (
    GPU_SCALE,
    OUTPUT_DIGEST,
    Config,
    L2Mode,
    Measurement,
    Outcome,
    Trial,
    Value,
    config_key,
    config_text,
)
from autotile.core.statistics import Interval, median_interval, raced_ratio, ratio_of
from autotile.core.text import plural
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.tuning.start import Scorer
from autotile.workers.gpu import Backend
from autotile.workers.jobs import (
    INPUTS_STAGE,
    MAX_ROUNDS,
    MIN_ROUNDS,
    RACE_S,
    REPEATS,
    SECOND_SEED,
    Candidate,
    Check,
    Entry,
    Race,
    Reading,
)

_HURRIED_FINALISTS = 4
"""Maximum number of finalists besides the default and the incumbent after an interrupt."""
_RACE_SHARE = 0.3
"""Share of that time which the race may take."""
_BESIDE_US = 100.0
"""Time of a timed launch besides the kernel: the host, and the flush of the L2 cache."""


@dataclass(frozen=True, slots=True)
class Finals:
    """Comparison of the finalists."""

    ranked: tuple[Trial, ...] = ()
    """Finalists with their times from the race, winner first; empty where none passed the checks."""
    default: Trial | None = None
    """Trial of the default configuration, where it runs."""
    speedup: Interval | None = None
    """Time, or cost, of the default over that of the winner; None where the default does not run."""
    ties: tuple[Config, ...] = ()
    """Configurations whose times cannot be distinguished from the winner's, and which were verified as often."""
    refused: tuple[Trial, ...] = ()
    """Finalists that failed the checks, with the reason."""
    notices: tuple[str, ...] = ()
    """Checks that could not be made, one line each."""
    confirmation: Confirmation | None = None
    """The winner on a second GPU, if there is one and it could be raced there."""

    @property
    def winner(self) -> Trial | None:
        """The configuration to serve."""
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True, slots=True)
class FinalRules:
    """How finals are held.

    The default and the incumbent take part regardless of their time; the incumbent wins if it ties.
    """

    default: Config
    incumbent: Config | None = None
    seed: int = 0
    """Seed of the order within the rounds."""
    hurried: bool = False
    """Whether the user has interrupted the session: four other finalists at most, the minimum number of rounds that
    gives an interval, fewer repeats, and no sanitizer."""
    limit_s: float = math.inf
    """Time of the race and of the checks; the winner is verified as often in any case."""
    precision: float = 0.0
    """That of the race, see `autotile.workers.jobs.Race`."""
    scorer: Scorer | None = None
    """Computes what the session minimises; None for the time."""
    observe: Callable[[float], None] = lambda _: None
    """Called after each verification with the expected time of those that are left, in seconds."""


def choose_finalists(
    trials: Sequence[Trial], rules: FinalRules, count: int, tries: Sequence[Config] = ()
) -> list[Trial]:
    """Return the best ``count`` trials in order of their cost, and those that take part regardless of it.

    These are the default, the incumbent and ``tries`` if they have a time. Of the others, only as many take part as can
    race for `MIN_ROUNDS` rounds in the time of the race, two at least.
    """
    count = min(count, _HURRIED_FINALISTS) if rules.hurried else count
    cost = attrgetter("cost")
    fastest = sorted((t for t in trials if t.outcome is Outcome.OK and t.time_us is not None), key=cost)
    seeded = {config_key(config) for config in (rules.default, rules.incumbent, *tries) if config is not None}
    others = [t for t in trials if t.outcome.has_time and t.config_key in seeded]
    chosen = fastest[: max(count, 1)]
    while True:
        finalists = {t.config_key: t for t in [*chosen, *others]}
        race_s = 1e-6 * MIN_ROUNDS * sum((trial.time_us or 0.0) + _BESIDE_US for trial in finalists.values())
        if len(chosen) <= 2 or race_s <= _RACE_SHARE * rules.limit_s:
            return sorted(finalists.values(), key=cost)
        chosen.pop()


@dataclass(eq=False, slots=True)
class Contestant:
    """A candidate that takes part in finals."""

    trial: Trial
    """With the time of the race, if it took part in one; else that of the search."""
    candidate: Candidate
    race: Reading | None = None
    """Its reading in the race; None if it took part in none."""


def run_finals(racing: Sequence[tuple[Trial, Candidate]], backend: Backend, rules: FinalRules) -> Finals:
    """Race the finalists, verify them, and name the winner: the best that is correct, or the incumbent if they tie.

    In replay no race is possible, and the recorded medians and their intervals are compared instead.

    Where a finalist fails, those that are most like it are verified next, as they may share the fault. Faulty finalists
    together may cost ten seconds; after that, the others are verified, those least like them first, up to the next
    failure. What was not verified is neither ranked nor refused.
    """
    finalists = [Contestant(*one) for one in racing]
    checks = FinalistChecks(backend, finalists, rules)
    checks.sanitize()
    left = list(finalists)
    start = time.perf_counter()
    is_raced = hold_race(backend, left, rules)
    race_s = time.perf_counter() - start
    if is_raced and not rules.hurried:
        checks.left_s -= race_s
    if not is_raced and len(left) > 1:  # in replay, or because a finalist broke the race
        checks.lost_s += race_s
        while (failed := checks.first_that_fails(left, left)) is not None:
            left.remove(failed)
        if len(left) < len(finalists):
            hold_race(backend, left, rules)
    for one in finalists:
        if one.race is not None and one.race.outcome is not Outcome.OK:
            checks.refuse(one, replace(one.race, stage="finals"))
    default_key = config_key(rules.default)
    incumbent_key = config_key(rules.incumbent) if rules.incumbent is not None else None
    while left:
        fastest, *others = sorted(left, key=attrgetter("trial.cost"))
        alike = [fastest, *(one for one in others if _cost_ratio(one, fastest, rules.scorer).low <= 1.0)]
        winner = next((one for one in alike if one.trial.config_key == incumbent_key), fastest)
        order = [winner, *(one for one in (fastest, *others) if one is not winner)]
        tied = [one for one in alike if one is not winner]
        failed = checks.first_that_fails(order, tied)
        if failed is None:
            ties = checks.verified_like(winner, tied)
            default = next((one for one in order if one.trial.config_key == default_key), None)
            ranked = []
            for one in order:  # with the digest of its outputs in all repeats of its verification
                digest = {name: text for name, text in checks.readings[one].telemetry.items() if name == OUTPUT_DIGEST}
                ranked.append(replace(one.trial, telemetry={**one.trial.telemetry, **digest}))
            return Finals(
                ranked=tuple(ranked),
                default=default.trial if default is not None else None,
                speedup=_cost_ratio(default, winner, rules.scorer) if default is not None else None,
                ties=tuple(one.trial.config for one in ties),
                refused=checks.refused,
                notices=tuple(checks.notices),
            )
        left.remove(failed)
    return Finals(refused=checks.refused, notices=tuple(checks.notices))


def hold_race(backend: Backend, racing: Sequence[Contestant], rules: FinalRules) -> bool:
    """Race finalists; return False where there is nothing to race, or no race is possible."""
    if len(racing) < 2:
        return False
    trials = [one.trial for one in racing]
    round_us = sum(trial.time_us or 0.0 for trial in trials)
    weights = [(trial.cost or 1.0) / (trial.time_us or 1.0) for trial in trials]
    entries = [Entry(one.candidate, weight=weight) for one, weight in zip(racing, weights, strict=True)]
    most = MIN_ROUNDS if rules.hurried else MAX_ROUNDS
    limit_s = min(RACE_S, _RACE_SHARE * rules.limit_s)
    job = Race.lasting(entries, round_us, rules.seed, limit_s=limit_s, most=most, precision=rules.precision)
    readings = backend.run(job)
    for one, reading in zip(racing, readings, strict=True) if readings else ():
        one.race = reading
        if reading.rounds_us:  # else it failed before the first round, and has the times of the search
            timed = with_times(one.trial, reading.rounds_us)
            one.trial = timed if rules.scorer is None else rules.scorer.scored(timed)
    return bool(readings)


_HURRIED_REPEATS = 10
_FEW_REPEATS = 4
"""Repeats of a finalist that neither wins nor ties, or for which no time is left: two with each set of inputs."""
_HURRIED_CHECKS_S = 0.5
"""Time of the repeated verification of all finalists but the winner after an interrupt, in seconds."""
_MIN_CHECK_S = 0.1
"""Time for one of them where none is left, and it gets a few repeats."""
_FAULTS_S = 10.0
"""Time that faulty finalists may cost together, in seconds: what they run until they fail, a race that they break, and
new workers."""


class FinalistChecks:
    """Repeated verification of finalists with two sets of inputs, and compute-sanitizer if it is enabled.

    Each finalist is verified once, and the winner for as long as it takes.
    """

    def __init__(self, backend: Backend, finalists: Sequence[Contestant], rules: FinalRules) -> None:
        self._backend = backend
        self._finalists = finalists
        self._rules = rules
        self.lost_s = 0.0
        """Time that faulty finalists have cost."""
        self._right_s, self._wrong_s = list[float](), list[float]()
        """Time of a repeat of each finalist that passed, and of each one that failed, in seconds."""
        self._given_up = set[Contestant]()
        """Finalists that were left out unverified."""
        self._gives_up = False
        self._repeats = _HURRIED_REPEATS if rules.hurried else REPEATS
        self.left_s = self._limit_s = _HURRIED_CHECKS_S if rules.hurried else rules.limit_s
        """Time that is left after the race and the checks of those that passed."""
        self.readings: dict[Contestant, Reading] = {}
        """Result of each finalist that was verified, or refused by another check."""
        self._second_seed = SECOND_SEED
        self.notices: list[str] = []
        """Checks that could not be made, one line each."""
        self.sanitized: dict[Contestant, tuple[str, ...]] = {}
        """Tools of compute-sanitizer that found nothing, for each finalist that they ran."""

    def sanitize(self) -> None:
        """Run all finalists under the sanitizer, if there is one, at once; those with findings are refused."""
        sanitizer = self._backend.sanitizer
        if self._rules.hurried or sanitizer is None:
            return
        found = sanitizer.check_all([one.candidate for one in self._finalists])
        for one, findings in zip(self._finalists, found, strict=True):
            self.sanitized[one] = tuple(finding.tool for finding in findings if finding.result == "passed")
            faults = [finding for finding in findings if finding.result == "failed"]
            if faults:
                outcome = Outcome.OUT_OF_BOUNDS if faults[0].tool == "memcheck" else Outcome.WRONG_RESULT
                self.refuse(one, Reading(outcome, f"{faults[0].tool}: {faults[0].reason}", "sanitize"))
        unchecked = [finding for findings in found for finding in findings if finding.result == "unchecked"]
        if unchecked:
            checks = plural(len(unchecked), "of the sanitizer's checks was", "of the sanitizer's checks were")
            self.notices.append(f"{checks} not made; {unchecked[0].reason}")

    def refuse(self, finalist: Contestant, fault: Reading) -> None:
        """Record a fault that another check found, unless there is one already."""
        known = self.readings.get(finalist)
        if known is None or known.outcome is Outcome.OK:
            self.readings[finalist] = fault

    def passes(self, finalist: Contestant, *, wins: bool = False, ties: bool = True) -> bool:
        """Verify a finalist repeatedly, unless it was; return whether it is correct.

        The winner gets all repeats that its deadline permits; those that tie with it share a limited time; and the
        others get a few, after which their times are not reported as a tie.
        """
        known = self.readings.get(finalist)
        repeats = self._repeats if wins or (ties and self.left_s > 0) else min(self._repeats, _FEW_REPEATS)
        more = known is not None and known.outcome is Outcome.OK and _repeats(known) < repeats
        if known is None or (more and (wins or self.left_s > 0)):
            limit_s = None if wins else max(self.left_s, _MIN_CHECK_S)
            start = time.perf_counter()
            known = self.readings[finalist] = self._checked(finalist.candidate, repeats, limit_s)
            elapsed_s = time.perf_counter() - start
            is_right = known.outcome is Outcome.OK
            if is_right and not (wins and self._rules.hurried):
                self.left_s -= elapsed_s
            self.lost_s += max(0.0, elapsed_s - known.seconds.get("verify", elapsed_s)) if is_right else elapsed_s
            if is_right:
                self._right_s.append(elapsed_s / max(1.0, float(known.telemetry.get("repeats", 1))))
            else:
                self._wrong_s.append(elapsed_s)
            self._rules.observe(self.remaining_s)
        return known.outcome is Outcome.OK

    @property
    def remaining_s(self) -> float:
        """Expected time until every finalist is verified, in seconds: as many as so far are faulty."""
        left = len(self._finalists) - len(self.readings.keys() | self._given_up)
        right_s = left * _FEW_REPEATS * sum(self._right_s) / max(1, len(self._right_s))
        if not left or not self._wrong_s:
            return right_s
        each_s = sum(self._wrong_s) / len(self._wrong_s)
        faulty = left * len(self._wrong_s) / (len(self._right_s) + len(self._wrong_s))
        return right_s + min(faulty * each_s, max(0.0, _FAULTS_S - self.lost_s) + each_s)

    def first_that_fails(self, order: Sequence[Contestant], tied: Sequence[Contestant]) -> Contestant | None:
        """Verify finalists until one fails or is given up unverified, and return that one; None if all of them pass.

        Those that share values with faulty ones come first, the most alike before the others; then the winner, its
        ties, and the others. Once the faulty ones have cost too much, it is the other way round, and the next failure
        ends the verification as soon as one finalist has passed.

        ``order`` holds finalists, the winner first, and ``tied`` those that tie with it.
        """
        by_weight = list(dict.fromkeys([*order[:1], *tied, *order]))
        while unverified := [one for one in by_weight if one not in self.readings]:
            cleared, faulty = set[tuple[str, Value]](), Counter[tuple[str, Value]]()
            for other, known in self.readings.items():
                (cleared if known.outcome is Outcome.OK else faulty).update(other.trial.config.items())
            suspicion = {  # what each has in common with faulty ones, in values that no correct one has
                one: sum(faulty[item] for item in one.trial.config.items() if item not in cleared) for one in unverified
            }
            is_over = self.lost_s > _FAULTS_S
            if not is_over and not any(suspicion.values()):
                break
            chosen = (min if is_over else max)(unverified, key=suspicion.__getitem__)
            right = {one for one, known in self.readings.items() if known.outcome is Outcome.OK}
            if self._gives_up and right.intersection(order):
                self._given_up.add(unverified[-1])
                return unverified[-1]
            if not self.passes(chosen, wins=chosen is order[0]):
                self._gives_up = is_over
                return chosen
        return next((one for one in by_weight if not self.passes(one, wins=one is order[0], ties=one in tied)), None)

    def verified_like(self, winner: Contestant, tied: Sequence[Contestant]) -> list[Contestant]:
        """Return the ties that passed as many repeats as the winner, or all; note how many did not or were left out."""
        if self._given_up:
            self.notices.append(
                f"{plural(len(self._given_up), 'finalist was', 'finalists were')} not verified, and not ranked: faulty "
                f"ones took more than {_FAULTS_S:g} s"
            )
        needed = min(self._repeats, _repeats(self.readings[winner]))
        ties = [one for one in tied if _repeats(self.readings[one]) >= needed]
        if len(ties) < len(tied):
            self.notices.append(
                f"{plural(len(tied) - len(ties), 'configuration')} as fast as the winner, not listed as ties, could "
                f"not be verified as often within {self._limit_s:g} s"
            )
        return ties

    @property
    def refused(self) -> tuple[Trial, ...]:
        """Trials of the finalists that failed, with outcome and reason, in the order of detection."""
        failed = {one: found for one, found in self.readings.items() if found.outcome is not Outcome.OK}
        return tuple(found.result_of(one.trial) for one, found in failed.items())

    def _checked(self, candidate: Candidate, repeats: int, limit_s: float | None) -> Reading:
        """Verify a candidate with two sets of inputs, or with one if no second one can be drawn."""
        entries = (Entry(candidate),)
        if self._second_seed:
            try:
                (reading,) = self._backend.run(Check(entries, repeats, limit_s, self._second_seed))
                if reading.outcome is Outcome.OK or reading.stage != INPUTS_STAGE:
                    return reading
                reason = reading.reason
            except (InputError, ToolchainError) as error:
                reason = str(error)
            self._second_seed = 0
            self.notices.append(f"the finalists were verified with one set of inputs, not two: {reason}")
        return self._backend.run(Check(entries, repeats, limit_s))[0]


def _repeats(reading: Reading) -> float:
    """Return the number of repeats that were made; infinite in replay, where none is needed."""
    return float(reading.telemetry.get("repeats", math.inf))


def _cost_ratio(slower: Contestant, faster: Contestant, scorer: Scorer | None) -> Interval:
    """Return the ratio of the costs of two finalists: by their rounds if both raced, else by their intervals."""
    if slower is faster and faster.race is not None:
        return Interval(1.0, 1.0, 1.0)
    pair = (faster, slower)
    costs: list[Sequence[float]] = [one.race.rounds_us if one.race is not None else () for one in pair]
    is_raced = all(costs)
    if not is_raced:
        measured = filter(None, (one.trial.measurement for one in pair))
        costs = [(times.time_us, times.low_us, times.high_us) for times in measured]
    if scorer is not None:
        costs = [[scorer.cost(one.trial, time_us) for time_us in each] for one, each in zip(pair, costs, strict=True)]
    if is_raced:
        return raced_ratio(*costs)
    return ratio_of(*(Interval(value, min(bounds), max(bounds)) for value, *bounds in costs))


def with_times(trial: Trial, times_us: Sequence[float], l2: L2Mode = "cold") -> Trial:
    """Return a trial with its times in a race; ``l2`` is of one that has no time yet."""
    interval = median_interval(times_us)
    l2 = trial.measurement.l2 if trial.measurement is not None else l2
    measurement = Measurement(interval.value, interval.low, interval.high, tuple(times_us), l2)
    return replace(trial, outcome=Outcome.OK, reason="", stage="finals", measurement=measurement)


_CONFIRMING_ROUNDS = 30
"""Rounds of the race on the second GPU, at most; those of its two or three participants take a second."""
_CONFIRMING_RACE_S = 1.0
_CONFIRMING_REPEATS, _CONFIRMING_CHECK_S = 20, 1.0
"""Repeats and seconds of the winner's verification there; it has passed the finals."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The winner of the finals on a second GPU of the same model, by UUID; the home is the one that held the finals."""

    gpu: str
    home: str
    time_us: float
    """Time of the winner there, not rescaled."""
    spread: float
    """Relative excess over its time in the finals, 0.01 for 1 %."""
    speedup: Interval | None
    """Time of the default over that of the winner there; None where the default does not run."""


def confirm_finals(racing: Sequence[tuple[Trial, Candidate]], backend: Backend, rules: FinalRules) -> Finals:
    """Hold finals on one GPU, and confirm the winner on a second one, if the backend has several.

    A winner that is wrong on the second GPU is refused if another finalist is right there, and the finals are held
    again without it.
    """
    left, refused = list(racing), list[Trial]()
    while True:
        finals = run_finals(left, backend, rules)
        finals = replace(finals, refused=(*refused, *finals.refused))
        winner = finals.winner
        spare = backend.spare() if winner is not None and not rules.hurried else None
        if spare is None or winner is None:
            return finals
        where, candidates = spare.uuid or "a second GPU", {trial.config_key: candidate for trial, candidate in left}
        readings: list[Reading] = []
        try:
            for trial in finals.ranked:
                entries = (Entry(candidates[trial.config_key]),)
                readings += spare.run(Check(entries, _CONFIRMING_REPEATS, _CONFIRMING_CHECK_S))
                if readings[-1].outcome is Outcome.OK:
                    break
            fault = replace(readings[0], reason=f"on {where}: {readings[0].reason}", stage="finals")
            if readings[-1].outcome is not Outcome.OK:  # the GPU may be at fault
                raise AutotileError(f"no finalist is right there: {fault.reason}")
            if len(readings) == 1:
                confirmation = _confirmation(spare, finals, candidates, seed=rules.seed, home=backend.uuid)
                return replace(finals, confirmation=confirmation)
        except AutotileError as error:
            notice = f"the winner could not be confirmed on {where}: {error}"
            return replace(finals, notices=(*finals.notices, notice))
        refused.append(fault.result_of(winner))
        key = winner.config_key
        left = [(trial, candidate) for trial, candidate in left if trial.config_key != key]


def _confirmation(
    spare: Backend, finals: Finals, candidates: Mapping[str, Candidate], *, seed: int, home: str
) -> Confirmation | None:
    """Race the winner and the default on another GPU."""
    winner = finals.ranked[0]
    racing = list({trial.config_key: trial for trial in (winner, finals.default) if trial is not None}.values())
    round_us = sum(trial.time_us or 0.0 for trial in racing)
    entries = [Entry(candidates[trial.config_key]) for trial in racing]
    raced = spare.run(Race.lasting(entries, round_us, seed, limit_s=_CONFIRMING_RACE_S, most=_CONFIRMING_ROUNDS))
    if not raced or not winner.time_us:
        return None
    fault = next((row for row in raced if row.outcome is not Outcome.OK), None)
    if fault is not None:
        raise AutotileError(f"{config_text(winner.config)} or the default failed in the race: {fault.reason}")
    time_us = median_interval(raced[0].rounds_us).value
    speedup = raced_ratio(raced[0].rounds_us, raced[1].rounds_us) if len(raced) > 1 else None
    return Confirmation(spare.uuid, home, time_us, round(time_us / winner.time_us - 1.0, 5), speedup)


def measured_on(gpu: str, trial: Trial) -> Trial:
    """Return a trial of finals, whose times are those of the GPU that held them."""
    telemetry = {name: value for name, value in trial.telemetry.items() if name != GPU_SCALE}
    return replace(trial, gpu=gpu, telemetry=telemetry)
