"""Launch a served kernel: check and complete the arrays of a call, then launch at about the cost of the driver call.

Threads must not write the same parameters, and concurrent streams must not share workspaces, so each has its own. A hot
loop passes the same few arrays again and again, or memory that was freed and reused; a launch that comes again is kept
as a CUDA graph. Some kernels need work before each launch: contents of outputs, copies to constant memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import local
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from autotile.core.documents import encode_json
from autotile.core.dtypes import DTYPES
from autotile.core.forks import cached_property
from autotile.cuda.cublas import Gemm, GemmLayout
from autotile.cuda.driver import (
    PER_THREAD_STREAM,
    ConstantCopy,
    constant_copies,
    copy_async,
    copy_constants,
    device_count,
    outside_of_captures,
)
from autotile.cuda.function import (
    WORD_BYTES,
    DriverLaunch,
    LaunchGraph,
    ParameterBlock,
    RelocatableCall,
    StepFunctions,
    make_launch_graph,
)
from autotile.cuda.packing import encode_description, pack_launches
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, InputError, ToolchainError
from autotile.kernel.arguments import ScalarArgument, TensorMap, Texture, Workspace, encode_scalar
from autotile.kernel.inputs import DOCUMENT, document_of, input_maker
from autotile.kernel.problem import resolve_problem
from autotile.kernel.spec import KernelSpec
from autotile.serving.arrays import (
    VECTOR_BYTES,
    ArraySpec,
    CallArrays,
    Pointers,
    Signature,
    accepted_pointers,
    cupy_library,
    library_of,
    on_handle,
    on_stream,
)
from autotile.serving.choice import MAX_CUBINS, Code, KernelCode, LibraryCode, RecentCache
from autotile.settings import read_settings

Value = TypeVar("Value")

_MAX_WORKSPACE_SETS = 32
"""Workspace sets of a kernel; beyond that the least recently used is freed, in the order of its stream."""


class WorkspaceSet(msgspec.Struct, frozen=True, eq=False):
    """The workspaces of a stream. It refers to the stream, so that CUDA does not reuse its handle meanwhile."""

    stream: Any
    arrays: tuple[Any, ...]
    pointers: Mapping[str, int]


@lru_cache
def _without_memory(names: tuple[str, ...]) -> WorkspaceSet:
    return WorkspaceSet(None, (), dict.fromkeys(names, 0))


class StreamWorkspaces:
    """Workspaces of a kernel, allocated at its first launch on each stream and kept."""

    # Most kernels have none: a new size then keeps nothing that the garbage collector would visit.
    __slots__ = ("_captured", "_fixed", "_lock", "_sets", "_workspaces")

    def __init__(self, workspaces: tuple[Workspace, ...]) -> None:
        self._fixed: WorkspaceSet | None = None
        if not any(one.size_bytes for one in workspaces):
            self._fixed = _without_memory(tuple([one.name for one in workspaces]))
            return
        self._workspaces = workspaces
        self._sets: OrderedDict[tuple[int, int], WorkspaceSet] = OrderedDict()
        self._captured: list[WorkspaceSet] = []
        self._lock = threading.Lock()

    def current(self) -> WorkspaceSet:
        """Return the workspaces of CuPy's current stream; the address of an empty one is 0."""
        if self._fixed is not None:
            return self._fixed
        stream = load_cupy().cuda.get_current_stream()
        key = (stream.ptr, threading.get_ident() if stream.ptr == PER_THREAD_STREAM else 0)
        with self._lock:
            kept = self._sets.get(key)
            if kept is None:
                kept = self._sets[key] = self._new(stream)
                if len(self._sets) > _MAX_WORKSPACE_SETS:
                    self._sets.popitem(last=False)
            else:
                self._sets.move_to_end(key)
        return kept

    def _new(self, stream: Any) -> WorkspaceSet:
        """Allocate a set that is ready for the next launch on a stream.

        CuPy's memory pool reuses freed memory on the stream that it was allocated on, hence in order. On a captured
        stream, the fill must not be captured too, as it would then run only when the graph is launched; the set is
        filled on a stream of its own. It is never freed, as the graph may be launched at any later time.
        """
        with outside_of_captures():
            if not stream.is_capturing():
                return self._allocate(stream)
            with load_cupy().cuda.Stream(non_blocking=True) as side_stream:
                made = self._allocate(stream)
                side_stream.synchronize()
        self._captured.append(made)
        return made

    def _allocate(self, stream: Any) -> WorkspaceSet:
        cupy = load_cupy()
        arrays = {
            w.name: (cupy.zeros if w.zeroed else cupy.empty)(
                DTYPES[w.dtype].array_shape(w.shape), DTYPES[w.dtype].storage
            )
            for w in self._workspaces
            if w.size_bytes
        }
        pointers = {w.name: arrays[w.name].data.ptr if w.size_bytes else 0 for w in self._workspaces}
        return WorkspaceSet(stream, tuple(arrays.values()), pointers)


