"""Problems laid out on a GPU, on which the entries of jobs are verified and timed; and the worker process around them.

The process ends after an error that leaves its context broken. A candidate that writes out of bounds, beyond the guard
bands, may corrupt the inputs or references that later ones are verified with. The newest candidate that passed on each
problem is therefore kept: while it still passes, the data are intact.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from autotile.cuda.driver import live_device, make_context, rejected
from autotile.workers.child import Channel, Fields, Stage, files_of_any_size, serve

if __name__ == "__main__":  # while the imports below run: the context and the kernels that verify take as long
    _CHANNEL = Channel()
    _PREPARING = [
        threading.Thread(target=prepare, args=(int(index),), daemon=True)
        for index in sys.argv[1:]
        for prepare in (make_context, lambda index: import_module("autotile.cuda.compiler").compile_support(index))
    ]
    for _thread in _PREPARING:
        _thread.start()

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import canonical_json, convert, to_fields
from autotile.core.model import (
    OUTPUT_DIGEST,
    STEP_TIME,
    VARYING_OUTPUTS,
    Config,
    Measurement,
    Outcome,
    Problem,
    config_text,
)
from autotile.core.statistics import discard_reason
from autotile.cuda.compiler import CubinCache
from autotile.cuda.expected_outputs import ExpectedOutputs
from autotile.cuda.function import LaunchSequence, StepFunctions
from autotile.cuda.instance import MEMORY_SHARE, BoundArguments, Instances, ProblemInstance, Verdict
from autotile.cuda.support import SupportKernels
from autotile.cuda.timing import Launch, Nvml, Timer, drift_us, energy_meter
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.kernel.inputs import ragged_problem
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import Kernel
from autotile.space.limits import check_config
from autotile.workers.jobs import (
    CHECK_STAGE,
    INPUTS_STAGE,
    JOBS,
    LIBRARY_VERSION,
    RACE_STAGE,
    REPEATS,
    SECOND_SEED,
    Candidate,
    Check,
    Entry,
    Job,
    Race,
    Reading,
    Time,
    Workload,
    loaded,
    read_job,
)

_MAX_KEPT = 16
"""Problems besides the present one whose inputs are kept, such as those of the other kernels of an operation."""
_MAX_MODULES = 4096
"""Modules of a grid that stay loaded."""
_SLOW_RATIO = 2.0
_FLOOR_US = 5.0
"""In a grid, a first launch that takes this much longer than the best, and more than the ratio, is not repeated. A
launch alone between two events is a few microseconds longer than one in a graph."""
_CHECKS_S = 2.0
"""Time after which the verifications before a race end."""
_RAGGED_REPEATS = 8
"""In a grid, verifications of each configuration at the ragged sizes; of the fastest one of each kernel at a problem,
there are as many as in finals."""
_GRID_CHECK_S = 0.2
"""Time after which these end, in seconds: the fastest of the finals of a problem alone have longer."""
_UNCONFIRMED = (
    "there is no reference, and no two configurations of different blocks or grids gave the same outputs; add a "
    "reference"
)

OwnLibraries = Mapping[str, Callable[..., Any]]
"""Python functions of the arrays of a kernel, in the order of its arguments, by the names of the libraries."""


_Runnable = tuple[Launch, Launch, Callable[[], Verdict]]
"""An entry that is ready to be launched: its launch, what is called before each one, as for
`autotile.cuda.timing.Timer.race`, and what verifies the outputs of the last one."""


class Bench:
    """Verifies and times candidates and libraries at the problems that are laid out on one GPU.

    ``libraries`` are functions that take the place of libraries, in a process that may call them.
    """

    def __init__(self, libraries: OwnLibraries | None = None) -> None:
        self._own = libraries or {}
        self._present: LaidOut | None = None
        self._problems: OrderedDict[str, LaidOut] = OrderedDict()
        """Problems by their workloads; the newest is the last."""
        self._kernels: OrderedDict[str, _LoadedKernel] = OrderedDict()

    def open(self, workload: Workload) -> DeviceProperties:
        """Lay out a problem, or take one that is laid out already and intact; entries without a problem are of it.

        Raise `InputError` if it does not fit in memory, or its reference cannot be computed.
        """
        self._present = None  # none is left if an error follows
        self._present = problem = self._laid_out(workload, None)
        kernel = self._kernel_of(workload)
        # the clocks rise while the problem is laid out and the first candidate compiles
        kernel.timer.begin_warm_up(partial(kernel.support.spin, kernel.device.sm_count))
        problem.lay_out()
        return problem.device

    def leave(self) -> None:
        """Open no problem: that of an earlier session is freed where the jobs need its memory."""
        self._present = None

    def run(self, job: Job, stage: Stage, readings: list[Reading]) -> bool:
        """Run the entries of a job behind those of the readings, and append one for each as it ends.

        Return False if the data that entries are verified with were overwritten, so that the process must end; the
        newest reading is then that of the entry that did it, if it is known. ``stage`` is called with the name of each
        stage, and behind it the number of the entry if the job has several. Raise `InputError` if a problem does not
        fit in memory, its reference cannot be computed, or no second inputs can be drawn.
        """
        if isinstance(job, Time) and job.grid and not readings:
            self._problems.clear()  # the last problem of the grid is not asked for again
        problems = self._problems_of(job)
        if isinstance(job, Race):
            stage("open")
            raced = self._raced(job, [problems(entry) for entry in job.entries], stage)
            readings += raced or []
            return raced is not None
        for number in range(len(readings), len(job.entries)):

            def enter(name: str, number: int = number) -> None:
                stage(name if len(job.entries) == 1 else f"{name} {number}")

            enter("load")
            entry = job.entries[number]
            problem = problems(entry)
            was_fresh = problem.fresh
            if isinstance(job, Check):
                reading = problem.checked(entry, job, enter)
            else:
                limits_us = [entry.limit_us]
                if job.grid:
                    timed = (one.measurement for one in readings if one.outcome is Outcome.OK)
                    limits_us += [measured.time_us for measured in timed if measured is not None]
                best_us = min((limit for limit in limits_us if limit is not None), default=None)
                if entry.candidate is not None:
                    reading = problem.timed(entry.candidate, best_us, enter, grid=job.grid)
                else:
                    reading = self._timed_library(problem, entry, best_us, enter)
            if reading.outcome in (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS) and not problem.is_intact():
                # unless an earlier candidate can be the cause, this one is at fault
                readings += [reading] if was_fresh or reading.outcome is Outcome.OUT_OF_BOUNDS else []
                return False
            readings.append(reading)
        if isinstance(job, Time) and job.grid:
            self._verify_fastest(job, [problems(entry) for entry in job.entries], readings, stage)
        return True

    @staticmethod
    def _verify_fastest(job: Time, problems: Sequence[LaidOut], readings: list[Reading], stage: Stage) -> None:
        """Verify the fastest candidate of each problem repeatedly; if it fails, the next one."""
        for problem in dict.fromkeys(problems):
            own = [n for n, one in enumerate(problems) if one is problem and job.entries[n].candidate is not None]
            while times_us := {
                found.measurement.time_us: n
                for n in reversed(own)
                if (found := readings[n]).outcome is Outcome.OK and found.measurement is not None
            }:
                fastest = times_us[min(times_us)]
                candidate = job.entries[fastest].candidate
                assert candidate is not None
                stage("verify" if len(problems) == 1 else f"verify {fastest}")
                verdict = problem.verified_repeatedly(candidate, REPEATS)
                if verdict.outcome is Outcome.OK:
                    break
                readings[fastest] = Reading(verdict.outcome, verdict.reason, "verify")

    def _problems_of(self, job: Job) -> Callable[[Entry], LaidOut]:
        """Return a function that lays out the problem of each entry when it is first asked for."""
        found: dict[int, LaidOut] = {}
        made: list[ProblemInstance] = []

        def problem_of(entry: Entry) -> LaidOut:
            if entry.problem is None:
                if self._present is None:
                    raise InputError("the worker has no workload yet: send open first")
                return self._present
            if entry.problem not in found:
                found[entry.problem] = problem = self._laid_out(job.workloads[entry.problem], made)
                try:
                    _ = problem.default_instance  # lays out the tuned sizes
                except load_cupy().cuda.memory.OutOfMemoryError as error:
                    raise InputError(f"the problem does not fit in the device's memory: {error}") from None
            return found[entry.problem]

        return problem_of

    def _laid_out(self, workload: Workload, made: list[ProblemInstance] | None) -> LaidOut:
        """Return the problem of a workload, which becomes the newest of those that are kept.

        ``made`` are the instances of the job's other problems, whose data it uses where they are the same.
        """
        key = canonical_json(to_fields(workload))
        problem = self._problems.pop(key, None)
        if problem is None or not problem.is_reusable():
            self._forget_problems(MEMORY_SHARE)
            try:
                problem = LaidOut(self._kernel_of(workload), workload, made)
            except load_cupy().cuda.memory.OutOfMemoryError:
                if not self._problems:
                    raise
                self._forget_problems(0.0)
                problem = LaidOut(self._kernel_of(workload), workload, made)
        self._problems[key] = problem
        return problem

    def _kernel_of(self, workload: Workload) -> _LoadedKernel:
        """Return the common state of all problems of a kernel."""
        key = canonical_json({**to_fields(workload), "sizes": None, "verify_sizes": None})
        kernel = self._kernels.pop(key, None) or _LoadedKernel(workload)
        while len(self._kernels) >= _MAX_KEPT:
            self._kernels.popitem(last=False)
        self._kernels[key] = kernel
        return kernel

    def _forget_problems(self, share: float) -> None:
        """Free the oldest problems until the others take a share of the device's memory at most."""
        while self._problems:
            limit_bytes = share * next(iter(self._problems.values())).device.memory_bytes
            if (
                sum(one.size_bytes for one in self._problems.values()) <= limit_bytes
                and len(self._problems) < _MAX_KEPT
            ):
                return
            del self._problems[next(iter(self._problems))]

    def _timed_library(self, problem: LaidOut, entry: Entry, best_us: float | None, stage: Stage) -> Reading:
        stage("verify")
        try:
            runner = self._library(problem, entry)
        except AutotileError as error:
            return Reading(Outcome.CRASHED, str(error), "verify")
        verdict = problem.verified(runner, 1)
        if verdict.outcome is not Outcome.OK:
            return Reading(verdict.outcome, verdict.reason, "verify")
        stage("measure")
        return replace(problem.measured(runner, best_us), telemetry=_version(entry.library))

    def _raced(self, job: Race, problems: Sequence[LaidOut], stage: Stage) -> list[Reading] | None:
        """Verify entries as often as the job says, and time those that are correct in interleaved rounds.

        None if data were overwritten: there is no telling by which entry.
        """
        timer = problems[0].timer
        readings: dict[int, Reading] = {}
        runners: dict[int, _Runnable] = {}
        graphs = True
        for number, (entry, problem) in enumerate(zip(job.entries, problems, strict=True)):
            verdict = Verdict(Outcome.OK)
            if job.checks:
                stage(f"{CHECK_STAGE}{number}")
            try:
                if entry.candidate is None:
                    runners[number] = runner = self._library(problem, entry)
                    verdict = problem.verified(runner, job.checks)
                    graphs = graphs and timer.can_capture(runner[0])
                else:
                    if job.checks:
                        found = problem.checked(entry, Check((), job.checks, _CHECKS_S), lambda _: None)
                        verdict = Verdict(found.outcome, found.reason)
                    runners[number] = problem.runner(entry.candidate)
            except AutotileError as error:
                verdict = Verdict(Outcome.CRASHED, str(error))
            if verdict.outcome is not Outcome.OK:
                readings[number] = Reading(verdict.outcome, verdict.reason, "race")
                runners.pop(number, None)
        if not runners:
            return list(readings.values())
        stage(RACE_STAGE)
        verdicts: list[Verdict] = []
        launches, prepares, verifications = map(list, zip(*runners.values(), strict=True))
        timer.warm_up(launches[0], prepares[0])
        times = timer.race(
            launches,
            job.rounds,
            job.seed,
            prepares=prepares,
            weights=[job.entries[number].weight for number in runners],
            check=lambda index: verdicts.append(verifications[index]()),
            graphs=graphs,
            precision=job.precision,
        )
        for number, row, verdict in zip(runners, times, verdicts, strict=True):
            telemetry = _version(job.entries[number].library)
            readings[number] = Reading(
                verdict.outcome, verdict.reason, "race", rounds_us=tuple(row), telemetry=telemetry
            )
        has_failed = any(verdict.outcome is not Outcome.OK for verdict in verdicts)
        if has_failed and not all(problem.is_intact() for problem in set(problems)):
            return None
        return [readings[number] for number in sorted(readings)]

    def _library(self, problem: LaidOut, entry: Entry) -> _Runnable:
        """Return a library, ready to run on the buffers of the default configuration.

        That there is no such library, or that it computes no such problem, is an `InputError`; that it is not
        installed, a `ToolchainError`.
        """
        call = entry.library
        assert call is not None
        instance = problem.default_instance
        # a library has no launches of ours and no workspaces
        bound = BoundArguments(instance, LaunchPlan(()), (), {}, frozenset())
        around = partial(instance.prepare, bound), partial(instance.verdict, bound)
        if (own := self._own.get(call.kernel)) is not None:
            return _launch_of_function(own, instance), *around
        if call.kernel != "cublas":  # the only one that an operation file may name
            raise InputError(f"there is no library {call.kernel!r} here")
        from autotile.cuda.cublas import Gemm, GemmLayout

        layout = GemmLayout.of(call.sizes, call.dtype)
        if not layout.is_supported:
            raise InputError("cuBLAS does not compute such a product")
        gemm = Gemm(layout, problem.device_index)
        addresses = [int(array.data.ptr) for array in instance.arrays]
        current_stream = load_cupy().cuda.get_current_stream
        return lambda: gemm(current_stream().ptr, addresses), *around


