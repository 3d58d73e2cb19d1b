"""Sessions on a GPU: comparisons, families, kernels from Python, candidates, ragged sizes, calls and refreshes."""

import csv
import html
import io
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_kernels import FOLDER
from stored_runs import record_miss, store_winner

import autotile
from autotile import Buffer, Scalar
from autotile.core.model import Outcome, Problem, config_key
from autotile.cuda.driver import device_count, device_uuid, live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.learned import read_models
from autotile.exchange.recording import read_recording
from autotile.kernel.inputs import read_captured_call
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.report.live import DatabaseFollower
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import KernelCode
from autotile.serving.dispatcher import default_dispatcher, get_best_kernel
from autotile.serving.selection import KernelRequest, Shelf, untuned
from autotile.settings import read_settings
from autotile.tuning.family_session import FamilyResult
from autotile.tuning.operation_session import OperationResult
from autotile.tuning.options import FamilyPlan, TuneOptions

pytestmark = pytest.mark.gpu


two_gpus = pytest.mark.skipif(device_count() < 2, reason="this machine has one GPU")
SAID = "not given, so as in the search-space file: n=4096"


def test_two_sessions_of_one_kernel(scale_toml, tmp_path):
    places = [tmp_path / "before.db", tmp_path / "after.db"]
    for place in places:
        options = autotile.TuneOptions(trials=4, finals=2, workers=4, database=str(place))
        autotile.tune(str(scale_toml), n=1 << 22, options=options)
    found = autotile.compare(*places)
    (one,) = found.problems
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


def test_sizes_that_were_not_tuned_are_served(scale_toml, cp):
    plan, options = autotile.FamilyPlan(points=3, max_configs=2), autotile.TuneOptions(trials=4, finals=0, workers=4)
    result = autotile.tune_family(str(scale_toml), n="1000..1000000", plan=plan, options=options)
    assert len(result.rule.points) == 3
    assert all(point.best_us > 0 and point.loss >= 0 for point in result.rule.points)
    for n in (1001, 4097, 999_999):
        kernel = autotile.get_best_kernel(str(scale_toml), n=n)
        if kernel.choice.unapplied:  # where its times say that what stands without it is faster here
            assert not result.rule.in_force or "is not followed here" in kernel.choice.unapplied
        else:
            assert (kernel.tier, kernel.source) == ("family", "cuda")
        x = cp.arange(n, dtype=cp.float32)
        assert bool((kernel(x, factor=3.0) == 3.0 * x).all())


def test_every_function_takes_the_sizes_of_the_file(scale_toml, tmp_path):
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


def test_the_page_of_a_race_names_what_won_and_the_library(tmp_path):
    result = autotile.tune("matmul", M=512, N=512, K=512, dtype="bfloat16", trials=8, finals=2, progress=False)
    assert isinstance(result, OperationResult)
    winner, page = result.winner, tmp_path / "r.html"
    autotile.report("matmul", output=page)
    text = html.unescape(page.read_text().partition('type="application/json"')[0])
    assert "<h1>matmul M=512 N=512 K=512 bfloat16 on " in text
    headline = text[text.index('class="headline"') :]
    assert headline.index(winner.name) < headline.index("</strong>")
    assert "cublas" in headline[: headline.index("</section>")]
    assert f"Serve {winner.name}" in text
    assert "(replayed)" not in text


def test_the_uuid_is_that_of_the_system():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert device_uuid(0).startswith("GPU-")
    assert device_uuid(0) in listed
    assert device_uuid(99) == ""


@two_gpus
def test_two_gpus_share_a_session(scale_toml, tmp_path):
    options = TuneOptions(finals=3, database=str(tmp_path / "two.db"))
    result = autotile.tune(str(scale_toml), n=1 << 20, device="all", options=options, progress=False)
    assert result.winner is not None
    assert {use.uuid for use in result.gpus} == {device_uuid(index) for index in range(device_count())}
    assert not any(use.lost for use in result.gpus)
    assert abs(result.confirmation.spread) < 0.2
    assert result.confirmation.gpu != result.confirmation.home


