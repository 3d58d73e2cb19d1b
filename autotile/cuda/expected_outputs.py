"""Expected outputs of a problem, in any form that a search-space file states, reference kernels included."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES, Dtype, Shape, map_npy
from autotile.core.model import Config, Problem, config_key
from autotile.core.text import plural, sizes_text
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import constant_copies, copy_constants
from autotile.cuda.function import Function, Module
from autotile.cuda.packing import pack_arguments
from autotile.cuda.support import GuardedBuffer, SupportKernels, workspace_buffer
from autotile.cuda.toolchain import load_cupy
from autotile.errors import CompileError, DataError, InputError, ToolchainError
from autotile.kernel.arguments import encode_value
from autotile.kernel.expressions import ArrayExpression, Environment, Matmul, ShapeOnly
from autotile.kernel.inputs import expected_file
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names
from autotile.kernel.library import Kernel
from autotile.kernel.sources import signature_fault
from autotile.kernel.spec import KernelSpec, reference_spec

_SMALL_ELEMENTS = 1 << 20
_SMALL_FLOPS = 1 << 26
"""Up to these sizes, of intermediate arrays too, NumPy computes a reference in a few milliseconds, as a check of the
device."""
_AGREEMENT = 1e-9
"""NumPy and the device add in different orders, so a sum of 1e8 terms differs by about 1e-16 sqrt(1e8) = 1e-12."""


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """Expected values of an output, and their root mean square.

    They are a C-contiguous array on the device: float64, complex128 for a complex output, or the type of an integer
    output, whose values are then exact.
    """

    values: Any
    scale: float


def checked_output(
    values: Any, name: str, shape: Shape, dtype: Dtype, *, place: str, support: SupportKernels
) -> ReferenceOutput:
    """Return expected values in the form in which outputs are compared with them; messages name their ``place``.

    Raise `InputError` if the shape is not the output's, a value is not finite, or it is not one of the output's type.
    """
    cupy = load_cupy()
    if values.shape != shape:
        raise InputError(f"{place} has shape {values.shape}, but the argument {name} has {shape}")
    if values.dtype.kind == "c" and not dtype.is_complex:
        raise InputError(f"{place} is complex, but the argument {name} is {dtype.name}; take real(...) of it")
    if values.dtype.kind in "biu" and dtype.component.is_integer:  # exact
        storage = np.dtype(dtype.component.storage)
        stored = cupy.ascontiguousarray(values, storage)
        if values.dtype != storage:
            low, high = (0, 1) if storage.kind == "b" else (np.iinfo(storage).min, np.iinfo(storage).max)
            least, most = int(values.min()), int(values.max())
            if least < low or most > high:
                raise InputError(f"{place} has values from {least} to {most}, which do not fit in {name}, {dtype.name}")
        return ReferenceOutput(stored, math.sqrt(float((stored.astype(np.float64) ** 2).mean())))
    values = cupy.ascontiguousarray(values, np.complex128 if dtype.is_complex else np.float64)
    parts = values.view(np.float64)
    unfinite, squares = support.summarise(parts.data.ptr, parts.size)
    if unfinite:
        raise InputError(f"{place} is not finite; choose inputs (init) for which it is")
    return ReferenceOutput(values, math.sqrt(squares / values.size))


def expression_output(
    environment: Environment,
    name: str,
    expression: ArrayExpression,
    shape: Shape,
    dtype: Dtype,
    *,
    place: str,
    support: SupportKernels,
) -> ReferenceOutput:
    """Evaluate the array expression of an output on the device, given arrays and numbers by name.

    A small one is also computed by NumPy, and both results must agree. This validates the device's arithmetic on the
    ragged shape before it is relied on for the tuned one. Messages name the ``place`` of the expression and the sizes.
    Raise `InputError` if the expression cannot be evaluated, its shape is not the output's, or its value is not finite;
    `ToolchainError` if the results of the device and of NumPy differ.
    """
    largest_product_flops = 0

    def product(a: Any, b: Any) -> Any:
        nonlocal largest_product_flops
        kinds = a.dtype.kind + b.dtype.kind
        if "c" in kinds or min(a.ndim, b.ndim) < 2:
            return a @ b
        # Whole numbers, or whole and real ones, are multiplied in float64 where that is exact, as it is faster.
        of_whole = "f" not in kinds
        largest = [0 if x.dtype.kind == "f" else max(abs(int(x.max())), abs(int(x.min()))) for x in (a, b)]
        if max(largest) >= 2**53 or (of_whole and a.shape[-1] * largest[0] * largest[1] >= 2**53):
            return a @ b
        found = support.matmul(*(x.astype(np.float64, copy=False) for x in (a, b)))
        largest_product_flops = max(largest_product_flops, 2 * found.size * a.shape[-1])
        return found.astype(np.int64) if of_whole else found

    def of_numpy() -> Any:
        on_host = {name: value.get() if np.ndim(value) else value for name, value in environment.items()}
        return _guarded(expression, on_host, np.matmul, place)

    cupy = load_cupy()
    try:
        values = cupy.asarray(_guarded(expression, environment, product, place))
    except (cupy.cuda.compiler.CompileException, cupy.cuda.memory.OutOfMemoryError):  # NumPy can do without
        values = cupy.asarray(of_numpy())
    output = checked_output(values, name, shape, dtype, place=place, support=support)
    shapes = {name: ShapeOnly(value.shape) if np.ndim(value) else value for name, value in environment.items()}
    largest = getattr(expression.evaluate(shapes), "largest", 1)
    if largest <= _SMALL_ELEMENTS and largest_product_flops <= _SMALL_FLOPS:
        found, expected = output.values.get(), np.asarray(of_numpy())
        if found.dtype.kind in "biu" and expected.dtype.kind in "biu":
            error = found != expected
        else:
            error = np.abs(found - expected) > _AGREEMENT * np.maximum(np.abs(expected), output.scale)
        if error.any():
            raise ToolchainError(
                f"{place}: {np.count_nonzero(error)} of {found.size} values differ between the device and NumPy; "
                "see `autotile doctor`"
            )
    return output


def _guarded(expression: ArrayExpression, environment: Environment, matmul: Matmul, place: str) -> Any:
    try:
        return expression.evaluate(environment, matmul)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise InputError(f"{place}: {error}") from None


_MAX_KEPT = 6
"""Number of results that wait for another that agrees; the oldest gives way."""

Outputs = Mapping[str, ReferenceOutput]


Waiting = list[tuple[Hashable, Outputs]]
"""Launches and results of configurations for one set of inputs, until two of different launches agree."""


def agreed_outputs(
    waiting: Waiting, launch: Hashable, agrees: Callable[[Outputs], bool], outputs: Callable[[], Outputs]
) -> Any:
    """Compare the result of a configuration with those that wait.

    Return the outputs with which it agrees, from a configuration of another launch; None if it waits now.
    """
    for other, found in waiting:
        if agrees(found):
            if other == launch:
                return None
            waiting.clear()
            return found
    waiting.append((launch, outputs()))
    del waiting[:-_MAX_KEPT]
    return None


def launch_key(spec: KernelSpec, config: Config, plan: LaunchPlan) -> Hashable:
    """Return the identity of a configuration's launches: blocks and grids, or all if these are always equal.

    Two configurations of one launch may share an error, such as a loop that ends too early.
    """
    extents = [extent for step in spec.steps for extent in (*step.launch.block, *step.launch.grid)]
    if all(extent.names.isdisjoint(spec.default) for extent in extents):
        return config_key(config)
    return tuple((launch.step, launch.geometry.grid, launch.geometry.block) for launch in plan.launches)


@dataclass(eq=False)
class ExpectedOutputs:
    """Computes, or reads, the outputs that a problem's inputs must give.

    ``source`` is the kernel with the source of its reference kernel, if there is one. ``folder`` holds the results of a
    Python function, or the outputs on which configurations agreed.
    """

    spec: KernelSpec
    support: SupportKernels
    device: DeviceProperties | None = None
    cache: CubinCache | None = None
    source: Kernel | None = None
    folder: Path | None = None
    _functions: dict[tuple[int, ...], tuple[Function, int]] = field(default_factory=dict)

    def compute(
        self, problem: Problem, inputs: Mapping[str, GuardedBuffer], scalars: Environment, *, seed: int, check: bool
    ) -> dict[str, ReferenceOutput]:
        """Return the expected values of each output that has a reference for these inputs.

        The inputs were made from ``seed``, with the check values of scalars if ``check``. Raise `InputError` if the
        reference cannot be computed, its shape is not the output's, or its value is not finite; `ToolchainError` if the
        reference values of the device and of NumPy differ.
        """
        spec, reference = self.spec, self.spec.reference
        at = sizes_text(problem.sizes)
        expected: dict[str, ReferenceOutput] = {}
        if reference.outputs:
            expected |= self._of_expressions(problem, inputs, scalars, at)
        if reference.kernel is not None:
            place = f"{spec.source}: [reference] kernel {reference.kernel.entry} at {at}"
            for name, values in self._of_kernel(problem, inputs, scalars, place).items():
                if name not in reference.unchecked:
                    expected[name] = self._checked(name, values, problem, f"{place}: {name}")
        for name, path in self._files(problem, seed, check=check).items():
            place = f"{spec.source}: [reference] outputs.{name}"
            try:
                if declared := reference.files.get(name):
                    declared.check_hash(name)
                stored = map_npy(path)
            except DataError as error:
                raise InputError(f"{place}: cannot read {path}: {error}") from None
            if stored.dtype.kind not in "biufc":
                raise InputError(f"{place}: {path} does not hold an array of numbers")
            values = load_cupy().asarray(stored.astype(stored.dtype.newbyteorder("="), copy=False))
            expected[name] = self._checked(name, values, problem, f"{path}: the reference of {name} at {at}")
        load_cupy().get_default_memory_pool().free_all_blocks()
        return expected

    def _of_expressions(
        self, problem: Problem, inputs: Mapping[str, GuardedBuffer], scalars: Environment, at: str
    ) -> dict[str, ReferenceOutput]:
        """Return the values of the expressions; the decoded inputs are free again when this returns."""
        spec, expected = self.spec, dict[str, ReferenceOutput]()
        names = problem.names
        whole = {s.name for s in spec.scalars if DTYPES[s.element_type(problem.dtype)].is_integer}
        environment: dict[str, Any] = {
            name: int(value) if name in whole and np.ndim(value) == 0 else value for name, value in scalars.items()
        }
        environment |= names  # a scalar may pass a size, which is exact
        for name, buffer in inputs.items():  # whole numbers stay whole, and exact
            kind = self._element_type(name, problem)
            environment[name] = buffer.array if kind.component.is_integer else kind.decode(buffer.array)
        for name, expression in spec.reference.outputs.items():
            place = f"{spec.source}: [reference] outputs.{name} at {at}"
            of = name, expression, spec.buffer(name).array_shape(names), self._element_type(name, problem)
            expected[name] = expression_output(environment, *of, place=place, support=self.support)
        return expected

    def keep(self, problem: Problem, outputs: Mapping[str, ReferenceOutput], *, seed: int, check: bool) -> None:
        """Keep outputs on which configurations agreed, for a worker that succeeds this one."""
        if self.folder is None:
            return
        for name, output in outputs.items():
            path = expected_file(self.folder, name, problem.sizes, seed, check=check)
            with suppress(OSError):  # without room or the folder, a successor compares anew
                np.save(path, output.values.get(), allow_pickle=False)

    def _files(self, problem: Problem, seed: int, *, check: bool) -> dict[str, Path]:
        """Return the files of the outputs for these inputs: those that the author gives, or a function's results."""
        reference = self.spec.reference
        if reference.function is not None:
            if self.folder is None:
                raise InputError(
                    f"{self.spec.source}: [reference] function {reference.function!r} is a Python function; tune the "
                    "kernel from Python, with autotile.kernel(..., reference=...)"
                )
            written = [buffer.name for buffer in self.spec.buffers if buffer.is_written]
            return {name: expected_file(self.folder, name, problem.sizes, seed, check=check) for name in written}
        if seed or any(problem.sizes[name] != size for name, size in self.spec.sizes.items()):
            return {}  # a file holds the outputs for one set of inputs
        return {name: Path(file.path) for name, file in reference.files.items()}

    def _of_kernel(
        self, problem: Problem, inputs: Mapping[str, GuardedBuffer], scalars: Environment, place: str
    ) -> dict[str, Any]:
        """Run the reference kernel, which is compiled once for a problem, twice, and return the values of each output.

        They are arrays on the device: float64, complex128, or an integer type. Raise `InputError` if the kernel fails,
        writes outside its outputs, changes an input, or gives different results in two launches.
        """
        source, cache, device, declared = self.source, self.cache, self.device, self.spec.reference.kernel
        assert source is not None
        assert cache is not None
        assert device is not None
        assert declared is not None
        spec = reference_spec(self.spec, problem)
        config = {name: problem.sizes.get(name, value) for name, value in spec.default.items()}
        names = known_names(spec, config, problem, device)
        key = tuple(problem.sizes.values())  # macros may depend on all
        if key not in self._functions:
            kernel = replace(source, spec=spec)
            macros = {**config, **declared.macros(names)}
            in_its_type = problem if declared.element_type is None else spec.at(problem.sizes, declared.element_type)
            job = compile_job(kernel, macros, in_its_type, device.architecture, may_redefine=True)
            try:
                cubin = cache.get_or_compile(job)
            except CompileError as error:
                raise InputError(
                    f"{self.spec.source}: the reference kernel {declared.entry} does not compile: {error}"
                ) from None
            compiled = cubin.functions[job.entry]
            fault = signature_fault(spec, spec.steps[0], problem.dtype, compiled.parameter_bytes, kernel.source)
            if fault:
                fault = fault.replace("[arguments]", "arguments of [reference]")
                raise InputError(f"{self.spec.source}: [reference] kernel {declared.entry}: {fault}")
            module = Module(cubin.path)
            self._functions[key] = module.function(compiled.symbol), module.pointer
        function, module_pointer = self._functions[key]
        data = LaunchData.of(spec, config, problem, device)
        plan = LaunchPlan.of(spec, config, problem, device)
        geometry = plan.main.geometry
        kinds = {s.name: DTYPES[s.element_type(problem.dtype)] for s in spec.scalars}
        values = {**scalars, **dict(plan.main.scalars)}
        types = {buffer.name: DTYPES[buffer.element_type(problem.dtype, names)] for buffer in spec.buffers}
        written = [buffer.name for buffer in spec.buffers if buffer.is_written]

        def new_buffers() -> dict[str, GuardedBuffer]:
            """Return buffers with the inputs, converted to the types of the reference kernel, and poisoned outputs."""
            made: dict[str, GuardedBuffer] = {}
            for buffer in spec.buffers:
                kind = types[buffer.name]
                made[buffer.name] = GuardedBuffer(buffer.extents(names), kind, self.support)
                if buffer.is_initialized:
                    given = self._element_type(buffer.name, problem)
                    if given == kind:
                        made[buffer.name].copy_from(inputs[buffer.name])
                    else:  # to double precision, which is exact
                        made[buffer.name].array[...] = given.decode(inputs[buffer.name].array)
            return made

        def new_workspaces() -> dict[str, GuardedBuffer]:
            return {w.name: workspace_buffer(w, self.support) for w in data.workspaces if w.size_bytes}

        def launch() -> dict[str, Any]:
            """Launch, wait, and return copies of the outputs: integers exactly, other values decoded."""
            function.opt_in(geometry.dynamic_smem_bytes)
            function.launch(geometry.grid, geometry.block, arguments, geometry.dynamic_smem_bytes)
            cuda.runtime.deviceSynchronize()
            arrays = {name: buffers[name].array for name in written}
            return {
                name: array.copy() if types[name].is_integer else types[name].decode(array)
                for name, array in arrays.items()
            }

        cuda = load_cupy().cuda
        try:
            buffers, given = new_buffers(), new_buffers()
            workspaces = new_workspaces()
            guarded, read = {**buffers, **workspaces}, [b.name for b in spec.buffers if not b.is_written]
            addresses = {name: buffer.pointer for name, buffer in guarded.items()}
            encoded = {name: encode_value(name, values[name], kind) for name, kind in kinds.items()}
            arguments = pack_arguments(spec, data, addresses=addresses, scalars=encoded)
            copies = constant_copies(spec, module_pointer, problem)
            copy_constants(copies, addresses, cuda.get_current_stream().ptr)
            first = launch()
            changes = (partial(buffers[name].count_unlike, given[name]) for name in read)
            counts = self.support.results([*(one.count_broken for one in guarded.values()), *changes])[:, 0]
            for name, words in zip(guarded, counts, strict=False):
                if words:
                    raise InputError(f"{place}: the reference kernel wrote {plural(words, 'word')} outside {name}")
            for name, words in zip(read, counts[len(guarded) :], strict=True):
                if words:
                    raise InputError(f"{place}: the reference kernel changed its input {name}")
            for name, fresh in new_workspaces().items():
                workspaces[name].copy_from(fresh)
            for argument in spec.buffers:  # zeros: an element that is not written differs from the first launch
                if argument.is_initialized:
                    buffers[argument.name].copy_from(given[argument.name])
                else:
                    buffers[argument.name].clear()
            second = launch()
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            raise InputError(f"{place}: the reference kernel failed: {error}") from None
        for name, found in first.items():
            _check_repeated(found, second[name], place, name)
        return first

    def _checked(self, name: str, values: Any, problem: Problem, place: str) -> ReferenceOutput:
        dtype, shape = self._element_type(name, problem), self.spec.buffer(name).array_shape(problem.names)
        return checked_output(values, name, shape, dtype, place=place, support=self.support)

    def _element_type(self, name: str, problem: Problem) -> Dtype:
        return DTYPES[self.spec.buffer(name).element_type(problem.dtype, problem.sizes)]


_REPEATED = 1e-3
"""Two launches may differ by this share of the larger of an element's magnitude and the output's RMS: sums by atomic
additions depend on their order. A wrong reference differs by more."""


def _check_repeated(first: Any, second: Any, place: str, name: str) -> None:
    cupy = load_cupy()
    if first.dtype.kind in "biu":
        differ = first != second
    else:
        scale = cupy.sqrt(cupy.mean(cupy.abs(first) ** 2))
        same = (first == second) | (cupy.isnan(first) & cupy.isnan(second))  # not finite: reported later
        near = cupy.abs(first - second) <= _REPEATED * cupy.maximum(cupy.abs(first), scale)
        differ = ~(same | near)
    if count := int(cupy.count_nonzero(differ)):
        raise InputError(
            f"{place}: {count} of {first.size} elements of {name} differ between two launches of the "
            "reference kernel, or were not written; it must write every element, and the same values each time"
        )
