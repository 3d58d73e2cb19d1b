"""Child process that runs under compute-sanitizer: it launches one candidate once per problem, and nothing else.

Each buffer is an allocation of its own, so that out-of-bounds accesses are detected to the byte. Outputs are left
uninitialized, so that reads of them are detected. Results are not verified.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autotile.core.documents import decode_json
from autotile.core.dtypes import DTYPES
from autotile.cuda.driver import constant_copies, copy_constants, live_device
from autotile.cuda.function import LaunchSequence
from autotile.cuda.packing import pack_launches
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError
from autotile.kernel.arguments import BufferArgument, Workspace
from autotile.kernel.inputs import InputMaker, missing_input, with_captured_call
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names, problem_scalars
from autotile.kernel.parser import parse_spec
from autotile.space.limits import check_config
from autotile.workers.jobs import Candidate, SanitizerRequest, Workload, loaded
from autotile.workers.protocol import exit_with_parent, limit_disk_use
from autotile.workers.sanitizer import Notice, format_notice

Notify = Callable[[Notice, str], None]


class Launcher:
    """A loaded candidate that can be launched at any sizes."""

    def __init__(self, workload: Workload, candidate: Candidate) -> None:
        self._workload = workload
        self._config = candidate.config
        self._spec = parse_spec(workload.spec_text, workload.spec_source, folder=workload.spec_folder)
        if workload.captured_call:
            self._spec = with_captured_call(self._spec, Path(workload.captured_call))
        cuda = load_cupy().cuda
        cuda.Device(workload.device_index).use()
        cuda.set_allocator(None)  # no pool
        self._device = live_device(workload.device_index)
        self._functions = loaded(candidate, self._spec)

    def problems(self) -> Iterator[tuple[Mapping[str, int], bool]]:
        """Yield the sizes that the rules allow, and whether the scalars take their values for verification there."""
        ragged = self._spec.ragged_sizes(self._workload.sizes)
        has_ragged = not missing_input(self._spec, ragged, self._workload.dtype)
        for sizes in (*([ragged] if has_ragged else []), *self._workload.verify_sizes):
            if not check_config(self._spec, self._config, sizes, self._device, self._workload.dtype):
                yield sizes, True
        yield self._workload.sizes, False

    def launch(self, sizes: Mapping[str, int], notify: Notify, *, check: bool) -> None:
        """Set up the problem, make one call and wait."""
        functions = self._functions.at(sizes)
        plan = LaunchPlan.of(self._spec, self._config, sizes, self._device)
        dtype = self._workload.dtype
        data = LaunchData.of(self._spec, dtype, known_names(self._spec, self._config, sizes, self._device))
        shaped = self._spec.shaped_sizes(sizes, self._config)
        inputs = InputMaker(self._spec, shaped, dtype, check=check)
        buffers = {buffer.name: _buffer(buffer, shaped, dtype, inputs) for buffer in self._spec.buffers}
        workspaces = {workspace.name: _workspace(workspace) for workspace in data.workspaces if workspace.size_bytes}
        arguments = pack_launches(
            self._spec,
            plan,
            data,
            dtype,
            pointers={name: buffer.data.ptr for name, buffer in buffers.items()},
            scalars=problem_scalars(self._spec, sizes, dtype, check=check),
            workspaces={w.name: workspaces[w.name].data.ptr if w.size_bytes else 0 for w in data.workspaces},
        )
        pointers = {name: buffer.data.ptr for name, buffer in buffers.items()}
        copy_constants(constant_copies(self._spec, functions.module, sizes, dtype), pointers, 0)
        notify(Notice.AT, " ".join(f"{name}={value}" for name, value in sizes.items()))
        LaunchSequence(functions, plan, arguments)()
        load_cupy().cuda.runtime.deviceSynchronize()


def main() -> None:
    """Run the request in the file that the command line names."""
    notify = _open_output()
    limit_disk_use()
    exit_with_parent()
    request = decode_json(Path(sys.argv[1]).read_bytes(), SanitizerRequest)
    signal.alarm(request.max_s)  # ends the process even if its parent was killed
    try:
        _run(request.workload, request.candidate, notify)
    except AutotileError as error:
        _exit(notify, error)
    notify(Notice.DONE, "")


def _run(workload: Workload, candidate: Candidate, notify: Notify) -> None:
    cuda = load_cupy().cuda
    try:
        launcher = Launcher(workload, candidate)
        for sizes, check in launcher.problems():
            launcher.launch(sizes, notify, check=check)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError) as error:
        _exit(notify, error)


def _exit(notify: Notify, error: Exception) -> NoReturn:
    notify(Notice.ERROR, str(error))
    sys.exit(1)


def _buffer(buffer: BufferArgument, sizes: Mapping[str, int], problem_dtype: str, inputs: InputMaker) -> Any:
    shape, dtype = buffer.array_shape(sizes), buffer.element_type(problem_dtype, sizes)
    array = load_cupy().ndarray(shape, DTYPES[dtype].storage)
    if buffer.is_initialized:
        array.set(inputs.stored(buffer.name))
    return array


def _workspace(workspace: Workspace) -> Any:
    cupy = load_cupy()
    make = cupy.zeros if workspace.zeroed else cupy.ndarray
    dtype = DTYPES[workspace.dtype]
    return make(dtype.array_shape(workspace.shape), dtype.storage)


def _open_output() -> Notify:
    """Write notices to standard output, as the sanitizer does; redirect the output of kernels to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)

    def notify(notice: Notice, text: str) -> None:
        os.write(output, format_notice(notice, text))

    return notify


if __name__ == "__main__":
    main()
