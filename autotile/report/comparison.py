"""Comparison of two databases problem by problem: which winners got slower or faster, with simultaneous intervals.

A ratio of times of two sessions has three uncertainties. The samples of a session give that of its medians. A
configuration that is measured again comes out differently by more than that; the databases hold such repeats. And the
clock may have differed, of which the time of the reference kernel tells how far a kernel may have followed it. The
interval of a ratio covers all three, at 95 % for all problems together, so that comparing more problems does not make a
false alarm more likely.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from autotile.core.argument_types import checked
from autotile.core.documents import attributes
from autotile.core.model import TIME, Measurement, Outcome, Trial, config_key, config_text, timed_config
from autotile.core.statistics import SESSION_SPREAD, Interval, is_tie, median_interval, ratio_of_times
from autotile.core.text import NOTHING, RIGHT, Facts, Part, Result, ResultTable, percent_text, plural, time_text
from autotile.database.database import Database, StoredBest, open_existing
from autotile.database.keys import STUDY_HEADINGS, TuningKey, key_differences, study_columns, versioned_document
from autotile.report.page import Markup, Page, number, static_table, tag, words
from autotile.report.theme import (
    ACCENT,
    FAINT,
    INK,
    MICRO_S,
    MUTED,
    Chart,
    figure,
    hover_text,
    label,
    points,
    with_units,
)

_MIN_SAMPLES = 6
"""Fewest samples, or ratios of configurations, whose median has a 95 % interval, see `median_interval`."""

_FAILS = "no configuration works in the other"
_SUBJECT = ("kernel", "dtype", "sizes", "l2_mode")
KEY_LABELS = {
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

_MAX_DRAWN = 60
"""Problems that the chart draws: those that changed most in either direction."""
_ROW_PX = 26
_VERDICTS = {
    "slower": ("slower", " in B", "circle", INK),
    "faster": ("faster", " in B", "diamond", ACCENT),
    "unresolved": ("not told apart", "", "circle-open", MUTED),
}
"""Label of each verdict, what the page adds to it, its symbol and its colour."""


Difference = tuple[str, str, str]
"""Something other than the times in which two results differ: its name, and both values as text."""


@dataclass(frozen=True, slots=True)
class ComparedProblem:
    """The best results of two databases for one problem."""

    a: StoredBest
    b: StoredBest
    ratio: Interval | None
    """Time of ``b`` over time of ``a``, with an interval that holds at 95 % for all problems of the comparison
    together; None if a time has no interval: it has fewer than 6 samples, or was imported without its spread."""
    same_config: bool
    retimed: Interval | None
    """The same ratio for the configuration of ``a`` in both, where ``b`` has measured it: what changed without a new
    choice. None otherwise."""
    common: Interval | None
    """Median ratio of the times of all configurations that both have measured, with its 95 % interval; None if these
    are fewer than 6."""
    common_count: int
    repeat_spread: float
    """Relative difference of repeated measurements of a configuration in one database, which the intervals cover."""
    clock_ratio: float | None
    """Time of the reference kernel in ``b`` over that in ``a``: 1.02 if the SM clock was 2 % lower. None if one of them
    did not time it, or the GPUs are of different kinds."""
    differences: tuple[Difference, ...]
    """Devices, toolchains, versions, hosts and objectives that differ."""

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
        """Test, with confidence, that ``b`` is slower by more than a relative ``limit``."""
        return self.ratio is not None and self.ratio.low > 1.0 + limit

    def verdict_text(self, limit: float | None, *, of_page: bool = False) -> str:
        """Return the verdict in words, with a mark where it is slower by more than a limit."""
        if self.ratio is None:
            return "too few samples"
        text, of_b, *_ = _VERDICTS[self.verdict]
        beyond = f" by more than {percent_text(limit)}" if limit is not None and self.is_slower_by(limit) else ""
        return f"{text}{of_b if of_page else ''}{beyond}"

    @property
    def columns(self) -> tuple[str, str, str]:
        """As `study_columns`, with the GPUs of both results where they differ."""
        kernel, problem, device = study_columns(self.a.key)
        return kernel, problem, " -> ".join(dict.fromkeys((device, study_columns(self.b.key)[2])))

    def to_json(self, limit: float | None) -> dict[str, Any]:
        """Return all of it, with the mark for a limit."""
        ratios = attributes(self, "ratio", "retimed", "common").items()
        shown = {name: one.to_json("value") if one is not None else None for name, one in ratios}
        return {
            **versioned_document(self.key),
            "a": _best_document(self.a),
            "b": _best_document(self.b),
            "ratio": shown.pop("ratio"),
            "verdict": self.verdict,
            "slower_than_limit": self.is_slower_by(limit) if limit is not None else None,
            "same_config": self.same_config,
            **shown,
            "common_configs": self.common_count,
            **attributes(self, "repeat_spread", "clock_ratio"),
            "differences": [dict(zip(("name", "a", "b"), each, strict=True)) for each in self.differences],
        }


@dataclass(frozen=True, slots=True)
class UnmatchedStudy:
    """A problem without a counterpart, with its best result; None if no configuration works.

    ``fails`` states that the other database has tried the problem, and none of its configurations works.
    """

    key: TuningKey
    best: StoredBest | None
    fails: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """Columns of `study_columns`, its time, and a remark on the other database; empty for none."""
        return *study_columns(self.key), _best_time(self.best), _FAILS if self.fails else ""

    def to_json(self) -> dict[str, Any]:
        """Return the study with its result."""
        measurement = self.best.trial.measurement if self.best is not None else None
        config = self.best.trial.config if self.best is not None else {}
        return {**versioned_document(self.key), **timed_config(config, measurement), "fails_in_other": self.fails}


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseComparison(Result):
    """Comparison of the results of two databases, whose locations are without passwords."""

    a: str
    b: str
    problems: tuple[ComparedProblem, ...]
    """Problems with a result in both, the one that got slower most first."""
    only_a: tuple[UnmatchedStudy, ...]
    only_b: tuple[UnmatchedStudy, ...]
    superseded: int
    """Number of studies that are not compared, as there is a newer version of the kernel for the same problem and GPU
    in the same database."""
    limit: float | None = None
    """Relative slow-down beyond which a problem is marked, 0.05 for 5 %; None for no mark."""

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
        return tuple(Counter(each for one in self.problems for each in one.differences).most_common())

    @property
    def clock_ratio(self) -> float | None:
        """Median of the clock ratios of the problems; None if none is known."""
        known = [one.clock_ratio for one in self.problems if one.clock_ratio is not None]
        return median(known) if known else None

    def counts_text(self) -> str:
        """Return how many problems got slower, got faster or cannot be told apart."""
        verdicts = [one.verdict for one in self.problems]
        named = [*((verdict, text) for verdict, (text, *_) in _VERDICTS.items()), ("unknown", "unknown")]
        counts = [f"{verdicts.count(verdict)} {text}" for verdict, text in named if verdict in verdicts]
        return f"{plural(len(self.problems), 'problem')} compared" + (f": {', '.join(counts)}" if counts else "")

    def _changes(self, arrow: str) -> Iterator[tuple[str, str]]:
        """Yield what differs besides the times, the clock included, as pairs of a name and a text."""
        total = len(self.problems)
        for (name, a, b), count in self.differences:
            of = "" if count == total else f" ({count} of {plural(total, 'problem')})"
            yield name, f"{a} {arrow} {b}{of}"
        if (clock := self.clock_ratio) is not None:
            change, more = percent_text(abs(clock - 1)), "longer" if clock > 1 else "less"
            took = "as long" if change == percent_text(0.0) else f"{change} {more}"
            yield "clock", f"the reference kernel, which follows it, took {took} in B"

    def _left_out(self) -> list[tuple[str, str]]:
        text = f"{plural(self.superseded, 'study', 'studies')} of older versions"
        return [("left out", text)] if self.superseded else []

    def _headline(self) -> str:
        return f"A {self.a}, B {self.b}: {self.counts_text()}"

    def _parts(self) -> Iterator[Part]:
        facts: Facts = [("A", self.a), ("B", self.b), ("result", self.counts_text())]
        if texts := [f"{name}: {text}" for name, text in self._changes("->")]:
            facts.append(("differs", texts))
        facts += self._left_out()
        if self.problems:
            facts.append(("intervals", "95 % for all problems together"))
        yield facts
        if self.problems:
            rows = []
            for one in self.problems:
                config = config_text(one.a.trial.config) or NOTHING
                configs = [config if one.same_config else f"{config} -> {config_text(one.b.trial.config)}"]
                if one.retimed is not None and not one.same_config:
                    configs.append(f"the former in both: {_change_text(one.retimed)}")
                if one.common is not None:
                    configs.append(f"all {one.common_count:,} that both measured: {_change_text(one.common)}")
                found = _change_text(one.ratio), one.verdict_text(self.limit), "; ".join(configs)
                rows.append((*one.columns, _best_time(one.a), _best_time(one.b), *found))
            times = (f"{RIGHT}A", f"{RIGHT}B", "B against A", "verdict", "configurations")
            yield ResultTable((*STUDY_HEADINGS, *times), rows, ("configurations", "device"))
        for name, only in (("A", self.only_a), ("B", self.only_b)):
            if only:
                columns = (f"only in {name}", *STUDY_HEADINGS[1:], f"{RIGHT}time", "remark")
                yield ResultTable(columns, [one.cells for one in only], ("device",))

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        limit = self.limit
        return {
            **attributes(self, "a", "b", "limit"),
            "slower_than_limit": len(self.slower_by(limit)) if limit is not None else None,
            "problems": [one.to_json(limit) for one in self.problems],
            "only_a": [one.to_json() for one in self.only_a],
            "only_b": [one.to_json() for one in self.only_b],
            "superseded": self.superseded,
        }

    def page(self) -> str:
        """Return the page as HTML: the changes as intervals, what differs, and every problem in a table."""
        page = Page("B against A", self.counts_text())
        result: list[tuple[str, str | Markup]] = [("A", self.a), ("B", self.b)]
        if self.limit is not None:
            slower = self.slower_by(self.limit)
            beyond = f"slower by more than {percent_text(self.limit)}, with 95 % confidence"
            text = f"{plural(len(slower), 'problem')} {beyond}"
            result.append(("limit", tag("strong", text) if slower else text))
        if self.broken:
            result.append(("failed in B", tag("strong", plural(len(self.broken), "problem"))))
        result += [*self._changes("\N{RIGHTWARDS ARROW}"), *self._left_out()]
        page.add("answer", "Result", static_table(("", ""), result), link="Result")
        if self.problems:
            page.add("changes", "Changes", page.chart(changes_chart(self), wide=True), link="Changes")
            columns = [
                *words("kernel", "problem", "device"),
                *(number(name, MICRO_S) for name in ("A", "B")),
                *(number(name, "%") for name in ("change", "low", "high")),
                *words("verdict", "configuration in A", "configuration in B"),
                *(number(name, "%") for name in ("former winner in B", "all that both measured")),
            ]
            rows = []
            for one in self.problems:
                changes: list[list[float | None]] = []  # in per cent, each with its interval
                for ratio in (one.ratio, one.retimed, one.common):
                    known = (ratio.value, ratio.low, ratio.high) if ratio is not None else ()
                    changes.append([round(100 * (value - 1), 3) for value in known] or [None] * 3)
                a, b = one.a.trial, one.b.trial
                verdict = one.verdict_text(self.limit, of_page=True), config_text(a.config), config_text(b.config)
                rows.append((*one.columns, a.time_us, b.time_us, *changes[0], *verdict, changes[1][0], changes[2][0]))
            page.add("problems", "Problems", page.data_table("comparison", (columns, rows)), link="Problems")
        for name, only in (("A", self.only_a), ("B", self.only_b)):
            if only:
                left = [tuple(map(with_units, one.cells)) for one in only]
                table = static_table((*STUDY_HEADINGS, "time", "remark"), left)
                heading = f"Only in {name}"
                page.add(f"only-{name.lower()}", heading, table, link=heading)
        return page.html()


def _best_document(best: StoredBest) -> dict[str, Any]:
    measurement = best.trial.measurement
    return {
        **timed_config(best.trial.config, measurement),
        "samples": len(measurement.samples_us) if measurement is not None else 0,
        "confirmed": best.confirmed,
        "device": best.key.gpu_name,
        "nvrtc_version": best.key.nvrtc_version,
        **attributes(best.run, "driver", "autotile_version", "host"),
        "measured_at": best.winner.tuned_at.isoformat(),
    }


def _change_text(ratio: Interval | None) -> str:
    """Format a ratio of times as a change with its interval: ``+3.1 % (+2.6 to +3.5 %)``."""
    if ratio is None:
        return NOTHING
    value, low, high = (f"{100 * (one - 1):+.1f}" for one in (ratio.value, ratio.low, ratio.high))
    return f"{value} % ({low} to {high} %)"


def _best_time(best: StoredBest | None) -> str:
    return time_text(best.trial.time_us if best is not None else None)


def changes_chart(found: DatabaseComparison) -> Chart:
    """Return the change of each problem's time with its interval, those that got slower most at the top."""
    title = "Time of B against A, with intervals that hold at 95 % for all problems together"
    known = [(one, one.ratio) for one in found.problems if one.ratio is not None]
    if not known:
        return Chart("changes", title, None, "No problem has times whose uncertainty is known in both.")
    labels, seen = [], Counter[str]()
    for one, _ in known:  # those of equal problems on several GPUs are numbered
        text = label(" ".join(one.columns[:2]))
        seen[text] += 1
        labels.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    half = _MAX_DRAWN // 2
    every = list(zip(labels, known, strict=True))
    drawn = every if len(every) <= _MAX_DRAWN else [*every[:half], *every[-half:]]
    traces = []
    for verdict, (name, of_b, symbol, color) in _VERDICTS.items():
        marks = []
        for text, (one, ratio) in drawn:
            if one.verdict == verdict:
                a, b = (config_text(side.trial.config) or NOTHING for side in (one.a, one.b))
                times = with_units(f"{_best_time(one.a)} -> {_best_time(one.b)}: {_change_text(ratio)}")
                configs = [a] if one.same_config else [f"A: {a}", f"B: {b}"]
                hover = hover_text(" ".join(one.columns[:2]), one.columns[2], times, *configs)
                change = tuple(100 * (each - 1) for each in (ratio.value, ratio.low, ratio.high))
                marks.append((change, text, hover))
        traces += points(marks, name=name + of_b, symbol=symbol, color=color, size=9, width=1.5)
    limit = found.limit
    lines = [(0.0, FAINT, "solid"), *([(100 * limit, INK, "dash")] if limit is not None else [])]
    across = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    made = figure(
        traces,
        height=110 + _ROW_PX * len(drawn),
        x={"title": "change of the time, %", "ticksuffix": ""},
        y={"categoryorder": "array", "categoryarray": [text for text, _ in reversed(drawn)], "showgrid": False},
        shapes=[{**across, "x0": x, "x1": x, "line": {"color": color, "dash": dash}} for x, color, dash in lines],
        showlegend=True,
    )
    summary = f"{found.counts_text()}." + (f" The dashed line is the limit of {percent_text(limit)}." if limit else "")
    rows = [(text, one.columns[2], _change_text(ratio)) for text, (one, ratio) in every]
    left_out = f"{len(drawn)} of {len(known):,} problems are drawn, those that changed most."
    table = ResultTable(("problem", "device", "B against A"), rows)
    return Chart("changes", title, made, summary, table, left_out if len(drawn) < len(known) else "")


