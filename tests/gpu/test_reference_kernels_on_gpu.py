"""References that are computed by another kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from candidates import evaluate
from feature_kernels import block_space, write_kernel

from autotile.core.model import Outcome
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings
from autotile.tuning.backend import sent_reference
from autotile.workers.bench import Bench
from autotile.workers.jobs import Candidate, Entry, Reading, Time, Workload

pytestmark = pytest.mark.gpu

TEMPLATE = """
template <typename T>
__global__ void naive(const T* x, T* y, T scale, int n) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    if (i < n) y[i] = FACTOR * scale * x[i] + x[(i + 1) % n];
}

extern "C" __global__ void __launch_bounds__(BLOCK) smooth(const float* x, float* y, float scale, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = 2 * scale * x[i] + x[(i + 1) % n] + ERROR;
}

extern "C" __global__ void keys(const unsigned long long* x, unsigned long long* y, float scale, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = (1ull << 60) + i + x[i] + ADDED;
}
"""

SPACE = block_space(
    "smooth",
    """
x = { buffer = "@type", shape = ["N"], access = "in" }
y = { buffer = "@type", shape = ["N"], access = "out" }
scale = { scalar = "float32", value = 0.1 }
N = { scalar = "int32", value = "N" }
""",
    """
kernel = "@reference"
grid = ["ceil_div(N, 32)"]
block = [32]
@more
""",
    entry="@entry",
    parameters={"BLOCK": (64, 128), "ERROR": (0, 1), "ADDED": (0, 1), "FACTOR": (2, 0)},
    default={"BLOCK": 128, "ERROR": 0, "ADDED": 0, "FACTOR": 2},
)


def written(folder: Path, *, entry: str = "smooth", kind: str = "float32", reference: str, more: str = "") -> Path:
    space = SPACE.replace("@entry", entry).replace("@type", kind).replace("@reference", reference)
    return write_kernel(folder, TEMPLATE, space.replace("@more", more))


@pytest.mark.parametrize("more", ["", 'element_type = "float64"'])
def test_a_template_computes_the_reference(tmp_path: Path, more: str) -> None:
    toml = written(tmp_path, reference="naive<double>" if more else "naive<float>", more=more)
    assert evaluate(toml).outcome is Outcome.OK
    wrong = evaluate(toml, ERROR=1)
    assert wrong.outcome is Outcome.WRONG_RESULT
    assert "y[0]" in wrong.reason


def test_another_file_and_other_macros(tmp_path: Path) -> None:
    other = 'extern "C" __global__ void other(const float* x, float* y) {\n'
    other += "    const int i = blockIdx.x * 32 + threadIdx.x;\n"
    other += "    if (i < COUNT) y[i] = 0.2f * x[i] + x[(i + 1) % COUNT];\n}\n"
    (tmp_path / "other.cu").write_text(other)
    more = 'template = "other.cu"\narguments = ["x", "y"]\ndefines = { COUNT = "N + 0" }'
    assert evaluate(written(tmp_path, reference="other", more=more)).outcome is Outcome.OK


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    toml = written(tmp_path, entry="keys", kind="uint64", reference="keys", more="defines = { BLOCK = 32 }")
    assert evaluate(toml).outcome is Outcome.OK
    wrong = evaluate(toml, ADDED=1)
    assert wrong.outcome is Outcome.WRONG_RESULT
    assert "11529215046068469" in wrong.reason


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (i < n) y[i] = 1.0f / 0.0f;", "is not finite"),
        ("if (i < n - 1) y[i] = 1.0f;", "were not written"),
        ("if (i < n) y[i] = 1.0f; if (i == 0) y[n] = 1.0f;", "wrote 1 words outside y"),
        ("if (i < n) y[i] = 1.0f; if (i == 0) ((float*)x)[0] = 1e9f;", "changed its input x"),
        ("if (i < n) y[i] = (float)(clock64() % 1000);", "differ between two launches"),
        ("if (i < n) y[i] = undeclared;", "does not compile"),
    ],
)
def test_faults_of_a_reference_are_told(tmp_path: Path, body: str, said: str) -> None:
    other = 'extern "C" __global__ void other(const float* x, float* y, float scale, int n) {\n'
    (tmp_path / "other.cu").write_text(other + f"    const int i = blockIdx.x * 32 + threadIdx.x;\n    {body}\n}}\n")
    with pytest.raises(InputError, match=said):
        evaluate(written(tmp_path, reference="other", more='template = "other.cu"'))


def test_arguments_that_a_reference_does_not_take(tmp_path: Path) -> None:
    toml = written(tmp_path, reference="naive<float>", more='arguments = ["x", "y"]')
    with pytest.raises(InputError, match="naive<float>"):
        evaluate(toml)


def test_constant_memory(tmp_path: Path) -> None:
    template = TEMPLATE.replace("template <typename T>", "__constant__ float weights[8];\ntemplate <typename T>", 1)
    template = template.replace("x[(i + 1) % n]", "x[(i + 1) % n] * weights[i % 8]")
    space = SPACE.replace("@entry", "smooth").replace("@type", "float32").replace("@reference", "naive<double>")
    space = space.replace("@more", 'element_type = "float64"').replace(
        "scale = {", 'w = { buffer = "float32", shape = [8], access = "in", constant = "weights" }\nscale = {'
    )
    toml = write_kernel(tmp_path, template, space)
    assert evaluate(toml).outcome is Outcome.OK
    assert evaluate(toml, ERROR=1).outcome is Outcome.WRONG_RESULT


def test_tolerances_of_single_outputs(tmp_path: Path) -> None:
    toml = written(tmp_path, reference="naive<float>", more="tolerance = { y = { absolute = 1.5 } }")
    assert evaluate(toml, ERROR=1).outcome is Outcome.OK
    toml = written(tmp_path, reference="naive<float>", more="tolerance = { y = { absolute = 0.5 } }")
    wrong = evaluate(toml, ERROR=1)
    assert wrong.outcome is Outcome.WRONG_RESULT
    assert "within 0.5" in wrong.reason


ACCUMULATED_TEMPLATE = """
extern "C" __global__ void counted(const float* x, float* y, unsigned int* counts, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < n) y[i] = x[i] + atomicAdd(&counts[i], 1u);
}