def test_a_session_that_was_measured_can_be_followed_and_looked_at(scale_toml):
    states: list[autotile.Progress] = []
    options = autotile.TuneOptions(trials=8, finals=3)
    result = autotile.tune(scale_toml, n=1 << 20, options=options, progress=states.append)
    assert isinstance(result, autotile.TuneResult)
    searching = [state for state in states if state.phase == "searching"]
    assert searching[-1].remaining_s > 0  # the finals are yet to come
    (finals,) = [state for state in states if state.phase == "finals"]
    assert 0.2 < finals.remaining_s < 10

    trials = autotile.trials(scale_toml)
    assert {entry.stored.trial.gpu for entry in trials.trials} == {device_uuid(0)}
    stream = io.StringIO()
    trials.columns().write_csv(stream)
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert {row["phase"] for row in rows} == {"search", "final"}
    measured = next(row for row in rows if row["phase"] == "search" and row["outcome"] == "ok")
    assert float(measured["stage.verify_s"]) > 0
    assert float(measured["time_low_us"]) <= float(measured["time_us"]) <= float(measured["time_high_us"])

    found = autotile.survey(scale_toml, n=1 << 20)
    assert found.device.source == "cuda"
    registers = {tuple(found.config(i).values()): int(found.columns["registers"][i]) for i in range(len(found))}
    for entry in trials.trials:
        trial = entry.stored.trial
        if trial.resources is not None:
            assert registers[tuple(trial.config.values())] == trial.resources.registers


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("gemm_mma", "float16", (64, 64, 32768)),
        ("sgemm", "float32", (33, 1000, 4096)),
        ("sgemm_2d", "float32", (64, 2048, 2048)),
    ],
)
def test_the_least_estimate_is_right(name, dtype, sizes, cp):
    kernel, device, (m, n, k) = load_kernel(name), live_device(0), sizes
    problem = resolve_problem(kernel.spec, {"M": m, "N": n, "K": k}, dtype)
    choice = untuned(KernelRequest(kernel, problem, device, "", Shelf()))
    if choice.estimated is None:
        pytest.skip(f"the default is served on {device.name}")
    rng = cp.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=cp.float32).astype(dtype) for shape in ((m, k), (k, n)))
    served = BoundKernel(KernelCode(kernel, problem, device, choice.config), choice, device, 0)
    found = served(a, b).astype(cp.float64).reshape(m, n)
    expected = a.astype(cp.float64) @ b.astype(cp.float64)
    tolerance = {"float16": 2e-3, "float32": 1e-5}[dtype] * float(cp.abs(expected).max())
    assert float(cp.abs(found - expected).max()) <= tolerance


CODE = """
extern "C" __global__ void scale(const float* x, float* y, int n) {
    const int first = (blockIdx.x * BLOCK + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = 2.0f * x[i];
}
"""
DESCRIBED: dict[str, Any] = {
    "sizes": {"n": 1 << 20},
    "parameters": {"BLOCK": [64, 128, 256], "WORK": [1, 2, 4]},
    "arguments": [Buffer("float32", "n"), Buffer("float32", "n", "out"), Scalar("int32", "n")],
    "launch": ("BLOCK", "ceil_div(n, BLOCK * WORK)"),
}
OPTIONS = autotile.TuneOptions(trials=4, finals=2)


@pytest.fixture
def scale():
    return autotile.kernel(
        CODE, "scale", rules=[lambda BLOCK, WORK: BLOCK * WORK <= 512], reference="2.0 * x", bytes="8 * n", **DESCRIBED
    )


def test_a_kernel_from_python_is_tuned_bundled_and_served(scale, tmp_path, cp):
    result = scale.tune(options=OPTIONS, progress=False)
    assert result.winner is not None
    autotile.bundle(scale, output=tmp_path / "scale.autotile")
    bundled = autotile.get_best_kernel("scale", n=1 << 20, bundle=tmp_path / "scale.autotile")
    x = cp.arange(1 << 20, dtype=np.float32)
    for kernel in (scale.best(), bundled):
        assert kernel.tier == "exact"
        assert bool((kernel(x) == 2 * x).all())


