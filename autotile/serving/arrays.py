"""Arrays on a CUDA device, of CuPy, PyTorch, JAX, Numba or any library with DLPack, and their checks for a call.

PyTorch and ml_dtypes are looked up among the imported modules and never imported: an array of a library exists only if
the program has imported that library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.core.model import Config, Problem
from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.arguments import BufferArgument
from autotile.kernel.spec import KernelSpec

Signature = tuple[tuple[int, tuple[int, ...], Any, bool, int], ...]
"""Address, shape, dtype, C-contiguity and CUDA device (negative: none) of each array of a call."""

VECTOR_BYTES = 16
"""Alignment that 128-bit accesses and tensor maps require (CUDA C++ Programming Guide, tensor maps)."""

Pointers = tuple[int, ...]
"""Device addresses of the arrays of a call."""


class ArraySpec(NamedTuple):
    """Shapes and dtypes that are accepted on the fast path; the array must also be C-contiguous and on the device."""

    shapes: tuple[tuple[int, ...], ...]
    """The declared shape, and the same without leading axes of extent 1."""
    dtypes: tuple[Any, ...]
    """dtypes of the library; bfloat16 may also be stored as uint16, and an 8-bit float as uint8."""


def accepted_pointers(signature: Signature, specs: Sequence[ArraySpec], device_index: int) -> Pointers | None:
    """Return the addresses of arrays; None if an array does not match its spec."""
    for (_, shape, dtype, is_contiguous, index), (shapes, dtypes) in zip(signature, specs, strict=True):
        if shape not in shapes or dtype not in dtypes or not is_contiguous or index != device_index:
            return None
    return tuple([array[0] for array in signature])


def library_of(array: Any) -> ArrayLibrary | None:
    """Return the library of an array; None unless it is CuPy or PyTorch.

    A tensor does not wait for the import of CuPy, which takes 0.1 s.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch_library(torch)
    return cupy_library() if type(array) is load_cupy().ndarray else None


def cupy_library() -> CupyLibrary:
    """Return CuPy as the library of its arrays, the same for all of them."""
    return _cupy_library(load_cupy().cuda.get_current_stream, device_count() > 1)


_IEEE_COMPUTE_TYPES = (1, 2, 4)
"""CuPy's default, pedantic and fp32 (``cupy._core.set_compute_type``); others round factors or sums to fewer bits."""


