"""The path of a candidate through the gates, with a fake compiler and a fake GPU."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_calls import GivenGpu
from judges import by_threads
from msgspec import structs

from autotile.core.device import DeviceProperties
from autotile.core.documents import convert, to_fields
from autotile.core.model import Config, Measurement, Outcome, Resources, Trial
from autotile.core.timeline import Timeline
from autotile.cuda.compiler import CachedCubin, CompiledFunction, CompileJob
from autotile.errors import ToolchainError
from autotile.kernel.parser import parse_spec
from autotile.tuning.session import Pipeline
from autotile.workers.compile_pool import Compiled
from autotile.workers.jobs import Candidate, Reading, SizedCubin

SMALL = Resources(32, 0, 0, 0, 1024)


class Pool:
    """Compile pool whose compilations end when the test says so, newest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: list[tuple[CompileJob, Future[Compiled]]] = []
        self.code = ""
        """Hash of every cubin; empty for a different one for each configuration."""

    def submit(self, job: CompileJob) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        self.waiting.append((job, future))
        return future

    def finish(self, resources: Resources = SMALL) -> None:
        for job, future in reversed(self.waiting):
            name = "-".join(job.options)
            path = self.folder / name
            path.touch()
            cubin = CachedCubin(path, self.code or name, {"scale": CompiledFunction("scale", resources)})
            future.set_result(Compiled(cubin, 0.25))
        self.waiting.clear()


class Device(GivenGpu):
    """Backend that runs every candidate in 10 us."""

    began_at = 0.0

    def __init__(self, device: DeviceProperties) -> None:
        super().__init__(device)
        self.ran: list[tuple[Config, float | None]] = []

    def time(self, candidate: Candidate, limit_us: float | None) -> Reading:
        self.ran.append((candidate.config, limit_us))
        seconds, telemetry = {"load": 0.1, "measure": 0.2}, {"power_w": 500.0}
        found = Reading(Outcome.OK, "", "measure", Measurement(10.0, 9.0, 11.0), seconds, telemetry)
        return replace(found, began_at=self.began_at, gpu="GPU-1")


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "cubins").mkdir()
    return Pool(tmp_path / "cubins")


@pytest.fixture
def device(bench):
    return Device(bench.device)


class InOrder:
    """Proposes configurations in order; up to four wait, the first ``ready`` are ready, number ``choice`` is chosen."""

    def __init__(self, configs: Sequence[Config], ready: int = 1, choice: int = 0) -> None:
        self._rows: Iterator[tuple[int, Config]] = iter(enumerate(configs))
        self._ready = ready
        self._choice = choice
        self.proposed: list[int] = []

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        full = len(self.proposed) >= (4 if room is None else min(4, room))
        proposed = None if full else next(self._rows, None)
        if proposed is not None:
            self.proposed.append(proposed[0])
        return proposed

    def ready(self) -> list[int]:
        return self.proposed[: self._ready]

    def waiting(self) -> list[int]:
        return list(self.proposed)

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        self.seen = dict(compiled)
        return list(compiled)[self._choice]


@pytest.fixture
def pipeline(bench, device, pool):
    return Pipeline(bench.kernel, bench.problem(), device, pool)


@pytest.fixture
def proposals(bench):
    return InOrder(bench.configs())


def advance(pipeline: Pipeline, proposals: InOrder, best_us: float | None = None) -> Any:
    """Evaluate the next candidate; return its row and its trial."""
    candidate = pipeline.next_candidate(proposals)
    if candidate is None:
        return None
    proposals.proposed.remove(candidate.row)
    trial = pipeline.begin(candidate, best_us)
    if trial is not None:
        return candidate.row, trial
    ended, trial = pipeline.end_next()
    return ended.row, trial


def begun(call: Callable[..., Any], pool: Pool, count: int, *arguments: Any) -> Future[Any]:
    """Call a function that waits for compilations, in another thread, until as many have begun."""
    thread = ThreadPoolExecutor(1)
    running = thread.submit(call, *arguments)
    thread.shutdown(wait=False)
    while len(pool.waiting) < count:
        time.sleep(0.001)
    return running


def ahead(pipeline: Pipeline, pool: Pool, proposals: InOrder, room: int | None = None) -> InOrder:
    pipeline.compile_ahead(proposals, room)
    pool.finish()
    return proposals


