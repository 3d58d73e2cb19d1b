"""Load cubins, and launch their functions through CuPy, through the driver or as CUDA graphs.

A graph of one node costs the host about half of a launch. Measured on H200s (driver 580): 1.4 us instead of 3.5 on a
fast host, 2.5 instead of 4.8 on a slow one; the GPU executes both equally fast. Making a graph takes 50 to 80 us and
115 KiB of GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np

from autotile.core.model import LaunchGeometry, Resources, Sizes
from autotile.cuda.driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    Cluster,
    attribute_launch,
    declares_cluster,
    load_driver,
    outside_of_captures,
    result_name,
)
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.kernel.arguments import round_up
from autotile.kernel.launch import LaunchPlan, StepLaunch
from autotile.kernel.spec import Step

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``, cuda.h."""


class Function:
    """An entry function of a loaded module, which it keeps loaded.

    It may be deleted at any time, even while a stream is being captured, when CUDA unloads a module only in the
    relaxed mode.
    """

    def __init__(self, function: Any) -> None:
        self.pointer = int(function.ptr)
        """Driver handle of the function."""
        self._held = [function]
        self._opted_in_bytes = 0
        self._opting_in = Lock()
        finalize(self, _release, self._held, os.getpid()).atexit = False  # CUDA ends with the process

    def opt_in(self, dynamic_smem_bytes: int) -> None:
        """Allow an amount of dynamic shared memory per block.

        By default a kernel may use 48 KiB less its static shared memory (CUDA C++ Programming Guide, shared memory of
        compute capability 7.x and later).
        """
        with self._opting_in:  # threads share the functions of equal cubins
            if dynamic_smem_bytes > self._opted_in_bytes:  # less would take from another launch of the same function
                driver = load_cupy().cuda.driver
                driver.funcSetAttribute(self.pointer, _MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_smem_bytes)
                self._opted_in_bytes = dynamic_smem_bytes

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any], dynamic_smem_bytes: int
    ) -> None:
        """Launch on CuPy's current stream; arguments are CuPy arrays or NumPy scalars of the exact types."""
        self._held[0](grid, block, arguments, dynamic_smem_bytes)

    def blocks_per_sm(self, threads: int, dynamic_smem_bytes: int) -> int:
        """Return the occupancy that the driver computes, in blocks per SM."""
        driver = load_cupy().cuda.driver
        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self.pointer, threads, dynamic_smem_bytes))


def _release(held: list[object], process: int) -> None:
    """Release a function, and with the last one of a module the module."""
    if os.getpid() != process:  # in a forked child
        _inherited.append(held)
        return
    with outside_of_captures():
        held.clear()


@dataclass(frozen=True, slots=True)
class PackedCubin:
    """A cubin inside another file: its resources, a function that reads its bytes, and the symbols of its entries.

    ``name`` is that of the content, which is the same for equal cubins only.
    """

    name: str
    resources: Resources
    read: Callable[[], bytes]
    symbols: Mapping[str, str]


class Module:
    """A cubin, from a file or from memory, loaded into the current context; unloaded when it is garbage-collected."""

    def __init__(self, image: Path | bytes) -> None:
        self._module = load_cupy().cuda.function.Module()
        if isinstance(image, bytes):
            self._module.load(image)
        else:
            self._module.load_file(str(image))
        self.pointer = int(self._module.ptr)
        """Driver handle of the module."""

    def function(self, name: str) -> Function:
        """Return a function by its symbol: the mangled name, or that of an ``extern "C"`` function."""
        return Function(self._module.get_function(name))


WORD_BYTES = 8
_ALIGNMENT_BYTES = 64
"""Alignment of the most strictly aligned parameter, a tensor map (CUDA driver API, ``CUtensorMap``)."""


