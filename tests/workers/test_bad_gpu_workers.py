"""Failures of a GPU worker are outcomes of one candidate, and the next one gets a new worker; needs no GPU."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from gpu_calls import evaluate, race, raced, verify

from autotile.core.device import device_profile
from autotile.core.model import Outcome
from autotile.errors import InputError, ToolchainError, WorkerCrashError, WorkerError
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Entry, Race, Reading, Workload

DEADLINE_S = 0.5
LATE = ("sleep", "be_late")
"""Deeds that take longer; all others have a minute, as the machine may be busy."""
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def start(clean, tmp_path, monkeypatch):
    """Open a GPU whose worker does what its requests say, and what the openings say at each opening."""
    monkeypatch.setattr("autotile.workers.gpu._OPEN_RETRY_S", 0.01)
    monkeypatch.setattr("autotile.workers.child._EXIT_GRACE_S", 0.3)
    with ExitStack() as stack:

        def start(*openings: str, deadline_s: float = DEADLINE_S) -> Gpu:
            workload = Workload("", " ".join(openings), {}, "float32", "cold", str(tmp_path), 0, 0.1)
            return stack.enter_context(closing(Gpu(workload, deadline_s, "bad_worker")))

        yield start


def openings(folder: Path) -> int:
    return (folder / "openings").stat().st_size


def doing(deed: str) -> Candidate:
    return Candidate({"DO": deed}, "a.cubin")


def run(gpu: Gpu, deed: str) -> Reading:
    gpu._deadline_s = DEADLINE_S if deed in LATE else 60.0
    return evaluate(gpu, doing(deed), None)


OUTCOMES = {"ok": Outcome.OK, "exit": Outcome.CRASHED, "wrong": Outcome.WRONG_RESULT, "refused": Outcome.CRASHED}


@pytest.mark.parametrize(
    ("opening", "deeds", "opened"),
    [
        ((), ["ok", "wrong", "refused"] * 3, 1),  # by a healthy worker
        # deaths after what still runs, or between other failures, stop nothing
        ((), ["ok", *["exit"] * 5, "ok"], 6),
        ((), [*["exit"] * 4, "wrong", "exit", "ok"], 6),
        # a device that cannot be reopened at once is tried again
        *((("well", trouble, trouble), ["exit", "ok"], 4) for trouble in ("exit", "setup_error")),
    ],
)
def test_all_candidates_are_served(start, tmp_path, opening, deeds, opened):
    gpu = start(*opening)
    for deed in deeds:
        assert run(gpu, deed).outcome is OUTCOMES[deed]
    assert (gpu.device, openings(tmp_path)) == (device_profile("h200"), opened)


@pytest.mark.parametrize(
    ("deed", "outcome", "stage", "words"),
    [
        ("sleep", Outcome.TIMED_OUT, "verify", r"no answer within 0\.5 s while in stage verify"),
        ("be_late", Outcome.TIMED_OUT, "", r"no answer within 0\.5 s while in stage start"),
        ("die_in_measure", Outcome.CRASHED, "measure", "the worker died with signal SIGKILL in stage measure"),
        ("fault_in_verify", Outcome.CRASHED, "verify", "SIGSEGV"),
        ("exit", Outcome.CRASHED, "", "exit code 3 in stage start"),
        ("close_output", Outcome.CRASHED, "verify", "the worker closed its input or output without a reply"),
        ("no_keys", Outcome.CRASHED, "", "is malformed: object missing required field"),
        ("error_of_no_kind", Outcome.CRASHED, "", "something in stage start"),
        ("assertion", Outcome.CRASHED, "verify", "ASSERT: faults.cu:7: Assertion `i < n` failed"),
        ("spent", Outcome.OUT_OF_BOUNDS, "verify", ""),
    ],
)
def test_a_bad_end_is_an_outcome_and_the_next_one_finds_a_fresh_worker(start, tmp_path, *, deed, outcome, stage, words):
    gpu = start()
    bad = run(gpu, deed)
    assert (bad.outcome, bad.stage) == (outcome, stage), bad.reason
    assert re.search(words, bad.reason), bad.reason
    assert bad.measurement is None
    good = run(gpu, "ok")
    assert good.outcome is Outcome.OK
    assert good.measurement is not None
    assert openings(tmp_path) == (4 if "SIGKILL" in bad.reason else 2)  # what another process kills is tried again


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerCrashError("SIGKILL", "measure", killed=True)], ids=str)
def test_ctrl_c_during_a_wait_and_a_worker_that_is_killed_once_cost_no_candidate(start, error):
    gpu = start(deadline_s=60.0)
    gpu.wait()
    for deed in ("ok", "wrong"):  # after Ctrl-C, the next wait is for the same one
        gpu.submit(doing(deed))
    gpu._child.receive = Mock(side_effect=error)
    with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
        assert gpu.result()[1].outcome is Outcome.OK
        gpu.submit(doing("ok"))
    assert {gpu.result()[1].outcome for _ in range(2)} == {Outcome.OK, Outcome.WRONG_RESULT}


def test_an_uncertain_result_is_repeated_in_a_new_worker(start, tmp_path):
    gpu = start()
    reason = run(gpu, "again").reason  # the new worker asks for another one, which is an error
    assert "no result of a candidate that ran alone" in reason
    assert openings(tmp_path) == 2
    assert run(gpu, "ok").outcome is Outcome.OK


def test_five_deaths_in_a_row_with_none_before_that_ran_stop_the_run(start):
    gpu = start()
    for deed in ("exit", "no_keys", "die_in_measure", "sleep", "exit"):
        assert run(gpu, deed).outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
    with pytest.raises(WorkerError, match=r"5 GPU workers died one after another, the last with: .*exit code 3"):
        run(gpu, "ok")


@pytest.mark.parametrize("trouble", ["sleep", "exit", "no_keys"])
def test_a_device_that_cannot_be_opened_is_told_at_once_and_one_not_reopened_in_the_end(
    start, tmp_path, monkeypatch, trouble
):
    monkeypatch.setattr("autotile.workers.gpu._OPEN_DEADLINE_S", 1.0)
    with pytest.raises(ToolchainError, match="the GPU worker cannot start"):
        start(trouble).wait()
    assert openings(tmp_path) == 1
    if trouble == "exit":
        (tmp_path / "openings").unlink()
        gpu = start("well", *[trouble] * 3)
        assert run(gpu, "exit").outcome is Outcome.CRASHED
        with pytest.raises(ToolchainError, match="cannot start: the worker died with exit code 3"):
            run(gpu, "ok")


class TestHangsInFinals:
    """A candidate that hangs after it was measured costs a fraction of its deadline."""

    @pytest.fixture
    def gpu(self, start, monkeypatch):
        monkeypatch.setattr("autotile.workers.gpu._MIN_REPEAT_S", 1.5)  # three times as long as a slow repeat
        monkeypatch.setattr("autotile.workers.gpu._RACE_START_S", 0.3)
        return start(deadline_s=60.0)

    def test_each_repeat_has_a_limit_by_the_verifications_before(self, gpu):
        assert run(gpu, "verified").outcome is Outcome.OK
        hung = verify(gpu, doing("sleep"), 75)
        assert hung.outcome is Outcome.TIMED_OUT
        assert hung.reason == "no answer within 1.5 s while in stage verify"
        assert verify(gpu, doing("slow_repeats"), 75).outcome is Outcome.OK

    def test_where_none_is_known_it_has_a_third_of_the_deadline(self, start):
        hung = verify(start(deadline_s=1.5), doing("sleep"), 75)
        assert hung.reason == "no answer within 0.5 s while in stage verify"

    def test_a_race_ends_soon(self, gpu):
        with pytest.raises(WorkerError, match=r"no answer within 0\.6 s"):
            gpu.raced(Race((Entry(doing("sleep")),), 9, 0, expected_s=0.1))

    def test_what_passed_here_shows_that_the_device_works(self, gpu):
        for deed in ("ok", "wrong", *["exit"] * 5, "ok"):
            assert verify(gpu, doing(deed), 75).outcome is OUTCOMES[deed]


class TestChecksBeforeARace:
    """One participant that ends the worker, or hangs, costs the others nothing."""

    def race(self, gpu: Gpu, *deeds: str) -> list[Reading]:
        entries = tuple(Entry(doing(deed), problem=0) for deed in deeds)
        return gpu.raced(Race(entries, 2, 0, checks=4, workloads=(gpu._workload,)))

    @pytest.mark.parametrize(
        ("before", "deed", "outcome", "words"),
        [
            (("well",), "be_late", Outcome.TIMED_OUT, "no answer within 0.5 s"),
            (("well",), "exit", Outcome.CRASHED, "exit code 3"),
            ((), "cuda_error", Outcome.CRASHED, "an illegal address"),  # is that of the first
        ],
    )
    def test_it_is_blamed(self, start, before, deed, outcome, words):
        *others, faulty, last = self.race(start(), *before, deed, "well")
        assert [(one.rounds_us, one.outcome) for one in (*others, last)] == [((1, 2), Outcome.OK)] * (len(before) + 1)
        assert (faulty.rounds_us, faulty.outcome) == ((), outcome)
        assert words in faulty.reason
        with pytest.raises(WorkerError):  # where all are at fault, it cannot be held
            self.race(start(), deed, deed)


@pytest.mark.parametrize("deed", ["exit", "no_keys"])
def test_a_race_that_breaks_the_worker_is_told_and_blamed_on_no_later_candidate(start, deed):
    gpu = start()
    with pytest.raises(WorkerError):
        race(gpu, [doing(deed), doing("ok")], 2, 0)
    assert run(gpu, "ok").outcome is Outcome.OK
    found = race(gpu, [doing("times")], 2, 0)
    assert found == [raced((1.0, 2.5)), raced((3.0, 4.0), Outcome.WRONG_RESULT, "y[0] is 1")]


def test_a_problem_or_second_inputs_that_cannot_be_set_up_are_reported(start):
    with pytest.raises(InputError, match="too large"):
        start("setup_error").wait()
    gpu = start()
    assert run(gpu, "ok").outcome is Outcome.OK
    with pytest.raises(InputError, match="too large"):
        verify(gpu, doing("setup_error"), 10, seed=7)
    assert run(gpu, "ok").outcome is Outcome.OK


def test_closing_ends_what_another_thread_waits_for(start, tmp_path):
    gpu = start("well", "sleep")
    assert run(gpu, "exit").outcome is Outcome.CRASHED
    with ThreadPoolExecutor(1) as thread:
        reopening = thread.submit(run, gpu, "ok")
        while openings(tmp_path) < 2:
            time.sleep(0.005)
        gpu.close()
        with pytest.raises(ToolchainError, match="signal SIGKILL"):
            reopening.result(10.0)
