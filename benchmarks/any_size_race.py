"""Races of served kernels with the library, on the GPU: arrays, verification, and interleaved timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from any_size_draw import Sizes
from any_size_report import ROW_KEYS, Row
from any_size_subjects import Launch, Subject, values

from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.statistics import paired_ratio
from autotile.cuda.compiler import compile_job
from autotile.cuda.driver import live_device
from autotile.cuda.timing import BATCH_BELOW_US, Timer, event_timer
from autotile.settings import read_settings
from autotile.workers.compile_pool import CompilePool

_PROBES = 3
_MIN_ROUNDS, _MAX_ROUNDS = 5, 45
_BATCH_US, _MAX_LAUNCHES = 200.0, 64
"""A batch of short launches, as in autotile.cuda.timing."""
_COMPILE_S = 120.0
_PARTS = 64
_WIDE = 0.05
"""Half width of the interval of a ratio, above which something else ran on the machine, and the race is repeated."""


def errors_of(got: Any, theirs: Any, exact_at: Callable[[Any], Any | None]) -> tuple[float | None, float | None]:
    """Return the largest errors of a result and of the library's, relative to the larger of the element and the RMS.

    If elements of the exact result are known, they are compared where the two results differ most, and at random
    positions. If not, the library's result counts as exact, and its error is None. An error is None if there is a NaN.
    """
    rms = float(cupy.sqrt(cupy.mean(cupy.square(theirs), dtype=np.float64)))
    difference = cupy.abs(got - theirs) / cupy.maximum(cupy.abs(theirs), rms)
    difference = cupy.where(got == theirs, 0, difference).ravel()
    positions = _compared(difference)
    exact = exact_at(positions)
    if exact is None:
        return _finite(difference.max()), None
    scale = cupy.maximum(cupy.abs(exact), rms)
    ours, library = (_finite((cupy.abs(one.ravel()[positions] - exact) / scale).max()) for one in (got, theirs))
    return (ours if _finite(difference.max()) is not None else None), library


def _compared(difference: Any) -> Any:
    """Return the positions of the largest difference in each of 64 parts, and as many random ones."""
    size = difference.size
    parts = min(_PARTS, size)
    length = size // parts
    worst = difference[: parts * length].reshape(parts, length).argmax(axis=1) + cupy.arange(parts) * length
    rest = cupy.arange(parts * length, size)
    return cupy.concatenate([worst, rest, cupy.asarray(np.random.default_rng(0).integers(0, size, _PARTS))])


def _finite(value: Any) -> float | None:
    found = float(value)
    return found if math.isfinite(found) else None


def compile_all(kernels: Sequence[Any]) -> dict[str, str]:
    """Compile served kernels that are not in the cubin cache, one on each core; return why some failed, by key."""
    settings, device = read_settings(), live_device()
    jobs = {}
    for kernel in kernels:
        job = compile_job(kernel.definition, kernel.config, kernel.problem, device.architecture)
        jobs[job.key] = job
    pool = CompilePool(settings, deadline_s=_COMPILE_S)
    try:
        waiting = {key: pool.submit(job) for key, job in jobs.items()}
        results = {key: future.result() for key, future in waiting.items()}
    finally:
        pool.close()
    return {key: result.reason for key, result in results.items() if result.cubin is None}


def is_usable() -> bool:
    """Return whether the CUDA context has survived."""
    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


class Race:
    """Times launches interleaved, with a cold L2."""

    def __init__(self) -> None:
        self._timer = Timer(live_device().l2_bytes, "cold", limit_s=0.1)
        self._stream = cupy.cuda.Stream()
        self._flush_us = 0.0
        self._can_capture: dict[str, bool] = {}

    def warm_up(self) -> None:
        """Flush until the clock has settled, and time a flush."""
        hot = Timer(1, "hot", limit_s=0.1)
        hot.warm_up(self._timer.flush)
        self._flush_us = float(np.median(hot.samples(self._timer.flush, 9)))

    def __call__(
        self, launches: Mapping[str, Launch], libraries: Mapping[str, Launch], share_s: float, seed: int
    ) -> dict[str, list[float]]:
        """Return times in microseconds by name.

        Times under 50 us are measured in CUDA graphs of many launches, others in graphs of one. A library that cannot
        be captured takes no part where times are short, unless there is no other: then there are no graphs.

        Parameters
        ----------
        launches, libraries
            Launches of the kernels and of the libraries, by different names, each of which ran once before.
        share_s
            Time that the race should take; there are 5 rounds at least, and 45 at most.
        seed
            Seed of the order within the rounds.
        """
        everyone = {**launches, **libraries}
        probes = {name: min(self._timer.samples(launch, _PROBES)) for name, launch in everyone.items()}
        fastest_us = min(probes.values())
        captured = [name for name, launch in libraries.items() if self._is_capturable(name, launch)]
        if captured and fastest_us < 2 * BATCH_BELOW_US:
            probes = {name: time_us for name, time_us in probes.items() if name in launches or name in captured}
        batched = bool(captured) and fastest_us < BATCH_BELOW_US
        count = max(1, min(_MAX_LAUNCHES, round(_BATCH_US / fastest_us))) if batched else 1
        round_us = sum(count * ((1 + batched) * self._flush_us + time_us) for time_us in probes.values())
        rounds = int(np.clip(1e6 * share_s / round_us, _MIN_ROUNDS, _MAX_ROUNDS))
        if captured:  # graphs even where they are timed one by one, so that the host's time is the same for all
            everyone |= {name: _as_graph(everyone[name]) for name in (*launches, *captured)}
        racing = [everyone[name] for name in probes]
        one_by_one = not batched and fastest_us < BATCH_BELOW_US
        times = self._one_by_one(racing, rounds, seed) if one_by_one else self._timer.race(racing, rounds, seed)
        return dict(zip(probes, times, strict=True))

    def _is_capturable(self, name: str, launch: Launch) -> bool:
        """Return whether the calls of a library can be captured; tried once."""
        if name not in self._can_capture:
            with self._stream:
                launch()
                self._stream.synchronize()
                self._stream.begin_capture()
                try:
                    launch()
                    self._can_capture[name] = True
                except Exception:
                    self._can_capture[name] = False
                finally:
                    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the failure may have ended the capture
                        self._stream.end_capture()
        return self._can_capture[name]

    def _one_by_one(self, launches: Sequence[Launch], rounds: int, seed: int) -> list[list[float]]:
        """Time short launches between events, all alike, with the host's overhead where it is longer."""
        generator = np.random.default_rng(seed)
        times: list[list[float]] = [[] for _ in launches]
        with self._stream:
            timers = [event_timer(launch, self._timer.flush) for launch in launches]
            for _ in range(rounds):
                for index in generator.permutation(len(launches)):
                    _, time_us = timers[index]()
                    times[index].append(time_us())
        return times