@checked
def compare(a: str | Path, b: str | Path) -> DatabaseComparison:
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
        (ours, older_a), (theirs, older_b) = _newest(first), _newest(second)
        matched = _matched(ours, theirs)
        pairs = [(x, y, x.best, y.best) for x, y in matched if x.best is not None and y.best is not None]
        times = [(one.trial.measurement, other.trial.measurement) for _, _, one, other in pairs]
        level = sum(_is_resolved(first) and _is_resolved(second) for first, second in times)
        problems = []
        for _, _, one, other in pairs:
            both = first.trials(one.study_id), second.trials(other.study_id)
            timed = (
                [trial for trial in trials if trial.outcome is Outcome.OK and trial.measurement is not None]
                for trials in both
            )
            problems.append(_compared(one, other, *timed, level=max(level, 1)))
        problems.sort(key=lambda one: -one.ratio.low if one.ratio is not None else math.inf)
        used = {id(study) for x, y, *_ in pairs for study in (x, y)}

        unmatched = []
        for studies, others in ((ours, theirs), (theirs, ours)):
            failed = {_subject(other) for other in others if other.best is None}
            left = (one for one in studies if id(one) not in used and one.best is not None)
            unmatched.append(tuple(replace(one, fails=_subject(one) in failed) for one in left))
        return DatabaseComparison(
            a=first.location,
            b=second.location,
            problems=tuple(problems),
            only_a=unmatched[0],
            only_b=unmatched[1],
            superseded=older_a + older_b,
        )


