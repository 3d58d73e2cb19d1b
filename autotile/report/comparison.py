"""Comparison of two databases problem by problem: which winners got slower or faster, with simultaneous intervals.

A ratio of times of two sessions has three uncertainties. The samples of a session give that of its medians. A
configuration that is measured again comes out differently by more than that; the databases hold such repeats. And the
clock may have differed, of which the time of the reference kernel tells how far a kernel may have followed it. The
interval of a ratio covers all three, at 95 % for all problems together, so that comparing more problems does not make a
false alarm more likely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from autotile.core.argument_types import checked
from autotile.core.model import Measurement, Outcome, Trial, config_key, config_text, timed_config
from autotile.core.statistics import SESSION_SPREAD, Interval, is_tie, median_interval, ratio_of
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Facts,
    Part,
    Result,
    ResultTable,
    percent_text,
    plural,
    source_text,
    time_text,
)
from autotile.database.database import Database, StoredBest, StudySummary, open_existing
from autotile.database.keys import (
    STUDY_HEADINGS,
    TuningKey,
    key_differences,
    key_text,
    study_columns,
    versioned_document,
)

_MIN_SAMPLES = 6
"""Fewest samples whose median has a 95 % interval, see `median_interval`."""
_MIN_COMMON = 6
"""Fewest configurations whose median ratio is stated, for the same reason."""

_SUBJECT = ("kernel", "dtype", "sizes", "l2_mode")
_LABELS = {
    "gpu_name": "GPU",
    "compute_capability": "compute capability",
    "sm_count": "SMs",
    "smem_per_block_optin_bytes": "shared memory per block",
    "nvrtc_version": "compiler",
    "template_hash": "source of the kernel",
    "space_hash": "search space",
    "options": "compiler options",
    "source": "source of the times",
}
"""Differences of two keys with the same subject, as shown to people."""
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Difference:
    """Something other than the times in which two results differ, with both values as text."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class ComparedProblem:
    """The results of two databases for one problem.

    Attributes
    ----------
    a, b
        Best result of each.
    ratio
        Time of ``b`` over time of ``a``, with an interval that holds at 95 % for all problems of the comparison
        together; None if a time has no interval: it has fewer than 6 samples, or was imported without its spread.
    same_config
        Whether both have the same configuration.
    retimed
        The same ratio for the configuration of ``a`` in both, where ``b`` has measured it: what changed without a new
        choice. None otherwise.
    common
        Median ratio of the times of all configurations that both have measured, with its 95 % interval; None if these
        are fewer than 6.
    common_count
        Number of these configurations.
    repeat_spread
        Relative difference of repeated measurements of these configurations in one database, which the intervals cover.
    clock_ratio
        Time of the reference kernel in ``b`` over that in ``a``: 1.02 if the SM clock was 2 % lower. None if one of
        them did not time it, or the GPUs are of different kinds.
    differences
        Devices, toolchains, versions and hosts that differ.
    """

    a: StoredBest
    b: StoredBest
    ratio: Interval | None
    same_config: bool
    retimed: Interval | None
    common: Interval | None
    common_count: int
    repeat_spread: float
    clock_ratio: float | None
    differences: tuple[Difference, ...]

    @property
    def key(self) -> TuningKey:
        """Key of the first result."""
        return self.a.key

    @property
    def verdict(self) -> str:
        """``slower`` or ``faster``, of ``b``; ``unresolved`` if the interval holds 1; ``unknown`` if there is none."""
        if self.ratio is None:
            return "unknown"
        if is_tie(self.ratio):
            return "unresolved"
        return "slower" if self.ratio.value > 1.0 else "faster"

    def is_slower_by(self, limit: float) -> bool:
        """Return whether ``b`` is slower by more than a relative ``limit``, with confidence."""
        return self.ratio is not None and self.ratio.low > 1.0 + limit


