"""Options that are refused, fronts of several objectives by replay and on a fake GPU, and the drift of GPUs."""

import json
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from judges import BEST, FakeGpu, failing_if

from autotile.core.documents import to_document
from autotile.core.model import Measurement, Outcome, Resources, Trial, config_key, non_dominated, objective_values
from autotile.errors import InputError
from autotile.tuning.backend import workload_of
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.progress_state import Load
from autotile.tuning.result import measure_drift, pareto_front

REGISTERS = ("time", "registers")


def trial(tile: int, time_us: float, registers: int, outcome: Outcome = Outcome.OK) -> Trial:
    resources = Resources(registers, 0, 0, 0, 0)
    return Trial({"BM": tile}, outcome, resources=resources, measurement=Measurement(time_us, time_us, time_us))


@pytest.fixture
def energetic(bench, monkeypatch):
    """Replace the choice of a backend by a fake GPU, which measures energy if the session asks for it."""
    judge = failing_if(lambda config: config == {"THREADS": 64, "WORK": 4}, Outcome.WRONG_RESULT)
    recording = bench.record(judge)

    class Energetic(FakeGpu):
        def _reading(self, candidate, limit_us=None):
            found = super()._reading(candidate, limit_us)
            threads, work = (int(candidate.config[name]) for name in ("THREADS", "WORK"))
            used = {"energy_mj": threads / 64 + work} if self.measures_energy else {}
            return replace(found, telemetry={"max_error": 1e-7 * work, **used}) if found.outcome.has_time else found

    def choose(*of, **_):
        gpu = Energetic(recording, bench.device)
        gpu.measures_energy = workload_of(*of[:4]).energy
        return gpu

    monkeypatch.setattr(import_module("autotile.tuning.session"), "choose_backend", choose)


class TestFront:
    def test_an_expression_has_the_place_of_the_time(self):
        scored = replace(trial(1, 30.0, 32), telemetry={"objective": 4.0, "objective_cost": 0.25})
        front = pareto_front([scored], REGISTERS)
        entry = {"config": {"BM": 1}, "time_us": 30.0, "objective": 4.0, "registers": 32}
        assert front.to_json() == {"objectives": ["time", "registers"], "front": [entry]}
        table = front.table(scored.config)
        assert (table.caption, [*table.rows]) == (
            "front of objective and registers: 1 configuration",
            [("winner", "4", "32", "BM=1")],
        )

    def test_the_finals_have_the_last_word(self):
        searched = [trial(1, 10.0, 60), trial(3, 30.0, 40), trial(2, 11.0, 50)]
        refused = replace(searched[0], outcome=Outcome.WRONG_RESULT, measurement=None)
        front = pareto_front([*searched, trial(2, 12.0, 50), refused], REGISTERS)
        assert [(t.config["BM"], t.time_us) for t in front.trials] == [(2, 12.0), (3, 30.0)]
        assert pareto_front([refused], REGISTERS).to_json() == {"objectives": ["time", "registers"], "front": []}


class TestReplay:
    @pytest.mark.parametrize("sampler", ["auto", "feasible", "tpe"])
    def test_registers_are_weighed_against_time(self, bench, sampler, database):
        result = bench.tune(bench.record(), objectives=REGISTERS, sampler=sampler)
        assert (result.winner.config, result.outcomes) == (BEST, {Outcome.OK: 12})
        stored = bench.stored()
        values = [objective_values(t, REGISTERS) for t in stored]
        assert len({registers for _, registers in values}) > 1
        expected = {config_key(t.config) for t, kept in zip(stored, non_dominated(values), strict=True) if kept}
        assert {config_key(t.config) for t in result.front.trials} == expected
        assert result.to_json()["front"][0]["config"] == BEST
        # the front is stored with the run
        (study,) = database.studies()
        (run,) = database.runs(study.study_id)
        assert run.summary["front"] == json.loads(json.dumps(result.to_json()["front"]))
        assert run.settings["objectives"] == ["time", "registers"]