@pytest.fixture
def compiled(pipeline, pool, proposals):
    """The proposals, of which four have compiled."""
    return ahead(pipeline, pool, proposals)


def test_trials_come_in_the_order_of_the_proposals_with_their_whole_story(bench, pipeline, device, compiled):
    """Not in that of the compilations, of which the newest end first."""
    pairs = [advance(pipeline, compiled, 7.5) for _ in range(5)]
    assert [(row, trial.config) for row, trial in filter(None, pairs)] == list(enumerate(bench.configs()[:4]))
    assert pairs[-1] is None
    trial = pairs[0][1]
    assert (trial.outcome, trial.stage, trial.time_us) == (Outcome.OK, "measure", 10.0)
    assert (trial.geometry.grid, trial.geometry.block) == ((128, 1, 1), (32, 1, 1))
    assert (trial.resources, trial.occupancy.blocks_per_sm) == (SMALL, 32)
    assert trial.cubin_hash == "-DTHREADS=32--DWORK=1--DDTYPE=float"
    assert trial.seconds == {"compile": 0.25, "load": 0.1, "measure": 0.2}
    assert trial.telemetry == {"power_w": 500.0}
    assert device.ran == [(config, 7.5) for config in bench.configs()[:4]]


def test_a_result_comes_before_what_still_compiles(pipeline, pool, device, bench):
    proposals = InOrder(bench.configs())
    pipeline.compile_ahead(proposals)
    (_, future), *later = pool.waiting
    pool.waiting[:] = pool.waiting[:1]
    pool.finish()
    first = pipeline.next_candidate(proposals)
    proposals.proposed.remove(first.row)
    pipeline.begin(first, None)
    device.has_result = True
    assert (future.done(), later[0][1].done(), pipeline.next_candidate(proposals)) == (True, False, None)
    assert pipeline.end_next()[0] is first


@pytest.mark.parametrize(("source", "ready", "among"), [("cuda", 3, [0, 1, 2, 3]), ("replayed", 2, [0, 1])])
def test_what_is_measured_is_chosen_among_what_is_compiled(bench, pipeline, pool, device, *, source, ready, among):
    """In replay, among what is ready alone: the order does not depend on the compilers."""
    device.source = source
    proposals = ahead(pipeline, pool, InOrder(bench.configs(), ready, choice=ready - 1))
    row, trial = advance(pipeline, proposals)
    assert (row, trial.outcome) == (ready - 1, Outcome.OK)
    assert [config for config, _ in device.ran] == [bench.configs()[row]]
    assert list(proposals.seen) == among
    for one in proposals.seen.values():
        assert (one.stage, one.resources, one.measurement) == ("compile", SMALL, None)
        assert one.occupancy is not None


def test_what_does_not_compile_comes_before_what_is_chosen(bench, pipeline, pool, device):
    proposals = InOrder(bench.configs(), ready=3)
    pipeline.compile_ahead(proposals)
    pool.waiting.pop(1)[1].set_result(Compiled(None, 1.0, Outcome.COMPILE_FAILED, "why"))
    pool.finish()
    assert [advance(pipeline, proposals)[0] for _ in range(3)] == [1, 0, 2]
    assert len(device.ran) == 2


def test_the_timeline_shows_the_stages_of_a_candidate(bench, device, pool):
    timeline = Timeline()
    device.began_at = 5.0
    pipeline = Pipeline(bench.kernel, bench.problem(), device, pool, timeline)
    proposals = ahead(pipeline, pool, InOrder(bench.configs()))
    advance(pipeline, proposals)
    spans = {event["name"]: event for event in timeline.to_json()["traceEvents"] if event["ph"] == "X"}
    assert {"propose", "wait for the compilers", "choose", "wait for the GPU", "load", "measure"} == spans.keys()
    assert spans["measure"]["ts"] - spans["load"]["ts"] == pytest.approx(1e5)
    assert spans["measure"]["args"] == {"config": "THREADS=32 WORK=1"}


def test_a_candidate_whose_code_is_gone_is_compiled_again(pipeline, pool, device, proposals):
    pipeline.compile_ahead(proposals, room=1)
    pool.finish()
    next(pool.folder.iterdir()).unlink()
    running = begun(advance, pool, 1, pipeline, proposals)
    pool.finish()
    assert running.result()[1].outcome is Outcome.OK
    assert len(device.ran) == 1