_MAX_STREAMS = 64
"""Streams whose state is kept in a thread; beyond that all states of the thread are made anew."""
_MAX_GRAPHS = 32
"""Graphs of a stream state: the layers of a model, each with its own weights."""
_MAX_SEEN = 128
_PATIENCE = 2048
"""Launches without a graph after which the kept graphs are dropped, or a refused graph is tried again; the cost of
making graphs then stays negligible even if every launch is on new arrays."""
_WORTHWHILE_CALLS = 128
"""Calls of a library after which its launches are captured: that takes 600 us, and then saves 5 us of each call."""


class LaunchGraphs(dict[tuple[Any, ...], LaunchGraph]):
    """Graphs of the calls on one stream that came again, by the signatures or the addresses of their arrays."""

    __slots__ = ("_misses", "_refused", "_seen")

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        """Hashes of signatures."""
        self._misses = 0
        """Calls without a graph since the last attempt to make one."""
        self._refused = False
        """Whether that attempt failed."""

    def add_call(
        self, signature: tuple[Any, ...], queue: Callable[[int], None], stream: int, keep_alive: object
    ) -> None:
        """Make a graph of the last call if its signature came before; the stream must not be capturing.

        The signature may also be the addresses of the arrays; for the others see `make_launch_graph`.
        """
        self._misses += 1
        seen = hash(signature)
        if seen not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(seen)
            return
        is_full = len(self) >= _MAX_GRAPHS
        if (is_full or self._refused) and self._misses < _PATIENCE:
            return
        if is_full:
            self.clear()
        self._misses = 0
        graph = make_launch_graph(queue, stream, keep_alive)
        self._refused = graph is None
        if graph is not None:
            self[signature] = graph


class StreamState(msgspec.Struct, eq=False):
    """Launch parameters of one thread on one stream, and graphs of launches that came again.

    ``_keep_alive`` holds what the launches need: the kernel's module, memory that the parameters point to.
    """

    _launch: DriverLaunch
    block: ParameterBlock
    _keep_alive: object
    words: tuple[int, ...] = ()
    """Words of the array addresses in the block; none where it has them already."""
    maps: Sequence[tuple[int, int, TensorMap | Texture]] = ()
    """Tensor maps and textures, each after the word of its buffer's address, and its own first word."""
    copies: Sequence[tuple[int, int]] = ()
    """Pairs of words, of which the second takes the value of the first: the pointers in structs."""
    graphs: LaunchGraphs = msgspec.field(default_factory=LaunchGraphs)
    _mapped: dict[int, int] = msgspec.field(default_factory=dict)
    """Buffer address of each encoded tensor map, by the map's first word."""

    def launch(self, stream: int, pointers: Pointers, signature: tuple[Any, ...] | None = None) -> None:
        """Launch on arrays at the given addresses; make a graph of the launch if its signature came before.

        The stream must not be capturing then.
        """
        words = self.block.words
        for word, pointer in zip(self.words, pointers, strict=True):
            words[word] = pointer
        for pointer_word, word, tensor_map in self.maps:
            pointer = words[pointer_word]
            if self._mapped.get(word) != pointer:  # the buffer has moved
                encoded = encode_description(tensor_map, pointer)
                words[word : word + encoded.size] = encoded.view("u1").data.cast("Q")
                self._mapped[word] = pointer
        for source, target in self.copies:
            words[target] = words[source]
        launch, address = self._launch, self.block.address
        launch(stream, address, 0)
        if signature is not None:
            self.graphs.add_call(signature, lambda other: launch(other, address, 0), stream, self._keep_alive)


