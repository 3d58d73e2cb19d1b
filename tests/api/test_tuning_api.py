"""Tuning as programs call it: options as keyword arguments beside sizes, and sessions that a caller's search drives."""

import inspect
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import autotile
from autotile.api import targets
from autotile.cli.derivation import describe
from autotile.core.model import Outcome
from autotile.database.database import Database
from autotile.errors import ConfigError, InputError
from autotile.exchange.recording import read_recording_header
from autotile.tuning.result import Recorded

N = 1048576


@pytest.fixture
def options(recording):
    return autotile.TuneOptions(replay=recording)


def test_a_path_is_a_kernel_and_a_database_and_a_repr_is_one_line(scale_toml, options, tmp_path):
    database = tmp_path / "own.db"
    result = autotile.tune(scale_toml, n=N, options=options, database=database)
    assert result.database == str(database)
    again = autotile.tune(str(scale_toml), {"n": N}, options=options, database=str(database))
    assert again.resumed == 12
    for found in (result, again):
        assert found.winner.config == {"THREADS": 256, "WORK": 4}
    kernel = autotile.get_best_kernel(scale_toml, n=N, device="h200", database=database)
    assert (kernel.tier, kernel.config) == ("exact", {"THREADS": 256, "WORK": 4})
    assert repr(result) == (
        "<TuneResult: scale n=1048576 float32 on NVIDIA H200 (replayed): "
        f"4.406 us, {result.speedup.value:.3f}x over the default>"
    )
    nothing = replace(result, winner=None, default=None, speedup=None)
    assert repr(nothing).endswith(": no configuration ran>")
    assert repr(replace(nothing, interrupted=True)).endswith(": interrupted before a configuration ran>")
    assert repr(replace(result, interrupted=True)).endswith("over the default, interrupted>")
    assert "<tr><th>took</th>" in nothing._repr_html_()


@pytest.mark.usefixtures("own_recordings")
def test_a_family(scale_toml):
    options, plan = autotile.TuneOptions(replay="auto"), autotile.FamilyPlan(points=1)
    result = autotile.tune_family(scale_toml, n=range(1000, 2000001), plan=plan, options=options)
    assert autotile.get_best_kernel(scale_toml, n=4097, device="h200").tier != "family"  # a rule of one point
    assert repr(result) == (
        "<FamilyResult: scale n=1000..2000000 float32 on NVIDIA H200 (replayed): "
        f"{len(result.rule.configs)} configurations, 0.0 % mean loss, not in force>"
    )
    interrupted = replace(result, rule=None)
    assert repr(interrupted).endswith(": interrupted before there was a rule>")
    assert "before there was a rule" in interrupted._repr_html_()


def test_arguments_of_a_recording_reach_the_session(scale_toml, recording, monkeypatch, tmp_path):
    header = read_recording_header(recording)
    given: dict[str, Any] = {}

    def record(*_: object, **named: Any) -> Recorded:
        given.update(named)
        return Recorded(named["output"], header, 7, 1.0)

    monkeypatch.setattr("autotile.api.targets.device_count", lambda: 1)
    monkeypatch.setattr(import_module("autotile.tuning.session"), "record", record)
    recorded = autotile.record(scale_toml, n=N, sample=7, output=str(tmp_path / "x.npz"))
    assert (given["sample"], given["output"]) == (7, tmp_path / "x.npz")
    assert repr(recorded) == (
        f"<Recorded: scale n=1048576 float32 on NVIDIA H200: 7 configurations, {tmp_path / 'x.npz'}>"
    )
    assert "interrupted" in repr(replace(recorded, path=None))


class TestModes:
    """What the command ``tune`` does by its options, `autotile.tune` does by its arguments."""

    def test_a_search_of_ones_own(self, scale_toml, recording):
        def search(session: Any) -> None:
            session.evaluate({"THREADS": 256, "WORK": 4})

        result = autotile.tune(scale_toml, n=N, replay=recording, search=search)
        assert result.winner.config == {"THREADS": 256, "WORK": 4}
        assert result.call == f'kernel = autotile.get_best_kernel("{scale_toml}", n={N})'

    def test_a_range_is_a_family(self, scale_toml):
        for size in ("1..8", [1, 2], range(1, 3)):
            with pytest.raises(autotile.InputError, match="--trace is of one session"):
                autotile.tune(scale_toml, n=size, trace="t.json")
        with pytest.raises(autotile.InputError, match="a family of an operation takes only"):
            autotile.tune("matmul", M="1..8", N=8, K=8, until="1%")


