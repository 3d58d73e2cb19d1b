"""Time launches with CUDA events: timers of one launch, adaptive sampling, and a probe of clock drift."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from autotile.core.model import L2Mode, Measurement
from autotile.core.statistics import DISCARD_RATIO, contenders, is_decided, median_interval
from autotile.core.text import plural
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError

Launch = Callable[[], None]
"""Queues work on the current stream; one with an attribute ``count`` above 1 queues so many kernels."""


def no_work() -> None:
    """Queue nothing."""


BATCH_BELOW_US = 50.0
"""Kernels shorter than this are timed in batches; the resolution of events is one percent of it."""
_EVENT_STEP_US = 0.5
"""Resolution of CUDA events."""
_BATCH_US = 200.0
_MAX_BATCH_LAUNCHES = 64
_CHUNK_US = 5000.0
"""Duration of the launches that are queued together back to back, longer than the host takes to queue the next ones."""
_QUEUED_CHUNKS = 2


LaunchTimer = Callable[[], tuple[bool, Callable[[], float]]]
"""Queues the work of a sample of a launch's time on the current stream.

Returns whether the GPU may have waited for the host meanwhile, and a function that waits for the work, and returns the
time in microseconds."""


def event_timer(launch: Launch, flush: Launch) -> LaunchTimer:
    """Time one launch between two events, after a flush of the L2 cache, which does nothing for a hot cache."""
    start, stop = _events(2)

    def time_us() -> float:
        stop.synchronize()
        return _elapsed_us(start, stop)

    def sample() -> tuple[bool, Callable[[], float]]:
        flush()
        start.record()
        launch()
        stop.record()
        return bool(start.done), time_us

    return sample


def batch_timer(launch: Launch, flush: Launch, probe_us: float) -> LaunchTimer:
    """Time a CUDA graph of many launches, each after a flush, and subtract the time of a graph of the flushes alone.

    Every sample runs both graphs, one after the other, so that both are affected alike by a drift of the memory clock.
    The number of launches is chosen by their approximate time so that the batch takes about 200 us. A time is that of a
    launch, at least the resolution.
    """
    count = _batched(probe_us)
    empty, full = _capture([flush], count), _capture([flush, launch], count)
    start, middle, stop = _events(3)
    for graph in (empty, full):
        graph()  # the first launch of a graph uploads it to the device

    def time_us() -> float:
        stop.synchronize()
        empty_us = _elapsed_us(start, middle)
        return max(_elapsed_us(middle, stop) - empty_us, _EVENT_STEP_US) / count

    def sample() -> tuple[bool, Callable[[], float]]:
        start.record()
        empty()
        began_late = start.done
        middle.record()
        full()
        stop.record()
        return bool(began_late or middle.done), time_us

    return sample


def _batched(probe_us: float) -> int:
    """Return the number of launches in a CUDA graph."""
    return max(1, min(_MAX_BATCH_LAUNCHES, round(_BATCH_US / probe_us)))


def _queue_all(steps: Sequence[Launch]) -> None:
    for step in steps:
        step()


def _capture(steps: Sequence[Launch], count: int, *, is_uploaded: bool = False) -> Launch:
    """Capture ``count`` repetitions of the steps in a CUDA graph; return a function that launches it.

    The current stream must not be the default one. If the graph is not uploaded here, its first launch does it.
    """
    stream = load_cupy().cuda.get_current_stream()
    stream.begin_capture()
    try:
        for _ in range(count):
            _queue_all(steps)
    finally:
        graph = stream.end_capture()
    if is_uploaded:
        graph.upload(stream)
    return lambda: graph.launch(stream)


def _as_one(launch: Launch) -> Launch:
    """Return a launch of several kernels as a CUDA graph, so that the host does not delay them; others as they are."""
    return launch if getattr(launch, "count", 1) == 1 else _capture([launch], 1, is_uploaded=True)


def _events(count: int) -> list[Any]:
    event = load_cupy().cuda.Event
    return [event() for _ in range(count)]


def _elapsed_us(start: Any, stop: Any) -> float:
    return 1e3 * float(load_cupy().cuda.get_elapsed_time(start, stop))


_PROBE_SAMPLES = 3
_PART_SAMPLES = 5
_TARGET_HALF_WIDTH = 0.005
_MIN_SAMPLES = 9
"""A distribution-free 95 % interval of the median needs at least six samples; nine give a narrower one."""
_MAX_SAMPLES = 200
_QUEUED_SAMPLES = 16
"""Samples that are queued before the host waits, so that the GPU does not idle."""
_FILLS, _FILL_BYTES = 64, 1 << 14
"""Fills in a CUDA graph that occupy the GPU for about 75 us; the host takes as long for those of a few bytes."""
_MAX_FILL_GRAPHS = 32
"""Such graphs before a sample, 2.4 ms, where the host is that slow."""
_MAX_REPEATING_S = 0.1
"""Time of a measurement, or a race, in which samples are taken again where the host was late."""
_MIN_WARM_UP_S = 0.3
_MAX_WARM_UP_S = 2.0
_KEEPS_CLOCK_S = 1.0
"""After a second without work, an H200 runs a kernel at its full clock again from the third launch on."""
_BRIEF_SPIN = 1_200_000
"""Iterations of a kernel of about 6 ms at 2 GHz."""
_SETTLED_CHANGE = 0.01
_LOOKS = (6, 9, 12, 15, 20, 25, 30, 45, 60)
"""Rounds of a race after which the clearly slower candidates leave it, and it may end; the interval of 6 pairs is from
the least to the largest, that of 15 from the 4th to the 12th of them. In simulation, at 0.8 % noise with drift, 13
finalists left a winner 0.05 % off with a precision of 0.5 %, and 0.03 % with 60 rounds, 2.7 times as many launches."""


class Timer:
    """Times launches on a stream of its own.

    With a ``cold`` L2, a buffer of the size of the L2 cache is written before each launch, so that inputs are read from
    memory. ``limit_s`` is the maximum GPU time of the samples of a measurement, beyond the first nine.
    """

    _warming: ClassVar[threading.Thread | None] = None
    """Lets the clocks rise, whichever timer of the process began it."""
    _is_awaited: ClassVar[threading.Event] = threading.Event()

    def __init__(self, l2_bytes: int, l2: L2Mode, limit_s: float) -> None:
        cupy = load_cupy()
        self.l2 = l2
        self._limit_us = 1e6 * limit_s
        self._stream: Any = cupy.cuda.Stream()
        self._flush_bytes = max(l2_bytes, 1 << 20)
        self._flush_memory: Any = cupy.cuda.alloc(self._flush_bytes)
        self._fill: Launch | None = None
        """A graph in which the host gets ahead."""
        self._fill_graphs = 1
        """Number of these: doubled where the host was late, and less by one where it was not."""
        self._repeating_s = 0.0
        """Time that is left for samples to be taken again."""
        self._used_at = -math.inf
        """Time of the last measurement or warming launch, by `time.perf_counter`."""

    def begin_warm_up(self, spin: Callable[[int], object]) -> None:
        """Launch ``spin``, given its iterations, in a thread until a `warm_up`, for 0.3 s at least and 2 s at most.

        Each launch ends before the next: the driver loads no module while any is queued. Once in a process.
        """
        if Timer._warming is not None:
            return
        cuda = load_cupy().cuda
        device, stream, start = cuda.Device(), cuda.Stream(non_blocking=True), time.perf_counter()
        with stream:
            spin(_BRIEF_SPIN)  # here, where an error of loading it is raised

        def warm() -> None:
            with suppress(Exception):
                device.use()  # to leave it would make a context on the first device
                with stream:
                    while (spent_s := time.perf_counter() - start) < _MAX_WARM_UP_S:
                        if spent_s >= _MIN_WARM_UP_S and Timer._is_awaited.is_set():
                            return
                        spin(_BRIEF_SPIN)
                        stream.synchronize()
                        self._used_at = time.perf_counter()

        Timer._warming = threading.Thread(target=warm, daemon=True)
        Timer._warming.start()

    def warm_up(self, launch: Launch, prepare: Launch = no_work) -> None:
        """Launch until the clock has settled, so that two consecutive medians agree within 1 %.

        That is for at least 0.3 s, unless the device was in use in the last second.
        """
        if Timer._warming is not None:
            Timer._is_awaited.set()
            Timer._warming.join()
        start = time.perf_counter()
        least_s = _MIN_WARM_UP_S if start - self._used_at > _KEEPS_CLOCK_S else 0.0
        last = float("inf")
        while True:
            median = float(np.median(self.samples(launch, 10, prepare)))
            elapsed = time.perf_counter() - start
            settled = abs(median - last) <= _SETTLED_CHANGE * median
            if (elapsed >= least_s and settled) or elapsed >= _MAX_WARM_UP_S:
                return
            last = median

    def event_floor_us(self) -> float:
        """Return the time between two consecutive events in microseconds, the shortest that can be measured."""
        return float(np.median(self.samples(no_work, 20)))

    def samples(self, launch: Launch, count: int, prepare: Launch = no_work, *, repeats: bool = True) -> list[float]:
        """Return the times of ``count`` single launches, in microseconds; ``prepare`` as for `measure`.

        With ``repeats``, there are more launches where the host was late.
        """
        before = self._before(prepare)
        self._repeating_s = _MAX_REPEATING_S * repeats
        with self._stream:
            single = _as_one(launch)
            return self._sample([event_timer(single, before) for _ in range(min(count, _QUEUED_SAMPLES))], count)

    def parts(self, parts: Sequence[Sequence[Launch]], prepare: Launch = no_work) -> list[float]:
        """Return the median time of each part of a call in microseconds, measured between events; see `measure`."""
        before = self._before(prepare)
        rows = []
        with self._stream:
            for _ in range(_PART_SAMPLES):
                self._occupy()
                before()
                events = _events(len(parts) + 1)
                events[0].record()
                for part, end in zip(parts, events[1:], strict=True):
                    for launch in part:
                        launch()
                    end.record()
                events[-1].synchronize()
                rows.append([_elapsed_us(start, end) for start, end in pairwise(events)])
        return [round(float(median), 3) for median in np.median(rows, axis=0)]

    def measure(self, launch: Launch, best_us: float | None, prepare: Launch = no_work) -> tuple[Measurement, bool]:
        """Measure the median time and its interval, to half a percent or until the limits of time and samples.

        Kernels shorter than 50 us are timed in CUDA graphs of many launches. Return the measurement, and whether it was
        stopped early, after three samples, as the candidate is clearly slower than the best time so far.

        ``prepare`` queues work before each launch, which is not timed: it overwrites the outputs, so that a kernel
        gains nothing by leaving a result of an earlier launch as it is.
        """
        times = self.samples(launch, _PROBE_SAMPLES, prepare)
        probe_us = float(np.median(times))
        with self._stream:
            timers = self._timers(launch, probe_us, prepare)
            if probe_us < BATCH_BELOW_US:
                times = self._sample(timers, _PROBE_SAMPLES)
            typical_us = float(np.median(times))
            resolution_us = _EVENT_STEP_US / (_batched(probe_us) if probe_us < BATCH_BELOW_US else 1)
            if best_us is not None and typical_us > DISCARD_RATIO * best_us:
                return self._measurement(times, resolution_us), True
            affordable = int(np.clip(self._limit_us / probe_us, _MIN_SAMPLES, _MAX_SAMPLES))
            times += self._sample(timers, _MIN_SAMPLES - len(times))
            while len(times) < affordable:
                interval = median_interval(times)
                if (interval.high - interval.low) / 2 <= max(_TARGET_HALF_WIDTH * interval.value, resolution_us / 2):
                    break
                times += self._sample(timers, min(len(times), affordable - len(times)))
        return self._measurement(times, resolution_us), False

    def race(
        self,
        launches: Sequence[Launch],
        rounds: int,
        seed: int,
        *,
        prepares: Sequence[Launch] | None = None,
        weights: Sequence[float] | None = None,
        check: Callable[[int], None] | None = None,
        graphs: bool = True,
        precision: float = 0.0,
    ) -> list[list[float]]:
        """Time several candidates in rounds of random order; return a list of times in microseconds per candidate.

        A drift of clock or temperature then affects all candidates alike, and the times of a round can be compared in
        pairs. After some of the rounds, candidates that are clearly slower than the fastest leave the race, so the
        lists differ in length; the first times of all lists are of the same rounds. It ends early if all is known to
        ``precision``, see `autotile.core.statistics.is_decided`.

        ``seed`` is that of the order within the rounds, and ``prepares`` are as ``prepare`` of `measure`. Candidates
        are compared by their times multiplied by ``weights``. ``check`` is called with the number of each candidate
        right after the work of one more sample of it. Short launches are timed in CUDA graphs, unless one of them
        cannot be captured (``graphs``).
        """
        prepares = prepares or [no_work] * len(launches)
        factors = weights or [1.0] * len(launches)
        generator = np.random.default_rng(seed)
        pairs = list(zip(launches, prepares, strict=True))
        probes = [self.samples(launch, _PROBE_SAMPLES, prepare, repeats=graphs) for launch, prepare in pairs]
        fastest_us = min(map(min, probes))
        times: list[list[float]] = [[] for _ in launches]
        with self._stream:
            timers = [
                self._timers(launch, fastest_us, prepare)[0] if graphs else event_timer(launch, self._before(prepare))
                for launch, prepare in pairs
            ]
            racing = list(range(len(launches)))
            self._repeating_s = _MAX_REPEATING_S * graphs  # what cannot be captured may wait for the GPU itself
            for number in range(1, rounds + 1):
                order = generator.permutation(racing)
                for index, time_us in zip(order, self._punctual([timers[n] for n in order]), strict=True):
                    times[index].append(time_us)
                if number in _LOOKS:
                    weighted = [
                        [weight * time_us for time_us in row] for weight, row in zip(factors, times, strict=True)
                    ]
                    racing = contenders(weighted, racing)
                    if is_decided(weighted, racing, precision):
                        break
        if check is not None:
            for index, timer in enumerate(timers):
                with self._stream:
                    _, wait = timer()
                    wait()
                check(index)
        return times

    def can_capture(self, launch: Launch) -> bool:
        """Return True if a launch can be captured in a CUDA graph, as some libraries cannot."""
        with self._stream:
            try:
                _capture([launch], 1)
            except Exception:  # of whatever the library is made of
                return False
        return True

    @contextmanager
    def back_to_back(self, step: Sequence[Launch], probe_us: float) -> Iterator[tuple[Launch, Callable[[], float]]]:
        """Repeat a step of about ``probe_us``, a flush and a launch, without letting the GPU idle.

        Yield two functions: one that keeps two chunks of steps queued, to be called every few milliseconds, and one
        that waits for the queued steps and returns the mean time of a step in microseconds. Short steps are repeated in
        CUDA graphs, as in `batch_timer`.
        """
        with self._stream:
            count = _batched(probe_us) if probe_us < BATCH_BELOW_US else 1
            queue = _capture(step, count) if count > 1 else partial(_queue_all, step)
            calls = max(1, round(_CHUNK_US / (count * probe_us)))
            runs, ends = 0, deque[Any]()
            queue()  # the first launch of a graph uploads it to the device
            (start,) = _events(1)
            start.record()

            def keep_going() -> None:
                nonlocal runs
                while ends and ends[0].done:
                    ends.popleft()
                while len(ends) < _QUEUED_CHUNKS:
                    for _ in range(calls):
                        queue()
                    runs += calls * count
                    ends.extend(_events(1))
                    ends[-1].record()

            def mean_us() -> float:
                ends[-1].synchronize()
                return _elapsed_us(start, ends[-1]) / runs

            keep_going()
            yield keep_going, mean_us

    def _timers(self, launch: Launch, probe_us: float, prepare: Launch) -> Sequence[LaunchTimer]:
        """Return the timers of a launch of about ``probe_us``, whose samples can be queued one behind the other."""
        before = self._before(prepare)
        if probe_us < BATCH_BELOW_US:
            return [batch_timer(launch, before, probe_us)]
        single = _as_one(launch)
        return [event_timer(single, before) for _ in range(_QUEUED_SAMPLES)]

    def _before(self, prepare: Launch) -> Launch:
        """Return the work before a launch: the flush comes last, so that it evicts what ``prepare`` left in the L2."""
        return partial(_queue_all, [prepare, self.flush])

    def _sample(self, timers: Sequence[LaunchTimer], count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            times += self._punctual(timers[: count - len(times)])
        self._used_at = time.perf_counter()
        return times

    def _punctual(self, timers: Sequence[LaunchTimer]) -> list[float]:
        """Return a sample of each timer, queued one behind the other; of a late host only if no time is left."""
        while True:
            begin_s = time.perf_counter()
            self._occupy()
            samples = [timer() for timer in timers]
            is_late, times = any(late for late, _ in samples), [time_us() for _, time_us in samples]
            if not is_late or self._repeating_s <= 0.0:
                self._fill_graphs = max(self._fill_graphs // 2 if is_late else self._fill_graphs - 1, 1)
                return times
            self._repeating_s -= time.perf_counter() - begin_s
            self._fill_graphs = min(2 * self._fill_graphs, _MAX_FILL_GRAPHS)

    def _occupy(self) -> None:
        """Queue work in which the host gets ahead: an idle GPU would time the host between an event and a launch."""
        if self._fill is None:
            self._fill = _capture([lambda: self._flush_memory.memset_async(0, _FILL_BYTES)], _FILLS)
        for _ in range(self._fill_graphs):
            self._fill()

    def flush(self) -> None:
        """Queue a flush of the L2 cache; do nothing if it is to stay hot."""
        if self.l2 == "cold":
            self._flush_memory.memset_async(0, self._flush_bytes)

    def _measurement(self, times: Sequence[float], resolution_us: float) -> Measurement:
        interval, slack_us = median_interval(times), resolution_us / 2
        low, high = min(interval.low, interval.value - slack_us), max(interval.high, interval.value + slack_us)
        return Measurement(interval.value, low, high, tuple(round(t, 3) for t in times), self.l2)


_SPIN_ITERATIONS = 12_000
"""About 60 us at 2 GHz: long enough for events, and short compared with the samples of a candidate."""
_DRIFT_SAMPLES = 3


def drift_us(support: SupportKernels, timer: Timer, sm_count: int) -> float:
    """Return the current time of a kernel of dependent multiply-adds, one block per SM, in microseconds.

    It takes a fixed number of clock cycles, so that its time varies with the clock and with other load on the GPU, but
    not with the candidates. The least of a few samples, as a host that stalls lengthens one or two of them.
    """
    return round(min(timer.samples(lambda: support.spin(sm_count, _SPIN_ITERATIONS), _DRIFT_SAMPLES)), 3)


_IDLE_PERCENT = 5
"""Share of the last second, in percent, in which an idle GPU may run a kernel, such as that of a display."""


class Nvml:
    """Readings of NVML for a CUDA device; empty if NVML is missing or fails.

    The NVML device is found by its PCI address, as CUDA and NVML number devices differently.
    """

    def __init__(self, index: int = 0) -> None:
        self._nvml: Any = None
        with suppress(Exception):  # NVML is optional: tuning works in a container without it
            import pynvml

            pynvml.nvmlInit()
            address = load_cupy().cuda.runtime.deviceGetPCIBusId(index)
            self._device = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            self._nvml = pynvml

    def read(self) -> dict[str, float | int]:
        """Return SM clock (MHz), power (W), temperature (degrees Celsius) and throttle reasons (bit mask of NVML)."""
        if self._nvml is None:
            return {}
        nvml, device = self._nvml, self._device
        values = {
            "sm_clock_mhz": self._read(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
            "power_w": self.power_w(),
            "temperature_c": self._read(lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            "throttle_reasons": self._read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device)),
        }
        return {name: value for name, value in values.items() if value is not None}

    def energy_mj(self) -> float | None:
        """Return the energy used since the driver was loaded, in millijoules; None if NVML does not report it.

        The counter is updated between a few times and some tens of times per second.
        """
        return self._read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def power_w(self) -> float | None:
        """Return the power in watts, from Ampere on averaged over a second; None if NVML does not report it."""
        return self._read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3)

    def other_users(self) -> tuple[str, ...]:
        """Return the other users of the GPU, one line each; to be called before this process has a context on it."""
        if self._nvml is None:
            return ()
        nvml, found = self._nvml, []
        try:
            others = [one for one in nvml.nvmlDeviceGetComputeRunningProcesses(self._device) if one.pid != os.getpid()]
            if others:
                listed = ", ".join(str(one.pid) for one in others[:5])
                found.append(f"{plural(len(others), 'other process', 'other processes')} on the GPU (PID {listed})")
        except nvml.NVMLError:
            pass
        busy = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(self._device).gpu)
        if busy is not None and busy > _IDLE_PERCENT:
            found.append(f"the GPU was {busy} % busy before the measurement")
        return tuple(found)

    def _read(self, reading: Callable[[], float | int]) -> float | int | None:
        if self._nvml is None:
            return None
        try:
            return reading()
        except self._nvml.NVMLError:
            return None


_COUNTER_RUN_IN_S = 0.15
"""Time before the first reading of the energy counter, whose value may be 100 ms old."""
_POWER_RUN_IN_S = 1.0
"""Time before the first reading of the power, which from Ampere on is averaged over a second."""
_MIN_WINDOW_S = 0.2
"""Minimum averaging time."""
_MIN_ENERGY_MJ = 1000.0
"""Minimum energy within the averaging time; the counter's resolution of 1 mJ is 0.1 % of it."""
_LIMIT_S = 5.0
_POLL_S = 5e-4
"""Polling interval, and so the uncertainty of the time of a counter update: 0.25 % of the minimum averaging time."""
_MIN_SHARE = 0.01
"""Minimum share of a launch in the energy of a launch and its flush; smaller values cannot be resolved."""
_FLUSHES = 3
_DIGITS = 4


