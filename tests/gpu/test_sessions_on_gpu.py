"""Sessions on a GPU as a whole: comparisons, families, sizes of the file, views, GPUs by their UUID, estimates."""

from __future__ import annotations

import csv
import html
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest

import autotile
from autotile.core.model import config_key
from autotile.cuda.driver import device_count, device_uuid, live_device
from autotile.database.database import Database
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.report.live import DatabaseFollower
from autotile.serving.bound import BoundKernel, KernelCode
from autotile.serving.choice import Choice
from autotile.serving.selection import KernelRequest, Shelf, untuned_config
from autotile.tuning.operation_session import OperationResult
from autotile.tuning.options import TuneOptions

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(device_count() < 2, reason="this machine has one GPU")
SAID = "not given, so as in the search-space file: n=4096"


def test_two_sessions_of_one_kernel(scale_toml: Path, tmp_path: Path) -> None:
    places = [tmp_path / "before.db", tmp_path / "after.db"]
    for place in places:
        options = autotile.TuneOptions(trials=4, finals=2, workers=4, database=str(place))
        autotile.tune(str(scale_toml), n=1 << 22, options=options)
    found = autotile.compare(*places)
    (one,) = found.problems
    assert one.ratio is not None
    assert one.ratio.low < one.ratio.value < one.ratio.high
    assert one.clock_ratio is not None
    assert one.common_count >= 2
    assert one.differences == ()
    assert found.slower_by(2.0) == ()
    follower = DatabaseFollower(places[0], "d0")
    follower.read()
    _, (session,) = follower.view()
    follower.close()
    assert (session.trials, session.ended_at is not None) == (4, True)


def test_sizes_that_were_not_tuned_are_served(scale_toml: Path, cupy: Any) -> None:
    plan, options = autotile.FamilyPlan(points=3, max_configs=2), autotile.TuneOptions(trials=4, finals=0, workers=4)
    result = autotile.tune_family(str(scale_toml), n="1000..1000000", plan=plan, options=options)
    assert result.rule is not None
    assert len(result.rule.points) == 3
    assert all(point.best_us > 0 and point.loss >= 0 for point in result.rule.points)
    for n in (1001, 4097, 999_999):
        kernel = autotile.get_best_kernel(str(scale_toml), n=n)
        assert (kernel.tier == "family", kernel.source) == (result.rule.in_force, "cuda")
        x = cupy.arange(n, dtype=cupy.float32)
        assert bool((kernel(x, factor=3.0) == 3.0 * x).all())


def test_every_function_takes_the_sizes_of_the_file(scale_toml: Path, tmp_path: Path) -> None:
    tuned = autotile.tune(scale_toml, trials=3, finals=2, progress=False)
    assert isinstance(tuned, autotile.TuneResult)
    assert (tuned.problem.sizes, tuned.notices[0]) == ({"n": 4096}, SAID)
    recorded = autotile.record(scale_toml, sample=2, output=tmp_path, db=tmp_path / "other.db", progress=False)
    assert recorded.header.key.sizes == {"n": 4096}
    candidate = tmp_path / "rewritten.cu"
    candidate.write_text(scale_toml.with_name("scale.cu").read_text())
    judged = autotile.check(candidate, scale_toml)
    assert judged.is_right
    assert (judged.problem.sizes, judged.notices[0]) == ({"n": 4096}, SAID)
    verified = autotile.verify(scale_toml)
    assert [one.problem.sizes for one in verified.problems] == [{"n": 4096}]
    with autotile.session(scale_toml) as session:
        (trial,) = session.evaluate({"THREADS": 64, "WORK": 1})
    assert config_key(trial.config) == config_key({"THREADS": 64, "WORK": 1})


def test_the_page_of_a_race_names_what_won_and_the_library(tmp_path: Path) -> None:
    result = autotile.tune("matmul", M=512, N=512, K=512, dtype="bfloat16", trials=8, finals=2, progress=False)
    assert isinstance(result, OperationResult)
    winner, page = result.winner, tmp_path / "r.html"
    assert winner is not None
    autotile.report("matmul", output=page)
    text = html.unescape(page.read_text().partition('type="application/json"')[0])
    assert "<h1>matmul M=512 N=512 K=512 bfloat16 on " in text
    headline = text[text.index('class="headline"') :]
    assert headline.index(winner.name) < headline.index("</strong>")
    assert "cublas" in headline[: headline.index("</section>")]
    assert f"Serve {winner.name}" in text
    assert "(replayed)" not in text


