"""Launches without a GPU: graphs of one launch, kernels of several steps, parameters, inputs, numbers of the driver."""

import ctypes
import gc
import struct
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from cuda.bindings import driver
from feature_kernels import STEPS, copy_kernel

from autotile.core.device import device_profile
from autotile.core.dtypes import DTYPES
from autotile.core.model import Problem
from autotile.cuda import function as function_module
from autotile.cuda import packing
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.cuda.driver import _RELAXED
from autotile.cuda.function import LaunchSequence, ParameterBlock, RelocatableCall, StepFunctions, make_launch_graph
from autotile.cuda.packing import DATA_TYPES, PROMOTIONS, SWIZZLES, pack_launches
from autotile.errors import ArgumentError, ToolchainError
from autotile.kernel.arguments import BufferArgument, ElementType, ScalarArgument, decode_scalar, encode_scalar
from autotile.kernel.expressions import parse_expression
from autotile.kernel.inputs import make_input
from autotile.kernel.launch import LaunchData, LaunchPlan
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving.choice import KernelCode
from autotile.serving.launching import CallArguments
from autotile.space.limits import compiled_steps

H200 = device_profile("h200")


@pytest.fixture(params=STEPS)
def kernel(request, tmp_path):
    return load_kernel(str(copy_kernel(tmp_path, request.param)))


@pytest.fixture
def scan(tmp_path):
    return load_kernel(str(copy_kernel(tmp_path, "scan_rounds")))


def packed(kernel: Kernel, **sizes: int) -> tuple[LaunchPlan, tuple[tuple[Any, ...], ...]]:
    spec, problem = kernel.spec, Problem(kernel.name, {**kernel.spec.sizes, **sizes}, "float32")
    plan, scalars, data = KernelCode(kernel, problem, H200, spec.default).plan
    addresses = {buffer.name: 1000 + number for number, buffer in enumerate(spec.buffers)}
    addresses |= {workspace.name: 2000 + number for number, workspace in enumerate(data.workspaces)}
    return plan, pack_launches(spec, plan, data, "float32", addresses=addresses, scalars=scalars)


def call_arguments(kernel: Kernel, config: Any, dtype: str) -> CallArguments:
    return CallArguments(KernelCode(kernel, Problem(kernel.name, kernel.spec.sizes, dtype), H200, config), 0)