def energy_meter(timer: Timer, telemetry: Nvml) -> Callable[[Launch, float], dict[str, float | str]]:
    """Return a function that measures the energy of a launch with NVML's energy counter or, without it, power readings.

    Both are of the whole board and are updated about ten times per second, so the candidate is launched back to back
    until a steady power can be determined. With a cold L2 each launch follows a flush, whose energy is measured once by
    itself and subtracted. That NVML reports neither is an `InputError`.

    The function takes a launch and about its time in microseconds. It returns the energy in millijoules and the source
    of the readings, by their names in `Trial.telemetry`.
    """
    # Even an idle GPU uses some millijoules in a tenth of a second; a counter that stands still is none.
    first_mj, begin_s, is_counted = telemetry.energy_mj(), time.perf_counter(), False
    while first_mj is not None and not is_counted and time.perf_counter() - begin_s < 1.0:
        is_counted = telemetry.energy_mj() != first_mj
        if not is_counted:
            time.sleep(_POLL_S)
    if not is_counted and telemetry.power_w() is None:
        raise InputError(
            "NVML reports neither the energy nor the power of this GPU; leave the objective energy out, "
            "and see `autotile doctor`"
        )
    flush: tuple[float, float] | None = (0.0, 0.0) if timer.l2 == "hot" else None  # its time (us) and energy (mJ)

    def energy_mj(step: Sequence[Launch], time_us: float) -> float:
        last_s, sum_mj = time.perf_counter(), 0.0

        def integrated_mj() -> float | None:
            nonlocal last_s, sum_mj
            now_s, power_w = time.perf_counter(), telemetry.power_w()
            if power_w is None:
                return None
            sum_mj += 1e3 * power_w * (now_s - last_s)
            last_s = now_s
            return sum_mj

        read_mj, run_in_s = (telemetry.energy_mj, _COUNTER_RUN_IN_S) if is_counted else (integrated_mj, _POWER_RUN_IN_S)
        first: tuple[float, float] | None = None
        with timer.back_to_back(step, time_us) as (keep_going, mean_us):
            begin_s, before_mj = time.perf_counter(), read_mj()
            while time.perf_counter() - begin_s < _LIMIT_S:
                keep_going()
                now_s, now_mj = time.perf_counter(), read_mj()
                if now_mj is None or before_mj is None:
                    break
                if now_mj != before_mj and now_s - begin_s > run_in_s:
                    first = first or (now_s, now_mj)
                    elapsed_s, used_mj = now_s - first[0], now_mj - first[1]
                    if elapsed_s >= _MIN_WINDOW_S and used_mj >= _MIN_ENERGY_MJ:
                        power_w = 1e-3 * used_mj / elapsed_s
                        return 1e-3 * power_w * mean_us()
                before_mj = now_mj
                time.sleep(_POLL_S)
        raise ToolchainError("NVML has stopped updating the energy of the GPU; leave the objective energy out")

    def read(launch: Launch, time_us: float) -> dict[str, float | str]:
        nonlocal flush
        if flush is None:
            flush_us = float(np.median(timer.samples(timer.flush, _FLUSHES)))
            flush = flush_us, energy_mj([timer.flush], flush_us)
        whole_mj = energy_mj([timer.flush, launch], flush[0] + time_us)
        found_mj = max(whole_mj - flush[1], _MIN_SHARE * whole_mj)
        return {"energy_mj": float(f"{found_mj:.{_DIGITS}g}"), "energy_source": "counter" if is_counted else "power"}

    return read