class ByStream(local, Generic[Value]):
    """A value of the calling thread for each stream, by the stream's handle; it is dropped with the thread."""

    def __init__(self) -> None:
        self.by_stream: dict[int, Value] = {}

    def keep(self, stream: int, value: Value) -> None:
        """Keep what a stream has."""
        if len(self.by_stream) >= _MAX_STREAMS:
            self.by_stream.clear()
        self.by_stream[stream] = value


_Loaded = tuple[StepFunctions, tuple[ConstantCopy, ...]]
"""A module of its own, as two launches that overlap may need different contents of its constant memory."""


class Preparation:
    """Prepares the launches of a kernel for one problem; ``load`` loads the kernel once more."""

    def __init__(self, code: KernelCode, load: Callable[[], StepFunctions]) -> None:
        self._spec = spec = code.definition.spec
        self._problem = spec.shaped(code.problem, code.config)
        self._plan = code.plan[0]
        self._load = load
        self._names = [buffer.name for buffer in spec.buffers]
        self._has_constants = any(buffer.constant for buffer in spec.buffers)
        self._filled = [buffer for buffer in spec.buffers if buffer.is_initialized and not buffer.is_read]
        self._contents: dict[str, Any] = {}
        """Contents of outputs on the device, except zeros."""
        self._lock = threading.Lock()
        self._own: ByStream[_Loaded] = ByStream()
        """Modules of the calling thread."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to prepare."""
        return self._has_constants or bool(self._filled)

    def launch(
        self, plain: DriverLaunch, block: ParameterBlock, words: tuple[int, ...], stream: int, *, is_bound: bool
    ) -> tuple[DriverLaunch, object]:
        """Return a function that prepares and launches on a stream, and an object that it needs.

        If the kernel has constants, each thread has a module of its own for the stream, and each function whose arrays
        are bound has one into which they are copied now. ``words`` are those of ``block`` that hold the addresses of
        the buffers.
        """
        if not self._has_constants:
            return self._prepared(plain, block, words, ()), None
        loaded = None if is_bound else self._own.by_stream.get(stream)
        if loaded is None:
            with outside_of_captures():
                own = self._load()
                loaded = own, constant_copies(self._spec, own.module, self._problem)
        functions, copies = loaded
        if is_bound:
            addresses = dict(zip(self._names, (block.words[word] for word in words), strict=True))
            with _uncaptured(stream) as side_stream:
                copy_constants(copies, addresses, side_stream or stream)
            copies = ()
        else:
            self._own.by_stream[stream] = loaded
        return self._prepared(functions.driver_launch(self._plan), block, words, copies), loaded

    def _prepared(
        self, launch: DriverLaunch, block: ParameterBlock, words: tuple[int, ...], copies: tuple[ConstantCopy, ...]
    ) -> DriverLaunch:
        word_of = dict(zip(self._names, words, strict=True))
        values, runtime = block.words, load_cupy().cuda.runtime
        zeroed, filled = [], []
        for buffer in self._filled:
            size_bytes = buffer.size_bytes(self._problem.dtype, self._problem.names)
            if buffer.is_zeroed:
                zeroed.append((word_of[buffer.name], size_bytes))
            else:
                filled.append((word_of[buffer.name], self._content(buffer.name), size_bytes))

        def prepare_and_launch(stream: int, address: int, extra: int) -> None:
            for word, size_bytes in zeroed:
                runtime.memsetAsync(values[word], 0, size_bytes, stream)
            for word, content, size_bytes in filled:
                copy_async(values[word], content, size_bytes, stream)
            for name, variable, size_bytes in copies:
                copy_async(variable, values[word_of[name]], size_bytes, stream)
            launch(stream, address, extra)

        return prepare_and_launch

    def _content(self, name: str) -> int:
        """Return the address of an output's content, which is the same for all launches."""
        with self._lock, outside_of_captures():
            if name not in self._contents:
                stored = input_maker(self._spec, self._problem)(name)
                with load_cupy().cuda.Stream(non_blocking=True) as side_stream:
                    self._contents[name] = load_cupy().asarray(stored)
                    side_stream.synchronize()
            return int(self._contents[name].data.ptr)