class TestKeywords:
    def test_options_stand_beside_sizes_and_take_the_place_of_those_of_the_object(self, scale_toml, recording):
        result = autotile.tune(scale_toml, n=N, trials=5, budget="30s", finals=0, seed=3, replay=recording)
        assert (sum(result.outcomes.values()), result.problem.sizes) == (5, {"n": N})
        given = autotile.TuneOptions(replay=recording, trials=10, finals=0)
        result = autotile.tune(scale_toml, n=N, trials=8, options=given)
        assert sum(result.outcomes.values()) == 8

    def test_a_size_of_the_name_of_an_option_is_the_size(self, scale_toml, recording):
        text = scale_toml.read_text()
        for size in ("n = 4096", "n = 1001"):
            text = text.replace(size, f"{size}, trials = 3")
        scale_toml.write_text(text)
        with pytest.raises(autotile.InputError, match="no recording of scale n=1048576 trials=9"):
            autotile.tune(scale_toml, n=N, trials=9, options=autotile.TuneOptions(replay="auto", trials=2))

    @pytest.mark.parametrize(
        ("word", "said"),
        [
            ("trails", "scale has no size 'trails', and no option is named so; did you mean 'trials'"),
            ("max_trials", "did you mean 'trials'"),
            ("bugdet", "did you mean 'budget'"),
            ("N", "did you mean 'n'"),
            ("m", r"\(sizes and flags: n; options: trials, budget, sampler ...\)"),
            ("served", "has no size 'served'"),
        ],
    )
    def test_an_unknown_word(self, scale_toml, word, said):
        with pytest.raises(autotile.ProblemError, match=said):
            autotile.tune(scale_toml, n=N, **{word: 3})

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"trials": 0}, "trials is 0"),
            ({"device": "nosuch"}, "no CUDA device of this machine is named 'nosuch'"),
            ({"device": 1.5}, "expected a CUDA index"),
            ({"sizes": {"n": 4}}, "n is given twice"),
            ({"sizes": {"device": 3}}, "has no size 'device'"),
            ({"budget": "soon"}, "a budget of 'soon' cannot be read"),
            ({"budget": True}, "a budget of True cannot be read"),
            ({"budget": -1}, "cannot be read"),
            ({"budget": float("nan")}, "cannot be read"),
            ({"until": 2}, "a gain of 2 cannot be used"),
            ({"precision": "no"}, "a precision of 'no' cannot be used"),
            ({"budget": 5, "budget_s": 5}, "budget_s is given twice"),
            ({"db": "a.db", "database": "b.db"}, "database is given twice"),
            ({"device": 0, "devices": [0, 1]}, "one GPU and --devices several"),
            ({"l2": "warm"}, "l2 is 'warm'"),
        ],
    )
    def test_values_that_cannot_be_used(self, scale_toml, given, said):
        given = dict(given)
        with pytest.raises(autotile.InputError, match=said):
            autotile.tune(scale_toml, given.pop("sizes", None), n=N, **given)

    def test_of_an_operation(self):
        with pytest.raises(autotile.ProblemError, match=r"matmul has no size 'trails', .* did you mean 'trials'"):
            autotile.tune("matmul", M=8, N=8, K=8, trails=3)


def test_other_functions_take_them_too(scale_toml, recording):
    with autotile.session(scale_toml, n=N, replay=recording, discard=False) as session:
        assert session.evaluate({"THREADS": 64, "WORK": 1})
    calls = (
        lambda **named: autotile.record(scale_toml, n=N, **named),
        lambda **named: autotile.verify(scale_toml, n=N, **named),
        lambda **named: autotile.check("new.cu", scale_toml, n=N, **named),
        lambda **named: autotile.tune_family(scale_toml, n="1..8", **named),
        autotile.tune_misses,
        lambda **named: autotile.tune_plan("plan.toml", **named),
    )
    for call in calls:
        with pytest.raises(autotile.InputError, match="workers is 0"):
            call(workers=0)
        with pytest.raises(autotile.ProblemError, match="did you mean 'workers'"):
            call(worker=1)
    with pytest.raises(autotile.InputError, match="points is 0"):
        autotile.tune_family(scale_toml, n="1..8", points=0)
    with pytest.raises(autotile.InputError, match="a family is tuned for time"):
        autotile.tune_family(scale_toml, n="1..8", options=autotile.TuneOptions(objective="1 / time_us"))


