"""The child process that owns the GPU: it loads, verifies and measures one candidate at a time.

A CUDA error outside a short safe list leaves the context unusable; the worker then answers and ends itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotile.device.toolchain import load_cupy
from autotile.ground.errors import AutotileError, InputError
from autotile.ground.model import Outcome
from autotile.process.messages import Evaluation, Workload
from autotile.process.serve import LastWords, Stage, serve
from autotile.process.workbench import Workbench

# CUresult codes after which the context still works (cuda.h): the launch or load was refused before it began.
_REFUSED = {
    1: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_INVALID_VALUE: a launch geometry that the device does not take
    2: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_OUT_OF_MEMORY: local memory for the launch
    200: Outcome.CRASHED,  # CUDA_ERROR_INVALID_IMAGE
    209: Outcome.CRASHED,  # CUDA_ERROR_NO_BINARY_FOR_GPU
    301: Outcome.CRASHED,  # CUDA_ERROR_FILE_NOT_FOUND: the cubin was trimmed from the cache
    500: Outcome.CRASHED,  # CUDA_ERROR_NOT_FOUND
    701: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
}
_LAUNCH_FAILED = 719
_LAUNCH_FAILED_HINT = "a trap, or an address outside shared or local memory"
"""What lies behind CUDA_ERROR_LAUNCH_FAILED, of which the driver says "unspecified launch failure"."""


class GpuWorker:
    """Answers ``open``, ``evaluate``, ``verify``, ``race`` and ``occupancy`` requests."""

    def __init__(self) -> None:
        self._bench: Workbench | None = None
        self._workload: Mapping[str, Any] = {}

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Answer one request."""
        cuda = load_cupy().cuda
        entered = ""

        def enter(name: str) -> None:
            nonlocal entered
            entered = name
            stage(name)

        try:
            return self._answer(message, enter)
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            return self._failure(message["op"], entered, error)
        except cuda.memory.OutOfMemoryError as error:
            if message["op"] == "open":
                return {"error": f"the problem does not fit in the device's memory: {error}", "kind": "input"}
            return _refusal(message["op"], entered, Outcome.RESOURCE_EXCEEDED, str(error))
        except AutotileError as error:
            return {"error": str(error), "kind": "input" if isinstance(error, InputError) else "toolchain"}

    def _answer(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        if message["op"] == "open":
            stage("open")
            return {"device": self._open(message["workload"]).device.to_json()}
        if self._bench is None:
            raise InputError("the worker has no workload yet: send open first")
        match message["op"]:
            case "evaluate" | "verify":
                return self._judge(self._bench, message, stage)
            case "race":
                stage("race")
                return {"times_us": self._bench.race(message["candidates"], message["rounds"], message["seed"])}
            case "occupancy":
                blocks = self._bench.driver_blocks_per_sm(message["config"], message["cubin_path"])
                return {"blocks_per_sm": blocks}
            case unknown:
                raise InputError(f"the worker knows no request {unknown!r}")

    def _open(self, workload: Mapping[str, Any]) -> Workbench:
        """Lay a problem out, unless the last session left just this one, and unharmed."""
        if self._bench is None or workload != self._workload or not self._bench.is_sound():
            self._bench = None  # its memory is needed again
            self._bench = Workbench(Workload(**workload))
            self._workload = workload
        return self._bench

    def _judge(self, bench: Workbench, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """A candidate's evaluation; of one found wrong, only where no earlier one can be the cause."""
        fresh = bench.fresh
        config, path = message["config"], message["cubin_path"]
        if message["op"] == "evaluate":
            evaluation = bench.evaluate(config, path, message["best_us"], stage)
        else:
            evaluation = bench.verify(config, path, message["repeats"], message["limit_s"], stage)
        reply = evaluation.to_json()
        if evaluation.outcome not in (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS) or bench.is_sound():
            return reply
        certain = fresh or evaluation.outcome is Outcome.OUT_OF_BOUNDS
        raise LastWords({**(reply if certain else {"again": True}), "last": True})

    def _failure(self, request: str, stage: str, error: Any) -> Mapping[str, Any]:
        """A refused launch is an answer like another; anything else ends the worker."""
        code = int(error.status)
        outcome = _REFUSED.get(code)
        reason = f"{error} ({_LAUNCH_FAILED_HINT})" if code == _LAUNCH_FAILED else str(error)
        reply = _refusal(request, stage, outcome or Outcome.CRASHED, reason)
        if outcome is None:
            raise LastWords({**reply, "last": True})
        return reply


def _refusal(request: str, stage: str, outcome: Outcome, reason: str) -> Mapping[str, Any]:
    if request in ("evaluate", "verify"):
        return Evaluation(outcome, f"{reason} in stage {stage}", stage).to_json()
    return {"error": reason, "kind": "cuda"}


if __name__ == "__main__":
    serve(GpuWorker())