def test_arrays_are_inputs_and_answers():
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    described: dict[str, Any] = {
        "parameters": {"BLOCK": [64, 128], "WORK": [1, 2]},
        "arguments": [x, Buffer("float32", x.shape, "out"), np.int32(x.size)],
        "launch": ("BLOCK", f"ceil_div({x.size}, BLOCK * WORK)"),
    }
    right = autotile.kernel(CODE, "scale", reference=2 * x, **described).tune(options=OPTIONS, progress=False)
    assert right.outcomes == {Outcome.OK: 4} or Outcome.WRONG_RESULT not in right.outcomes
    wrong = autotile.kernel(CODE, "scale", reference=3 * x, **described)
    with pytest.raises(autotile.InputError, match="no candidate agrees with the reference"):
        wrong.tune(options=OPTIONS, progress=False)


def test_a_search_of_the_callers_own(scale):
    with autotile.session(scale, n=1 << 18, options=autotile.TuneOptions(finals=2)) as session:
        trials = session.evaluate([{"BLOCK": 64}, {"BLOCK": 256, "WORK": 4}, *session.ask(2)])
        assert [trial.outcome for trial in trials[:2]] == [Outcome.OK, Outcome.INFEASIBLE]
    assert session.result.winner is not None
    assert scale.best(n=1 << 18).tier == "exact"


MEMORY = "__device__ float kept[1 << 20]; __device__ int known[1 << 20];\n"
CANDIDATES: dict[str, tuple[str, str, str]] = {
    "the same": ("2.0f", "2.0f", "right"),
    "wrong everywhere": ("2.0f", "3.0f", "wrong_result"),
    "wrong at the edge": ("i < n; ++i", "i < n / 64 * 64; ++i", "wrong_result"),
    "writes outside": ("i < n; ++i", "i <= n; ++i", "out_of_bounds"),
    "keeps an earlier result": (
        "y[i] = 2.0f * x[i]",
        "y[i] = n < 1 << 20 || !known[i] ? 2.0f * x[i] : kept[i], kept[i] = y[i], known[i] = n == 1 << 20",
        "wrong_result",
    ),
    "crashes": ("y[i] = 2.0f", "((float*)8)[i] = 2.0f", "crashed"),
    "does not compile": ("y[i]", "z[i]", "compile_failed"),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_is_judged(scale, tmp_path, name):
    old, new, expected = CANDIDATES[name]
    assert old in CODE
    (tmp_path / "rewritten.cu").write_text(MEMORY + CODE.replace(old, new))
    found: Any = autotile.check(tmp_path / "rewritten.cu", scale)
    if expected == "right":
        assert found.verdict in ("equal", "faster", "slower"), found
        assert found.speedup.low <= found.speedup.value <= found.speedup.high
        assert found.repeats > 1
    else:
        assert found.verdict == "wrong", found
        assert found.candidate.outcome == expected, found


@pytest.mark.parametrize(("factor", "right"), [("2.0f", True), ("3.0f", False)])
def test_a_candidate_for_a_kernel_without_a_reference(tmp_path, factor, right):
    kernel = autotile.kernel(CODE, "scale", **DESCRIBED)
    (tmp_path / "rewritten.cu").write_text(CODE.replace("2.0f", factor))
    assert autotile.check(tmp_path / "rewritten.cu", kernel).is_right is right


def test_a_new_kernel_tunes_as_it_is(tmp_path):
    made = autotile.new("blur", tmp_path)
    result = autotile.tune(made.file, N=1 << 20, options=OPTIONS, progress=False)
    assert result.winner is not None
    assert set(result.outcomes) <= {Outcome.OK, Outcome.PRUNED}


N = 1 << 18


@pytest.fixture
def hasty(scale_toml, scaling_toml):
    """The tiny kernel with a parameter HASTY, whose value true is faster, and wrong for the ragged n = 1001 alone."""
    scale_toml.with_suffix(".cu").write_text((FOLDER / "hasty.cu").read_text())
    text = scale_toml.read_text().replace("WORK = [1, 2, 4]", "WORK = [1, 2]\nHASTY = [0, 1]")
    scale_toml.write_text(text.replace("WORK = 1\n", "WORK = 1\nHASTY = 0\n"))
    return scale_toml


def tune(path: Path, **options: Any) -> Any:
    return autotile.tune(str(path), n=N, options=TuneOptions(trials=16, **options), progress=False)


def tune_family(hasty: Path, folder: Path) -> None:
    options, plan = TuneOptions(trials=16), FamilyPlan(points=3)
    result = autotile.tune_family(hasty, {"n": f"4096..{N}"}, options=options, plan=plan, progress=False)
    assert isinstance(result, FamilyResult)
    assert all(one.config["HASTY"] == 0 for one in result.rule.configs)


def tune_operation_family(hasty: Path, folder: Path) -> None:
    options = TuneOptions(trials=26, workers=4)
    path = hasty.with_name("scaling.toml")
    autotile.tune_family(str(path), {"n": f"4096..{N}"}, options=options, progress=False)
    with Database.open(read_settings().database) as database:
        (stored,) = read_models(database)
        assert '"HASTY":1' not in str(stored.model).replace(" ", "").replace("'", '"')


def tune_plan(hasty: Path, folder: Path) -> None:
    plan = folder / "plan.toml"
    plan.write_text(f'[[tune]]\nkernel = "{hasty}"\nproblems = [{{ n = {N} }}]\n')
    autotile.tune_plan(plan, TuneOptions(trials=16))


def tune_misses(hasty: Path, folder: Path) -> None:
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem("scale", {"n": N}, "float32"), live_device().name, "default")
    assert autotile.tune_misses(hasty, options=TuneOptions(trials=16), progress=False).count("tuned") == 1


