"""Verification of tuned results on a GPU or by replay, and judgement of rewritten kernels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from autotile.api.targets import (
    check_device_index,
    checked_options,
    complete_config,
    open_problem,
    read_keywords,
    resolve_gpu,
    sizes_notice,
)
from autotile.core.argument_types import checked
from autotile.core.documents import attributes, to_document
from autotile.core.dtypes import known_dtype
from autotile.core.model import Config, Measurement, Problem, config_key, config_text, timed_config
from autotile.core.statistics import Interval
from autotile.core.text import NOTHING, RIGHT, Part, Result, ResultTable, plural, source_text, time_text
from autotile.cuda.driver import device_count, live_device
from autotile.database.database import Database, database_location
from autotile.database.keys import key_of
from autotile.database.winners import CHECKS
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, load_kernel, make_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import find_best_result, forget_served
from autotile.settings import absolute_path, read_settings, user_path
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import missed_problems
from autotile.tuning.verifying import MAX_RETIMED, CandidateCheck, check_served, judge, retime, tuned_problems

VerificationVerdict = Literal["confirmed", "replaced", "demoted", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class VerifiedProblem:
    """Verification of one problem."""

    problem: Problem
    device: str
    source: str
    """``cuda`` for measured times, ``replayed`` for those from a recording."""
    aged: tuple[str, ...]
    """Drivers and compilers that had changed since the result was measured, one phrase each."""
    before: Config
    before_measurement: Measurement | None
    """Configuration that was served, and its time when it was tuned; None if it was tuned for another problem."""
    after: Config | None
    after_measurement: Measurement | None
    """Configuration that is served now, and its time; None if only the default is left."""
    speedup: Interval | None
    """Time of the default over time of the fastest configuration, with its interval; None if unknown."""
    reason: str
    """Fault for which the served configuration was demoted, or for which nothing could be measured; else empty."""
    demoted: bool
    """Whether the configuration that was served failed."""
    tied: bool
    """Whether the time of the configuration that was served could not be told from that of the one served now."""
    interrupted: bool

    @property
    def verdict(self) -> VerificationVerdict:
        """Outcome in one word."""
        if self.interrupted:
            return "interrupted"
        if self.demoted:
            return "demoted"
        if self.speedup is None and self.reason:
            return "failed"
        is_same = self.after is not None and config_key(self.before) == config_key(self.after)
        return "confirmed" if is_same else "replaced"


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
                *(
                    time_text(measured.time_us if measured is not None else None, one.source)
                    for measured in (one.before_measurement, one.after_measurement)
                ),
                f"{one.speedup.value:.3f}" if one.speedup is not None else NOTHING,
                config_text(one.after) if one.after is not None else "the default",
                one.reason,
                "; ".join(one.aged),
            )
            for one in self.problems
        ]
        headings = ("problem", "verdict", *times, "configuration", "reason", "aged")
        yield ResultTable(headings, rows, ("reason", "aged", "configuration"))

    def to_json(self) -> Any:
        """Return one entry for each problem."""
        return to_document(
            [
                {
                    **one.problem.document(),
                    **attributes(one, "device", "aged", "verdict", "reason", "tied"),
                    "before": timed_config(one.before, one.before_measurement),
                    "after": timed_config(one.after, one.after_measurement) if one.after is not None else None,
                    "speedup": one.speedup,
                }
                for one in self.problems
            ]
        )


@checked
def verify(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    like: KernelName | None = None,
    config: Mapping[str, Any] | None = None,
    aged: bool = False,
    served: bool = False,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    announce: Callable[[str], None] = lambda _: None,
    **named: Any,
) -> VerifyResult | CandidateCheck:
    """Verify and time tuned results again on this GPU, or judge a rewritten kernel.

    The best three of each problem and the default are checked against the reference and timed side by side. The fastest
    that is correct is served from then on, of several that cannot be told apart the one that was served before; what
    fails is no longer served. With ``served``, configurations that were tuned for other sizes are checked at the sizes
    that programs asked for (see `autotile list --misses`); what fails there is no longer served for them.

    With ``like``, NEW.cu is compiled, launched and verified in place of the kernel's own source, with everything that a
    finalist goes through, and timed interleaved with the winner.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file; with ``like``, a rewritten source. Or a kernel from
        `autotile.kernel`.
    sizes
        Sizes and flags of the problems, such as M=4096. None for all problems.
    **named
        Sizes and options by name, as for `autotile.tune`.
    like
        Judge a rewritten source of this kernel: is it right, and how fast beside the winner.
    config
        With ``like``: its configuration; parameters left out are the winner's. None for the winner's.
    aged
        Only what was measured with another driver or compiler than the current.
    served
        Instead, what programs were served for problems that are not tuned; each configuration once.
    dtype
        Element type, one of the kernel's. None for all, or the kernel's first of given sizes.
    device
        GPU to run on: the name or the index of a GPU of this machine. None for the first.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    options
        Options of the sessions, of which ``sanitize``, ``replay``, ``workers`` and the timeouts apply.
    announce
        Called with a line of text before each session.

    Other Parameters
    ----------------
    verify_problem : list of sizes
        With ``like``: one more problem that it must be right on; sizes left out are the tuned ones. May be given again.
        None for the tuned problem and a ragged one.
    l2 : {'cold', 'hot'}, default 'cold'
        With ``like``: whether inputs start in memory or in the L2 cache.
    sanitize : bool, default False
        Run them under compute-sanitizer, too; none with a fault is served.

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
    if like is not None:
        if aged or served:
            raise InputError("--aged and --served select stored results; leave them out with --like")
        place: dict[str, Any] = {"device": device, "database": database}
        return check(cast("str", kernel), like, sizes, config=config, dtype=dtype, options=options, **place, **named)
    if isinstance(kernel, str | Path) and Path(kernel).suffix == ".cu":
        raise InputError(f"{kernel} is a source; name the kernel that it replaces with --like KERNEL")
    if aged and served:
        raise InputError("--aged selects tuned problems and --served untuned ones; give one of them")
    if config is not None or named.get("verify_problem") or named.get("l2", "cold") != "cold":
        raise InputError("--config, --verify-problem and --l2 are of a rewritten source; add --like KERNEL")
    given, options = read_keywords(kernel, sizes, named, options, database=database)
    dtype = None if dtype is None else known_dtype(dtype)
    if options.replay is None:
        if device_count() == 0:
            raise InputError("verifying runs kernels, and there is no CUDA device here; see `autotile doctor`")
        if device is None:
            check_device_index(options.device_index)
        else:
            options = replace(options, device_index=resolve_gpu(device))
    loaded = load_kernel(kernel)
    asked = resolve_problem(loaded.spec, given, dtype, defaults=True) if given else None
    if asked is not None and (assumed := sizes_notice(loaded.spec, asked.sizes, given)):
        announce(assumed)
    location = str(database_location(options.database))
    options = replace(options, database=location)
    if served:
        missed = missed_problems(kernel, options) if asked is None else []
        wanted = [one.problem for one, *_ in missed if dtype in (None, one.problem.dtype)] if asked is None else [asked]
        return VerifyResult(tuple(_verify_served(kernel, loaded, wanted, options, announce)))
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
    for problem, bests in found:
        before = _served(kernel, problem, options)
        if aged and not before.choice.aged:
            continue
        announce(f"{problem}: the best {MAX_RETIMED} and the default are measured again")
        result, fault, refused = retime(loaded, problem, bests, before.config, options)
        forget_served()  # the next look-up reads the database again
        after = _served(kernel, problem, options)
        is_tuned, key = after.tier != "default", config_key(before.config)
        refusal = refused.get(key, "")
        problems.append(
            VerifiedProblem(
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
                tied=result is not None and key in map(config_key, result.ties),
                interrupted=result is not None and result.interrupted,
            )
        )
    return VerifyResult(tuple(problems))


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
            key = config_key(before.config)
            if before.tier == "exact" or key in tried | _verified(before, loaded, options):
                break
            tried.add(key)
            announce(f"{problem}: verifying what is served ({before.tier})")
            interrupted, found, fault = False, None, "interrupted"
            try:
                found, fault = check_served(loaded, problem, before.config, options)
            except KeyboardInterrupt:
                interrupted = True
            forget_served()
            after = _served(kernel, problem, options)
            replaced = key != config_key(after.config)
            measured = found.candidate.measurement if found is not None and not replaced else None
            yield VerifiedProblem(
                problem=problem,
                device=before.device.name,
                source=before.source or before.device.source,
                aged=before.choice.aged,
                before=before.config,
                before_measurement=None,  # it is of another problem
                after=after.config,
                after_measurement=measured,
                speedup=found.speedup if found is not None else None,
                reason=fault,
                demoted=found is not None and not found.is_right and replaced,
                tied=False,
                interrupted=interrupted,
            )
            if interrupted:
                return
            if found is None or found.is_right:
                break


