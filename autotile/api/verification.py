"""Verification of tuned results on a GPU, or by replay of a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotile.api.keywords import read_keywords
from autotile.api.targets import check_device_index, resolve_gpu, sizes_notice
from autotile.core.argument_types import checked
from autotile.core.model import Config, Measurement, Problem, config_key, config_text, timed_config
from autotile.core.statistics import Interval
from autotile.core.text import NOTHING, RIGHT, Part, Result, ResultTable, plural, source_text, time_text
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database, database_location
from autotile.database.keys import key_of
from autotile.database.winners import CHECKS
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import find_best_result, forget_served
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import assess_misses
from autotile.tuning.result import TuneResult
from autotile.tuning.verifying import MAX_RETIMED, CandidateCheck, check_served, retime, tuned_problems

VerificationVerdict = Literal["confirmed", "replaced", "demoted", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class VerifiedProblem:
    """Verification of one problem.

    Attributes
    ----------
    problem
        Problem.
    device
        Name of the GPU.
    source
        ``cuda`` for measured times, ``replayed`` for those from a recording.
    aged
        Drivers and compilers that had changed since the result was measured, one phrase each.
    before, before_measurement
        Configuration that was served, and its time when it was tuned; None if it was tuned for another problem.
    after, after_measurement
        Configuration that is served now, and its time; None if only the default is left.
    speedup
        Time of the default over time of the fastest configuration, with its interval; None if unknown.
    reason
        Fault for which the served configuration was demoted, or for which nothing could be measured; else empty.
    demoted
        Whether the configuration that was served failed.
    tied
        Whether the time of the configuration that was served could not be told from that of the one served now.
    interrupted
        Whether the user interrupted the session.
    """

    problem: Problem
    device: str
    source: str
    aged: tuple[str, ...]
    before: Config
    before_measurement: Measurement | None
    after: Config | None
    after_measurement: Measurement | None
    speedup: Interval | None
    reason: str
    demoted: bool
    tied: bool
    interrupted: bool = False

    @property
    def verdict(self) -> VerificationVerdict:
        """Outcome in one word."""
        if self.interrupted:
            return "interrupted"
        if self.demoted:
            return "demoted"
        if self.speedup is None and self.reason:
            return "failed"
        return "confirmed" if self.after is not None and _same(self.before, self.after) else "replaced"


@dataclass(frozen=True, slots=True, repr=False)
class VerifyResult(Result):
    """Verified problems, those that were tuned last first."""

    problems: tuple[VerifiedProblem, ...]

    def _headline(self) -> str:
        if not self.problems:
            return "nothing to verify: all results were verified with the current driver and compiler"
        counts = Counter(problem.verdict for problem in self.problems)
        verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
        first = self.problems[0]
        return f"{plural(len(self.problems), 'problem')} on {source_text(first.device, first.source)}: {verdicts}"

    def _parts(self) -> Iterator[Part]:
        if not self.problems:
            yield self._headline()
            return
        times = (f"{RIGHT}time then", f"{RIGHT}now", f"{RIGHT}over default")
        rows = [
            (
                str(one.problem),
                one.verdict,
                _time(one.before_measurement, one.source),
                _time(one.after_measurement, one.source),
                f"{one.speedup.value:.3f}" if one.speedup is not None else NOTHING,
                config_text(one.after) if one.after is not None else "the default",
                one.reason,
                "; ".join(one.aged),
            )
            for one in self.problems
        ]
        headings = ("problem", "verdict", *times, "configuration", "reason", "aged")
        yield ResultTable(headings, rows, ("reason", "aged", "configuration"))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each problem."""
        return [
            {
                "kernel": one.problem.kernel,
                "problem": dict(one.problem.sizes),
                "dtype": one.problem.dtype,
                "device": one.device,
                "aged": list(one.aged),
                "verdict": one.verdict,
                "reason": one.reason,
                "tied": one.tied,
                "before": timed_config(one.before, one.before_measurement),
                "after": timed_config(one.after, one.after_measurement) if one.after is not None else None,
                "speedup": one.speedup.to_json() if one.speedup is not None else None,
            }
            for one in self.problems
        ]


