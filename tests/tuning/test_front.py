"""Sessions with several objectives: by replay for registers, on a fake GPU for energy and error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotile.core.device import device_profile
from autotile.core.model import (
    Measurement,
    Outcome,
    Problem,
    Resources,
    Trial,
    config_key,
    non_dominated,
    objective_values,
)
from autotile.database.database import Database
from autotile.errors import InputError, RecordingError
from autotile.kernel.library import Kernel
from autotile.settings import Settings, read_settings
from autotile.tuning.finals import Finals
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import pareto_front
from autotile.workers.child import WorkerPool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Workload

BEST = {"THREADS": 256, "WORK": 4}
REGISTERS = ("time", "registers")


def trial(tile: int, time_us: float, registers: int, outcome: Outcome = Outcome.OK) -> Trial:
    resources = Resources(registers, 0, 0, 0, 0)
    return Trial({"BM": tile}, outcome, resources=resources, measurement=Measurement(time_us, time_us, time_us))


@pytest.fixture
def energetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the choice of a backend by a fake GPU that measures energy."""

    def backend(
        kernel: Kernel,
        problem: Problem,
        settings: Settings,
        options: TuneOptions,
        worker_pool: WorkerPool | None,
        **_: object,
    ) -> Gpu:
        workload = Workload(
            "", "", problem.sizes, problem.dtype, "cold", str(settings.cache), 10**8, 0.1,
            energy="energy" in options.objectives,
        )  # fmt: skip
        device = device_profile("h200")
        return Gpu(workload, options.run_deadline_s, "fake_energy_worker", worker_pool=worker_pool, device=device)

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr("autotile.tuning.session.choose_backend", backend)


class TestFront:
    def test_one_objective_has_none(self) -> None:
        assert pareto_front([trial(1, 10.0, 40)], None, ["time"]) is None

    def test_the_fastest_comes_first_and_what_others_beat_is_left_out(self) -> None:
        trials = [trial(1, 30.0, 32), trial(2, 10.0, 90), trial(3, 20.0, 90), trial(4, 20.0, 40), trial(5, 1.0, 1)]
        trials[-1] = replace(trials[-1], outcome=Outcome.CRASHED, measurement=None)
        front = pareto_front(trials, None, REGISTERS)
        assert front is not None
        assert [t.config["BM"] for t in front.trials] == [2, 4, 1]
        assert front.to_json() == {
            "objectives": ["time", "registers"],
            "front": [
                {"config": {"BM": 2}, "time_us": 10.0, "registers": 90},
                {"config": {"BM": 4}, "time_us": 20.0, "registers": 40},
                {"config": {"BM": 1}, "time_us": 30.0, "registers": 32},
            ],
        }

    def test_the_finals_have_the_last_word(self) -> None:
        searched = [trial(1, 10.0, 60), trial(2, 11.0, 50), trial(3, 30.0, 40)]
        refused = replace(searched[0], outcome=Outcome.WRONG_RESULT, measurement=None)
        front = pareto_front(searched, Finals((trial(2, 12.0, 50),), None, None, (), (refused,)), REGISTERS)
        assert front is not None
        assert [(t.config["BM"], t.time_us) for t in front.trials] == [(2, 12.0), (3, 30.0)]

    def test_where_nothing_ran_it_is_empty(self) -> None:
        front = pareto_front([trial(1, 1.0, 1, Outcome.CRASHED)], None, REGISTERS)
        assert front is not None
        assert front.to_json() == {"objectives": ["time", "registers"], "front": []}


