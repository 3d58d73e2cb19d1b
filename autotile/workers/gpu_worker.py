"""Child process that owns the GPU: it loads, verifies and measures one candidate at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotile.core.documents import convert
from autotile.core.model import Config, Outcome, config_text
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.expected_outputs import ExpectedOutputs
from autotile.cuda.function import Function, Module
from autotile.cuda.instance import BoundArguments, ProblemInstance, Verdict
from autotile.cuda.support import SupportKernels
from autotile.cuda.telemetry import EnergyMeter, Telemetry
from autotile.cuda.timing import DriftProbe, Launch, Timer, discard_reason
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError
from autotile.kernel.inputs import missing_input
from autotile.kernel.launch import launch_geometry
from autotile.kernel.parser import parse_spec
from autotile.space.limits import check_config
from autotile.workers.protocol import Candidate, Evaluation, FinalReply, RaceTimes, Stage, Workload, serve


class Workbench:
    """Buffers, references and a timer, set up once for all candidates.

    A candidate that writes out of bounds, beyond the guard bands, may corrupt the inputs or references that later ones
    are verified with. The newest candidate that passed verification is therefore kept: while it still passes, the data
    are intact.
    """

    def __init__(self, workload: Workload) -> None:
        self._spec = parse_spec(workload.spec_text, workload.spec_source, folder=workload.spec_folder)
        self.device = live_device(workload.device_index)
        load_cupy().cuda.Device(workload.device_index).use()
        cache = CubinCache(Path(workload.cache), workload.cache_limit_bytes)
        support = SupportKernels(cache, self.device.architecture)

        source = workload.reference_source
        references = ExpectedOutputs(
            self._spec,
            workload.dtype,
            support,
            device=self.device,
            cache=cache,
            source=(source.text, Path(source.path), source.digest) if source else None,
            folder=Path(workload.reference_folder) if workload.reference_folder else None,
        )

        def instance_of(sizes: Mapping[str, int], *, check: bool) -> ProblemInstance:
            return ProblemInstance(self._spec, sizes, workload.dtype, support, check=check, references=references)

        ragged = self._spec.ragged_sizes(workload.sizes)
        has_ragged = not missing_input(self._spec, ragged, workload.dtype)
        self._ragged = instance_of(ragged, check=True) if has_ragged else None
        self._tuned = instance_of(workload.sizes, check=False)
        self._others = [instance_of(sizes, check=True) for sizes in workload.verify_sizes]
        self._timer = Timer(self.device.l2_bytes, workload.l2, workload.sample_limit_s)
        self._dtype = workload.dtype
        self._telemetry = Telemetry(workload.device_index)
        self._energy = EnergyMeter(self._timer, self._telemetry) if workload.energy else None
        self._drift = DriftProbe(support, self._timer, self.device.sm_count)
        self._event_floor_us: float | None = None
        self._verify_seed = 0
        self.set_verify_seed(workload.verify_seed)
        self._known_good: tuple[Function, Config] | None = None
        """Newest candidate that passed verification."""
        self.fresh = True
        """Whether no candidate has run yet."""

    def evaluate(self, candidate: Candidate, best_us: float | None, stage: Stage) -> Evaluation:
        """Load, verify, then measure."""
        config = candidate.config
        timer = _StageTimer()
        stage("load")
        function = self._load(candidate)
        timer.end("load")
        stage("verify")
        verdict = self._verify(function, config)
        timer.end("verify")
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, verdict.reason, "verify", seconds=timer.seconds, began_at=timer.began_at)
        stage("measure")
        bound = self._tuned.bind(config, self.device)
        evaluation = self._measure(self._launch(function, config, self._tuned, bound), best_us, bound)
        timer.end("measure")
        if evaluation.outcome.has_time:
            self._known_good = (function, config)
        telemetry = {**evaluation.telemetry, "max_error": verdict.max_error}
        return replace(evaluation, seconds=timer.seconds, telemetry=telemetry, began_at=timer.began_at)

    def verify(self, candidate: Candidate, repeats: int, limit_s: float, stage: Stage) -> Evaluation:
        """Verify up to ``repeats`` times, but once in any case, alternately with a plain launch and as for timing.

        Every two repeats the inputs change if there is a second set, so that a result that the kernel kept from an
        earlier launch is wrong.
        """
        stage("load")
        config, function = candidate.config, self._load(candidate)
        stage("verify")
        start = time.perf_counter()
        done, verdict = 0, Verdict(Outcome.OK)
        while done == 0 or (done < repeats and time.perf_counter() - start < limit_s):
            self._tuned.use_inputs(self._verify_seed if done // 2 % 2 else 0)
            done += 1
            verdict = self._verify(function, config, as_measured=done % 2 == 0)
            if verdict.outcome is not Outcome.OK:
                break
        self._tuned.use_inputs(0)
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, f"{verdict.reason}, in repeat {done} of {repeats}", "verify")
        self._known_good = (function, config)
        seconds = {"verify": round(time.perf_counter() - start, 6)}
        return Evaluation(Outcome.OK, stage="verify", seconds=seconds, telemetry={"repeats": done})

    def set_verify_seed(self, seed: int) -> None:
        """Draw the second set of inputs, or drop it if the seed is 0; see `Workload.verify_seed`."""
        if seed:
            self._tuned.add_inputs(seed)
        else:
            self._tuned.drop_inputs()
        self._verify_seed = seed

    def is_intact(self) -> bool:
        """Verify the newest candidate that passed again; return whether it still passes."""
        return self._known_good is not None and self._verify(*self._known_good).outcome is Outcome.OK

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[RaceTimes]:
        """Time verified candidates in interleaved rounds, and verify the outputs that timed launches wrote."""
        bounds = [self._tuned.bind(candidate.config, self.device) for candidate in candidates]
        launches = [
            self._launch(self._load(candidate), candidate.config, self._tuned, bound)
            for candidate, bound in zip(candidates, bounds, strict=True)
        ]
        verdicts: list[Verdict] = []
        self.fresh = False
        self._timer.warm_up(launches[0])
        times = self._timer.race(
            launches,
            rounds,
            seed,
            prepares=[partial(self._tuned.prepare, bound) for bound in bounds],
            check=lambda index: verdicts.append(self._verdict_on_timed(bounds[index])),
        )
        return [RaceTimes(tuple(row), v.outcome, v.reason) for row, v in zip(times, verdicts, strict=True)]

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """Return the occupancy that the driver computes."""
        function = self._load(candidate)
        geometry = launch_geometry(self._spec, candidate.config, self._tuned.sizes, self.device)
        function.opt_in(geometry.dynamic_smem_bytes)
        return function.blocks_per_sm(geometry.threads, geometry.dynamic_smem_bytes)

    def _measure(self, launch: Launch, best_us: float | None, bound: BoundArguments) -> Evaluation:
        if self._event_floor_us is None:
            self._timer.warm_up(launch)
            self._event_floor_us = round(self._timer.event_floor_us(), 3)
        timing = self._timer.measure(launch, best_us, partial(self._tuned.prepare, bound))
        verdict = self._verdict_on_timed(bound)
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, verdict.reason, "measure")
        telemetry: dict[str, float | int | str] = {
            **self._telemetry.read(),
            "reference_us": self._drift.read_us(),
            "event_floor_us": self._event_floor_us,
        }
        outcome, reason = Outcome.OK, ""
        if best_us is not None and timing.discarded:
            outcome, reason = Outcome.PRUNED, discard_reason(best_us)
        elif self._energy is not None:
            telemetry |= self._energy.read(launch, timing.measurement.time_us)
        return Evaluation(outcome, reason, "measure", timing.measurement, telemetry=telemetry)

    def _verdict_on_timed(self, bound: BoundArguments) -> Verdict:
        """Verify what the last timed launch wrote, before which the outputs were overwritten."""
        verdict = self._tuned.verdict(bound)
        if verdict.outcome is Outcome.OK:
            return verdict
        return verdict._replace(reason=f"{verdict.reason}, in a timed launch after correct ones")

    def _verify(self, function: Function, config: Config, *, as_measured: bool = False) -> Verdict:
        """Verify at the ragged sizes if the rules allow them there, at the tuned sizes, and at the extra ones."""
        max_error = 0.0
        for instance in filter(None, (self._ragged, self._tuned, *self._others)):
            broken_rule = check_config(self._spec, config, instance.sizes, self.device, self._dtype)
            if broken_rule and instance is self._ragged:
                continue
            if broken_rule:
                return Verdict(Outcome.INFEASIBLE, f"{broken_rule} at {config_text(instance.sizes)}")
            bound = instance.bind(config, self.device)
            launch = self._launch(function, config, instance, bound)
            instance.prepare(bound)
            self.fresh = False
            if as_measured:
                self._timer.samples(launch, 1)
            else:
                launch()
            verdict = instance.verdict(bound)
            if verdict.outcome is not Outcome.OK:
                return verdict
            max_error = max(max_error, verdict.max_error)
        return Verdict(Outcome.OK, max_error=max_error)

    def _load(self, candidate: Candidate) -> Function:
        symbol = candidate.symbols.get(self._spec.entry, self._spec.entry)
        return Module(Path(candidate.cubin_path)).function(symbol)

    def _launch(self, function: Function, config: Config, instance: ProblemInstance, bound: BoundArguments) -> Launch:
        geometry = launch_geometry(self._spec, config, instance.sizes, self.device)
        function.opt_in(geometry.dynamic_smem_bytes)

        def launch() -> None:
            function.launch(geometry.grid, geometry.block, bound.arguments, geometry.dynamic_smem_bytes)

        return launch


class _StageTimer:
    """Wall time of each stage, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began_at = self._start = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._start, 6)
        self._start = now