def test_the_same_code_is_measured_once(pipeline, pool, device, proposals):
    pool.code = "the same"
    ahead(pipeline, pool, proposals)
    trials = [pair[1] for pair in (advance(pipeline, proposals) for _ in range(4)) if pair is not None]
    assert len(device.ran) == 4  # their launches differ
    pipeline.remember(trials)
    pipeline.prefetch(trials[0].config)
    proposals = ahead(pipeline, pool, InOrder([trials[0].config]), 1)
    pair = advance(pipeline, proposals)
    assert (pair[1].stage, pair[1].outcome, pair[1].measurement) == ("same_code", Outcome.OK, trials[0].measurement)
    assert pair[1].reason == "the same code as THREADS=32 WORK=1, which was measured"
    assert "measure" not in pair[1].seconds
    assert len(device.ran) == 4


def test_for_the_finals_what_waits_is_given_up_and_what_no_longer_compiles_does_not_race(
    pipeline, pool, proposals, bench
):
    pipeline.compile_ahead(proposals)
    waiting = [future for _, future in pool.waiting]
    pool.waiting.clear()
    trials = [by_threads(config) for config in bench.configs()[:2]]
    racing = begun(pipeline.recompile, pool, 2, trials)
    pool.waiting.pop(0)[1].set_result(Compiled(None, 0.1, Outcome.COMPILE_FAILED, "the cache was trimmed"))
    pool.finish()
    ((trial, candidate),) = racing.result()
    assert trial is trials[1]
    assert candidate.config == trial.config
    assert Path(candidate.cubin_path).parent == pool.folder
    assert waiting
    assert all(future.cancelled() for future in waiting)


def test_a_broken_toolchain_is_raised(pipeline, pool, device, proposals):
    pipeline.compile_ahead(proposals)
    pool.waiting[0][1].set_exception(ToolchainError("no NVRTC"))
    with pytest.raises(ToolchainError, match="no NVRTC"):
        advance(pipeline, proposals)


@pytest.fixture
def sized(bench):
    """The tiny kernel with its size compiled in."""
    text = bench.kernel.spec.text.replace("[kernel]", '[kernel]\ndefines = { SIZE = "n" }')
    return structs.replace(bench.kernel, spec=parse_spec(text, "scale.toml"))


def test_other_problems_are_compiled_where_sizes_are(bench, sized, device, pool):
    problem, proposals = bench.problem(), InOrder(bench.configs(), ready=1)
    pipeline = Pipeline(sized, problem, device, pool, verify_sizes=[{"n": 8192}, problem.sizes])
    pipeline.compile_ahead(proposals, room=1)
    expected = [problem.sizes["n"], sized.spec.ragged["n"], 8192]
    assert [job.options[-1] for job, _ in pool.waiting] == [f"-DSIZE={size}" for size in expected]
    later, pool.waiting[1:] = pool.waiting[1:], []
    pool.finish()
    assert pipeline.next_candidate(proposals, lambda: "Ctrl-C") is None  # though the problem's own has compiled
    pool.waiting += later
    pool.finish()
    compiled = pipeline.next_candidate(proposals)
    candidate = compiled.candidate()
    assert [dict(sizes) for sizes, _, _ in candidate.others] == [{"n": size} for size in expected[1:]]
    assert all(Path(path).name.endswith(f"SIZE={sizes['n']}") for sizes, path, _ in candidate.others)
    assert convert(to_fields(candidate.others), tuple[SizedCubin, ...]) == candidate.others


def test_another_problem_that_does_not_compile_is_a_failure(bench, sized, device, pool):
    pipeline, proposals = Pipeline(sized, bench.problem(), device, pool), InOrder(bench.configs(), ready=1)
    pipeline.compile_ahead(proposals, room=1)
    pool.waiting.pop()[1].set_result(Compiled(None, 1.0, Outcome.COMPILE_FAILED, "why"))
    pool.finish()
    _, trial = advance(pipeline, proposals)
    assert trial.outcome is Outcome.COMPILE_FAILED
    assert trial.reason == f"at n={sized.spec.ragged['n']}: why"
    assert device.ran == []
