"""Plans: their file, their order, what is done already, and whole runs by replay on simulated GPUs."""

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from feature_kernels import write_call
from stored_runs import add_trial, end_run, record_miss, start_run

import autotile
from autotile.api.plans import tune_plan, write_plan
from autotile.core.model import Problem
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import MAX_PROBLEMS, PlannedProblem, is_done, plan_text, read_plan
from autotile.tuning.progress_state import Progress, StopRequest


@pytest.fixture
def plan_file(tmp_path, scale_toml):
    """Return a function that writes a plan beside the kernel's folder; KERNEL stands for its path."""

    def write(text):
        path = tmp_path / "plan.toml"
        path.write_text(text.replace("KERNEL", f'"kernels/{scale_toml.name}"'))
        return path

    return write


MANY = list(range(1, 1001))


def sizes_of(path: Path) -> list[int]:
    return [one.problem.sizes["n"] for one in read_plan(path).problems]


class TestFile:
    def test_sizes_are_combined_ordered_by_priority_and_equal_problems_count_once(self, plan_file):
        path = plan_file("\ufeff[[tune]]\nkernel = KERNEL\nsizes = { n = [1024, 2048] }\nproblems = [{ n = 4096 }]\n")
        assert sorted(sizes_of(path)) == [1024, 2048, 4096]
        path = plan_file(
            "[[tune]]\nkernel = KERNEL\nsizes = { n = [1, 2] }\n"
            "[[tune]]\nkernel = KERNEL\nsizes = { n = [3, 2] }\npriority = 5\n"
        )
        assert sizes_of(path) in ([3, 1, 2], [3, 2, 1])

    def test_the_effort_of_the_plan_is_that_of_entries_without_one(self, plan_file):
        path = plan_file(
            "[plan]\nname = 'night'\ntrials = 50\ntotal_budget_s = 60\n"
            "[[tune]]\nkernel = KERNEL\nsizes = { n = 1 }\n"
            "[[tune]]\nkernel = KERNEL\nsizes = { n = 2 }\nbudget_s = 5\n"
        )
        plan = read_plan(path)
        chosen = [one.options(TuneOptions(trials=7)) for one in plan.problems]
        assert [(one.trials, one.budget_s) for one in chosen] == [(50, None), (None, 5)]
        assert (plan.name, plan.total_budget_s) == ("night", 60)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "missing required field tune"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = [] }\n", "names no problem"),
            ("[[tune]]\nkernel = KERNEL\nsize = { n = 1 }\n", "did you mean 'sizes'"),
            ("[[problems]]\nkernel = KERNEL\n", "unknown field problems; it belongs in \\[\\[tune"),
            ("trials = 3\n[[tune]]\nkernel = KERNEL\n", "it belongs in \\[plan\\] or in \\[\\[tune"),
            ("[[tune]]\nkernel = KERNEL\ntotal_budget_s = 3\n", "it belongs in \\[plan\\]"),
            ("[[tune]]\nkernel = KERNEL\nplan = 3\n", "it belongs at the top level"),
            ("[[tunes]]\nkernel = KERNEL\n", "did you mean 'tune'"),
            ("[[tune]]\nkernel = 'nonesuch'\nsizes = { n = 1 }\n", "number 1: .*nonesuch"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = 1, m = 2 }\n", "number 1: .*m"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = 1 }\ndtypes = ['float7']\n", "float7"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = -1 }\n", "n"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = 1 }\ntrials = 0\n", "trials"),
            ("[[tune]]\nkernel = KERNEL\nsizes = { n = 1 }\nuntil = 2.0\n", "until"),
            (2 * "[[tune]]\nkernel = KERNEL\n" + "problems = [{ n = 1 }, { n = '' }]\n", "number 2: problems number 2"),
            ("[[tune]\n", "plan.toml cannot be read"),
            ("[[tune]]\nkernel = KERNEL\ncaptured = 'nowhere'\n", "No such file"),
            # too many are refused before they are made
            (f"[[tune]]\nkernel = KERNEL\nsizes = {{ n = {MANY}, a = {MANY}, b = {MANY} }}\n", f"{MAX_PROBLEMS:,}"),
        ],
        ids=lambda text: text[-40:],
    )
    def test_a_malformed_plan_is_refused(self, plan_file, text, message):
        with pytest.raises(InputError, match=message):
            read_plan(plan_file(text))

    def test_what_is_written_is_read_back(self, plan_file, tmp_path):
        with pytest.raises(InputError, match=r"again\.toml cannot be read: No such file"):
            read_plan(tmp_path / "again.toml")
        plan = read_plan(plan_file("[[tune]]\nkernel = KERNEL\nsizes = { n = [1, 2, 3] }\npriority = 2\n"))
        path = write_plan(plan, tmp_path / "again.toml")
        assert read_plan(path).problems == plan.problems
        assert plan_text(plan.problems) in path.read_text()

    def test_misses_make_a_plan(self, bench, scale_toml, tmp_path, database):
        for n, count in ((512, 3), (700, 9)):
            record_miss(database, Problem("scale", {"n": n}, "float32"), "NVIDIA H200", "default", count)
        plan = autotile.plan(str(scale_toml))
        assert [one.problem.sizes["n"] for one in plan.problems] == [700, 512]
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert {one.asked_as for one in autotile.plan(load_kernel(scale_toml)).problems} == {"scale"}
        with pytest.raises(InputError, match="save this one as a search-space file"):
            autotile.plan(load_kernel(scale_toml), output=tmp_path / "misses.toml")
        assert [sorted(sizes_of(write_plan(plan, tmp_path / "misses.toml"))) for _ in "12"] == 2 * [[512, 700]]
        for other in (scale_toml, read_settings().database):
            with pytest.raises(InputError, match="it exists and is no plan"):
                write_plan(plan, other)
        with pytest.raises(InputError, match="no missed problem"):
            autotile.plan("sgemm")