class CupyLibrary:
    """CuPy arrays."""

    def __init__(self, current_stream: Callable[[int], Any], has_several_devices: bool) -> None:
        self._stream, self._has_several_devices = current_stream, has_several_devices

    def spec(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> ArraySpec:
        """Return the spec of an array of one of these shapes."""
        storage = np.dtype(DTYPES[element_type].storage)
        ml_dtypes = sys.modules.get("ml_dtypes")  # the package of the types that NumPy does not have
        name = DTYPES[element_type].component.name
        native = (np.dtype(getattr(ml_dtypes, name)),) if name != storage.name and hasattr(ml_dtypes, name) else ()
        return ArraySpec(shapes, (storage, *native))

    def stream(self, device_index: int) -> int:
        """Return the handle of CuPy's current stream on a device."""
        pointer: int = self._stream(device_index).ptr  # without the index, CuPy asks CUDA for it
        return pointer

    def signature(self, arrays: Sequence[Any]) -> Signature:
        """Return the signature of arrays; an empty tuple if one is of another library."""
        try:  # _c_contiguous is private, and takes a seventh of the time of flags.c_contiguous
            if self._has_several_devices:
                return tuple([(a.data.ptr, a.shape, a.dtype, a._c_contiguous, a.data.device_id) for a in arrays])
            return tuple([(a.data.ptr, a.shape, a.dtype, a._c_contiguous, 0) for a in arrays])
        except AttributeError:
            return ()

    def kind(self, a: Any, b: Any, options: object) -> tuple[object, ...]:
        """Return all that a launch on two arrays depends on but their addresses; empty if one is of another library."""
        try:
            x, y = a.data, b.data
            is_aligned = not (x.ptr | y.ptr) & (VECTOR_BYTES - 1)
            places = (x.device_id, y.device_id) if self._has_several_devices else None
            return (a.shape, b.shape, a.strides, b.strides, a.dtype, b.dtype, places, is_aligned, options)
        except AttributeError:
            return ()

    @staticmethod
    def multiply(a: Any, b: Any, out: Any) -> bool:
        """Compute a product by CuPy; return False, and do nothing, where it has none or would round to TF32."""
        cupy = load_cupy()
        if a.dtype.char not in "ef" or cupy._core.get_compute_type(a.dtype) not in _IEEE_COMPUTE_TYPES:
            return False
        cupy.matmul(a, b, out=out)
        return True

    def allocator(self, like: Any, shape: tuple[int, ...]) -> Callable[[], Any]:
        """Return a function that allocates an array of a shape on the current device, of the dtype of another one."""
        return partial(load_cupy().empty, shape, like.dtype)

    address = attrgetter("data.ptr")
    """Function that returns the address of an array."""


class TorchLibrary:
    """PyTorch tensors, given the module."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # The function that PyTorch's own compiler uses; it takes a fortieth of the time of torch.cuda.current_stream.
        self.stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: int(torch.cuda.current_stream(index).cuda_stream)
        )
        """Function that returns the handle of PyTorch's current stream on a device."""
        self._allows_tf32: Callable[[], bool] = torch._C._get_cublas_allow_tf32
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        # The function that PyTorch's compiled code uses; it takes a third of the time of torch.empty.
        self._empty: Callable[..., Any] | None = getattr(guards, "_empty_strided_cuda", None)

    def spec(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> ArraySpec:
        """Return the spec of a tensor of one of these shapes."""
        names = (DTYPES[element_type].component.name, DTYPES[element_type].storage)
        dtypes = tuple(dict.fromkeys(getattr(self._torch, name) for name in names if hasattr(self._torch, name)))
        return ArraySpec(shapes, dtypes)

    def signature(self, arrays: Sequence[Any]) -> Signature:
        """Return the signature of tensors; an empty tuple if one is of another library or sparse."""
        try:
            return tuple([(a.data_ptr(), a.shape, a.dtype, a.is_contiguous(), a.get_device()) for a in arrays])
        except (AttributeError, RuntimeError):
            return ()

    @staticmethod
    def kind(a: Any, b: Any, options: object) -> tuple[object, ...]:
        """Return all that a launch on two tensors depends on but their addresses; empty for those of others."""
        try:
            is_aligned = not (a.data_ptr() | b.data_ptr()) & (VECTOR_BYTES - 1)
            places = a.get_device(), b.get_device()
            return (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, places, is_aligned, options)
        except (AttributeError, RuntimeError):
            return ()

    def allows_tf32(self) -> bool:
        """Return True if PyTorch may round the factors of float32 products to TF32."""
        try:
            return self._allows_tf32()
        except RuntimeError:  # since PyTorch 2.9, where its newer setting contradicts the older one, and counts
            return bool(self._torch.backends.cuda.matmul.fp32_precision == "tf32")

    def multiply(self, a: Any, b: Any, out: Any) -> bool:
        """Compute a product by PyTorch; return False, and do nothing, where it would round float32 to TF32."""
        torch = self._torch
        if a.dtype == torch.float32 and self.allows_tf32():
            return False
        torch.matmul(a.detach(), b.detach(), out=out.detach())
        return True

    def allocator(self, like: Any, shape: tuple[int, ...]) -> Callable[[], Any]:
        """Return a function that allocates a tensor of a shape, of the dtype and on the device of another one."""
        if self._empty is not None and device_count() == 1:
            return partial(self._empty, shape, self._torch.empty(shape, device="meta").stride(), like.dtype)
        return partial(self._torch.empty, shape, dtype=like.dtype, device=like.device)

    address = methodcaller("data_ptr")
    """Function that returns the address of a tensor."""


ArrayLibrary = CupyLibrary | TorchLibrary

_cupy_library = lru_cache(CupyLibrary)
torch_library = lru_cache(TorchLibrary)


def as_cupy(array: Any, name: str, kind: str | None = None) -> Any:
    """Return a CuPy view of an array, without copying; messages call it ``name``.

    Of an element type that NumPy does not have, it is of the bits that autotile stores: libraries export bfloat16 and
    8-bit floats either as dtypes of their own or as untyped bytes. ``kind`` is the type that is expected; None for the
    array's own. Raise `ArgumentError` if the object has neither ``__cuda_array_interface__`` nor ``__dlpack__``, or is
    not on a CUDA device.
    """
    cupy, torch = load_cupy(), sys.modules.get("torch")
    exported, view = array, None
    if torch is not None and isinstance(array, torch.Tensor):
        exported = array.detach()  # PyTorch does not export a tensor that requires gradients
        if str(array.dtype).startswith("torch.float8"):  # nor one of these types
            exported = exported.view(torch.uint8)
    try:
        if isinstance(array, cupy.ndarray):
            view = array
        elif hasattr(exported, "__cuda_array_interface__"):
            view = cupy.asarray(exported)
        elif hasattr(exported, "__dlpack__"):
            view = cupy.from_dlpack(exported)
    except (RuntimeError, TypeError, ValueError, BufferError, AttributeError) as error:
        reason = error if getattr(array, "is_cuda", True) else f"it is on the {array.device}; .cuda() moves it"
        raise ArgumentError(f"{name}: this {type(array).__name__} cannot be used on the GPU: {reason}") from None
    if view is None:
        raise ArgumentError(
            f"{name}: expected an array on the GPU (CuPy, PyTorch, JAX, Numba, or anything with "
            f"__cuda_array_interface__ or DLPack), got {type(array).__name__}; cupy.asarray moves a NumPy array there"
        )
    dtype = DTYPES[kind or element_type(array, name)]
    is_untyped = view.dtype.kind == "V" and view.dtype.itemsize == dtype.component_bytes
    return view.view(dtype.storage) if is_untyped and dtype.component.name != dtype.storage else view


def element_type(array: Any, name: str) -> str:
    """Return autotile's name of an array's dtype, such as ``bfloat16``, or raise `ArgumentError`."""
    found = str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
    if found not in DTYPES:
        raise ArgumentError(f"{name} has dtype {found}, expected one of {', '.join(DTYPES)}")
    return found


def new_array(like: Any, shape: tuple[int, ...], element_type: str, *, zeroed: bool) -> Any:
    """Allocate an array on the current device: a PyTorch tensor if ``like`` is one, else a CuPy array.

    The components of vectors are the last axis of ``shape``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        make = torch.zeros if zeroed else torch.empty
        return make(shape, dtype=getattr(torch, DTYPES[element_type].component.name), device=like.device)
    cupy = load_cupy()
    name, same = DTYPES[element_type].component.name, getattr(like, "dtype", None)
    dtype = same if isinstance(same, np.dtype) and same.name == name else DTYPES[element_type].storage
    return (cupy.zeros if zeroed else cupy.empty)(shape, dtype)


@contextmanager
def on_stream(arrays: Sequence[Any], stream: Any = None) -> Iterator[None]:
    """Make a stream the current one of CuPy, and of PyTorch if one of the arrays is a tensor.

    Memory that either library allocates in the context is ordered by that stream. Raise `ArgumentError` if ``stream``
    is not a stream.

    The stream is one of CuPy or PyTorch, or any object that implements the CUDA stream protocol (``__cuda_stream__``).
    None: PyTorch's current stream if one of the arrays is a tensor, as PyTorch orders all work on tensors by it; else
    CuPy's current stream.
    """
    torch = sys.modules.get("torch")
    tensors = (array for array in arrays if torch is not None and isinstance(array, torch.Tensor) and array.is_cuda)
    tensor = next(tensors, None)
    with ExitStack() as entered:
        if stream is not None:
            pointer = _pointer(stream)
            if tensor is not None and torch is not None:  # given the handle 0, ExternalStream would make a new stream
                external, default = torch.cuda.ExternalStream, torch.cuda.default_stream
                own = external(pointer, device=tensor.device) if pointer else default(tensor.device)
                entered.enter_context(torch.cuda.stream(own))
            entered.enter_context(_as_cupy_stream(stream, pointer))
        elif tensor is not None and torch is not None:
            pointer = torch.cuda.current_stream(tensor.device).cuda_stream
            entered.enter_context(_as_cupy_stream(None, pointer))
        yield


def on_handle(pointer: int) -> AbstractContextManager[Any]:
    """Make the stream with a handle CuPy's current one, if it is not."""
    current: Any = load_cupy().cuda.get_current_stream()
    return nullcontext() if current.ptr == pointer else _as_cupy_stream(None, pointer)


def _pointer(stream: Any) -> int:
    for attribute in ("ptr", "cuda_stream"):  # CuPy's and PyTorch's
        found = getattr(stream, attribute, None)
        if isinstance(found, int):
            return found
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise ArgumentError(
        f"stream is of type {type(stream).__name__}, expected a stream of CuPy or PyTorch, or any object with "
        "__cuda_stream__"
    )


def _as_cupy_stream(stream: Any, pointer: int) -> Any:
    cuda = load_cupy().cuda
    if isinstance(stream, cuda.Stream | cuda.ExternalStream):
        return stream
    # The handle in the CUDA stream protocol, with the stream that it is of, which CuPy's then keeps alive.
    return cuda.Stream.from_external(SimpleNamespace(owner=stream, __cuda_stream__=lambda: (0, pointer)))


class CallArrays:
    """Requirements on the arrays of calls, for one problem and configuration."""

    def __init__(self, spec: KernelSpec, problem: Problem, config: Config, device_index: int) -> None:
        sizes, dtype = problem.sizes, problem.dtype
        names = spec.shaped(problem, config).names
        self._spec = spec
        self._problem = problem
        self._shaping = {name: config[name] for name in spec.shaping}
        self._device_index = device_index
        self.shapes = {b.name: b.array_shape(names) for b in spec.buffers}
        self._element_types = {b.name: b.element_type(dtype, sizes) for b in spec.buffers}

    def check(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arrays of a call, and allocate the outputs that were left out, see `complete`.

        Return all arrays in order, and all as CuPy arrays by the names of their buffers.

        Raise `ArgumentError` if there are too few or too many, or one has the wrong shape, dtype, layout or device.
        """
        given = self._given(len(arrays))
        views = {b.name: self._checked(b, array) for b, array in zip(given, arrays, strict=True)}
        full = self.complete(arrays)
        pairs = zip(self._spec.buffers, full, strict=True)
        return full, views | {b.name: self._checked(b, array) for b, array in pairs if b.name not in views}

    def complete(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arrays of a call: the given ones, and new ones of their library for outputs that were left out.

        Leading axes of extent 1 that the given arrays lack are also left out of the new ones. New in-out buffers are
        zeroed. Raise `ArgumentError` if there are too few or too many.
        """
        given = {b.name: array for b, array in zip(self._given(len(arrays)), arrays, strict=True)}
        if len(given) == len(self._spec.buffers):
            return tuple(arrays)
        missing = (len(self.shapes[n]) - len(getattr(array, "shape", self.shapes[n])) for n, array in given.items())
        dropped, full = min(missing, default=0), []
        for buffer in self._spec.buffers:
            if buffer.name in given:
                full.append(given[buffer.name])
                continue
            shape, leading = self.shapes[buffer.name], 0
            while leading < min(dropped, len(shape)) and shape[leading] == 1:
                leading += 1
            kind, zeroed = self._element_types[buffer.name], buffer.access == "inout"
            full.append(new_array(arrays[0], shape[leading:], kind, zeroed=zeroed))
        return tuple(full)

    def array_specs(self, library: ArrayLibrary) -> tuple[ArraySpec, ...]:
        """Return the requirements on a library's arrays on the fast path, with or without leading axes of extent 1."""
        specs = []
        for buffer in self._spec.buffers:
            shapes = [self.shapes[buffer.name]]
            while shapes[-1] and shapes[-1][0] == 1:
                shapes.append(shapes[-1][1:])
            specs.append(library.spec(tuple(shapes), self._element_types[buffer.name]))
        return tuple(specs)

    def _given(self, count: int) -> list[BufferArgument]:
        """Return the buffers of which a call with ``count`` arrays gives one each."""
        buffers = self._spec.buffers
        for left_out in ((), ("out",), ("out", "inout")):
            given = [b for b in buffers if b.access not in left_out]
            if count == len(given):
                return given
        expected = ", ".join(f"{b.name} ({b.access})" for b in buffers)
        raise ArgumentError(f"{self._spec.name} takes the arrays {expected}; got {count}. Outputs may be left out")

    def _checked(self, buffer: BufferArgument, array: Any) -> Any:
        name, shape, element_type = buffer.name, self.shapes[buffer.name], self._element_types[buffer.name]
        view, dtype = as_cupy(array, name, element_type), np.dtype(DTYPES[element_type].storage)
        if view.shape != shape and (1,) * (len(shape) - view.ndim) + view.shape != shape:
            with_values = " ".join(f"{name}={value}" for name, value in self._shaping.items())
            served = f" with {with_values}; see the kernel's attribute shapes" if with_values else ""
            raise ArgumentError(f"{name} has shape {view.shape}, expected {shape} for {self._problem}{served}")
        if view.dtype != dtype:
            given = str(getattr(array, "dtype", view.dtype)).removeprefix("torch.")
            wanted = DTYPES[element_type].component.name
            raise ArgumentError(f"{name} has dtype {given}, expected {wanted}; convert it with astype")
        if not view.flags.c_contiguous:
            raise ArgumentError(f"{name} is not C-contiguous (row-major); pass cupy.ascontiguousarray({name})")
        if view.data.device_id != self._device_index:
            raise ArgumentError(
                f"{name} is on CUDA device {view.data.device_id}, but the kernel is bound to device "
                f"{self._device_index}; call get_best_kernel with device= of the arrays"
            )
        return view