@contextmanager
def _uncaptured(stream: int) -> Iterator[int]:
    """Let copies run at once although the stream is captured: on the stream beside it that is yielded, 0 for none."""
    runtime = load_cupy().cuda.runtime
    if stream == 0 or not runtime.streamIsCapturing(stream):
        yield 0
        return
    with outside_of_captures():
        side_stream = load_cupy().cuda.Stream(non_blocking=True)
        try:
            yield int(side_stream.ptr)
        finally:
            side_stream.synchronize()


def _settable(spec: KernelSpec, scalars: Iterable[str], kernel: str) -> dict[str, ScalarArgument]:
    """Return the scalars that a call may set, by name; an `ArgumentError` if it sets another one."""
    free = {scalar.name: scalar for scalar in spec.scalars if scalar.default is not None}
    if unknown := [name for name in scalars if name not in free]:
        known = ", ".join(free) or "none"
        raise ArgumentError(f"{kernel} has no scalar {unknown[0]!r} to set; scalars with a default: {known}")
    return free


class CallArguments(CallArrays):
    """Arguments of a kernel's calls for one problem and configuration."""

    def __init__(self, code: KernelCode, device_index: int) -> None:
        super().__init__(code.definition.spec, code.problem, code.config, device_index)
        self.plan, self._scalars, self._data = code.plan
        self.workspaces = StreamWorkspaces(self._data.workspaces)

    def pack(
        self, pointers: Mapping[str, int], scalars: Mapping[str, float], workspaces: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """Return the parameters of all launches, in order, given the address of each buffer.

        Raise `ArgumentError` if a scalar is unknown, its value does not fit in its type, or a buffer with a tensor map
        is not aligned; `ToolchainError` if the driver refuses a tensor map.
        """
        values = dict(self._scalars)
        if scalars:
            free = _settable(self._spec, scalars, self._spec.name)
            values |= {name: encode_scalar(free[name], v, self._problem.dtype) for name, v in scalars.items()}
        of, addresses = (self._spec, self.plan, self._data, self._problem.dtype), {**pointers, **workspaces}
        return tuple(chain.from_iterable(pack_launches(*of, addresses=addresses, scalars=values)))

    def layout(
        self, starts: Sequence[int], words: int
    ) -> tuple[tuple[int, ...], Sequence[tuple[int, int, TensorMap | Texture]], Sequence[tuple[int, int]]]:
        """Return the ``words``, ``maps`` and ``copies`` of a `StreamState`.

        ``starts`` is the first word of each packed parameter. The last of the ``words`` of the block, one for each
        buffer, hold addresses that are not parameters.
        """
        buffers = self._spec.buffers
        passed = [self._spec.argument(name) for launch in self.plan.launches for name in launch.arguments]
        found = list(zip(passed, starts, strict=True))
        spare = {b.name: words - len(buffers) + i for i, b in enumerate(buffers)}
        word = spare | {a.name: start for a, start in reversed(found) if a.is_given}
        maps: dict[str, TensorMap | Texture] = {one.name: one for one in self._data.tensor_maps}
        maps |= {one.name: one for one in self._data.textures}
        map_places = (
            (word[a.described_buffer], start, maps[a.name])
            for a, start in found
            if a.name in maps and a.described_buffer in word  # the map of a workspace stays the same
        )
        structs = {struct.name: struct for struct in self._data.structs}
        copies = (
            (word[target], start + offset // WORD_BYTES)
            for a, start in found
            if a.name in structs
            for offset, target in structs[a.name].pointers
            if target in word
        )
        repeated = ((word[a.name], start) for a, start in found if a.is_given and start != word[a.name])
        places = tuple(word[b.name] for b in buffers)
        return places, tuple(map_places), (*repeated, *copies)


class CaptureFolder:
    """Folder of captured calls, on which `autotile tune --captured` tunes, created for the user alone.

    The limits are those of this process.
    """

    def __init__(self, folder: Path, max_calls: int, max_bytes: int) -> None:
        self._folder = folder
        self._calls_left = max_calls
        self._bytes_left = max_bytes
        self._lock = threading.Lock()

    @classmethod
    def of_settings(cls) -> CaptureFolder | None:
        """Return the folder of the settings, one for all kernels; None if they name none."""
        settings = read_settings()
        if settings.capture is None:
            return None
        limits = settings.capture, settings.capture_calls, settings.capture_limit_bytes
        return _folders.setdefault(limits, cls(*limits))

    @property
    def is_full(self) -> bool:
        """Whether no further call is written."""
        return self._calls_left <= 0

    def write(self, code: Code, views: Mapping[str, Any], scalars: Mapping[str, object]) -> Path | None:
        """Write a call, and return its folder; None if it does not fit in the limits.

        The arrays are copied from the device on CuPy's current stream. The folder appears when it is complete. That it
        cannot be written is an `InputError`.
        """
        import shutil
        import tempfile

        spec, problem = code.definition.spec, code.problem
        read = {buffer.name: views[buffer.name] for buffer in spec.buffers if buffer.is_read}
        size_bytes = sum(int(view.nbytes) for view in read.values())
        with self._lock:
            if self._calls_left <= 0 or size_bytes > self._bytes_left:
                return None
            self._calls_left -= 1
            self._bytes_left -= size_bytes
        document = document_of(spec, problem, scalars)
        fields = {name: getattr(document, name) for name in document.__struct_fields__}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._folder))
            try:
                for name, view in read.items():
                    np.save(made / f"{name}.npy", view.get(), allow_pickle=False)
                (made / DOCUMENT).write_text(encode_json(fields), encoding="utf-8")
                target = self._folder / f"{spec.name}-{made.name.removeprefix('.writing-')}"
                made.rename(target)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        except OSError as error:
            hint = "choose another folder (AUTOTILE_CAPTURE)"
            raise InputError(f"a call cannot be captured in {self._folder}: {error.strerror}; {hint}") from None
        return target