def _time(measured: Measurement | None, source: str) -> str:
    return source_text(time_text(measured.time_us), source) if measured is not None else NOTHING


@checked
def verify(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    aged: bool = False,
    served: bool = False,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    announce: Callable[[str], None] = lambda _: None,
    **named: Any,
) -> VerifyResult:
    """Verify and time the best configurations of tuned problems again, with the current driver and compiler.

    The best three configurations of each problem and the default are measured in one session. The fastest of those
    that are correct is served from then on; of several whose times cannot be told apart, the one that was served
    before. A configuration that fails is no longer served, whatever compiler it was tuned with.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`.
    sizes
        Sizes of the only problem to verify; if some are given, missing ones are taken from the search-space file. None
        for all problems that are tuned on the GPU.
    **named
        Sizes and options by name, as for `autotile.tune`.
    aged
        Leave out problems that were measured with the current driver and compiler.
    served
        Verify instead what programs were served for problems that are not tuned: the problems of the recorded misses,
        or the one of the given sizes. Each configuration is verified for a problem once; one that fails is no longer
        served for it, and what is served in its place is verified in turn.
    dtype
        Element type of the problems. None for all, or for the kernel's first if sizes are given.
    device
        CUDA index or name of a GPU of this machine; None for that of `options`, the first by default.
    database
        Path or URL; None for that of `options`, the user's own by default.
    options
        Options of the sessions, of which ``sanitize``, ``replay``, ``workers`` and the timeouts apply.
    announce
        Called with a line of text before each session.

    Raises
    ------
    InputError
        There is no such GPU, or no tuned problem to verify.
    ToolchainError
        NVRTC, CuPy or the driver does not work.

    Examples
    --------
    >>> verify("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    <VerifyResult: 1 problem on NVIDIA H200: 1 confirmed>
    """
    given, options = read_keywords(kernel, sizes, named, options)
    options = _on_device(options, device)
    loaded = load_kernel(kernel)
    asked = resolve_problem(loaded.spec, given, dtype, defaults=True) if given else None
    if asked is not None and (assumed := sizes_notice(loaded.spec, asked.sizes, given)):
        announce(assumed)
    location = str(database_location(database if database is not None else options.database))
    options = replace(options, database=location)
    if served:
        if aged:
            raise InputError("--aged selects tuned problems and --served untuned ones; give one of them")
        missed = [asked] if asked is not None else _missed(kernel, location, dtype, options)
        return VerifyResult(tuple(_verify_served(kernel, loaded, missed, options, announce)))
    live = options.replay is None
    found = tuned_problems(
        loaded,
        location,
        problem=asked,
        dtype=dtype,
        gpu_name=live_device(options.device_index).name if live else None,
        source="cuda" if live else "replayed",
    )
    problems = []
    for tuned in found:
        before = _served(kernel, tuned.problem, options)
        if aged and not before.choice.aged:
            continue
        announce(f"{tuned.problem}: the best {MAX_RETIMED} and the default are measured again")
        result, fault, refused = retime(loaded, tuned, before.config, options)
        forget_served()  # the next look-up reads the database again
        after = _served(kernel, tuned.problem, options)
        refusal = refused.get(config_key(before.config), "")
        problems.append(_compare(tuned.problem, before, after, result, refusal=refusal, fault=fault))
    return VerifyResult(tuple(problems))


def _on_device(options: TuneOptions, device: int | str | None) -> TuneOptions:
    """Return options with a device in place of theirs, after a check that it exists unless they are for a replay."""
    if options.replay is not None:
        return options
    if device_count() == 0:
        raise InputError("verifying runs kernels, and there is no CUDA device here; see `autotile doctor`")
    if device is not None:
        return replace(options, device_index=resolve_gpu(device))
    check_device_index(options.device_index)
    return options