def evaluate_alone(hasty: Path, folder: Path) -> None:
    with autotile.session(hasty, n=N) as session:
        trials = [session.evaluate([{"THREADS": 128, "HASTY": value}])[0] for value in (1, 0)]
    assert [trial.outcome for trial in trials] == [Outcome.WRONG_RESULT, Outcome.OK]


def record_and_replay(hasty: Path, folder: Path) -> None:
    recorded = autotile.record(hasty, n=N, output=folder / "recorded.npz", progress=False)
    assert recorded.path is not None
    assert (recorded.header.device, bool(recorded.header.driver)) == (live_device(), True)
    recording = read_recording(recorded.path)
    assert len(recording) == recorded.configurations == 2 * int(recording.ok.sum()) == 16
    assert tune(hasty, replay=str(recorded.path)).winner.config["HASTY"] == 0


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "tune": lambda hasty, _: tune(hasty),
    "tune without finals": lambda hasty, _: tune(hasty, finals=0),
    "tune an operation": lambda hasty, _: tune(hasty.with_name("scaling.toml")),
    **{way.__name__: way for way in (tune_family, tune_operation_family, tune_plan, tune_misses)},
    **{way.__name__: way for way in (evaluate_alone, record_and_replay)},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_tuning_serves_it(hasty, tmp_path, way, monkeypatch):
    monkeypatch.setenv("AUTOTILE_KERNELS", str(hasty.parent))
    WAYS[way](hasty, tmp_path)
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


LENGTH = 5000


