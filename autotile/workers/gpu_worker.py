"""Child process that owns the GPU: it loads, verifies and measures one candidate at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autotile.core.documents import canonical_json, convert
from autotile.core.model import Outcome
from autotile.cuda.driver import rejected
from autotile.cuda.instance import MEMORY_SHARE
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError
from autotile.workers.library_race import LibraryOn, built_in_library, hold_contest
from autotile.workers.protocol import (
    CONTEST_STAGE,
    RACE_STAGE,
    SWEEP_STAGE,
    Candidate,
    Evaluation,
    FinalReply,
    LibraryCall,
    RaceTimes,
    SizedCubin,
    Stage,
    SweepSetup,
    Workload,
    serve,
)
from autotile.workers.workbench import Workbench

if TYPE_CHECKING:
    from autotile.workers.sweep import Sweeper

_LAUNCH_FAILED = 719
_LAUNCH_FAILED_HINT = "a trap, or an address outside shared or local memory"
"""Causes of CUDA_ERROR_LAUNCH_FAILED, which the driver describes as "unspecified launch failure"."""


_MAX_KEPT = 16
"""Problems besides the present one whose inputs are kept, such as those of the other kernels of an operation."""


class GpuWorker:
    """Handler of all requests: ``open``, ``evaluate``, ``verify``, ``race``, ``sweep``, ``ceilings`` and so on."""

    def __init__(self) -> None:
        self._bench: Workbench | None = None
        self._benches: dict[str, Workbench] = {}
        """Problems that are laid out, by their workloads; the newest is the last."""
        self._sweeper: Sweeper | None = None

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
            return self._failure(message["op"], entered, error)
        except cuda.memory.OutOfMemoryError as error:
            if message["op"] == "open":
                return {"error": f"the problem does not fit in the device's memory: {error}", "kind": "input"}
            return _failed(message["op"], entered, Outcome.RESOURCE_EXCEEDED, str(error))
        except AutotileError as error:
            return {"error": str(error), "kind": "input" if isinstance(error, InputError) else "toolchain"}

    def _reply(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        match message["op"]:
            case "sweep":
                return self._sweep(message, stage)
            case "ceilings":
                return _ceilings(message, stage)
            case "open":
                stage("open")
                return {"device": self._open(message["workload"]).device.to_json()}
            case _ if self._bench is not None:
                return self._reply_about(self._bench, message, stage)
            case _:
                raise InputError("the worker has no workload yet: send open first")

    def _reply_about(self, bench: Workbench, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Handle a request about the problem that is set up."""
        match message["op"]:
            case "evaluate" | "verify":
                return self._evaluate(bench, message, stage)
            case "race":
                stage("race")
                return self._race(bench, message)
            case "contest":
                stage("open")
                return self._contest(bench, message, stage)
            case "occupancy":
                return {"blocks_per_sm": bench.driver_blocks_per_sm(_candidate(message))}
            case unknown:
                raise InputError(f"unknown request {unknown!r}")

    def _open(self, workload: Mapping[str, Any]) -> Workbench:
        """Set up a problem, or take one that is laid out already and intact; it is then the present one."""
        self._bench = None  # none is left if an error follows
        bench = self._laid_out(workload)
        bench.set_verify_seed(workload["verify_seed"])
        self._bench = bench
        return bench

    def _laid_out(self, workload: Mapping[str, Any]) -> Workbench:
        """Return the problem of a workload, which becomes the newest of those that are kept."""
        key = canonical_json({**workload, "verify_seed": 0})
        bench = self._benches.pop(key, None)
        if bench is not None and not bench.is_intact():
            bench = None
        if bench is None:
            self._forget_problems(MEMORY_SHARE)
            try:
                bench = Workbench(convert({**workload, "verify_seed": 0}, Workload))
            except load_cupy().cuda.memory.OutOfMemoryError:
                if not self._benches:
                    raise
                self._forget_problems(0.0)
                bench = Workbench(convert({**workload, "verify_seed": 0}, Workload))
        self._benches[key] = bench
        return bench

    def _forget_problems(self, share: float) -> None:
        """Free the oldest problems until the others take a share of the device's memory at most."""
        while self._benches:
            limit_bytes = share * next(iter(self._benches.values())).device.memory_bytes
            if sum(one.size_bytes for one in self._benches.values()) <= limit_bytes and len(self._benches) < _MAX_KEPT:
                return
            del self._benches[next(iter(self._benches))]

    def _sweep(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Measure one problem of a sweep; a CUDA error ends it at the configuration that caused it."""
        from autotile.workers.sweep import BrokenSweepError, Entry, Sweeper

        setup = convert(message["setup"], SweepSetup)
        if self._sweeper is None or self._sweeper.setup != setup:
            stage("open")
            self._bench, self._sweeper = None, None
            self._benches.clear()
            self._sweeper = Sweeper(setup)
        entries = [Entry(int(one["kernel"]), _candidate(one), one.get("ragged")) for one in message["entries"]]
        libraries = convert(message["libraries"], tuple[LibraryCall, ...])
        try:
            swept = self._sweeper.measure(
                message["sizes"], libraries, entries, lambda number: stage(f"{SWEEP_STAGE}{number}")
            )
        except BrokenSweepError as error:
            fault = {"failed": str(error), "outcome": error.outcome, "number": error.number}
            raise FinalReply({"swept": [], **fault, "last": True}) from None
        return {"swept": [asdict(one) for one in swept]}

    def _contest(self, bench: Workbench, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Race candidates of several kernels and libraries."""
        pairs = [(self._laid_out(one["workload"]), _candidate(one["candidate"])) for one in message["entries"]]
        libraries: list[LibraryOn] = []
        refused: dict[int, str] = {}
        calls = convert(message["libraries"], tuple[LibraryCall, ...])
        for index, call in enumerate(calls):
            try:
                libraries.append(built_in_library(call, bench.device_index))
            except AutotileError as error:
                refused[index] = str(error)

        def begin(number: int | None) -> None:
            stage(RACE_STAGE if number is None else f"{CONTEST_STAGE}{number}")

        raced = iter(hold_contest(pairs, libraries, message["rounds"], message["seed"], begin=begin))
        rows = [next(raced) for _ in pairs]
        for index in range(len(calls)):
            rows.append(RaceTimes((), Outcome.CRASHED, refused[index]) if index in refused else next(raced))
        return {"raced": [row.to_json() for row in rows]}

    def _evaluate(self, bench: Workbench, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Evaluate a candidate; a failed verification counts only if no earlier candidate can be its cause."""
        fresh = bench.fresh
        candidate = _candidate(message)
        if message["op"] == "evaluate":
            evaluation = bench.evaluate(candidate, message["best_us"], stage)
        else:
            evaluation = bench.verify(candidate, message["repeats"], message["limit_s"], stage)
        reply = evaluation.to_json()
        if evaluation.outcome not in (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS) or bench.is_intact():
            return reply
        certain = fresh or evaluation.outcome is Outcome.OUT_OF_BOUNDS
        raise FinalReply({**(reply if certain else {"again": True}), "last": True})

    def _race(self, bench: Workbench, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Race candidates; if the worker's data were overwritten, there is no telling which candidate is at fault."""
        raced = bench.race([_candidate(one) for one in message["candidates"]], message["rounds"], message["seed"])
        if any(row.outcome is not Outcome.OK for row in raced) and not bench.is_intact():
            raise FinalReply({"error": "a candidate overwrote the worker's data in the race", "last": True})
        return {"raced": [row.to_json() for row in raced]}

    def _failure(self, request: str, stage: str, error: Any) -> Mapping[str, Any]:
        """Reply to a CUDA error; unless the launch was merely rejected, the worker ends."""
        code = int(error.status)
        outcome = rejected(error)
        reason = f"{error} ({_LAUNCH_FAILED_HINT})" if code == _LAUNCH_FAILED else str(error)
        reply = _failed(request, stage, outcome or Outcome.CRASHED, reason)
        if outcome is None:
            raise FinalReply({**reply, "last": True})
        return reply


def _ceilings(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    from autotile.workers.device_ceilings import measure_ceilings

    return {"measured": measure_ceilings(message["request"], stage).to_json()}


def _candidate(message: Mapping[str, Any]) -> Candidate:
    others = convert(message.get("others", []), tuple[SizedCubin, ...])
    path, weight = message["cubin_path"], message["weight"]
    return Candidate(message["config"], path, message["symbols"], weight=weight, others=others)


def _failed(request: str, stage: str, outcome: Outcome, reason: str) -> Mapping[str, Any]:
    if request in ("evaluate", "verify"):
        return Evaluation(outcome, f"{reason} in stage {stage}", stage).to_json()
    return {"error": reason, "kind": "cuda", "stage": stage}


if __name__ == "__main__":
    serve(GpuWorker())
