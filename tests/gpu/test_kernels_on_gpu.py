"""Kernels of every kind, tuned and served: element types, launches, textures, flags, workspaces, tensor maps, steps."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import expect_ok, expect_wrong, tune_watched
from feature_kernels import copy_kernel

import autotile
from autotile.core.dtypes import DTYPES
from autotile.core.model import Outcome, Trial
from autotile.cuda.driver import live_device
from autotile.cuda.toolchain import installed_nvcc
from autotile.errors import ArgumentError
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions

pytestmark = pytest.mark.gpu


ELEMENTS = {
    "bool": ("bool", "bool", "y[i] = !x[i];", "1 - x"),
    "float8_e4m3fn": ("float8_e4m3fn", "float", "y[i] = 2.0f * (float)x[i];", "2 * x"),
    "float8_e5m2": ("float32", "float8_e5m2", "y[i] = __nv_fp8_e5m2(x[i] * 3.0f);", "3 * x"),
    "complex64": ("complex64", "complex64", "y[i] = make_float2(x[i].x + 1.0f, x[i].y);", "x + 1"),
    "complex128": ("complex128", "complex128", "y[i] = make_double2(2 * x[i].x, 2 * x[i].y);", "2 * x"),
    "float4": ("float4", "float4", "float4 v = x[i]; y[i] = make_float4(v.x + 1, v.y + 1, v.z + 1, v.w + 1);", "x + 1"),
    "float3": ("float3", "float3", "y[i] = make_float3(-x[i].x, -x[i].y, -x[i].z);", "-x"),
    "uchar4": ("uchar4", "uchar4", "uchar4 v = x[i]; v.w += 1; y[i] = v; y[i].x += 1; ++y[i].y; ++y[i].z;", "x + 1"),
}


def map_kernel(folder: Path, case: str) -> Path:
    given, made, body, reference = ELEMENTS[case]
    types = {name: DTYPES["float32" if name == "float" else name].c_type for name in (given, made)}
    template = {"IN*": f"{types[given]}*", "OUT*": f"{types[made]}*", "{ BODY }": f"{{ {body} }}"}
    space = {"TYPE_IN": given, "TYPE_OUT": "float32" if made == "float" else made, "REFERENCE": reference}
    return copy_kernel(folder, "map", {**template, **space})


SERVED: dict[str, Any] = {"bool": lambda v: ~v, "complex64": lambda v: v + 1, "float3": lambda v: -v}


@pytest.mark.parametrize("case", ELEMENTS)
def test_an_element_type_is_verified_and_served_and_a_wrong_result_is_found(tmp_path, case, cp):
    toml = map_kernel(tmp_path, case)
    expect_ok(toml)
    if case in SERVED:
        kernel, given = get_best_kernel(str(toml), N=1000), DTYPES[ELEMENTS[case][0]]
        shape = given.array_shape((1000,))
        x = cp.asarray(given.encode(np.arange(np.prod(shape)).reshape(shape) % 2))
        for _ in range(4):
            np.testing.assert_array_equal(kernel(x).get(), SERVED[case](x.get()))
    template = toml.with_suffix(".cu")
    template.write_text(template.read_text().replace("if (i < N)", "if (i < N - 1)"))
    expect_wrong(toml, "of y are wrong")


def test_a_struct_by_value(tmp_path, cp):
    toml = copy_kernel(tmp_path, "struct_map")
    expect_ok(toml)
    kernel = get_best_kernel(str(toml), N=1000)
    for number in range(6):  # other arrays, and the same again, which become graphs
        x = cp.full((1000, 4), number % 2 + 1, cp.float32)
        np.testing.assert_array_equal(kernel(x).get(), 3 * x.get())
        np.testing.assert_array_equal(kernel(x).get(), 3 * x.get())


@pytest.mark.parametrize("blocks", [0, 1, 2, 4])
def test_a_cooperative_launch_and_clusters_from_a_parameter(tmp_path, blocks, cp):
    if blocks and live_device().compute_capability < "9.0":
        pytest.skip("needs compute capability 9.0")
    toml = copy_kernel(tmp_path, "reverse_in_clusters" if blocks else "reverse")
    expect_ok(toml, **({"CLUSTER": blocks} if blocks else {}))
    kernel = get_best_kernel(str(toml), N=5000)
    x = cp.arange(5000, dtype=cp.float32)
    for _ in range(4):
        np.testing.assert_array_equal(kernel(x).get(), 2 * np.roll(x.get(), -7))


@pytest.fixture
def blur(tmp_path):
    return copy_kernel(tmp_path, "blur")


def test_constant_memory_in_tuning_and_served(blur, cp):
    expect_ok(blur)
    kernel = get_best_kernel(str(blur), N=1000)
    x = cp.random.default_rng(0).standard_normal(1000, dtype=cp.float32)
    f = cp.asarray([1.0, 2.0, 3.0], cp.float32)
    for outputs in ((), (cp.empty_like(x),)):
        for number in range(6):  # the same address with another content, also where the launch has become a graph
            f += number
            y = kernel(f, x, *outputs).get()
            np.testing.assert_allclose(y, np.convolve(x.get(), f.get()[::-1], "same"), rtol=1e-5, atol=1e-4)


def test_two_streams_and_a_bound_function_have_constants_of_their_own(blur, cp):
    kernel = get_best_kernel(str(blur), N=1000)
    x, y, f = cp.ones(1000, cp.float32), cp.empty(1000, cp.float32), cp.full(3, 2.0, cp.float32)
    launch = kernel.bind(f, x, y)
    f.fill(5.0)
    kernel(f, x)
    for _ in range(3):
        launch()
        assert float(y[500]) == 6.0
    filters = [cp.full(3, value, cp.float32) for value in (1.0, 2.0)]
    outputs = [cp.empty_like(x) for _ in filters]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in filters]
    cp.cuda.Device().synchronize()
    for _ in range(50):
        for f, y, stream in zip(filters, outputs, streams, strict=True):
            with stream:
                kernel(f, x, y)
    cp.cuda.Device().synchronize()
    assert [float(y[500]) for y in outputs] == [3.0, 6.0]


def test_atomics_add_into_zeros_in_tuning_and_when_served(tmp_path, cp):
    histogram = copy_kernel(tmp_path, "histogram")
    expect_ok(histogram)
    kernel = get_best_kernel(str(histogram), N=1000)
    x, counts, one = cp.zeros(1000, cp.int32), cp.full(1, 77, cp.uint32), cp.zeros(1, cp.int32)
    for _ in range(5):
        assert int(kernel(x, counts, one)[0]) == 1000
    launch = kernel.bind(x, counts, one)
    for _ in range(3):
        launch()
        assert int(counts[0]) == 1000


def test_textures(tmp_path, cp):
    toml = copy_kernel(tmp_path, "look")
    expect_ok(toml)
    kernel = get_best_kernel(str(toml), H=50, W=64)
    for number in range(6):  # other arrays, and the same again, which become graphs
        a = cp.full((50, 64), number % 2 + 1, cp.float32)
        b = cp.arange(64, dtype=cp.float32)
        expected = np.vstack([a.get()[1:], np.zeros((1, 64), np.float32)]) + b.get()
        for _ in range(2):
            np.testing.assert_array_equal(kernel(a, b).get(), expected)


TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"
ALL = TuneOptions(sampler="brute-force", discard=False, finals=0)


@pytest.fixture
def split_toml(tmp_path):
    return copy_kernel(tmp_path, "split")


def with_default(toml: Path, **values: object) -> Path:
    head, _, tail = toml.read_text().partition("[default]\n")
    body, _, rest = tail.partition("\n[")
    lines = dict(line.split(" = ") for line in body.splitlines() if line) | {k: str(v) for k, v in values.items()}
    toml.write_text(head + "[default]\n" + "\n".join(f"{k} = {v}" for k, v in lines.items()) + "\n\n[" + rest)
    forget_served()
    return toml


@pytest.mark.parametrize(("dtype", "flags"), [("float32", {}), ("float16", {"OUT_FP32": 1, "TRANS_B": 1})])
def test_workspaces_are_verified(split_toml, dtype, flags):
    """Correct configurations pass, and each fault is identified by its effect on a workspace."""
    _, trials = tune_watched(split_toml, ALL, dtype=dtype, M=256, N=192, K=320, **flags)
    found = {tuple(trial.config.values()): (trial.outcome, trial.reason) for trial in trials}
    assert len(found) == 3 * (1 + 2 * 4)
    for (_, _, fault), (outcome, reason) in found.items():
        wanted, said = {
            0: (Outcome.OK, ""),
            1: (Outcome.WRONG_RESULT, "of the workspace counters other than zero"),
            2: (Outcome.OUT_OF_BOUNDS, "outside partials"),
            3: (Outcome.WRONG_RESULT, "elements of C are wrong"),
        }[fault]
        assert (outcome, said in reason) == (wanted, True), (fault, outcome, reason)


@pytest.mark.parametrize("split_k", [1, 5])
@pytest.mark.parametrize("shape", list(product([0, 1], [0, 1], [1, 3])))
def test_flags_and_stacks(split_toml, cp, split_k, shape):
    trans_a, trans_b, batch = shape
    kernel = get_best_kernel(
        str(with_default(split_toml, SPLIT_K=split_k)), M=33, N=17, K=70, BATCH=batch, TRANS_A=trans_a, TRANS_B=trans_b
    )
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((batch, 33, 70)), generator.standard_normal((batch, 70, 17))
    stored_a, stored_b = a.swapaxes(1, 2) if trans_a else a, b.swapaxes(1, 2) if trans_b else b
    given = [cp.asarray(np.ascontiguousarray(each), np.float32) for each in (stored_a, stored_b)]
    for _ in range(2):  # the second launch uses the workspaces in the state after the first
        np.testing.assert_allclose(kernel(*given).get(), a @ b, rtol=1e-4, atol=1e-4)


def test_a_stack_of_one_is_taken_and_returned_as_a_matrix_also_of_another_type(split_toml, cp):
    kernel = get_best_kernel(str(split_toml), M=33, N=17, K=70)
    a, b = cp.ones((33, 70), np.float32), cp.ones((70, 17), np.float32)
    assert kernel(a, b).shape == (33, 17)
    assert kernel(a[None], b[None]).shape == (1, 33, 17)
    out = cp.zeros((33, 17), np.float32)
    assert kernel(a, b, out) is out
    assert float(out.min()) == float(out.max()) == 70.0
    with pytest.raises(ArgumentError, match=r"A has shape \(2, 33, 70\), expected \(1, 33, 70\)"):
        kernel(cp.ones((2, 33, 70), np.float32), b)
    kernel = get_best_kernel(str(split_toml), dtype="float16", M=33, N=17, K=70, OUT_FP32=True)
    out = kernel(cp.ones((33, 70), np.float16), cp.full((70, 17), 0.1, np.float16))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.get(), 70 * float(np.float16(0.1)), rtol=1e-6)


def test_streams_have_workspaces_of_their_own(split_toml, cp):
    """With shared workspaces, concurrent launches would corrupt each other's partial sums and counters."""
    kernel = get_best_kernel(str(with_default(split_toml, SPLIT_K=5)), M=512, N=512, K=512)
    b = cp.asarray(np.random.default_rng(0).standard_normal((512, 512)), np.float32)
    expected = (cp.eye(512, dtype=np.float32) @ b).get()
    kernel(cp.eye(512, dtype=np.float32), b)
    cp.cuda.Device().synchronize()

    def work(number: int) -> float:
        a = (number + 1) * cp.eye(512, dtype=np.float32)
        cp.cuda.Device().synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            outs = [kernel(a, b) for _ in range(20)]
            stream.synchronize()
        return max(float(np.abs(out.get() - (number + 1) * expected).max()) for out in outs)

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(work, range(8))) < 1e-4