@dataclass(frozen=True, slots=True)
class UnmatchedStudy:
    """A problem without a counterpart.

    Attributes
    ----------
    key
        Key of the study.
    best
        Its best result; None if no configuration works.
    fails
        Whether the other database has tried the problem, and none of its configurations works.
    """

    key: TuningKey
    best: StoredBest | None
    fails: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Result):
    """Comparison of the results of two databases.

    Attributes
    ----------
    a, b
        Locations, without passwords.
    problems
        Problems with a result in both, the one that got slower most first.
    only_a, only_b
        Problems with a result in one of them only.
    superseded
        Number of studies that are not compared, as there is a newer version of the kernel for the same problem and GPU
        in the same database.
    limit
        Relative slow-down beyond which a problem is marked, 0.05 for 5 %; None for no mark.
    """

    a: str
    b: str
    problems: tuple[ComparedProblem, ...]
    only_a: tuple[UnmatchedStudy, ...]
    only_b: tuple[UnmatchedStudy, ...]
    superseded: int
    limit: float | None = None

    @property
    def broken(self) -> tuple[UnmatchedStudy, ...]:
        """Problems with a result in the first database that have failed in the second."""
        return tuple(one for one in self.only_a if one.fails)

    def slower_by(self, limit: float) -> tuple[ComparedProblem, ...]:
        """Return the problems that are slower in the second database by more than ``limit`` (0.05 for 5 %).

        The confidence is 95 % for all of them together: noise alone returns any of them in one comparison of twenty at
        most.
        """
        return tuple(one for one in self.problems if one.is_slower_by(limit))

    @property
    def differences(self) -> tuple[tuple[Difference, int], ...]:
        """The differences, each with its number of problems, the most frequent first."""
        counts: dict[Difference, int] = {}
        for one in self.problems:
            for difference in one.differences:
                counts[difference] = counts.get(difference, 0) + 1
        return tuple(sorted(counts.items(), key=lambda item: -item[1]))

    @property
    def clock_ratio(self) -> float | None:
        """Median of the clock ratios of the problems; None if none is known."""
        known = [one.clock_ratio for one in self.problems if one.clock_ratio is not None]
        return median(known) if known else None

    def counts_text(self) -> str:
        """Return how many problems got slower, got faster or cannot be told apart."""
        verdicts = [one.verdict for one in self.problems]
        named = [("slower", "slower"), ("faster", "faster"), ("unresolved", "not told apart"), ("unknown", "unknown")]
        counts = [f"{verdicts.count(verdict)} {text}" for verdict, text in named if verdict in verdicts]
        return f"{plural(len(self.problems), 'problem')} compared" + (f": {', '.join(counts)}" if counts else "")

    def _headline(self) -> str:
        return f"A {self.a}, B {self.b}: {self.counts_text()}"

    def _parts(self) -> Iterator[Part]:
        """Yield what differs, one row for each compared problem, and those that one database has alone."""
        yield self._facts()
        if self.problems:
            rows = [
                (
                    one.key.kernel,
                    key_text(one.key),
                    device_pair(one),
                    best_time(one.a),
                    best_time(one.b),
                    change_text(one.ratio),
                    _verdict_text(one, self.limit),
                    _configs_text(one),
                )
                for one in self.problems
            ]
            times = (f"{RIGHT}A", f"{RIGHT}B", "B against A", "verdict", "configurations")
            yield ResultTable((*STUDY_HEADINGS, *times), rows, ("configurations", "device"))
        for name, only in (("A", self.only_a), ("B", self.only_b)):
            if only:
                columns = (f"only in {name}", *STUDY_HEADINGS[1:], f"{RIGHT}time", "remark")
                fails = {True: "no configuration works in the other", False: NOTHING}
                rows_of_one = [(*study_columns(one.key), best_time(one.best), fails[one.fails]) for one in only]
                yield ResultTable(columns, rows_of_one, ("device",))

    def _facts(self) -> Facts:
        facts: Facts = [("A", self.a), ("B", self.b), ("result", self.counts_text())]
        total = len(self.problems)
        texts = [
            f"{one.name}: {one.a} -> {one.b}" + ("" if count == total else f" ({count} of {plural(total, 'problem')})")
            for one, count in self.differences
        ]
        if (clock := self.clock_ratio) is not None:
            change = f"{percent_text(abs(clock - 1))} {'longer' if clock > 1 else 'less'}"
            texts.append(f"clock: the reference kernel, which follows it, took {change} in B")
        if texts:
            facts.append(("differs", texts))
        if self.superseded:
            facts.append(("left out", f"{plural(self.superseded, 'study', 'studies')} of older versions"))
        if self.problems:
            facts.append(("intervals", "95 % for all problems together"))
        return facts

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        limit = self.limit
        return {
            "a": self.a,
            "b": self.b,
            "limit": limit,
            "slower_than_limit": len(self.slower_by(limit)) if limit is not None else None,
            "problems": [_problem_document(one, limit) for one in self.problems],
            "only_a": [_only_document(one) for one in self.only_a],
            "only_b": [_only_document(one) for one in self.only_b],
            "superseded": self.superseded,
        }


