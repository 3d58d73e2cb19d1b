"""References of every kind tell right from wrong, and digests tell bits from bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_cases import CASES, KINDS, environment
from candidates import evaluate, evaluate_in_turn, expect_ok, expect_wrong
from feature_kernels import copy_kernel

import autotile
from autotile import Buffer, Scalar
from autotile.core.dtypes import DTYPES
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Outcome
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.support import GuardedBuffer, SupportKernels
from autotile.errors import InputError, SpecError
from autotile.kernel.expressions import parse_array_expression
from autotile.serving.dispatcher import default_dispatcher

pytestmark = pytest.mark.gpu(shared=True)


def test_values(cp):
    given = environment()
    on_device = {name: cp.asarray(value) if np.ndim(value) else value for name, value in given.items()}
    faults = []
    for text in CASES:
        expression = parse_array_expression(text, [name for name in given if name != "FLAG"], KINDS)
        expected = np.asarray(expression.evaluate(given))
        try:
            found = cp.asnumpy(expression.evaluate(on_device))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            assert found.dtype.kind == expected.dtype.kind
        except Exception as error:
            faults.append(f"{text}: {type(error).__name__}: {str(error).strip()[:300]}")
    assert not faults, "\n".join(faults)


def test_indices_out_of_bounds_are_found(cp):
    x, i = cp.arange(4.0), cp.array([0, 4])
    for text in ("x[i]", "take(x, i)", "bincount(i, 4)", "scatter_add(x, i, 1)"):
        with pytest.raises(SpecError, match="indices from 0 to 4 for an axis of 4"):
            parse_array_expression(text, ["x", "i"]).evaluate({"x": x, "i": i})


def written(folder: Path, *, entry: str = "smooth", kind: str = "float32", reference: str, more: str = "") -> Path:
    changes = {'entry = "smooth"': f'entry = "{entry}"', 'buffer = "float32"': f'buffer = "{kind}"'}
    toml = copy_kernel(folder, "smooth", {**changes, "naive<float>": reference})
    toml.write_text(f"{toml.read_text()}{more}\n")
    return toml


@pytest.mark.parametrize("more", ["", 'element_type = "float64"'])
def test_a_template_computes_the_reference(tmp_path, more):
    toml = written(tmp_path, reference="naive<double>" if more else "naive<float>", more=more)
    expect_ok(toml)
    expect_wrong(toml, "y[0]", ERROR=1)


OTHER = """extern "C" __global__ void other(PARAMETERS) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    BODY
}
"""


def write_other(folder: Path, parameters: str, body: str) -> None:
    (folder / "other.cu").write_text(OTHER.replace("PARAMETERS", parameters).replace("BODY", body))


def test_another_file_and_other_macros(tmp_path):
    write_other(tmp_path, "const float* x, float* y", "if (i < COUNT) y[i] = 0.2f * x[i] + x[(i + 1) % COUNT];")
    more = 'template = "other.cu"\narguments = ["x", "y"]\ndefines = { COUNT = "N + 0" }'
    expect_ok(written(tmp_path, reference="other", more=more))


def test_large_integers_are_compared_exactly(tmp_path):
    toml = written(tmp_path, entry="keys", kind="uint64", reference="keys", more="defines = { BLOCK = 32 }")
    expect_ok(toml)
    expect_wrong(toml, "11529215046068469", ADDED=1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (i < n) y[i] = 1.0f / 0.0f;", "is not finite"),
        ("if (i < n - 1) y[i] = 1.0f;", "were not written"),
        ("if (i < n) y[i] = 1.0f; if (i == 0) y[n] = 1.0f;", "wrote 1 word outside y"),
        ("if (i < n) y[i] = 1.0f; if (i == 0) ((float*)x)[0] = 1e9f;", "changed its input x"),
        ("if (i < n) y[i] = (float)(clock64() % 1000);", "differ between two launches"),
        ("if (i < n) y[i] = undeclared;", "does not compile"),
    ],
)
def test_faults_of_a_reference_are_told(tmp_path, body, said):
    write_other(tmp_path, "const float* x, float* y, float scale, int n", body)
    with pytest.raises(InputError, match=said):
        evaluate(written(tmp_path, reference="other", more='template = "other.cu"'))


def test_arguments_that_a_reference_does_not_take(tmp_path):
    with pytest.raises(InputError, match="naive<float>"):
        evaluate(written(tmp_path, reference="naive<float>", more='arguments = ["x", "y"]'))


def test_constant_memory(tmp_path):
    toml = written(tmp_path, reference="naive<double>", more='element_type = "float64"')
    template = toml.with_suffix(".cu").read_text().replace("x[(i + 1) % n]", "x[(i + 1) % n] * weights[i % 8]")
    toml.with_suffix(".cu").write_text("__constant__ float weights[8];\n" + template)
    weights = 'w = { buffer = "float32", shape = [8], access = "in", constant = "weights" }\nscale = {'
    toml.write_text(toml.read_text().replace("scale = {", weights))
    expect_ok(toml)
    assert evaluate(toml, ERROR=1).outcome is Outcome.WRONG_RESULT


def test_tolerances_of_single_outputs(tmp_path):
    expect_ok(written(tmp_path, reference="naive<float>", more="tolerance = { y = { absolute = 1.5 } }"), ERROR=1)
    toml = written(tmp_path, reference="naive<float>", more="tolerance = { y = { absolute = 0.5 } }")
    expect_wrong(toml, "within 0.5", ERROR=1)


def test_a_workspace_of_the_reference_is_cleared_before_each_of_its_launches(tmp_path):
    """The reference kernel counts its launches there, so that the second one would compute something else."""
    expect_ok(copy_kernel(tmp_path, "same"))


def test_a_workspace_is_cleared_for_each_configuration(tmp_path):
    """One configuration leaves its workspace other than zero, and is refused; the next one finds it zero.

    That no other has passed before does not make the data suspect.
    """
    right = "y[i] = x[i] + counts[i];"
    toml = copy_kernel(tmp_path, "same", {right: f"{{ {right} if (BLOCK == 64) counts[i] = 7; }}"})
    readings = evaluate_in_turn(toml, *({"BLOCK": block} for block in (64, 128, 64, 128)))
    assert [one.outcome for one in readings] == 2 * [Outcome.WRONG_RESULT, Outcome.OK]


SMOOTH = """
extern "C" __global__ void smooth(const float* x, float* y, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = x[i] + 0.5f * x[(i + 1) % n] + (WRONG ? 1.0f : 0.0f);
}"""


def smooth(code: str = SMOOTH, **more: Any) -> autotile.TunableKernel:
    arguments = {"x": Buffer("float32", "n"), "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n")}
    return autotile.kernel(
        code,
        "smooth",
        sizes={"n": 5000},
        **{
            "parameters": {"BLOCK": [32, 64, 128], "WRONG": [0, 1]},
            "default": {"BLOCK": 64, "WRONG": 0},
            "arguments": arguments,
            "launch": {"block": "BLOCK", "grid": "ceil_div(n, BLOCK)"},
            **more,
        },
    )


OPTIONS = autotile.TuneOptions(trials=6, finals=3)


def expect_right_wins(kernel: autotile.TunableKernel) -> None:
    result = kernel.tune(options=OPTIONS, progress=False)
    assert (result.outcomes[Outcome.WRONG_RESULT], result.winner.config["WRONG"]) == (3, 0)


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_a_function_tells_right_from_wrong(library):
    def expected(x: Any) -> Any:
        if library == "cupy":
            import cupy as cp

            assert isinstance(x, cp.ndarray)
            return x + 0.5 * cp.roll(x, -1)
        return x + 0.5 * np.roll(x, -1)

    expect_right_wins(smooth(reference=expected, reference_on=library))


def test_an_array_is_the_reference_of_arrays():
    x = np.arange(5000, dtype=np.float32)
    arguments = {"x": x, "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n")}
    kernel = smooth(arguments=arguments, reference={"y": x + 0.5 * np.roll(x, -1)}, ragged={"n": 5000})
    expect_right_wins(kernel)


def test_without_a_reference_configurations_must_agree():
    code = SMOOTH.replace("WRONG ? 1.0f", "WRONG ? (float)BLOCK")
    result = smooth(code).tune(options=OPTIONS, progress=False)
    assert result.winner.config["WRONG"] == 0
    assert any("NO REFERENCE" in notice for notice in result.notices)
    alone = smooth(code, name="alone", parameters={"BLOCK": [64], "WRONG": [0]})
    assert alone.tune(options=OPTIONS, progress=False).winner is None  # nothing confirms its result


@pytest.mark.parametrize(
    ("dtype", "expected", "hint"),
    [
        ("float32", lambda x: (x + 0.5 * np.roll(x, -1)) * (1 + 3e-6), "; if that is rounding, state the reduction"),
        ("float32", lambda x: 2 * x, "within 4.8e-07 of max(|expected|"),
        ("uint8", lambda x: x * 2, "; NumPy's arithmetic wraps around in uint8"),
        ("int32", lambda x: x, ""),
    ],
)
def test_a_reference_that_may_be_at_fault_is_told(dtype, expected, hint):
    code = SMOOTH.replace("float*", f"{'unsigned char' if dtype == 'uint8' else dtype.removesuffix('32')}*")
    values = "normal" if dtype == "float32" else "integers(100, 200)"
    arguments = [Buffer(dtype, "n", init=values), Buffer(dtype, "n", "out"), Scalar("int32", "n")]
    kernel = smooth(code, arguments=arguments, reference=expected)
    with pytest.raises(autotile.InputError, match="no candidate agrees with the reference") as caught:
        kernel.tune(options=autotile.TuneOptions(trials=1, finals=0), progress=False)
    _, _, reason = str(caught.value).partition("expected")
    assert hint in reason
    assert (";" in reason) == hint.startswith(";")


def test_a_function_compares_the_outputs():
    seen: list[int] = []

    def verify(expected: Any, got: Any, tolerance: Any) -> bool:
        seen.append(len(expected))
        return bool(np.allclose(expected, got, atol=tolerance))

    kernel = smooth(reference=lambda x: x + 0.5 * np.roll(x, -1), verify=verify, tolerance=1e-3)
    expect_right_wins(kernel)
    assert seen == [5000] * 6


def test_what_determines_the_bits(tmp_path):
    toml = copy_kernel(tmp_path, "row_sums")

    def digest(**values: int) -> Any:
        evaluation = evaluate(toml, **values)
        assert evaluation.outcome is Outcome.OK, evaluation.reason
        return evaluation.telemetry[OUTPUT_DIGEST]

    default = digest()
    assert digest() == default
    assert digest(BLOCK=128) == default
    other = digest(PARTS=100)
    assert other != default
    assert other.split(":")[0] == default.split(":")[0]
    assert digest(PARTS=100, ATOMIC=1) == VARYING_OUTPUTS


def test_a_running_program_keeps_its_bits(tmp_path, cp):
    toml = copy_kernel(tmp_path, "row_sums")
    sizes = {"R": 3000, "C": 1200}
    kernels = {numerics: autotile.get_best_kernel(toml, **sizes, numerics=numerics) for numerics in ("same", "any")}
    x = cp.asarray(np.random.default_rng(1).standard_normal((3000, 1200)).astype(np.float32))

    def computed() -> bytes:
        y = cp.zeros(3000, np.float32)
        kernels["same"](x, y)
        return bytes(y.get().tobytes())

    before = computed()
    options = autotile.TuneOptions(sampler="brute-force")
    winner = autotile.tune(toml, **sizes, options=options, progress=False).winner
    default_dispatcher.refresher.poll()
    assert (kernels["any"].config, kernels["same"].config["PARTS"]) == (winner.config, 1)
    assert computed() == before


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@pytest.mark.parametrize("elements", [1, 1001, 600_000])
def test_the_hash_is_that_of_the_words_and_their_places(tmp_path, elements):
    support = SupportKernels(CubinCache(tmp_path, 1 << 30), live_device().architecture)
    buffer = GuardedBuffer((elements,), DTYPES["float32"], support)
    values = np.random.default_rng(1).standard_normal(elements).astype(np.float32)
    buffer.array.set(values)
    words = values.view(np.uint32).astype(np.uint64)
    place = _mixed(np.arange(1, elements + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    expected = (int(_mixed(place ^ words).sum()), int(_mixed(~place + words).sum()))
    assert support.hashes([buffer.array]) == [expected]
    values[0] = -values[0]
    buffer.array.set(values)
    assert support.hashes([buffer.array]) != [expected]