class ParameterBlock:
    """Parameters of a kernel in the layout of cuLaunchKernel: an array of the addresses of their values.

    The driver copies the values when it is called, so that a block can be reused by later launches. It must not be
    written while another thread launches from it. Values are NumPy scalars, or arrays whose bytes are passed by value.

    ``address`` is that of the array of addresses. ``words`` are the values as 64-bit words, which may be changed
    between launches; the last ``spare_words`` are of no parameter. ``starts`` are the first words of the parameters.
    """

    __slots__ = ("_memory", "address", "pointers", "starts", "words")

    def __init__(self, values: Sequence[Any], spare_words: int = 0) -> None:
        parts = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        offsets, end = [], 0
        for part in parts:
            offsets.append(round_up(end, _ALIGNMENT_BYTES if part.size > WORD_BYTES else WORD_BYTES))
            end = offsets[-1] + part.size
        end = round_up(end, WORD_BYTES) + spare_words * WORD_BYTES
        memory = np.zeros(end + _ALIGNMENT_BYTES, np.uint8)
        start = -int(memory.ctypes.data) % _ALIGNMENT_BYTES
        for part, offset in zip(parts, offsets, strict=True):
            memory[start + offset : start + offset + part.size] = part
        base = int(memory.ctypes.data) + start
        self._memory = memory
        self.pointers = np.array([base + offset for offset in offsets], np.uint64)
        self.address = int(self.pointers.ctypes.data)
        self.starts = tuple(offset // WORD_BYTES for offset in offsets)
        self.words = memory.data[start : start + end].cast("Q")


DriverLaunch = Callable[[int, int, int], None]
"""Launches on a stream, with the parameters at an address, or those in the buffer that the last argument describes."""


def driver_launch(function_pointer: int, geometry: LaunchGeometry) -> DriverLaunch:
    """Return a function that launches, which costs as much as the driver's own call; nothing is checked."""
    launch: Callable[..., None] = load_cupy().cuda.driver.launchKernel
    return partial(launch, function_pointer, *geometry.grid, *geometry.block, geometry.dynamic_smem_bytes)


_MAX_GRAPHS = 256
"""Graphs that a process has at a time; they take 30 MB of GPU memory."""


class LaunchGraph:
    """A CUDA graph of one launch, with the parameters that a block held when the graph was made.

    It may be launched again before the previous launch has ended, but not by two threads at once. It may be deleted at
    any time, even while a stream is being captured, when CUDA allows destroying a graph only in the relaxed mode.
    ``executable`` is the handle for ``cudaGraphLaunch``; ``keep_alive`` holds the module of the kernel, and memory.
    """

    __slots__ = ("__weakref__", "executable")

    def __init__(self, graph: Any, keep_alive: object) -> None:
        self.executable = int(graph.graphExec)
        finalize(self, _destroy, [keep_alive, graph], os.getpid()).atexit = False  # CUDA ends with the process


def _destroy(held: list[object], process: int) -> None:
    """Destroy a graph, the last of the objects held, then release the others."""
    if os.getpid() != process:  # in a forked child
        _inherited.append(held)
        return
    with outside_of_captures():
        held.pop()
    _free_places.put(None)


_free_places: SimpleQueue[None] = SimpleQueue()  # reentrant, as a finalizer may run within any call
for _ in range(_MAX_GRAPHS):
    _free_places.put(None)
_inherited: list[object] = []  # functions and graphs of the parent process, which a forked child must not destroy


def make_launch_graph(queue: Callable[[int], None], stream: int, keep_alive: object) -> LaunchGraph | None:
    """Make a graph of one call on the current device; return None if there are too many graphs or CUDA fails.

    ``queue`` is a function of a stream that queues the launches of the call, and synchronizes nothing. The nodes get
    the priority of ``stream``, on which the graph will be launched.
    """
    try:
        _free_places.get_nowait()
    except Empty:
        return None
    cuda = load_cupy().cuda
    made = None
    try:
        with outside_of_captures():
            made = LaunchGraph(_captured(queue, stream), keep_alive)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, ToolchainError):
        pass  # out of memory, for example; launches without a graph still work
    finally:
        if made is None:
            _free_places.put(None)
    return made


def _captured(queue: Callable[[int], None], stream: int) -> Any:
    """Capture a call on a stream of its own, which ends with this function, where captures allow it."""
    cuda = load_cupy().cuda
    priority = cuda.runtime.streamGetPriority(stream) if stream else 0
    side_stream = cuda.Stream(non_blocking=True, priority=priority)
    side_stream.begin_capture()
    try:
        queue(side_stream.ptr)
    finally:
        graph = side_stream.end_capture()
    return graph


