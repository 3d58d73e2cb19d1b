"""Searches: proposals, resuming, gains, objectives, studies of Optuna, and the choice among compiled candidates."""

import threading
from dataclasses import replace
from itertools import count

import numpy as np
import optuna
import pytest
from rows import (
    DEFAULT,
    advance,
    broken,
    check_ranked_resuming,
    check_resuming,
    compiled_trial,
    make_space,
    ok,
    session,
    tile_ok,
    tile_space,
    tile_time_us,
)

from autotile.core import model
from autotile.core.model import Config, Outcome, Trial, objective_values
from autotile.errors import ConfigError, InputError
from autotile.search import search as searching
from autotile.search.gaussian_process import features_of
from autotile.search.optuna_samplers import (
    FAILED,
    FeasibleSampler,
    attributes_of,
    quiet_optuna,
    study_of_trials,
    write_study,
)
from autotile.search.samplers import SAMPLERS, Lookahead, check_sampler
from autotile.search.search import Search, Shortlist

INSTALLED = [name for name, kind in SAMPLERS.items() if kind.missing_package is None]
SPACE = tile_space()


def trial_of(config: Config) -> Trial:
    """Return a trial of a simulated device: a quarter of the tiles fail, the slow ones are pruned."""
    if config["BM"] == 256:
        return broken(config)
    time_us = tile_time_us(config)
    return ok(config, time_us, Outcome.PRUNED if time_us > 300 else Outcome.OK)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_default_comes_first_and_then_every_other_row(name):
    space = make_space({"A": (1, 2, 4), "B": ("x", "y", "z"), "C": (5,)}, lambda c: c["A"] != 2 or c["B"] != "y")
    search, turn = Search(space, name, seed=4, first=[{"A": 4, "B": "y", "C": 5}]), count()

    def by_turns(config: Config) -> Trial:
        return broken(config) if (number := next(turn)) % 3 == 0 else ok(config, 11.0 + number)

    done = [trial.config for trial in advance(search, len(space), by_turns)]
    assert done[0] == {"A": 4, "B": "y", "C": 5}
    assert sorted(map(str, done)) == sorted(str(space.config(row)) for row in range(len(space)))
    assert search.propose() is None


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize(("ahead", "killed"), [(1, {1, 16}), (16, {15, 17, 43})])
def test_a_resumed_search_goes_on_as_the_first_one_would_have(name, ahead, killed):
    """Also with pending proposals: each knows the same results as in the first search."""

    def search() -> Search:
        return Search(SPACE, name, seed=7, first=[DEFAULT])

    check_resuming(search, trial_of, ahead, killed)


def test_replayed_trials_that_left_the_space_are_ignored():
    space = make_space({"A": (1, 2, 4), "B": (1, 2)}, lambda c: c["A"] != 2)
    search = Search(space, "random", first=[{"A": 1, "B": 1}])
    earlier = [
        ok({"A": 1, "B": 1}, 5.0),
        ok({"A": 2, "B": 1}, 4.0),  # not valid any more
        ok({"A": 3, "B": 1}, 3.0),  # a value that the space lost
        ok({"A": 1}, 2.0),  # before B was a parameter
    ]
    assert search.replay(earlier) == 1
    left = [trial.config for trial in advance(search, 3, lambda config: ok(config, 1.0))]
    assert sorted(left, key=str) == [{"A": 1, "B": 2}, {"A": 4, "B": 1}, {"A": 4, "B": 2}]
    assert search.propose() is None


def test_a_default_that_cannot_be_proposed_is_skipped_and_each_proposal_is_told_once():
    with pytest.raises(InputError, match="the seed is -1, expected 0 or more"):
        Search(SPACE, "random", seed=-1)
    assert [Search(SPACE, trials=trials).sampler for trials in (50, 10_000)] == ["feasible", "brute-force"]
    available = np.arange(len(SPACE)) != SPACE.row_of(DEFAULT)
    search = Search(SPACE, "brute-force", first=[DEFAULT, {"BM": 7}], available=available)
    assert (search.propose() or pytest.fail("nothing proposed"))[1] != DEFAULT
    search = Search(SPACE, "random")
    row, config = search.propose() or pytest.fail("nothing proposed")
    search.tell(row, trial_of(config))
    with pytest.raises(ConfigError, match=f"row {row} was not proposed or was told already"):
        search.tell(row, trial_of(config))