def _verdict_text(one: ComparedProblem, limit: float | None) -> str:
    named = {"unresolved": "not told apart", "unknown": "too few samples"}
    beyond = f" by more than {percent_text(limit)}" if limit is not None and one.is_slower_by(limit) else ""
    return named.get(one.verdict, one.verdict) + beyond


def _configs_text(one: ComparedProblem) -> str:
    """Format the configurations, and how the times of the same ones changed."""
    config = config_text(one.a.trial.config) or NOTHING
    parts = [config if one.same_config else f"{config} -> {config_text(one.b.trial.config)}"]
    if one.retimed is not None and not one.same_config:
        parts.append(f"the former in both: {change_text(one.retimed)}")
    if one.common is not None:
        parts.append(f"all {one.common_count:,} that both measured: {change_text(one.common)}")
    return "; ".join(parts)


def _problem_document(one: ComparedProblem, limit: float | None) -> dict[str, Any]:
    return {
        **versioned_document(one.key),
        "a": _best_document(one.a),
        "b": _best_document(one.b),
        "ratio": one.ratio.to_json("value") if one.ratio is not None else None,
        "verdict": one.verdict,
        "slower_than_limit": one.is_slower_by(limit) if limit is not None else None,
        "same_config": one.same_config,
        "retimed": one.retimed.to_json("value") if one.retimed is not None else None,
        "common": one.common.to_json("value") if one.common is not None else None,
        "common_configs": one.common_count,
        "repeat_spread": one.repeat_spread,
        "clock_ratio": one.clock_ratio,
        "differences": [{"name": each.name, "a": each.a, "b": each.b} for each in one.differences],
    }


def _best_document(best: StoredBest) -> dict[str, Any]:
    measurement = best.trial.measurement
    return {
        **timed_config(best.trial.config, measurement),
        "samples": len(measurement.samples_us) if measurement is not None else 0,
        "confirmed": best.confirmed,
        "device": best.key.gpu_name,
        "nvrtc_version": best.key.nvrtc_version,
        "driver": best.run.driver,
        "autotile_version": best.run.autotile_version,
        "host": best.run.host,
        "measured_at": best.created_at.isoformat(),
    }


def _only_document(one: UnmatchedStudy) -> dict[str, Any]:
    measurement = one.best.trial.measurement if one.best is not None else None
    config = one.best.trial.config if one.best is not None else {}
    return {**versioned_document(one.key), **timed_config(config, measurement), "fails_in_other": one.fails}


