"""One candidate's way through the gates, with a compiler and a GPU that answer as they are told."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

from autotile.device.compiler import CompileJob
from autotile.device.cubin_cache import CachedCubin
from autotile.ground.errors import ToolchainError
from autotile.ground.model import Config, Measurement, Outcome, Resources
from autotile.process.compile_pool import Compiled
from autotile.process.messages import Candidate, Evaluation
from autotile.process.sanitizer import Finding
from autotile.tuning.pipeline import Pipeline

SMALL = Resources(32, 0, 0, 0, 1024)


class Pool:
    """Compiles when it is told to, in any order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[CompileJob, Future[Compiled]]] = []
        self.code = ""
        """Hash of whatever is compiled; empty: one of its own for each configuration."""

    def submit(self, make_job: Callable[[], CompileJob]) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        self.waiting.append((make_job(), future))
        return future

    def finish(self, resources: Resources = SMALL) -> None:
        for job, future in reversed(self.waiting):
            name = "-".join(job.options)
            cubin = CachedCubin(Path("/cubins") / name, self.code or name, resources)
            future.set_result(Compiled(cubin, 0.25))
        self.waiting.clear()


class Device:
    """Runs everything in 10 us."""

    source: Literal["cuda", "replayed"] = "cuda"

    def __init__(self) -> None:
        self.ran: list[tuple[Config, float | None]] = []

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        self.ran.append((candidate.config, best_us))
        return Evaluation(
            Outcome.OK, "", "measure", Measurement(10.0, 9.0, 11.0), {"load": 0.1, "measure": 0.2}, {"power_w": 500.0}
        )

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> None:
        return None

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        raise AssertionError("the pipeline evaluates")

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        raise AssertionError("the pipeline evaluates")

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def pipeline(bench: Any, pool: Pool) -> Pipeline:
    return Pipeline(bench.kernel, bench.problem(), bench.device, pool, ahead=4)  # type: ignore[arg-type]


@pytest.fixture
def propose(bench: Any) -> Callable[[], tuple[int, Config] | None]:
    rows: Iterator[tuple[int, Config]] = iter(enumerate(bench.configs()))
    return lambda: next(rows, None)


def test_candidates_are_compiled_ahead(pipeline: Pipeline, pool: Pool, propose: Any) -> None:
    pipeline.fill(propose)
    assert len(pool.waiting) == 4
    pipeline.fill(propose)
    assert len(pool.waiting) == 4
    job = pool.waiting[1][0]
    assert job.entry == "scale"
    assert job.architecture == "sm_90"
    assert job.options == ("-DTHREADS=32", "-DWORK=2", "-DDTYPE=float")


@pytest.mark.parametrize(("room", "queued"), [(2, 2), (0, 0), (-3, 0), (100, 4), (None, 4)])
def test_no_more_than_there_is_room_for(
    pipeline: Pipeline, pool: Pool, propose: Any, room: int | None, queued: int
) -> None:
    pipeline.fill(propose, room)
    assert len(pool.waiting) == queued


def test_trials_come_in_the_order_of_the_proposals(
    bench: Any, pipeline: Pipeline, pool: Pool, device: Device, propose: Any
) -> None:
    pipeline.fill(propose)
    pool.finish()  # the last one first
    pairs = [pipeline.next_trial(device, None) for _ in range(5)]
    assert [(row, trial.config) for row, trial in filter(None, pairs)] == list(enumerate(bench.configs()[:4]))
    assert pairs[-1] is None


