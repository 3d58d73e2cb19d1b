"""References that are Python functions: a child process calls them, and their results go to files.

The child is forked, so that it has the function without pickling it, and a function that hangs or crashes ends the
child alone. CUDA cannot be used in the child of a process that has initialized it; there, a function over CuPy arrays
is called in the process itself, without a time limit.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from autotile.core.documents import decode_json, encode_json
from autotile.core.dtypes import DTYPES
from autotile.core.model import Problem, Sizes
from autotile.core.text import shown_text, sizes_text
from autotile.cuda.toolchain import load_cupy
from autotile.errors import DataError, InputError
from autotile.kernel.inputs import expected_file, input_maker
from autotile.kernel.python_kernel import ReferenceFunction, arranged_outputs, call_with
from autotile.kernel.spec import KernelSpec
from autotile.workers.child import is_running

TIME_LIMIT_S = 600.0
"""Limit of one function over all sets of inputs."""
_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``, cuda.h."""

_GRACE_S = 0.5
"""Time between the end of a child's answer and that of the process, in seconds."""


DrawnInputs = tuple[Sizes, int, bool]
"""One set of inputs: sizes with flags, the seed, and whether scalars have their check values."""


class ExpectedFolder:
    """A private folder with the results of a function for each of several sets of inputs; without one, it is empty.

    The child that calls the function runs on, set after set, until it ends or ``limit_s`` is over; `wait` waits for it.
    Raise `InputError` if there is no room for the folder, or no child can be made.
    """

    def __init__(
        self,
        spec: KernelSpec,
        dtype: str,
        function: ReferenceFunction | None = None,
        inputs: Sequence[DrawnInputs] = (),
        limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._process: int | None = None
        """The child until it has ended."""
        self._seeds: list[int] = []
        """Of the sets without results, the next first."""
        self._fault = ""
        self._place = f"{spec.source}: [reference] function {spec.reference.function}"
        self._sharing = threading.Lock()
        """Held by the thread that waits for the child."""
        try:
            self.path = Path(tempfile.mkdtemp(prefix="autotile-reference-"))
        except OSError as error:
            raise InputError(f"there is no room for expected outputs: {error.strerror}; set TMPDIR") from None
        if function is None:
            return
        self._call, self._library = function
        try:
            if self._library == "cupy" and _is_cuda_initialized():
                for one in inputs:
                    self._write(*one)
            else:
                self._begin(inputs, limit_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether nothing is to be waited for."""
        return self._process is None and not self._fault

    def wait(self, seed: int | None = None) -> None:
        """Wait for the results of the sets of inputs of a seed, or of all.

        Raise `InputError` if the function raises, takes too long, crashes, or returns something else than the outputs.
        """
        with self._sharing:
            while not self._fault and (self._seeds if seed is None else seed in self._seeds):
                self._fault = self._next_fault()
                del self._seeds[0]
            if self._process is not None and (self._fault or not self._seeds):
                self._end()
        if self._fault:
            raise InputError(self._fault)

    def close(self) -> None:
        """End the child, and delete the folder; closing twice is harmless."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with self._sharing:
                if self._process is not None:
                    self._fault = self._fault or f"{self._place} was ended"
                    self._end()
        shutil.rmtree(self.path, ignore_errors=True)

    def _begin(self, inputs: Sequence[DrawnInputs], limit_s: float) -> None:
        _flush()
        try:
            self._answers, writer = os.pipe()
            try:
                self._process = _fork(partial(self._answer, inputs, writer))
            except BaseException:
                os.close(self._answers)
                raise
            finally:
                os.close(writer)
        except OSError as error:
            reason = error.strerror
            raise InputError(f"{self._place} cannot be called, as there is no process for it: {reason}") from None
        self._seeds = [seed for _, seed, _ in inputs]
        self._limit_s, self._deadline_s = limit_s, time.monotonic() + limit_s
        self._unread = b""

    def _answer(self, inputs: Sequence[DrawnInputs], writer: int) -> NoReturn:
        """Call the function in the child for each set of inputs, and end it; an answer is a line of JSON in a pipe.

        It is empty, or the error that ends the calls. The caller handles what is raised here.
        """

        def answer(error: str) -> None:
            _flush()
            os.write(writer, encode_json(shown_text(error[:_MAX_ERROR], lines=True)).encode() + b"\n")

        try:
            try:
                for one in inputs:
                    self._write(*one)
                    answer("")
            except InputError as fault:
                answer(_text(fault))
            except BaseException as fault:
                answer(f"the reference cannot be computed: {_described(fault)}")
        except BaseException:  # even the description of an exception may raise another
            os.write(writer, b'"the reference cannot be computed, and its exception cannot be described"\n')
        os._exit(0)

    def _next_fault(self) -> str:
        """Wait for the answer to the next set, and return what is wrong with it; empty if nothing is."""
        place, process = self._place, self._process
        assert process is not None
        poll = select.poll()  # not select: a program that embeds the tuner may have more than 1,024 files open
        poll.register(self._answers, select.POLLIN)
        while b"\n" not in self._unread and len(self._unread) < _MAX_ANSWER:
            left_s = self._deadline_s - time.monotonic()
            has_ended = not is_running(process)  # processes that it has started may keep the pipe open
            is_ready = poll.poll(0.0 if has_ended else 1e3 * min(_LOOK_S, max(left_s, 0.0)))
            part = os.read(self._answers, _MAX_ANSWER) if is_ready else b""
            if not part and (is_ready or has_ended):
                break
            if not part and left_s <= 0:
                return f"{place} did not return within {self._limit_s:g} s; make it faster, or the problem smaller"
            self._unread += part
        answer, _, self._unread = self._unread.partition(b"\n")
        if not answer:
            status = self._end()
            how = f"with status {os.waitstatus_to_exitcode(status)}" if status is not None else "or closed its files"
            return f"{place} ended its process, {how}"
        try:
            return decode_json(answer, str)
        except DataError:
            return f"{place}: its process sent a damaged answer; it must not write to files that it has not opened"

    def _end(self) -> int | None:
        """Kill the child if it still runs; else return its status, None if another thread of the program has it."""
        process, self._process = self._process, None
        assert process is not None
        os.close(self._answers)
        end = time.monotonic() + _GRACE_S
        while (runs := is_running(process)) and time.monotonic() < end:
            time.sleep(0.001)
        if runs:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            _, status = os.waitpid(process, 0)
        except ChildProcessError:
            return None
        return status if not runs else None

    def _write(self, sizes: Sizes, seed: int, check: bool) -> None:
        function = self._spec.reference.function
        place = f"{self._spec.source}: [reference] function {function} at {sizes_text(sizes)}"
        library: Any = load_cupy() if self._library == "cupy" else np
        problem = self._spec.at(sizes, self._dtype)
        maker = input_maker(self._spec, problem, seed=seed, check=check)
        values: dict[str, Any] = {}
        for buffer in self._spec.buffers:
            if buffer.is_read:
                kind = DTYPES[buffer.element_type(self._dtype, sizes)]
                stored = maker(buffer.name)
                values[buffer.name] = library.asarray(stored if kind.component.is_integer else kind.decode(stored))
        names = problem.names
        scalars = {s.name: s.given(names, check=check) for s in self._spec.scalars if s.is_operand}
        unchecked = self._spec.reference.unchecked
        written = [buffer for buffer in self._spec.buffers if buffer.is_written and buffer.name not in unchecked]
        try:
            returned = call_with(self._call, values, scalars, sizes)
            outputs = arranged_outputs(returned, [buffer.name for buffer in written])
            for buffer in written:
                found = outputs[buffer.name]
                array = np.asarray(found.get() if hasattr(found, "__cuda_array_interface__") else found)
                if array.dtype.kind in "fc" and array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
                    array = array.astype(np.float64 if array.dtype.kind == "f" else np.complex128)
                shape = buffer.array_shape(names)
                if array.shape != shape or array.dtype.kind not in "biufc":
                    raise InputError(
                        f"it returns an array of shape {array.shape} and type {array.dtype} for {buffer.name}, "
                        f"expected numbers of shape {shape}"
                    )
                file = expected_file(self.path, buffer.name, sizes, seed, check=check)
                try:
                    np.save(file, array, allow_pickle=False)
                except OSError as error:
                    reason = error.strerror or "the file system is full"
                    raise InputError(f"its results cannot be written to {self.path}: {reason}") from None
        except InputError as error:
            raise InputError(f"{place}: {_text(error)}") from None
        except (Exception, SystemExit) as error:
            raise InputError(f"{place} raises {_described(error)}") from None


def shaped_problems(spec: KernelSpec, problem: Problem) -> list[dict[str, int]]:
    """Return the sizes of a problem with each combination of the parameters that shapes and references depend on.

    Combinations that give no shape are left out; no configuration runs with them. Too many are an `InputError`.
    """
    values = [next(p.values for p in spec.parameters if p.name == name) for name in spec.shaping]
    if math.prod(map(len, values)) > _MAX_SHAPES:
        raise InputError(
            f"{spec.source}: shapes depend on {', '.join(spec.shaping)}, in more than {_MAX_SHAPES} combinations, and "
            "the function would be called for each; use expressions or a reference kernel"
        )
    rows = (zip(spec.shaping, map(int, row), strict=True) for row in itertools.product(*values))
    found = [{**problem.sizes, **dict(row)} for row in rows]
    return [one for one in found if all(min(b.extents(problem.at(one).names)) > 0 for b in spec.buffers)]


_MAX_SHAPES = 64


def _fork(run: Callable[[], NoReturn]) -> int:
    """Fork a child that calls a function; return its id.

    The child must never return into the program that called autotile. No handler of a signal may interrupt it before
    it is within a ``finally``: signals are blocked until their handlers are removed.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork with threads, of Python and JAX: the child runs one function only
            process = os.fork()
            if process == 0:
                try:
                    for number in signal.valid_signals():
                        if callable(signal.getsignal(number)):
                            with suppress(ValueError):  # in an interpreter other than the first
                                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                    run()
                finally:
                    os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


_MAX_ERROR = 4000
"""Characters of an error; more is cut, before it becomes JSON."""
_MAX_ANSWER = 64 << 10
_LOOK_S = 0.2
"""Interval at which the parent looks whether the child has ended, whoever else holds its files."""


def _text(error: BaseException) -> str:
    """Return the text of an exception, whose own method may fail."""
    try:
        return str(error)
    except (Exception, SystemExit):
        return "(its text cannot be made)"


def _described(error: BaseException) -> str:
    """Return an exception with the line of the user's code that raised it."""
    own = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    text = f"{type(error).__name__}: {_text(error)[:_MAX_TEXT]}"
    if not frames:
        return text
    # the innermost line of the file in which the function is
    user = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    line = f": {user.line}" if user.line else ""
    return f"{text}, in {user.name}, {user.filename}, line {user.lineno}{line}"


_MAX_TEXT = 1000
"""Characters of the text of an exception; the line of code that raised it follows."""


def _is_cuda_initialized() -> bool:
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    try:
        status, _ = driver.cuCtxGetCurrent()
    except RuntimeError:  # there is no driver
        return False
    return int(status) != _NOT_INITIALIZED
