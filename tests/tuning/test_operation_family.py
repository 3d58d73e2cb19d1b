"""Families of an operation with a worker that makes up its times: what is measured, stored, learned and resumed."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_sweep_worker import BREAKS, CRASHES, HANGS, RAGGED_WRONG, WRONG
from judges import ending_at

from autotile.api.exchange import export_models
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Trial, config_key
from autotile.database.database import Database
from autotile.database.learned import read_models
from autotile.database.winners import UNVERIFIED_SAMPLER, WINNERS, read_file
from autotile.errors import InputError, ProblemError, ToolchainError
from autotile.families import operation_model
from autotile.families.operation_model import OperationModel, fit_model
from autotile.kernel.operation import Library, load_operation
from autotile.settings import read_settings
from autotile.tuning import operation_family, schedule
from autotile.tuning.operation_family import tune_operation_family
from autotile.tuning.options import TuneOptions
from autotile.workers import gpu as gpu_module
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Reading

PROBLEMS = 10


@pytest.fixture
def operation(operation_of_copies):
    return operation_of_copies("first", "second", second="n > 5000")


@pytest.fixture
def run(operation, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setattr(schedule, "device_count", lambda: 1)
    monkeypatch.setattr(schedule, "live_device", lambda index: device_profile("h200"))
    monkeypatch.setattr(schedule, "Gpu", partial(Gpu, module="fake_sweep_worker"))
    monkeypatch.setattr(operation_family, "fit_model", partial(fit_model, epochs=2))  # the times are simple
    monkeypatch.setattr(operation_model, "_MAX_REPEATS", 1)
    monkeypatch.setattr(operation_family, "_SEEDS", 12)  # all configurations
    for module in (operation_family, operation_model):
        monkeypatch.setattr(module, "_MIN_PROBLEMS", 6)

    def tune(observe=lambda _: None, **options):
        family = operation_family.operation_family(operation, ["n=1000..1000000"], "float32")
        chosen = TuneOptions(**{"trials": PROBLEMS, "workers": 2, **options})
        return tune_operation_family(operation, family, "float32", read_settings(), chosen, observe=observe)

    return tune


def all_trials(database: Database) -> list[Trial]:
    return [trial for study in database.studies() for trial in database.trials(study.study_id)]


def stored() -> tuple[OperationModel, list[Trial]]:
    """Return the only model in the database, and all trials."""
    with Database.open(read_settings().database) as database:
        (found,) = read_models(database)
        trials = all_trials(database)
    assert (found.operation, found.dtype, found.gpu_name) == ("scaling", "float32", "NVIDIA H200")
    return OperationModel.from_json(found.model), trials


def test_every_time_is_stored_and_the_model_chooses_well_and_a_run_that_was_killed_goes_on(run, operation, tmp_path):
    with pytest.raises(RuntimeError, match="ended by the test"):
        run(ending_at(3, error=RuntimeError))
    result = run(ending_at(5))  # an interrupt ends it without a model
    assert (result.interrupted, result.resumed, result.losses, result.candidates) == (True, 3, None, 0)
    assert "interrupted" in repr(result)
    result = run()
    assert (result.problems, result.interrupted, result.resumed, result.refused) == (PROBLEMS, False, 5, 0)
    assert (again := run()).resumed == PROBLEMS
    assert again.pairs == result.pairs
    assert 0 <= result.losses.mean < 1
    model, trials = stored()
    assert len(trials) == result.pairs
    assert {trial.outcome for trial in trials} == {Outcome.OK}
    assert all(trial.resources is not None for trial in trials)
    assert {one.kernel for one in model.candidates} <= {"first", "second"}
    assert "mean loss" in repr(result)
    (file,) = export_models(operation, tmp_path / "models")
    assert file.name == "nvidia-h200.scaling.float32.json"
    assert OperationModel.from_json(json.loads(file.read_text())).candidates == model.candidates
    assert result.to_json()["held_out_loss"]["mean"] == result.losses.mean


def test_configurations_that_fail_anywhere_are_not_in_the_model(run, monkeypatch):
    monkeypatch.setenv("AUTOTILE_FAULTY_SWEEP", "1")
    monkeypatch.setattr(gpu_module, "_GRID_DEADLINE_S", 2.0)
    monkeypatch.setattr(gpu_module, "_ENTRY_DEADLINE_S", 0.0)
    result = run()
    faulty = {
        config_key(WRONG): Outcome.WRONG_RESULT,
        config_key(CRASHES): Outcome.CRASHED,
        config_key(HANGS): Outcome.TIMED_OUT,
        config_key(BREAKS): Outcome.CRASHED,
    }
    model, trials = stored()
    assert {key: trial.outcome for trial in trials if (key := config_key(trial.config)) in faulty} == faulty
    assert not faulty.keys() & {config_key(one.config) for one in model.candidates}
    assert result.refused >= len(faulty)
    assert result.problems == PROBLEMS  # the others were measured at each of them


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"trials": 24, "budget_s": 16.0}, 12),  # 8 in half of the time, and 4 in the next quarter
        ({"trials": 20}, 20),
        ({"trials": 100, "budget_s": 16.0}, 8),  # fewer than half of the first round are too few to choose by
    ],
)
def test_half_of_a_budget_is_for_the_first_round_and_up_to_three_quarters_for_both(run, monkeypatch, options, problems):
    """By a clock that goes on by a second with each problem that was measured. The rest is for the model."""
    clock = [100.0]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(step):
        clock[0] += step.phase == "measuring"

    result = run(tick, **options)
    assert (result.problems, result.seconds) == (problems, problems)


def test_problems_that_take_too_long_are_left_out(run, monkeypatch):
    """By their operations; those of the tiny kernel are its elements."""
    monkeypatch.setattr(operation_family, "_MAX_FLOPS", 50_000)
    seen: list[int] = []
    run(lambda step: seen.append(step.problem.sizes["n"]) if step.problem is not None else None)
    assert len(seen) >= PROBLEMS
    assert max(seen) <= 50_000


class TestRaggedSizes:
    """What a family stores may be served, and is verified as in a session: at the ragged sizes, too."""

    def test_where_sizes_are_compiled_in_there_is_code_for_them(self, scale_toml, run, tmp_path, monkeypatch):
        log = tmp_path / "entries.jsonl"
        monkeypatch.setenv("AUTOTILE_SWEEP_LOG", str(log))
        for name in ("first", "second"):
            file, source = scale_toml.with_name(f"{name}.toml"), scale_toml.with_name(f"{name}.cu")
            file.write_text(file.read_text().replace("[problem]", 'defines = { SIZE = "n" }\n\n[problem]'))
            source.write_text(source.read_text().replace("i < n;", "i < SIZE;"))
        monkeypatch.setattr(operation_family, "_SEEDS", 1)
        run(ending_at(4), trials=6)
        entries = map(json.loads, log.read_text().splitlines())
        possible = [one for one in entries if one["config"] != {"THREADS": 256, "WORK": 4}]  # by the kernel's rule
        assert possible
        assert all([sizes for sizes, _, _ in one["others"]] == [{"n": 1001}] for one in possible)
        assert all(one["others"][0][1] != one["cubin_path"] for one in possible)

    def test_what_earlier_versions_stored_is_measured_again_and_a_wrong_one_never_served(
        self, run, scale_toml, monkeypatch
    ):
        location, of = str(read_settings().database), {"kernel": "first", "dtype": "float32"}
        with monkeypatch.context() as earlier:
            earlier.setattr(operation_family, "_SAMPLER", UNVERIFIED_SAMPLER)
            pairs = run().pairs
        with Database.open(location) as database:
            assert len(all_trials(database)) == pairs
            assert database.best() == []
            assert database.read(WINNERS, **of) == []
        assert not read_file(location, WINNERS, **of)
        result = run()
        assert (result.resumed, result.problems, result.refused) == (0, PROBLEMS, 0)
        with Database.open(location) as database:
            assert database.read(WINNERS, **of)
            assert RAGGED_WRONG in [best.trial.config for best in database.best("first")]  # it is fast
        assert run().resumed == PROBLEMS
        monkeypatch.setenv("AUTOTILE_DB", f"{scale_toml.parent}/other.db")
        monkeypatch.setenv("AUTOTILE_RAGGED_WRONG", "1")
        assert run().refused == 2  # of each kernel
        model, trials = stored()
        assert {t.outcome for t in trials if t.config == RAGGED_WRONG} == {Outcome.WRONG_RESULT}
        with Database.open(read_settings().database) as database:
            assert RAGGED_WRONG not in [best.trial.config for best in database.best()]
        assert model.candidates
        assert RAGGED_WRONG not in [one.config for one in model.candidates]


def test_of_a_family_flags_that_change_the_layout_take_both_values_and_a_missing_size_is_named():
    parse = partial(operation_family.operation_family, load_operation("matmul"))
    words = ["M=1..16", "N=1..16", "K=16..64"]
    family = parse(words, "bfloat16")
    assert str(family.extents["TRANS_A"]) == str(family.extents["TRANS_B"]) == "0..1"
    assert str(family.extents["OUT_FP32"]) == "0"
    assert str(parse([*words, "TRANS_A=1"], "bfloat16").extents["TRANS_A"]) == "1"
    assert str(parse([*words, "EMULATE=0"], "float32").extents["EMULATE"]) == "0"
    with pytest.raises(ProblemError, match="the family needs the size M"):
        parse([], "bfloat16")


def test_without_a_gpu_it_is_refused(operation, monkeypatch):
    monkeypatch.setattr(schedule, "device_count", lambda: 0)
    family = operation_family.operation_family(operation, ["n=1000..2000"], "float32")
    with pytest.raises(InputError, match="measured on a GPU"):
        tune_operation_family(operation, family, "float32", read_settings(), TuneOptions())


def test_the_library_of_another_machine_must_be_the_same():
    library = Library("cublas", "12.8.4")
    reading = Reading(Outcome.OK, telemetry={LIBRARY_VERSION: "13.1.0"})
    with pytest.raises(ToolchainError, match=r"has cublas 13\.1\.0, and the session 12\.8\.4"):
        operation_family.Sweep._check_version(library, reading)
