"""Expected outputs of a problem, in any form that a search-space file states, reference kernels included."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES, Dtype, map_npy
from autotile.cuda.compiler import compile_job
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.driver import constant_copies, copy_constants
from autotile.cuda.function import Function, Module
from autotile.cuda.packing import pack_arguments
from autotile.cuda.reference_solution import ReferenceOutput, ReferenceSolution, checked_output
from autotile.cuda.support import GuardedBuffer, SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.errors import CompileError, DataError, InputError
from autotile.kernel.argument_kind import Workspace
from autotile.kernel.arguments import encode_value
from autotile.kernel.input_files import expected_file
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names, launch_geometry
from autotile.kernel.library import Kernel
from autotile.kernel.sources import signature_fault
from autotile.kernel.spec import KernelSpec, reference_config, reference_spec


class ExpectedOutputs:
    """Computes, or reads, the outputs that a problem's inputs must give.

    Parameters
    ----------
    spec, dtype
        The kernel and the element type of the problem.
    device, support
        The device, and the support kernels of the worker.
    cache
        Cache of compiled kernels.
    source
        The kernel with the source of its reference kernel, if there is one.
    folder
        Folder of the results of a Python function, or of the outputs on which configurations agreed.
    """

    def __init__(
        self,
        spec: KernelSpec,
        dtype: str,
        support: SupportKernels,
        *,
        device: DeviceProperties | None = None,
        cache: CubinCache | None = None,
        source: Kernel | None = None,
        folder: Path | None = None,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._support = support
        self._device = device
        self._cache = cache
        self._source = source
        self._folder = folder
        self._functions: dict[tuple[int, ...], tuple[Function, int]] = {}

    def compute(
        self,
        sizes: Mapping[str, int],
        inputs: Mapping[str, GuardedBuffer],
        scalars: Mapping[str, Any],
        *,
        seed: int,
        check: bool,
    ) -> dict[str, ReferenceOutput]:
        """Return the expected values of each output that has a reference for these inputs.

        Parameters
        ----------
        sizes
            Sizes and flags.
        inputs, scalars
            Contents of the buffers that are read, and decoded scalars.
        seed, check
            What the inputs were made from: their seed, and whether scalars have their check values.

        Raises
        ------
        InputError
            The reference cannot be computed, its shape is not the output's, or its value is not finite.
        ToolchainError
            The reference values of the device and of NumPy differ.
        """
        reference = self._spec.reference
        at = " ".join(f"{name}={value}" for name, value in sizes.items())
        expected: dict[str, ReferenceOutput] = {}
        if reference.outputs:
            expected |= self._of_expressions(sizes, inputs, scalars, at)
        if reference.kernel is not None:
            function, module = self._reference_kernel(sizes)
            run = ReferenceRun(
                self._spec,
                sizes,
                self._dtype,
                function=function,
                module=module,
                device=self._known_device,
                support=self._support,
            )
            place = f"{self._spec.source}: [reference] kernel {reference.kernel.entry} at {at}"
            for name, values in run.outputs(inputs, scalars).items():
                if name not in reference.unchecked:
                    expected[name] = self._checked(name, values, sizes, f"{place}: {name}")
        for name, path in self._files(sizes, seed, check=check).items():
            values = _read_array(path, f"{self._spec.source}: [reference] outputs.{name}")
            expected[name] = self._checked(name, values, sizes, f"{path}: the reference of {name} at {at}")
        load_cupy().get_default_memory_pool().free_all_blocks()
        return expected

    def keep(self, sizes: Mapping[str, int], outputs: Mapping[str, ReferenceOutput], *, seed: int, check: bool) -> None:
        """Keep outputs on which configurations agreed, for a worker that succeeds this one."""
        if self._folder is None:
            return
        for name, output in outputs.items():
            path = expected_file(self._folder, name, sizes, seed, check=check)
            with suppress(OSError):  # without room or the folder, a successor compares anew
                np.save(path, output.values.get(), allow_pickle=False)

    @property
    def _compared(self) -> list[str]:
        """Names of the outputs that are compared."""
        unchecked = self._spec.reference.unchecked
        return [buffer.name for buffer in self._spec.buffers if buffer.is_written and buffer.name not in unchecked]

    def _of_expressions(
        self, sizes: Mapping[str, int], inputs: Mapping[str, GuardedBuffer], scalars: Mapping[str, Any], at: str
    ) -> dict[str, ReferenceOutput]:
        whole = {s.name for s in self._spec.scalars if DTYPES[s.element_type(self._dtype)].is_integer}
        environment: dict[str, Any] = {n: int(v) if n in whole and np.ndim(v) == 0 else v for n, v in scalars.items()}
        environment |= sizes  # a scalar may pass a size, which is exact
        for name, buffer in inputs.items():  # whole numbers stay whole, and exact
            kind = self._element_type(name, sizes)
            environment[name] = buffer.array if kind.component.is_integer else kind.decode(buffer.array)
        solution = ReferenceSolution(environment, self._support)
        return {
            name: solution.output(
                name,
                expression,
                self._shape(name, sizes),
                self._element_type(name, sizes),
                f"{self._spec.source}: [reference] outputs.{name} at {at}",
            )
            for name, expression in self._spec.reference.outputs.items()
        }

    def _files(self, sizes: Mapping[str, int], seed: int, *, check: bool) -> dict[str, Path]:
        """Return the files of the outputs for these inputs: those that the author gives, or a function's results."""
        reference = self._spec.reference
        if reference.function is not None:
            if self._folder is None:
                raise InputError(
                    f"{self._spec.source}: [reference] function {reference.function!r} is a Python function; tune the "
                    "kernel from Python, with autotile.kernel(..., reference=...)"
                )
            folder, written = self._folder, [b.name for b in self._spec.buffers if b.is_written]
            return {name: expected_file(folder, name, sizes, seed, check=check) for name in written}
        if seed or any(sizes[name] != size for name, size in self._spec.sizes.items()):
            return {}  # a file holds the outputs for one set of inputs
        base = Path(self._spec.folder) if self._spec.folder else Path(self._spec.source).parent
        return {name: base / file for name, file in reference.files.items()}

    def _reference_kernel(self, sizes: Mapping[str, int]) -> tuple[Function, int]:
        """Compile and load the reference kernel for a problem; return it with the driver handle of its module."""
        key = tuple(sizes.values())  # macros may depend on all
        if key not in self._functions:
            self._functions[key] = self._loaded(sizes)
        return self._functions[key]

    def _loaded(self, sizes: Mapping[str, int]) -> tuple[Function, int]:
        assert self._source is not None
        assert self._cache is not None
        declared = self._spec.reference.kernel
        assert declared is not None
        spec = reference_spec(self._spec, self._dtype, sizes)
        chosen = reference_config(spec, sizes)
        names = known_names(spec, chosen, sizes, self._known_device)
        kernel = replace(self._source, spec=spec)
        dtype = declared.element_type or self._dtype
        config = {**chosen, **declared.macros(names)}
        job = compile_job(kernel, config, dtype, self._known_device.architecture, sizes)
        try:
            cubin = self._cache.get_or_compile(job)
        except CompileError as error:
            raise InputError(
                f"{self._spec.source}: the reference kernel {declared.entry} does not compile: {error}"
            ) from None
        function = cubin.functions[job.entry]
        fault = signature_fault(spec, spec.steps[0], self._dtype, function.parameter_bytes, kernel.source)
        if fault:
            problem = fault.replace("[arguments]", "arguments of [reference]")
            raise InputError(f"{self._spec.source}: [reference] kernel {declared.entry}: {problem}")
        module = Module(cubin.path)
        return module.function(function.symbol), module.pointer

    @property
    def _known_device(self) -> DeviceProperties:
        assert self._device is not None
        return self._device

    def _checked(self, name: str, values: Any, sizes: Mapping[str, int], place: str) -> ReferenceOutput:
        dtype, shape = self._element_type(name, sizes), self._shape(name, sizes)
        return checked_output(values, name, shape, dtype, place=place, support=self._support)

    def _element_type(self, name: str, sizes: Mapping[str, int]) -> Dtype:
        return DTYPES[self._spec.buffer(name).element_type(self._dtype, sizes)]

    def _shape(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return self._element_type(name, sizes).array_shape(self._spec.buffer(name).extents(sizes))


def _read_array(path: Path, place: str) -> Any:
    """Read an array to the device."""
    try:
        stored = map_npy(path)
    except DataError as error:
        raise InputError(f"{place}: cannot read {path}: {error}") from None
    if stored.dtype.kind not in "biufc":
        raise InputError(f"{place}: {path} does not hold an array of numbers")
    return load_cupy().asarray(stored.astype(stored.dtype.newbyteorder("="), copy=False))


_AGREEMENT = 1e-3
"""Two launches may differ by this share of the larger of an element's magnitude and the output's RMS: sums by atomic
additions depend on their order. A wrong reference differs by more."""


class ReferenceRun:
    """One problem of a reference kernel on the device.

    Parameters
    ----------
    spec, sizes, dtype
        The tuned kernel and the problem.
    function, module
        The reference kernel, and the driver handle of its module.
    device
        Properties of the device, for the launch.
    support
        Support kernels of the worker.
    """

    def __init__(
        self,
        spec: KernelSpec,
        sizes: Mapping[str, int],
        dtype: str,
        *,
        function: Function,
        module: int,
        device: DeviceProperties,
        support: SupportKernels,
    ) -> None:
        self._tuned = spec
        self._spec = reference_spec(spec, dtype, sizes)
        self._sizes = sizes
        self._config = reference_config(self._spec, sizes)
        self._dtype = dtype
        self._function = function
        self._module = module
        self._device = device
        self._support = support

    def outputs(self, inputs: Mapping[str, GuardedBuffer], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Run the kernel twice, and return the values of each output.

        Parameters
        ----------
        inputs
            Contents of the buffers that are read.
        scalars
            Values of the scalars, decoded.

        Returns
        -------
        dict
            Arrays on the device: float64, complex128, or an integer type.

        Raises
        ------
        InputError
            The kernel fails, writes outside its outputs, changes an input, or gives different results in two launches.
        """
        cuda = load_cupy().cuda
        try:
            buffers, given = self._new_buffers(inputs), self._new_buffers(inputs)
            workspaces = self._new_workspaces()
            arguments = self._arguments(buffers, workspaces, scalars)
            pointers = {name: buffer.pointer for name, buffer in buffers.items()}
            copies = constant_copies(self._spec, self._module, self._sizes, self._dtype)
            copy_constants(copies, pointers, cuda.get_current_stream().ptr)
            self._launch(arguments)
            first = self._values(buffers)
            self._check_memory({**buffers, **workspaces}, given)
            for name, workspace in workspaces.items():
                workspace.copy_from(self._new_workspaces()[name])
            for buffer in self._spec.buffers:  # zeros: an element that is not written differs from the first launch
                if buffer.is_initialized:
                    buffers[buffer.name].copy_from(given[buffer.name])
                else:
                    buffers[buffer.name].clear()
            self._launch(arguments)
            second = self._values(buffers)
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            raise InputError(f"{self._place}: the reference kernel failed: {error}") from None
        for name, values in first.items():
            self._check_equal(name, values, second[name])
        return first

    @property
    def _place(self) -> str:
        at = " ".join(f"{name}={value}" for name, value in self._sizes.items())
        return f"{self._spec.source}: [reference] kernel {self._spec.entry} at {at}"

    def _new_buffers(self, inputs: Mapping[str, GuardedBuffer]) -> dict[str, GuardedBuffer]:
        """Return buffers with the inputs, converted to the types of the reference kernel, and poisoned outputs."""
        made: dict[str, GuardedBuffer] = {}
        for buffer in self._spec.buffers:
            kind = self._element_type(buffer.name)
            made[buffer.name] = GuardedBuffer(buffer.extents(self._sizes), kind, self._support)
            if not buffer.is_initialized:
                continue
            given = DTYPES[self._tuned.buffer(buffer.name).element_type(self._dtype, self._sizes)]
            if given == kind:
                made[buffer.name].copy_from(inputs[buffer.name])
            else:  # to double precision, which is exact
                made[buffer.name].array[...] = given.decode(inputs[buffer.name].array)
        return made

    def _new_workspaces(self) -> dict[str, GuardedBuffer]:
        return {w.name: self._new_workspace(w) for w in self._data.workspaces if w.size_bytes}

    def _new_workspace(self, workspace: Workspace) -> GuardedBuffer:
        buffer = GuardedBuffer(workspace.shape, DTYPES[workspace.dtype], self._support)
        if workspace.zeroed:
            buffer.clear()
        return buffer

    @property
    def _data(self) -> LaunchData:
        names = known_names(self._spec, self._config, self._sizes, self._device)
        return LaunchData.of(self._spec, self._dtype, names)

    def _arguments(
        self, buffers: Mapping[str, GuardedBuffer], workspaces: Mapping[str, GuardedBuffer], scalars: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        kinds = {s.name: DTYPES[s.element_type(self._dtype)] for s in self._spec.scalars}
        data = self._data
        plan = LaunchPlan.of(self._spec, self._config, self._sizes, self._device)
        values = {**scalars, **dict(plan.main.scalars)}
        return pack_arguments(
            self._spec,
            data,
            pointers={name: buffer.pointer for name, buffer in buffers.items()},
            scalars={name: encode_value(name, values[name], kind) for name, kind in kinds.items()},
            workspaces={w.name: workspaces[w.name].pointer if w.size_bytes else 0 for w in data.workspaces},
        )

    def _launch(self, arguments: tuple[Any, ...]) -> None:
        geometry = launch_geometry(self._spec, self._config, self._sizes, self._device)
        self._function.opt_in(geometry.dynamic_smem_bytes)
        self._function.launch(geometry.grid, geometry.block, arguments, geometry.dynamic_smem_bytes)
        load_cupy().cuda.runtime.deviceSynchronize()

    def _values(self, buffers: Mapping[str, GuardedBuffer]) -> dict[str, Any]:
        """Return copies of the outputs: integers exactly, other values decoded."""
        written = [buffer.name for buffer in self._spec.buffers if buffer.is_written]
        values: dict[str, Any] = {}
        for name in written:
            kind, array = self._element_type(name), buffers[name].array
            values[name] = array.copy() if kind.is_integer else kind.decode(array)
        return values

    def _check_memory(self, memory: Mapping[str, GuardedBuffer], given: Mapping[str, GuardedBuffer]) -> None:
        for name, buffer in memory.items():
            if words := buffer.broken_guard_words():
                raise InputError(f"{self._place}: the reference kernel wrote {words} words outside {name}")
        for argument in self._spec.buffers:
            if not argument.is_written and memory[argument.name].differs_from(given[argument.name]):
                raise InputError(f"{self._place}: the reference kernel changed its input {argument.name}")

    def _check_equal(self, name: str, first: Any, second: Any) -> None:
        cupy = load_cupy()
        if first.dtype.kind in "biu":
            differ = first != second
        else:
            scale = cupy.sqrt(cupy.mean(cupy.abs(first) ** 2))
            same = (first == second) | (cupy.isnan(first) & cupy.isnan(second))  # not finite: reported later
            near = cupy.abs(first - second) <= _AGREEMENT * cupy.maximum(cupy.abs(first), scale)
            differ = ~(same | near)
        if count := int(cupy.count_nonzero(differ)):
            raise InputError(
                f"{self._place}: {count} of {first.size} elements of {name} differ between two launches of the "
                "reference kernel, or were not written; it must write every element, and the same values each time"
            )

    def _element_type(self, name: str) -> Dtype:
        return DTYPES[self._spec.buffer(name).element_type(self._dtype, self._sizes)]