def _as_graph(launch: Launch) -> Launch:
    """Return a launch that a `Timer` captures in a graph, as it does with launches of several kernels."""

    def call() -> None:
        launch()

    call.count = 2  # type: ignore[attr-defined]
    return call


class Entry(NamedTuple):
    """What is served for a problem in a class."""

    name: str
    kernel: Any
    tuned: Any = None


def race_problem(
    subject: Subject, race: Race, sizes: Sizes, dtype: str, entries: Sequence[Entry], *, share_s: float, seed: int
) -> list[Row]:
    """Verify and time what is served for a problem in each class; return a row for each.

    Classes that are served the same configuration share its time.
    """
    kernels = {_identity(kernel): kernel for entry in entries for kernel in (entry.kernel, entry.tuned) if kernel}
    arrays = subject.arrays(sizes, dtype)  # the same for all: where an array lies changes a time by up to a tenth
    launches = {name: kernel.bind(*arrays) for name, kernel in kernels.items()}
    libraries = subject.libraries(arrays, sizes, dtype)
    wanted = [_result(launch, arrays[-1], dtype) for launch in libraries.values()][-1]
    exact_at = partial(subject.exact, sizes)
    errors = {
        name: errors_of(_result(launch, arrays[-1], dtype), wanted, exact_at) for name, launch in launches.items()
    }
    del wanted
    tolerance = output_tolerance(DTYPES[dtype], [DTYPES[dtype]], subject.reduction(sizes))
    if all(library is None for _, library in errors.values()):
        tolerance *= 2  # both results may differ from the exact one
    times = race(launches, libraries, share_s, seed)
    if (noise := _noise(times, libraries)) > _WIDE:
        again = race(launches, libraries, share_s, seed + 1)
        times = again if _noise(again, libraries) < noise else times
    through = min((name for name in libraries if name in times), key=lambda name: float(np.median(times[name])))
    rows = []
    for entry in entries:
        row = _row(entry, sizes, dtype, times, times[through])
        error, library_error = errors[_identity(entry.kernel)]
        rows.append(row | {"library": through, "error": error, "library_error": library_error, "tolerance": tolerance})
    return rows