def _missed(kernel: KernelName, location: str, dtype: str | None, options: TuneOptions) -> list[Problem]:
    """Return the problems that were served by a fallback on the GPU, the most frequent first."""
    gpu_name = live_device(options.device_index).name if options.replay is None else None
    opened = Database.open_readonly(location)
    if opened is None:
        return []
    with opened:
        assessed = assess_misses(opened, kernel)
    wanted = [
        one.miss.problem
        for one in assessed
        if one.kernel is not None
        and gpu_name in (None, one.miss.gpu_name)
        and dtype in (None, one.miss.problem.dtype)
        and not one.tuned
    ]
    return list({str(problem): problem for problem in wanted}.values())


def _verify_served(
    kernel: KernelName,
    loaded: Kernel,
    problems: Iterable[Problem],
    options: TuneOptions,
    announce: Callable[[str], None],
) -> Iterator[VerifiedProblem]:
    """Verify what is served for problems that are not tuned, until it is correct or nothing else is left to serve."""
    for problem in problems:
        tried: set[str] = set()
        while True:
            before = _served(kernel, problem, options)
            if before.tier == "exact" or config_key(before.config) in tried | _verified(before, loaded, options):
                break
            tried.add(config_key(before.config))
            announce(f"{problem}: verifying what is served ({before.tier})")
            interrupted, check, fault = False, None, "interrupted"
            try:
                check, fault = check_served(loaded, problem, before.config, options)
            except KeyboardInterrupt:
                interrupted = True
            forget_served()
            after = _served(kernel, problem, options)
            yield _served_result(problem, before, after, check, fault, interrupted=interrupted)
            if interrupted:
                return
            if check is None or check.is_right:
                break


def _verified(served: BoundKernel, loaded: Kernel, options: TuneOptions) -> set[str]:
    """Return the configurations that were found to be correct for the problem of a served kernel, by `config_key`."""
    opened = Database.open_readonly(str(options.database))
    if opened is None:
        return set()
    with opened:
        checks = opened.read(CHECKS, kernel=loaded.name, dtype=served.problem.dtype)
    requested = key_of(loaded, served.problem, served.device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    return {check.config for check in checks if check.passed and check.key == requested}


def _served_result(
    problem: Problem,
    before: BoundKernel,
    after: BoundKernel,
    check: CandidateCheck | None,
    fault: str,
    *,
    interrupted: bool,
) -> VerifiedProblem:
    replaced = not _same(before.config, after.config)
    measurement = check.candidate.measurement if check is not None else None
    return VerifiedProblem(
        problem=problem,
        device=before.device.name,
        source=before.source or before.device.source,
        aged=before.choice.aged,
        before=before.config,
        before_measurement=None,  # it is of another problem
        after=after.config,
        after_measurement=None if replaced else measurement,
        speedup=check.speedup if check is not None else None,
        reason=fault,
        demoted=check is not None and not check.is_right and replaced,
        tied=False,
        interrupted=interrupted,
    )


def _served(kernel: KernelName, problem: Problem, options: TuneOptions) -> BoundKernel:
    index = options.device_index if options.replay is None else None
    return find_best_result(kernel, problem.dtype, index, str(options.database), problem.sizes)


def _compare(
    problem: Problem, before: BoundKernel, after: BoundKernel, result: TuneResult | None, *, refusal: str, fault: str
) -> VerifiedProblem:
    is_tuned = after.tier != "default"
    return VerifiedProblem(
        problem=problem,
        device=before.device.name,
        source=before.source,
        aged=before.choice.aged,
        before=before.config,
        before_measurement=before.measurement,
        after=after.config if is_tuned else None,
        after_measurement=after.measurement if is_tuned else None,
        speedup=result.speedup if result is not None else None,
        reason=refusal or fault,
        demoted=bool(refusal),
        tied=result is not None and any(_same(config, before.config) for config in result.ties),
        interrupted=result is not None and result.interrupted,
    )


def _same(a: Config, b: Config) -> bool:
    return config_key(a) == config_key(b)