@pytest.mark.usefixtures("hopper")
class TestTensorMaps:
    def test_every_configuration_is_right(self):
        """For every swizzle, at a tuned and at a ragged shape."""
        result, trials = tune_watched(TRANSPOSE, ALL, M=1000, N=520)
        reasons = [trial.reason for trial in trials if trial.outcome is not Outcome.OK]
        assert result.outcomes == {Outcome.OK: 81}, reasons[:3]

    def test_it_is_served(self, cp):
        kernel = get_best_kernel(str(TRANSPOSE), M=301, N=44)
        for seed in (1, 0):
            a = cp.asarray(np.random.default_rng(seed).standard_normal((301, 44)), np.float32)
            np.testing.assert_array_equal(kernel(a).get(), a.get().T)
        launch = kernel.bind(a, out := cp.empty((44, 301), np.float32))
        launch()
        np.testing.assert_array_equal(out.get(), a.get().T)

        flat = cp.zeros(65, np.float32)
        with pytest.raises(ArgumentError, match="A starts at an address 4 bytes past a multiple of 16"):
            get_best_kernel(str(TRANSPOSE), M=8, N=8)(flat[1:].reshape(8, 8))


@pytest.mark.usefixtures("hopper")
def test_clusters(tmp_path):
    toml = copy_kernel(tmp_path, "swap")
    result = autotile.tune(str(toml), n=100_000, options=ALL)
    assert result.outcomes == {Outcome.OK: result.valid}
    assert result.winner is not None


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_a_template_with_macros_of_sizes(tmp_path, compiler):
    if compiler == "nvcc" and not installed_nvcc():
        pytest.skip("there is no nvcc on this machine")
    toml = copy_kernel(tmp_path, "typed_scale", {'compiler = "nvrtc"': f'compiler = "{compiler}"'})
    options = autotile.TuneOptions(trials=3)
    result = autotile.tune(str(toml), {"N": 100000}, options=options, database=tmp_path / "a.db")
    assert result.winner is not None, result