# CUresult codes after which the context still works (cuda.h): the launch or load was rejected before it began.
_REJECTED = {
    1: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_INVALID_VALUE: a launch geometry that the device does not support
    2: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_OUT_OF_MEMORY: local memory for the launch
    200: Outcome.CRASHED,  # CUDA_ERROR_INVALID_IMAGE
    209: Outcome.CRASHED,  # CUDA_ERROR_NO_BINARY_FOR_GPU
    301: Outcome.CRASHED,  # CUDA_ERROR_FILE_NOT_FOUND: the cubin was trimmed from the cache
    500: Outcome.CRASHED,  # CUDA_ERROR_NOT_FOUND
    701: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
}
_LAUNCH_FAILED = 719
_LAUNCH_FAILED_HINT = "a trap, or an address outside shared or local memory"
"""Causes of CUDA_ERROR_LAUNCH_FAILED, which the driver describes as "unspecified launch failure"."""


class GpuWorker:
    """Handler of ``open``, ``evaluate``, ``verify``, ``race`` and ``occupancy`` requests."""

    def __init__(self) -> None:
        self._bench: Workbench | None = None
        self._workload: Mapping[str, Any] = {}

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
        if message["op"] == "open":
            stage("open")
            return {"device": self._open(message["workload"]).device.to_json()}
        if self._bench is None:
            raise InputError("the worker has no workload yet: send open first")
        match message["op"]:
            case "evaluate" | "verify":
                return self._evaluate(self._bench, message, stage)
            case "race":
                stage("race")
                return self._race(self._bench, message)
            case "occupancy":
                blocks = self._bench.driver_blocks_per_sm(_candidate(message))
                return {"blocks_per_sm": blocks}
            case unknown:
                raise InputError(f"unknown request {unknown!r}")

    def _open(self, workload: Mapping[str, Any]) -> Workbench:
        """Set up a problem, or keep that of the last session if it is the same and intact."""
        bench, self._bench = self._bench, None  # none is left if an error follows
        same_problem = {**workload, "verify_seed": 0} == {**self._workload, "verify_seed": 0}
        if bench is not None and same_problem and bench.is_intact():
            bench.set_verify_seed(workload["verify_seed"])
        else:
            bench = None  # frees its memory
            bench = Workbench(convert(workload, Workload))
        self._bench, self._workload = bench, workload
        return bench

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
        outcome = _REJECTED.get(code)
        reason = f"{error} ({_LAUNCH_FAILED_HINT})" if code == _LAUNCH_FAILED else str(error)
        reply = _failed(request, stage, outcome or Outcome.CRASHED, reason)
        if outcome is None:
            raise FinalReply({**reply, "last": True})
        return reply


def _candidate(message: Mapping[str, Any]) -> Candidate:
    return Candidate(message["config"], message["cubin_path"], message["symbols"])


def _failed(request: str, stage: str, outcome: Outcome, reason: str) -> Mapping[str, Any]:
    if request in ("evaluate", "verify"):
        return Evaluation(outcome, f"{reason} in stage {stage}", stage).to_json()
    return {"error": reason, "kind": "cuda"}


if __name__ == "__main__":
    serve(GpuWorker())