_folders: dict[tuple[Path, int, int], CaptureFolder] = {}

CurrentStream = Callable[[int], int]
ReadSignature = Callable[[Sequence[Any]], Signature]


class ArrayLauncher:
    """Base of the launchers of kernels and of libraries: requirements on arrays, and the CUDA runtime."""

    _arrays: CallArrays
    is_direct = True
    """Whether launches by addresses leave out a library's work on the host, as far as is known."""

    def __init__(self, code: Code, device_index: int) -> None:
        self._code = code
        self._device_index = device_index
        self.folder = CaptureFolder.of_settings()
        """Folder that calls are written to before they are launched; the fast path launches none of them."""
        self._libraries: dict[type, tuple[CurrentStream, ReadSignature, tuple[ArraySpec, ...]]] = {}
        """How the fast path reads arrays of each type, and what they must be."""
        self._one_device = device_count() == 1
        runtime = load_cupy().cuda.runtime
        self._current_device: Callable[[], int] = runtime.getDevice
        self._launch_graph: Callable[[int, int], None] = runtime.graphLaunch
        self._is_capturing: Callable[[int], bool] = runtime.streamIsCapturing
        """Not to be called with stream 0, which cannot be captured."""

    def launch(
        self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float], folder: CaptureFolder | None = None
    ) -> Sequence[Any]:
        """Check arrays, allocate the outputs that were left out, launch, and prepare the fast path for such arrays.

        The call is first written to a ``folder``, or to its own. Errors are those of `CallArrays.check`,
        `CaptureFolder.write` and, of a kernel, `CallArguments.pack`.
        """
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays, stream):
            full, views = self._checked(arrays, scalars, folder or self.folder)
            self._launch_checked(full, views, scalars)
        kind, library = type(full[0]), library_of(full[0])
        if library is not None and self.folder is None and kind not in self._libraries:
            self._libraries[kind] = library.stream, library.signature, self._arrays.array_specs(library)
        return full

    def _checked(
        self, arrays: Sequence[Any], scalars: Mapping[str, float], folder: CaptureFolder | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arrays of a call as `CallArrays.check` does, and write it to a folder if there is one."""
        full, views = self._arrays.check(arrays)
        if folder is not None:
            folder.write(self._code, views, scalars)
        if self.folder is not None and self.folder.is_full:
            self.folder = None
        return full, views

    def _launch_checked(self, arrays: Sequence[Any], views: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        raise NotImplementedError


def _addresses(views: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(view.data.ptr) for name, view in views.items()}


_loaded: RecentCache[tuple[object, ...], StepFunctions] = RecentCache(MAX_CUBINS)
"""Functions of cubins on each device; a module takes longer to load than a launch."""


class KernelLauncher(ArrayLauncher):
    """Launches the functions of a kernel, which it compiles or finds in the cache, loads on a device and keeps alive.

    Repeated launches may become CUDA graphs, by the setting ``graphs``.
    """

    def __init__(self, code: KernelCode, device_index: int) -> None:
        spec, (launches, *_), packed = code.definition.spec, code.plan, code.find_packed()

        def load() -> StepFunctions:
            image = packed.read() if packed is not None else code.cubin.path
            functions = StepFunctions(spec.steps, image, packed.symbols if packed is not None else code.cubin.symbols)
            functions.opt_in(launches)
            return functions

        key = device_index, packed.name if packed is not None else code.cubin.cubin_hash, *code.key
        known = _loaded.recall(key)
        with load_cupy().cuda.Device(device_index), outside_of_captures():
            if known is not None:
                known.opt_in(launches)
            self._functions = functions = known or _loaded.keep(key, load())
        super().__init__(code, device_index)
        self.arguments = self._arrays = CallArguments(code, device_index)
        self._with_graphs = read_settings().graphs
        preparation = Preparation(code, load)
        self._preparation = preparation if preparation.is_needed else None
        self._launch = functions.driver_launch(self.arguments.plan)
        self._cupy = cupy_library()
        self._states: ByStream[StreamState] = ByStream()

    def launch_fast(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Launch on the current stream of the arrays' library, if the fast path applies; else return None.

        It does after `launch` has launched on arrays of the same library, in the same thread and on the same stream.
        Outputs may be left out and are then allocated; all buffers are returned. Raise `ArgumentError` if there are too
        few or too many arrays.
        """
        known = self._libraries.get(type(arrays[0])) if arrays else None
        if known is None or not (self._one_device or self._current_device() == self._device_index):
            return None
        current_stream, read_signature, specs = known
        stream = current_stream(self._device_index)
        state = self._states.by_stream.get(stream)
        if state is None:
            return None
        signature = read_signature(arrays)
        is_captured = stream != 0 and self._with_graphs and self._is_capturing(stream)
        graph = state.graphs.get(signature)
        if graph is not None and not is_captured:
            self._launch_graph(graph.executable, stream)
            return arrays
        if len(arrays) != len(specs):
            return self.launch_fast(self.arguments.complete(arrays))
        pointers = accepted_pointers(signature, specs, self._device_index) if signature else None
        if pointers is None:
            return None
        state.launch(stream, pointers, signature if self._with_graphs and not is_captured else None)
        return arrays

    def launch_at(self, stream: int, pointers: tuple[int, ...], *, starts: bool = False) -> bool:
        """Launch on arrays at these addresses, see `autotile.serving.bound.BoundKernel.launch_at`."""
        state = self._states.by_stream.get(stream)
        if not ((state or starts) and (self._one_device or self._current_device() == self._device_index)):
            return False
        if state is None:
            if self.folder is not None:
                return False
            with load_cupy().cuda.Device(self._device_index), on_handle(stream):
                self._launch_first(stream, dict(zip(self.arguments.shapes, pointers, strict=True)), {}, keeps=True)
            return True
        is_captured = stream != 0 and self._with_graphs and self._is_capturing(stream)
        graph = state.graphs.get(pointers)
        if graph is not None and not is_captured:
            self._launch_graph(graph.executable, stream)
        elif len(pointers) > len(state.words):  # with a bias: this kernel has just taken over from cuBLAS
            return False
        else:
            state.launch(stream, pointers, pointers if self._with_graphs and not is_captured else None)
        return True

    def bind(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that launches on fixed arrays, on the current stream of their library."""
        launch_graph, is_capturing, index = self._launch_graph, self._is_capturing, self._device_index
        with_graphs, device = self._with_graphs, load_cupy().cuda.Device
        states: ByStream[StreamState] = ByStream()

        def new_state(stream: int) -> StreamState:
            with on_stream(full):  # the views hold the memory, also of a tensor that is given another storage
                state = self._new_state(stream, _addresses(views), scalars, is_bound=True)
            states.keep(stream, state)
            return state

        def launch() -> None:
            stream = current_stream(index)
            state = states.by_stream.get(stream) or new_state(stream)
            is_captured = stream != 0 and with_graphs and is_capturing(stream)
            graph = state.graphs.get(())
            if graph is not None and not is_captured:
                launch_graph(graph.executable, stream)
            else:
                state.launch(stream, (), () if with_graphs and not is_captured else None)

        def launch_on_device() -> None:
            with device(index):
                launch()

        with device(index):
            with on_stream(arrays):
                full, views = self._checked(arrays, scalars, self.folder)
            current_stream = (library_of(full[0]) or self._cupy).stream
            new_state(current_stream(index))  # so that errors are raised here
        return launch if self._one_device else launch_on_device

    def _launch_checked(self, arrays: Sequence[Any], views: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        keeps = not scalars and self.folder is None
        self._launch_first(self._cupy.stream(self._device_index), _addresses(views), scalars, keeps=keeps)

    def _launch_first(
        self, stream: int, pointers: Mapping[str, int], scalars: Mapping[str, float], *, keeps: bool
    ) -> None:
        """Launch on CuPy's current stream with new parameters, which ``keeps`` lets further launches there use."""
        state = self._new_state(stream, pointers, scalars)
        state.launch(stream, ())
        if keeps and stream not in self._states.by_stream:  # an existing state, with its graphs, stays valid
            state.words, state.maps, state.copies = self.arguments.layout(state.block.starts, len(state.block.words))
            self._states.keep(stream, state)

    def _new_state(
        self, stream: int, pointers: Mapping[str, int], scalars: Mapping[str, float], *, is_bound: bool = False
    ) -> StreamState:
        """Return new parameters for CuPy's current stream, which are always those of the same arrays if ``is_bound``.

        The state launches on the arrays at ``pointers`` until it is given the words of others.
        """
        load_cupy().cuda.runtime.setDevice(self._device_index)  # it makes a context current
        workspaces = self.arguments.workspaces.current()
        values = self.arguments.pack(pointers, scalars, workspaces.pointers)
        block = ParameterBlock(values, spare_words=len(pointers))
        launch, own = self._launch, None
        if self._preparation is not None:
            words, *_ = self.arguments.layout(block.starts, len(block.words))
            for name, word in zip(self.arguments.shapes, words, strict=True):
                block.words[word] = pointers[name]
            launch, own = self._preparation.launch(launch, block, words, stream, is_bound=is_bound)
        return StreamState(launch, block, (self._functions, workspaces, own))


class LibraryLauncher(ArrayLauncher):
    """Calls a library."""

    def __init__(self, code: LibraryCode, device_index: int) -> None:
        super().__init__(code, device_index)
        self._spec = code.definition.spec
        self._call = code.library.call
        layout = GemmLayout.of(code.asked.sizes, code.asked.dtype) if self._call is None else None
        self._gemm = Gemm(layout, device_index) if layout is not None else None
        if self._gemm is not None:
            with load_cupy().cuda.Device(device_index), outside_of_captures():
                self._gemm.prepare()
        self._relocated: dict[tuple[int, int], RelocatableCall] = {}
        """The launches of the product, by stream and number of arrays."""
        self._calls: dict[tuple[int, int], int] = {}
        """Calls before these: streams that are made anew again and again have no launches of their own."""

    @cached_property
    def _arrays(self) -> CallArrays:
        """The requirements, made at the first call that is checked."""
        problem = resolve_problem(self._spec, self._code.problem.sizes, self._code.problem.dtype)
        return CallArrays(self._spec, problem, self._spec.default, self._device_index)

    def launch_fast(self, arrays: Sequence[Any], scalars: Mapping[str, float] | None = None) -> Sequence[Any] | None:
        """Compute on arrays like those of an earlier call, and return all arrays; None if nothing was done."""
        known = self._libraries.get(type(arrays[0])) if arrays else None
        if known is None or not (self._one_device or self._current_device() == self._device_index):
            return None
        current_stream, read_signature, specs = known
        if len(arrays) != len(specs):
            arrays = self._arrays.complete(arrays)
        signature = read_signature(arrays)
        pointers = accepted_pointers(signature, specs, self._device_index) if signature else None
        if pointers is None:
            return None
        stream = current_stream(self._device_index)
        if scalars or not self.launch_at(stream, pointers):
            self._launch(arrays, pointers, stream, scalars or {})
        return arrays

    def launch_at(self, stream: int, pointers: tuple[int, ...], *, starts: bool = False) -> bool:
        """Compute on arrays at these addresses, which meet the requirements; False if nothing was done.

        What CUDA or cuBLAS refuses, such as memory, the program may compute otherwise; a call raises the error.
        """
        gemm = self._gemm
        if gemm is None or not (self._one_device or self._current_device() == self._device_index):
            return False
        key = stream, len(pointers)
        call = self._relocated.get(key)
        if call is None and (stream == PER_THREAD_STREAM or self.folder is not None):
            return False  # the first is another stream in each thread
        a, b, c, *_ = pointers
        is_captured = stream != 0 and self._is_capturing(stream)
        try:
            if call is not None and not is_captured and not (a | b | c | pointers[-1]) % VECTOR_BYTES:
                try:
                    call.launch(stream, pointers)
                except load_cupy().cuda.driver.CUDADriverError:
                    load_cupy().cuda.runtime.setDevice(self._device_index)  # it makes a context current in this thread
                    call.launch(stream, pointers)
                return True
            memory = gemm.memory(stream)
            gemm(stream, pointers, memory=memory)
        except (ToolchainError, load_cupy().cuda.driver.CUDADriverError, load_cupy().cuda.runtime.CUDARuntimeError):
            self.is_direct = False
            self._relocated.pop(key, None)
            return False
        if call is None and self.is_direct and not is_captured:
            if key not in self._calls and len(self._calls) >= _MAX_STREAMS:
                self._calls.clear()
                self._relocated.clear()
            self._calls[key] = calls = self._calls.get(key, 0) + 1
            if calls >= _WORTHWHILE_CALLS:
                call = gemm.relocatable(memory, len(pointers))
                self.is_direct = call is not None
                if call is not None:
                    self._relocated[key] = call
        return True

    def launch(
        self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float], folder: CaptureFolder | None = None
    ) -> Sequence[Any]:
        """Check the arrays of a call, compute, and return all arrays."""
        launched = self.launch_fast(arrays, scalars) if stream is None and folder is None else None
        return launched if launched is not None else super().launch(arrays, stream, scalars, folder)

    def _launch_checked(self, arrays: Sequence[Any], views: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        in_order = [views[buffer.name].data.ptr for buffer in self._spec.buffers]
        self._launch(arrays, in_order, load_cupy().cuda.get_current_stream().ptr, scalars)

    def bind(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        """Check arrays, and return a function that computes on them."""
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays):
            self._checked(arrays, scalars, self.folder)
        _settable(self._spec, scalars, self._code.asked.kernel)

        def launch() -> None:
            self.launch(arrays, None, scalars)

        return launch

    def _launch(
        self, arrays: Sequence[Any], pointers: Sequence[int], stream: int, scalars: Mapping[str, float]
    ) -> None:
        if scalars:
            _settable(self._spec, scalars, self._code.asked.kernel)
        if self._gemm is not None:
            self._gemm(stream, pointers, scalars.get("alpha", 1.0), scalars.get("beta", 0.0))
        elif self._call is not None:
            self._call(*arrays, **scalars)


Launcher = KernelLauncher | LibraryLauncher