def _subject(study: UnmatchedStudy) -> tuple[object, ...]:
    """Return the problem of a study, whatever the GPU, the compiler and the version of the kernel."""
    key = study.key
    return key.kernel, key.dtype, frozenset(key.sizes.items()), key.l2_mode


def _newest(database: Database) -> tuple[list[UnmatchedStudy], int]:
    """Return the newest study of each problem, GPU and source of times, and the number of older ones."""
    best = {one.study_id: one for one in database.best()}
    tried = [one for one in database.studies() if one.trials or one.study_id in best]
    tried.sort(key=lambda one: one.last_at or one.created_at)
    studies = [UnmatchedStudy(one.key, best.get(one.study_id)) for one in tried]
    newest = {(_subject(one), one.key.gpu_name, one.key.source): one for one in studies}
    return list(reversed(newest.values())), len(tried) - len(newest)


def _matched(
    ours: Sequence[UnmatchedStudy], theirs: Sequence[UnmatchedStudy]
) -> Iterator[tuple[UnmatchedStudy, UnmatchedStudy]]:
    """Yield pairs of studies of the same problem, first those on the same GPU, each study once."""
    left: dict[object, list[UnmatchedStudy]] = {}
    for other in theirs:
        left.setdefault(_subject(other), []).append(other)
    later: list[UnmatchedStudy] = []
    for one in ours:
        others, device = left.get(_subject(one), []), (one.key.gpu_name, one.key.source)
        same_device = next((other for other in others if (other.key.gpu_name, other.key.source) == device), None)
        if same_device is None:
            later.append(one)
            continue
        others.remove(same_device)
        yield one, same_device
    for one in later:
        if others := left.get(_subject(one), []):
            yield one, others.pop(0)