def test_a_study_shows_times_in_microseconds_and_failures_as_the_worst():
    ended = [
        broken({"A": 1}),
        ok({"A": 2}, 20.0),
        ok({"A": 3}, 50.0, Outcome.PRUNED),
        broken({"A": 4}, Outcome.CRASHED),
        Trial({"A": 5}, Outcome.NOT_AVAILABLE, "not in the recording"),
    ]
    study = study_of_trials(make_space({"A": (1, 2, 3, 4, 5)}).parameters, ended)
    assert [trial.value for trial in study.trials] == [1e6, 20.0, 50.0, 100.0, None]
    assert [trial.constraints[FAILED] for trial in study.trials] == [1.0, 0.0, 0.0, 1.0, 1.0]
    ends = [trial.user_attrs["outcome"] for trial in study.trials]
    assert ends == ["wrong_result", "ok", "pruned", "crashed", "not_available"]
    assert study.trials[0].user_attrs["reason"] == "element 3 is 7, expected 5"
    assert study.best_params == {"A": 2}
    assert study.metric_names == ["time_us"]


OBJECTIVES = ("time", "registers")
FOLLOWING = [name for name in INSTALLED if SAMPLERS[name].multi_objective]


def judged(config: Config) -> Trial:
    """Return a trial with registers, which are few for small tiles, where the time is not the lowest."""
    if config["BM"] == config["BN"] == 32:
        return broken(config)
    registers = 16 * int(config["TM"]) + int(config["BM"]) // 8 + (20 if config["ASYNC"] else 0)
    return replace(tile_ok(config), resources=model.Resources(registers, 0, 0, 0, 0))


def both(sampler: str, seed: int = 0) -> Search:
    return Search(SPACE, sampler, seed, objectives=OBJECTIVES)


@pytest.mark.parametrize("sampler", FOLLOWING)
def test_every_sampler_but_those_refused_follows_both(sampler, monkeypatch):
    search, told = both(sampler), []
    learn = search._rows.tell

    def tell(row, result, error):
        told.append(result)
        learn(row, result, error)

    monkeypatch.setattr(search._rows, "tell", tell)
    ended = advance(search, 40, judged)
    assert told == [objective_values(trial, OBJECTIVES) for trial in ended]
    assert len({SPACE.row_of(trial.config) for trial in ended}) == 40


def test_one_that_follows_a_single_objective_is_refused():
    expected = r"'cmaes' cannot follow several objectives \(time, registers\); feasible, tpe"
    for make in (lambda: check_sampler("cmaes", OBJECTIVES), lambda: both("cmaes")):
        with pytest.raises(InputError, match=expected):
            make()


@pytest.mark.parametrize("sampler", ["feasible", "tpe", "nsga2"])
def test_a_search_for_both_goes_on_as_the_first(sampler):
    check_resuming(lambda: both(sampler, 3), judged, 1, {25})


def test_a_failure_is_told_worse_than_all_in_everything():
    sampler = FeasibleSampler(make_space({"TM": (2, 4, 8, 1)}), 0, objectives=2)
    for row, result in enumerate([None, (20.0, 90.0), (30.0, 40.0), None]):
        sampler.tell(sampler.propose(row), result)
    trials = sampler._private.trials
    assert [trial.values for trial in trials] == [[1e6, 1e6], [20.0, 90.0], [30.0, 40.0], [60.0, 180.0]]
    assert [trial.constraints[FAILED] for trial in trials] == [1.0, 0.0, 0.0, 1.0]
    assert [trial.number for trial in sampler._private.best_trials] == [1, 2]


ROWS = [SPACE.config(row) for row in range(0, len(SPACE), 11)]
TRIALS = [broken(config) if config["BM"] == 256 else tile_ok(config) for config in ROWS]


@pytest.fixture
def study():
    return study_of_trials(SPACE.parameters, TRIALS, "sgemm M=64")


def test_a_study_of_stored_trials_shows_true_values_and_keeps_what_the_space_lost(study):
    assert study.study_name == "sgemm M=64"
    assert [trial.params for trial in study.trials] == [dict(trial.config) for trial in TRIALS]
    fastest = min((trial for trial in TRIALS if trial.time_us), key=lambda trial: trial.time_us or 0)
    assert (study.best_params, study.best_value) == (fastest.config, fastest.time_us)
    old = [ok({"BM": 512, "OLD": "x"}, 5.0), ok(SPACE.config(0), 6.0)]
    kept = study_of_trials(SPACE.parameters, old)
    assert [trial.params for trial in kept.trials] == [{"BM": 512, "OLD": "x"}, SPACE.config(0)]


def test_attributes_say_how_a_trial_ended_and_what_it_used():
    trial = Trial(
        SPACE.config(0),
        Outcome.OK,
        geometry=model.LaunchGeometry((4, 4, 1), (16, 16, 1), 1024),
        resources=model.Resources(64, 8, 16, 0, 4096),
        occupancy=model.Occupancy(4, 32, 0.5, ("registers",), {"registers": 4}),
        measurement=model.Measurement(10.0, 9.9, 10.1),
    )
    assert attributes_of(trial) == {
        "outcome": "ok",
        "source": "cuda",
        "threads": 256,
        "dynamic_smem_bytes": 1024,
        "registers": 64,
        "spill_bytes": 24,
        "static_smem_bytes": 4096,
        "occupancy": 0.5,
        "blocks_per_sm": 4,
        "limited_by": "registers",
        "relative_error": pytest.approx(0.01 / 1.96, rel=1e-4),
        "low_us": 9.9,
        "high_us": 10.1,
    }


