"""Operations on a GPU: sweeps and races with cuBLAS, models that ship, an example, and what is served."""

import json
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import compiled, tune_watched
from child_python import python
from faults.fault_kit import HEALTHY, fault_kernel

import autotile
from autotile.core.documents import to_fields
from autotile.core.model import Outcome
from autotile.cuda import timing
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.database.database import Database
from autotile.database.learned import read_models
from autotile.errors import ArgumentError
from autotile.exchange.shipped import shipped_model
from autotile.families.operation_model import ModelCandidate
from autotile.kernel.inputs import read_captured_call, with_captured_call
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.operation import Library, load_operation
from autotile.serving import operations
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.operations import libraries_for
from autotile.settings import read_settings
from autotile.tuning.family_session import FAULTS as FAULTY_OUTCOMES
from autotile.tuning.operation_session import OperationResult, tune_operation
from autotile.tuning.options import TuneOptions
from autotile.workers import gpu as gpu_module
from autotile.workers.bench import Bench, handle
from autotile.workers.jobs import Check, Entry, Time, Workload, job_message

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("bfloat16", {"M": 257, "N": 128, "K": 513}), ("float32", {"M": 64, "N": 512, "K": 256, "TRANS_B": 1})],
)
def test_kernels_and_cublas_are_raced(dtype, sizes):
    result = autotile.tune("matmul", sizes, dtype=dtype, options=TuneOptions(trials=8, finals=2), progress=False)
    assert isinstance(result, OperationResult)
    busy = "could not be verified as often within"  # which a busy machine has no time for
    assert all(busy in one for one in result.notices), result.notices
    cublas = result.libraries[0]
    assert (cublas.name, cublas.reason, cublas.state in ("won", "raced")) == ("cublas", "", True)
    winner = result.winner
    assert winner.time_us <= cublas.time_us
    with Database.open(read_settings().database) as database:
        stored = database.best("matmul:cublas", dtype=dtype)
        assert [one.trial.time_us for one in stored] == [cublas.time_us]
        assert stored[0].key.sizes["M"] == sizes["M"]
        raced = [one for one in result.contenders if one.state in ("won", "raced") and not one.is_library]
        for one in raced:
            assert database.best(one.name, dtype=dtype)[0].trial.time_us == one.time_us


def test_a_function_of_ones_own_is_raced_and_a_wrong_one_fails(scaling_toml):
    operation = load_operation(str(scaling_toml))

    def right(x: Any, y: Any) -> None:
        cp.multiply(x, cp.float32(2.0), out=y)

    def wrong(x: Any, y: Any) -> None:
        y.fill(0)

    result = tune_operation(
        operation,
        operation.resolve({"n": 100_000}),
        read_settings(),
        TuneOptions(trials=3, finals=2),
        libraries=[Library("right", "1", right), Library("wrong", "1", wrong)],
    )
    states = {one.name: one.state for one in result.contenders}
    assert states["wrong"] == "failed"
    assert {states["right"], states["scale"]} == {"won", "raced"}


def workload_and_entry(kernel: Kernel, sizes: dict[str, int], folder: Path) -> tuple[Workload, Entry]:
    """Compile the default configuration for a problem, and return what a worker is opened for and measures."""
    spec = kernel.spec
    workload = Workload(spec.text, spec.source, sizes, "float32", "cold", str(folder), 10**9, 0.02)
    return workload, Entry(compiled(kernel, dict(spec.default), CubinCache(folder, 10**9), sizes))


def ask(bench: Bench, message: Any) -> Any:
    return handle(bench, (), message, lambda stage: None)


def test_the_inputs_of_two_kernels_are_kept_by_the_worker(scale_toml, tmp_path):
    """A worker that is opened for a problem again verifies the candidate that passed, and lays nothing out."""
    first, entry = workload_and_entry(load_kernel(str(scale_toml)), {"n": 1000}, tmp_path)
    second, bench, problems = replace(first, sizes={"n": 2000}), Bench(), []
    for workload in (first, second, first):
        ask(bench, {"op": "open", "workload": to_fields(workload), "device_index": 0})
        problems.append(bench._present)
        reply = ask(bench, job_message(Time((entry,))))
        assert [one.outcome for one in reply["readings"]] == [Outcome.OK]
    assert problems[0] is problems[2]
    assert problems[0] is not problems[1]


