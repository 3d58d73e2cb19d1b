"""Libraries that compute an operation beside its kernels: cuBLAS, and callables that a program adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from autotile.core.forks import cached_property
from autotile.core.model import Problem
from autotile.cuda.cublas import Gemm, Layout, cublas_version
from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, InputError, ToolchainError
from autotile.kernel.launch import StepLaunch
from autotile.kernel.library import Kernel
from autotile.kernel.operation import LIBRARIES, Library, Operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.arrays import ArraySpec, CallArrays, accepted_pointers, library_of, on_stream
from autotile.serving.arrays import Library as ArrayLibrary

_SIZES = {"M", "N", "K"}
_NAMES = _SIZES | {"BATCH", "TRANS_A", "TRANS_B", "OUT_FP32"}
"""Sizes and flags of an operation that cuBLAS may compute."""


_added: dict[str, dict[str, Library]] = {}
"""Libraries that the program has added, by operation and name."""


def keep_library(operation: Operation, library: Library) -> None:
    """Add a library to those of an operation; one of the same name is replaced.

    Raises
    ------
    InputError
        The name is one of a built-in library.
    """
    if library.name in LIBRARIES or not library.name.isidentifier():
        expected = f"an identifier other than {LIBRARIES[0]!r}"
        raise InputError(f"a library cannot be added as {library.name!r}: expected {expected}")
    _added.setdefault(operation.name, {})[library.name] = library


def libraries_for(operation: Operation, *, is_present: bool = True) -> list[Library]:
    """Return the libraries that may compute an operation, built-in ones first.

    Parameters
    ----------
    is_present
        Whether they are to be called on this machine. If not, a built-in library counts as installed, and its version
        is empty if it is not.
    """
    found = []
    for name in operation.libraries:
        try:
            found.append(Library(name, cublas_version()))
        except ToolchainError:
            if not is_present:
                found.append(Library(name, ""))
    return [*found, *_added.get(operation.name, {}).values()]


def computes(library: Library, operation: Operation, problem: Problem) -> bool:
    """Return whether a library computes a problem of an operation."""
    if library.call is not None:
        return True
    names = set(operation.sizes) - set(operation.conditions)
    if not _SIZES <= names <= _NAMES:
        return False
    return Layout.of(problem.sizes, problem.dtype).is_supported


class LibraryCode:
    """A library for a problem of an operation; see `autotile.serving.bound.Code`.

    Parameters
    ----------
    library, asked
        The library, and the problem of the operation.
    definition, sizes
        A kernel of the operation, which declares the arrays, and the problem's sizes by its names.
    """

    launches: tuple[StepLaunch, ...] = ()

    def __init__(self, library: Library, asked: Problem, definition: Kernel, sizes: Mapping[str, int]) -> None:
        self.name, self.library, self.asked, self.definition = library.name, library, asked, definition
        self._sizes = sizes

    @cached_property
    def problem(self) -> Problem:
        """The problem by the names of the kernel; computed at the first call rather than within a look-up."""
        return resolve_problem(self.definition.spec, self._sizes, self.asked.dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array, by its name."""
        return CallArrays(self.definition.spec, self.problem, self.definition.spec.default, -1).shapes

    @property
    def geometry(self) -> NoReturn:
        """A library has none: an `AttributeError`."""
        raise AttributeError(f"{self.name} is a library, which has no launch geometry")

    def resources(self, choice: object) -> None:
        """Return None, as those of a library are not known."""

    def load(self, device_index: int) -> LibraryLauncher:
        """Return a launcher."""
        return LibraryLauncher(self, device_index)


class LibraryLauncher:
    """Calls a library; see `autotile.serving.bound.Launcher`.

    Parameters
    ----------
    code, device_index
        The library with its problem, and the CUDA device of the arrays.
    """

    def __init__(self, code: LibraryCode, device_index: int) -> None:
        spec = code.definition.spec
        self._code, self._index = code, device_index
        self._arrays = CallArrays(spec, code.problem, spec.default, device_index)
        self._call = code.library.call
        self._gemm = Gemm(Layout.of(code.asked.sizes, code.asked.dtype), device_index) if self._call is None else None
        self._specs: dict[type, tuple[ArrayLibrary, tuple[ArraySpec, ...]]] = {}
        self._one_device = False

    @property
    def plain(self) -> LibraryLauncher:
        """The launcher itself, as for one that also captures calls."""
        return self

    def launch_fast(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Launch on arrays like those of an earlier call; None if nothing was launched."""
        return arrays if self._launch_fast(arrays, {}) else None

    def launch(self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]) -> Sequence[Any]:
        """Check the arrays of a call, compute, and return all arrays."""
        if stream is None and self._launch_fast(arrays, scalars):
            return arrays
        with load_cupy().cuda.Device(self._index), on_stream(arrays, stream):
            checked = self._arrays.check(arrays)
            pointers = [int(checked.views[buffer.name].data.ptr) for buffer in self._code.definition.spec.buffers]
            self._launch(checked.arrays, pointers, load_cupy().cuda.get_current_stream().ptr, scalars)
            library, self._one_device = library_of(checked.arrays[0]), device_count() == 1
            if library is not None:
                self._specs.setdefault(type(checked.arrays[0]), (library, self._arrays.array_specs(library)))
        return checked.arrays

    def bind(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        """Check arrays, and return a function that computes on them."""
        with load_cupy().cuda.Device(self._index):
            self._arrays.check(arrays)
        self._check_scalars(scalars)

        def launch() -> None:
            self.launch(arrays, None, scalars)

        return launch

    def capture(
        self, arrays: Sequence[Any], stream: Any, write: Callable[[Mapping[str, Any]], object]
    ) -> Sequence[Any]:
        """Check the arrays of a call, pass them to ``write``, and return all; nothing is computed."""
        with load_cupy().cuda.Device(self._index), on_stream(arrays, stream):
            checked = self._arrays.check(arrays)
            write(checked.views)
        return checked.arrays

    def _launch_fast(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> bool:
        known = self._specs.get(type(arrays[0])) if arrays else None
        if known is None or len(arrays) != len(self._arrays.shapes):
            return False
        if not self._one_device and load_cupy().cuda.runtime.getDevice() != self._index:
            return False
        library, specs = known
        signature = library.signature(arrays)
        pointers = accepted_pointers(signature, specs, self._index) if signature else None
        if pointers is None:
            return False
        self._launch(arrays, pointers, library.stream(self._index), scalars)
        return True

    def _launch(
        self, arrays: Sequence[Any], pointers: Sequence[int], stream: int, scalars: Mapping[str, float]
    ) -> None:
        if scalars:
            self._check_scalars(scalars)
        if self._gemm is not None:
            self._gemm(stream, pointers, **scalars)
        elif self._call is not None:
            self._call(*arrays, **scalars)

    def _check_scalars(self, scalars: Mapping[str, float]) -> None:
        names = [scalar.name for scalar in self._code.definition.spec.scalars if scalar.default is not None]
        if unknown := [name for name in scalars if name not in names]:
            known = ", ".join(names) or "none"
            raise ArgumentError(
                f"{self._code.asked.kernel} has no scalar {unknown[0]!r} to set; scalars with a default: {known}"
            )
