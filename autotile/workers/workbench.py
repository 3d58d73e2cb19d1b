"""A problem laid out on the GPU, on which candidates are verified and measured."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from autotile.core.model import OUTPUT_DIGEST, STEP_TIME, VARYING_OUTPUTS, Config, Outcome, config_text
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.expected_outputs import ExpectedOutputs
from autotile.cuda.function import LaunchSequence, SizedFunctions, StepFunctions
from autotile.cuda.instance import MEMORY_SHARE, BoundArguments, Instances, ProblemInstance, Verdict
from autotile.cuda.support import SupportKernels
from autotile.cuda.telemetry import EnergyMeter, Telemetry
from autotile.cuda.timing import DriftProbe, Timer, discard_reason
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.inputs import ragged_problem, with_captured_call
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import Kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config
from autotile.workers.library_race import Entrant, LibraryOn, library_entrant, race
from autotile.workers.protocol import (
    Candidate,
    Evaluation,
    KernelSource,
    RaceTimes,
    Stage,
    Workload,
    files_of_any_size,
    sized_functions,
)


class Workbench:
    """Buffers, references and a timer, set up once for all candidates.

    A candidate that writes out of bounds, beyond the guard bands, may corrupt the inputs or references that later ones
    are verified with. The newest candidate that passed verification is therefore kept: while it still passes, the data
    are intact.
    """

    def __init__(self, workload: Workload) -> None:
        self._spec = parse_spec(workload.spec_text, workload.spec_source, folder=workload.spec_folder)
        if workload.captured_call:
            self._spec = with_captured_call(self._spec, Path(workload.captured_call))
        self.device_index = workload.device_index
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
            source=reference_kernel(self._spec, source) if source else None,
            folder=Path(workload.reference_folder) if workload.reference_folder else None,
        )

        def instances_of(sizes: Mapping[str, int], *, check: bool) -> Instances:
            def make(names: Mapping[str, int]) -> ProblemInstance:
                return ProblemInstance(self._spec, names, workload.dtype, support, check=check, references=references)

            instances = Instances(self._spec, sizes, make, MEMORY_SHARE * self.device.memory_bytes)
            default = self._spec.default
            if not self._spec.shaping or not check_config(self._spec, default, sizes, self.device, workload.dtype):
                instances.of(default)  # so that an error of the problem is reported now
            return instances

        ragged = ragged_problem(self._spec, workload.sizes, workload.dtype)
        self._ragged = instances_of(ragged, check=True) if ragged is not None else None
        self._tuned = instances_of(workload.sizes, check=False)
        self._others = [instances_of(sizes, check=True) for sizes in workload.verify_sizes]
        self.timer = Timer(self.device.l2_bytes, workload.l2, workload.sample_limit_s)
        self._dtype = workload.dtype
        self._telemetry = Telemetry(workload.device_index)
        self._energy = EnergyMeter(self.timer, self._telemetry) if workload.energy else None
        self._drift = DriftProbe(support, self.timer, self.device.sm_count)
        self._event_floor_us: float | None = None
        self._verify_seed = 0
        self.set_verify_seed(workload.verify_seed)
        self._captured, self._capture_folder = workload.captured, workload.capture_folder
        self._known_good: tuple[SizedFunctions, Config] | None = None
        """Newest candidate that passed verification."""
        self.fresh = True
        """Whether no candidate has run yet."""

    @property
    def size_bytes(self) -> int:
        """Device memory of the buffers, the inputs and the expected outputs."""
        return sum(instances.size_bytes for instances in (self._ragged, self._tuned, *self._others) if instances)

    def evaluate(self, candidate: Candidate, best_us: float | None, stage: Stage) -> Evaluation:
        """Load, verify, then measure."""
        config = candidate.config
        timer = _StageTimer()
        stage("load")
        functions = self._load(candidate)
        timer.end("load")
        stage("verify")
        verdict = self._verify(functions, config)
        timer.end("verify")
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, verdict.reason, "verify", seconds=timer.seconds, began_at=timer.began_at)
        instance = self._tuned.of(config)
        captured, digest = self._capture(instance), instance.digest()
        stage("measure")
        bound = instance.bind(config, self.device)
        evaluation = self._measure(launch_sequence(functions.tuned, instance, bound), best_us, bound)
        timer.end("measure")
        if evaluation.outcome.has_time:
            self._known_good = (functions, config)
        again = evaluation.telemetry.get(OUTPUT_DIGEST, digest)
        telemetry = {
            **evaluation.telemetry,
            "max_error": verdict.max_error,
            OUTPUT_DIGEST: digest if digest == again else VARYING_OUTPUTS,
        }
        return replace(
            evaluation, seconds=timer.seconds, telemetry=telemetry, captured=captured, began_at=timer.began_at
        )

    def _capture(self, instance: ProblemInstance) -> str:
        """Save what the verified launch wrote at the tuned sizes, if that is asked for; return the folder."""
        if not self._captured:
            return ""
        folder = Path(tempfile.mkdtemp(dir=self._capture_folder))
        with files_of_any_size():
            for name in self._captured:
                np.save(folder / f"{name}.npy", instance.content(name), allow_pickle=False)
        return str(folder)

    def verify(self, candidate: Candidate, repeats: int, limit_s: float, stage: Stage) -> Evaluation:
        """Verify up to ``repeats`` times, but once in any case, alternately with a plain launch and as for timing.

        Every two repeats the inputs change if there is a second set, so that a result that the kernel kept from an
        earlier launch is wrong.
        """
        stage("load")
        config, functions = candidate.config, self._load(candidate)
        start = time.perf_counter()
        instance = self._tuned.of(config)
        if self._verify_seed:
            instance.add_inputs(self._verify_seed)
        done, verdict = 0, Verdict(Outcome.OK)
        digests: dict[int, set[str]] = {}
        while done == 0 or (done < repeats and time.perf_counter() - start < limit_s):
            seed = self._verify_seed if done // 2 % 2 else 0
            instance.use_inputs(seed)
            done += 1
            stage("verify")  # each repeat has a limit of time of its own
            verdict = self._verify(functions, config, as_measured=done % 2 == 0)
            if verdict.outcome is not Outcome.OK:
                break
            digests.setdefault(seed, set()).add(instance.digest())
        instance.use_inputs(0)
        if verdict.outcome is Outcome.OK and instance.is_unconfirmed:
            return Evaluation(Outcome.WRONG_RESULT, _UNCONFIRMED, "verify")
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, f"{verdict.reason}, in repeat {done} of {repeats}", "verify")
        self._known_good = (functions, config)
        seconds = {"verify": round(time.perf_counter() - start, 6)}
        digest = VARYING_OUTPUTS if any(len(found) > 1 for found in digests.values()) else min(digests[0])
        return Evaluation(
            Outcome.OK, stage="verify", seconds=seconds, telemetry={"repeats": done, OUTPUT_DIGEST: digest}
        )

    def set_verify_seed(self, seed: int) -> None:
        """Draw the second set of inputs, or drop it if the seed is 0; see `Workload.verify_seed`."""
        if seed:
            self._tuned.of(self._spec.default).add_inputs(seed)
        for instance in self._tuned if not seed else ():
            instance.drop_inputs()
        self._verify_seed = seed

    def is_intact(self) -> bool:
        """Verify the newest candidate that passed again; return whether it still passes."""
        return self._known_good is not None and self._verify(*self._known_good).outcome is Outcome.OK

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[RaceTimes]:
        """Time verified candidates in interleaved rounds, and verify the outputs that timed launches wrote."""
        return race(self.timer, [self.entrant(candidate) for candidate in candidates], rounds, seed)

    def entrant(self, candidate: Candidate) -> Entrant:
        """Return a verified candidate, ready to be timed."""
        instance = self._tuned.of(candidate.config)
        bound = instance.bind(candidate.config, self.device)
        launch = launch_sequence(self._load(candidate).tuned, instance, bound)
        self.fresh = False
        return Entrant(
            launch, partial(instance.prepare, bound), partial(self._verdict_on_timed, bound), candidate.weight
        )

    def library_entrant(self, library: LibraryOn) -> Entrant:
        """Return a library on the buffers of the default configuration."""
        return library_entrant(self._tuned.of(self._spec.default), library)

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """Return the occupancy that the driver computes, that of the main launch if there are several."""
        functions = self._load(candidate).tuned
        plan = LaunchPlan.of(self._spec, candidate.config, self._tuned.sizes, self.device)
        functions.opt_in(plan)
        geometry = plan.main.geometry
        return functions[plan.main.step].blocks_per_sm(geometry.threads, geometry.dynamic_smem_bytes)

    def _measure(self, launch: LaunchSequence, best_us: float | None, bound: BoundArguments) -> Evaluation:
        if self._event_floor_us is None:
            self.timer.warm_up(launch, partial(bound.instance.prepare, bound))
            self._event_floor_us = round(self.timer.event_floor_us(), 3)
        timing = self.timer.measure(launch, best_us, partial(bound.instance.prepare, bound))
        verdict = self._verdict_on_timed(bound)
        if verdict.outcome is not Outcome.OK:
            return Evaluation(verdict.outcome, verdict.reason, "measure")
        telemetry: dict[str, float | int | str] = {
            **self._telemetry.read(),
            "reference_us": self._drift.read_us(),
            "event_floor_us": self._event_floor_us,
            OUTPUT_DIGEST: bound.instance.digest(),
        }
        outcome, reason = Outcome.OK, ""
        if best_us is not None and timing.discarded:
            outcome, reason = Outcome.PRUNED, discard_reason(best_us)
        elif self._energy is not None:
            telemetry |= self._energy.read(launch, timing.measurement.time_us)
        if len(self._spec.steps) > 1:
            telemetry |= self._step_times(launch, bound)
        return Evaluation(outcome, reason, "measure", timing.measurement, telemetry=telemetry)

    def _step_times(self, launch: LaunchSequence, bound: BoundArguments) -> dict[str, float]:
        """Return the time of each step in microseconds, measured between events in whole calls."""
        by_step = launch.by_step()
        times = self.timer.parts(list(by_step.values()), partial(bound.instance.prepare, bound))
        names = [f"{STEP_TIME}{step}.{self._spec.steps[step].entry}" for step in by_step]
        return dict(zip(names, times, strict=True))

    def _verdict_on_timed(self, bound: BoundArguments) -> Verdict:
        """Verify what the last timed launch wrote, before which the outputs were overwritten."""
        verdict = bound.instance.verdict(bound)
        if verdict.outcome is Outcome.OK:
            return verdict
        return verdict._replace(reason=f"{verdict.reason}, in a timed launch after correct ones")

    def _verify(self, functions: SizedFunctions, config: Config, *, as_measured: bool = False) -> Verdict:
        """Verify at the ragged sizes if the rules allow them there, at the tuned sizes, and at the extra ones."""
        max_error = 0.0
        for instances in filter(None, (self._ragged, self._tuned, *self._others)):
            broken_rule = check_config(self._spec, config, instances.sizes, self.device, self._dtype)
            if broken_rule and instances is self._ragged:
                continue
            if broken_rule:
                return Verdict(Outcome.INFEASIBLE, f"{broken_rule} at {config_text(instances.sizes)}")
            instance = instances.of(config)
            bound = instance.bind(config, self.device)
            launch = launch_sequence(functions.at(instances.sizes), instance, bound)
            instance.prepare(bound)
            self.fresh = False
            if as_measured:
                self.timer.samples(launch, 1)
            else:
                launch()
            verdict = instance.verdict(bound)
            if verdict.outcome is not Outcome.OK:
                return verdict
            max_error = max(max_error, verdict.max_error)
        return Verdict(Outcome.OK, max_error=max_error)

    def _load(self, candidate: Candidate) -> SizedFunctions:
        return sized_functions(self._spec, candidate)


def reference_kernel(spec: KernelSpec, source: KernelSource) -> Kernel:
    """Return the kernel whose template holds a reference kernel."""
    return Kernel(
        spec,
        source.source,
        Path(source.template_path),
        source.source_hash,
        include_folders=tuple(map(Path, source.include_folders)),
        template_names=frozenset(source.template_names),
    )


def launch_sequence(functions: StepFunctions, instance: ProblemInstance, bound: BoundArguments) -> LaunchSequence:
    """Return the launches of loaded functions on the buffers of an instance, with its constants in place."""
    instance.copy_constants(functions.module)
    return LaunchSequence(functions, bound.plan, bound.arguments)


_UNCONFIRMED = (
    "there is no reference, and no two configurations of different blocks or grids gave the same outputs; add a "
    "reference"
)


class _StageTimer:
    """Wall time of each stage, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began_at = self._start = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._start, 6)
        self._start = now