class TestSteps:
    def test_one_cubin_holds_every_step_and_a_fault_names_its_own(self, kernel):
        spec = kernel.spec
        compiled = compile_cubin(compile_job(kernel, spec.default, kernel.spec.at(), "sm_90"))
        assert tuple(compiled.functions) == spec.entries
        functions = dict(compiled.functions)
        plan = LaunchPlan.of(spec, spec.default, spec.at(), H200)
        steps = compiled_steps(spec, plan, functions, H200)
        assert ([step.fault for step in steps], steps[0].geometry) == ([""] * len(plan.steps), plan.main.geometry)
        assert {step.entry for step in steps} == {spec.steps[launch.step].entry for launch in plan.launches}
        last = spec.steps[plan.launches[-1].step].entry
        large = msgspec.structs.replace(functions[last].resources, static_smem_bytes=10**6)
        for fault, changed in (
            ("no block fits on an SM", {"resources": large}),
            ("a block of", {"max_threads": 0}),
            ("a grid of", {"cluster": (1, 1, 7)}),
        ):
            changed_functions = functions | {last: replace(functions[last], **changed)}
            faults = {step.entry: step.fault for step in compiled_steps(spec, plan, changed_functions, H200)}
            assert faults[last].startswith((f"{last}: " if len(spec.steps) > 1 else "") + fault)

    def test_every_launch_has_its_own_values(self, scan):
        _, launches = packed(scan, N=300)
        x, y, a, b = 1000, 1001, 2000, 2001
        assert (len(launches), [int(value) for value in launches[0]]) == (11, [x, a, 300])
        assert [[int(value) for value in launch] for launch in launches[1:4]] == [
            [a, b, 1, 300],
            [b, a, 2, 300],
            [a, b, 4, 300],
        ]
        assert [int(value) for value in launches[10]] == [b, y, 300]  # nine sweeps end in b
        assert launches[1][2].dtype == np.int32

    def test_one_block_of_parameters_serves_all_launches(self, scan, monkeypatch):
        launched: list[tuple[str, int, int]] = []

        def driver_launch(pointer: str, geometry: Any) -> Any:
            return lambda stream, address, _: launched.append((pointer, stream, address))

        monkeypatch.setattr(function_module, "driver_launch", driver_launch)
        monkeypatch.setattr(
            function_module,
            "Module",
            lambda _: SimpleNamespace(pointer=1, function=lambda name: SimpleNamespace(pointer=name)),
        )
        plan, launches = packed(scan, N=300)
        functions = StepFunctions(scan.spec.steps, b"", {"sweep": "_Z5sweep"})
        functions.driver_launch(plan)(7, 4096, 0)
        assert [name for name, _, _ in launched] == ["copy", *["_Z5sweep"] * 9, "copy"]
        assert [(address - 4096) // 8 for _, _, address in launched] == [0, *range(3, 39, 4), 39]
        block = ParameterBlock([value for launch in launches for value in launch], spare_words=2)
        assert len(block.starts) == 42

    def test_new_addresses_reach_every_launch(self, tmp_path):
        kernel = load_kernel(str(copy_kernel(tmp_path, "split_rows")))
        arguments = call_arguments(kernel, {**kernel.spec.default, "SPLIT": 4}, "float32")
        values = arguments.pack({"x": 100, "y": 200}, {}, {"partials": 300})
        assert [int(value) for value in values] == [100, 200, 300, 1000, 512, 200, 300, 1000]
        block = ParameterBlock(values, spare_words=2)
        words, _, copies = arguments.layout(block.starts, len(block.words))
        assert words == (block.starts[0], block.starts[1])
        assert copies == ((block.starts[1], block.starts[5]),)

    def test_a_map_of_a_workspace_stays_as_it_is(self, monkeypatch):
        """New addresses of arrays do not reach it: it belongs to the stream, as its workspace does."""
        kernel = load_kernel("gemm_wgmma_padded")
        spec, arguments = kernel.spec, call_arguments(kernel, kernel.spec.default, "float16")
        monkeypatch.setattr(packing, "encode_tensor_map", lambda _, pointer: np.full(16, pointer, np.uint64))
        named = LaunchData.of(spec, spec.default, spec.at(dtype="float16"), H200).workspaces
        workspaces = {workspace.name: 256 * index for index, workspace in enumerate(named, 1)}
        values = arguments.pack({"A": 2, "B": 4, "C": 6}, {}, workspaces)
        block = ParameterBlock(values, spare_words=3)
        words, maps, _ = arguments.layout(block.starts, len(block.words))
        assert [block.words[word] for word in words] == [2, 4, 6]
        assert [tensor_map.name for _, _, tensor_map in maps] == ["C_map"]
        assert [int(value[0]) for value in values if np.ndim(value)] == [256, 512, 6]

    def test_functions_get_shared_memory_and_stay_loaded(self, monkeypatch, scan):
        opted: list[tuple[str, int]] = []
        launched: list[tuple[Any, ...]] = []

        def function(name: str) -> Any:
            return SimpleNamespace(
                opt_in=lambda smem_bytes: opted.append((name, smem_bytes)),
                launch=lambda *given: launched.append((name, *given)),
            )

        module = SimpleNamespace(function=function, pointer=1)
        monkeypatch.setattr(function_module, "Module", lambda _: module)
        plan, launches = packed(scan, N=300)
        functions = StepFunctions(scan.spec.steps, b"", {})
        loaded = weakref.ref(functions)
        calls = LaunchSequence(functions, plan, launches)
        del functions
        gc.collect()
        assert loaded().module == module.pointer
        calls()
        assert opted == [("copy", 0), ("sweep", 0)]
        assert (calls.count, [len(part) for part in calls.by_step().values()]) == (11, [1, 9, 1])
        geometries = [one.geometry for one in plan.launches]
        names = ["copy", *["sweep"] * 9, "copy"]
        assert [given[:3] for given in launched] == [
            (name, one.grid, one.block) for name, one in zip(names, geometries, strict=True)
        ]
        assert [given[3] for given in launched] == list(launches)
        assert loaded() is not None
        del calls
        gc.collect()
        assert loaded() is None  # and no longer than the launches


PLACES = 4


class RefusedError(RuntimeError):
    """Error of CUDA."""


class Cuda:
    """The part of CuPy that makes graphs; it records when graphs and streams are destroyed."""

    def __init__(self) -> None:
        self.cuda = self.runtime = self.driver = self
        self.CUDADriverError = self.CUDARuntimeError = RefusedError
        self.refused = ""
        self.relaxed = False
        self.destroyed: list[tuple[str, bool]] = []
        self.priorities: list[int] = []

    def do(self, step: str) -> None:
        if self.refused == step:
            raise RefusedError(step)

    def streamGetPriority(self, stream: int) -> int:  # noqa: N802 - CuPy's name
        return -stream

    def Stream(self, *, non_blocking: bool, priority: int) -> Any:  # noqa: N802 - CuPy's name
        assert non_blocking
        self.do("stream")
        self.priorities.append(priority)
        return Stream(self)

    @contextmanager
    def outside_of_captures(self) -> Iterator[None]:
        before, self.relaxed = self.relaxed, True
        yield
        self.relaxed = before

    def launch(self, stream: int) -> None:
        assert stream == 77
        self.do("launch")


class Handle:
    """An object that is destroyed with the last reference to it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __del__(self) -> None:
        self._cuda.destroyed.append((type(self).__name__, self._cuda.relaxed))


class Graph(Handle):
    graphExec = 5  # noqa: N815 - CuPy's name
    graph = 6


class Module(Handle):
    pass


class Stream(Handle):
    ptr = 77

    def begin_capture(self) -> None:
        self._cuda.do("begin")

    def end_capture(self) -> Graph:
        self._cuda.do("end")
        return Graph(self._cuda)


@pytest.fixture
def cuda(monkeypatch):
    cuda, places = Cuda(), SimpleQueue[None]()
    for _ in range(PLACES):
        places.put(None)
    monkeypatch.setattr(function_module, "load_cupy", lambda: cuda)
    monkeypatch.setattr(function_module, "outside_of_captures", cuda.outside_of_captures)
    monkeypatch.setattr(function_module, "_free_places", places)
    return cuda


def make(cuda: Cuda) -> Any:
    return make_launch_graph(cuda.launch, 0, None)


def function_of(monkeypatch: pytest.MonkeyPatch, allow: Callable[[int], None]) -> function_module.Function:
    """Return a function that asks for shared memory of a size by calling ``allow``."""
    driver = SimpleNamespace(funcSetAttribute=lambda _function, _attribute, smem_bytes: allow(smem_bytes))
    monkeypatch.setattr(function_module, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(function_module, "_release", lambda *_: None)
    return function_module.Function(SimpleNamespace(ptr=1))


def test_shared_memory_that_was_refused_is_asked_for_again(monkeypatch):
    asked: list[int] = []

    def refuse(smem_bytes: int) -> None:
        asked.append(smem_bytes)
        raise MemoryError

    function = function_of(monkeypatch, refuse)
    for _ in range(2):
        with pytest.raises(MemoryError):
            function.opt_in(1 << 20)
    assert asked == [1 << 20, 1 << 20]


def test_of_the_amounts_of_two_threads_the_larger_one_stays(monkeypatch):
    entered, resumed, lock = Event(), Event(), Lock()
    allowed: list[int] = []

    def allow(smem_bytes: int) -> None:
        if smem_bytes == 50_000:
            entered.set()
            assert resumed.wait(60)
        allowed.append(smem_bytes)

    @contextmanager
    def locked() -> Iterator[None]:
        """Let the one that holds the lock go on as soon as another waits for it."""
        if not lock.acquire(blocking=False):
            resumed.set()
            lock.acquire()
        yield
        lock.release()

    function = function_of(monkeypatch, allow)
    monkeypatch.setattr(type(function), "_opting_in", property(lambda _: locked()), raising=False)
    with ThreadPoolExecutor(1) as pool:
        smaller = pool.submit(function.opt_in, 50_000)
        entered.wait()
        function.opt_in(60_000)
        resumed.set()
        smaller.result()
    assert allowed == [50_000, 60_000]


class TestGraphs:
    @pytest.mark.parametrize("step", ["stream", "begin", "launch", "end"])
    def test_where_cuda_refuses_there_is_no_graph_and_no_place_is_lost(self, cuda, step, monkeypatch):
        cuda.refused = step
        assert [make(cuda) for _ in range(2 * PLACES)] == [None] * 2 * PLACES
        cuda.refused = ""
        made = [make(cuda) for _ in range(PLACES)]
        assert None not in made
        made.clear()
        monkeypatch.setattr(cuda, "launch", lambda *_: 1 / 0)  # an error that is not CUDA's is told
        for _ in range(2 * PLACES):
            with pytest.raises(ZeroDivisionError):
                make(cuda)

    def test_it_has_the_streams_priority_and_what_its_launch_needs_until_it_ends_where_captures_allow_it(self, cuda):
        assert make(cuda).executable == 5
        cuda.destroyed.clear()
        made = make_launch_graph(cuda.launch, 3, Module(cuda))
        assert cuda.priorities == [0, -3]
        gc.collect()
        assert cuda.destroyed == [("Stream", True)]
        del made
        assert cuda.destroyed == [("Stream", True), ("Graph", True), ("Module", False)]
        assert not cuda.relaxed

    def test_there_are_so_many_at_most_and_what_goes_makes_room(self, cuda):
        with ThreadPoolExecutor(8) as pool:
            made = [graph for graph in pool.map(lambda _: make(cuda), range(50)) if graph is not None]
        assert len(made) == PLACES
        assert make(cuda) is None
        made.pop()
        assert make(cuda) is not None

    def test_a_forked_child_leaves_its_parents_graphs_alone(self, cuda, monkeypatch):
        made = make(cuda)
        kept: list[Any] = []
        monkeypatch.setattr(function_module, "_inherited", kept)
        monkeypatch.setattr(function_module, "os", SimpleNamespace(getpid=lambda: -1))
        del made
        gc.collect()
        assert (len(kept), cuda.destroyed) == (1, [("Stream", True)])


class Driver:
    """The part of the driver that reads graphs, of launches that a function returns for the addresses of a call.

    A launch is its function, bytes of the parameters, whether these are one buffer, and its attributes.
    """

    def __init__(self, launches: Callable[..., list[tuple[int, list[bytes], bool, dict[int, int]]]]) -> None:
        self.launches = launches
        self.edges = [(2, 1, 1)]
        """Pairs of nodes, with the kind of each edge; here in another order than that of the nodes."""
        self.held: list[Any] = []

    def queue(self, stream: int, addresses: tuple[int, ...]) -> None:
        assert stream == 77
        self.graph = self.launches(*addresses)

    def cuGraphGetNodes(self, _: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.graph)
        for at in range(len(self.graph) if nodes else 0):
            nodes[at] = len(self.graph) - at
        return 0

    def cuGraphGetEdges_v2(self, _: Any, sources: Any, targets: Any, kinds: Any, count: Any) -> int:  # noqa: N802
        edges = self.edges[: len(self.graph) - 1]
        for at, (source, target, kind) in enumerate(edges):
            sources[at], targets[at], kinds[8 * at + 2] = source, target, kind
        count._obj.value = len(edges)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, described: Any) -> int:  # noqa: N802
        function, values, is_buffer, _ = self.graph[-node.value]
        memory = [ctypes.create_string_buffer(value, len(value)) for value in values]
        size = ctypes.c_size_t(sum(map(len, values)))
        addresses = [ctypes.addressof(one) for one in memory]
        given = [2, ctypes.addressof(size), 1, *addresses, 0] if is_buffer else addresses
        words = (ctypes.c_uint64 * len(given))(*given)
        self.held += [memory, size, words]
        where = (0, ctypes.addressof(words)) if is_buffer else (ctypes.addressof(words), 0)
        described.raw = struct.pack("P7I4x4P", function, 2, 3, 4, 128, 1, 1, 1024, *where, 0, 0)
        return function == 0

    def cuGraphKernelNodeGetAttribute(self, node: Any, attribute: int, value: Any) -> int:  # noqa: N802
        extent = self.graph[-node.value][3].get(attribute, 0)
        value.raw = struct.pack("3I52x", extent, *[min(extent, 1)] * 2)
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: int, _: Any, size: Any) -> int:  # noqa: N802
        values = next(one for own, one, *_ in self.graph if own == function.value)
        if index < len(values):
            size._obj.value = len(values[index])
        return index >= len(values)


def words_of(*values: int) -> bytes:
    return struct.pack(f"{len(values)}Q", *values)


class TestRelocatableCall:
    @pytest.fixture
    def made(self, cuda, monkeypatch):
        """Make a call of launches, and return it with what it launches."""
        launched, lock = list[Any](), Lock()

        def launch_of(function: int, geometry: Any, **attributes: Any) -> Callable[..., None]:
            def launch(stream: int, parameters: int, extra: int) -> None:
                assert lock.locked()
                if extra:
                    kind, buffer, other, size = (ctypes.c_uint64 * 4).from_address(extra)
                    assert (kind, other, parameters) == (1, 2, 0)
                    values = [ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)]
                else:
                    addresses = (ctypes.c_uint64 * 2).from_address(parameters)
                    values = [ctypes.string_at(at, size) for at, size in zip(addresses, (8, 12), strict=True)]
                launched.append((stream, function, geometry.grid, geometry.dynamic_smem_bytes, attributes, values))

            return launch

        def make(launches: Any, count: int = 3) -> tuple[RelocatableCall, list[Any]]:
            driver = Driver(launches)
            monkeypatch.setattr(function_module, "load_driver", lambda: driver)
            return RelocatableCall(driver.queue, count, 16, lock), launched

        monkeypatch.setattr(function_module, "result_name", str)
        for name in ("driver_launch", "attribute_launch"):
            monkeypatch.setattr(function_module, name, launch_of)
        return make

    def test_it_launches_on_any_arrays(self, made, cuda):
        def launches(a: int, b: int, c: int) -> list[Any]:
            assert all(one % 32 == 16 for one in (a, b, c))
            described = words_of(7, b, c + 24, a - 8, c)
            return [(5, [described], True, {4: 2}), (6, [words_of(c), words_of(b)[:8] + b"\1\2\3\4"], False, {})]

        call, launched = made(launches)
        assert [one for one in cuda.destroyed if one[0] == "Graph"] == [("Graph", True)] * 2
        call.launch(9, (100, 200, 300))
        first, second = launched
        attributes = {"is_cooperative": False, "cluster": (2, 1, 1), "overlaps": False}
        assert first == (9, 5, (2, 3, 4), 1024, attributes, [words_of(7, 200, 324, 92, 300)])
        attributes |= {"cluster": None, "overlaps": True}
        assert second == (9, 6, (2, 3, 4), 1024, attributes, [words_of(300), words_of(200) + b"\1\2\3\4"])

    @pytest.mark.parametrize(
        "launches",
        [
            lambda a, b: [(5, [words_of(a, b, a >> 32)], True, {})],
            lambda a, b: [(5, [words_of(a, b, a & 0xFFFFFFFF)], True, {})],
            lambda a, b: [(5, [words_of(a, b, b - a)], True, {})],
            lambda a, b: [(5, [words_of(a, b, a % 128)], True, {})],
            lambda a, b: [(5 + (a >> 34) % 2, [words_of(a, b)], True, {})],
            lambda a, b: [(5, [words_of(a, b) + bytes((a >> 34) % 2)], True, {})],
            lambda a, b: [(5, [words_of(a, b)], True, {})] * (1 + (a >> 34) % 2),
            lambda a, b: [(0, [words_of(a, b)], True, {})],  # a node that is no launch
            lambda a, b: [(5, [words_of(a, b)], True, {})] * 3,  # with one edge
            lambda a, b: [(5, [words_of(a, a)], True, {})],  # without the second array
            lambda a, b: [(5, [], False, {})],
            lambda a, b: [],
        ],
    )
    def test_what_depends_on_addresses_otherwise_is_refused(self, launches, made):
        with pytest.raises(ToolchainError):
            made(launches, 2)

    def test_an_older_driver_and_a_failure_of_cuda_are_refused(self, made, cuda, monkeypatch):
        for name in ("cuGraphGetEdges_v2", "begin"):
            monkeypatch.delattr(Driver, name, raising=False)
            cuda.refused = name
            with pytest.raises(ToolchainError, match=name):
                made(lambda a, b, c: [(5, [words_of(a, b, c)], True, {})])


def scalar(dtype: str, value: Any = 1.0, check: float | None = None) -> ScalarArgument:
    return ScalarArgument("alpha", dtype, None, value, check)


def scalar_value(given: ScalarArgument, sizes: dict[str, int], problem_dtype: str, *, check: bool) -> Any:
    return encode_scalar(given, given.given(sizes, check=check), problem_dtype)


class TestScalars:
    @pytest.mark.parametrize(
        ("dtype", "value", "stored"),
        [
            ("float32", 0.1, np.float32(0.1)), ("float32", float("inf"), np.float32("inf")),
            ("float64", 0.1, np.float64(0.1)), ("float16", 65504, np.float16(65504)),
            ("bfloat16", -1.5, np.uint16(0xBFC0)), ("int32", -7, np.int32(-7)), ("int32", 7.0, np.int32(7)),
            ("int64", 2**53 + 1, np.int64(2**53 + 1)), ("uint64", 2**64 - 1, np.uint64(2**64 - 1)),
            ("uint8", True, np.uint8(1)), ("float32", np.float64(2.5), np.float32(2.5)),
        ],
    )  # fmt: skip
    def test_a_value_takes_the_exact_type(self, dtype, value, stored):
        got = encode_scalar(scalar(dtype), value, "float32")
        assert type(got) is type(stored)
        assert got == stored

    @pytest.mark.parametrize(
        ("problem_dtype", "kind"), [("float16", np.float16), ("bfloat16", np.uint16), ("float64", np.float64)]
    )
    def test_a_scalar_of_the_problems_dtype(self, problem_dtype, kind):
        stored = scalar_value(scalar("dtype", 1.5), {}, problem_dtype, check=False)
        assert type(stored) is kind
        assert decode_scalar(scalar("dtype"), stored, problem_dtype) == 1.5

    def test_bound_free_and_check_values_which_are_refused_instead_of_wrapped(self):
        bound = ScalarArgument("alpha", "int32", parse_expression("M * 2", {"M": "number"}), None, None)
        assert scalar_value(bound, {"M": 21}, "float32", check=True) == 42
        free = scalar("float32", 1.0, 0.75)
        assert scalar_value(free, {}, "float32", check=False) == 1.0
        assert scalar_value(free, {}, "float32", check=True) == 0.75
        assert scalar_value(scalar("float32", 0.5), {}, "float32", check=True) == 0.5
        assert scalar_value(scalar("float32", 1.0, 0.0), {}, "float32", check=True) == 0.0
        product = ScalarArgument("alpha", "int32", parse_expression("M * M", {"M": "number"}), None, None)
        with pytest.raises(ArgumentError, match=r"scalar alpha is 4294967296, which does not fit in int32"):
            scalar_value(product, {"M": 65536}, "float32", check=False)

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            ("int32", 0.5), ("int32", float("nan")), ("int32", float("inf")), ("uint8", -1), ("uint8", 256),
            ("float16", 1e6), ("float32", 1e39), ("float32", "1"), ("float32", None), ("float32", [1.0]),
            ("float32", 1j), ("int64", 2**64),
        ],
    )  # fmt: skip
    def test_refusals(self, dtype, value):
        with pytest.raises(ArgumentError, match=f"fit[s]? in {dtype}"):
            encode_scalar(scalar(dtype), value, "float32")


def buffer(init: str, name: str = "x") -> BufferArgument:
    return BufferArgument(name, ElementType("dtype"), (parse_expression("4", {}),), "in", init)


def test_distributions_of_inputs():
    normal = {name: DTYPES[name].decode(make_input(buffer("normal"), (1000,), name)) for name in DTYPES}
    assert [name for name, values in normal.items() if not np.isfinite(values).all() or values.std() < 0.4] == []
    assert not make_input(buffer("zeros"), (8,), "float32").any()
    assert (make_input(buffer("ones"), (8,), "float32") == 1).all()
    np.testing.assert_array_equal(make_input(buffer("arange"), (2, 4), "int32"), np.arange(8).reshape(2, 4))
    uniform = make_input(buffer("uniform"), (1000,), "float64")
    assert 0 <= uniform.min() < 0.1
    assert 0.9 < uniform.max() < 1


@pytest.mark.parametrize(("dtype", "number"), DATA_TYPES.items())
def test_types_of_a_tensor_maps_elements(dtype, number):
    name = driver.CUtensorMapDataType(number).name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_").lower()
    unsigned = dict.fromkeys(("int8", "bool", "float8_e4m3fn", "float8_e5m2"), "uint8") | {"int16": "uint16"}
    assert name == unsigned.get(dtype, dtype)


@pytest.mark.parametrize(
    ("kind", "prefix", "numbers"), [("Swizzle", "SWIZZLE_", SWIZZLES), ("L2promotion", "L2_PROMOTION_L2_", PROMOTIONS)]
)
def test_swizzles_and_promotions(kind, prefix, numbers):
    names = [getattr(driver, f"CUtensorMap{kind}")(number).name for number in numbers.values()]
    none = "CU_TENSOR_MAP_" + prefix.removesuffix("L2_") + "NONE"
    assert names == [f"CU_TENSOR_MAP_{prefix}{size}B" if size else none for size in numbers]


def test_the_mode_in_which_a_capture_forbids_nothing():
    assert driver.CUstreamCaptureMode(_RELAXED).name == "CU_STREAM_CAPTURE_MODE_RELAXED"