class _LoadedKernel:
    """A kernel on a GPU: what its problems share."""

    def __init__(self, workload: Workload) -> None:
        self.spec = workload.spec()
        self.device = live_device(workload.device_index)
        load_cupy().cuda.Device(workload.device_index).use()
        cache = CubinCache(Path(workload.cache), workload.cache_limit_bytes)
        self.support = SupportKernels(cache, self.device.architecture)
        reference = None
        if workload.reference_source is not None:
            text, path, digest, folders, names = workload.reference_source
            reference = Kernel(self.spec, text, path, digest, include_folders=folders, template_names=frozenset(names))
        self.references = ExpectedOutputs(
            self.spec,
            self.support,
            device=self.device,
            cache=cache,
            source=reference,
            folder=Path(workload.reference_folder) if workload.reference_folder else None,
        )
        self.timer = Timer(self.device.l2_bytes, workload.l2, workload.sample_limit_s)
        self.telemetry = Nvml(workload.device_index)
        self.energy = energy_meter(self.timer, self.telemetry) if workload.energy else None
        self.event_floor_us: float | None = None
        """Time between two events; None before the first measurement."""
        self.checked: dict[str, Verdict] = {}
        """Verdict at the ragged sizes on each cubin of a grid."""
        self._modules: OrderedDict[str, StepFunctions] = OrderedDict()

    def load(self, candidate: Candidate, *, keep: bool) -> StepFunctions:
        """Load a candidate into the current context; a kept module is taken again."""
        functions = self._modules.pop(candidate.cubin_path, None) if keep else None
        if functions is None:
            functions = loaded(candidate, self.spec)
        if keep:
            while len(self._modules) >= _MAX_MODULES:
                self._modules.popitem(last=False)
            self._modules[candidate.cubin_path] = functions
        return functions