def tuned(path: Path, options: TuneOptions = ALL, **sizes: int) -> list[Trial]:
    return tune_watched(path, options, **sizes)[1]


def test_a_reduction_of_two_kernels(tmp_path, cp):
    path = copy_kernel(tmp_path, "two_step_sum")
    found = tuned(path, N=1000000)
    assert len(found) == 16
    for trial in found:
        assert trial.outcome is (Outcome.WRONG_RESULT if trial.config["WRONG"] else Outcome.OK), trial.reason
        if trial.outcome is Outcome.OK:
            assert {"step_us.0.partial_sums", "step_us.1.total"} <= trial.telemetry.keys()
    forget_served()
    kernel = get_best_kernel(str(path), N=1000000)
    assert (kernel.tier, len(kernel.launches)) == ("exact", 2)
    for _ in range(5):  # the third call launches a graph of both kernels
        x = cp.random.random((1, 1000000), dtype=cp.float32)
        for _ in range(3):
            assert abs(float(kernel(x)[0]) / float(x.sum(dtype=cp.float64)) - 1) < 1e-5


@pytest.mark.parametrize("split", [1, 4])
def test_a_second_pass_with_a_condition(tmp_path, cp, split):
    path = copy_kernel(tmp_path, "split_rows")
    path.write_text(path.read_text().replace("SPLIT = 1 }", f"SPLIT = {split} }}"))
    forget_served()
    kernel = get_best_kernel(str(path), M=1000, N=512)
    assert len(kernel.launches) == (1 if split == 1 else 2)
    x, y = cp.random.standard_normal((1000, 512), dtype=cp.float32), cp.zeros(1000, cp.float32)
    launch = kernel.bind(x, y)
    for _ in range(4):
        y.fill(cp.nan)
        launch()
        cp.testing.assert_allclose(y, x.sum(axis=1), rtol=1e-3, atol=1e-3)