def test_the_uuid_is_that_of_the_system() -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert device_uuid(0).startswith("GPU-")
    assert device_uuid(0) in listed
    assert device_uuid(99) == ""


def test_trials_carry_the_uuid(scale_toml: Path, tmp_path: Path) -> None:
    options = TuneOptions(trials=4, finals=2, database=str(tmp_path / "one.db"))
    autotile.tune(str(scale_toml), n=4096, options=options, progress=False)
    with Database.open(tmp_path / "one.db") as database:
        trials = [trial for study in database.studies() for trial in database.trials(study.study_id)]
    assert {trial.gpu for trial in trials} == {device_uuid(0)}


@two_gpus
def test_two_gpus_share_a_session(scale_toml: Path, tmp_path: Path) -> None:
    options = TuneOptions(finals=3, database=str(tmp_path / "two.db"))
    result = autotile.tune(str(scale_toml), n=1 << 20, device="all", options=options, progress=False)
    assert result.winner is not None
    assert {use.uuid for use in result.gpus} == {device_uuid(index) for index in range(device_count())}
    assert not any(use.lost for use in result.gpus)
    assert result.confirmation is not None
    assert abs(result.confirmation.spread) < 0.2
    assert result.confirmation.gpu != result.confirmation.home


def test_a_session_that_was_measured_can_be_followed_and_looked_at(scale_toml: Path) -> None:
    states: list[autotile.Progress] = []
    options = autotile.TuneOptions(trials=8, finals=3)
    result = autotile.tune(scale_toml, n=1 << 20, options=options, progress=states.append)
    assert isinstance(result, autotile.TuneResult)
    searching = [state for state in states if state.phase == "searching"]
    assert searching[-1].remaining_s is not None
    assert searching[-1].remaining_s > 0  # the finals are yet to come
    (finals,) = [state for state in states if state.phase == "finals"]
    assert finals.remaining_s is not None
    assert 0.2 < finals.remaining_s < 10

    trials = autotile.trials(scale_toml)
    stream = io.StringIO()
    trials.columns().write_csv(stream)
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert {row["phase"] for row in rows} == {"search", "final"}
    measured = next(row for row in rows if row["phase"] == "search" and row["outcome"] == "ok")
    assert float(measured["stage.verify_s"]) > 0
    assert float(measured["time_low_us"]) <= float(measured["time_us"]) <= float(measured["time_high_us"])

    (plot,) = autotile.plot(scale_toml, n=1 << 20).plots
    assert plot.best_so_far[-1] == min(one.trial.time_us for one in plot.study.trials if one.trial.time_us)
    found = autotile.survey(scale_toml, n=1 << 20)
    assert found.device.source == "cuda"
    registers = {tuple(found.config(i).values()): int(found.columns["registers"][i]) for i in range(len(found))}
    for entry in trials.trials:
        trial = entry.stored.trial
        if trial.resources is not None:
            assert registers[tuple(trial.config.values())] == trial.resources.registers


@pytest.mark.parametrize(
    ("name", "sizes"), [("gemm_mma", (64, 64, 32768)), ("sgemm", (33, 1000, 4096)), ("sgemm_2d", (64, 2048, 2048))]
)
def test_the_least_estimate_is_right(name: str, sizes: tuple[int, int, int], cupy: Any) -> None:
    kernel, device = load_kernel(name), live_device(0)
    problem = resolve_problem(kernel.spec, dict(zip("MNK", sizes, strict=True)), None)
    config, estimated = untuned_config(KernelRequest(kernel, problem, device, "", Shelf()))
    if estimated is None:
        pytest.skip(f"the default is served on {device.name}")
    rng = cupy.random.default_rng(0)
    m, n, k = sizes
    half = problem.dtype != "float32"
    a, b = (rng.standard_normal(shape, dtype=cupy.float32) for shape in ((m, k), (k, n)))
    if half:
        kernel_dtype = resolve_problem(kernel.spec, dict(problem.sizes), "float16")
        problem, a, b = kernel_dtype, a.astype(cupy.float16), b.astype(cupy.float16)
        config, estimated = untuned_config(KernelRequest(kernel, problem, device, "", Shelf()))
    served = BoundKernel(
        KernelCode(kernel, problem, device, config), Choice("default", config, estimated=estimated), device, 0
    )
    found = served(a, b).astype(cupy.float64).reshape(m, n)
    expected = a.astype(cupy.float64) @ b.astype(cupy.float64)
    tolerance = (2e-3 if half else 1e-5) * float(cupy.abs(expected).max())
    assert float(cupy.abs(found - expected).max()) <= tolerance
