"""The GPU worker under kernels that fail in every way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotile.device.compiler import compile_job
from autotile.device.cubin_cache import CubinCache
from autotile.device.properties import live_device
from autotile.files.library import Kernel, load_kernel
from autotile.ground.errors import WorkerError
from autotile.ground.model import Outcome
from autotile.process.gpu import Gpu
from autotile.process.messages import Candidate, Workload

pytestmark = pytest.mark.gpu

# Each FAULT makes the kernel fail in another way.
TEMPLATE = """
extern "C" __global__ void faulty(const float* x, float* y, int n) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (FAULT == 1 && i == 0) y[n + 3] = 1.0f;
    if (FAULT == 2 && i == 5) return;
    if (FAULT == 3) { volatile float* p = (float*)16; *p = 1.0f; }
    if (FAULT == 4) { while (((volatile const float*)x)[0] == ((volatile const float*)x)[0]) {} }
    if (FAULT == 5 && i == 0) ((float*)x)[7] = -1.0f;
    if (FAULT == 6) __trap();
    if (FAULT == 7 && n % 128 != 0 && i >= n) y[i] = 0.0f;
    if (FAULT == 8) { printf("hello\\n"); }
    if (FAULT != 7 ? i < n : true) { if (i < n) y[i] = 2.0f * x[i] + (FAULT == 9 ? 1e-3f : 0.0f); }
}
"""
SPACE = """
[kernel]
name = "faulty"
template = "faulty.cu"
entry = "faulty"
summary = "y = 2 x, or a fault"
[problem]
sizes = { n = 100000 }
ragged = { n = 1001 }
[parameters]
FAULT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
[default]
FAULT = 0
[rules]
[launch]
block = ["128"]
grid = ["ceil_div(n, 128)"]
[arguments]
x = { buffer = "dtype", shape = ["n"], access = "in" }
y = { buffer = "dtype", shape = ["n"], access = "out" }
n = { scalar = "int32", value = "n" }
[reference]
outputs = { y = "2 * x" }
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.cu").write_text(TEMPLATE)
    (folder / "faulty.toml").write_text(SPACE)
    return load_kernel(str(folder / "faulty.toml"))


def workload(kernel: Kernel, cache: Path) -> Workload:
    return Workload(
        spec_text=kernel.spec.text,
        spec_source=kernel.spec.source,
        sizes=kernel.spec.sizes,
        dtype="float32",
        l2="cold",
        cache=str(cache),
        cache_limit_bytes=10**8,
        sample_limit_s=0.05,
    )


@pytest.fixture(scope="module")
def gpu(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    gpu = Gpu(workload(kernel, tmp_path_factory.mktemp("cache")), deadline_s=8.0)
    yield gpu
    gpu.close()


@pytest.fixture
def candidate(kernel: Kernel, cubin_cache_folder: Path) -> Callable[[int], Candidate]:
    def make(fault: int) -> Candidate:
        job = compile_job(kernel, {"FAULT": fault}, "float32", live_device().architecture)
        cubin = CubinCache(cubin_cache_folder, 10**9).get_or_compile(job)
        return Candidate({"FAULT": fault}, str(cubin.path))

    return make


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        (0, Outcome.OK, ""),
        (1, Outcome.OUT_OF_BOUNDS, "outside y"),
        (2, Outcome.WRONG_RESULT, "y[5] is nan"),
        (3, Outcome.CRASHED, "ILLEGAL"),
        (4, Outcome.TIMED_OUT, "verify"),
        (5, Outcome.WRONG_RESULT, "changed its input x"),
        (6, Outcome.CRASHED, ""),
        (7, Outcome.OUT_OF_BOUNDS, "n=1001"),
        (8, Outcome.OK, ""),
        (9, Outcome.WRONG_RESULT, "elements of y are wrong"),
    ],
)
def test_every_fault_is_an_outcome_and_the_next_candidate_runs(
    gpu: Gpu, candidate: Callable[[int], Candidate], fault: int, outcome: Outcome, words: str
) -> None:
    evaluation = gpu.evaluate(candidate(fault), None)
    assert evaluation.outcome is outcome, evaluation.reason
    assert words.lower() in evaluation.reason.lower()
    good = gpu.evaluate(candidate(0), None)
    assert good.outcome is Outcome.OK
    assert good.measurement is not None
    assert good.measurement.low_us <= good.measurement.time_us <= good.measurement.high_us


def test_a_slow_candidate_is_dropped_and_its_time_kept(gpu: Gpu, candidate: Callable[[int], Candidate]) -> None:
    evaluation = gpu.evaluate(candidate(0), 0.01)
    assert evaluation.outcome is Outcome.PRUNED
    assert evaluation.measurement is not None


def test_five_deaths_in_a_row_stop_the_run(
    kernel: Kernel, candidate: Callable[[int], Candidate], cubin_cache_folder: Path
) -> None:
    gpu = Gpu(workload(kernel, cubin_cache_folder), deadline_s=8.0)
    try:
        for _ in range(5):
            assert gpu.evaluate(candidate(6), None).outcome is Outcome.CRASHED
        with pytest.raises(WorkerError, match="5 GPU workers died"):
            gpu.evaluate(candidate(6), None)
    finally:
        gpu.close()


def test_a_missing_cubin_does_not_end_the_worker(gpu: Gpu, candidate: Callable[[int], Candidate]) -> None:
    evaluation = gpu.evaluate(Candidate({"FAULT": 0}, "/nowhere/gone.cubin"), None)
    assert evaluation.outcome is Outcome.CRASHED
    assert gpu.evaluate(candidate(0), None).outcome is Outcome.OK