@checked
def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare the best results of two databases: two machines, two versions of kernels, or two compilers.

    Problems are matched by kernel, sizes, dtype and L2 mode, those on the same GPU first. Of several versions of a
    kernel in a database the newest is compared.

    Parameters
    ----------
    a, b
        Paths or URLs of the databases.

    Raises
    ------
    InputError
        One of them does not exist or cannot be read.
    """
    with open_existing(a) as first, open_existing(b) as second:
        studies_a, studies_b = _Studies(first), _Studies(second)
        pairs = [
            (ours, theirs)
            for ours, theirs in _matched(studies_a.newest, studies_b.newest)
            if ours.best is not None and theirs.best is not None
        ]
        level = sum(_has_interval(one.best) and _has_interval(other.best) for one, other in pairs)
        problems = [_compared(ours, theirs, max(level, 1)) for ours, theirs in pairs]
        problems.sort(key=lambda one: -one.ratio.low if one.ratio is not None else math.inf)
        matched = {id(study) for pair in pairs for study in pair}
        return Comparison(
            a=first.location,
            b=second.location,
            problems=tuple(problems),
            only_a=tuple(_unmatched(studies_a.newest, studies_b.newest, matched)),
            only_b=tuple(_unmatched(studies_b.newest, studies_a.newest, matched)),
            superseded=studies_a.superseded + studies_b.superseded,
        )


def change_text(ratio: Interval | None) -> str:
    """Format a ratio of times as a change with its interval: ``+3.1 % (+2.6 to +3.5 %)``."""
    if ratio is None:
        return NOTHING
    value, low, high = (f"{100 * (one - 1):+.1f}" for one in (ratio.value, ratio.low, ratio.high))
    return f"{value} % ({low} to {high} %)"


def best_time(best: StoredBest | None) -> str:
    """Format the time of a result."""
    return time_text(best.trial.time_us if best is not None else None)


def device_pair(one: ComparedProblem) -> str:
    """Format the GPUs of two results, as one where they are the same."""
    names = [source_text(side.key.gpu_name, side.key.source) for side in (one.a, one.b)]
    return names[0] if names[0] == names[1] else " -> ".join(names)


class _Study:
    """A study of one of the databases; its trials are read when they are needed."""

    def __init__(self, database: Database, summary: StudySummary, best: StoredBest | None) -> None:
        self._database = database
        self.key = summary.key
        self.best = best
        self.is_tried = summary.trials > 0
        self.recorded_at: datetime = summary.last_at or summary.created_at
        key = summary.key
        self.subject = (key.kernel, key.dtype, frozenset(key.sizes.items()), key.l2_mode)
        """The problem, whatever the GPU, the compiler and the version of the kernel."""
        self.device = (key.gpu_name, key.source)
        """GPU and source of the times."""

    def measured_trials(self) -> list[Trial]:
        """Return the trials with a time that may be compared, oldest first."""
        study_id = self.best.study_id if self.best is not None else None
        trials = self._database.trials(study_id) if study_id is not None else []
        return [trial for trial in trials if trial.outcome is Outcome.OK and trial.measurement is not None]


class _Studies:
    """The newest study of each problem and GPU in a database."""

    def __init__(self, database: Database) -> None:
        best = {one.study_id: one for one in database.best()}
        found = [_Study(database, one, best.get(one.study_id)) for one in database.studies()]
        tried = sorted((one for one in found if one.is_tried or one.best is not None), key=lambda one: one.recorded_at)
        newest = {(one.subject, one.device): one for one in tried}
        self.newest = list(reversed(newest.values()))
        self.superseded = len(tried) - len(newest)


def _matched(ours: Sequence[_Study], theirs: Sequence[_Study]) -> Iterable[tuple[_Study, _Study]]:
    """Yield pairs of studies of the same problem, first those on the same GPU, each study once."""
    left: dict[object, list[_Study]] = {}
    for other in theirs:
        left.setdefault(other.subject, []).append(other)
    later: list[_Study] = []
    for one in ours:
        others = left.get(one.subject, [])
        same_device = next((other for other in others if other.device == one.device), None)
        if same_device is None:
            later.append(one)
            continue
        others.remove(same_device)
        yield one, same_device
    for one in later:
        others = left.get(one.subject, [])
        if others:
            yield one, others.pop(0)


def _unmatched(studies: Iterable[_Study], others: Iterable[_Study], matched: set[int]) -> Iterable[UnmatchedStudy]:
    failed = {other.subject for other in others if other.best is None}
    for study in studies:
        if id(study) not in matched and study.best is not None:
            yield UnmatchedStudy(study.key, study.best, study.subject in failed)


def _compared(ours: _Study, theirs: _Study, level: int) -> ComparedProblem:
    a, b = ours.best, theirs.best
    assert a is not None
    assert b is not None
    trials_a, trials_b = ours.measured_trials(), theirs.measured_trials()
    spread = max(SESSION_SPREAD, _repeat_spread(a.trial, trials_a), _repeat_spread(b.trial, trials_b))
    clock = _clock_ratio(trials_a, trials_b) if ours.key.gpu_name == theirs.key.gpu_name else None

    def ratio(one: Trial, other: Trial | None) -> Interval | None:
        if other is None or one.measurement is None or other.measurement is None:
            return None
        if not (_is_resolved(one.measurement) and _is_resolved(other.measurement)):
            return None
        return _ratio_of_sessions(one.measurement, other.measurement, level, spread, clock)

    newest_a, newest_b = ({config_key(trial.config): trial for trial in trials} for trials in (trials_a, trials_b))
    shared = [_time_us(newest_b[key]) / _time_us(newest_a[key]) for key in newest_a if key in newest_b]
    return ComparedProblem(
        a=a,
        b=b,
        ratio=ratio(a.trial, b.trial),
        same_config=config_key(a.trial.config) == config_key(b.trial.config),
        retimed=ratio(a.trial, newest_b.get(config_key(a.trial.config))),
        common=median_interval(shared) if len(shared) >= _MIN_COMMON else None,
        common_count=len(shared),
        repeat_spread=spread,
        clock_ratio=clock,
        differences=tuple(_differences(a, b)),
    )


def _ratio_of_sessions(a: Measurement, b: Measurement, level: int, spread: float, clock: float | None) -> Interval:
    """Return the ratio of time ``b`` to time ``a`` with the interval that the module describes.

    Parameters
    ----------
    level
        Number of ratios that the 95 % are for together. The half widths, in the logarithm, grow by the ratio of the
        normal quantiles of Bonferroni's inequality, as the distribution of a sample's median is near a normal one.
    spread
        Relative difference of repeated measurements.
    clock
        Ratio of the times of the reference kernel. A kernel may follow the clock or not, such as one that is bound by
        the memory, so that the interval covers both the ratio and that at equal clocks.
    """
    from scipy.special import ndtri

    ratio = ratio_of(*(Interval(one.time_us, one.low_us, one.high_us) for one in (a, b)))
    growth = float(ndtri(0.025 / level) / ndtri(0.025))
    low = ratio.value * (ratio.low / ratio.value) ** growth / (1.0 + spread)
    high = ratio.value * (ratio.high / ratio.value) ** growth * (1.0 + spread)
    if clock is not None:
        low, high = min(low, low / clock), max(high, high / clock)
    return Interval(ratio.value, low, high)


def _repeat_spread(best: Trial, trials: Iterable[Trial]) -> float:
    """Return the median relative difference between a trial and the others of its configuration and binary."""
    key, time_us = config_key(best.config), _time_us(best)
    others = [
        abs(math.log(_time_us(one) / time_us))
        for one in trials
        if one.cubin_hash == best.cubin_hash and one.measurement != best.measurement and config_key(one.config) == key
    ]
    return math.expm1(median(others)) if others else 0.0


def _clock_ratio(a: Iterable[Trial], b: Iterable[Trial]) -> float | None:
    """Return the ratio of the median times of the reference kernel, ``b`` over ``a``; None if one was not measured."""
    probes = [
        [float(one.telemetry["reference_us"]) for one in side if one.telemetry.get("reference_us")] for side in (a, b)
    ]
    return median(probes[1]) / median(probes[0]) if all(probes) else None


def _differences(a: StoredBest, b: StoredBest) -> Iterable[Difference]:
    for name, ours, theirs in key_differences(a.key, b.key):
        if name not in _SUBJECT:
            digits = _HASH_DIGITS if name.endswith("_hash") else None
            yield Difference(_LABELS.get(name, name), ours[:digits] or NOTHING, theirs[:digits] or NOTHING)
    for label, ours, theirs in (
        ("driver", a.run.driver, b.run.driver),
        ("autotile", a.run.autotile_version, b.run.autotile_version),
        ("host", a.run.host, b.run.host),
    ):
        if ours != theirs:
            yield Difference(label, ours or NOTHING, theirs or NOTHING)


def _has_interval(best: StoredBest | None) -> bool:
    return best is not None and best.trial.measurement is not None and _is_resolved(best.trial.measurement)


def _is_resolved(measurement: Measurement) -> bool:
    """Return whether the interval of a measurement holds at 95 %; one without samples is taken as it is stored."""
    count = len(measurement.samples_us)
    return measurement.low_us > 0.0 and (
        count >= _MIN_SAMPLES or (count == 0 and measurement.low_us < measurement.high_us)
    )


def _time_us(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.time_us
