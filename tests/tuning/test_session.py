"""Whole sessions by replay: search, ends, resuming, finals, kernel failures, progress."""

from importlib import import_module

import pytest
from judges import BEST, DEFAULT, failing_if, timed

from autotile.core.model import Outcome, Trial, config_key
from autotile.errors import InputError
from autotile.tuning.progress_state import Progress
from autotile.workers.compile_pool import Compiled, CompilePool


def keys(trials: list[Trial]) -> list[str]:
    return [config_key(trial.config) for trial in trials]


class TestSearch:
    def test_the_fastest_wins_over_the_default_and_every_step_is_shown_and_stored(self, bench):
        seen: list[Progress] = []
        result = bench.tune(bench.record(), seen.append)
        assert (result.winner.config, result.default.config) == (BEST, DEFAULT)
        assert (result.ties, result.interrupted) == ((), False)
        assert result.speedup.value == pytest.approx(result.default.time_us / result.winner.time_us)
        assert result.speedup.low > 1
        assert sum(result.outcomes.values()) == result.valid == 12
        assert set(result.phases) == {"start", "search", "finals"}
        assert sum(result.phases.values()) <= result.seconds
        assert [progress.phase for progress in seen] == ["starting", *["searching"] * 12, "finals"]
        (notice,) = result.notices
        assert "replayed from measurements recorded on NVIDIA H200" in notice
        assert {progress.notices for progress in seen} == {result.notices}
        searching = seen[1:-1]
        assert [(p.done, sum(p.outcomes.values())) for p in searching] == [(count, count) for count in range(1, 13)]
        assert all(p.last is not None for p in searching)
        assert (seen[0].best, seen[-1].best.config) == (None, BEST)
        for trial in bench.stored():
            assert (trial.source, trial.stage) == ("replayed", "measure")
            assert trial.geometry.threads == trial.config["THREADS"]
            assert trial.resources.registers > 0
            assert trial.occupancy.blocks_per_sm > 0
            assert trial.cubin_hash
            assert "compile" in trial.seconds
        pruned = [trial for trial in bench.stored() if trial.outcome is Outcome.PRUNED]
        assert pruned
        assert all(trial.time_us is not None and "slower" in trial.reason for trial in pruned)
        bench.tune(bench.record(), fresh=True, discard=False)
        assert all(trial.outcome is Outcome.OK for trial in bench.stored()[-12:])

    def test_estimated_times_are_not_used_for_other_objectives(self, bench, monkeypatch):
        monkeypatch.setattr(
            import_module("autotile.tuning.start"), "estimate_times", lambda *arguments: pytest.fail("it was estimated")
        )
        bench.tune(bench.record(), sampler="feasible", trials=3, objectives=("time", "registers"))
        bench.tune(bench.record(), sampler="feasible", trials=6, objective="registers + time_us")


class TestEnds:
    def test_no_budget_searches_nothing_and_the_least_finds_something_to_serve_and_fewer_trials_race_again(self, bench):
        recording = bench.record()
        result = bench.tune(recording, budget_s=0.0)
        assert (result.winner, sum(result.outcomes.values()), bench.stored()) == (None, 0, [])
        result = bench.tune(recording, budget_s=1e-6)
        assert (result.gates["launched"], result.winner is not None) == (1, True)
        few = len(bench.stored("final"))
        bench.tune(recording)
        whole = len(bench.stored("final"))
        result = bench.tune(recording, trials=3)  # fewer than are stored
        assert len(bench.stored()) == result.resumed == 12
        assert len(bench.stored("final")) - whole == whole - few
        assert result.winner.config == bench.tune(recording, budget_s=0.0).winner.config == BEST

    def test_one_trial_is_the_default_and_too_many_trials_and_compilers_are_not_begun(self, bench):
        result = bench.tune(bench.record(), trials=1)
        assert result.to_json()["stopped"] == {"rule": "trials", "expected_gain": None, "more_trials": None}
        assert result.winner.config == result.default.config == DEFAULT
        assert result.speedup.contains(1.0)
        result = bench.tune(bench.record(), trials=1000, sampler="tpe", workers=1000)
        assert result.outcomes.total() == len(bench.stored()) == 12
        assert any("instead of 1000: at most two a core" in notice for notice in result.notices)


class TestDefault:
    """A default that cannot run."""

    def test_it_breaks_a_rule_at_these_sizes(self, bench):
        result = bench.tune(bench.record(n=100), n=100)
        assert bench.kernel.spec.default not in [dict(trial.config) for trial in bench.stored()]
        assert (result.default, result.speedup) == (None, None)
        assert result.winner.config == {"THREADS": 64, "WORK": 1}
        table, facts = result._parts()
        assert table.rows[1] == ("default", "-", "-", "infeasible")
        assert dict(facts)["default"].startswith("THREADS=128 WORK=1: infeasible, the rule 'enough_blocks' is broken")

    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_it_was_not_recorded_or_fails(self, bench, is_recorded):
        judge = failing_if(lambda config: config == DEFAULT, Outcome.WRONG_RESULT)
        result = bench.tune(bench.record(judge, [c for c in bench.configs() if is_recorded or c != DEFAULT]))
        assert (result.default, result.speedup, result.winner.config) == (None, None, BEST)
        table, _ = result._parts()
        assert table.rows[1][3] == ("wrong_result" if is_recorded else "not run")


