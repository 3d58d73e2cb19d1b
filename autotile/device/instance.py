"""One problem laid out on the device: inputs, outputs, the float64 answer, and the verdict on a candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.device.buffers import GuardedBuffer
from autotile.device.inputs import make_input
from autotile.device.scalars import decode_scalar, scalar_value
from autotile.device.support import SupportKernels
from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES, Array, Dtype
from autotile.ground.errors import InputError
from autotile.ground.model import Outcome
from autotile.ground.spec import BufferArgument, KernelSpec, ScalarArgument
from autotile.ground.tolerance import output_tolerance

_HOST_MATMUL_FLOPS = 2**25
"""Larger reference products run on the GPU, in float64 as well."""


class ProblemInstance:
    """A kernel's buffers and scalars at given sizes.

    Everything is made once and serves every candidate.

    Parameters
    ----------
    spec, sizes, dtype
        The problem.
    support
        The worker's own kernels.
    check
        Use the scalars' check values (``beta`` other than 0, say) where they are given.

    Raises
    ------
    InputError
        The reference cannot be computed, has another shape than the output, or is not finite; or a scalar does not fit
        in its type.
    """

    def __init__(
        self, spec: KernelSpec, sizes: Mapping[str, int], dtype: str, support: SupportKernels, *, check: bool
    ) -> None:
        self.sizes = dict(sizes)
        self._spec = spec
        self._dtype = dtype
        self._support = support
        self._scalars = {a.name: scalar_value(a, sizes, dtype, check=check) for a in spec.scalars}
        self._buffers: dict[str, GuardedBuffer] = {}
        self._pristine: dict[str, GuardedBuffer] = {}
        host: dict[str, Array] = {}
        for buffer in spec.buffers:
            self._buffers[buffer.name] = self._new_buffer(buffer)
            if buffer.access != "out":
                host[buffer.name] = stored = make_input(buffer, buffer.extents(self.sizes), buffer.element_type(dtype))
                self._pristine[buffer.name] = self._new_buffer(buffer)
                self._pristine[buffer.name].write(stored)
                self._buffers[buffer.name].write(stored)
        self._reference = self._compute_reference(host)
        self.arguments = tuple(self._argument(argument) for argument in spec.arguments)

    def prepare(self) -> None:
        """Poison what the kernel must write and restore what it updates."""
        for buffer in self._spec.buffers:
            if buffer.access == "out":
                self._buffers[buffer.name].poison()
            elif buffer.access == "inout":
                self._buffers[buffer.name].copy_from(self._pristine[buffer.name])

    def verdict(self) -> tuple[Outcome, str]:
        """Judge what the kernel left behind: guard bands, inputs, outputs."""
        broken = {name: buffer.broken_guard_words() for name, buffer in self._buffers.items()}
        for name, words in broken.items():
            if words:
                return Outcome.OUT_OF_BOUNDS, f"wrote {words} words outside {name} at {self._sizes_text()}"
        for buffer in self._spec.buffers:
            if buffer.access == "in" and self._buffers[buffer.name].differs_from(self._pristine[buffer.name]):
                self._buffers[buffer.name].copy_from(self._pristine[buffer.name])
                return Outcome.WRONG_RESULT, f"changed its input {buffer.name} at {self._sizes_text()}"
        for name, (reference, tolerance, scale) in self._reference.items():
            verdict = self._compare(name, reference, tolerance, scale)
            if verdict:
                return Outcome.WRONG_RESULT, verdict
        return Outcome.OK, ""

    def _compare(self, name: str, reference: Any, tolerance: float, scale: float) -> str:
        output = self._buffers[name]
        dtype = self._element_type(name)
        wrong, first = self._support.compare(
            output.pointer, reference.data.ptr, output.elements, dtype, tolerance=tolerance, scale=scale
        )
        if not wrong:
            return ""
        index = np.unravel_index(first, output.array.shape)
        got = float(dtype.decode(output.array.ravel()[first : first + 1].get())[0])
        want = float(reference.ravel()[first : first + 1].get()[0])
        place = ", ".join(str(int(i)) for i in index)
        return (
            f"{wrong} of {output.elements} elements of {name} are wrong at {self._sizes_text()}: "
            f"{name}[{place}] is {got:.9g}, expected {want:.9g} within {tolerance:.2g} of max(|expected|, {scale:.3g})"
        )

    def _compute_reference(self, stored: Mapping[str, Array]) -> dict[str, tuple[Any, float, float]]:
        """Right answers on the device, each with its tolerance and the scale of its values."""
        cupy = load_cupy()
        environment: dict[str, Any] = dict(self.sizes)
        environment |= {a.name: decode_scalar(a, self._scalars[a.name], self._dtype) for a in self._spec.scalars}
        environment |= {name: self._element_type(name).decode(values) for name, values in stored.items()}
        reduction = int(self._spec.reference.reduction.evaluate(self.sizes))
        answers = {}
        for name, expression in self._spec.reference.outputs.items():
            try:
                answer = np.asarray(expression.evaluate(environment, matmul=self._matmul), dtype=np.float64)
            except (ValueError, TypeError, IndexError, ArithmeticError) as error:
                raise InputError(f"{self._spec.source}: [reference] outputs.{name}: {error}") from None
            shape = self._buffers[name].array.shape
            if answer.shape != shape:
                raise InputError(
                    f"{self._spec.source}: [reference] outputs.{name} has shape {answer.shape}, "
                    f"but the argument {name} has {shape} at {self._sizes_text()}"
                )
            if not np.isfinite(answer).all():
                raise InputError(
                    f"{self._spec.source}: [reference] outputs.{name} is not finite at {self._sizes_text()}; "
                    "choose inputs (init) for which it is"
                )
            inputs = [self._element_type(b.name) for b in self._spec.buffers]
            tolerance = self._spec.reference.tolerance
            if tolerance is None:
                tolerance = output_tolerance(self._element_type(name), inputs, reduction)
            scale = math.sqrt(float(np.mean(np.square(answer)))) if answer.size else 0.0
            answers[name] = (cupy.asarray(answer, order="C"), tolerance, scale)
        return answers

    def _matmul(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        if a.ndim == b.ndim == 2 and 2 * a.shape[0] * a.shape[1] * b.shape[1] > _HOST_MATMUL_FLOPS:
            return self._support.matmul(a, b)
        return a @ b

    def _new_buffer(self, buffer: BufferArgument) -> GuardedBuffer:
        return GuardedBuffer(buffer.extents(self.sizes), self._element_type(buffer.name), self._support)

    def _element_type(self, name: str) -> Dtype:
        buffer = next(b for b in self._spec.buffers if b.name == name)
        return DTYPES[buffer.element_type(self._dtype)]

    def _argument(self, argument: BufferArgument | ScalarArgument) -> Any:
        if isinstance(argument, BufferArgument):
            return np.uint64(self._buffers[argument.name].pointer)
        return self._scalars[argument.name]

    def _sizes_text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.sizes.items())