def _verified(served: BoundKernel, loaded: Kernel, options: TuneOptions) -> set[str]:
    """Return the configurations that were found to be correct for the problem of a served kernel, by `config_key`."""
    with Database.open_readonly(str(options.database)) or nullcontext() as opened:
        checks = opened.read(CHECKS, kernel=loaded.name, dtype=served.problem.dtype) if opened is not None else []
    requested = key_of(loaded, served.problem, served.device, l2_mode="cold")
    return {config for key, config, passed in checks if passed and key == requested}


def _served(kernel: KernelName, problem: Problem, options: TuneOptions) -> BoundKernel:
    index = options.device_index if options.replay is None else None
    return find_best_result(kernel, problem.dtype, index, str(options.database), problem.sizes)


@checked
def check(
    candidate: str | os.PathLike[str],
    like: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    **named: Any,
) -> CandidateCheck:
    """Verify a rewritten source of a kernel, and time it against the present winner.

    The source takes the place of the kernel's; entry, macros, launch, arguments and reference are those of the kernel.
    It is verified with everything that the winner of a session goes through: at the ragged sizes, the tuned and further
    ones, with guard bands around its arrays, outputs that are filled with NaNs before each launch, two sets of inputs
    in turn, so that a result kept from an earlier launch is wrong, and after timed launches. Then both are timed in
    interleaved rounds. Nothing is stored.

    Parameters
    ----------
    candidate
        Path of the source.
    sizes
        Problem sizes and flags; missing ones are taken from the search-space file.
    like, config, dtype, device, database, options, **named
        As for `autotile.verify`; of the options, ``verify_sizes``, ``sanitize``, ``l2`` and the timeouts apply.

    Raises
    ------
    InputError
        The candidate cannot be read, its configuration is not valid, there is no GPU, or as for `autotile.tune`.
    ToolchainError, WorkerError
        As for `autotile.tune`.

    Examples
    --------
    >>> check("rewritten.cu", "mine.toml", N=1 << 24)  # doctest: +SKIP
    <CandidateCheck: rewritten.cu for mine N=16777216 float32 on NVIDIA H200: right and faster than the winner: ...>
    """
    given, chosen = read_keywords(like, sizes, named, options, device=device, database=database)
    kernel, problem = open_problem(like, given, dtype)
    chosen = checked_options(kernel, problem, replace(chosen, transfer=False))
    location = str(database_location(chosen.database))
    index = chosen.device_index if device_count() > 0 else None  # `judge` reports that there is no GPU
    served = find_best_result(kernel, problem.dtype, index, location, problem.sizes)
    path = absolute_path(user_path(candidate, "a rewritten source"), "a rewritten source")
    if not path.is_file():
        raise InputError(f"there is no file {str(candidate)!r}; give the path of the rewritten CUDA C++ source")
    wanted = complete_config(kernel.spec, {**served.config, **(config or {})})
    judged = judge(
        kernel,
        make_kernel(kernel.spec, path),
        problem,
        configs=(wanted, served.config),
        settings=read_settings(),
        options=chosen,
    )
    notices = (*filter(None, [sizes_notice(kernel.spec, problem.sizes, given)]), *judged.notices)
    return replace(judged, source=str(candidate), tier=served.tier, notices=notices)
