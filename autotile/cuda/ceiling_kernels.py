"""Kernels that reach the ceilings of a GPU (``ceilings.cu``): their launches, their work, checks of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES, Array, Shape
from autotile.core.model import LaunchGeometry
from autotile.cuda.compiler import CompileJob, CubinCache
from autotile.cuda.function import Function, Module, driver_launch
from autotile.cuda.timing import Launch, no_work
from autotile.cuda.toolchain import load_cupy

_SOURCE = Path(__file__).with_name("ceilings.cu")

_MEMORY_THREADS = 512
_THREADS = 256
_WARPS = _THREADS // 32
_CHAINS, _FMAS = 8, 64
_A_TILES, _B_TILES, _DEPTH = 2, 4, 32
_A_TILES_64 = _B_TILES_64 = 2
_WG_ROWS, _WG_COLUMNS, _WG_ROW_BYTES, _WG_REPEATS, _WARPGROUPS = 64, 256, 128, 8, 2
"""As in ``ceilings.cu``."""

_BYTES_WORD = 0x01010101
"""Word of memory that is set to bytes of 1. It is odd, so that a sum of words modulo 2**32 tells their number."""
_L2_FACTOR = 16
_MIN_BUFFER_BYTES = 1 << 28
_MEMORY_PARTS = 6
"""A buffer of DRAM is 16 times as large as the L2 cache, so that at most a thirty-second of two of them can be in it,
at least 256 MiB, and a sixth of the free memory at most."""
_L2_SHARE = 4
"""The data of the L2 ceilings take a fourth of the cache, as some GPUs keep a copy in each half."""
_MAX_ROUNDS = 32_767
"""Up to this number the sum of the chains of a thread is below 2**24, and fp32 holds it exactly."""
_MAX_LONG_ROUNDS = (1 << 24) + 1
_SEED = 1


@dataclass(frozen=True, slots=True)
class CeilingLoop:
    """A kernel that repeats a unit of work, for a ceiling of `autotile.core.ceilings.CEILINGS`.

    ``method`` says what it does: its instruction or its accesses. A round is ``work`` bytes or operations;
    ``max_rounds`` is an odd number, 1 for a kernel that is not repeated. ``queue`` launches a number of rounds on
    CuPy's current stream. ``fault`` waits for the last launch, of a number of rounds, and returns what is wrong with
    its result; empty if nothing. ``prepare`` queues work before each launch that is timed. If ``is_flushed``, the L2
    cache is filled with data to be written back before each launch, as the launch leaves it.
    """

    ceiling: str
    method: str
    work: float
    queue: Callable[[int], None]
    fault: Callable[[int], str]
    max_rounds: int = _MAX_LONG_ROUNDS
    prepare: Launch = no_work
    is_flushed: bool = False


def ceiling_job(compute_capability: str) -> CompileJob:
    """Return the compilation of the kernels that a compute capability has."""
    major, minor = map(int, compute_capability.split("."))
    version = 10 * major + minor
    entries = ["empty", "read_words", "copy_words", "fma_float32", "fma_float64", "fma_float16"]
    if version >= 80:
        entries += ["mma_float16", "mma_bfloat16", "mma_tf32"]
    if version == 80 or 90 <= version < 120:
        entries.append("mma_float64")
    if version == 89 or version >= 120:
        entries.append("mma_float8_e4m3fn")
    if version == 90:
        entries += ["wgmma_float16", "wgmma_bfloat16", "wgmma_tf32", "wgmma_float8_e4m3fn"]
    source, architecture = _SOURCE.read_text(encoding="utf-8"), f"sm_{version}{'a' if version == 90 else ''}"
    return CompileJob(source, source, str(_SOURCE), entries[0], architecture, (), tuple(entries[1:]))


class CeilingKernels:
    """The kernels, loaded into the current context."""

    def __init__(self, device: DeviceProperties, cache: CubinCache) -> None:
        cupy = load_cupy()
        job = ceiling_job(device.compute_capability)
        cubin = cache.get_or_compile(job)
        module = Module(cubin.path)
        self._functions = {name: module.function(cubin.symbols.get(name, name)) for name in job.entries}
        self._device = device
        self._elapsed = cupy.zeros(2, np.uint64)
        self._result: Any = cupy.zeros(device.sm_count * device.max_threads_per_sm * _CHAINS, np.uint32)
        """Large enough for 8 words of every thread that the device holds."""
        self._random = np.random.default_rng(_SEED)

    def clock_mhz(self, launch: Launch, launches: int) -> float | None:
        """Return the mean SM clock during some launches; None if they are too short for the device's clocks.

        The device's count of nanoseconds may have steps of a tenth of a launch, so that a single one tells little.
        """
        self._elapsed.set(np.zeros(2, np.uint64))
        for _ in range(launches):
            launch()
        cycles, nanoseconds = map(int, self._elapsed.get())
        return 1e3 * cycles / nanoseconds if nanoseconds else None

    def empty(self) -> None:
        """Launch a kernel that does nothing."""
        self._functions["empty"].launch((1, 1, 1), (32, 1, 1), (), 0)

    def host_launch_us(self, launches: int) -> float:
        """Return the time that the host takes to queue an empty kernel, in microseconds; the mean of some launches."""
        stream = load_cupy().cuda.get_current_stream()
        launch = driver_launch(self._functions["empty"].pointer, LaunchGeometry((1, 1, 1), (32, 1, 1), 0))
        start = time.perf_counter()
        for _ in range(launches):
            launch(stream.ptr, 0, 0)
        elapsed_us = 1e6 * (time.perf_counter() - start)
        stream.synchronize()
        return elapsed_us / launches

    def groups(self) -> Iterator[Sequence[CeilingLoop]]:
        """Yield the loops of one ceiling after the other; their buffers live until the next are requested."""
        yield from self._memory_groups()
        yield from self._l2_groups()
        for name in ("float32", "float64", "float16"):
            yield [self._fma(name)]
        for name in ("float16", "bfloat16", "tf32", "float8_e4m3fn", "float64"):
            found = [self._mma(name)] if f"mma_{name}" in self._functions else []
            found += [self._wgmma(name)] if f"wgmma_{name}" in self._functions else []
            if found:
                yield found

    def _memory_groups(self) -> Iterator[Sequence[CeilingLoop]]:
        cupy = load_cupy()
        free_bytes, _ = cupy.cuda.runtime.memGetInfo()
        wanted = max(_L2_FACTOR * self._device.l2_bytes, _MIN_BUFFER_BYTES)
        size = min(wanted, free_bytes // _MEMORY_PARTS) // 512 * 512
        memory = _ones(2 * size)
        other_size = max(2 * self._device.l2_bytes, 1 << 20) // 512 * 512
        others = _ones(other_size)
        # Reads are timed after other reads: what a flush by writes leaves in the cache would be written back meanwhile.
        evict = partial(self._read(others, other_size, 1, "").queue, 1)
        yield [self._read(memory, 2 * size, blocks, "dram_read", evict) for blocks in self._grids("read_words")]
        yield [self._copy(memory, size, blocks, "dram_copy") for blocks in self._grids("copy_words")]

    def _l2_groups(self) -> Iterator[Sequence[CeilingLoop]]:
        size = max(self._device.l2_bytes // _L2_SHARE, 1 << 16) // 1024 * 1024
        memory = _ones(size)
        yield [self._read(memory, size, blocks, "l2_read") for blocks in self._grids("read_words")]
        yield [self._copy(memory, size // 2, blocks, "l2_copy") for blocks in self._grids("copy_words")]

    def _queue(
        self, function: Function, grid: tuple[int, int, int], threads: int, given: Sequence[Any], *results: Any
    ) -> Callable[[int], None]:
        """Return a function that launches a kernel; the number of rounds lies between what is given and the results."""
        return lambda rounds: function.launch(
            grid, (threads, 1, 1), (*given, np.int32(rounds), *results, self._elapsed), 0
        )

    def _grids(self, name: str) -> list[int]:
        """Return numbers of blocks per SM to try: all that fit, half of them, one."""
        most = self._functions[name].blocks_per_sm(_MEMORY_THREADS, 0)
        return sorted({most, max(most // 2, 1), 1}, reverse=True)

    def _read(self, memory: Any, size: int, blocks: int, ceiling: str, prepare: Launch = no_work) -> CeilingLoop:
        grid, quads = (blocks * self._device.sm_count, 1, 1), np.uint64(size // 16)
        threads, sums = grid[0] * _MEMORY_THREADS, self._result
        given = np.uint64(memory.ptr), quads
        queue = self._queue(self._functions["read_words"], grid, _MEMORY_THREADS, given, sums)

        def fault(rounds: int) -> str:
            found = int(sums[:threads].get().sum(dtype=np.uint64)) % 2**32
            return "" if found == size // 4 * rounds * _BYTES_WORD % 2**32 else "not all words were read"

        is_once = ceiling.startswith("dram")
        method = f"16-byte loads, {blocks * _MEMORY_THREADS:,} threads per SM"
        rounds = 1 if is_once else _MAX_LONG_ROUNDS
        return CeilingLoop(ceiling, method, float(size), queue, fault, rounds, prepare)

    def _copy(self, memory: Any, size: int, blocks: int, ceiling: str) -> CeilingLoop:
        grid, quads = (blocks * self._device.sm_count, 1, 1), np.uint64(size // 16)
        target = memory + size
        given = np.uint64(memory.ptr), np.uint64(target.ptr), quads
        queue = self._queue(self._functions["copy_words"], grid, _MEMORY_THREADS, given)

        def fault(rounds: int) -> str:
            target.memset(0, size)
            queue(rounds)
            check = self._read(target, size, blocks, ceiling)
            check.queue(1)
            return check.fault(1) and "not all words were copied"

        is_once = ceiling.startswith("dram")
        method = f"16-byte loads and stores, {blocks * _MEMORY_THREADS:,} threads per SM"
        rounds = 1 if is_once else _MAX_LONG_ROUNDS
        return CeilingLoop(ceiling, method, 2.0 * size, queue, fault, rounds, is_flushed=is_once)

    def _fma(self, name: str) -> CeilingLoop:
        function, number = self._functions[f"fma_{name}"], np.dtype(name).type
        grid = self._one_wave(function)
        threads, is_pair = grid[0] * _THREADS, name == "float16"
        one = np.array([1, 1], np.float16).view(np.uint32)[0] if is_pair else number(1)
        result = self._result[: threads * _CHAINS] if is_pair else load_cupy().zeros(threads, name)
        queue = self._queue(function, grid, _THREADS, (one, one), result)

        def fault(rounds: int) -> str:
            found: Array = result.get()
            expected = _CHAINS * _FMAS * rounds + sum(range(_CHAINS))
            if is_pair:  # after an odd number of rounds, whose steps have alternating signs
                found, expected = found.view(np.float16), _FMAS
            return "" if (found == expected).all() else "a chain of multiply-adds has a wrong sum"

        work = 2.0 * threads * _CHAINS * _FMAS * (2 if is_pair else 1)
        method = "FMA of pairs" if is_pair else "FMA"
        return CeilingLoop(f"fma_{name}", method, work, queue, fault, _MAX_ROUNDS)

    def _mma(self, name: str) -> CeilingLoop:
        if name == "float64":
            is_hopper = self._device.compute_capability == "9.0"
            rows, k, tiles = 16 if is_hopper else 8, 16 if is_hopper else 4, (_A_TILES_64, _B_TILES_64)
        else:
            rows, k, tiles = 16, 32 // _item_bytes(name), (_A_TILES, _B_TILES)
        A, a = self._operand(name, (tiles[0], rows, k))
        B, b = self._operand(name, (tiles[1], 8, k))
        product = np.einsum("xmk,ynk->xymn", a, b) * _DEPTH
        work = 2.0 * product.size * k * _DEPTH * _WARPS
        method = f"mma.sync m{rows}n8k{k}"
        return self._product(name, self._functions[f"mma_{name}"], (A, B), product, method=method, work=work)

    def _wgmma(self, name: str) -> CeilingLoop:
        depth = _WG_ROW_BYTES // _item_bytes(name)
        A, a = self._operand(name, (_WG_ROWS, depth))
        B, b = self._operand(name, (_WG_COLUMNS, depth))
        product = a @ b.T * _WG_REPEATS
        work = 2.0 * product.size * depth * _WG_REPEATS * _WARPGROUPS
        method = f"wgmma m{_WG_ROWS}n{_WG_COLUMNS}k{depth // 4}"
        return self._product(name, self._functions[f"wgmma_{name}"], (A, B), product, method=method, work=work)

    def _product(
        self, name: str, function: Function, operands: tuple[Any, Any], expected: Array, *, method: str, work: float
    ) -> CeilingLoop:
        """Return the loop of a kernel of products; ``work`` is that of a block."""
        ceiling, grid = f"tensor_{name}", self._one_wave(function)
        found = load_cupy().zeros(expected.shape, "float64" if name == "float64" else "float32")
        queue = self._queue(function, grid, _THREADS, operands, found)

        def fault(rounds: int) -> str:
            error = np.abs(found.get() - expected).max() / np.abs(expected).max()
            found.fill(0)
            return "" if error <= _TOLERANCES[ceiling] else f"the product has an error of {error:.2g}"

        return CeilingLoop(ceiling, method, work * grid[0], queue, fault)

    def _operand(self, name: str, shape: Shape) -> tuple[Any, Array]:
        """Return normally distributed values on the device and, exactly, as float64."""
        values = self._random.standard_normal(shape)
        if name == "tf32":
            bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)  # 10 bits of the fraction
            return load_cupy().asarray(bits), bits.view(np.float32).astype(np.float64)
        stored = DTYPES[name].encode(values)
        return load_cupy().asarray(stored), DTYPES[name].decode(stored)

    def _one_wave(self, function: Function) -> tuple[int, int, int]:
        return function.blocks_per_sm(_THREADS, 0) * self._device.sm_count, 1, 1


_TOLERANCES = {
    "tensor_float16": 1e-3,
    "tensor_bfloat16": 1e-3,
    "tensor_tf32": 1e-3,
    "tensor_float8_e4m3fn": 2e-2,
    "tensor_float64": 1e-12,
}
"""Errors relative to the largest element of the product. Sums have fp32's 24 bits, or 14 bits for fp8 on Hopper
(DeepSeek-V3 Technical Report, section 3.5.2), and are truncated in each of 32 steps."""


def _item_bytes(name: str) -> int:
    return 4 if name == "tf32" else DTYPES[name].size_bytes


def _ones(size: int) -> Any:
    memory = load_cupy().cuda.alloc(size)
    memory.memset(1, size)
    return memory
