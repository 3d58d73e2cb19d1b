"""Libraries that compute an operation beside its kernels: cuBLAS, and callables that a program adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Problem
from autotile.cuda.cublas import Gemm, Layout, cublas_version
from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, InputError, ToolchainError
from autotile.kernel.launch import StepLaunch
from autotile.kernel.library import Kernel
from autotile.kernel.operation import LIBRARIES, Operation, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.arrays import ArraySpec, accepted_pointers, library_of, on_stream
from autotile.serving.arrays import Library as ArrayLibrary
from autotile.serving.bound import BoundKernel, expect_served
from autotile.serving.call_arrays import CallArrays, CheckedArrays
from autotile.serving.choice import Choice

if TYPE_CHECKING:
    from autotile.serving.capture import CaptureFolder

_SIZES = {"M", "N", "K"}
_NAMES = _SIZES | {"BATCH", "TRANS_A", "TRANS_B", "OUT_FP32"}
"""Sizes and flags of an operation that cuBLAS may compute."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library that computes an operation.

    Attributes
    ----------
    name, version
        Name, and version; times of another version are not compared.
    call
        Callable over the arrays of the operation's kernels, in the order of their arguments, which writes the outputs.
        None for cuBLAS.
    """

    name: str
    version: str
    call: Callable[..., object] | None = None


_added: dict[str, dict[str, Library]] = {}
"""Libraries that the program has added, by operation and name."""


@checked
def add_library(operation: str, name: str, callable: Callable[..., object], *, version: str = "") -> None:
    """Add a library that computes an operation, to be compared with its kernels and called where it is faster.

    Parameters
    ----------
    operation
        Name of the operation, or path of its file.
    name
        Name of the library. One that was added before is replaced.
    callable
        Function over the arrays of the operation's kernels, in the order of their arguments, as a caller passes them:
        of CuPy or PyTorch, or any that the kernels take. It writes the outputs, on the current stream of the arrays'
        library; scalars that a caller gives, such as ``alpha``, are passed by name.
    version
        Version of the library. Times that were measured with another version are not compared.

    Raises
    ------
    InputError
        There is no such operation, or the name is one of a built-in library.

    Examples
    --------
    >>> autotile.add_library("sum.toml", "cupy", lambda x, y: x.sum(out=y))  # doctest: +SKIP
    """
    if name in LIBRARIES or not name.isidentifier():
        raise InputError(f"a library cannot be added as {name!r}: expected an identifier other than {LIBRARIES[0]!r}")
    from autotile.serving.dispatcher import forget_served

    _added.setdefault(load_operation(operation).name, {})[name] = Library(name, version, callable)
    forget_served()


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


class BoundLibrary(BoundKernel):
    """A library that is served for a problem of an operation in place of a kernel, and called alike.

    Its ``kernel`` is the name of the library, its ``config`` is empty, and it has no launch geometry.

    Parameters
    ----------
    library, problem, device, choice
        The library, the problem of the operation, its device, and the choice.
    definition, sizes
        A kernel of the operation, which declares the arrays, and the problem's sizes by its names.
    device_index
        CUDA device of the arrays; None if it can only be inspected.
    """

    def __init__(
        self,
        library: Library,
        problem: Problem,
        device: DeviceProperties,
        device_index: int | None,
        choice: Choice,
        *,
        definition: Kernel,
        sizes: Mapping[str, int],
    ) -> None:
        self._hold(definition, problem, device, device_index, choice)
        self.kernel = library.name
        self.version = library.version
        self._call = library.call
        self._sizes = sizes
        self._checked: CallArrays | None = None
        self._gemm: Gemm | None = None
        if library.call is None and device_index is not None:
            self._gemm = Gemm(Layout.of(problem.sizes, problem.dtype), device_index)
        self._specs: dict[type, tuple[ArrayLibrary, tuple[ArraySpec, ...]]] = {}
        self._one_device = False

    @property
    def is_library(self) -> bool:
        """Whether it is a library: it is."""
        return True

    @property
    def _is_plain(self) -> bool:
        return False

    @property
    def is_loaded(self) -> bool:
        """Whether it can be called at once."""
        return self.can_launch

    def load(self) -> None:
        """Do nothing, as a library is loaded."""

    def adopt(self, other: BoundKernel) -> bool:
        """Take over the choice of the same library, such as a new measurement; return whether it is the same."""
        expect_served(other, "adopt")
        if not other.is_library or other.kernel != self.kernel:
            return False
        self.choice, self.find_contenders = other.choice, other.find_contenders
        return True

    def call_captured(
        self, folder: CaptureFolder, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]
    ) -> Any:
        """Write the arguments of a call to a folder, and compute; they are inputs of the kernel that declares them."""
        from autotile.serving.capture import Called

        with load_cupy().cuda.Device(self._launch_device()), on_stream(arrays, stream):
            checked = self._arrays.check(arrays)
            folder.write(Called(self.definition, self._own_problem), checked.views, scalars)
        return self(*checked.arrays, stream=stream, **scalars)

    @property
    def geometry(self) -> NoReturn:
        """A library has none: an `AttributeError`."""
        raise AttributeError(f"{self.kernel} is a library, which has no launch geometry")

    @property
    def launches(self) -> tuple[StepLaunch, ...]:
        """Nothing, as a library's launches are its own."""
        return ()

    @property
    def _arrays(self) -> CallArrays:
        """What the arrays must be; computed at the first call rather than within a look-up."""
        if self._checked is None:
            spec, index = self.definition.spec, self._device_index
            self._checked = CallArrays(spec, self._own_problem, spec.default, -1 if index is None else index)
        return self._checked

    @property
    def _own_problem(self) -> Problem:
        """The problem by the names of the kernel that declares the arrays."""
        return resolve_problem(self.definition.spec, self._sizes, self.problem.dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array, by its name."""
        return self._arrays.shapes

    @property
    def resources(self) -> None:
        """None, as those of a library are not known."""
        return None

    def __repr__(self) -> str:
        return f"<BoundLibrary {self.kernel} for {self.problem} on {self.device.name}: {self.tier}>"

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Compute on arrays, asynchronously; parameters, result and errors are those of a `BoundKernel`."""
        index = self._launch_device()
        if stream is not None or not self._launch_fast(arrays, scalars, index):
            with load_cupy().cuda.Device(index), on_stream(arrays, stream):
                checked = self._arrays.check(arrays)
                arrays = checked.arrays
                pointers = [int(checked.views[buffer.name].data.ptr) for buffer in self.definition.spec.buffers]
                self._launch(arrays, pointers, load_cupy().cuda.get_current_stream().ptr, scalars)
                library, self._one_device = library_of(arrays[0]), device_count() == 1
                if library is not None:
                    self._specs.setdefault(type(arrays[0]), (library, self._arrays.array_specs(library)))
        self._count_call()
        return self._outputs(arrays)

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """Return a function that computes on these arrays, as `BoundKernel.bind` does."""
        with load_cupy().cuda.Device(self._launch_device()):
            self._arrays.check(arrays)
        self._check_scalars(scalars)

        def launch() -> None:
            self(*arrays, **scalars)

        return launch

    def check(self, arrays: Sequence[Any]) -> CheckedArrays:
        """Check the arrays of a call, and allocate the outputs that were left out."""
        return self._arrays.check(arrays)

    def _launch_fast(self, arrays: Sequence[Any], scalars: Mapping[str, float], index: int) -> bool:
        """Launch on arrays like those of an earlier call; return whether it did."""
        known = self._specs.get(type(arrays[0])) if arrays else None
        if known is None or len(arrays) != len(self._arrays.shapes):
            return False
        if not self._one_device and load_cupy().cuda.runtime.getDevice() != index:
            return False
        library, specs = known
        signature = library.signature(arrays)
        pointers = accepted_pointers(signature, specs, index) if signature else None
        if pointers is None:
            return False
        self._launch(arrays, pointers, library.stream(index), scalars)
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
        names = [scalar.name for scalar in self.definition.spec.scalars if scalar.default is not None]
        if unknown := [name for name in scalars if name not in names]:
            known = ", ".join(names) or "none"
            raise ArgumentError(
                f"{self.problem.kernel} has no scalar {unknown[0]!r} to set; scalars with a default: {known}"
            )