class TestResume:
    def test_what_is_stored_is_not_tried_again_unless_it_is_asked_for(self, bench):
        recording = bench.record()
        bench.tune(recording, trials=5, sampler="random")
        assert bench.tune(recording).resumed == 5
        assert sorted(keys(bench.stored())) == sorted(map(config_key, bench.configs()))
        short = bench.tune(recording, fresh=True, trials=2)  # it tries the reigning winner
        assert {config_key(t.config) for t in bench.stored()[-2:]} == {config_key(DEFAULT), config_key(BEST)}
        assert (short.resumed, short.winner.config) == (0, BEST)
        held = bench.stored("final")
        shorter = bench.tune(recording, fresh=True, trials=1)  # it does not
        assert (shorter.winner.config, bench.stored("final")) == (DEFAULT, held)
        assert any("WORK=4, which won earlier ones, is still what is served" in notice for notice in shorter.notices)
        assert bench.tune(recording, fresh=True).resumed == 0
        assert len(bench.stored()) == 12 + 2 + 1 + 12

    @pytest.mark.parametrize("options", [{"discard": False}, {"objectives": ("time", "registers")}], ids=str)
    def test_a_search_that_drops_nothing_measures_again_what_was_dropped(self, bench, options):
        recording = bench.record()
        dropped = bench.tune(recording).outcomes[Outcome.PRUNED]
        result = bench.tune(recording, **options)
        assert (result.resumed, result.outcomes) == (12 - dropped, {Outcome.OK: 12})

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            # a value taken out of the space cannot win, one value more keeps what was measured
            ({"THREADS = [32, 64, 128, 256]": "THREADS = [32, 64, 128]"}, (9, 9, {"THREADS": 128, "WORK": 4})),
            ({"WORK = [1, 2, 4]": "WORK = [1, 2, 4, 8]"}, (12, 16, {"THREADS": 256, "WORK": 8})),
            ({"factor * x[i]": "x[i] * factor"}, (0, 12, BEST)),  # another template starts anew
        ],
        ids=["smaller space", "larger space", "another template"],
    )
    def test_after_a_change_of_the_kernel(self, bench, rewrite, change, expected):
        """Earlier trials that are still valid are resumed; how many are tried in all, and which wins."""
        bench.tune(bench.record())
        changed = rewrite(change)
        result = changed.tune(changed.record())
        assert (result.resumed, result.outcomes.total(), result.winner.config) == expected

    @pytest.mark.parametrize("finals", [12, 0])
    def test_among_ties_the_incumbent_stays(self, bench, finals):
        """Also the best of a session without finals: it is what was served. A session that was killed has none."""
        first, second = {"THREADS": 256, "WORK": 4}, {"THREADS": 256, "WORK": 2}

        def favouring(favourite):
            return lambda config: timed(config, 10.0 if config == favourite else 10.05)

        before = bench.tune(bench.record(favouring(first)), finals=finals)
        assert (before.winner.config, before.speedup is None) == (first, not finals)
        assert bool(bench.stored("final")) is bool(finals)
        result = bench.tune(bench.record(favouring(second)), fresh=True)
        assert result.winner.config == first
        assert second in result.ties


def test_nothing_compiles(rewrite):
    bench = rewrite({"factor * x[i]": "factor * z[i]"})
    recording = bench.record()
    for stored in (8, 9):  # it is said again when resumed
        with pytest.raises(InputError, match=r"no candidate compiles") as caught:
            bench.tune(recording)
        assert str(caught.value).count('identifier "z" is undefined') == 1
        assert "THREADS=128 WORK=1" in str(caught.value)
        assert len(bench.stored()) == stored
    with pytest.raises(InputError, match=r"no candidate compiles"):
        bench.tune(recording, fresh=True, trials=2)  # few are enough when no more are granted


def test_only_what_is_asked_for_is_tried_if_it_is_valid_and_recorded(bench):
    wanted = ({"THREADS": 512, "WORK": 1}, {"THREADS": 32, "WORK": 1}, BEST)
    result = bench.tune(bench.record(configs=[BEST, DEFAULT]), only=wanted)
    assert [dict(trial.config) for trial in bench.stored()] == [BEST]
    assert (result.winner.config, result.default) == (BEST, None)


def test_the_page_of_a_result_shows_its_problem_alone(bench, tmp_path):
    pytest.importorskip("plotly", reason="Plotly is not installed (extra `report`)")
    bench.tune(bench.record(n=2048), n=2048)
    page = bench.tune(bench.record()).report(tmp_path)
    assert page == tmp_path / "report.html"
    text = page.read_text()
    assert "n=4096" in text
    assert "n=2048" not in text


def test_what_a_killed_compiler_left_is_tried_again_by_the_next_session(bench, monkeypatch):
    recording = bench.record()
    lost = Compiled(None, outcome=Outcome.NOT_COMPILED, reason="the compiler failed: killed")
    with monkeypatch.context() as patch:
        patch.setattr(CompilePool, "_attempt", lambda *_: lost)
        patch.setenv("AUTOTILE_CACHE", str(bench.folder / "cold"))
        first = bench.tune(recording)
    assert (first.winner, first.outcomes) == (None, {Outcome.NOT_COMPILED: 12})
    again = bench.tune(recording)
    assert (again.resumed, again.winner.config) == (0, BEST)