def test_what_adds_to_its_outputs_is_right_where_samples_are_repeated(tmp_path, monkeypatch):
    on_time = timing.event_timer
    monkeypatch.setattr(timing, "event_timer", lambda *of: lambda: (True, on_time(*of)()[1]))
    workload, entry = workload_and_entry(load_kernel("sgemm_2d"), {"M": 256, "N": 256, "K": 256}, tmp_path)
    bench = Bench()
    ask(bench, {"op": "open", "workload": to_fields(workload), "device_index": 0})
    for asked in (Time((entry,)), Check((entry,), 4)):
        reply = ask(bench, job_message(asked))
        assert [(one.outcome, one.reason) for one in reply["readings"]] == [(Outcome.OK, "")]


def test_a_family_is_measured_and_its_model_stored(scaling_toml):
    """Every pair of a problem and a configuration is verified; a run after it measures nothing again."""
    options = TuneOptions(trials=26, workers=4)
    result = autotile.tune_family(str(scaling_toml), n="1000..1000000", options=options, progress=False)
    assert result.problems == 26
    assert result.pairs >= 26 * 6
    assert result.refused == 0
    assert 0 <= result.losses.mean <= result.losses.worst
    with Database.open(read_settings().database) as database:
        assert [(one.operation, one.dtype) for one in read_models(database)] == [("scaling", "float32")]
    again = autotile.tune_family(str(scaling_toml), n="1000..1000000", options=options, progress=False)
    assert (again.resumed, again.pairs) == (26, result.pairs)


def test_products_are_swept_beside_cublas(sweep_of):
    operation = load_operation("matmul")
    sweep = sweep_of(operation, "float32", libraries_for(operation))
    kernels = {member.name: member.load() for member in operation.members if "float32" in member.dtypes}
    candidates = [ModelCandidate(name, dict(kernel.spec.default)) for name, kernel in kernels.items()]
    for sizes in ({"M": 256, "N": 512, "K": 128}, {"M": 33, "N": 65, "K": 129, "TRANS_A": 1}):
        swept = sweep.at(operation.resolve(sizes, "float32"))
        assert sweep.run(swept, sweep.prepare(swept, candidates))
        assert swept.libraries["cublas"] > 0
        assert {trial.outcome.has_time for trial in swept.trials.values()} == {True}, swept.trials
        with Database.open(read_settings().database) as database:
            assert len(database.best("matmul:cublas")) >= 1


FAULTS = {
    "trap": Outcome.CRASHED,
    "infinite_loop": Outcome.TIMED_OUT,
    "wrong_element": Outcome.WRONG_RESULT,
    "write_outside": Outcome.OUT_OF_BOUNDS,
    "keeps_result": Outcome.WRONG_RESULT,
    "hangs_later": Outcome.TIMED_OUT,
}
"""Faults of the kit, the last two of which show in repeated launches only, with the outcome of each in a sweep."""


