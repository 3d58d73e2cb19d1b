from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from rows import broken, ok, tile_space, tile_time_us

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial
from autotile.errors import InputError
from autotile.search.row_sampler import quiet_optuna
from autotile.search.search import FAILED, attributes_of, study_of_trials, study_to_storage

SPACE = tile_space()
TRIALS = [
    broken(config) if config["BM"] == 256 else ok(config, tile_time_us(config))
    for config in (SPACE.config(row) for row in range(0, len(SPACE), 3))
]


@pytest.fixture
def study() -> optuna.Study:
    return study_of_trials(SPACE.parameters, TRIALS, "sgemm M=64")


def test_a_study_of_stored_trials_shows_true_values(study: optuna.Study) -> None:
    assert study.study_name == "sgemm M=64"
    assert [trial.params for trial in study.trials] == [dict(trial.config) for trial in TRIALS]
    fastest = min((trial for trial in TRIALS if trial.time_us), key=lambda trial: trial.time_us or 0)
    assert study.best_params == fastest.config
    assert study.best_value == fastest.time_us


def test_values_and_parameters_that_the_space_lost_are_kept() -> None:
    old = [ok({"BM": 512, "OLD": "x"}, 5.0), ok(SPACE.config(0), 6.0)]
    study = study_of_trials(SPACE.parameters, old)
    assert [trial.params for trial in study.trials] == [{"BM": 512, "OLD": "x"}, SPACE.config(0)]


def test_attributes_say_how_a_trial_ended_and_what_it_used() -> None:
    trial = Trial(
        SPACE.config(0),
        Outcome.OK,
        geometry=LaunchGeometry((4, 4, 1), (16, 16, 1), 1024),
        resources=Resources(64, 8, 16, 0, 4096),
        occupancy=Occupancy(4, 32, 0.5, ("registers",), {"registers": 4}),
        measurement=Measurement(10.0, 9.9, 10.1),
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


def test_optunas_own_tools_accept_the_study(study: optuna.Study) -> None:
    pytest.importorskip("pandas")
    frame = study.trials_dataframe()
    assert len(frame) == len(TRIALS)
    assert set(frame["params_LAYOUT"]) == {"row", "column"}
    with quiet_optuna():
        importance = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    assert importance.keys() == {"BM", "BN", "TM", "LAYOUT", "ASYNC"}


def test_optunas_plots_accept_the_study(study: optuna.Study) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt
    from optuna.visualization import matplotlib as plots

    with quiet_optuna():
        for plot in (plots.plot_optimization_history, plots.plot_parallel_coordinate, plots.plot_slice):
            plot(study)
    plt.close("all")


def test_a_study_is_written_as_optuna_reads_it(study: optuna.Study, tmp_path: Path) -> None:
    path = tmp_path / "study with a space.db"
    study_to_storage(study, path)
    with quiet_optuna():
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        loaded = optuna.load_study(study_name="sgemm M=64", storage=storage)
        assert [(t.params, t.value, t.user_attrs, t.constraints) for t in loaded.trials] == [
            (t.params, t.value, t.user_attrs, t.constraints) for t in study.trials
        ]
        assert loaded.trials[-1].constraints == {FAILED: 1.0}
        assert loaded.metric_names == ["time_us"]
    storage.remove_session()
    storage.engine.dispose()


def test_a_file_holds_several_studies_but_no_two_of_one_name(study: optuna.Study, tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    study_to_storage(study, path)
    study_to_storage(study_of_trials(SPACE.parameters, TRIALS[:3], "another"), path)
    with pytest.raises(InputError, match=r"studies\.db holds a study named 'sgemm M=64' already"):
        study_to_storage(study, path)


@pytest.mark.parametrize("place", ["missing/folder.db", "text.db"])
def test_what_is_no_storage_is_refused(study: optuna.Study, tmp_path: Path, place: str) -> None:
    (tmp_path / "text.db").write_text("this is not a database, but it is long enough to be taken for one" * 20)
    with pytest.raises(InputError, match="cannot be written as an Optuna storage"):
        study_to_storage(study, tmp_path / place)


def test_silence_ends(capsys: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    with quiet_optuna():
        optuna.create_study()
        assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    assert optuna.logging.get_verbosity() == before
    assert capsys.readouterr().err == ""
