"""The tuner's handle on the GPU: a worker process that is replaced whenever a candidate breaks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome
from autotile.errors import InputError, ToolchainError, WorkerError, WorkerTimeoutError
from autotile.workers.child import Child, Shelf
from autotile.workers.protocol import Candidate, Evaluation, Workload

_WORKER_MODULE = "autotile.workers.gpu_worker"
_OPEN_DEADLINE_S = 300.0
"""Context, inputs and the float64 reference of a large problem."""
_OPENINGS = 3
_BETWEEN_OPENINGS_S = 1.0
"""A device that a killed kernel has just left may refuse a new context for a moment."""
_MOST_DEATHS_IN_A_ROW = 5
_T = TypeVar("_T")


class Gpu:
    """Evaluates candidates on one GPU, each death of the worker costing one candidate.

    The worker begins to lay out the problem at once, and is waited for where it is needed first, so that the caller can
    get ready meanwhile.

    Parameters
    ----------
    workload
        The problem to lay out.
    deadline_s
        Seconds until a candidate is given up and the worker killed.
    module
        What the worker runs.
    shelf
        Where a worker comes from, and goes back to when it is well; None: it is started and ended here.

    Raises
    ------
    ToolchainError
        No process can be started.
    """

    def __init__(
        self, workload: Workload, deadline_s: float, module: str = _WORKER_MODULE, *, shelf: Shelf | None = None
    ) -> None:
        self._workload = workload
        self._deadline_s = deadline_s
        self._module = module
        self._shelf = shelf
        self._deaths_in_a_row = 0
        self._last_reason = ""
        self._witness: dict[str, Any] | None = None
        self._device: DeviceProperties | None = None
        self._child: Child | None = self._begin()

    def wait(self) -> DeviceProperties:
        """Wait until the worker is ready; the device as it sees it.

        Raises
        ------
        InputError
            The problem cannot be laid out: it does not fit in memory, or its reference cannot be computed.
        ToolchainError
            The device or the toolchain does not work.
        """
        if self._device is None:
            try:
                self._device = self._laid_out()
            except (InputError, ToolchainError):
                if not self._is_used:
                    raise
                self._child = self._begin(kept=False)  # what an earlier session left may be to blame
                self._device = self._laid_out()
        return self._device

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Load, verify and measure one candidate; a crash or hang is an outcome.

        Raises
        ------
        WorkerError
            Five workers in a row died, and what ran before does not run any more: the fault is not the candidates'.
        """
        request = {"op": "evaluate", **candidate.to_json(), "best_us": best_us}
        evaluation = self._judge(request)
        if evaluation.outcome.has_time:
            self._witness = {**request, "best_us": 0.0}  # three samples are enough to see that it runs
        return evaluation

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Load one candidate and verify it again and again, to find what is wrong only sometimes; nothing is measured.

        A kernel that is wrong in one run of fifty is found with 95 % certainty by 75 repeats, of two runs each.

        Parameters
        ----------
        candidate
            What to verify.
        repeats
            Most repeats; there are fewer where they would take more than half of the candidate's deadline.

        Raises
        ------
        WorkerError
            As for `evaluate`.
        """
        limit_s = self._deadline_s / 2
        return self._judge({"op": "verify", **candidate.to_json(), "repeats": repeats, "limit_s": limit_s})

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]]:
        """Interleaved times of verified candidates, one row of microseconds a candidate.

        Raises
        ------
        WorkerError
            The worker died or reported a CUDA error.
        """
        request = {"op": "race", "candidates": [c.to_json() for c in candidates], "rounds": rounds, "seed": seed}
        return self._ask(request, self._deadline_s + _OPEN_DEADLINE_S, _times)

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """The driver's own occupancy answer for a candidate, in blocks per SM."""
        request = {"op": "occupancy", **candidate.to_json()}
        return self._ask(request, self._deadline_s, lambda reply: int(reply["blocks_per_sm"]))

    def close(self) -> None:
        """End the worker, or leave it to whoever comes next."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._shelf is not None and self._device is not None:  # otherwise it may still be laying the problem out
            self._shelf.put(child)
        else:
            child.close()

    def _judge(self, request: Mapping[str, Any]) -> Evaluation:
        """What becomes of one candidate, whatever it does to the worker."""
        self._stop_if_dying()
        evaluation = self._run(request)
        died = self._child is None and evaluation.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        self._deaths_in_a_row = self._deaths_in_a_row + 1 if died else 0
        self._last_reason = evaluation.reason
        return evaluation

    def _run(self, request: Mapping[str, Any]) -> Evaluation:
        try:
            found = self._ask(request, self._deadline_s, _evaluation)
            if found is None:  # the worker's own data were overwritten, by this candidate or by one before
                found = self._ask(request, self._deadline_s, Evaluation.from_json)
            return found
        except WorkerTimeoutError as error:
            return Evaluation(Outcome.TIMED_OUT, f"{error} while in stage {error.stage or 'start'}", error.stage)
        except WorkerError as error:
            return Evaluation(Outcome.CRASHED, f"{error} in stage {error.stage or 'start'}", error.stage)

    def _ask(self, message: Mapping[str, Any], deadline_s: float, read: Callable[[Mapping[str, Any]], _T]) -> _T:
        """A worker's answer; a worker that does not survive the request is replaced at the next one."""
        self.wait()
        if self._child is None:
            self._reopen()
        assert self._child is not None
        try:
            reply = self._child.request(message, deadline_s)
            last = reply.pop("last", False)
            if last and reply.get("outcome") == Outcome.CRASHED:  # an assertion in a kernel is printed, not returned
                reply["reason"] = ": ".join(filter(None, [reply.get("reason"), self._child.last_line()]))
            answer = _understood(reply, read)
        except BaseException:
            self._drop_child()
            raise
        if last:
            self._drop_child()
        return answer

    def _begin(self, *, kept: bool = True) -> Child:
        """Start a worker, or take one that was kept, which lays out the problem."""
        old = self._shelf.take_kept(self._module) if kept and self._shelf is not None else None
        self._is_used = old is not None
        try:
            child = old or Child(self._module)
        except WorkerError as error:
            raise _cannot_start(error) from None
        child.begin({"op": "open", "workload": self._workload.to_json()}, _OPEN_DEADLINE_S)
        return child

    def _laid_out(self) -> DeviceProperties:
        """Wait for the worker that was started; it is dropped where it does not get ready."""
        if self._child is None:
            self._child = self._begin()
        try:
            reply = self._child.answer(_OPEN_DEADLINE_S)
            return _understood(reply, lambda reply: DeviceProperties.from_json(reply["device"]))
        except BaseException as error:  # Ctrl-C, too, must not leave it behind
            self._drop_child()
            if isinstance(error, WorkerError):
                raise _cannot_start(error) from None
            raise

    def _reopen(self) -> None:
        """Start a worker in place of one that died; what could be laid out before, can be again."""
        for left in reversed(range(_OPENINGS)):
            try:
                self._laid_out()
            except (InputError, ToolchainError):
                if not left:
                    raise
                time.sleep(_BETWEEN_OPENINGS_S)
            else:
                return

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _stop_if_dying(self) -> None:
        if self._deaths_in_a_row < _MOST_DEATHS_IN_A_ROW:
            return
        if self._witness is not None and self._run(self._witness).outcome.has_time:
            self._deaths_in_a_row = 0  # the device is well: so many candidates are bad
            return
        raise WorkerError(
            f"{self._deaths_in_a_row} GPU workers died one after another, the last with: {self._last_reason}. "
            "What was measured is saved. Look at `autotile doctor` and at the kernel under compute-sanitizer"
        )


def _cannot_start(error: WorkerError) -> ToolchainError:
    return ToolchainError(f"the GPU worker cannot start: {error}; see `autotile doctor`")


def _understood(reply: Mapping[str, Any], read: Callable[[Mapping[str, Any]], _T]) -> _T:
    """A reply's content.

    Raises
    ------
    InputError, ToolchainError
        What the worker says went wrong, where it concerns more than one candidate.
    WorkerError
        What it says went wrong otherwise; or the reply makes no sense.
    """
    if "error" in reply:
        kinds = {"input": InputError, "toolchain": ToolchainError}
        raise kinds.get(str(reply.get("kind")), WorkerError)(reply["error"])
    try:
        return read(reply)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkerError(f"the worker's answer makes no sense: {type(error).__name__}: {error}") from None


def _evaluation(reply: Mapping[str, Any]) -> Evaluation | None:
    """How a candidate ended; None where only a fresh worker can tell."""
    return None if reply.get("again") else Evaluation.from_json(reply)


def _times(reply: Mapping[str, Any]) -> list[list[float]]:
    return [[float(t) for t in row] for row in reply["times_us"]]