def launch_in_a_graph(kernel: Any, x: Any, y: Any) -> None:
    """Call it, after a call that captured the arguments, in a graph of CUDA, and launch that."""
    import cupy as cp

    y.fill(0)
    cp.cuda.runtime.deviceSynchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kernel(x, y, stream=stream, factor=3.0)
        graph = stream.end_capture()
        assert not y.any()  # nothing ran yet
        graph.launch(stream)
        stream.synchronize()


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_the_inputs_are_written_and_the_output_is_computed(scale_toml, tmp_path, in_a_graph, cp):
    x = cp.random.default_rng(0).standard_normal(LENGTH, dtype=cp.float32)
    y = cp.zeros_like(x)
    folder = tmp_path / "calls"
    kernel = autotile.capture(autotile.get_best_kernel(scale_toml, n=LENGTH), folder)
    kernel(x, y, factor=3.0)
    if in_a_graph:
        launch_in_a_graph(kernel, x, y)
    np.testing.assert_array_equal(y.get(), 3 * x.get())
    (written,) = folder.iterdir()
    np.testing.assert_array_equal(np.load(written / "x.npy"), x.get())
    captured = read_captured_call(folder)
    assert (captured.sizes, captured.scalars) == ({"n": LENGTH}, {"factor": 3.0})


BEST, BETTER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 2}


def put(kernel: BoundKernel, config: dict[str, int], time_us: float) -> None:
    key = key_of(kernel.definition, kernel.problem, kernel.device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    store_winner(key, config, time_us, kernel.device)


def poll() -> int:
    """Refresh in a thread of its own, as the program does."""
    replaced: list[int] = []
    thread = threading.Thread(target=lambda: replaced.append(default_dispatcher.refresher.poll()))
    thread.start()
    thread.join()
    return replaced[0]


def test_calls_graphs_and_bound_launches_stay_right_also_if_a_refresh_is_during_a_capture(scale_toml, cp):
    kernel = get_best_kernel(scale_toml, n=4096)
    x = cp.arange(4096, dtype=cp.float32)
    y, z, captured, bound = (cp.zeros_like(x) for _ in range(4))
    for _ in range(3):  # also as a graph of its own
        kernel(x, y)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kernel(x, captured)
        graph = stream.end_capture()
    launch = kernel.bind(x, bound)
    for config, time_us in ((BEST, 5.0), (BETTER, 4.0)):
        put(kernel, config, time_us)
        assert poll() == 1
        assert (kernel.tier, kernel.config) == ("exact", config)
        for out in (y, captured, bound):
            out[:] = 0
        cp.cuda.Device().synchronize()
        for _ in range(3):
            kernel(x, y)
        graph.launch(stream)
        stream.synchronize()
        launch()
        for out in (y, captured, bound):
            assert bool((out == 2 * x).all())
    put(kernel, BEST, 3.0)
    y[:] = 0
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        kernel(x, y)
        assert poll() == 1
        kernel(x, z)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert kernel.config == BEST
    assert bool((y == 2 * x).all())
    assert bool((z == 2 * x).all())


@pytest.mark.parametrize("deployment", ["graph", "eager"])
def test_a_block_of_tuning(scale_toml, cp, monkeypatch, deployment):
    monkeypatch.setattr(default_dispatcher, "_l2", None)
    x, a = cp.arange(1 << 20, dtype=cp.float32), cp.random.standard_normal((64, 512), dtype=cp.float32)
    held = get_best_kernel(scale_toml, n=x.size)
    held(x)
    free_bytes = cp.cuda.runtime.memGetInfo()[0]
    options = autotile.TuneOptions(workers=4, trials=8)
    with autotile.tuning(60, deployment=deployment, strict=True, options=options) as window:
        before = [held(x), autotile.matmul(a, a.T)]
    assert {entry.planned.problem.kernel for entry in window.result.entries} == {"scale", "matmul"}
    assert window.result.count("tuned") == 2
    assert (held.tier, held.measurement is not None) == ("exact", True)
    assert ("launched one by one by the host" in held.explain()) == (deployment == "eager")
    after = [held(x), autotile.matmul(a, a.T)]
    assert (before[0] == after[0]).all()
    assert float(abs(before[1] - after[1]).max()) < 1e-3
    assert cp.cuda.runtime.memGetInfo()[0] > free_bytes - (256 << 20)  # the processes beside it have ended
    with autotile.tuning(60, strict=True) as window:
        held(x)
        autotile.matmul(a, a.T)
    assert {entry.state for entry in window.result.entries} == {"done"}
