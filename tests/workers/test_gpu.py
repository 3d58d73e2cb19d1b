"""The GPU worker, with candidates that do not pass the gates first."""

from dataclasses import replace
from pathlib import Path

import pytest
from faults.fault_kit import HEALTHY, fault_kernel
from gpu_calls import evaluate, race, verify

from autotile.core.model import Config, Outcome
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.errors import WorkerError
from autotile.kernel.library import Kernel
from autotile.workers.child import WorkerPool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Entry, Race, Workload

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return fault_kernel(tmp_path_factory.mktemp("faults"))


def workload(kernel: Kernel, cache: Path, **sizes: int) -> Workload:
    spec = kernel.spec
    return Workload(spec.text, spec.source, {**spec.sizes, **sizes}, "float32", "cold", str(cache), 10**9, 0.02)


@pytest.fixture
def gpu(kernel, cache):
    gpu = Gpu(workload(kernel, cache), deadline_s=8.0)
    yield gpu
    gpu.close()


@pytest.fixture
def candidate(kernel, cache):
    def make(fault: str = HEALTHY, threads: int = 128) -> Candidate:
        config: Config = {"THREADS": threads, "FAULT": fault}
        job = compile_job(kernel, config, kernel.spec.at(), live_device().architecture)
        return Candidate(config, str(CubinCache(cache, 10**9).get_or_compile(job).path))

    return make


def test_a_healthy_candidate_is_measured_and_a_slow_one_dropped_and_its_time_kept(gpu, candidate):
    good = evaluate(gpu, candidate(), None)
    assert (good.outcome, good.reason, good.stage) == (Outcome.OK, "", "measure")
    assert 0 < good.measurement.low_us <= good.measurement.time_us <= good.measurement.high_us
    assert set(good.seconds) == {"load", "verify", "measure"}
    slow = evaluate(gpu, candidate(), 0.01)
    assert slow.outcome is Outcome.PRUNED
    assert slow.measurement is not None


def test_what_is_wrong_only_sometimes_is_found_by_verifying_again(gpu, candidate):
    again = verify(gpu, candidate("wrong_sometimes"), 300)  # missed once in 10^5 times
    assert again.outcome is Outcome.WRONG_RESULT
    assert "1 of " in again.reason
    assert " of 300" in again.reason
    healthy = verify(gpu, candidate(), 300)
    assert (healthy.outcome, healthy.reason) == (Outcome.OK, "")


def test_a_kernel_that_keeps_its_result_is_wrong_as_soon_as_the_inputs_change(gpu, candidate):
    assert verify(gpu, candidate("keeps_result"), 75).outcome is Outcome.OK
    kept = verify(gpu, candidate("keeps_result"), 75, seed=1)
    assert kept.outcome is Outcome.WRONG_RESULT
    assert kept.reason.endswith("in repeat 3 of 75")
    healthy = verify(gpu, candidate(), 75, seed=1)
    assert (healthy.outcome, healthy.telemetry["repeats"]) == (Outcome.OK, 75)
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("wrong_later", Outcome.WRONG_RESULT),
        ("hangs_later", Outcome.TIMED_OUT),
        ("stores_once", Outcome.WRONG_RESULT),
        ("skips_work", Outcome.OK),
    ],
)
def test_repeated_verification_finds_what_fails_at_a_later_launch(gpu, candidate, fault, outcome):
    assert verify(gpu, candidate(fault), 75).outcome is outcome
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK


def test_a_race_blames_the_candidates_whose_timed_launches_were_wrong(gpu, candidate):
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
    raced = race(gpu, [candidate(fault) for fault in (HEALTHY, "wrong_later", "stores_once")], 9, 0)
    wrong = Outcome.WRONG_RESULT
    assert [row.outcome for row in raced] == [Outcome.OK, wrong, wrong]
    assert "y[0] is " in raced[1].reason
    assert evaluate(gpu, candidate(threads=64), None).outcome is Outcome.OK


