"""References that are Python functions: a child process calls them, and their results go to files.

The child is forked, so that it has the function without pickling it, and a function that hangs or crashes ends the
child alone. CUDA cannot be used in the child of a process that has initialized it; there, a function over CuPy arrays
is called in the process itself, without a time limit.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError
from autotile.kernel.input_files import expected_file
from autotile.kernel.inputs import InputMaker
from autotile.kernel.python_arguments import ReferenceFunction, arranged_outputs, call_with
from autotile.kernel.spec import KernelSpec

TIME_LIMIT_S = 600.0
"""Limit of one function over all sets of inputs."""
_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``, cuda.h."""


class InputSet(NamedTuple):
    """One set of inputs: sizes with flags, the seed, and whether scalars have their check values."""

    sizes: Mapping[str, int]
    seed: int
    check: bool


class ExpectedFolder:
    """A private folder with the results of a function for each of several sets of inputs.

    Parameters
    ----------
    spec, dtype
        The kernel, and the element type of the problem.
    function
        The reference; None for an empty folder.
    inputs
        Sets of inputs.
    limit_s
        Time after which the child is killed, in seconds.

    Raises
    ------
    InputError
        The function raises, takes too long, crashes, or returns something else than the outputs.
    """

    def __init__(
        self,
        spec: KernelSpec,
        dtype: str,
        function: ReferenceFunction | None = None,
        inputs: Sequence[InputSet] = (),
        limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self.path = Path(tempfile.mkdtemp(prefix="autotile-reference-"))
        if function is None:
            return
        self._function = function
        try:
            if function.library == "cupy" and _is_cuda_initialized():
                self._write_all(inputs)
            else:
                self._write_in_child(inputs, limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Delete the folder; closing twice is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_in_child(self, inputs: Sequence[InputSet], limit_s: float) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child runs one function only
            child = os.fork()
        if child == 0:
            _end_child(writer, lambda: self._write_all(inputs))
        os.close(writer)
        try:
            answer = _read(reader, limit_s)
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        place = f"{self._spec.source}: [reference] function {self._spec.reference.function}"
        if answer is None:
            raise InputError(f"{place} did not return within {limit_s:g} s; make it faster, or the problem smaller")
        if not answer:
            raise InputError(f"{place} ended its process, with status {os.waitstatus_to_exitcode(status)}")
        if error := json.loads(answer)["error"]:
            raise InputError(error)

    def _write_all(self, inputs: Sequence[InputSet]) -> None:
        for one in inputs:
            self._write(one)

    def _write(self, inputs: InputSet) -> None:
        """Call the function for a set of inputs, and write its results."""
        at = " ".join(f"{name}={value}" for name, value in inputs.sizes.items())
        place = f"{self._spec.source}: [reference] function {self._spec.reference.function} at {at}"
        library: Any = load_cupy() if self._function.library == "cupy" else np
        maker = InputMaker(self._spec, inputs.sizes, self._dtype, seed=inputs.seed, check=inputs.check)
        values: dict[str, Any] = {}
        for buffer in self._spec.buffers:
            if buffer.is_read:
                kind = DTYPES[buffer.element_type(self._dtype, inputs.sizes)]
                stored = maker.stored(buffer.name)
                values[buffer.name] = library.asarray(stored if kind.component.is_integer else kind.decode(stored))
        scalars = {s.name: s.given(inputs.sizes, check=inputs.check) for s in self._spec.scalars if s.is_operand}
        try:
            returned = call_with(self._function.call, values, scalars, inputs.sizes)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        except Exception as error:
            raise InputError(f"{place} raises {_described(error)}") from None
        unchecked = self._spec.reference.unchecked
        written = [buffer for buffer in self._spec.buffers if buffer.is_written and buffer.name not in unchecked]
        try:
            outputs = arranged_outputs(returned, [buffer.name for buffer in written])
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        for buffer in written:
            found = outputs[buffer.name]
            array = np.asarray(found.get() if hasattr(found, "__cuda_array_interface__") else found)
            shape = buffer.array_shape(inputs.sizes)
            if array.shape != shape or array.dtype.kind not in "biufc":
                raise InputError(
                    f"{place}: it returns an array of shape {array.shape} and type {array.dtype} for {buffer.name}, "
                    f"expected numbers of shape {shape}"
                )
            file = expected_file(self.path, buffer.name, inputs.sizes, inputs.seed, check=inputs.check)
            np.save(file, array, allow_pickle=False)


def shaped_problems(spec: KernelSpec, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return sizes with each combination of the parameters that shapes and references depend on.

    Combinations that give no shape are left out; no configuration runs with them.

    Raises
    ------
    InputError
        There are too many.
    """
    values = [next(p.values for p in spec.parameters if p.name == name) for name in spec.shaping]
    if math.prod(map(len, values)) > _MAX_SHAPES:
        raise InputError(
            f"{spec.source}: shapes depend on {', '.join(spec.shaping)}, in more than {_MAX_SHAPES} combinations, and "
            "the function would be called for each; use expressions or a reference kernel"
        )
    found = [{**sizes, **dict(zip(spec.shaping, map(int, row), strict=True))} for row in itertools.product(*values)]
    return [names for names in found if all(min(b.extents(names)) > 0 for b in spec.buffers)]


_MAX_SHAPES = 64


def _end_child(writer: int, run: Any) -> None:
    """Run a function in the forked child, write its error to a pipe, and end the process."""
    answer = {"error": ""}
    try:
        run()
    except InputError as error:
        answer["error"] = str(error)
    except BaseException as error:
        answer["error"] = f"the reference cannot be computed: {_described(error)}"
    try:
        os.write(writer, json.dumps(answer).encode()[: select.PIPE_BUF * 8])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _read(reader: int, limit_s: float) -> bytes | None:
    """Read all that the child writes; None if it takes too long."""
    ready, _, _ = select.select([reader], [], [], limit_s)
    if not ready:
        return None
    return os.read(reader, select.PIPE_BUF * 8)


def _described(error: BaseException) -> str:
    """Return an exception with the line of the user's code that raised it."""
    own = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    text = f"{type(error).__name__}: {error}"
    if not frames:
        return text
    user = frames[0]
    for frame in frames:  # the innermost line of the file in which the function is
        if frame.filename == frames[0].filename:
            user = frame
    line = f": {user.line}" if user.line else ""
    return f"{text}, in {user.name}, {user.filename}, line {user.lineno}{line}"


def _is_cuda_initialized() -> bool:
    """Return whether CUDA is initialized in this process, by whichever library."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    try:
        status, _ = driver.cuCtxGetCurrent()
    except RuntimeError:  # there is no driver
        return False
    return int(status) != _NOT_INITIALIZED