def test_both_sides_of_a_condition_are_tuned(tmp_path):
    found = tuned(copy_kernel(tmp_path, "split_rows"), M=1000, N=512)
    assert [trial.outcome for trial in found] == [Outcome.OK] * 4


def test_repetitions_exchange_their_arrays(tmp_path, cp):
    path = copy_kernel(tmp_path, "scan_rounds")
    found = tuned(path, TuneOptions(sampler="brute-force", finals=2), N=4000)
    assert {trial.outcome for trial in found} <= {Outcome.OK, Outcome.PRUNED}
    forget_served()
    kernel = get_best_kernel(str(path), N=4000)
    x = cp.random.random(4000, dtype=cp.float32)
    expected = cp.cumsum(x)
    for _ in range(4):
        cp.testing.assert_allclose(kernel(x), expected, rtol=1e-5)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        y = kernel(x)
    stream.synchronize()
    cp.testing.assert_allclose(y, expected, rtol=1e-5)


def test_energy_of_a_call(tmp_path):
    options = TuneOptions(sampler="brute-force", finals=0, trials=1, objectives=("time", "energy"))
    (trial,) = tuned(copy_kernel(tmp_path, "scan_rounds"), options, N=4000)[:1]
    assert float(trial.telemetry["energy_mj"]) > 0