_KERNEL_NODE = struct.Struct("P7I4x4P")
"""``CUDA_KERNEL_NODE_PARAMS``, cuda.h: function, grid, block, dynamic shared memory, addresses of the parameters, or of
the description of a buffer with all of them, kernel and context."""
_EDGE_BYTES, _PROGRAMMATIC_EDGE = 8, 1
"""Size of ``CUgraphEdgeData``, cuda.h, and the value of its third byte where two launches may overlap."""
_BUFFER, _BUFFER_BYTES = 1, 2
"""``CU_LAUNCH_PARAM_BUFFER_POINTER`` and ``CU_LAUNCH_PARAM_BUFFER_SIZE``, cuda.h."""

_CapturedLaunch = tuple[tuple[int, LaunchGeometry, bool, Cluster | None, bool], list[bytes], bool]
"""A launch in a graph: function, geometry, whether it is cooperative, its cluster, and whether it overlaps with the one
before; the bytes of its parameters, and whether these are one buffer."""


def _check(status: int) -> None:
    if status:
        raise ToolchainError(f"the launches of a graph cannot be read: {result_name(status)}")


def _captured_launches(queue: Callable[[int], None]) -> list[_CapturedLaunch]:
    """Return the launches of a call, in order, without executing it."""
    driver, count = load_driver(), ctypes.c_size_t()
    captured = _captured(queue, 0)  # which holds its nodes
    graph = ctypes.c_void_p(int(captured.graph))
    _check(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)))
    nodes, sources, targets = ((ctypes.c_void_p * count.value)() for _ in range(3))
    edges = ctypes.create_string_buffer(_EDGE_BYTES * count.value)
    _check(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
    _check(driver.cuGraphGetEdges_v2(graph, sources, targets, edges, ctypes.byref(count)))
    kinds = {(sources[at], targets[at]): edges.raw[_EDGE_BYTES * at + 2] for at in range(count.value)}
    if count.value != len(nodes) - 1 or not kinds.keys() >= set(pairwise(nodes)):
        raise ToolchainError("the launches of a call are not in one order")
    overlaps = [False, *(kinds[pair] == _PROGRAMMATIC_EDGE for pair in pairwise(nodes))]
    return [_read_launch(ctypes.c_void_p(node), own) for node, own in zip(nodes, overlaps, strict=True)]


def _read_launch(node: ctypes.c_void_p, overlaps: bool) -> _CapturedLaunch:
    """Return the launch of a node of a graph, which must be one."""
    driver, described = load_driver(), ctypes.create_string_buffer(_KERNEL_NODE.size)
    _check(driver.cuGraphKernelNodeGetParams_v2(node, described))
    function, *extents, smem_bytes, parameters, extra, _, _ = _KERNEL_NODE.unpack(described.raw)
    value, attributes = ctypes.create_string_buffer(64), []
    for attribute in (COOPERATIVE, CLUSTER_DIMENSION):
        _check(driver.cuGraphKernelNodeGetAttribute(node, attribute, value))
        attributes.append(struct.unpack_from("3I", value.raw))
    (is_cooperative, *_), cluster = attributes
    start, size = ctypes.c_size_t(), ctypes.c_size_t()
    values: list[bytes] = []
    if extra:
        at = (ctypes.c_uint64 * 4).from_address(extra)
        buffer = {at[0]: at[1], at[2]: at[3]}
        size = ctypes.c_size_t.from_address(buffer[_BUFFER_BYTES])
        values.append(ctypes.string_at(buffer[_BUFFER], size.value))
    elif parameters:
        own = ctypes.c_void_p(function)
        while driver.cuFuncGetParamInfo(own, len(values), ctypes.byref(start), ctypes.byref(size)) == 0:
            address = ctypes.c_uint64.from_address(parameters + WORD_BYTES * len(values))
            values.append(ctypes.string_at(address.value, size.value))
    geometry = LaunchGeometry(tuple(extents[:3]), tuple(extents[3:]), smem_bytes)
    how = function, geometry, bool(is_cooperative), cluster if cluster[0] else None, overlaps
    return how, values, bool(extra)


class RelocatableCall:
    """The launches of a library's call, to be repeated on other arrays without the library's work on the host.

    The call is captured twice, for ``count`` arrays at made-up addresses of an alignment: nothing is executed. A word
    of the parameters that differs as the address of one array does is that address, or one within the array. Raise
    `ToolchainError` if the call does other things than launching, if parameters differ otherwise or an array is in
    none, if CUDA fails, or if the driver is older than CUDA 12.4. ``queue`` is a function of a stream and of the
    ``addresses``, which holds what the launches need; ``lock`` is held while they are queued.
    """

    __slots__ = ("_launches", "_lock", "_queue")

    def __init__(self, queue: Callable[..., None], count: int, alignment_bytes: int, lock: Lock) -> None:
        self._queue, self._lock = queue, lock
        places = [((array + 1) << 40) + alignment_bytes for array in range(count)]
        # Both halves of each address differ, and its place in a page, which has the alignment and no more: a parameter
        # that holds a part, or what is left of a division, is found, and refused.
        steps = [((array + 1) << 34) + (2 * array + 1) * 2 * alignment_bytes for array in range(count)]
        moved = [place + step for place, step in zip(places, steps, strict=True)]
        cuda = load_cupy().cuda
        failures = AttributeError, KeyError, ValueError, cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError
        try:
            with outside_of_captures():
                first, second = (_captured_launches(partial(queue, addresses=tuple(at))) for at in (places, moved))
            self._launches = [_relocatable(*pair, places, steps) for pair in zip(first, second, strict=True)]
            found = {array for _, _, words, *_ in self._launches for (array, _), _ in words}
            if found != set(range(count)):
                raise ValueError("an array is in no parameter")
        except failures as error:
            raise ToolchainError(f"the launches of a call cannot be moved to other arrays: {error}") from None

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on arrays at these addresses, which have at least the alignment."""
        with self._lock:
            for launch, block, words, parameters, extra in self._launches:
                values = block.words
                for (array, offset), places in words:
                    address = addresses[array] + offset
                    for word in places:
                        values[word] = address
                launch(stream, parameters, extra)


def _relocatable(
    first: _CapturedLaunch, second: _CapturedLaunch, places: list[int], steps: list[int]
) -> tuple[DriverLaunch, ParameterBlock, list[tuple[tuple[int, int], list[int]]], int, int]:
    """Return the launch, the parameters, and which words of these hold the address of an array plus an offset.

    Also the two addresses for the launch. Raise `ValueError` if the launches differ in more than these words.
    """
    (how, values, is_buffer), (other, moved, _) = first, second
    if how != other or list(map(len, values)) != list(map(len, moved)):
        raise ValueError("another kernel is launched")
    extra = np.array([_BUFFER, 0, _BUFFER_BYTES, 0, 0, sum(map(len, values))], np.uint64)  # the last is the size
    block, after = (
        ParameterBlock([*(np.frombuffer(value, np.uint8) for value in given), *([extra] * is_buffer)])
        for given in (values, moved)
    )
    words: dict[tuple[int, int], list[int]] = {}
    for word, (old, new) in enumerate(zip(block.words, after.words, strict=True)):
        if old != new:
            array = steps.index(new - old)
            words.setdefault((array, old - places[array]), []).append(word)
    function, geometry, is_cooperative, cluster, overlaps = how
    if is_cooperative or cluster is not None or overlaps:
        launch: DriverLaunch = attribute_launch(
            function, geometry, is_cooperative=is_cooperative, cluster=cluster, overlaps=overlaps
        )
    else:
        launch = driver_launch(function, geometry)
    if not is_buffer:
        return launch, block, [*words.items()], block.address, 0
    buffer, description = map(int, block.pointers)
    at = block.starts[1]
    block.words[at + 1], block.words[at + 3] = buffer, description + 5 * WORD_BYTES
    return launch, block, [*words.items()], 0, description


class StepFunctions:
    """The functions of a kernel's steps, loaded into the current context from a cubin; they keep its module loaded.

    An entry that is not among ``symbols`` has its own name. ``module`` is the driver's handle. ``others`` are sizes,
    cubin and symbols of each other problem, where sizes are compiled in.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        image: Path | bytes,
        symbols: Mapping[str, str],
        others: Iterable[tuple[Sizes, Path, Mapping[str, str]]] = (),
    ) -> None:
        module = Module(image)
        self.module = module.pointer
        self._entries = [step.entry for step in steps]
        self._functions = {entry: module.function(symbols.get(entry, entry)) for entry in self._entries}
        self._others = tuple((dict(sizes), StepFunctions(steps, path, names)) for sizes, path, names in others)

    def at(self, sizes: Sizes) -> StepFunctions:
        """Return the functions for a problem: those of its own cubin, if it has one."""
        return next((functions for own, functions in self._others if own == dict(sizes)), self)

    def __getitem__(self, step: int) -> Function:
        """Return the function of a step, by its index."""
        return self._functions[self._entries[step]]

    def opt_in(self, plan: LaunchPlan) -> None:
        """Allow the dynamic shared memory of every launch."""
        needed: dict[str, int] = {}
        for step, launch in plan.steps.items():
            entry = self._entries[step]
            needed[entry] = max(needed.get(entry, 0), launch.geometry.dynamic_smem_bytes)
        for entry, smem_bytes in needed.items():
            self._functions[entry].opt_in(smem_bytes)

    def step_launch(self, one: StepLaunch) -> DriverLaunch:
        """Return a function that makes one launch, with its attributes."""
        pointer = self[one.step].pointer
        cluster = None if one.cluster is None or declares_cluster(pointer) else one.cluster
        if cluster is None and not one.is_cooperative:
            return driver_launch(pointer, one.geometry)
        return attribute_launch(pointer, one.geometry, is_cooperative=one.is_cooperative, cluster=cluster)

    def driver_launch(self, plan: LaunchPlan) -> DriverLaunch:
        """Return a function that launches a plan from one parameter block, which holds the parameters of all launches.

        A single launch costs as much as the driver's own call; nothing is checked.
        """
        launches = [self.step_launch(one) for one in plan.launches]
        if len(launches) == 1:
            return launches[0]
        starts = accumulate((WORD_BYTES * len(one.arguments) for one in plan.launches), initial=0)
        pairs = list(zip(launches, starts, strict=False))

        def launch_all(stream: int, address: int, extra: int) -> None:
            for launch, start in pairs:
                launch(stream, address + start, extra)

        return launch_all


