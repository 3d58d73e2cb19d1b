"""Work that a served kernel needs before each launch: contents of outputs, and copies to constant memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from autotile.core.model import Problem
from autotile.cuda.driver import ConstantCopy, constant_copies, copy_async, outside_of_captures
from autotile.cuda.function import DriverLaunch, ParameterBlock, StepFunctions
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.inputs import InputMaker
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.spec import KernelSpec


class _Loaded(NamedTuple):
    """A module of its own, as two launches that overlap may need different contents of its constant memory."""

    functions: StepFunctions
    copies: tuple[ConstantCopy, ...]


class Preparation:
    """Prepares the launches of a kernel for one problem.

    Parameters
    ----------
    spec, problem, plan
        The kernel, its problem and its launches.
    load
        Loads the kernel once more.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, plan: LaunchPlan, load: Callable[[], StepFunctions]) -> None:
        self._spec = spec
        self._problem = problem
        self._plan = plan
        self._load = load
        self._names = [buffer.name for buffer in spec.buffers]
        self._has_constants = any(buffer.constant for buffer in spec.buffers)
        self._filled = [buffer for buffer in spec.buffers if buffer.is_initialized and not buffer.is_read]
        self._contents: dict[str, Any] = {}
        """Contents of outputs on the device, except zeros."""
        self._lock = threading.Lock()
        self._own = _OwnModules()

    @classmethod
    def of(
        cls, spec: KernelSpec, problem: Problem, plan: LaunchPlan, load: Callable[[], StepFunctions]
    ) -> Preparation | None:
        """Return the preparation; None if the kernel needs none."""
        made = cls(spec, problem, plan, load)
        return made if made._has_constants or made._filled else None

    def launch(self, plain: DriverLaunch, block: ParameterBlock, words: tuple[int, ...], stream: int) -> DriverLaunch:
        """Return a function that prepares and launches on a stream.

        Parameters
        ----------
        plain
            Function that launches the kernel.
        block, words
            Parameters of the launches, and the words that hold the addresses of the buffers.
        stream
            The stream. Each thread has a module of its own for it, if the kernel has constants.
        """
        if not self._has_constants:
            return self._prepared(plain, block, words, ())
        loaded = self._own.by_stream.get(stream)
        if loaded is None:
            loaded = self._own.by_stream[stream] = self._new_module()
        return self._prepared(loaded.functions.driver_launch(self._plan), block, words, loaded.copies)

    def bound_launch(
        self, plain: DriverLaunch, block: ParameterBlock, words: tuple[int, ...], stream: int
    ) -> tuple[DriverLaunch, object]:
        """Return a function as from `launch`, but copy the constants now, and an object that it needs."""
        if not self._has_constants:
            return self._prepared(plain, block, words, ()), None
        loaded = self._new_module()
        addresses = dict(zip(self._names, (block.words[word] for word in words), strict=True))
        with _uncaptured(stream) as side_stream:
            for copy in loaded.copies:
                copy_async(copy.address, addresses[copy.buffer], copy.size_bytes, side_stream or stream)
        return self._prepared(loaded.functions.driver_launch(self._plan), block, words, ()), loaded

    def _prepared(
        self, launch: DriverLaunch, block: ParameterBlock, words: tuple[int, ...], copies: tuple[ConstantCopy, ...]
    ) -> DriverLaunch:
        word_of = dict(zip(self._names, words, strict=True))
        values, runtime = block.words, load_cupy().cuda.runtime
        zeroed, filled = [], []
        for buffer in self._filled:
            size_bytes = buffer.size_bytes(self._problem.dtype, self._problem.sizes)
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
                stored = InputMaker(self._spec, self._problem.sizes, self._problem.dtype).stored(name)
                with load_cupy().cuda.Stream(non_blocking=True) as side_stream:
                    self._contents[name] = load_cupy().asarray(stored)
                    side_stream.synchronize()
            return int(self._contents[name].data.ptr)

    def _new_module(self) -> _Loaded:
        with outside_of_captures():
            functions, problem = self._load(), self._problem
            return _Loaded(functions, constant_copies(self._spec, functions.module, problem.sizes, problem.dtype))


class _OwnModules(threading.local):
    """Modules of the calling thread, by stream handle."""

    def __init__(self) -> None:
        self.by_stream: dict[int, _Loaded] = {}


def _uncaptured(stream: int) -> AbstractContextManager[int]:
    """Return a context in which copies run at once although the stream is captured; it gives another stream, or 0."""
    runtime = load_cupy().cuda.runtime
    if stream == 0 or not runtime.streamIsCapturing(stream):
        return nullcontext(0)
    return _SideStream()


class _SideStream(AbstractContextManager[int]):
    """A stream beside a captured one, whose work is complete at the end."""

    def __enter__(self) -> int:
        self._relaxed = outside_of_captures()
        self._relaxed.__enter__()
        self._stream = load_cupy().cuda.Stream(non_blocking=True)
        return int(self._stream.ptr)

    def __exit__(self, *failure: Any) -> None:
        self._stream.synchronize()
        self._relaxed.__exit__(*failure)
