"""Objectives that are expressions, and metrics: their values, what is pruned, who wins, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotile.core.model import Measurement, Outcome, Problem, Resources, Trial, split_objectives
from autotile.database.database import Database
from autotile.errors import InputError, SpecError
from autotile.kernel.spec import KernelSpec
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.start import Scorer, measures_energy, session_objective

METRICS = '[metrics]\nrate = "4 * n / time_us"\nshare = "rate / 1000"\n[arguments]'


@pytest.fixture
def scored(rewrite: Callable[[Mapping[str, str]], Any]) -> Any:
    """The tiny kernel with metrics."""
    return rewrite({"[arguments]": METRICS})


def trial(work: int, time_us: float, **telemetry: float) -> Trial:
    measured = Measurement(time_us, 0.9 * time_us, 1.1 * time_us)
    config = {"THREADS": 64, "WORK": work}
    return Trial(config, Outcome.OK, resources=Resources(32, 0, 0, 0, 0), measurement=measured, telemetry=telemetry)


def scorer(spec: KernelSpec, text: str | None, *, maximize: bool = False) -> Scorer:
    objective = session_objective(spec, TuneOptions(objective=text, maximize=maximize))
    return Scorer(spec, Problem("scale", {"n": 1000}, "float32"), objective)


def test_metrics_are_stored_without_an_objective(scored: Any) -> None:
    found = scorer(scored.kernel.spec, None).scored(trial(2, 8.0, max_error=1e-6))
    assert found.scores == {"rate": 500.0, "share": 0.5}
    assert (found.cost, found.telemetry["max_error"]) == (8.0, 1e-6)


def test_the_cost_is_the_objective_or_its_reciprocal(scored: Any) -> None:
    spec = scored.kernel.spec
    assert scorer(spec, "time_us / WORK").scored(trial(4, 8.0)).cost == 2.0
    found = scorer(spec, "rate * WORK", maximize=True).scored(trial(4, 8.0))
    assert list(found.scores.items()) == [("objective", 2000.0), ("rate", 500.0), ("share", 0.5)]
    assert found.cost == 1 / 2000
    assert scorer(spec, "registers + 0 * n").scored(trial(4, 8.0)).cost == 32


def test_a_trial_of_another_objective_is_scored_anew(scored: Any) -> None:
    spec = scored.kernel.spec
    first = scorer(spec, "time_us * WORK").scored(trial(4, 8.0))
    assert scorer(spec, None).scored(first).cost == 8.0
    assert scorer(spec, "time_us / WORK").scored(first).scores["objective"] == 2.0


@pytest.mark.parametrize(("text", "maximize"), [("time_us / WORK", False), ("n * WORK / time_us", True)])
def test_slow_is_what_costs_more_than_the_best(scored: Any, text: str, maximize: bool) -> None:
    found = scorer(scored.kernel.spec, text, maximize=maximize)
    best = found.scored(trial(2, 10.0))
    assert found.time_limit_us(trial(4, 1.0), best) == pytest.approx(20.0)
    assert found.time_limit_us(trial(1, 1.0), best) == pytest.approx(5.0)
    assert found.time_limit_us(trial(1, 1.0), None) is None


@pytest.mark.parametrize("text", ["energy_mj * time_us", "1000 - time_us", "registers + 0 * time_us"])
def test_nothing_is_pruned_where_the_time_does_not_tell(scored: Any, text: str) -> None:
    found = scorer(scored.kernel.spec, text)
    best = found.scored(trial(2, 10.0, energy_mj=3.0))
    assert found.time_limit_us(trial(4, 1.0), best) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5 - time_us", r"the objective '5 - time_us' is -3.0 with THREADS=64 WORK=2; expected a positive number"),
        ("time_us / (WORK - 2)", r"is not finite"),
        ("energy_mj", r"needs energy_mj, which has no value here"),
    ],
)
def test_an_objective_needs_a_positive_value(scored: Any, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        scorer(scored.kernel.spec, text).scored(trial(2, 8.0))


def test_unknown_names_are_refused(scored: Any) -> None:
    with pytest.raises(SpecError, match=r"unknown name 'WROK'; did you mean 'WORK'"):
        scorer(scored.kernel.spec, "time_us / WROK")


def test_energy_is_measured_where_it_is_used(rewrite: Callable[[Mapping[str, str]], Any], scored: Any) -> None:
    spec = scored.kernel.spec
    assert not measures_energy(spec, None)
    assert measures_energy(spec, session_objective(spec, TuneOptions(objective="energy_mj * time_us")))
    assert measures_energy(rewrite({"share = ": 'watts = "1e3 * energy_mj / time_us"\nshare = '}).kernel.spec, None)


def test_names_and_expressions() -> None:
    assert split_objectives(["registers,energy"]) == (("time", "registers", "energy"), None)
    assert split_objectives(["max(time_us, 3)"]) == (("time",), "max(time_us, 3)")
    assert split_objectives(["time", "rate"], ["rate"]) == (("time",), "rate")
    with pytest.raises(InputError, match=r"there is no objective 'rate'"):
        split_objectives(["rate"])
    with pytest.raises(InputError, match=r"must be the only one"):
        split_objectives(["registers", "time_us / 2"])


OBJECTIVES = [("time_us * WORK", False), ("n / time_us / WORK", True)]


class TestSessions:
    @pytest.mark.parametrize(("text", "maximize"), OBJECTIVES)
    def test_the_best_by_the_objective_wins_and_is_served(self, scored: Any, text: str, maximize: bool) -> None:
        result = scored.tune(scored.record(), objective=text, maximize=maximize, discard=False)
        best = min(scored.stored(), key=lambda one: one.time_us * one.config["WORK"])
        assert result.winner.config == best.config
        assert result.winner.config["WORK"] == 1
        assert result.winner.cost == min(one.cost for one in scored.stored() if one.cost is not None)
        assert result.speedup.value == pytest.approx(result.default.cost / result.winner.cost)
        assert result.to_json()["winner"]["scores"].keys() == {"objective", "rate", "share"}
        with Database.open(read_settings().database) as database:
            (served,) = database.best()
        assert served.trial.config == best.config

    def test_pruning_compares_the_objective(self, scored: Any) -> None:
        scored.tune(scored.record(), objective="time_us * WORK ** 2")
        trials = scored.stored()
        costs = {one.cost: one for one in trials}
        least = min(costs)
        assert costs[least].outcome is Outcome.OK
        for one in trials:
            if one.outcome is Outcome.PRUNED:
                assert one.cost > 1.25 * least
        slow_but_good = [one for one in trials if one.cost <= 1.25 * least]
        assert all(one.outcome is Outcome.OK for one in slow_but_good)

    def test_a_session_resumes_with_another_objective(self, scored: Any) -> None:
        by_time = scored.tune(scored.record(), discard=False)
        by_work = scored.tune(scored.record(), objective="time_us * WORK ** 4", discard=False)
        assert by_time.winner.config["WORK"] == 4
        assert by_work.winner.config["WORK"] == 1
        assert by_work.resumed == 12

    def test_an_objective_of_the_file(self, rewrite: Callable[[Mapping[str, str]], Any]) -> None:
        kernel = rewrite({"[arguments]": '[objective]\nvalue = "1 / (time_us * WORK)"\nmaximize = true\n[arguments]'})
        assert kernel.tune(kernel.record(), discard=False).winner.config["WORK"] == 1
