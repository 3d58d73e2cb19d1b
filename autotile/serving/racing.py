"""First use, on request: race the best few ways to compute a problem on the caller's own arrays, and keep the fastest.

Contenders write to scratch outputs, are compared with each other, and are then timed in turns with a cold L2 cache, for
at most 20 ms of GPU time. Nothing is raced while the stream is captured, or if an output overlaps another array.

For programs that launch without CUDA graphs, contenders are raced on arrays of their own by the clock of the host.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import L2Mode, Measurement, Outcome, Trial
from autotile.core.statistics import median_interval
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.timing import LaunchTimer, event_timer
from autotile.cuda.toolchain import load_cupy, nvrtc_version
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.errors import AutotileError
from autotile.kernel.operation import Operation
from autotile.serving.arrays import CallArrays, as_cupy, new_array, on_stream
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Contender

BUDGET_US = 20_000.0
"""GPU time of a race."""
_MAX_ROUNDS = 20
_ROUNDS_BEFORE_DROPPING = 3
_DROP_BEYOND = 1.25
"""Ratio to the fastest beyond which a contender leaves the race."""
_EAGER_BUDGET_US = 500_000.0
"""Time of a race of launches by the host, of the wall."""
_BATCH, _BATCH_US = 50, 10_000.0
"""Launches of a sample of these, and the time that it may take if they are long, in microseconds."""
_AHEAD_US, _MAX_FLUSHES = 80.0, 8
"""Time of the flushes before a launch, in which the host queues it, so that its own time is not measured; and of how
many of them."""
_CHUNK = 1 << 24
"""Elements that are compared at once, which bounds the memory for it."""


class Raced(NamedTuple):
    """A contender with its times in microseconds, and the state of the L2 cache, or how it was launched."""

    kernel: BoundKernel
    times_us: list[float]
    l2: L2Mode = "cold"

    @property
    def measurement(self) -> Measurement:
        """Median time with its interval."""
        found = median_interval(self.times_us)
        return Measurement(found.value, found.low, found.high, l2=self.l2)


def _time_on_device(timer: LaunchTimer) -> float:
    """Launch once, and return the time on the GPU in microseconds."""
    _, time_us = timer()
    return time_us()


def _time_by_host(launch: Callable[[], object], count: int) -> float:
    """Return the time of a launch among ``count`` back to back, by the clock of the host in microseconds."""
    wait = load_cupy().cuda.get_current_stream().synchronize
    wait()
    begun_s = time.perf_counter()
    for _ in range(count):
        launch()
    wait()
    return 1e6 * (time.perf_counter() - begun_s) / count


def adopt_fastest(
    contenders: Sequence[BoundKernel],
    operation: Operation,
    location: str,
    served: BoundKernel,
    arrays: Sequence[Any],
    *,
    stream: Any,
    scalars: Mapping[str, float],
) -> None:
    """Race contenders on the arrays of a call, unless these or the stream do not allow it; ``served`` adopts the first.

    The times are stored in the database at ``location``.
    """
    cuda = load_cupy().cuda
    with cuda.Device(served._launch_device()), on_stream(arrays, stream), outside_of_captures():
        current = cuda.get_current_stream().ptr
        is_captured = current != 0 and bool(cuda.runtime.streamIsCapturing(current))
        raced = None if is_captured else race(contenders, arrays, scalars)
    if raced:
        fastest, measurement = raced[0].kernel, raced[0].measurement
        shown = tuple(
            Contender(one.kernel.kernel, one.kernel.config, one.measurement.time_us, is_library=one.kernel.is_library)
            for one in raced
        )
        fastest.choice = replace(fastest.choice, tier="exact", measurement=measurement, source="cuda", contenders=shown)
        served.adopt(fastest)
        with suppress(AutotileError):  # the program goes on without a database
            store_race(raced, operation, location)
    elif raced is not None:
        served.adopt(contenders[0])  # it would take too long, or too much memory


def race_as_launched(contenders: Sequence[BoundKernel]) -> list[Raced]:
    """Race contenders as a program launches them without a CUDA graph, on random numbers; the fastest first.

    The times are those of the wall, of a launch among many back to back, which the host's part limits if the GPU's is
    shorter. The list is empty if memory is short.
    """
    first, torch = contenders[0], sys.modules.get("torch")
    device, spec, cupy = first._launch_device(), first.definition.spec, load_cupy()
    with cupy.cuda.Device(device):
        like = None
        if torch is not None and torch.cuda.is_available():
            like = torch.empty(0, device=f"cuda:{device}")
        arrays = []
        for buffer in spec.buffers:
            if buffer.access == "in":
                element = buffer.element_type(first.problem.dtype, first.problem.sizes)
                made = new_array(like, first.shapes[buffer.name], element, zeroed=True)
                if like is not None and made.is_floating_point():
                    made.normal_()
                elif like is None and made.dtype.kind == "f":
                    made[...] = cupy.random.standard_normal(made.shape, dtype=np.float32)
                arrays.append(made)
        with on_stream(arrays):
            return race(contenders, arrays, {}, is_eager=True) or []


def race(
    contenders: Sequence[BoundKernel], arrays: Sequence[Any], scalars: Mapping[str, float], *, is_eager: bool = False
) -> list[Raced] | None:
    """Race contenders on CuPy's current stream, and return those that agree, the fastest first.

    The results are compared with those of the first library among them, else of the first kernel. Nothing is written to
    the arrays of the call, of which outputs may be left out. Without a race, as memory is short or one launch takes too
    long, the list is empty. These arrays cannot be raced on if an output overlaps another array, or results of its type
    cannot be compared: None. With ``is_eager``, launches are timed back to back by the host.
    """
    ordered = sorted(contenders, key=lambda one: not one.is_library)
    try:
        scratch = _scratch_of(ordered[0], arrays)
        return _race(ordered, scratch, scalars, is_eager=is_eager) if scratch is not None else None
    except load_cupy().cuda.memory.OutOfMemoryError:
        return []


def _race(
    ordered: Sequence[BoundKernel], scratch: Scratch, scalars: Mapping[str, float], *, is_eager: bool
) -> list[Raced]:
    expected, written, restore, agree = scratch
    budget_us = _EAGER_BUDGET_US if is_eager else BUDGET_US
    spent_us, entrants, once_us = 0.0, [], {}
    for number, kernel in enumerate(ordered):
        with suppress(Exception):  # what fails to compile, or to run, leaves the race
            kernel.load()
            target = expected if number == 0 else written
            if kernel.is_library:  # its first call of a process loads code, for longer than a race may take
                restore(target)
                kernel(*target, **scalars)
                load_cupy().cuda.get_current_stream().synchronize()
            restore(target)
            once_us[kernel] = _time_on_device(event_timer(partial(kernel, *target, **scalars), lambda: None))
            spent_us += once_us[kernel]
            if number == 0 or agree():
                entrants.append(Raced(kernel, [], "eager" if is_eager else "cold"))
        if number == 0 and (not entrants or len(ordered) * spent_us > budget_us):
            return []
        if spent_us > budget_us / 2:
            break
    racing = list(entrants)
    memory = load_cupy().cuda.alloc(max(ordered[0].device.l2_bytes, 1 << 20))

    def flush(count: int = 1) -> None:  # the L2 cache
        for _ in range(count):
            memory.memset_async(0, memory.mem.size)

    flushing = event_timer(flush, lambda: None)
    for _ in range(2):  # the first loads it
        flush_us = _time_on_device(flushing)
    flushes = min(math.ceil(_AHEAD_US / max(flush_us, 1.0)), _MAX_FLUSHES)
    samples: list[tuple[Callable[[], float], int]] = []
    """Of each entrant, the function that times a sample, and its number of launches."""
    for one in entrants:
        launch = partial(one.kernel, *written, **scalars)
        if is_eager:
            count = int(min(max(_BATCH_US / once_us[one.kernel], 3), _BATCH))
            samples.append((partial(_time_by_host, launch, count), count))
        else:
            samples.append((partial(_time_on_device, event_timer(launch, partial(flush, flushes))), 1))
    for turn in range(_MAX_ROUNDS):
        for one, (time_sample, count) in zip(entrants, samples, strict=True):
            if one in racing and spent_us < budget_us:
                one.times_us.append(time_sample())
                spent_us += count * one.times_us[-1] + (0.0 if is_eager else flushes * flush_us)
        if turn + 1 >= _ROUNDS_BEFORE_DROPPING:
            medians_us = [(one.measurement.time_us, one) for one in racing if one.times_us]
            best_us = min(median_us for median_us, _ in medians_us)
            racing = [one for median_us, one in medians_us if median_us <= _DROP_BEYOND * best_us]
        if spent_us >= budget_us or len(racing) == 1 < len(entrants):
            break
    return sorted((one for one in entrants if one.times_us), key=lambda one: one.measurement.time_us)


_COMPARED = {"float64", "float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32"}


Scratch = tuple[list[Any], list[Any], Callable[[Sequence[Any]], None], Callable[[], bool]]
"""Arrays of a call with copies in place of the outputs, for the results that are expected and for those of the others;
a function that gives outputs that are also read their content, and one that tells whether both sets of outputs are
equal, up to the rounding of their sums."""


def _scratch_of(kernel: BoundKernel, arrays: Sequence[Any]) -> Scratch | None:
    """Copy the outputs of a call, so that contenders write nothing of the caller's.

    None if an output overlaps another array, or the results cannot be compared.
    """
    spec, problem = kernel.definition.spec, kernel._code.problem
    full, views = CallArrays(spec, problem, kernel.config or spec.default, kernel._launch_device()).check(arrays)
    types = [b.element_type(problem.dtype, problem.sizes) for b in spec.buffers]
    given = [views[b.name] for b in spec.buffers]
    outputs = [i for i, b in enumerate(spec.buffers) if b.access != "in"]
    ranges = [(view.data.ptr, view.data.ptr + view.nbytes) for view in given]
    overlaps = any(
        ranges[i][0] < ranges[j][1] and ranges[j][0] < ranges[i][1]
        for i in outputs
        for j in range(len(ranges))
        if i != j
    )
    if overlaps or not all(types[i] in _COMPARED for i in outputs):
        return None
    inputs = [DTYPES[kind] for i, kind in enumerate(types) if i not in outputs]
    terms = max(problem.sizes.values(), default=1)
    tolerances = {i: 2 * output_tolerance(DTYPES[types[i]], inputs, terms) for i in outputs}
    expected, written = list(full), list(full)
    for made in (expected, written):
        for i in outputs:
            made[i] = new_array(full[i], tuple(given[i].shape), types[i], zeroed=False)

    def view(arrays: Sequence[Any], i: int) -> Any:
        return as_cupy(arrays[i], "scratch", types[i])

    def restore(arrays: Sequence[Any]) -> None:
        for i in outputs:
            if spec.buffers[i].is_read:
                view(arrays, i)[...] = given[i]

    def agree() -> bool:
        cupy = load_cupy()
        for i in outputs:
            x, y = view(expected, i).ravel(), view(written, i).ravel()
            for start in range(0, x.size, _CHUNK):
                a, b = (_values(v[start : start + _CHUNK], types[i]) for v in (x, y))
                finite = cupy.where(cupy.isfinite(a), a, 0)
                rms = cupy.sqrt(cupy.mean(finite * finite))
                is_close = cupy.abs(a - b) <= tolerances[i] * cupy.maximum(cupy.abs(finite), rms)
                if not bool((is_close | (a == b) | (cupy.isnan(a) & cupy.isnan(b))).all()):
                    return False
        return True

    return expected, written, restore, agree


def _values(stored: Any, element_type: str) -> Any:
    """Return stored numbers as float64 for wide types, else as float32."""
    if element_type == "bfloat16" and stored.dtype.itemsize == 2:
        return (stored.view("uint16").astype("uint32") << 16).view("float32")
    wide = element_type in {"float64", "int32", "uint32"}
    return stored.astype("float64" if wide else "float32")


def store_race(raced: Sequence[Raced], operation: Operation | None, location: str) -> None:
    """Store the times of a race, as tuning does: for each kernel, a run whose finals these are."""
    from autotile.database.database import Database

    by_key: dict[str, tuple[TuningKey, list[Raced]]] = {}
    version = nvrtc_version()
    for one in raced:
        kernel, library = one.kernel, one.kernel.library
        if library is None:
            key = key_of(kernel.definition, kernel.problem, kernel.device, nvrtc_version=version, l2_mode=one.l2)
        else:
            assert operation is not None
            of = operation, kernel.problem, kernel.device, library.name, library.version
            key = library_key(*of, nvrtc_version=version, l2_mode=one.l2)
        by_key.setdefault(key.digest, (key, []))[1].append(one)
    with Database.open(location) as database:
        for key, ranked in by_key.values():
            device = ranked[0].kernel.device
            trials = [Trial(one.kernel.config, Outcome.OK, "", "finals", measurement=one.measurement) for one in ranked]
            database.add_run(key, trials, sampler="race", device=device, phase="final", is_ranked=True)