def states(result: Any) -> list[str]:
    return [entry.state for entry in result.entries]


class TestCalls:
    def test_each_call_is_a_problem_on_its_own_arguments(self, scale_toml, tmp_path, monkeypatch):
        own = write_call(tmp_path / "one", "scale", source=str(scale_toml), sizes={"n": 512})
        shipped = write_call(tmp_path / "calls" / "b", "matmul_tiled", sizes={"M": 64, "N": 32, "K": 16})
        other = write_call(tmp_path / "calls" / "a", "scale", source=str(scale_toml), sizes={"n": 1})
        monkeypatch.chdir(tmp_path)
        found = autotile.plan(captured=["one", tmp_path / "calls"], output=tmp_path / "plan.toml")
        first, another, second = found.problems  # of a folder of several calls, each in their order
        assert (another.captured, another.problem.sizes["n"]) == (str(other), 1)
        assert (first.asked_as, first.captured, dict(first.problem.sizes)["n"]) == (str(scale_toml), str(own), 512)
        assert (second.asked_as, second.captured) == ("matmul_tiled", str(shipped))
        assert (second.problem.kernel, dict(second.problem.sizes)) == ("matmul_tiled", {"M": 64, "N": 32, "K": 16})
        assert first.options(TuneOptions()).captured == str(own)
        assert first.options(TuneOptions()).fresh
        read, made = (
            {(one.captured, str(one.problem)) for one in plan.problems}
            for plan in (read_plan(tmp_path / "plan.toml"), found)
        )
        assert read == made

    def test_what_is_no_captured_call(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for number, (kernel, dtype, sizes, said) in enumerate((
            ("nothing", "float32", {"n": 1}, "no kernel named 'nothing'"),
            ("matmul_tiled", "float32", {"M": 64}, "needs the size N"),
            ("matmul_tiled", "float32", {"M": 64, "N": 1, "K": 1, "Q": 1}, "'Q'"),
            ("matmul_tiled", "float9", {"M": 1, "N": 1, "K": 1}, "float9"),
        )):  # fmt: skip
            folder = write_call(tmp_path / str(number), kernel, source="x" * 3000, dtype=dtype, sizes=sizes)
            with pytest.raises(InputError, match=said):
                autotile.plan(captured=[folder])
        for place in ("empty", "none", "x" * 3000, "a\0b"):
            with pytest.raises(InputError):
                autotile.plan(captured=[tmp_path / place])
        with pytest.raises(InputError, match="leave the kernel out"):
            autotile.plan("scale", captured=[tmp_path / "empty"])


class TestRuns:
    @pytest.fixture
    def recorded(self, bench, recordings_found):
        """Recordings of three problems in a folder that replay looks into."""
        sizes = [1024, 2048, 4096]
        for n in sizes:
            bench.record(n=n)
        return sizes

    @pytest.mark.parametrize("devices", [(), (0, 1, 2, 3)])
    def test_all_problems_are_tuned_and_left_out_the_next_time(self, recorded, plan_file, bench, devices):
        def planned(trials):
            return plan_file(f"[[tune]]\nkernel = KERNEL\nsizes = {{ n = {recorded} }}\ntrials = {trials}\n")

        options = TuneOptions(replay="auto", workers=2, devices=devices)
        steps: list[Progress] = []
        result = tune_plan(planned(6), options, steps.append)
        assert states(result) == ["tuned"] * 3
        assert (result.is_complete, result.interrupted) == (True, False)
        copied = pickle.loads(pickle.dumps(result))
        assert copied.to_json() == result.to_json()
        assert copied.entries[0].planned.target.source_hash == result.entries[0].planned.target.source_hash
        assert [step.path[0].ended for step in steps if step.ending] == [1, 2, 3]
        assert {step.path[0].number for step in steps} == {1, 2, 3}
        before = len(bench.stored())
        assert states(tune_plan(planned(6), options)) == ["done"] * 3
        assert len(bench.stored()) == before
        assert states(tune_plan(planned(6), replace(options, trials=9))) == ["done"] * 3  # the plan's own effort counts
        assert states(tune_plan(planned(9), options)) == ["tuned"] * 3
        assert tune_plan(planned(9), options).to_json()["complete"]

    def test_a_smaller_gain_asks_for_more_and_a_greater_one_does_not(self, recorded, plan_file):
        for until, state in ((0.01, "tuned"), (0.01, "done"), (0.05, "done"), (0.001, "tuned")):
            head = "[[tune]]\nkernel = KERNEL\ntrials = 6\n"
            path = plan_file(f"{head}until = {until}\nsizes = {{ n = {recorded[0]} }}\n")
            assert states(tune_plan(path, TuneOptions(replay="auto", workers=1))) == [state]

    def test_an_operation_is_done_once_its_last_race_was_held(self, bench, operation_of_copies, database):
        operation = operation_of_copies("first")
        bench.kernel = load_kernel(operation.members[0].kernel)
        options = TuneOptions(replay="auto", workers=1)
        planned = PlannedProblem("scaling", operation, operation.resolve({"n": 4096}))
        winner = bench.tune(bench.record()).winner
        assert not is_done(database, planned, options, "")  # a session of a kernel alone
        (study,) = database.studies()
        run = start_run(database, study.study_id, sampler="contest")
        add_trial(database, study.study_id, run, winner, phase="final", rank=1)
        end_run(database, run)
        assert is_done(database, planned, options, "")

    def test_one_that_fails_does_not_stop_the_others_and_a_budget_of_all_does(self, recorded, plan_file):
        entry = f"[[tune]]\nkernel = KERNEL\nsizes = {{ n = {recorded} }}\n"
        result = tune_plan(plan_file(f"[plan]\ntotal_budget_s = 1e-6\n{entry}"), TuneOptions(replay="auto", workers=1))
        assert (states(result), result.is_complete, result.interrupted) == (["left"] * 3, False, False)
        path = plan_file(f"[[tune]]\nkernel = KERNEL\nsizes = {{ n = {[77, *recorded]} }}\ntrials = 3\n")
        result = tune_plan(path, TuneOptions(replay="auto", workers=1, devices=(0, 1)))
        assert (states(result), result.is_complete) == (["failed", "tuned", "tuned", "tuned"], False)
        assert "no recording" in result.entries[0].reason
        assert "3 tuned, 1 failed" in result.summary

    def test_an_interrupt_leaves_the_rest_for_the_next_run(self, recorded, plan_file, monkeypatch):
        path = plan_file(f"[[tune]]\nkernel = KERNEL\nsizes = {{ n = {recorded} }}\ntrials = 4\n")
        options, main = TuneOptions(replay="auto", workers=1, devices=(0, 1)), threading.current_thread()
        stops: list[Any] = []
        monkeypatch.setattr(StopRequest, "__enter__", lambda self: stops.append(self) or self)

        def observe(step):
            if step.done == 2:
                assert threading.current_thread() is not main
                stops[0].requested = True

        result = tune_plan(path, options, observe)
        assert result.interrupted
        assert "left" in states(result)
        assert tune_plan(path, options).is_complete