def test_a_race_does_not_reward_skipped_work(gpu, candidate):
    healthy, idle = race(gpu, [candidate(), candidate("skips_work")], 9, 0)
    assert (healthy.outcome, idle.outcome) == (Outcome.OK, Outcome.OK)
    assert min(idle.rounds_us) > 10 * max(healthy.rounds_us)


def test_a_race_compares_times_by_their_weights_and_ends_when_they_are_known(gpu, candidate):
    """After the first rounds those leave that are clearly slower, by their weighted times."""
    plain = race(gpu, [candidate(), candidate("skips_work")], 30, 0)
    assert [len(row.rounds_us) for row in plain] == [30, 6]
    weighted = gpu.raced(Race((Entry(candidate(), weight=1e5), Entry(candidate("skips_work"))), 30, 0))
    assert [len(row.rounds_us) for row in weighted] == [6, 30]
    entries = (Entry(candidate()), Entry(candidate()))
    assert [len(row.rounds_us) for row in gpu.raced(Race(entries, 60, 0, precision=0.9))] == [6, 6]


def test_a_race_with_a_candidate_that_hangs_ends(gpu, candidate):
    with pytest.raises(WorkerError, match="no answer within 10 s"):
        race(gpu, [candidate(), candidate("hangs_later")], 9, 0)
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("fault", "threads", "cubin", "outcome"),
    [
        ("shared_memory", 128, None, Outcome.RESOURCE_EXCEEDED),
        ("registers", 1024, None, Outcome.RESOURCE_EXCEEDED),
        ("device_memory", 128, None, Outcome.RESOURCE_EXCEEDED),
        (HEALTHY, 128, "/nowhere/gone.cubin", Outcome.CRASHED),
    ],
)
def test_what_the_driver_refuses_leaves_the_worker_alive(gpu, candidate, *, fault, threads, cubin, outcome):
    worker, made = gpu._child, candidate(fault, threads)
    refused = evaluate(gpu, replace(made, cubin_path=cubin or made.cubin_path), None)
    assert refused.outcome is outcome, refused.reason
    assert cubin is None or refused.stage == "load"
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
    assert gpu._child is worker


def test_a_wrong_candidate_leaves_a_worker_that_is_known_to_be_intact(gpu, candidate):
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
    worker = gpu._child
    for fault in ("wrong_element", "changed_input", "write_outside", "unwritten"):
        assert not evaluate(gpu, candidate(fault), None).outcome.has_time
    assert gpu._child is worker


@pytest.mark.parametrize("fault", ["write_overhang", "write_astray"])
def test_a_stray_write_leaves_no_worker_that_would_blame_others(gpu, candidate, fault):
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
    assert evaluate(gpu, candidate(fault), None).outcome in (Outcome.OUT_OF_BOUNDS, Outcome.WRONG_RESULT)
    assert evaluate(gpu, candidate(threads=64), None).outcome is Outcome.OK


def test_one_worker_judges_the_candidates_of_several_sessions(kernel, cache, candidate):
    workers = set()
    with WorkerPool() as worker_pool:
        for n in (100_000, 100_000, 5000):  # the same problem, then another
            gpu = Gpu(workload(kernel, cache, n=n), deadline_s=8.0, worker_pool=worker_pool)
            assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
            assert evaluate(gpu, candidate("wrong_element"), None).outcome is Outcome.WRONG_RESULT
            workers.add(gpu._child.pid)
            gpu.close()
    assert len(workers) == 1


def test_a_race_that_a_candidate_breaks_is_told_and_blamed_on_no_later_one(gpu, candidate):
    with pytest.raises(WorkerError, match=r"(?i)launch.?fail|illegal.?instruction"):
        race(gpu, [candidate(), candidate("trap")], 5, 0)
    assert evaluate(gpu, candidate(), None).outcome is Outcome.OK
