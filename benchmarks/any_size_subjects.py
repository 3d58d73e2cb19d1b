"""Operations of any_size.py: their classes, arrays, and the libraries that they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cupy
import numpy as np
from any_size_draw import Sizes, largest

from autotile.kernel.library import is_path
from autotile.kernel.operation import Operation
from autotile.kernel.spec import KernelSpec

Launch = Callable[[], None]

_MAX_EXACT_TERMS = 1 << 24
"""Products of two elements that are held in float64 at a time."""


class Class(NamedTuple):
    """A way of asking for a kernel: element type, and arguments of `get_best_kernel` besides the sizes."""

    dtype: str
    options: Mapping[str, Any]


MATMUL_CLASSES = {
    "bfloat16": Class("bfloat16", {}),
    "bfloat16_no_library": Class("bfloat16", {"library": False}),
    "float16": Class("float16", {}),
    "float32": Class("float32", {}),
    "float32_cuda_cores": Class("float32", {"EMULATE": 0}),
}


class Subject(Protocol):
    """An operation, its arrays and the libraries that it is compared with."""

    name: str
    """Name of the operation, or path of its file."""
    classes: Mapping[str, Class]

    def allocate(self, problems: Sequence[Sizes], dtype: str) -> None:
        """Make the data of the largest of some problems."""

    def arrays(self, sizes: Sizes, dtype: str) -> list[Any]:
        """Return CuPy arrays for the buffers of the operation, of which the last one is written, filled with NaN."""

    def libraries(self, arrays: Sequence[Any], sizes: Sizes, dtype: str) -> dict[str, Launch]:
        """Return the calls that are compared with, by the names of their packages."""

    def exact(self, sizes: Sizes, positions: Any) -> Any | None:
        """Return elements of the exact result in float64, by their positions in the flat output; None if unknown."""

    def reduction(self, sizes: Sizes) -> int:
        """Return the number of terms in an element of the output."""


class Products:
    """Products of matrices, beside cuBLAS through PyTorch and through CuPy.

    The factors of all products of an element type are views of two buffers of random normal numbers.
    """

    name: str = "matmul"
    classes: Mapping[str, Class] = MATMUL_CLASSES

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        self._follow = _StreamFollower(torch)
        self._factors: list[Any] = []

    def allocate(self, problems: Sequence[Sizes], dtype: str) -> None:
        """Make the factors; those of the former element type are released."""
        torch = self._torch
        self._factors = []
        torch.cuda.empty_cache()
        generator = torch.Generator("cuda").manual_seed(0)
        self._factors = [
            torch.randn(count, device="cuda", generator=generator, dtype=getattr(torch, dtype))
            for count in largest(problems)
        ]
        torch.cuda.synchronize()

    def arrays(self, sizes: Sizes, dtype: str) -> list[Any]:
        """Return A, B and C as they are stored."""
        a, b = self._stored(sizes)
        c = self._torch.full((sizes["M"], sizes["N"]), math.nan, device="cuda", dtype=a.dtype)
        self._torch.cuda.synchronize()
        return [_in_cupy(tensor) for tensor in (a, b, c)]

    def libraries(self, arrays: Sequence[Any], sizes: Sizes, dtype: str) -> dict[str, Launch]:
        """Return the product by PyTorch, and by CuPy where CuPy has the element type."""
        torch, (x, y) = self._torch, self._stored(sizes)
        left, right = x.T if sizes["TRANS_A"] else x, y.T if sizes["TRANS_B"] else y
        a, b, c = arrays
        if dtype == "bfloat16":
            out = torch.as_tensor(c.view(np.int16), device="cuda").view(torch.bfloat16)
            return {"torch": self._follow(lambda: torch.mm(left, right, out=out))}
        out = torch.as_tensor(c, device="cuda")
        a, b = a.T if sizes["TRANS_A"] else a, b.T if sizes["TRANS_B"] else b
        return {"torch": self._follow(lambda: torch.mm(left, right, out=out)), "cupy": lambda: cupy.matmul(a, b, out=c)}

    def exact(self, sizes: Sizes, positions: Any) -> Any:
        """Return elements of the product, computed in float64."""
        torch, (x, y) = self._torch, self._stored(sizes)
        left, right = x.T if sizes["TRANS_A"] else x, y.T if sizes["TRANS_B"] else y
        flat = torch.as_tensor(positions, device="cuda")
        found = []
        for part in flat.split(max(1, _MAX_EXACT_TERMS // sizes["K"])):
            rows, columns = part // sizes["N"], part % sizes["N"]
            found.append((left[rows].double() * right[:, columns].T.double()).sum(1))
        torch.cuda.synchronize()
        return cupy.asarray(torch.cat(found))

    def reduction(self, sizes: Sizes) -> int:
        """Return K."""
        return sizes["K"]

    def _stored(self, sizes: Sizes) -> tuple[Any, Any]:
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        shapes = (k, m) if sizes["TRANS_A"] else (m, k), (n, k) if sizes["TRANS_B"] else (k, n)
        a, b = (flat[: math.prod(shape)].view(shape) for flat, shape in zip(self._factors, shapes, strict=True))
        return a, b


class _StreamFollower:
    """Makes PyTorch calls run on CuPy's current stream, where a timer records its events.

    PyTorch's stream is set only when CuPy's has changed: a context manager around each call would take 10 us of the
    host, during which the GPU waits.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._stream = -1

    def __call__(self, call: Callable[[], Any]) -> Launch:
        cuda, current = self._torch.cuda, cupy.cuda.get_current_stream

        def launch() -> None:
            stream = current().ptr
            if stream != self._stream:
                cuda.set_stream(cuda.ExternalStream(stream) if stream else cuda.default_stream())
                self._stream = stream
            call()

        return launch


