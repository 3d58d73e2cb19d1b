"""The child process that owns the GPU: it loads, verifies and measures one candidate at a time.

A CUDA error outside a short safe list leaves the context unusable; the worker then answers and ends itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.device.cubin_cache import CubinCache
from autotile.device.instance import ProblemInstance
from autotile.device.module import Function, Module
from autotile.device.properties import live_device
from autotile.device.shots import Launch
from autotile.device.support import SupportKernels
from autotile.device.telemetry import Telemetry
from autotile.device.timing import Timer, discard_reason
from autotile.device.toolchain import load_cupy
from autotile.ground.errors import AutotileError, InputError
from autotile.ground.geometry import launch_geometry
from autotile.ground.model import Config, Outcome
from autotile.ground.space import check_config
from autotile.ground.spec_parser import parse_spec
from autotile.process.messages import Evaluation, Workload
from autotile.process.serve import LastWords, Stage, serve

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


class Workbench:
    """A workload laid out on the device.

    A candidate that writes astray, beyond the guard bands, may change what later ones are judged by. So the newest one
    that was found right is kept as a witness: where it is still found right, inputs and reference are unharmed.
    """

    def __init__(self, workload: Workload) -> None:
        self._spec = parse_spec(workload.spec_text, workload.spec_source)
        self.device = live_device(workload.device_index)
        load_cupy().cuda.Device(workload.device_index).use()
        cache = CubinCache(Path(workload.cache), workload.cache_limit_bytes)
        support = SupportKernels(cache, self.device.architecture)
        ragged = {name: self._spec.ragged[name] for name in workload.sizes}
        self._checked = ProblemInstance(self._spec, ragged, workload.dtype, support, check=True)
        self._tuned = ProblemInstance(self._spec, workload.sizes, workload.dtype, support, check=False)
        self._timer = Timer(self.device.l2_bytes, workload.l2, workload.sample_limit_s)
        self._telemetry = Telemetry(workload.device_index)
        self._warm = False
        self._right: tuple[Function, Config] | None = None
        self.fresh = True
        """Whether no candidate has run yet."""

    def evaluate(self, config: Config, cubin_path: str, best_us: float | None, stage: Stage) -> Evaluation:
        """Load, verify, then measure."""
        seconds: dict[str, float] = {}
        start = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal start
            now = time.perf_counter()
            seconds[name] = round(now - start, 6)
            start = now

        stage("load")
        function = Module(Path(cubin_path)).function(self._spec.entry)
        lap("load")
        stage("verify")
        outcome, reason = self._verify(function, config)
        lap("verify")
        if outcome is not Outcome.OK:
            return Evaluation(outcome, reason, "verify", seconds=seconds)
        self._right = (function, config)
        stage("measure")
        launch = self._launch(function, config, self._tuned)
        if not self._warm:
            self._timer.warm_up(launch)
            self._warm = True
        timing = self._timer.measure(launch, best_us)
        telemetry = self._telemetry.read()
        lap("measure")
        if best_us is not None and timing.discarded:
            outcome, reason = Outcome.PRUNED, discard_reason(best_us)
        return Evaluation(outcome, reason, "measure", timing.measurement, seconds, telemetry)

    def verify(self, config: Config, cubin_path: str, repeats: int, limit_s: float, stage: Stage) -> Evaluation:
        """Verify up to ``repeats`` times, by turns launched as in `evaluate` and as when it is timed."""
        stage("load")
        function = Module(Path(cubin_path)).function(self._spec.entry)
        stage("verify")
        start = time.perf_counter()
        for repeat in range(1, repeats + 1):
            outcome, reason = self._verify(function, config, as_measured=repeat % 2 == 0)
            if outcome is not Outcome.OK:
                return Evaluation(outcome, f"{reason}, in repeat {repeat} of {repeats}", "verify")
            self._right = (function, config)
            if time.perf_counter() - start > limit_s:
                break
        return Evaluation(Outcome.OK, stage="verify", seconds={"verify": round(time.perf_counter() - start, 6)})

    def is_sound(self) -> bool:
        """Whether the witness is still found right."""
        return self._right is not None and self._verify(*self._right)[0] is Outcome.OK

    def race(self, candidates: list[Mapping[str, Any]], rounds: int, seed: int) -> list[list[float]]:
        """Time candidates interleaved; they have been verified before."""
        launches = [
            self._launch(Module(Path(c["cubin_path"])).function(self._spec.entry), c["config"], self._tuned)
            for c in candidates
        ]
        self._timer.warm_up(launches[0])
        return self._timer.race(launches, rounds, seed)

    def driver_blocks_per_sm(self, config: Config, cubin_path: str) -> int:
        """The driver's own occupancy answer."""
        function = Module(Path(cubin_path)).function(self._spec.entry)
        geometry = launch_geometry(self._spec, config, self._tuned.sizes, self.device)
        function.opt_in(geometry.dynamic_smem_bytes)
        return function.blocks_per_sm(geometry.threads, geometry.dynamic_smem_bytes)

    def _verify(self, function: Function, config: Config, *, as_measured: bool = False) -> tuple[Outcome, str]:
        for instance in (self._checked, self._tuned):
            if instance is self._checked and check_config(self._spec, config, instance.sizes, self.device):
                continue  # this configuration is not meant for ragged sizes: its rules say so
            launch = self._launch(function, config, instance)
            instance.prepare()
            self.fresh = False
            if as_measured:
                self._timer.samples(launch, 1)
            else:
                launch()
            outcome, reason = instance.verdict()
            if outcome is not Outcome.OK:
                return outcome, reason
        return Outcome.OK, ""

    def _launch(self, function: Function, config: Config, instance: ProblemInstance) -> Launch:
        geometry = launch_geometry(self._spec, config, instance.sizes, self.device)
        function.opt_in(geometry.dynamic_smem_bytes)
        arguments = instance.arguments

        def launch() -> None:
            function.launch(geometry.grid, geometry.block, arguments, geometry.dynamic_smem_bytes)

        return launch


class GpuWorker:
    """Answers ``open``, ``evaluate``, ``verify``, ``race`` and ``occupancy`` requests."""

    def __init__(self) -> None:
        self._bench: Workbench | None = None

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
            self._bench = Workbench(Workload(**message["workload"]))
            return {"device": self._bench.device.to_json()}
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