extern "C" __global__ void __launch_bounds__(BLOCK) same(const float* x, float* y, unsigned int* counts, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = x[i] + counts[i];
}
"""

ACCUMULATED_SPACE = block_space(
    "same",
    """
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
counts = { workspace = "uint32", shape = ["N"], init = "zeros" }
n = { scalar = "int32", value = "N" }
""",
    """
kernel = "counted"
block = [64]
grid = ["ceil_div(N, 64)"]
""",
)


def test_a_workspace_of_the_reference_is_cleared_before_each_of_its_launches(tmp_path: Path) -> None:
    """The reference kernel counts its launches there, so that the second one would compute something else."""
    found = evaluate(write_kernel(tmp_path, ACCUMULATED_TEMPLATE, ACCUMULATED_SPACE))
    assert found.outcome is Outcome.OK, found.reason


def test_a_workspace_is_cleared_for_each_configuration(tmp_path: Path) -> None:
    """One configuration leaves its workspace other than zero, and is refused; the next one finds it zero."""
    template = ACCUMULATED_TEMPLATE.replace(
        "y[i] = x[i] + counts[i];", "{ y[i] = x[i] + counts[i]; if (BLOCK == 64) counts[i] = 7; }"
    )
    toml = write_kernel(tmp_path, template, ACCUMULATED_SPACE)
    kernel, settings = load_kernel(str(toml)), read_settings()
    spec, cache = kernel.spec, CubinCache(settings.cache, settings.cache_limit_bytes)
    bench = Bench()
    bench.open(
        Workload(
            spec_text=spec.text,
            spec_source=spec.source,
            spec_folder=spec.folder,
            sizes=dict(spec.sizes),
            dtype="float32",
            l2="cold",
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
            sample_limit_s=0.02,
            reference_source=sent_reference(kernel),
        )
    )
    outcomes = []
    for block in (128, 64, 128):
        job = compile_job(kernel, {"BLOCK": block}, "float32", live_device().architecture)
        cubin = cache.get_or_compile(job)
        candidate = Candidate({"BLOCK": block}, str(cubin.path), cubin.symbols)
        readings: list[Reading] = []
        bench.run(Time((Entry(candidate),)), lambda stage: None, readings)
        outcomes.append(readings[0].outcome)
    assert outcomes == [Outcome.OK, Outcome.WRONG_RESULT, Outcome.OK]