def test_every_option_of_the_command_line_is_a_keyword():
    _, described = describe("api.tuning.tune")
    own = set(inspect.signature(autotile.tune).parameters)
    options = {one.name for one in described} - own
    assert {"trials", "budget", "verify_problem", "trace"} <= options <= set(targets.OPTION_NAMES)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"budget": "5m"}, {"budget_s": 300}),
        ({"budget": 90}, {"budget_s": 90}),
        ({"budget": 0.5}, {"budget_s": 0.5}),
        ({"budget_s": 2.0}, {"budget_s": 2.0}),
        ({"until": "1%"}, {"until": 0.01}),
        ({"until": 0.02}, {"until": 0.02}),
        ({"objective": "registers"}, {"objectives": ("registers",)}),
        ({"objective": ["time", "energy"]}, {"objectives": ("time", "energy")}),
        ({"verify_problem": {"M": 1}}, {"verify_sizes": ({"M": 1},)}),
        ({"verify_problem": [{"M": 1}, {"N": 2}]}, {"verify_sizes": ({"M": 1}, {"N": 2})}),
        ({"replay": True}, {"replay": "auto"}),
        ({"replay": "a.npz"}, {"replay": Path("a.npz")}),
        ({"replay": "auto", "devices": "0,2"}, {"devices": (0, 2)}),
        ({"replay": "auto", "devices": [1, 3]}, {"devices": (1, 3)}),
        ({"db": "x.db"}, {"database": "x.db"}),
        ({"precision": "1%"}, {"precision": 0.01}),
        ({"transfer": False, "spend": True, "l2": "hot"}, {"transfer": False, "spend": True, "l2": "hot"}),
    ],
)
def test_values_are_read_as_on_the_command_line(given, fields):
    options = targets.session_options(given=given)
    assert {name: getattr(options, name) for name in fields} == fields


def test_an_option_is_named_as_it_was_written():
    for name, value in {"objective": 3, "objectives": None, "verify_problem": 3, "budget": "-1s"}.items():
        with pytest.raises(InputError, match=rf"\b{name} (is|of)"):
            targets.session_options(given={name: value})


DEFAULT = {"THREADS": 128, "WORK": 1}
THREADS = (32, 64, 128, 256)


@pytest.fixture
def opened(scale_toml, options):
    with autotile.session(scale_toml, n=N, options=options) as session:
        yield session
        session.close()


def stored(phase):
    with Database.open(autotile.db_path()) as database:
        (study,) = database.studies()
        return database.trials(study.study_id, phase=phase)