@pytest.mark.usefixtures("energetic")
class TestMeasured:
    def test_energy_and_error_make_the_front(self, bench):
        result = bench.tune(None, objectives=("time", "energy", "error"))
        assert (result.winner.config, result.outcomes) == (BEST, {Outcome.OK: 11, Outcome.WRONG_RESULT: 1})
        document = result.to_json()
        assert document["objectives"] == ["time", "energy", "error"]
        assert len(document["front"]) > 2
        time_us = pytest.approx(4.406, abs=1e-3)
        assert document["front"][0] == {"config": BEST, "time_us": time_us, "energy_mj": 8.0, "max_error": 4e-7}
        assert {"THREADS": 32, "WORK": 1} in [entry["config"] for entry in document["front"]]

    def test_energy_is_not_measured_unasked_and_what_lacks_one_is_measured_again(self, bench):
        assert bench.tune(None, objectives=("time", "error")).resumed == 0
        assert all("energy_mj" not in t.telemetry for t in bench.stored())
        assert all("max_error" in t.telemetry for t in bench.stored() if t.outcome.has_time)
        again = bench.tune(None, objectives=("time", "energy"))
        assert (again.resumed, again.outcomes[Outcome.OK]) == (1, 11)  # the wrong result needs no second trial
        assert bench.tune(None, objectives=("time", "energy", "error")).resumed == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trials": 0}, "trials is 0, expected a whole number of at least 1"),
        ({"trials": "7"}, "trials is '7', expected a whole number"),
        ({"trials": True}, "trials is True, expected a whole number"),
        ({"finals": -1}, "finals is -1, expected a whole number of at least 0"),
        ({"workers": 0}, "workers is 0"),
        ({"device_index": -1}, "device_index is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"budget_s": -1.0}, "budget_s is -1.0, expected seconds, 0 or more"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"run_deadline_s": "1"}, "run_deadline_s is '1'"),
        ({"l2": "warm"}, "l2 is 'warm', expected 'cold' or 'hot'"),
        ({"devices": (0, 0)}, "twice"),
        ({"devices": (0, -1)}, r"devices is .*-1"),
        *((plan, "whole number of at least 1") for plan in ({"points": 0}, {"points": "x"}, {"max_configs": 0})),
    ],
)
def test_refusals(options, said):
    with pytest.raises(InputError, match=said):
        (FamilyPlan if options.keys() & {"points", "max_configs"} else TuneOptions)(**options)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, 200),
        ({"trials": 7}, 7),
        ({"budget_s": 60.0}, None),
        ({"budget_s": 0}, None),
        ({"sampler": "brute-force"}, None),
        ({"sampler": "brute-force", "trials": 7}, 7),
        ({"trials": None, "workers": None, "budget_s": None}, 200),  # the choice is autotile's
        ({"trials": np.int64(7), "budget_s": np.float32(2.0)}, 7),  # NumPy's numbers are numbers
    ],
)
def test_trials_to_stop_at(options, target):
    assert TuneOptions(**options).trial_target == target


def trials(gpu: str, *times_us: float) -> list[Trial]:
    """Return trials whose telemetry has these times of the reference kernel, oldest first."""
    return [
        Trial({"BM": place}, Outcome.OK, telemetry={"reference_us": time_us}, gpu=gpu)
        for place, time_us in enumerate(times_us)
    ]


STEADY, DRIFTING = trials("GPU-a", 70.0, 70.1, 70.2), trials("GPU-b", 60.0, 61.0, 62.0)
PLAIN = [replace(trial, telemetry={}) for trial in trials("GPU-a", 60.0, 61.0)]


@pytest.mark.parametrize(
    ("of", "first", "least", "greatest"),
    [
        (trials("GPU-a", 60.0, 59.0, 63.0, 61.0), 60.0, 59.0, 63.0),
        # speeds of GPUs differ by more than that of each of them changes; the one that drifted most counts
        ([trial for pair in zip(STEADY, DRIFTING, strict=True) for trial in pair], 60.0, 60.0, 62.0),
        ([*PLAIN, *trials("GPU-a", 50.0)], 50.0, 50.0, 50.0),
    ],
)
def test_the_drift_is_that_of_the_reference_kernel(of, first, least, greatest):
    assert measure_drift(PLAIN) is None  # without the reference kernel
    assert to_document(measure_drift(of)) == {
        "reference_us": {"first": first, "least": least, "greatest": greatest},
        "spread": pytest.approx(greatest / least - 1, abs=1e-5),
        "clock_limits": [],
    }


def test_what_the_search_waits_for_is_said_where_it_binds(bench):
    result = bench.tune(bench.record(), trials=3)
    for load, said in (
        (Load(0.16, 0.03, "neither"), "the compilers 3 % of the search, the GPU 16 %<"),
        (Load(0.6, 0.03, "gpu"), "the compilers 3 % of the search, the GPU 60 %: the search waits for the GPU<"),
        (Load(0.0, 1.0, "compilers"), "100 % of the search, the GPU 0 %: the search waits for the compilers<"),
    ):
        assert said in replace(result, load=load)._repr_html_()


def test_a_clock_that_the_gpu_lowers_is_no_load_of_others(bench):
    """Bit 0x4 is the power limit, 0x1 an idle GPU; those beside the greatest time count."""
    result = bench.tune(bench.record(), trials=3)
    for mask, said in (
        (0x4, "60 to 70 us (16.7 %), as the power limit lowered the clock through the search; the finals are free of"),
        (0x1, "60 to 70 us (16.7 %): something else ran on the GPU"),
    ):
        slow = replace(DRIFTING[0], telemetry={"reference_us": 70.0, "throttle_reasons": mask})
        shown = replace(result, drift=measure_drift([*DRIFTING, slow]))._repr_html_()
        assert f"a reference kernel took {said}" in shown
