from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.device.compiler import CompileJob
from autotile.ground.errors import ToolchainError
from autotile.ground.model import Outcome
from autotile.process.compile_pool import CompilePool

SOURCE = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }'
JOB = CompileJob(SOURCE, "hash", "/nowhere/fill.cu", "fill", "sm_90", ("-DVALUE=1",))
# Template instantiation without end in sight, yet within the compiler's depth limit.
SLOW = """
template <int N> struct Fib { static constexpr unsigned value(unsigned x) {
    return Fib<N - 1>::value(x) + Fib<N - 2>::value(x + 1); } };
template <> struct Fib<0> { static constexpr unsigned value(unsigned x) { return x; } };
template <> struct Fib<1> { static constexpr unsigned value(unsigned x) { return x * 3; } };
extern "C" __global__ void fill(unsigned* x) { constexpr unsigned v = Fib<26>::value(1); x[0] = v; }
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CompilePool]:
    pool = CompilePool(tmp_path, 10**8, workers=2, deadline_s=30)
    yield pool
    pool.close()


def test_jobs_are_compiled_into_the_cache(pool: CompilePool) -> None:
    jobs = [replace(JOB, options=(f"-DVALUE={value}",)) for value in range(6)]
    compiled = [pool.submit(lambda job=job: job).result() for job in jobs]  # type: ignore[misc]
    assert all(c.outcome is Outcome.OK and c.cubin is not None and c.cubin.path.is_file() for c in compiled)
    assert len({c.cubin.cubin_hash for c in compiled if c.cubin is not None}) == 6


def test_a_cached_job_needs_no_worker(pool: CompilePool, tmp_path: Path) -> None:
    first = pool.submit(lambda: JOB).result()
    again = CompilePool(tmp_path, 10**8, workers=1, deadline_s=0.0)  # a worker would miss this deadline
    try:
        assert again.submit(lambda: JOB).result().cubin == first.cubin
    finally:
        again.close()


def test_a_failed_compilation_is_an_outcome(pool: CompilePool) -> None:
    failed = pool.submit(lambda: replace(JOB, options=("-DVALUE=oops",))).result()
    assert failed.outcome is Outcome.COMPILE_FAILED
    assert "oops" in failed.reason
    assert pool.submit(lambda: JOB).result().outcome is Outcome.OK


def test_a_compilation_that_hangs_costs_one_candidate(tmp_path: Path) -> None:
    pool = CompilePool(tmp_path, 10**8, workers=1, deadline_s=30)
    try:
        assert pool.submit(lambda: JOB).result().outcome is Outcome.OK
        pool._deadline_s = 0.05
        slow = pool.submit(lambda: replace(JOB, source=SLOW, source_hash="slow")).result()
        assert slow.outcome is Outcome.TIMED_OUT
        pool._deadline_s = 30
        assert pool.submit(lambda: replace(JOB, options=("-DVALUE=9",))).result().outcome is Outcome.OK
    finally:
        pool.close()


def test_a_broken_toolchain_is_raised(pool: CompilePool) -> None:
    with pytest.raises(ToolchainError, match="sm_11"):
        pool.submit(lambda: replace(JOB, architecture="sm_11")).result()