def _launch_with(functions: StepFunctions, one: StepLaunch, values: Sequence[Any]) -> Callable[[], None]:
    if one.cluster is None and not one.is_cooperative:
        geometry = one.geometry
        launch = functions[one.step].launch
        return partial(launch, geometry.grid, geometry.block, values, geometry.dynamic_smem_bytes)
    block, launch_on, cuda = ParameterBlock(values), functions.step_launch(one), load_cupy().cuda
    return lambda: launch_on(cuda.get_current_stream().ptr, block.address, 0)


class LaunchSequence:
    """Launches on CuPy's current stream, in order; ``count`` is their number.

    Arguments are CuPy arrays or NumPy scalars of the exact types.
    """

    def __init__(self, functions: StepFunctions, plan: LaunchPlan, arguments: Sequence[Sequence[Any]]) -> None:
        functions.opt_in(plan)
        self.count = len(plan.launches)
        self._plan = plan
        self._functions = functions  # whose modules stay loaded: launches through the driver hold addresses only
        self._launches = [
            _launch_with(functions, one, values) for one, values in zip(plan.launches, arguments, strict=True)
        ]

    def __call__(self) -> None:
        """Queue the launches."""
        for launch in self._launches:
            launch()

    def by_step(self) -> dict[int, list[Callable[[], None]]]:
        """Return the launches of each step that is launched, by its index."""
        grouped: dict[int, list[Callable[[], None]]] = {}
        for one, launch in zip(self._plan.launches, self._launches, strict=True):
            grouped.setdefault(one.step, []).append(launch)
        return grouped