class TestReplay:
    def test_time_alone_changes_nothing(self, bench: Any) -> None:
        result = bench.tune(bench.record())
        assert result.front is None
        assert {"front", "objectives"}.isdisjoint(result.to_json())

    @pytest.mark.parametrize("sampler", ["auto", "feasible", "tpe"])
    def test_registers_are_weighed_against_time(self, bench: Any, sampler: str) -> None:
        result = bench.tune(bench.record(), objectives=REGISTERS, sampler=sampler)
        assert result.winner.config == BEST
        assert result.outcomes == {Outcome.OK: 12}
        stored = bench.stored()
        values = [objective_values(t, REGISTERS) for t in stored]
        assert len({registers for _, registers in values}) > 1
        expected = {config_key(t.config) for t, kept in zip(stored, non_dominated(values), strict=True) if kept}
        assert {config_key(t.config) for t in result.front.trials} == expected
        assert result.to_json()["front"][0]["config"] == BEST

    def test_the_front_is_stored_with_the_run(self, bench: Any) -> None:
        result = bench.tune(bench.record(), objectives=REGISTERS)
        with Database.open(read_settings().database) as database:
            (study,) = database.studies()
            (run,) = database.runs(study.study_id)
        assert run.summary["front"] == json.loads(json.dumps(result.to_json()["front"]))
        assert run.settings["objectives"] == ["time", "registers"]

    def test_what_was_dropped_for_being_slow_is_measured_to_the_end(self, bench: Any) -> None:
        recording = bench.record()
        dropped = bench.tune(recording).outcomes[Outcome.PRUNED]
        result = bench.tune(recording, objectives=REGISTERS)
        assert result.resumed == 12 - dropped
        assert result.outcomes == {Outcome.OK: 12}

    def test_it_goes_on_as_it_would_have(self, bench: Any, tmp_path: Path) -> None:
        recording = bench.record()
        orders = []
        for name, stops in (("whole", [10]), ("parts", [4, 10])):
            location = str(tmp_path / f"{name}.db")
            for trials in stops:
                bench.tune(
                    recording, objectives=REGISTERS, sampler="feasible", trials=trials, finals=0, database=location
                )
            with Database.open(location) as database:
                orders.append([config_key(t.config) for t in database.trials(1, phase="search")])
        assert orders[0] == orders[1]

    @pytest.mark.parametrize(
        ("objectives", "lacking"),
        [(("time", "energy"), "no energy of"), (("time", "error", "energy"), "no error and no energy")],
    )
    def test_what_is_not_recorded_is_named(self, bench: Any, objectives: tuple[str, ...], lacking: str) -> None:
        with pytest.raises(RecordingError, match=f"{lacking}.*leave that objective out, or tune on a GPU"):
            bench.tune(bench.record(), objectives=objectives)

    def test_a_sampler_for_one_objective_is_refused(self, bench: Any) -> None:
        with pytest.raises(InputError, match="'cmaes' cannot follow several objectives"):
            bench.tune(bench.record(), objectives=REGISTERS, sampler="cmaes")


@pytest.mark.usefixtures("energetic")
class TestMeasured:
    def test_energy_and_error_make_the_front(self, bench: Any) -> None:
        result = bench.tune(None, objectives=("time", "energy", "error"))
        assert result.winner.config == BEST
        assert result.outcomes == {Outcome.OK: 11, Outcome.WRONG_RESULT: 1}
        document = result.to_json()
        assert document["objectives"] == ["time", "energy", "error"]
        assert len(document["front"]) > 2
        assert document["front"][0] == {
            "config": BEST, "time_us": pytest.approx(4.406, abs=1e-3), "energy_mj": 8.0, "max_error": 4e-7
        }  # fmt: skip
        assert {"THREADS": 32, "WORK": 1} in [entry["config"] for entry in document["front"]]

    def test_energy_is_not_measured_unasked(self, bench: Any) -> None:
        bench.tune(None)
        assert all("energy_mj" not in t.telemetry for t in bench.stored())
        assert all("max_error" in t.telemetry for t in bench.stored() if t.outcome.has_time)

    def test_what_lacks_an_energy_is_measured_again(self, bench: Any) -> None:
        without = bench.tune(None, objectives=("time", "error"))
        assert without.resumed == 0
        again = bench.tune(None, objectives=("time", "energy"))
        assert (again.resumed, again.outcomes[Outcome.OK]) == (1, 11)  # the wrong result needs no second trial
        assert bench.tune(None, objectives=("time", "energy", "error")).resumed == 12


def test_options_know_when_slow_ones_may_be_dropped() -> None:
    assert TuneOptions().drops_slow
    assert not TuneOptions(discard=False).drops_slow
    assert not TuneOptions(objectives=REGISTERS).drops_slow