@pytest.mark.timeout(600)
def test_a_sweep_blames_the_configuration_that_is_at_fault(tmp_path, monkeypatch, sweep_of):
    """Whatever one does to the worker, those before and after it are right."""
    monkeypatch.setattr(gpu_module, "_GRID_DEADLINE_S", 20.0)
    monkeypatch.setattr(gpu_module, "_ENTRY_DEADLINE_S", 0.0)
    fault_kernel(tmp_path, *FAULTS)
    path = tmp_path / "doubling.toml"
    path.write_text(
        '[operation]\nname = "doubling"\nsizes = { n = 4000000 }\ndtypes = ["float32"]\n\n'
        '[kernels.faults]\nkernel = "./faults.toml"\n'
    )
    operation = load_operation(str(path))
    (name,) = (member.name for member in operation.members)
    healthy = [ModelCandidate(name, {"THREADS": threads, "FAULT": HEALTHY}) for threads in (64, 128, 256)]
    faulty = [ModelCandidate(name, {"THREADS": 128, "FAULT": fault}) for fault in FAULTS]
    order = [healthy[0], *faulty[:3], healthy[1], *faulty[3:], healthy[2]]
    sweep = sweep_of(operation, "float32")
    for n in (4_000_000, 8_000_000):  # none is dropped as slow before the launch at which it hangs
        swept = sweep.at(operation.resolve({"n": n}))
        assert sweep.run(swept, sweep.prepare(swept, order))
        assert all(swept.trials[one.key].outcome.has_time for one in healthy), swept.trials
        if n == 4_000_000:
            assert {one.config["FAULT"]: swept.trials[one.key].outcome for one in faulty} == FAULTS
        else:
            assert len(swept.trials) == len(healthy)  # the others are excluded


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_shipped_models_choose_is_right(dtype, layout, sweep_of):
    operation, device = load_operation("matmul"), live_device()
    model = shipped_model("matmul", dtype, device)
    if model is None:
        pytest.skip(f"no model ships for {device.name}")
    candidates = [ModelCandidate(one.kernel, one.config) for one in model.candidates if not one.is_library]
    assert candidates
    sweep = sweep_of(operation, dtype)
    valid, verified = set(), set()
    for m, n, k in ((1024, 1024, 1024), (8, 4096, 4096), (1000, 999, 1001), (4096, 8, 4096)):
        sizes = {"M": m, "N": n, "K": k, "TRANS_A": layout[0], "TRANS_B": layout[1]}
        swept = sweep.at(operation.resolve(sizes, dtype))
        valid |= {one.key for one in sweep.valid(swept, candidates)}
        assert sweep.run(swept, sweep.prepare(swept, candidates))
        faults = {key: trial.reason for key, trial in swept.trials.items() if trial.outcome in FAULTY_OUTCOMES}
        assert faults == {}
        verified |= {key for key, trial in swept.trials.items() if trial.outcome.has_time}
    assert len(valid) > len(candidates) // 3
    assert len(verified) >= 0.9 * len(valid)  # the others need more memory than estimated, or do not compile


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "row_sums"


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        ("row_sums_whole", {"ROWS": 389, "N": 4096}),
        ("row_sums_whole", {"ROWS": 1001, "N": 33}),
        ("row_sums_split", {"ROWS": 3, "N": 1_000_001}),
        ("row_sums_split", {"ROWS": 64, "N": 20_000}),
    ],
)
def test_every_configuration_is_right(kernel, sizes):
    options = autotile.TuneOptions(sampler="random", trials=8, finals=0, discard=False, workers=4)
    _, trials = tune_watched(FOLDER / f"{kernel}.toml", options, **sizes)
    assert len(trials) == 8
    assert {trial.outcome for trial in trials} == {Outcome.OK}


@pytest.mark.parametrize("library", [True, False])
def test_what_is_served_is_right(library, monkeypatch):
    monkeypatch.setattr(operations, "_added", {})
    runpy.run_path(str(FOLDER / "row_sums.py"))
    for rows, n in ((1, 1_000_000), (64, 200_001), (4097, 33)):
        x = cp.random.default_rng(0).standard_normal((rows, n), dtype=cp.float32)
        kernel = autotile.get_best_kernel(str(FOLDER / "row_sums.toml"), ROWS=rows, N=n, library=library)
        assert kernel.is_library == library
        sums, want = cp.full(rows, cp.nan, cp.float32), x.sum(axis=1, dtype=cp.float64)
        for launch in (partial(kernel, x, sums), kernel.bind(x, sums)):
            sums.fill(cp.nan)
            launch()
            assert float(cp.abs(sums - want).max()) < 1e-4 * n**0.5


