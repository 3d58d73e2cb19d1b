import ctypes
import os
import threading
import time
from concurrent.futures import wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cache_settings import cache_settings

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob, _elf_section, compile_cubin
from autotile.errors import CompileError
from autotile.settings import ADDR_NO_RANDOMIZE, available_cores
from autotile.workers.child import COMPILE_WORKER, WorkerPool, _equal_addresses, memory_share_bytes
from autotile.workers.compile_pool import Compiled, CompilePool, worker_count

SOURCE = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }'
JOB = CompileJob(SOURCE, "hash", "/nowhere/fill.cu", "fill", "sm_90", ("-DVALUE=1",))


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a pool, which is closed in the end."""
    with ExitStack() as stack:

        def make(workers: int = 1, deadline_s: float = 30, folder: Path = tmp_path, **options: Any) -> CompilePool:
            return stack.enter_context(closing(CompilePool(cache_settings(folder), workers, deadline_s, **options)))

        yield make


@pytest.fixture
def pool(make):
    return make(2)


@pytest.fixture
def bad(clean, make):
    return partial(make, module="bad_worker")


def entry(name: str) -> CompileJob:
    return replace(JOB, entry=name)


def test_jobs_are_compiled_into_the_cache_unless_they_fail_and_need_no_worker_then(pool, make):
    jobs = [replace(JOB, options=(f"-DVALUE={value}",)) for value in range(3)]
    compiled = [pool.submit(job).result() for job in jobs]
    assert all(c.outcome is Outcome.OK and c.cubin.path.is_file() for c in compiled)
    assert len({c.cubin.cubin_hash for c in compiled}) == 3
    failed = pool.submit(replace(JOB, options=("-DVALUE=oops",))).result()
    assert failed.outcome is Outcome.COMPILE_FAILED
    assert "oops" in failed.reason
    assert pool.submit(replace(JOB, options=("-DVALUE=4",))).result().outcome is Outcome.OK
    again = make(deadline_s=0.0)  # a worker would miss this deadline
    assert again.submit(jobs[0]).result().cubin == compiled[0].cubin


def test_sessions_that_share_workers_do_not_compile_more_at_once_than_these_allow(make, tmp_path):
    with WorkerPool(compilers=1) as worker_pool:
        pools = [make(2, folder=tmp_path / name, worker_pool=worker_pool) for name in "ab"]
        with worker_pool.compile_slots:
            running = [pool.submit(replace(JOB, options=(f"-DVALUE={n}",))) for n, pool in enumerate(pools)]
            assert not wait(running, timeout=0.2).done
        for name, compilation in zip("ab", running, strict=True):  # into the cache of whoever asks
            assert compilation.result().cubin.path.is_relative_to(tmp_path / name)
        first, second = worker_pool.acquire_idle(COMPILE_WORKER), worker_pool.acquire_idle(COMPILE_WORKER)
        assert (first is None, second) == (False, None)  # both compilations ran in one process
        first.close()


def test_workers_are_started_ahead_and_take_the_first_jobs(make):
    with WorkerPool() as worker_pool:
        pool, end = make(3, ready=2, worker_pool=worker_pool), time.monotonic() + 60
        while len(worker_pool._idle.get((COMPILE_WORKER, ""), ())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert pool.submit(JOB).result().outcome is Outcome.OK
        pool.close()
        assert len(worker_pool._idle[COMPILE_WORKER, ""]) == 2


def test_those_that_took_longer_with_the_same_options_begin_first_where_the_order_is_free(make, monkeypatch):
    def job(unroll: int, pad: int) -> CompileJob:
        return replace(JOB, options=(f"-DUNROLL={unroll}", f"-DPAD={pad}"))

    def attempt(_: CompilePool, job: CompileJob, deadline_s: float) -> Compiled:
        begun.append(job)
        assert all_wait.wait(60)
        return Compiled(None)

    class Kept(list[Any]):
        def append(self, _: object) -> None:
            """Learn nothing from compilations that take no time here."""

    for is_free in (True, False):
        begun: list[CompileJob] = []
        known: list[tuple[frozenset[str], float]] = []
        all_wait, pool = threading.Event(), make()
        monkeypatch.setattr(CompilePool, "_attempt", attempt)
        pool.longest_first = is_free
        for number in range(8):
            unroll, pad = (1, 4, 16)[number % 3], number % 4
            known.append((frozenset(job(unroll, pad).options), 0.1 * unroll + 0.02 * pad))
        pool._times = Kept(known)
        asked = [job(1, 9), job(1, 8), job(4, 1), job(16, 0), job(4, 3), job(16, 7)]
        futures = [pool.submit(one) for one in asked]
        all_wait.set()
        assert not wait(futures, 60).not_done
        ordered = [int(one.options[0].removeprefix("-DUNROLL=")) for one in begun]
        assert ordered == ([1, 16, 16, 4, 4, 1] if is_free else [1, 1, 4, 16, 4, 16])


@pytest.mark.parametrize("name", ["large_text", "large_table"])
def test_a_compilation_that_takes_all_memory_costs_one_candidate(make, name):
    pool, source = make(deadline_s=60, memory_bytes=2**28), Path(__file__).with_name(f"{name}.cu").read_text()
    large = pool.submit(replace(JOB, source=source, source_hash=name)).result()
    assert large.outcome is Outcome.COMPILE_FAILED
    assert "out of memory" in large.reason
    assert pool.submit(JOB).result().outcome is Outcome.OK


@pytest.mark.parametrize(
    ("deed", "outcome", "words"),
    [
        ("exit", Outcome.COMPILE_FAILED, "the compiler failed: the worker died with exit code 3"),
        ("fault_in_verify", Outcome.COMPILE_FAILED, "SIGSEGV"),
        ("compiled_late", Outcome.TIMED_OUT, "the compiler was stopped after 0.5 s"),
        ("no_keys", Outcome.COMPILE_FAILED, "is malformed: object missing required field cubin"),
    ],
)
def test_whatever_a_worker_does_the_next_job_finds_a_fresh_one(bad, deed, outcome, words):
    pool = bad(deadline_s=5.0)
    assert pool.submit(entry("compiled")).result().cubin is not None
    failed = pool.submit(entry(deed), 0.5).result()
    assert failed.outcome is outcome
    assert words in failed.reason
    assert failed.seconds > 0.5 or outcome is not Outcome.TIMED_OUT
    assert pool.submit(entry("compiled")).result().cubin is not None


def test_a_killed_compiler_is_tried_again_alone_and_a_second_kill_says_nothing_about_its_candidate(bad, tmp_path):
    pool = bad(4)
    futures = [pool.submit(entry(name)) for name in ("busy", "busy", "killed_once", *["busy"] * 9)]
    assert {future.result().outcome for future in futures} == {Outcome.OK}
    assert (tmp_path / "died").exists()
    assert (tmp_path / "beside").read_text() == ""
    killed = pool.submit(entry("killed")).result()
    assert killed.outcome is Outcome.NOT_COMPILED
    assert "SIGKILL, as the system does when memory runs out" in killed.reason
    assert pool.submit(entry("compiled")).result().outcome is Outcome.OK


def headed(value: int, head: str = "", text: str = "VALUE", macro: str = "VALUE", folder: str = "") -> CompileJob:
    """Return a kernel, indented deeply, that begins with headers."""
    source = f"// A kernel.\n#include <cuda_fp16.h>\n{head}\n{' ' * 99}{SOURCE.replace('VALUE', text)}"
    options, folders = (f"-D{macro}={value}",), (folder,) if folder else ()
    return CompileJob(source, f"{hash(source)}", "/nowhere/fill.cu", "fill", "sm_90", options, include_folders=folders)


@pytest.fixture
def eager(clean, make):
    """A pool that precompiles the headers of every kernel."""
    return make(1, module="eager_compiler")


def compiles_as_alone(pool: CompilePool, job: CompileJob) -> bool:
    """Compile a job, and return whether its code is the same as without a pool."""
    cubin = pool.submit(job).result().cubin
    codes = [_elf_section(image, b".text.fill") for image in (cubin.path.read_bytes(), compile_cubin(job).cubin)]
    assert all(codes)
    return codes[0] == codes[1]


def test_headers_of_all_configurations_are_parsed_once(eager, tmp_path):
    with _equal_addresses():
        if not ctypes.CDLL(None).personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE:
            pytest.skip("addresses that are not randomized are not permitted here")
    assert all(compiles_as_alone(eager, headed(value)) for value in range(3))
    (precompiled,) = (tmp_path / "cubins").glob("*.pch")
    assert precompiled.stat().st_size  # it is empty where the headers change the code
    failed = eager.submit(headed(3, text='"a"')).result()
    with pytest.raises(CompileError) as plain:
        compile_cubin(headed(3, text='"a"'))
    assert failed.reason == str(plain.value)
    precompiled.write_bytes(b"damaged")
    assert eager.submit(headed(4)).result().outcome is Outcome.OK


@pytest.mark.parametrize(("macro", "head"), [("CUB_VALUE", ""), ("VALUE", "#include <own.h>\n")])
def test_headers_that_may_depend_on_a_macro_are_parsed_each_time(eager, tmp_path, macro, head):
    (tmp_path / "own.h").write_text("static __device__ float own() { return VALUE; }\n")
    for value in range(2):
        assert compiles_as_alone(eager, headed(value, head, "own()" if head else macro, macro, str(tmp_path)))
    assert not list((tmp_path / "cubins").glob("*.pch"))


def test_at_most_two_workers_a_core():
    cores = available_cores()
    assert [worker_count(number) for number in (None, 1, 2 * cores, 400 * cores)] == [cores, 1, 2 * cores, 2 * cores]


def test_a_share_of_the_memory_is_generous_and_never_all_of_it(tmp_path, monkeypatch):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = tmp_path / "memory.max"
    monkeypatch.setattr("autotile.workers.child._CGROUP_LIMITS", (tmp_path / "missing", container))
    container.write_text("max\n")
    assert memory_share_bytes(1) == max(0.75 * total, 2 * 2**30)
    container.write_text(f"{2**32}\n")
    assert memory_share_bytes(1) == 3 * 2**30
    assert memory_share_bytes(16) == 2 * 2**30
