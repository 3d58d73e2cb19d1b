"""Operations tuned by replay: how the budget is shared, who wins, what is stored and shown, and what is refused."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from judges import timed
from msgspec import structs

from autotile.core.device import device_profile
from autotile.core.model import Outcome, Trial
from autotile.core.statistics import Interval
from autotile.database.keys import library_key
from autotile.errors import InputError
from autotile.kernel.operation import Library
from autotile.tuning import operation_session
from autotile.tuning.finals import with_times
from autotile.tuning.operation_session import tune_operation
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.schedule import Schedule
from autotile.tuning.session import Session

NAMES = ("first", "second", "third")


@pytest.fixture
def operation(operation_of_copies):
    return operation_of_copies(*NAMES, third="n > 100")


@pytest.fixture
def record(operation, record_copies):
    """Return a function that records kernels of the operation, given the factors on their times."""
    return partial(record_copies, operation)


@pytest.fixture
def recorded(record):
    """Recordings in which the second kernel is the fastest, and the third far slower."""
    record(first=1.5, second=1.0, third=4.0)


@pytest.fixture
def run(bench, operation):
    def tune(observe=lambda _: None, n=4096, **options):
        given = {name: options.pop(name) for name in ("libraries", "proposed") if name in options}
        chosen = TuneOptions(**{"replay": "auto", "workers": 1, **options})
        problem = operation.resolve({"n": n})
        return tune_operation(operation, problem, bench.settings, chosen, observe=observe, **given)

    return tune


class TestHalving:
    def test_the_fastest_kernel_wins_and_the_slowest_gets_no_more(self, bench, recorded, run):
        seen: dict[tuple[int, str], None] = {}
        result = run(lambda step: seen.update({(step.path[0].number, step.problem.kernel): None}), trials=45)
        assert [one.name for one in result.contenders] == ["second", "first", "third"]
        assert result.winner == result.contenders[0]
        by_name = {one.name: one for one in result.contenders}
        assert by_name["third"].state == "dropped"
        assert "the time of second after" in by_name["third"].reason
        assert [by_name[name].trials for name in NAMES] == [12, 12, 5]
        assert by_name["first"].ratio.value == pytest.approx(1.5, rel=0.2)
        assert list(seen) == [*((1, name) for name in NAMES), (2, "second"), (2, "first"), (3, "second")]
        # it shows itself
        assert "scaling n=4096 float32 on NVIDIA H200 (replayed): second," in repr(result)
        html = result._repr_html_()
        assert "over the winner" in html
        assert "dropped" in html
        assert result.winner.remark == "winner"
        assert result.winner.ratio == Interval(1.0, 1.0, 1.0)
        # all is stored, and the same command measures nothing again
        assert result.winner.trial.config in [trial.config for trial in bench.stored("final")]
        before = len(bench.stored())
        assert before == sum(one.trials for one in result.contenders)
        again = run(trials=45)
        assert len(bench.stored()) == before
        assert again.winner.trial.config == result.winner.trial.config

    def test_a_hopeless_kernel_gets_no_more_though_it_is_in_the_faster_half(self, record, run):
        """Of three, two go on to the second round, unless they take more than twice as long as the fastest."""
        record(first=3.0, second=1.0, third=4.0)
        result = run(trials=45)
        by_name = {one.name: one for one in result.contenders}
        assert [by_name[name].state for name in NAMES] == ["dropped", "won", "dropped"]
        assert by_name["first"].trials == by_name["third"].trials < by_name["second"].trials

    def test_the_kernels_of_a_round_share_several_gpus(self, recorded, run):
        result = run(trials=45, devices=(0, 1))
        assert (result.winner.name, result.interrupted) == ("second", False)
        assert sum(one.trials for one in result.contenders) >= 29

    @pytest.fixture
    def _at_rest(self, monkeypatch):
        """A GPU, and clocks that stand still: sessions end where nothing is left to try."""
        monkeypatch.setattr(Schedule, "device", device_profile("h200"))
        monkeypatch.setattr(Schedule, "elapsed_s", 0.0)
        monkeypatch.setattr(Session, "_elapsed_s", lambda _: 0.0)

    @pytest.mark.usefixtures("_at_rest")
    def test_a_short_budget_tries_what_is_proposed_and_goes_on_with_the_fastest(self, recorded, run):
        seen: dict[tuple[int, str], None] = {}
        result = run(
            lambda step: seen.update({(step.path[0].number, step.problem.kernel): None}),
            proposed=lambda *_: [(name, {"THREADS": 64, "WORK": work}) for name in NAMES for work in (1, 2)],
            budget_s=2.5,
        )
        assert list(seen) == [*((1, name) for name in NAMES), (2, "second")]
        by_name = {one.name: one for one in result.contenders}
        assert [by_name[name].trials for name in NAMES] == [2, 12, 2]

    @pytest.mark.usefixtures("_at_rest")
    def test_where_nothing_that_is_proposed_runs_all_kernels_are_searched(self, recorded, run, monkeypatch):
        tune, turns = operation_session._Halving._tune, list[tuple[int, str]]()

        def fails_first(halving, coming, place, lane):
            turns.append((place.number, coming[0].name))
            if place.number > 1:
                tune(halving, coming, place, lane)

        monkeypatch.setattr(operation_session._Halving, "_tune", fails_first)
        result = run(proposed=lambda *_: [("first", {"THREADS": 64, "WORK": 1})], budget_s=2.5)
        assert turns == [(number, name) for number in (1, 2) for name in NAMES]
        assert (result.winner.name, [one.trials for one in result.contenders]) == ("second", [12] * 3)

    def test_what_a_kernel_tries_first_is_compiled_before_its_turn(self, operation):
        """The compilation of each begins once: of what is proposed, or else of the default."""
        kernel = operation.members[0].load()
        seeds = [{**kernel.spec.default, "WORK": work} for work in (1, 2)]
        entrants = [operation_session._Entrant(kernel, operation.resolve({"n": 4096})) for _ in range(2)]
        entrants[1].seeds = seeds
        schedule = SimpleNamespace(device=device_profile("h200"))
        halving = operation_session._Halving(operation, entrants[0].problem, schedule, (), lambda *_: None, entrants)
        halving._compile_pool = Mock(**{"submit.side_effect": lambda _: Future()})
        halving._begin_compiling(entrants)
        halving._begin_compiling(entrants)
        jobs = [call.args[0] for call in halving._compile_pool.submit.call_args_list]
        assert [job.options[1] for job in jobs] == ["-DWORK=1", "-DWORK=1", "-DWORK=2"]
        assert [len(one.begun or ()) for one in entrants] == [1, 2]

    def test_a_kernel_that_does_not_run_costs_nothing_more_and_where_none_does_it_says_why(self, record, run):
        for n, left_out in ((4096, False), (64, True)):  # by its condition
            said = rf"no kernel of scaling ran for scaling n={n} float32: there is no"
            with pytest.raises(InputError, match=said) as raised:
                run(n=n, trials=12)
            assert ("third" in str(raised.value)) is not left_out
        record(first=1.0, second=2.0)  # nothing is recorded of the third
        assert [one.trials for one in run(trials=1).contenders] == [1, 1, 0]  # each that runs has one at least
        result = run(trials=12)
        assert sum(one.trials for one in result.contenders) == 12  # the share of what fails is that of the others
        third = result.contenders[-1]
        assert (third.name, third.state, third.trials) == ("third", "failed", 0)
        assert "no recording" in third.reason
        assert result.winner.name == "first"

    def test_a_kernel_that_cannot_compute_the_problem_is_not_applicable(self, record, run, operation):
        """Its rules leave no configuration: nothing has failed."""
        (third,) = (member.kernel for member in operation.members if member.name == "third")
        text = Path(third).read_text()
        text = text.replace("n = 4096", "n = 2000").replace("[rules]", '[rules]\nsmall = "n <= 2000"')
        Path(third).write_text(text)
        record(first=1.0, second=2.0)
        result = run(trials=12)
        third_one = result.contenders[-1]
        assert (third_one.name, third_one.state) == ("third", "inapplicable")
        assert third_one.reason.startswith("the rule 'small' leaves none of ")
        assert third_one.reason.endswith(": n <= 2000")
        assert third_one.remark.startswith("not applicable: the rule 'small'")
        assert " of 2 kernels<" in result._repr_html_()


def ending_in(*place: Any, error: type[BaseException]) -> Callable[[Progress], None]:
    """Return an observer that raises an error in a round, at a kernel, and in a phase if there is a third."""

    def observe(step: Progress) -> None:
        if (step.path[0].number, step.problem.kernel, step.phase)[: len(place)] == place:
            raise error("killed")

    return observe


def test_an_interrupted_session_names_no_winner_and_a_killed_one_goes_on(bench, recorded, run):
    result = run(ending_in(2, "second", error=KeyboardInterrupt), trials=45)
    assert (result.interrupted, result.winner, result.to_json()["winner"]) == (True, None, None)
    assert result.best is not None
    with pytest.raises(RuntimeError, match="killed"):
        run(ending_in(2, "first", "searching", error=RuntimeError), trials=45)
    resumed = run(trials=45)
    assert resumed.winner.name == "second"
    assert len(bench.stored()) == sum(one.trials for one in resumed.contenders)


@pytest.mark.parametrize(("time_us", "finals_s"), [(1000.0, 6.8), (999.0, 0.8), (None, 0.8)])
def test_time_is_reserved_for_the_finals_and_for_the_last_race(operation, time_us, finals_s):
    kernel = operation.members[0].load()
    problem = operation.resolve({"n": 4096})
    trial = timed({}, time_us) if time_us is not None else None
    entrants = [operation_session._Entrant(kernel, problem, best=trial)]
    halving = operation_session._Halving(operation, problem, None, (), lambda kernel, problem: None, entrants)
    contest_s = 60 * 4 * 1e-6 * (time_us or 0.0)
    assert halving._reserve_s(60.0) == pytest.approx(finals_s + contest_s + 0.8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fresh": True}, "fresh"),
        ({"tries": ({"THREADS": 64, "WORK": 1},)}, "configurations to try"),
        ({"replay": "file.npz"}, "a recording by name"),
        ({"objectives": ("time", "registers")}, "objectives"),
    ],
)
def test_options_of_one_kernel_are_refused(run, options, said):
    with pytest.raises(InputError, match=f"{said}: an operation takes no such option"):
        run(**options)


def test_a_wrong_library_does_not_win_and_a_faster_one_is_stored_by_its_own_key(
    recorded, run, operation, database, monkeypatch
):
    """The race itself needs a GPU; here its times are given."""

    def raced(library):
        def contest(finalists, libraries, problem, **context):
            assert [one.name for one in libraries] == ["mine"]
            return [*((with_times(t, _rounds(t.time_us)), "") for _, _, t in finalists), (library, "")]

        monkeypatch.setattr(operation_session, "hold_contest", contest)
        return run(trials=45, libraries=[Library("mine", "1.2")])

    monkeypatch.setattr(operation_session, "_is_replayed", lambda device: False)
    result = raced(Trial({}, Outcome.WRONG_RESULT, "3 of 9 elements are wrong", "finals"))
    assert result.winner.name == "second"
    mine = result.libraries[0]
    assert (mine.state, mine.trial) == ("failed", None)
    assert "3 of 9" in mine.reason
    assert database.best("scaling:mine") == []
    result = raced(with_times(timed({}, 2.0), _rounds(2.0)))
    assert (result.winner.name, result.winner.is_library) == ("mine", True)
    second = result.contenders[1]
    assert second.name == "second"
    assert second.ratio.value == pytest.approx(second.time_us / 2.0)
    assert result.to_json()["winner"]["name"] == "mine"
    (best,) = database.best("scaling:mine")
    assert (best.trial.time_us, best.trial.config) == (2.0, {})
    of = operation, operation.resolve({"n": 4096}), structs.replace(device_profile("h200"), source="replayed")
    assert best.key == library_key(*of, "mine", "1.2", nvrtc_version=best.key.nvrtc_version)


def _rounds(time_us: float) -> tuple[float, ...]:
    return tuple(time_us * (1 + 0.001 * (number % 3 - 1)) for number in range(15))