def _result(launch: Launch, output: Any, dtype: str) -> Any:
    """Return a copy of what a launch writes."""
    output.fill(0xFF if output.dtype.kind in "iu" else float("nan"))  # bfloat16 is held as uint16, where this is a NaN
    launch()
    cupy.cuda.Device().synchronize()
    return values(output, dtype).copy()


def _row(entry: Entry, sizes: Sizes, dtype: str, times: Mapping[str, Sequence[float]], theirs: Sequence[float]) -> Row:
    served, tuned = times[_identity(entry.kernel)], times[_identity(entry.tuned)] if entry.tuned else None
    shared = min(len(served), len(theirs))
    ratio = paired_ratio(served[:shared], theirs[:shared])
    tuned_us = float(np.median(tuned)) if tuned else None
    return {
        **empty_row(entry.name, sizes, dtype),
        "ratio": ratio.value,
        "ratio_interval": [ratio.low, ratio.high],
        "served_us": float(np.median(served)),
        "library_us": float(np.median(theirs)),
        "tuned_us": tuned_us,
        "tuned_ratio": _paired(tuned, theirs) if tuned else None,
        "loss": _paired(tuned, served) - 1 if tuned else None,
        "tuned": described(entry.tuned) if tuned else None,
        "rounds": shared,
        **described(entry.kernel),
    }


def _noise(times: Mapping[str, Sequence[float]], libraries: Mapping[str, Launch]) -> float:
    """Return the widest half width of the intervals of the ratios to the fastest library."""
    through = min((name for name in libraries if name in times), key=lambda name: float(np.median(times[name])))
    theirs = times[through]
    ratios = (
        paired_ratio(mine[: len(theirs)], theirs[: len(mine)]) for name, mine in times.items() if name not in libraries
    )
    return max(ratio.relative_half_width for ratio in ratios)


def _paired(a: Sequence[float], b: Sequence[float]) -> float:
    shared = min(len(a), len(b))
    return paired_ratio(a[:shared], b[:shared]).value


def empty_row(name: str, sizes: Sizes, dtype: str, fault: str = "") -> Row:
    """Return the row of a problem for which there is no time."""
    return {**dict.fromkeys(ROW_KEYS), "class": name, "dtype": dtype, "sizes": sizes, "fault": fault}


def described(kernel: Any) -> Row:
    """Return who computes: kernel or library, configuration, tier, grid and waves."""
    found: Row = {"kernel": kernel.kernel, "config": dict(kernel.config), "tier": kernel.tier}
    if is_library(kernel):
        return found | {"grid": None, "waves": None}
    geometry, occupancy = kernel.geometry, kernel.occupancy
    resident = kernel.device.sm_count * occupancy.blocks_per_sm if occupancy else 0
    return found | {"grid": list(geometry.grid), "waves": round(geometry.blocks / resident, 3) if resident else None}


def is_library(kernel: Any) -> bool:
    """Return whether a library is served rather than a kernel."""
    return bool(getattr(kernel, "is_library", False))


def _identity(kernel: Any) -> str:
    config = " ".join(f"{name}={value}" for name, value in sorted(kernel.config.items()))
    return f"{kernel.kernel} {config}"
