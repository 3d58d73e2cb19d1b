"""Measures the ceilings of a GPU, in a worker process like all that touches CUDA.

Each ceiling is measured as a candidate is: after a warm-up under its own load, until the median is known to half a
percent, and with a check of what the launches computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.ceilings import CEILINGS, Ceiling, DeviceCeilings, impossible, imprecise
from autotile.core.statistics import median_interval
from autotile.errors import ToolchainError, WorkerError
from autotile.workers.child import GPU_WORKER, Child, Stage, parsed_reply

if TYPE_CHECKING:
    from autotile.cuda.ceiling_kernels import CeilingKernels, CeilingLoop
    from autotile.cuda.compiler import CubinCache
    from autotile.cuda.timing import Timer

_DEADLINE_S = 120.0
"""Ten times what a measurement takes, for a busy machine that compiles the kernels first."""
_TARGET_US = 1000.0
"""Time of a launch: long against the resolution of events and of the device's clocks, about a microsecond."""
_MAX_GROWTH = 64.0
_SAMPLE_LIMIT_S = 0.04
"""Time of the samples of a ceiling, beyond the first nine."""
_PROBES = 3
_CLOCKED_LAUNCHES = 40
"""Launches during which the clock is counted."""
_HOST_SAMPLES, _HOST_LAUNCHES = 15, 200
"""Samples of the time of a launch from the host, and launches of each: fewer than the 1,024 that a stream queues."""


def request_ceilings(cache: Path, cache_limit_bytes: int, device_index: int) -> DeviceCeilings:
    """Measure the ceilings of a GPU in a new worker, with a cubin cache; takes about ten seconds.

    Raise `ToolchainError` if the device or the toolchain does not work, or the device computes wrong results or
    impossible rates; `InputError` if the cache cannot be used.
    """
    request = {"cache": str(cache), "cache_limit_bytes": cache_limit_bytes, "device_index": device_index}
    try:
        with closing(Child(GPU_WORKER)) as child:
            return parsed_reply(child.request({"op": "ceilings", **request}, _DEADLINE_S), DeviceCeilings)
    except WorkerError as error:
        stage = f" in stage {error.stage!r}" if error.stage else ""
        raise ToolchainError(f"the ceilings cannot be measured{stage}: {error}; see `autotile doctor`") from None


def measure_ceilings(cache: CubinCache, device_index: int, stage: Stage) -> DeviceCeilings:
    """Measure in this process; raise `ToolchainError` if a kernel computed a wrong result, or a rate is impossible."""
    from autotile.cuda.ceiling_kernels import CeilingKernels
    from autotile.cuda.driver import device_uuid, live_device
    from autotile.cuda.timing import Nvml, Timer
    from autotile.cuda.toolchain import load_cupy

    stage("look for other processes")
    others = Nvml(device_index).other_users()
    stage("compile")
    load_cupy().cuda.Device(device_index).use()
    device = live_device(device_index)
    kernels = CeilingKernels(device, cache)
    timers = {l2 == "cold": Timer(device.l2_bytes, l2, _SAMPLE_LIMIT_S) for l2 in ("cold", "hot")}
    found: list[Ceiling] = []
    for loops in kernels.groups():
        stage(loops[0].ceiling)
        found.append(_ceiling(kernels, loops, timers[loops[0].is_flushed]))
    stage("launches")
    in_graph = timers[False].measure(kernels.empty, None)[0]
    found.append(Ceiling("launch_graph", in_graph.time_us, in_graph.low_us, in_graph.high_us, "empty kernel"))
    host = median_interval([kernels.host_launch_us(_HOST_LAUNCHES) for _ in range(_HOST_SAMPLES)])
    found.append(Ceiling("launch_host", host.value, host.low, host.high, "cuLaunchKernel of an empty kernel"))
    names = list(CEILINGS)
    measured = DeviceCeilings(
        gpu_uuid=device_uuid(device_index),
        gpu_name=device.name,
        compute_capability=device.compute_capability,
        driver=device.driver,
        measured_at=datetime.now(UTC),
        ceilings=tuple(sorted(found, key=lambda one: names.index(one.name))),
    )
    if faults := impossible(measured, device):
        raise ToolchainError(f"a rate is impossible, so nothing is stored: {'; '.join(faults)}")
    warnings = [*others, *imprecise(measured)]
    if device.compute_capability.startswith("10."):
        warnings.append("tensor cores were measured with mma.sync, which reaches a part of the rate of tcgen05")
    return replace(measured, warnings=tuple(warnings))


def _ceiling(kernels: CeilingKernels, loops: Sequence[CeilingLoop], timer: Timer) -> Ceiling:
    sized = [(loop, _rounds(loop, timer)) for loop in loops]
    probes = [_time_us(loop, rounds, timer) / (loop.work * rounds) for loop, rounds in sized]
    loop, rounds = sized[probes.index(min(probes))]
    launch = partial(loop.queue, rounds)
    timer.warm_up(launch, loop.prepare)
    measured = timer.measure(launch, None, loop.prepare)[0]
    clock_mhz = kernels.clock_mhz(launch, _CLOCKED_LAUNCHES)
    if fault := loop.fault(rounds):
        raise ToolchainError(f"{CEILINGS[loop.ceiling][0]}, {loop.method}: {fault}; the GPU computes wrong results")
    rate = 1e6 * loop.work * rounds
    value, low, high = (rate / time_us for time_us in (measured.time_us, measured.high_us, measured.low_us))
    return Ceiling(loop.ceiling, value, low, high, loop.method, clock_mhz)


def _rounds(loop: CeilingLoop, timer: Timer) -> int:
    """Return the odd number of rounds that take about a millisecond."""
    rounds = 1
    while rounds < loop.max_rounds:
        growth = min(_TARGET_US / _time_us(loop, rounds, timer), _MAX_GROWTH)
        if growth < 2.0:
            break
        rounds = min(int(rounds * growth) | 1, loop.max_rounds)
    return rounds


def _time_us(loop: CeilingLoop, rounds: int, timer: Timer) -> float:
    return min(timer.samples(partial(loop.queue, rounds), _PROBES, loop.prepare))