class LaidOut:
    """A problem on the GPU: buffers and expected outputs, set up once for all candidates.

    ``made`` are instances of other problems, whose data are used where they are the same; those of this one are added.
    None for data of its own.
    """

    def __init__(self, kernel: _LoadedKernel, workload: Workload, made: list[ProblemInstance] | None) -> None:
        self._kernel = kernel
        self._spec, self.device, self.timer = kernel.spec, kernel.device, kernel.timer
        self.device_index = workload.device_index
        self._captured, self._capture_folder = workload.captured, workload.capture_folder
        self._made = made
        problem = self._spec.at(workload.sizes, workload.dtype)
        self._tuned = self._instances(problem, check=False)
        ragged = ragged_problem(self._spec, problem)
        self._ragged = self._instances(ragged, check=True) if ragged is not None else None
        others = [self._instances(problem.at(sizes), check=True) for sizes in workload.verify_sizes]
        self._all = [one for one in (self._ragged, self._tuned, *others) if one is not None]
        self.fresh = True
        """Whether no candidate has run yet."""

    @property
    def size_bytes(self) -> int:
        """Device memory of the buffers, the inputs and the expected outputs."""
        return sum(instances.size_bytes for instances in self._all)

    @property
    def default_instance(self) -> ProblemInstance:
        """Buffers and expected outputs of the default configuration."""
        return self._tuned.of(self._spec.default)

    def lay_out(self) -> None:
        """Make what most candidates need now, so that an error of the problem is reported before any is run."""
        default = self._spec.default
        for instances in self._all:
            if not self._spec.shaping or not check_config(self._spec, default, instances.problem, self.device):
                instances.of(default)

    def is_reusable(self) -> bool:
        """Return True if the data are as they were laid out; a second set of inputs is dropped."""
        for instance in self._tuned:
            instance.drop_inputs()
        return self.fresh or self.is_intact()

    def is_intact(self) -> bool:
        """Return True if inputs and expected outputs are as they were laid out."""
        return all(instance.is_intact() for instances in self._all for instance in instances)

    def timed(self, candidate: Candidate, best_us: float | None, stage: Stage, *, grid: bool) -> Reading:
        """Load, verify, then measure a candidate."""
        config = candidate.config
        began_at = last_s = time.perf_counter()
        seconds: dict[str, float] = {}

        def end(name: str) -> None:
            nonlocal last_s
            now_s = time.perf_counter()
            seconds[name] = round(now_s - last_s, 6)
            last_s = now_s

        functions = self._kernel.load(candidate, keep=grid)
        end("load")
        stage("verify")
        verdict = self._verify_once(functions, candidate) if grid else self._verify(functions, config)
        end("verify")
        if verdict.outcome is not Outcome.OK:
            return Reading(verdict.outcome, verdict.reason, "verify", seconds=seconds, began_at=began_at)
        instance = self._tuned.of(config)
        captured = ""
        if self._captured:
            captured = tempfile.mkdtemp(dir=self._capture_folder)
            with files_of_any_size():
                for name in self._captured:
                    np.save(Path(captured) / f"{name}.npy", instance.content(name), allow_pickle=False)
        digest = instance.digest() if not grid else ""
        stage("measure")
        bound = instance.bind(config, self.device)
        launch = _launch_sequence(functions, bound)
        reading = self.measured(self._runnable(launch, bound), best_us, is_quick=grid)
        telemetry: dict[str, float | int | str] = {**reading.telemetry, "max_error": verdict.max_error}
        if not grid and reading.outcome.has_time:
            kernel = self._kernel
            telemetry |= kernel.telemetry.read()
            # times by which drift is seen
            reference_us = drift_us(kernel.support, kernel.timer, kernel.device.sm_count)
            telemetry |= {"reference_us": reference_us, "event_floor_us": kernel.event_floor_us or 0.0}
            telemetry[OUTPUT_DIGEST] = digest if digest == instance.digest() else VARYING_OUTPUTS
            if kernel.energy is not None and reading.outcome is Outcome.OK and reading.measurement is not None:
                telemetry |= kernel.energy(launch, reading.measurement.time_us)
            if len(self._spec.steps) > 1:  # the time of each, between events in whole calls
                by_step = launch.by_step()
                names = [f"{STEP_TIME}{step}.{self._spec.steps[step].entry}" for step in by_step]
                times = self.timer.parts(list(by_step.values()), partial(instance.prepare, bound))
                telemetry |= dict(zip(names, times, strict=True))
        end("measure")
        return replace(reading, seconds=seconds, telemetry=telemetry, captured=captured, began_at=began_at)

    def measured(self, runner: _Runnable, best_us: float | None, *, is_quick: bool = True) -> Reading:
        """Measure what passed verification, and verify what its last timed launch wrote.

        With ``is_quick``, one launch suffices for what takes several times as long as the best.
        """
        launch, prepare, verify = runner
        if self._kernel.event_floor_us is None:
            self.timer.warm_up(launch, prepare)
            self._kernel.event_floor_us = round(self.timer.event_floor_us(), 3)
        if is_quick and best_us is not None:
            (once_us,) = self.timer.samples(launch, 1, prepare)
            if once_us > max(_SLOW_RATIO * best_us, best_us + _FLOOR_US):
                measurement = Measurement(once_us, once_us, once_us, (round(once_us, 3),), self.timer.l2)
                return Reading(Outcome.PRUNED, discard_reason(best_us), "measure", measurement)
        measured, is_discarded = self.timer.measure(launch, best_us, prepare)
        verdict = verify()
        if verdict.outcome is not Outcome.OK:
            return Reading(verdict.outcome, verdict.reason, "measure")
        if best_us is not None and is_discarded:
            return Reading(Outcome.PRUNED, discard_reason(best_us), "measure", measured)
        return Reading(Outcome.OK, "", "measure", measured)

    def checked(self, entry: Entry, job: Check, stage: Stage) -> Reading:
        """Verify up to as many times as the job says, but once in any case.

        Plain launches and launches as for timing alternate. Every two repeats the inputs change if there is a second
        set, so that a result that the kernel kept from an earlier launch is wrong.
        """
        candidate = entry.candidate
        if candidate is None:
            raise InputError("a library is verified in races only")
        config, functions = candidate.config, self._kernel.load(candidate, keep=False)
        start = time.perf_counter()
        instance = self._tuned.of(config)
        if job.seed:
            stage(INPUTS_STAGE)
            try:
                instance.add_inputs(job.seed)
            except load_cupy().cuda.memory.OutOfMemoryError as error:
                raise InputError(f"a second set of inputs does not fit in the device's memory: {error}") from None
        limit_s = job.limit_s if job.limit_s is not None else float("inf")
        done, verdict = 0, Verdict(Outcome.OK)
        digests: dict[int, set[str]] = {}
        while done == 0 or (done < job.repeats and time.perf_counter() - start < limit_s):
            seed = job.seed if done // 2 % 2 else 0
            instance.use_inputs(seed)
            done += 1
            stage("verify")  # each repeat has a limit of time of its own
            verdict = self._verify(functions, config, as_measured=done % 2 == 0)
            if verdict.outcome is not Outcome.OK:
                break
            digests.setdefault(seed, set()).add(instance.digest())
        instance.use_inputs(0)
        if verdict.outcome is Outcome.OK and instance.is_unconfirmed:
            return Reading(Outcome.WRONG_RESULT, _UNCONFIRMED, "verify")
        if verdict.outcome is not Outcome.OK:
            return Reading(verdict.outcome, f"{verdict.reason}, in repeat {done} of {job.repeats}", "verify")
        digest = VARYING_OUTPUTS if any(len(found) > 1 for found in digests.values()) else min(digests[0])
        telemetry: dict[str, int | str] = {"repeats": done, OUTPUT_DIGEST: digest}
        seconds = {"verify": round(time.perf_counter() - start, 6)}
        return Reading(Outcome.OK, stage="verify", seconds=seconds, telemetry=telemetry)

    def verified(self, runner: _Runnable, repeats: int) -> Verdict:
        """Return the verdict on repeated launches of a library."""
        launch, prepare, verify = runner
        verdict = Verdict(Outcome.OK)
        for _ in range(repeats):
            self.timer.samples(launch, 1, prepare, repeats=False)
            verdict = verify()
            if verdict.outcome is not Outcome.OK:
                break
        return verdict

    def runner(self, candidate: Candidate) -> _Runnable:
        """Return a verified candidate, ready to be timed."""
        bound = self._tuned.of(candidate.config).bind(candidate.config, self.device)
        functions = self._kernel.load(candidate, keep=False)
        self.fresh = False
        return self._runnable(_launch_sequence(functions, bound), bound)

    @staticmethod
    def _runnable(launch: LaunchSequence, bound: BoundArguments) -> _Runnable:
        return launch, partial(bound.instance.prepare, bound), partial(_timed_verdict, bound)

    def _instances(self, problem: Problem, *, check: bool) -> Instances:
        kernel = self._kernel

        def make(shaped: Problem) -> ProblemInstance:
            made = ProblemInstance(
                self._spec,
                shaped,
                kernel.support,
                check=check,
                references=kernel.references,
                like=tuple(self._made or ()),
            )
            if self._made is not None:
                self._made.append(made)
            return made

        return Instances(self._spec, problem, make, MEMORY_SHARE * self.device.memory_bytes)

    def _verify_once(self, functions: StepFunctions, candidate: Candidate) -> Verdict:
        """Verify at the tuned sizes, and before at the others, repeatedly, unless the same code was verified there."""
        others = [one for one in self._all if one is not self._tuned]
        code = canonical_json(
            [candidate.cubin_path, [path for _, path, _ in candidate.others], [one.problem.sizes for one in others]]
        )
        verdict = self._kernel.checked.get(code)
        if verdict is None:
            verdict = self.verified_repeatedly(candidate, _RAGGED_REPEATS, others)
            self._kernel.checked[code] = verdict
        if verdict.outcome is not Outcome.OK:
            return verdict
        return self._verify(functions, candidate.config, [self._tuned])

    def verified_repeatedly(self, candidate: Candidate, repeats: int, at: Sequence[Instances] | None = None) -> Verdict:
        """Verify in a grid, at the tuned sizes if no others are given, for a short time.

        Two sets of inputs take turns, each with a plain launch and one as for timing.
        """
        functions, config, verdict = self._kernel.load(candidate, keep=True), candidate.config, Verdict(Outcome.OK)
        for instances in [self._tuned] if at is None else at:
            if check_config(self._spec, config, instances.problem, self.device):
                continue
            instance = instances.of(config)
            seeds: tuple[int, ...] = (0, SECOND_SEED)
            try:
                instance.add_inputs(SECOND_SEED)
            except (InputError, ToolchainError, load_cupy().cuda.memory.OutOfMemoryError):
                seeds = (0,)  # there is no room for a second set of inputs, or no reference
            done, end = 0, time.perf_counter() + _GRID_CHECK_S
            try:
                while done < 2 * len(seeds) or (done < repeats and time.perf_counter() < end):
                    instance.use_inputs(seeds[done // 2 % len(seeds)])
                    verdict = self._verify(functions, config, [instances], as_measured=done % 2 == 1)
                    done += 1
                    if verdict.outcome is not Outcome.OK:
                        return verdict._replace(reason=f"{verdict.reason}, in repeat {done} of {repeats}")
            finally:
                instance.use_inputs(0)
        return verdict

    def _verify(
        self,
        functions: StepFunctions,
        config: Config,
        at: Sequence[Instances] | None = None,
        *,
        as_measured: bool = False,
    ) -> Verdict:
        """Verify at some sizes; None for the ragged ones if the rules allow them, the tuned and the extra ones."""
        max_error = 0.0
        for instances in self._all if at is None else at:
            broken_rule = check_config(self._spec, config, instances.problem, self.device)
            if broken_rule and instances is self._ragged:
                continue
            if broken_rule:
                return Verdict(Outcome.INFEASIBLE, f"{broken_rule} at {config_text(instances.problem.sizes)}")
            instance = instances.of(config)
            bound = instance.bind(config, self.device)
            launch = _launch_sequence(functions.at(instances.problem.sizes), bound)
            self.fresh = False
            if as_measured:
                self.timer.samples(launch, 1, partial(instance.prepare, bound), repeats=False)
            else:
                instance.prepare(bound)
                launch()
            verdict = instance.verdict(bound)
            if verdict.outcome is not Outcome.OK:
                return verdict
            max_error = max(max_error, verdict.max_error)
        return Verdict(Outcome.OK, max_error=max_error)


def _timed_verdict(bound: BoundArguments) -> Verdict:
    """Verify what the last timed launch wrote, before which the outputs were overwritten."""
    verdict = bound.instance.verdict(bound)
    if verdict.outcome is Outcome.OK:
        return verdict
    return verdict._replace(reason=f"{verdict.reason}, in a timed launch after correct ones")


def _launch_sequence(functions: StepFunctions, bound: BoundArguments) -> LaunchSequence:
    """Return the launches of loaded functions on bound buffers, with the constants of their problem in place."""
    bound.instance.copy_constants(functions.module)
    return LaunchSequence(functions, bound.plan, bound.arguments)


def _version(call: Problem | None) -> dict[str, str]:
    """Return the version of a library for the telemetry of its reading; empty if it is not installed."""
    if call is None:
        return {}
    from autotile.cuda.cublas import cublas_version

    try:
        return {LIBRARY_VERSION: cublas_version() if call.kernel == "cublas" else ""}
    except ToolchainError:
        return {LIBRARY_VERSION: ""}


def _launch_of_function(function: Callable[..., Any], instance: ProblemInstance) -> Launch:
    """Return the launch of a Python function of the arrays of a kernel.

    It is given arrays of CuPy, or tensors of PyTorch if it does not take these, and queues its work on the current
    stream of its library.
    """
    fault: Exception | None = None
    for is_torch in (False, True):
        arrays: Sequence[Any] = instance.arrays
        if is_torch:
            torch = sys.modules.get("torch")
            if torch is None:
                break
            arrays = [
                torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
                if element == "bfloat16"
                else torch.from_dlpack(array)
                for array, element in zip(arrays, instance.element_types, strict=True)
            ]
        launch = partial(_call, function, arrays)
        try:
            launch()
        except InputError as error:
            fault = fault or error
        else:
            return launch
    raise fault or InputError("there are no arrays to call it with")


def _call(function: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Call a function on CuPy's current stream, which is made that of PyTorch too if it is loaded."""
    torch, stream = sys.modules.get("torch"), None
    try:
        if torch is not None:
            stream = torch.cuda.stream(torch.cuda.ExternalStream(load_cupy().cuda.get_current_stream().ptr))
        with stream or nullcontext():
            function(*arrays)
    except AutotileError:
        raise
    except Exception as error:
        raise InputError(f"the library failed: {type(error).__name__}: {error}") from error


_LAUNCH_FAILED = 719
_LAUNCH_FAILED_HINT = "a trap, or an address outside shared or local memory"
"""Causes of CUDA_ERROR_LAUNCH_FAILED, which the driver describes as "unspecified launch failure"."""


def handle(bench: Bench, preparing: Sequence[threading.Thread], message: Fields, stage: Stage) -> Fields:
    """Handle one request of the worker: ``open``, the jobs ``time``, ``check`` and ``race``, or ``ceilings``.

    The first request waits for the threads that prepare the process.
    """
    cuda = load_cupy().cuda
    entered = [""]  # stages of the request so far

    def enter(name: str) -> None:
        entered.append(name)
        stage(name)

    try:
        match message["op"]:
            case "open":
                enter("open")
                device = live_device(message["device_index"])
                for thread in preparing:
                    thread.join()
                cuda.Device(message["device_index"]).use()
                cuda.runtime.free(0)  # makes the context, if there is none
                if message["workload"] is None:  # each entry has one
                    bench.leave()
                    return device.to_json()
                return bench.open(convert(message["workload"], Workload)).to_json()
            case "race":
                readings: list[Reading] = []
                if not bench.run(read_job(message), enter, readings):
                    return {"error": "a candidate overwrote the worker's data in the race", "last": True}
                return {"readings": readings}
            case job if job in JOBS:
                return _run(bench, read_job(message), enter, entered)
            case "ceilings":
                from autotile.workers.device_ceilings import measure_ceilings

                cache = CubinCache(Path(message["cache"]), message["cache_limit_bytes"])
                return measure_ceilings(cache, message["device_index"], enter).to_json()
            case unknown:
                raise InputError(f"unknown request {unknown!r}")
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
        outcome, reason = _fault(error)
        return {"error": reason, "kind": "cuda", "stage": entered[-1], "last": outcome is None}
    except cuda.memory.OutOfMemoryError as error:
        if message["op"] == "open":
            raise InputError(f"the problem does not fit in the device's memory: {error}") from None
        return {"error": str(error), "kind": "cuda"}


def _run(bench: Bench, job: Job, enter: Stage, entered: Sequence[str]) -> Fields:
    """Run a job; of one that breaks the worker, reply with the readings up to the entry that did."""
    cuda = load_cupy().cuda
    readings: list[Reading] = []
    while len(readings) < len(job.entries):
        fault: Outcome | None = None
        try:
            if bench.run(job, enter, readings):
                continue
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            stage = entered[-1].partition(" ")[0]
            fault, reason = _fault(error)
            readings.append(Reading(fault or Outcome.CRASHED, f"{reason} in stage {stage}", stage))
        except cuda.memory.OutOfMemoryError as error:
            stage, fault = entered[-1].partition(" ")[0], Outcome.RESOURCE_EXCEEDED
            readings.append(Reading(fault, f"{error} in stage {stage}", stage))
        if fault is None:
            return {"readings": readings, "last": True}
    return {"readings": readings}


def _fault(error: Any) -> tuple[Outcome | None, str]:
    """Return the outcome of a launch that was merely rejected, None after an error that ends the worker; and why."""
    hint = f" ({_LAUNCH_FAILED_HINT})" if int(error.status) == _LAUNCH_FAILED else ""
    return rejected(error), f"{error}{hint}"


def _prepare() -> None:
    """Load what every request needs."""
    load_cupy()
    import_module("numpy.ma")  # by the first median


if __name__ == "__main__":
    serve(partial(handle, Bench(), _PREPARING), _prepare, _CHANNEL)
    os._exit(0)  # the system frees what the GPU holds sooner than the interpreter