def test_the_benchmark_at_random_sizes(tmp_path):
    output = tmp_path / "any_size.json"
    example, limits = FOLDER / "row_sums", ("--count", "4", "--limit", "6")
    of_example = "--operation", f"{example}.toml", "--python", f"{example}.py", "ROWS=1..4096", "N=16..100000"
    done = python(ROOT / "benchmarks" / "any_size.py", *of_example, *limits, "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {row["class"]: None for row in rows} == {"float32": None, "float32_no_library": None}
    assert len(rows) == 8
    for row in rows:
        assert not row["fault"]
        assert row["error"] <= row["tolerance"]
        assert row["library"] == "cupy"
        assert row["grid"] or row["class"] == "float32"


cp: Any = pytest.importorskip("cupy")
SIZES = {"M": 70, "N": 96, "K": 130}


@pytest.fixture(autouse=True)
def _no_added_libraries():
    yield
    operations._added.clear()
    default_dispatcher.clear()


def factors(dtype: str = "float32") -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return tuple(cp.asarray(generator.standard_normal(shape).astype(dtype)) for shape in ((70, 130), (130, 96)))  # type: ignore[return-value]


def is_close(result: Any, a: Any, b: Any, tolerance: float = 1e-4) -> bool:
    expected = a.get().astype(np.float64) @ b.get().astype(np.float64)
    return bool(np.abs(result.get() - expected).max() <= tolerance * np.abs(expected).max())


def served(**options: Any) -> Any:
    return autotile.get_best_kernel("matmul", dtype="float32", **SIZES, **options)


def assert_captured(kernel: Any) -> tuple[Any, Any, Any]:
    """Capture a call in a graph, launch the graph, and expect its result; return the arrays."""
    a, b = factors()
    out, stream = cp.zeros((70, 96), "float32"), cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        kernel(a, b, out)
        stream.end_capture().launch(stream)
        stream.synchronize()
    assert is_close(out, a, b)
    return a, b, out


@pytest.fixture
def only_cublas(monkeypatch):
    """No model of times."""
    monkeypatch.setattr("autotile.serving.operations.model_of", lambda *_: None)


@pytest.mark.usefixtures("only_cublas")
class TestCublas:
    def test_it_is_called_like_a_kernel(self):
        kernel = served(EMULATE=0)
        assert (kernel.kernel, kernel.tier, kernel.can_launch) == ("cublas", "library", True)
        a, b = factors()
        for _ in range(3):  # the later calls take the fast path
            assert is_close(kernel(a, b), a, b)
        out = cp.ones((70, 96), "float32")
        assert kernel(a, b, out, alpha=2.0, beta=3.0) is out
        assert is_close((out - 3) / 2, a, b)
        with pytest.raises(ArgumentError, match="no scalar 'gamma'"):
            kernel(a, b, out, gamma=1.0)
        with pytest.raises(ArgumentError, match="has shape"):
            kernel(b, a)

    def test_every_call_gives_the_same_bits_and_it_can_be_captured(self):
        kernel = served()
        a, b, _ = assert_captured(kernel)
        first = kernel(a, b).get()
        for _ in range(10):
            with cp.cuda.Stream(non_blocking=True) as stream:
                again = kernel(a, b)
                stream.synchronize()
            assert (again.get() == first).all()

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_views_and_batches_of_pytorch(self, dtype):
        torch = pytest.importorskip("torch")
        a = torch.randn((3, 33, 40), device="cuda").to(getattr(torch, dtype))
        b = torch.randn((3, 24, 33), device="cuda").to(getattr(torch, dtype))
        left, right = a.transpose(1, 2), b.transpose(1, 2)
        exact = left.double() @ right.double()
        for stream in (None, torch.cuda.Stream()):
            found = autotile.matmul(left, right, stream=stream)
            torch.cuda.synchronize()
            assert float((found.double() - exact).abs().max() / exact.abs().max()) < 0.02


class TestRace:
    def test_the_first_call_races_and_the_times_are_stored(self):
        kernel = served(race=True, EMULATE=0)
        assert type(kernel) is BoundKernel
        kernel.load()
        assert (kernel.is_loaded, kernel.first_use is None) == (True, False)
        a, b = factors()
        assert is_close(kernel(a, b), a, b)
        assert kernel.first_use is None
        assert kernel.tier == "exact"
        assert len(kernel.contenders) >= 2
        assert any(one.is_library for one in kernel.contenders)
        with Database.open(read_settings().database) as database:
            assert {study.key.kernel for study in database.studies()} >= {"matmul:cublas"}
        default_dispatcher.clear()
        assert served(EMULATE=0).kernel == kernel.kernel
        assert served(EMULATE=0).tier == "exact"

    def test_not_while_the_stream_is_captured(self):
        kernel = served(race=True)
        arrays = assert_captured(kernel)
        assert kernel.tier != "exact"
        kernel(*arrays)
        assert kernel.tier == "exact"

    def test_not_if_the_output_overlaps_an_input_and_what_is_added_to_is_added_to_once(self):
        kernel = autotile.get_best_kernel("matmul", dtype="float32", M=64, N=64, K=64, race=True)
        a, b = (cp.ones((64, 64), "float32") for _ in range(2))
        kernel(a, b, a)
        assert kernel.tier != "exact"
        (a, b), out = factors(), cp.ones((70, 96), "float32")
        autotile.matmul(a, b, out, beta=5.0, race=True)
        assert is_close(out - 5, a, b)

    def test_a_wrong_library_loses(self, only_kernel):
        only_kernel("sgemm")
        autotile.add_library("matmul", "wrong", lambda a, b, c, **_: c.fill(0))
        kernel, (a, b) = served(race=True), factors()
        assert is_close(kernel(a, b), a, b)
        assert "wrong" not in {one.kernel for one in kernel.contenders}


def test_a_library_of_ones_own(scaling_toml):
    x = cp.arange(1000, dtype="float32")
    assert (autotile.get_best_kernel(str(scaling_toml), n=1000)(x) == 2 * x).all()
    called = []

    def double(x: Any, y: Any) -> None:
        called.append(cp.cuda.get_current_stream().ptr)
        cp.multiply(x, 2, out=y)

    autotile.add_library(str(scaling_toml), "cupy", double)
    kernel = autotile.get_best_kernel(str(scaling_toml), n=1000)
    stream = cp.cuda.Stream()
    cp.cuda.get_current_stream().synchronize()
    result = kernel(x, stream=stream)
    stream.synchronize()
    assert (result == 2 * x).all()
    assert (kernel.kernel, called) == ("cupy", [stream.ptr])


@pytest.mark.parametrize("kind", ["library", "raced", "plain"])
class TestAllKinds:
    """What a kernel can do, a library and a race can."""

    @pytest.fixture
    def kernel(self, kind, request):
        if kind == "plain":
            return autotile.get_best_kernel("sgemm", **SIZES)
        if kind == "library":
            request.getfixturevalue("only_cublas")
        return served(EMULATE=0, race=kind == "raced")

    def test_a_call_is_captured(self, kernel, kind, tmp_path):
        a, b = factors()
        captured = autotile.capture(kernel, tmp_path / "calls", calls=1)
        for stream in (None, cp.cuda.Stream(non_blocking=True)):
            result = captured(a, b, stream=stream)
            cp.cuda.Device().synchronize()
            assert is_close(result, a, b)
        assert (kernel.tier == "exact", kernel.calls) == (kind == "raced", 2)
        (folder,) = (tmp_path / "calls").iterdir()
        assert {path.name for path in folder.glob("*.npy")} == {"A.npy", "B.npy", "C.npy"}  # beta * C is read
        call = read_captured_call(folder)
        assert call.dtype == "float32"
        assert set(SIZES.items()) <= set(call.sizes.items())
        np.testing.assert_array_equal(np.load(folder / "A.npy").reshape(a.shape), a.get())
        assert with_captured_call(load_kernel(call.kernel).spec, folder)

    def test_it_adopts_itself_and_others(self, kernel):
        a, b = factors()
        assert kernel.adopt(kernel)
        assert is_close(kernel(a, b), a, b)
        default_dispatcher.clear()
        other = served(EMULATE=0)
        other.load()
        kernel.adopt(other)
        for _ in range(2):
            assert is_close(kernel(a, b), a, b)
        assert kernel.explain()

    def test_a_bound_call(self, kernel, kind):
        a, b = factors()
        out = cp.zeros((70, 96), "float32")
        kernel.bind(a, b, out)()
        assert is_close(out, a, b)
        assert is_close(kernel(a, b), a, b)
        assert kind != "raced" or (kernel.tier, kernel.calls) == ("exact", 1)
        with pytest.raises(ArgumentError, match="gamma"):
            kernel.bind(a, b, out, gamma=1.0)


@pytest.mark.usefixtures("only_cublas")
def test_a_kernel_takes_the_place_of_a_library_and_a_library_that_of_a_kernel():
    library, kernel = served(EMULATE=0), served(EMULATE=0, library=False)
    a, b = factors()
    assert (library.is_library, kernel.is_library) == (True, False)
    for first, second in ((library, kernel), (kernel, served(EMULATE=0, numerics="any"))):
        name = second.kernel
        for one in (first, second):
            assert is_close(one(a, b), a, b)
        bound = first.bind(a, b, out := cp.zeros((70, 96), "float32"))
        assert first.adopt(second)
        assert (first.kernel, first.is_library) == (name, name == "cublas")
        for _ in range(3):
            assert is_close(first(a, b), a, b)
        assert is_close(first(a, b, cp.ones((70, 96), "float32"), alpha=0.5, beta=0.0) * 2, a, b)
        bound()  # it keeps what it was bound with
        assert is_close(out, a, b)
