"""A whole session over faulty configurations, with real compile workers and a fake GPU worker; needs no GPU."""

import timeit
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem
from autotile.cuda.compiler import compile_job
from autotile.settings import Settings
from autotile.tuning.lanes import Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Workload
from faults.fault_kit import HEALTHY, fault_kernel, read_faults
from faults.fault_session import tune_faults
from faults.traces import no_traces

EXPECTED = {fault.name: fault for fault in read_faults()}
AS_IF = ["write_outside", "assertion", "infinite_loop"]
"""Faults that the fake worker simulates."""
REAL = ["shared_memory", "registers", "compile_error", "compile_minutes", "compile_memory"]


def fake_backend(kernel: Any, problem: Problem, settings: Settings, options: TuneOptions, lane: Lane) -> Gpu:
    workload = Workload("", "", problem.sizes, problem.dtype, options.l2, str(settings.cache), 10**8, 0.1)
    device = device_profile("h200")
    return Gpu(workload, options.run_deadline_s, "fake_gpu_worker", worker_pool=lane.worker_pool, device=device)


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(import_module("autotile.tuning.session"), "choose_backend", fake_backend)
    (timed := tmp_path / "timed").mkdir()
    kernel, settings = fault_kernel(timed, HEALTHY), Settings(str(timed / "x.db"), timed / "cache", 10**9, (), ())
    job = compile_job(kernel, kernel.spec.default, kernel.spec.at(), "sm_90")
    taken_s = timeit.timeit(lambda: compile_in_worker(job, settings, 300.0), number=1)  # as this machine is now
    for name in ("RUN_DEADLINE_S", "COMPILE_DEADLINE_S"):
        monkeypatch.setattr(f"faults.fault_session.{name}", max(3.0, 4 * taken_s))


def test_every_fault_is_blamed_and_the_winner_is_healthy(tmp_path, cubin_cache_folder, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with no_traces(temporary, monkeypatch):
        session = tune_faults(tmp_path, *AS_IF, *REAL, "recursion", cache=cubin_cache_folder)
    assert [EXPECTED[name].complaint(session.trial_of(name)) for name in [*AS_IF, *REAL]] == [""] * 8
    died = session.trial_of("recursion")
    assert died.reason == "the worker died with signal SIGABRT in stage verify"
    assert (session.damage(), session.result.winner.config["THREADS"]) == ([], 1024)


def test_finals_dismiss_what_hangs_and_tell_how_long_they_take(tmp_path, cubin_cache_folder, monkeypatch):
    monkeypatch.setattr("autotile.workers.gpu._RACE_START_S", 0.5)
    monkeypatch.setattr(import_module("autotile.tuning.session"), "_MOVED_S", 0.0)
    states: list[Progress] = []
    session = tune_faults(tmp_path, "hangs_later", cache=cubin_cache_folder, finals=5, observe=states.append)
    assert session.damage() == []
    (refused,) = session.result.refused
    assert (refused.config["FAULT"], refused.outcome) == ("hangs_later", Outcome.TIMED_OUT)
    left_s = [state.remaining_s for state in states if state.phase == "finals"]
    assert len(left_s) > 2
    assert left_s[-1] == 0.0
    assert session.result.speedup is not None  # what is right raced again