def _compared(
    a: StoredBest, b: StoredBest, trials_a: Sequence[Trial], trials_b: Sequence[Trial], *, level: int
) -> ComparedProblem:
    spread = max(SESSION_SPREAD, _repeat_spread(a.trial, trials_a), _repeat_spread(b.trial, trials_b))
    stated = ([one.telemetry.get("reference_us") for one in trials] for trials in (trials_a, trials_b))
    probes = [[float(time_us) for time_us in times if time_us] for times in stated]
    is_known = a.key.gpu_name == b.key.gpu_name and all(probes)
    clock = median(probes[1]) / median(probes[0]) if is_known else None

    def ratio(other: Trial | None) -> Interval | None:
        first, second = a.trial.measurement, other.measurement if other is not None else None
        if not _is_resolved(first) or not _is_resolved(second):
            return None
        return _ratio_of_sessions(first, second, level, spread, clock)

    newest_a, newest_b = ({config_key(trial.config): trial for trial in trials} for trials in (trials_a, trials_b))
    shared = [_time_us(newest_b[key]) / _time_us(newest_a[key]) for key in newest_a if key in newest_b]
    key_a, key_b = config_key(a.trial.config), config_key(b.trial.config)
    differences = []
    for name, first, second in key_differences(a.key, b.key):
        if name not in _SUBJECT:
            digits = _HASH_DIGITS if name.endswith("_hash") else None
            differences.append((KEY_LABELS.get(name, name), first[:digits], second[:digits]))
    both = [one.run for one in (a, b)]
    facts = [(run.driver, run.autotile_version, run.host, str(run.settings.get("objective") or TIME)) for run in both]
    named = zip(("driver", "autotile", "host", "objective"), *facts, strict=True)
    differences += [(name, first, second) for name, first, second in named if first != second]
    return ComparedProblem(
        a=a,
        b=b,
        ratio=ratio(b.trial),
        same_config=key_a == key_b,
        retimed=ratio(newest_b.get(key_a)),
        common=median_interval(shared) if len(shared) >= _MIN_SAMPLES else None,
        common_count=len(shared),
        repeat_spread=spread,
        clock_ratio=clock,
        differences=tuple((name, first or NOTHING, second or NOTHING) for name, first, second in differences),
    )


def _ratio_of_sessions(a: Measurement, b: Measurement, level: int, spread: float, clock: float | None) -> Interval:
    """Return the ratio of time ``b`` to time ``a`` with the interval that the module describes.

    The 95 % are for ``level`` ratios together: the half widths, in the logarithm, grow by the ratio of the normal
    quantiles of Bonferroni's inequality, as the distribution of a sample's median is near a normal one. A kernel may
    follow the clock or not, such as one that is bound by the memory, so that the interval covers both the ratio and
    that at equal clocks.
    """
    from scipy.special import ndtri

    ratio = ratio_of_times(a, b)
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


def _is_resolved(measurement: Measurement | None) -> TypeGuard[Measurement]:
    """Test that the interval of a time holds at 95 %; one without samples is taken as it is stored."""
    if measurement is None or measurement.low_us <= 0.0:
        return False
    count = len(measurement.samples_us)
    return count >= _MIN_SAMPLES or (count == 0 and measurement.low_us < measurement.high_us)


def _time_us(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.time_us
