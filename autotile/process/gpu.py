"""The tuner's handle on the GPU: a worker process that is replaced whenever a candidate breaks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotile.ground.errors import InputError, ToolchainError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Outcome
from autotile.process.child import Child
from autotile.process.messages import Candidate, Evaluation, Workload

_WORKER_MODULE = "autotile.process.gpu_worker"
_OPEN_DEADLINE_S = 300.0
"""Context, inputs and the float64 reference of a large problem."""
_MOST_DEATHS_IN_A_ROW = 5


class Gpu:
    """Evaluates candidates on one GPU, each death of the worker costing one candidate.

    Parameters
    ----------
    workload
        The problem to lay out.
    deadline_s
        Seconds until a candidate is given up and the worker killed.

    Raises
    ------
    InputError
        The problem cannot be laid out: it does not fit in memory, or its reference cannot be computed.
    ToolchainError
        The device or the toolchain does not work.
    """

    def __init__(self, workload: Workload, deadline_s: float) -> None:
        self._workload = workload
        self._deadline_s = deadline_s
        self._deaths_in_a_row = 0
        self._last_death = ""
        self._child: Child | None = None
        self.device: DeviceProperties = self._open()

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Run one candidate; a crash or hang is an outcome.

        Raises
        ------
        WorkerError
            Five workers in a row died: the fault is not the candidates'.
        """
        self._stop_if_dying()
        request = {"op": "evaluate", **candidate.to_json(), "best_us": best_us}
        try:
            reply = self._request(request, self._deadline_s)
        except WorkerTimeoutError as error:
            evaluation = Evaluation(Outcome.TIMED_OUT, f"{error} while in stage {error.stage or 'start'}", error.stage)
        except WorkerCrashError as error:
            evaluation = Evaluation(Outcome.CRASHED, f"{error} in stage {error.stage or 'start'}", error.stage)
        else:
            if "error" in reply:
                raise _setup_error(reply)
            died = reply.pop("last", False)
            evaluation = Evaluation.from_json(reply)
            if not died:
                self._deaths_in_a_row = 0
                return evaluation
        self._bury(evaluation.reason)
        return evaluation

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]]:
        """Interleaved times of verified candidates, one row of microseconds a candidate.

        Raises
        ------
        WorkerError
            The worker died or reported a CUDA error.
        """
        request = {"op": "race", "candidates": [c.to_json() for c in candidates], "rounds": rounds, "seed": seed}
        reply = self._request(request, self._deadline_s + _OPEN_DEADLINE_S)
        if "error" in reply:
            self.close()
            raise WorkerError(reply["error"], "race")
        return [[float(t) for t in row] for row in reply["times_us"]]

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """The driver's own occupancy answer for a candidate, in blocks per SM."""
        reply = self._request({"op": "occupancy", **candidate.to_json()}, self._deadline_s)
        if "error" in reply:
            raise WorkerError(reply["error"], "occupancy")
        return int(reply["blocks_per_sm"])

    def close(self) -> None:
        """End the worker."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _request(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._child is None:
            self._open()
        assert self._child is not None
        return self._child.request(message, deadline_s)

    def _open(self) -> DeviceProperties:
        child = Child(_WORKER_MODULE)
        try:
            reply = child.request({"op": "open", "workload": self._workload.to_json()}, _OPEN_DEADLINE_S)
            if "error" in reply:
                raise _setup_error(reply)
        except WorkerError as error:
            child.kill()
            raise ToolchainError(f"the GPU worker cannot start: {error}; see `autotile doctor`") from None
        except BaseException:  # Ctrl-C, too, must not leave it behind
            child.kill()
            raise
        self._child = child
        return DeviceProperties.from_json(reply["device"])

    def _bury(self, reason: str) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._deaths_in_a_row += 1
        self._last_death = reason

    def _stop_if_dying(self) -> None:
        if self._deaths_in_a_row >= _MOST_DEATHS_IN_A_ROW:
            raise WorkerError(
                f"{self._deaths_in_a_row} GPU workers died one after another, the last with: {self._last_death}. "
                "What was measured is saved. Look at `autotile doctor` and at the kernel under compute-sanitizer"
            )


def _setup_error(reply: Mapping[str, Any]) -> InputError | ToolchainError:
    return InputError(reply["error"]) if reply["kind"] == "input" else ToolchainError(reply["error"])