class TestEvaluate:
    def test_a_trial_for_each_configuration_in_their_order(self, opened):
        configs = [{"THREADS": 64, "WORK": 2}, {"THREADS": 32, "WORK": 4}, {"THREADS": 256, "WORK": 4}]
        trials = opened.evaluate(configs)
        assert [dict(trial.config) for trial in trials] == configs
        assert [trial.outcome for trial in trials] == [Outcome.OK, Outcome.WRONG_RESULT, Outcome.OK]
        assert (trials[1].reason, trials[0].time_us) == ("y[3] is 0, expected 1", pytest.approx(1000 / 64 + 1))
        assert opened.best.config == {"THREADS": 256, "WORK": 4}

    def test_an_invalid_configuration_is_an_outcome_and_is_not_stored(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            (trial,) = session.evaluate({"THREADS": 48})
            assert trial.outcome is Outcome.INFEASIBLE
            assert "48 is not among its values" in trial.reason
            session.close()
        assert stored("search") == []

    def test_a_configuration_is_run_once_with_the_defaults_of_parameters_that_are_left_out(self, opened):
        first, again = opened.evaluate([{"WORK": 2}, {"WORK": 2}])
        assert first is again
        assert first.config == {"THREADS": 128, "WORK": 2}
        assert (opened.evaluate({"WORK": 2}), len(opened.trials)) == ([first], 1)
        assert repr(opened) == (
            f"<TuningSession: scale n={N} float32 on NVIDIA H200 (replayed): open, 1 trial, best 8.812 us>"
        )


class TestAskAndTell:
    def test_every_configuration_is_proposed_once_the_default_first(self, opened):
        asked = [opened.ask(5), opened.ask(5), opened.ask(5), opened.ask(5)]
        assert ([len(one) for one in asked], asked[0][0]) == ([5, 5, 2, 0], DEFAULT)
        distinct = {tuple(config.items()) for one in asked for config in one}
        assert len(distinct) == 12

    def test_what_was_evaluated_is_not_proposed(self, opened):
        opened.evaluate([DEFAULT, {"WORK": 2}])
        asked = opened.ask(12)
        assert len(asked) == 10
        opened.evaluate(asked)
        assert DEFAULT not in asked
        assert opened.ask() == []

    def test_proposals_follow_what_is_told(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            asked = session.ask(4)
            for config in asked:
                session.tell(config, 1.0 if config["WORK"] == 4 else None)
            session.tell({"THREADS": 32}, 5.0)
            assert {"THREADS": 32, "WORK": 1} not in session.ask(12)
            session.evaluate(asked)
            session.close()
        assert len(stored("search")) == 4  # what is told is not stored

    def test_what_is_told_costs_what_the_objective_says(self, scale_toml, options):
        by_registers = replace(options, objectives=("registers * time_us",))
        with autotile.session(scale_toml, n=N, options=by_registers) as session:
            with pytest.raises(InputError, match="needs registers, which has no value here"):
                session.tell(DEFAULT, 1.0)
            session.tell(DEFAULT, None)

    def test_what_is_refused(self, opened):
        for time_us in (0.0, -1.0, float("nan"), float("inf"), "5"):
            with pytest.raises(InputError, match="expected a positive number"):
                opened.tell(DEFAULT, time_us)
        with pytest.raises(InputError, match="expected a list, each a tuple of a mapping by name and a number or None"):
            opened.tell_all([({"THREADS": 64},)])
        with pytest.raises(InputError, match="THREADS=48 WORK=1 is not in the space"):
            opened.tell_all([({"THREADS": 64}, 1.0), ({"THREADS": 48}, 1.0)])
        assert {"THREADS": 64, "WORK": 1} in opened.ask(12)  # which was not told
        with pytest.raises(ConfigError, match="WORK = '4' is not among its values"):
            opened.evaluate({"WORK": "4"})
        for count, said in ((0, "n is 0"), (1001, "at most 1000")):
            with pytest.raises(InputError, match=said):
                opened.ask(count)


class TestSession:
    def test_it_finishes_with_a_winner_that_is_served_until_a_later_one_finds_another(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            session.evaluate({"THREADS": 256, "WORK": 2})
        assert session.result.winner.config == {"THREADS": 256, "WORK": 2}
        assert session.result.default.config == DEFAULT  # was tried for the comparison
        assert session.result.speedup.value > 1.5
        assert autotile.best(scale_toml, n=N, device="h200").config == {"THREADS": 256, "WORK": 2}
        assert session.finish() is session.result
        (before,) = (trial for trial in stored("search") if trial.config == {"THREADS": 256, "WORK": 2})
        with autotile.session(scale_toml, n=N, options=options) as session:  # a later one knows the trials
            assert {"THREADS": 256, "WORK": 2} not in session.ask(12)
            assert session.evaluate({"THREADS": 256, "WORK": 2})[0].time_us == before.time_us
            assert len(session.evaluate([{"THREADS": t, "WORK": w} for t in THREADS for w in (1, 2, 4)])) == 12
        assert (len(stored("search")), session.result.winner.config) == (12, {"THREADS": 256, "WORK": 4})

    def test_an_exception_closes_it_without_a_result(self, scale_toml, options):
        session = autotile.session(scale_toml, n=N, options=options)

        def search():
            with session:
                session.evaluate({"WORK": 2})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            search()
        assert session.result is None
        assert (len(stored("search")), autotile.db_check().unfinished_runs) == (1, 0)
        with pytest.raises(InputError, match="the session is closed"):
            session.ask()

    def test_threads_take_turns(self, scale_toml, options):
        configs = [{"THREADS": threads, "WORK": work} for threads in THREADS for work in (1, 2, 4)]
        with autotile.session(scale_toml, n=N, options=options) as session, ThreadPoolExecutor(6) as threads:
            found = list(threads.map(session.evaluate, configs))
            results = set(threads.map(lambda _: session.finish().winner.config["WORK"], range(6)))
        assert ([dict(trial.config) for (trial,) in found], results) == (configs, {4})
        assert (len(stored("search")), session.result.winner.config) == (12, {"THREADS": 256, "WORK": 4})

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_a_forked_child_leaves_it_to_its_parent(self, scale_toml, options):
        def evaluate():
            with pytest.raises(InputError, match="of the process that forked this one"), session:
                session.evaluate({"WORK": 1})

        with autotile.session(scale_toml, n=N, options=options) as session:
            child = multiprocessing.get_context("fork").Process(target=evaluate)
            child.start()
            child.join(60)
            session.evaluate({"WORK": 4})
        assert (child.exitcode, len(stored("search"))) == (0, 2)  # with the default


def test_a_result_reads_the_same_file_in_another_folder(scale_toml, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = autotile.tune(scale_toml, n=N, options=options, database="own.db", trials=2, finals=0, progress=False)
    monkeypatch.chdir("/")
    assert len(result.study_data().trials) == 2


def test_what_is_named_to_be_tried_is_tried_first_and_takes_part_in_the_finals(scale_toml, options):
    tries = ({"THREADS": 32, "WORK": 1}, {"THREADS": 32, "WORK": 4})
    result = autotile.tune(scale_toml, n=N, options=options, tries=tries, trials=8, finals=2, progress=False)
    assert [dict(trial.config) for trial in stored("search")[:2]] == list(tries)
    assert [trial.outcome for trial in result.tried] == [Outcome.OK, Outcome.WRONG_RESULT]
    assert tries[0] in [dict(trial.config) for trial in stored("final")]
    assert sum(result.outcomes.values()) == 8
