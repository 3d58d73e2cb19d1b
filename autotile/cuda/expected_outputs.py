"""The expected outputs of a problem, in whichever form the search-space file states them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES, Dtype
from autotile.cuda.buffers import GuardedBuffer
from autotile.cuda.compiler import compile_job
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.function import Function, Module
from autotile.cuda.reference_run import ReferenceRun
from autotile.cuda.reference_solution import ReferenceOutput, ReferenceSolution, checked_output
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.errors import CompileError, InputError
from autotile.kernel.expected_files import expected_file
from autotile.kernel.launch import known_names
from autotile.kernel.library import Kernel
from autotile.kernel.reference_kernel import reference_config, reference_spec
from autotile.kernel.signature import signature_fault
from autotile.kernel.spec import KernelSpec


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
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{place}: cannot read {path}: {error}; expected a .npy file of one array") from None
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "biufc":
        raise InputError(f"{place}: {path} does not hold an array of numbers")
    return load_cupy().asarray(stored)