def test_a_trial_tells_the_whole_story(pipeline: Pipeline, pool: Pool, device: Device, propose: Any) -> None:
    pipeline.fill(propose)
    pool.finish()
    pair = pipeline.next_trial(device, 7.5)
    assert pair is not None
    row, trial = pair
    assert (row, trial.outcome, trial.stage, trial.time_us) == (0, Outcome.OK, "measure", 10.0)
    assert trial.geometry is not None
    assert (trial.geometry.grid, trial.geometry.block) == ((128, 1, 1), (32, 1, 1))
    assert trial.resources == SMALL
    assert trial.occupancy is not None
    assert trial.occupancy.blocks_per_sm == 32
    assert trial.cubin_hash == "-DTHREADS=32--DWORK=1--DDTYPE=float"
    assert trial.seconds == {"compile": 0.25, "load": 0.1, "measure": 0.2}
    assert trial.telemetry == {"power_w": 500.0}
    assert device.ran == [(trial.config, 7.5)]


def test_the_same_code_is_measured_once(pipeline: Pipeline, pool: Pool, device: Device, propose: Any) -> None:
    pool.code = "the same"
    pipeline.fill(propose)
    pool.finish()
    trials = [pair[1] for pair in (pipeline.next_trial(device, None) for _ in range(4)) if pair is not None]
    assert len(device.ran) == 4  # each has a launch of its own
    pipeline.recall(trials)
    pipeline.start(trials[0].config)
    pipeline.fill(lambda: (0, trials[0].config), room=1)
    pool.finish()
    pair = pipeline.next_trial(device, None)
    assert pair is not None
    assert (pair[1].stage, pair[1].outcome, pair[1].measurement) == ("same_code", Outcome.OK, trials[0].measurement)
    assert pair[1].reason == "the same code as THREADS=32 WORK=1, which was measured"
    assert "measure" not in pair[1].seconds
    assert len(device.ran) == 4


def test_what_does_not_fit_is_not_launched(pipeline: Pipeline, pool: Pool, device: Device, propose: Any) -> None:
    pipeline.fill(propose)
    pool.finish(Resources(32, 0, 0, 0, 300_000))
    pair = pipeline.next_trial(device, None)
    assert pair is not None
    assert (pair[1].outcome, pair[1].stage) == (Outcome.RESOURCE_EXCEEDED, "resources")
    assert "300000 bytes of shared memory" in pair[1].reason
    assert pair[1].resources is not None
    assert device.ran == []


@pytest.mark.parametrize("outcome", [Outcome.COMPILE_FAILED, Outcome.TIMED_OUT])
def test_what_does_not_compile_is_not_launched(
    pipeline: Pipeline, pool: Pool, device: Device, propose: Any, outcome: Outcome
) -> None:
    pipeline.fill(propose)
    pool.waiting[0][1].set_result(Compiled(None, 60.0, outcome, "why"))
    pair = pipeline.next_trial(device, None)
    assert pair is not None
    assert (pair[1].outcome, pair[1].stage, pair[1].reason) == (outcome, "compile", "why")
    assert pair[1].geometry is not None
    assert pair[1].seconds == {"compile": 60.0}
    assert device.ran == []


def test_what_no_longer_compiles_does_not_race(
    pipeline: Pipeline, pool: Pool, judges: dict[str, Any], bench: Any
) -> None:
    trials = [judges["by_threads"](config) for config in bench.configs()[:2]]
    with ThreadPoolExecutor(1) as thread:
        racing = thread.submit(pipeline.compile_again, trials)
        while len(pool.waiting) < 2:
            time.sleep(0.001)
        pool.waiting.pop(0)[1].set_result(Compiled(None, 0.1, Outcome.COMPILE_FAILED, "the cache was trimmed"))
        pool.finish()
    ((trial, candidate),) = racing.result()
    assert trial is trials[1]
    assert candidate.config == trial.config
    assert candidate.cubin_path.startswith("/cubins/")


def test_a_broken_toolchain_is_raised(pipeline: Pipeline, pool: Pool, device: Device, propose: Any) -> None:
    pipeline.fill(propose)
    pool.waiting[0][1].set_exception(ToolchainError("no NVRTC"))
    with pytest.raises(ToolchainError, match="no NVRTC"):
        pipeline.next_trial(device, None)