def _in_cupy(tensor: Any) -> Any:
    """Return a CuPy array on the same memory; bfloat16 as its bits."""
    import torch

    if tensor.dtype is torch.bfloat16:
        return cupy.asarray(tensor.view(torch.int16)).view(np.uint16)
    return cupy.asarray(tensor)


def values(array: Any, dtype: str) -> Any:
    """Return a CuPy array of an element type as float32, or as float64 if it is that."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array if dtype == "float64" else array.astype(np.float32)


class UserOperation:
    """An operation of the user, beside the library that was added to it by `autotile.add_library`.

    Parameters
    ----------
    path
        Path of its file, or its name.
    operation
        The parsed file.
    """

    def __init__(self, path: str, operation: Operation) -> None:
        self.name = str(Path(path).absolute()) if is_path(path) else path  # a relative one would slow each look-up
        self.classes: Mapping[str, Class] = {dtype: Class(dtype, {}) for dtype in operation.dtypes} | {
            f"{dtype}_no_library": Class(dtype, {"library": False}) for dtype in operation.dtypes
        }
        self.flags = operation.flags
        self._operation = operation

    def allocate(self, problems: Sequence[Sizes], dtype: str) -> None:
        """Do nothing: the arrays of each problem are made for it."""

    def arrays(self, sizes: Sizes, dtype: str) -> list[Any]:
        """Return arrays for the buffers of the first kernel: random normal inputs, and outputs."""
        spec, own = self._first(sizes, dtype)
        generator = cupy.random.default_rng(0)
        found = []
        for buffer in spec.buffers:
            shape, kind = buffer.array_shape(own), np.dtype(buffer.element_type(dtype, own))
            written = buffer.access != "in"
            found.append(cupy.full(shape, math.nan, kind) if written else _random(generator, shape, kind))
        return found

    def libraries(self, arrays: Sequence[Any], sizes: Sizes, dtype: str) -> dict[str, Launch]:
        """Return the calls of the libraries that were added."""
        from autotile.serving.operations import libraries_for

        added = {library.name: library.call for library in libraries_for(self._operation) if library.call is not None}
        if not added:
            raise SystemExit(
                f"{self._operation.name} has no library to compare with; add one by autotile.add_library in a file "
                "that --python names"
            )
        return {name: _bound(call, arrays) for name, call in added.items()}

    def exact(self, sizes: Sizes, positions: Any) -> None:
        """Return None: the operation is only compared with its library."""

    def reduction(self, sizes: Sizes) -> int:
        """Return the number of terms that the first kernel's file declares."""
        spec, own = self._first(sizes, self._operation.dtypes[0])
        return int(spec.reference.reduction.evaluate(own)) if spec.reference and spec.reference.reduction else 1

    def array_bytes(self, sizes: Sizes) -> int:
        """Return the size of all arrays of a problem, in bytes."""
        dtype = self._operation.dtypes[0]
        spec, own = self._first(sizes, dtype)
        return sum(
            math.prod(buffer.array_shape(own)) * np.dtype(buffer.element_type(dtype, own)).itemsize
            for buffer in spec.buffers
        )

    def _first(self, sizes: Sizes, dtype: str) -> tuple[KernelSpec, Mapping[str, int]]:
        """Return the first kernel that computes a problem, and the sizes by its names."""
        for member, own in self._operation.fitting(self._operation.resolve(sizes, dtype)):
            return member.load().spec, own
        raise SystemExit(f"no kernel of {self._operation.name} computes {sizes}")


def _bound(call: Callable[..., object], arrays: Sequence[Any]) -> Launch:
    def launch() -> None:
        call(*arrays)

    return launch


def _random(generator: Any, shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
    if kind.kind == "f":
        return generator.standard_normal(shape, dtype=np.float32).astype(kind, copy=False)
    return generator.integers(0, 8, shape).astype(kind)