def test_optunas_own_tools_and_plots_accept_the_study(study):
    pytest.importorskip("pandas")
    frame = study.trials_dataframe()
    assert len(frame) == len(TRIALS)
    assert set(frame["params_LAYOUT"]) == {"row", "column"}
    with quiet_optuna():
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importance = optuna.importance.get_param_importances(study, evaluator=evaluator)
    assert importance.keys() == {"BM", "BN", "TM", "LAYOUT", "ASYNC"}
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt
    from optuna.visualization import matplotlib as plots

    with quiet_optuna():
        for plot in (plots.plot_optimization_history, plots.plot_parallel_coordinate, plots.plot_slice):
            plot(study)
    plt.close("all")


def test_studies_of_one_file_are_those_that_optuna_reads_but_no_two_of_one_name(tmp_path):
    path, written = tmp_path / "studies with a space.db", {"sgemm M=64": TRIALS, "another": TRIALS[:3]}
    for name, trials in written.items():
        write_study(path, SPACE.parameters, trials, name)
    with pytest.raises(InputError, match=r"studies with a space\.db holds a study named 'sgemm M=64' already"):
        write_study(path, SPACE.parameters, TRIALS, "sgemm M=64")
    with quiet_optuna():
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        for name, trials in written.items():
            loaded = optuna.load_study(study_name=name, storage=storage)
            expected = study_of_trials(SPACE.parameters, trials).trials
            for found, given in zip(loaded.trials, expected, strict=True):
                for part in ("params", "values", "user_attrs", "constraints"):
                    assert getattr(found, part) == getattr(given, part)
            assert loaded.trials[-1].constraints.keys() == {FAILED}
            assert loaded.metric_names == ["time_us"]
    storage.remove_session()
    storage.engine.dispose()


@pytest.mark.parametrize("place", ["missing/folder.db", "text.db"])
def test_what_is_no_storage_is_refused(tmp_path, place):
    (tmp_path / "text.db").write_text("this is not a database, but it is long enough to be taken for one" * 20)
    with pytest.raises(InputError, match="cannot be written as an Optuna storage"):
        write_study(tmp_path / place, SPACE.parameters, TRIALS, "sgemm M=64")


RANKED = Lookahead(compiling=8, per_measured=2, queued=1)


def answer(config: Config) -> Trial:
    """Return a trial of a simulated device on which the tiles that fail do so in part because they do not fit."""
    if config["BM"] != 256 or config["TM"] != 2:
        return trial_of(config)
    return replace(compiled_trial(config), outcome=Outcome.RESOURCE_EXCEEDED, reason="no block fits", stage="resources")


def go(shortlist: Shortlist, trials: int, done: int = 0) -> tuple[list[Trial], int]:
    return session(shortlist, trials, answer, done)


def shortlist_of(earlier: list[Trial], lookahead: Lookahead = RANKED, seed: int = 5) -> Shortlist:
    return Shortlist(Search(SPACE, "feasible", seed, first=[DEFAULT]), lookahead, earlier=earlier)


def configs(trials: list[Trial]) -> list[Config]:
    return [trial.config for trial in trials]


