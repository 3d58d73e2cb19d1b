"""Expected outputs from a reference kernel, which runs on the inputs that candidates are verified with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES, Dtype
from autotile.cuda.buffers import GuardedBuffer
from autotile.cuda.constants import constant_copies, copy_constants
from autotile.cuda.function import Function
from autotile.cuda.packing import encode_value, pack_arguments
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError
from autotile.kernel.arguments import Workspace
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names, launch_geometry
from autotile.kernel.reference_kernel import reference_config, reference_spec
from autotile.kernel.spec import KernelSpec

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