@pytest.mark.parametrize(("name", "count"), [("several_steps", 6), ("block_sums", 3)])
def test_arrays_and_references_that_depend_on_parameters(tmp_path, cp, name, count):
    path = copy_kernel(tmp_path, name)
    found = tuned(path, TuneOptions(sampler="brute-force", discard=False, finals=3), N=100000)
    assert [trial.outcome for trial in found if trial.stage == "measure"] == [Outcome.OK] * count
    forget_served()
    kernel = get_best_kernel(str(path), N=100000)
    x = cp.random.random(100000, dtype=cp.float32)
    outputs = kernel(x)
    if name == "block_sums":
        assert outputs.shape == kernel.shapes["sums"]
        assert abs(float(outputs.sum()) / float(x.sum(dtype=cp.float64)) - 1) < 1e-4
    else:
        steps = kernel.config["STEPS"]
        assert outputs[1].shape == kernel.shapes["rows"] == (steps, 100000)
        cp.testing.assert_allclose(outputs[0], steps * x, rtol=1e-6)
    with pytest.raises(autotile.errors.ArgumentError, match="see the kernel's attribute shapes"):
        kernel(x, *(cp.zeros(7, cp.float32) for _ in range(len(kernel.shapes) - 1)))


def test_steps_that_share_no_parameters_are_tuned_apart(tmp_path):
    """Seven trials have every setting of both steps, of 21 pairs; then the best of each are combined."""
    result, trials = tune_watched(copy_kernel(tmp_path, "apart"), TuneOptions(sampler="random"), N=1000)
    assert any("steps that share no parameters were tuned apart in" in notice for notice in result.notices)
    assert 7 <= len(trials) <= 7 + 4
    assert result.winner is not None
    assert result.stopped.rule == "space"


def test_an_objective_decides(tmp_path):
    """Three steps in one launch take less than three launches of one step, so the cost of a step falls."""
    path = copy_kernel(tmp_path, "several_steps")
    path.write_text(path.read_text().replace("[work]", '[metrics]\nrate = "N * STEPS / time_us"\n[work]'))
    options = TuneOptions(sampler="brute-force", objectives=("time_us / STEPS ** 2",))
    result = autotile.tune(str(path), options=options, N=100000)
    assert (result.winner.config["STEPS"], result.winner.scores.keys()) == (3, {"objective", "rate"})
    forget_served()
    assert get_best_kernel(str(path), N=100000).config["STEPS"] == 3