def proposals_that_count(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(searching, "_EXPECTED_PROPOSALS", count)


def test_the_gain_of_many_proposals_is_known_when_all_had_a_model_and_a_row_is_left(monkeypatch):
    shortlist = shortlist_of([])
    go(shortlist, 40)
    assert None in shortlist._gains
    assert shortlist.expected_gain is None
    shortlist._gains.extend([0.25] * 256)
    assert shortlist.expected_gain == pytest.approx(64)
    proposals_that_count(monkeypatch, 4)
    shortlist = shortlist_of([])
    go(shortlist, 40)
    assert len(shortlist._gains) == 4
    assert shortlist.expected_gain == pytest.approx(sum(shortlist._gains))
    go(shortlist, 1000, done=40)
    assert shortlist.propose() is None
    assert shortlist.expected_gain is None


def test_the_end_of_a_search_is_foreseen_from_the_gains_that_leave_the_window(monkeypatch):
    proposals_that_count(monkeypatch, 8)
    shortlist = shortlist_of([])  # in which two proposals are one trial
    assert shortlist.trials_until(0.1) is None  # nothing was proposed
    shortlist._gains.extend([None, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert shortlist.trials_until(0.5) == 2 / 2  # when that without a model and the first gain have left
    assert shortlist.trials_until(0.1) == 3 / 2
    shortlist._gains.extend([0.01] * 8)
    assert shortlist.trials_until(0.1) == 0
    assert shortlist.trials_until(0.05) is None  # as much is added as leaves


def test_without_a_choice_candidates_are_measured_as_they_were_proposed():
    search = Search(SPACE, "tpe", 3)
    shortlist = Shortlist(Search(SPACE, "tpe", 3), Lookahead(4))
    waiting = []
    for _ in range(40):
        while len(waiting) < 4:
            waiting.append(search.propose() or pytest.fail("too few rows"))
        while shortlist.propose() is not None:
            pass
        row, config = waiting.pop(0)
        assert shortlist.ready() == [row]
        assert shortlist.choose({row: compiled_trial(config)}) == row
        search.tell(row, answer(config))
        shortlist.tell(row, answer(config))


def test_more_are_compiled_than_are_measured_the_default_first_and_none_is_lost_or_measured_twice():
    ended, compiled = go(shortlist_of([]), 60)
    assert ended[0].config == DEFAULT
    assert len(ended) == 60
    assert compiled >= 90
    ended, compiled = go(shortlist_of([]), 1000)
    assert len(ended) == compiled == len(SPACE)
    assert {SPACE.row_of(config) for config in configs(ended)} == set(range(len(SPACE)))


def test_what_is_set_aside_is_tried_in_the_end_and_survives_a_kill():
    few = Lookahead(compiling=8, per_measured=3, queued=1, max_waiting=5)
    whole = check_ranked_resuming(lambda earlier: shortlist_of(earlier, few), answer, 1000, (20, 110))
    assert {SPACE.row_of(config) for config in configs(whole)} == set(range(len(SPACE)))
    assert go(shortlist_of([], few), 1000)[1] > len(whole) == len(SPACE)


@pytest.mark.parametrize("lookahead", [RANKED, Lookahead(32, per_measured=2, queued=7, gpus=4)], ids=["1", "4"])
def test_a_killed_session_goes_on_as_if_it_had_not_been_killed(lookahead):
    check_ranked_resuming(lambda earlier: shortlist_of(earlier, lookahead), answer, 70, (1, 7, 27))


def test_only_rows_that_this_session_proposed_wait():
    earlier, _ = go(shortlist_of([]), 24)
    resumed = shortlist_of(earlier)
    proposed: set[int] = set()
    while (next_one := resumed.propose(24)) is not None:
        assert set(resumed.waiting()) <= (proposed := {*proposed, next_one[0]})
    assert set(resumed.ready()) <= set(resumed.waiting()) == proposed


def test_trials_of_another_seed_are_learnt_from_and_not_made_again():
    others, _ = go(shortlist_of([], seed=1), 50)
    rest, _ = go(shortlist_of(others, seed=2), 80, done=50)
    assert len({SPACE.row_of(config) for config in configs(others + rest)}) == 80
    assert min(trial.time_us or np.inf for trial in others) < 200
    again, _ = go(shortlist_of(others + rest[:10], seed=2), 80, done=60)
    assert configs(again) == configs(rest[10:])


def test_no_room_proposes_nothing_and_a_sampler_without_a_model_cannot_rank():
    shortlist = shortlist_of([answer(DEFAULT)])
    assert shortlist.propose(0) is None
    assert shortlist.ready() == []
    proposed = [shortlist.propose(1) for _ in range(20)]
    assert [each[0] for each in proposed if each is not None] == shortlist.ready()
    with pytest.raises(ConfigError, match="'random' cannot rank"):
        Search(tile_space(), "random").nominate()


def test_features_are_of_one_scale_and_need_a_compiler():
    features = features_of(compiled_trial({}, registers=255), sm_count=132)
    assert features.min() >= 0
    assert features.max() <= 1
    assert features_of(replace(compiled_trial({}), resources=None), sm_count=132) is None


def test_one_thread_at_a_time_sets_how_loud_optuna_is(capsys):
    """The level and the filters are of the process: one that ends would restore them for all."""
    loud, entered = optuna.logging.get_verbosity(), threading.Event()
    levels: list[int] = []

    def quietly() -> None:
        with quiet_optuna():
            entered.set()
            outside.join()
            optuna.create_study()
            levels.append(optuna.logging.get_verbosity())

    def first() -> None:
        with quiet_optuna():
            inside.start()
            entered.wait(0.05)  # which the other thread can reach only where both may be quiet at a time

    inside, outside = threading.Thread(target=quietly), threading.Thread(target=first)
    outside.start()
    outside.join()
    inside.join()
    assert (levels, optuna.logging.get_verbosity()) == ([optuna.logging.ERROR], loud)
    assert capsys.readouterr().err == ""
