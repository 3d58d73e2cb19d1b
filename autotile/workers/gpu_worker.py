"""Child process that owns the GPU: it runs jobs on a bench, and ends after an error that leaves the context broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotile.core.device import DeviceProperties
from autotile.core.documents import convert
from autotile.core.model import Outcome
from autotile.cuda.driver import live_device, rejected
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError
from autotile.workers.bench import Bench, TaintedError
from autotile.workers.jobs import JOBS, Candidate, Job, Race, Reading, Workload, read_job
from autotile.workers.protocol import FinalReply, Stage, serve

_LAUNCH_FAILED = 719
_LAUNCH_FAILED_HINT = "a trap, or an address outside shared or local memory"
"""Causes of CUDA_ERROR_LAUNCH_FAILED, which the driver describes as "unspecified launch failure"."""


class GpuWorker:
    """Handler of all requests: ``open``, the jobs ``time``, ``check`` and ``race``, ``occupancy`` and ``ceilings``."""

    def __init__(self) -> None:
        self._bench = Bench()

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Handle one request."""
        cuda = load_cupy().cuda
        entered = ""

        def enter(name: str) -> None:
            nonlocal entered
            entered = name
            stage(name)

        try:
            return self._reply(message, enter)
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            outcome, reason = _fault(error)
            reply = {"error": reason, "kind": "cuda", "stage": entered}
            if outcome is None:
                raise FinalReply({**reply, "last": True}) from None
            return reply
        except cuda.memory.OutOfMemoryError as error:
            if message["op"] == "open":
                return {"error": f"the problem does not fit in the device's memory: {error}", "kind": "input"}
            return {"error": str(error), "kind": "cuda"}
        except AutotileError as error:
            return {"error": str(error), "kind": "input" if isinstance(error, InputError) else "toolchain"}

    def _reply(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        match message["op"]:
            case "open":
                stage("open")
                return {"device": self._open(message).to_json()}
            case job if job in JOBS:
                return self._run(read_job(message), stage)
            case "occupancy":
                return {"blocks_per_sm": self._bench.driver_blocks_per_sm(convert(message["candidate"], Candidate))}
            case "ceilings":
                from autotile.workers.device_ceilings import measure_ceilings

                return {"measured": measure_ceilings(message["request"], stage).to_json()}
            case unknown:
                raise InputError(f"unknown request {unknown!r}")

    def _open(self, message: Mapping[str, Any]) -> DeviceProperties:
        """Lay out the problem of a session; without one, only state the device."""
        if message["workload"] is None:
            return live_device(message["device_index"])
        return self._bench.open(convert(message["workload"], Workload))

    def _run(self, job: Job, stage: Stage) -> Mapping[str, Any]:
        """Run a job; of one that breaks the worker, reply with the readings up to the entry that did."""
        if isinstance(job, Race):
            return self._race(job, stage)
        cuda = load_cupy().cuda
        entered = ""

        def enter(name: str) -> None:
            nonlocal entered
            entered = name.partition(" ")[0]
            stage(name)

        readings: list[Reading] = []
        while len(readings) < len(job.entries):
            fault: Outcome | None = None
            try:
                self._bench.run(job, enter, readings)
                continue
            except TaintedError as error:
                readings += [error.reading] if error.reading is not None else []
            except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
                fault, reason = _fault(error)
                readings.append(Reading(fault or Outcome.CRASHED, f"{reason} in stage {entered}", entered))
            except cuda.memory.OutOfMemoryError as error:
                fault = Outcome.RESOURCE_EXCEEDED
                readings.append(Reading(fault, f"{error} in stage {entered}", entered))
            if fault is None:
                found = [one.to_json() for one in readings]
                raise FinalReply({"readings": found, "is_complete": False, "last": True})
        return {"readings": [one.to_json() for one in readings]}

    def _race(self, job: Race, stage: Stage) -> Mapping[str, Any]:
        """Race entries; if the worker's data were overwritten, there is no telling which entry is at fault."""
        readings: list[Reading] = []
        try:
            self._bench.run(job, stage, readings)
        except TaintedError:
            raise FinalReply({"error": "a candidate overwrote the worker's data in the race", "last": True}) from None
        return {"readings": [one.to_json() for one in readings]}


def _fault(error: Any) -> tuple[Outcome | None, str]:
    """Return the outcome of a launch that was merely rejected, None after an error that ends the worker; and why."""
    hint = f" ({_LAUNCH_FAILED_HINT})" if int(error.status) == _LAUNCH_FAILED else ""
    return rejected(error), f"{error}{hint}"


if __name__ == "__main__":
    serve(GpuWorker())
