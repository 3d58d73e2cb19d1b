"""Faults in a session on several GPUs of one machine, for `benchmarks/faults.py --gpus`."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fault_runs import Disturbance, Run, Watch, at_random, run_session, some_configs
from instant_compilers import InstantCompilers

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.cuda.driver import live_device
from autotile.exchange.recording import Recording, find_recording, read_recording
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import Settings, read_settings
from autotile.tuning import gpu_group, session
from autotile.tuning.backend import workload_of
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.result import TuneResult
from autotile.workers.gpu import Backend, Gpu

KERNEL, SIZES = "sgemm_2d", {"M": 2048, "N": 2048, "K": 2048}
_DEADLINE_S = 10.0
"""Time-out of a candidate; a session has 30 s."""
_STALL_S = 5.0
"""Time beyond it after which a GPU without a sign of life is given up; a session has a minute."""
_SPREAD_S = 2.0
"""Random time before each kill: longer than a new worker takes to start, so that starting workers are killed, too."""
_STOP_S = 0.02
_WORKERS = (b"autotile.workers.bench", b"replaying_gpu_worker")


def run_gpu_faults(
    count: int, *, trials: int, kills: int, seed: int, seconds: float | None
) -> Iterator[dict[str, Any]]:
    """Disturb sessions on so many GPUs, and yield each one compared with the undisturbed one.

    Parameters
    ----------
    count
        Number of GPUs.
    trials
        Number of configurations to try.
    kills, seed
        Number of random kills, and the seed of these.
    seconds
        Time of a candidate on simulated GPUs, in seconds; None for real ones.
    """
    disturbances: dict[str, Disturbance] = {
        "GPU worker killed": one_kill(trials // 3),
        "one GPU hangs for good": hang(trials // 3),
        f"{kills} random kills of GPU workers": at_random(kills, trials, seed, kill_one, spread_s=_SPREAD_S),
    }
    with (
        tempfile.TemporaryDirectory() as name,
        simulated(seconds) if seconds is not None else on_gpus() as (device, recording),
    ):
        folder = Path(name)
        configs = some_configs(KERNEL, SIZES, device, trials, recording)

        def disturbed(what: str, disturb: Disturbance) -> Run:
            database = str(folder / f"{what}.db")
            options = TuneOptions(
                sampler=BRUTE_FORCE,
                only=tuple(configs),
                devices=tuple(range(count)),
                database=database,
                run_deadline_s=_DEADLINE_S,
                transfer=False,
            )
            return run_session(what, lambda watch: tune(folder / "cache", options, watch), database, disturb)

        undisturbed = disturbed("none", lambda watch: None)
        yield {"gpus": count, **undisturbed.compared(undisturbed, configs)}
        for what, disturb in disturbances.items():
            yield {"gpus": count, **disturbed(what, disturb).compared(undisturbed, configs)}


def tune(cache: Path, options: TuneOptions, watch: Watch) -> TuneResult:
    """Run the session of the benchmark."""
    kernel = load_kernel(KERNEL)
    settings = replace(read_settings(), cache=cache)
    return session.tune(kernel, resolve_problem(kernel.spec, SIZES, None), settings, options, watch)


def gpu_workers() -> list[int]:
    """Return the processes of this one's GPU workers, the oldest first."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if any(word in _WORKERS for word in words):
                found.append(pid)
    return sorted(found)


def kill_one(rng: Random) -> str | None:
    """Kill a random GPU worker; return None if none runs."""
    workers = gpu_workers()
    if not workers:
        return None
    pid = rng.choice(workers)
    os.kill(pid, signal.SIGKILL)
    return f"killed GPU worker {pid}"


def one_kill(after: int) -> Disturbance:
    """Return a disturbance that kills one GPU worker after so many trials."""

    def disturb(watch: Watch) -> None:
        if watch.await_trials(after) and (done := kill_one(Random(0))) is not None:
            watch.faults.append(done)

    return disturb


def hang(after: int) -> Disturbance:
    """Return a disturbance that stops the worker of one GPU, and each of its successors, after so many trials."""

    def disturb(watch: Watch) -> None:
        if not watch.await_trials(after):
            return
        doomed, *others = gpu_workers()
        while True:
            os.kill(doomed, signal.SIGSTOP)
            watch.faults.append(f"stopped GPU worker {doomed}")
            while doomed in (workers := gpu_workers()) or not set(workers) - set(others):
                if watch.ended.wait(_STOP_S):
                    return
            doomed = max(set(workers) - set(others))

    return disturb


@contextmanager
def short_stall() -> Iterator[None]:
    """Give up GPUs without a sign of life sooner than a session does."""
    known = gpu_group._MIN_STALL_S
    gpu_group._MIN_STALL_S = _STALL_S
    try:
        yield
    finally:
        gpu_group._MIN_STALL_S = known


@contextmanager
def on_gpus() -> Iterator[tuple[DeviceProperties, None]]:
    """Return the properties of this machine's first GPU."""
    with short_stall():
        yield live_device(), None


@contextmanager
def simulated(seconds: float) -> Iterator[tuple[DeviceProperties, Recording]]:
    """Let sessions run on processes that replay a recording, with compilers that take no time; return both."""
    found = find_recording(read_settings().recording_folders, KERNEL, SIZES, "float32")
    assert found is not None
    folder = str(Path(__file__).parent)
    os.environ |= {
        "BENCHMARK_RECORDING": str(found),
        "BENCHMARK_SECONDS": str(seconds),
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
    }
    recording = read_recording(found)
    device = ReplayBackend(recording).device
    known = session.choose_backend, session.CompilePool

    def choose(
        kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, *others: Any, **lane: Any
    ) -> Backend:
        workload = workload_of(kernel, problem, settings, options)
        gpus = [
            Gpu(
                replace(workload, device_index=index),
                options.run_deadline_s,
                "replaying_gpu_worker",
                uuid=f"simulated-{index}",
                device=device,
            )
            for index in options.devices
        ]
        return GpuGroup(gpus, options.run_deadline_s)

    session.choose_backend = choose
    session.CompilePool = InstantCompilers
    try:
        with short_stall():
            yield device, recording
    finally:
        session.choose_backend, session.CompilePool = known
