"""Several GPUs in one session: simulated ones that are slow, die or hang, and real child processes that are killed."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from judges import BEST, by_threads

from autotile.core.device import device_profile
from autotile.core.model import GPU_SCALE, Outcome, config_key
from autotile.core.statistics import median_interval
from autotile.errors import InputError, ToolchainError, WorkerError
from autotile.exchange.recording import read_recording
from autotile.tuning import gpu_group
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.replay import ReplayBackend
from autotile.workers.gpu import Gpu, GpuUse
from autotile.workers.jobs import Candidate, Check, Entry, Race, Reading, Workload


class FaultyGpu(ReplayBackend):
    """A simulated GPU that fails for good after some candidates, or gives no sign where a function of it says so."""

    def __init__(self, *of: Any, fails_after: float = math.inf, hangs: Any = lambda _: False, **options: Any) -> None:
        super().__init__(*of, **options)
        self._fails_after, self._hangs, self.begun = fails_after, hangs, 0

    def result(self) -> tuple[Candidate, Reading]:
        self.begun += 1
        if self._hangs(self):
            self._closed.wait()
        if self.begun > self._fails_after:
            raise WorkerError("CUDA_ERROR_NO_DEVICE: the GPU has fallen off the bus")
        return super().result()


@pytest.fixture
def group(bench):
    """Return a function that makes a group of simulated GPUs, each given by its arguments."""
    recording = read_recording(bench.record())
    with ExitStack() as stack:

        def make(*gpus, deadline_s=5.0, kind=FaultyGpu):
            made = [kind(recording, uuid=f"GPU-{n}", **{"seconds": 0.01, **one}) for n, one in enumerate(gpus)]
            return stack.enter_context(closing(GpuGroup(made, deadline_s)))

        yield make


@pytest.fixture
def impatient(monkeypatch):
    """Give up a GPU that shows no sign soon."""
    monkeypatch.setattr(gpu_group, "_MIN_STALL_S", 0.5)
    monkeypatch.setattr(gpu_group, "_CHECK_S", 0.05)


def candidates(bench: Any) -> list[Candidate]:
    return [Candidate(config, "") for config in bench.configs()]


def begin(group: GpuGroup, given: Sequence[Candidate]) -> None:
    group.wait()
    for candidate in given:
        group.submit(candidate)


def run(group: GpuGroup, given: Sequence[Candidate]) -> dict[str, Reading]:
    begin(group, given)
    finished = [group.result() for _ in given]
    assert Counter(id(candidate) for candidate, _ in finished) == Counter(map(id, given))
    return {config_key(candidate.config): reading for candidate, reading in finished}


def uses(group: GpuGroup) -> dict[str, GpuUse]:
    return {use.uuid: use for use in group.uses}


class TestSimulated:
    def test_all_take_part_each_candidate_runs_once_and_times_are_on_one_scale(self, bench, group):
        together = threading.Barrier(3, timeout=60)

        def wait_at_first(gpu):
            """Wait with the first candidate, so that none has run all before the others begin."""
            if gpu.begun == 1:
                together.wait()

        several = group(*({"hangs": wait_at_first, "slowness": slowness} for slowness in (1.0, 1.5, 0.97)))
        found = run(several, candidates(bench))
        assert {one.gpu for one in found.values()} == {"GPU-0", "GPU-1", "GPU-2"}
        assert len(found) == sum(use.trials for use in several.uses) == 12
        home, factor = several.uuid, {"GPU-0": 1.0, "GPU-1": 1.5, "GPU-2": 0.97}
        for key, one in found.items():
            expected_us = by_threads(json.loads(key), factor[home]).time_us
            assert one.measurement.time_us == pytest.approx(expected_us, rel=1e-5)
            assert float(one.telemetry[GPU_SCALE]) == pytest.approx(factor[home] / factor[one.gpu], rel=1e-5)
        assert uses(several)[home].scale == 1.0
        for _ in range(6):  # the limit is on the scale of each
            several.submit(Candidate(BEST, ""), factor[home] * (1000 / 256 + 0.5))
        assert [several.result()[1].outcome for _ in range(6)] == [Outcome.OK] * 6

    def test_a_race_has_the_intervals_of_the_recording(self, bench, group):
        entries = [Entry(candidate) for candidate in candidates(bench)[:2]]
        for entry, reading in zip(entries, group({}).run(Race(tuple(entries), 50, 0)), strict=True):
            recorded = by_threads(entry.candidate.config).measurement
            found = median_interval(reading.rounds_us)
            assert (found.value, found.low, found.high) == pytest.approx(
                (recorded.time_us, recorded.low_us, recorded.high_us), rel=1e-5
            )
            assert found.low < found.value < found.high

    def test_a_slower_one_takes_fewer(self, bench, group):
        """While it runs its first one, the other runs all that are left."""
        ended = threading.Event()
        several, given = group({}, {"hangs": lambda gpu: not ended.wait(60)}), candidates(bench) * 3
        begin(several, given)
        most = [several.result() for _ in given[1:]]
        ended.set()
        assert {one.gpu for _, one in most} == {"GPU-0"}
        assert several.result()[1].outcome is Outcome.OK

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize("fault", [{"fails_after": 0}, {"fails_after": 4}, {"hangs": lambda gpu: gpu.begun > 4}])
    def test_one_that_fails_gives_back_what_it_holds(self, bench, group, fault):
        several = group({}, fault, {}, deadline_s=0.2)
        found = run(several, candidates(bench) * 3)
        assert len(found) == 12
        assert all(one.outcome is Outcome.OK for one in found.values())
        lost = uses(several)["GPU-1"].lost
        assert "fallen off the bus" in lost or "no sign" in lost
        assert several.gpu_count == 2
        assert several.uuid != "GPU-1"

    @pytest.mark.usefixtures("impatient")
    def test_one_that_answers_after_it_was_given_up_is_released_and_its_result_dropped(self, bench, group):
        given_up = threading.Event()
        several = group({}, {"hangs": lambda gpu: not given_up.wait(60)}, deadline_s=0.2)
        late: Any = several._members[1].backend
        given = candidates(bench)
        found = run(several, given)
        given_up.set()
        assert "no sign" in uses(several)["GPU-1"].lost
        assert [one.gpu for one in found.values()] == ["GPU-0"] * len(given)
        assert late._closed.wait(10.0)
        assert not several.has_result

    @pytest.mark.parametrize("died", [True, False])
    def test_one_on_which_the_reference_dies_too_is_lost_but_not_where_it_is_merely_wrong(self, bench, group, died):
        class Breaking(FaultyGpu):
            """Of the second GPU, the worker dies with the sixth candidate, and maybe with all after it."""

            def result(self):
                candidate, reading = super().result()
                if self.uuid == "GPU-1" and (self.begun == 6 or (self.begun > 6 and died)):
                    return candidate, Reading(Outcome.CRASHED, "broken", died=True)
                if self.uuid == "GPU-1" and self.begun == 7:  # its worker ends with overwritten data, but has not died
                    return candidate, Reading(Outcome.OUT_OF_BOUNDS)
                return candidate, reading

        several = group({"seconds": 0.1}, {}, kind=Breaking)
        found = run(several, candidates(bench))
        assert ("ran first fails now, too: crashed, broken" in uses(several)["GPU-1"].lost) is died
        assert several.gpu_count == 2 - died
        assert [one.outcome for one in found.values()].count(Outcome.CRASHED) == 1 - died

    def test_the_last_one_ends_the_session(self, bench, group):
        several = group({"fails_after": 5}, {"fails_after": 5})
        with pytest.raises(WorkerError, match="fallen off the bus"):
            run(several, candidates(bench) * 2)

    def test_a_hung_one_does_not_hold_up_the_end(self, bench, group):
        several = group({"hangs": lambda gpu: True}, {})
        several.submit(candidates(bench)[0])
        several.close()
        assert not any(thread.name.startswith("GPU ") and thread.is_alive() for thread in threading.enumerate())

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize(
        ("hangs", "outcome", "left"),
        [
            (lambda gpu: gpu.uuid == "GPU-0" and gpu.begun == 2, Outcome.OK, 2),
            (lambda gpu: gpu._finished[0][0].config == BEST, Outcome.CRASHED, 1),
        ],
        ids=["the home, as it measures the reference, is replaced", "with a candidate, which costs two of them"],
    )
    def test_one_that_hangs_for_good(self, bench, group, hangs, outcome, left):
        slower = {"seconds": 0.05, "hangs": hangs}  # the first is the home
        several = group({"hangs": hangs}, slower, slower, deadline_s=0.1)
        found = run(several, candidates(bench))
        assert several.gpu_count == left
        best = found.pop(config_key(BEST))
        assert (best.outcome, "no sign" in best.reason) == (outcome, outcome is Outcome.CRASHED)
        assert all(one.outcome is Outcome.OK for one in found.values())

    @pytest.mark.parametrize("dies", [False, True], ids=["it fails", "it dies, and with the reference, too"])
    def test_finals_move_to_another_one_if_the_first_fails(self, bench, group, dies):
        several = group({}, {})
        run(several, candidates(bench))
        home: Any = next(one.backend for one in several._members if one.backend.uuid == several.uuid)
        for one in several._members:
            one.backend.sanitizer = f"that of {one.backend.uuid}"
        died = Reading(Outcome.CRASHED, "broken", died=True)
        home.run = Mock(side_effect=[[died] if dies else WorkerError("it has fallen off the bus")])
        home.result = lambda: (None, died)
        assert several.run(Check((Entry(Candidate(BEST, "")),), 3))[0].outcome is Outcome.OK
        assert several.uuid != home.uuid
        assert several.sanitizer == f"that of {several.uuid}"
        assert several.spare() is None


class TestSessions:
    def test_replay_on_several(self, bench):
        result = bench.tune(bench.record(), devices=(0, 1, 2))
        assert result.winner.config == BEST
        assert sorted(use.uuid for use in result.gpus) == ["simulated-0", "simulated-1", "simulated-2"]
        stored = bench.stored()
        assert sorted(config_key(trial.config) for trial in stored) == sorted(map(config_key, bench.configs()))
        assert {trial.gpu for trial in stored} <= {use.uuid for use in result.gpus}
        assert all(trial.gpu for trial in stored)
        assert result.confirmation.gpu != result.confirmation.home
        assert {trial.gpu for trial in bench.stored("final")} == {result.confirmation.home}
        assert result.to_json()["confirmation"]["spread"] == pytest.approx(0.0, abs=1e-6)

    def test_a_session_outlives_the_gpus_that_fail(self, bench, monkeypatch):
        faults: dict[str, dict[str, Any]] = {"simulated-1": {"fails_after": 4}, "simulated-2": {"slowness": 1.03}}

        class Faulty(FaultyGpu):
            def __init__(self, *arguments, uuid=""):
                super().__init__(*arguments, uuid=uuid, seconds=0.02, **faults.get(uuid, {}))

        monkeypatch.setattr(import_module("autotile.tuning.backend"), "ReplayBackend", Faulty)
        result = bench.tune(bench.record(), devices=(0, 1, 2))
        assert result.winner.config == BEST
        assert len(bench.stored()) == 12
        assert any("simulated-1 was given up" in notice for notice in result.notices)
        assert abs(result.confirmation.spread) == pytest.approx(0.03, abs=2e-3)
        assert result.confirmation.speedup.value == pytest.approx(result.speedup.value, rel=1e-3)

    @pytest.mark.parametrize("error", [None, InputError, ToolchainError])
    def test_all_are_verified_with_second_inputs_unless_a_machine_cannot_draw_them(self, bench, monkeypatch, error):
        run, seeds = ReplayBackend.run, list[int]()

        def verify(gpu, job):
            if isinstance(job, Check) and job.limit_s != 1.0:  # of the finals, not of the confirmation
                seeds.append(job.seed)
                if job.seed and error is not None:
                    raise error("the second inputs are too large")
            return run(gpu, job)

        monkeypatch.setattr(ReplayBackend, "run", verify)
        result = bench.tune(bench.record(), devices=(0, 1))
        assert result.winner.config == BEST
        said = "the finalists were verified with one set of inputs, not two: the second inputs are too large"
        assert [one for one in result.notices if "one set of inputs" in one] == [said] * bool(error)
        assert [use.lost for use in result.gpus] == ["", ""]
        assert seeds[0]
        assert {bool(seed) for seed in seeds[1:]} == {error is None}  # what follows is verified with the first ones

    def test_a_winner_that_is_wrong_on_the_second_gpu_is_refused(self, bench, monkeypatch, database):
        run = ReplayBackend.run

        def confirm(gpu, job):
            if isinstance(job, Check) and job.limit_s == 1.0 and job.entries[0].candidate.config == BEST:
                return [Reading(Outcome.WRONG_RESULT, "y[0] is 1, expected 2", "verify")]
            return run(gpu, job)

        monkeypatch.setattr(ReplayBackend, "run", confirm)
        result = bench.tune(bench.record(), devices=(0, 1))
        assert result.winner.config != BEST
        (refused,) = (trial for trial in result.refused if trial.config == BEST)
        assert refused.reason.startswith("on simulated-")
        assert [best.trial.config for best in database.best()] == [result.winner.config]


def doing(*deeds: str) -> list[Candidate]:
    return [Candidate({"DO": deed, "N": number}, "") for number, deed in enumerate(deeds)]


class TestProcesses:
    """Groups whose GPU workers are real child processes, which do what their candidates say."""

    @pytest.fixture
    def group(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "workers"), prepend=os.pathsep)
        monkeypatch.setattr("autotile.workers.gpu._OPEN_RETRY_S", 0.01)
        device = device_profile("h200")

        def backend(index, openings):
            (cache := tmp_path / f"{index}").mkdir()
            workload = Workload("", openings, {}, "float32", "cold", str(cache), 0, 0.1, device_index=index)
            return Gpu(workload, 2.0, "bad_worker", uuid=f"GPU-{index}", device=device)

        with ExitStack() as stack:
            yield lambda *gpus: stack.enter_context(closing(GpuGroup([backend(*one) for one in enumerate(gpus)], 2.0)))

    def test_candidates_that_kill_or_hang_are_blamed_and_the_gpus_stay(self, group):
        several, given = group("", ""), doing(*["ok"] * 5, "exit", *["ok"] * 5, "sleep")
        expected = {"ok": Outcome.OK, "exit": Outcome.CRASHED, "sleep": Outcome.TIMED_OUT}
        found = run(several, given)
        assert {key: one.outcome for key, one in found.items()} == {
            config_key(one.config): expected[one.config["DO"]] for one in given
        }
        assert several.gpu_count == 2

    def test_one_that_cannot_start_and_one_that_cannot_start_again_are_given_up(self, group):
        several, given = group("exit " * 9, "", ""), doing(*["ok_slowly"] * 70)
        begin(several, given)
        finished = [several.result() for _ in range(20)]
        doomed: Any = several._members[1].backend
        doomed._module = "no_such_module"
        doomed._child.kill()
        finished += [several.result() for _ in given[20:]]
        assert all(one.outcome is Outcome.OK for _, one in finished)
        assert {one.gpu for _, one in finished} == {"GPU-1", "GPU-2"}
        assert ["cannot start" in use.lost for use in several.uses] == [True, True, False]
