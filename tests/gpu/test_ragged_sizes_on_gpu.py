"""A configuration that is right wherever it is tuned, and wrong at the ragged size, is never served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stored_runs import record_miss

import autotile
from autotile.core.model import Outcome, Problem
from autotile.cuda.driver import live_device
from autotile.database.database import Database
from autotile.database.learned import read_models
from autotile.serving.dispatcher import default_dispatcher
from autotile.settings import read_settings
from autotile.tuning.family_session import FamilyResult
from autotile.tuning.options import FamilyPlan, TuneOptions

pytestmark = pytest.mark.gpu

N = 1 << 18
TEMPLATE = """
extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
    const int first = (blockIdx.x * THREADS + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = factor * x[i];
#if HASTY
    if (n == 1001 && first <= 1000 && 1000 < first + WORK) y[1000] = 0;
#else
    const long long start = clock64();
    while (clock64() - start < 20000) {}
#endif
}
"""
OPERATION = """
[operation]
name = "scaling"
sizes = { n = 4096 }
dtypes = ["float32"]

[kernels.scale]
kernel = "./scale.toml"
"""


@pytest.fixture
def hasty(scale_toml: Path) -> Path:
    """The tiny kernel with a parameter HASTY, whose value true is faster, and wrong for the ragged n = 1001 alone."""
    scale_toml.with_suffix(".cu").write_text(TEMPLATE)
    text = scale_toml.read_text().replace("WORK = [1, 2, 4]", "WORK = [1, 2]\nHASTY = [0, 1]")
    scale_toml.write_text(text.replace("WORK = 1\n", "WORK = 1\nHASTY = 0\n"))
    scale_toml.with_name("scaling.toml").write_text(OPERATION)
    return scale_toml


def tune(hasty: Path, folder: Path) -> None:
    autotile.tune(hasty, n=N, options=TuneOptions(trials=16), progress=False)


def tune_without_finals(hasty: Path, folder: Path) -> None:
    autotile.tune(hasty, n=N, options=TuneOptions(trials=16, finals=0), progress=False)


def tune_family(hasty: Path, folder: Path) -> None:
    options, plan = TuneOptions(trials=16), FamilyPlan(points=3)
    result = autotile.tune_family(hasty, {"n": f"4096..{N}"}, options=options, plan=plan, progress=False)
    assert isinstance(result, FamilyResult)
    assert result.rule is not None
    assert all(one.config["HASTY"] == 0 for one in result.rule.configs)


def tune_operation_family(hasty: Path, folder: Path) -> None:
    options = TuneOptions(trials=26, workers=4)
    path = hasty.with_name("scaling.toml")
    autotile.tune_family(str(path), {"n": f"4096..{N}"}, options=options, progress=False)
    with Database.open(read_settings().database) as database:
        (stored,) = read_models(database)
        assert '"HASTY":1' not in str(stored.model).replace(" ", "").replace("'", '"')


def tune_operation(hasty: Path, folder: Path) -> None:
    autotile.tune(str(hasty.with_name("scaling.toml")), n=N, options=TuneOptions(trials=16), progress=False)


def tune_plan(hasty: Path, folder: Path) -> None:
    plan = folder / "plan.toml"
    plan.write_text(f'[[tune]]\nkernel = "{hasty}"\nproblems = [{{ n = {N} }}]\n')
    autotile.tune_plan(plan, TuneOptions(trials=16))


def tune_misses(hasty: Path, folder: Path) -> None:
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem("scale", {"n": N}, "float32"), live_device().name, "default")
    assert autotile.tune_misses(hasty, options=TuneOptions(trials=16), progress=False).count("tuned") == 1


def evaluate(hasty: Path, folder: Path) -> None:
    with autotile.session(hasty, n=N) as session:
        trials = [session.evaluate([{"THREADS": 128, "HASTY": value}])[0] for value in (1, 0)]
    assert [trial.outcome for trial in trials] == [Outcome.WRONG_RESULT, Outcome.OK]


def record_and_replay(hasty: Path, folder: Path) -> None:
    recorded = autotile.record(hasty, n=N, output=folder / "recorded.npz", progress=False)
    assert recorded.path is not None
    result = autotile.tune(hasty, n=N, options=TuneOptions(replay=str(recorded.path), trials=16), progress=False)
    assert isinstance(result, autotile.TuneResult)
    assert result.winner is not None
    assert result.winner.config["HASTY"] == 0


@pytest.mark.parametrize(
    "way",
    [
        tune,
        tune_without_finals,
        tune_family,
        tune_operation_family,
        tune_operation,
        tune_plan,
        tune_misses,
        evaluate,
        record_and_replay,
    ],
)
def test_no_way_of_tuning_serves_it(
    hasty: Path, tmp_path: Path, way: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTILE_KERNELS", str(hasty.parent))
    way(hasty, tmp_path)
    with Database.open(read_settings().database) as database:
        trials = [trial for study in database.studies() for trial in database.trials(study.study_id)]
        wrong = [trial for trial in trials if trial.config.get("HASTY") == 1]
        assert {trial.outcome for trial in wrong} <= {Outcome.WRONG_RESULT}
        assert all("n=1001" in trial.reason for trial in wrong)
        assert any(trial.config.get("HASTY") == 0 and trial.outcome is Outcome.OK for trial in trials)
        assert all(best.trial.config.get("HASTY", 0) == 0 for best in database.best())
    default_dispatcher.clear()
    for n in (N, N // 2, 5000):
        assert autotile.get_best_kernel(hasty, n=n).config["HASTY"] == 0
