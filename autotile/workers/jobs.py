"""Jobs for a GPU, the readings that come back, and the form in which both are sent to another process.

A job holds entries, each a compiled candidate or a library at a problem, and says how they are run: `Time` verifies
and measures, `Check` verifies repeatedly, `Race` times in interleaved rounds. A GPU returns one `Reading` an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotile.core.documents import Count, Finite, Name, NonNegative, Positive, Text, TimeUs, Whole, convert, to_fields
from autotile.core.model import GPU_SCALE, STEP_TIME, Config, L2Mode, Measurement, Outcome, Problem, Sizes, Trial

if TYPE_CHECKING:
    from autotile.cuda.function import StepFunctions
    from autotile.kernel.spec import KernelSpec


ReferenceSource = tuple[str, Path, Name, tuple[Path, ...], tuple[str, ...]]
"""Source of a reference kernel, its file, its hash, the folders of its headers and the names of its template's
parameters, as of `autotile.kernel.library.Kernel`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kernel at sizes, as a GPU lays it out: inputs, expected outputs and a timer for all of its candidates."""

    spec_text: str
    spec_source: str
    sizes: Mapping[Name, Count]
    dtype: Name
    l2: L2Mode
    cache: str
    cache_limit_bytes: Whole
    sample_limit_s: NonNegative
    device_index: Count = 0
    spec_folder: str = ""
    """Folder of the files that the arguments name."""
    captured_call: str = ""
    """Folder of a captured call, whose arguments are the inputs; "" for the declared contents."""
    verify_sizes: tuple[Sizes, ...] = ()
    """Sizes at which a candidate is verified besides the ragged and the tuned ones."""
    energy: bool = False
    """Whether the energy of a launch is measured, too."""
    captured: tuple[Name, ...] = ()
    """Buffers whose content after the verified launch is saved, for a check by the parent."""
    capture_folder: str = ""
    """Folder of the saved contents."""
    reference_source: ReferenceSource | None = None
    """Source of the reference kernel, if the reference is one."""
    reference_folder: str = ""
    """Folder of the results of a reference in Python, or of those on which configurations agreed; "" for none."""

    def spec(self) -> KernelSpec:
        """Parse the kernel, with the inputs of the captured call if there is one."""
        from autotile.kernel.inputs import with_captured_call
        from autotile.kernel.parser import parse_spec

        spec = parse_spec(self.spec_text, self.spec_source, folder=self.spec_folder)
        return with_captured_call(spec, Path(self.captured_call)) if self.captured_call else spec


SizedCubin = tuple[Sizes, str, Mapping[str, str]]
"""Sizes other than those that are tuned, the path of the cubin that was compiled for them, and the names in it of its
entries, as of a `Candidate`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compiled configuration, ready to load."""

    config: Config
    cubin_path: str
    symbols: Mapping[str, str] = field(default_factory=dict)
    """Name in the cubin of each entry; one that is not listed has its own name."""
    computed: Config = field(default_factory=dict)
    """Computed values, which the worker has no functions for."""
    others: tuple[SizedCubin, ...] = ()
    """Cubins for the other problems of the verification, where sizes are compiled in."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate or a library, as a GPU takes it."""

    candidate: Candidate | None = None
    """The compiled configuration; None for a library."""
    library: Problem | None = None
    """A problem of an operation, flags included, with the name of a library in place of the kernel's: one of
    `autotile.kernel.operation.LIBRARIES`, or of the user's; None for a candidate."""
    problem: Count | None = None
    """Place of its problem in the job's workloads; a library runs on the buffers of that kernel. None for the problem
    that the GPU was opened with."""
    limit_us: NonNegative | None = None
    """Of `Time`: best time so far, against which what is clearly slower is dropped; None to measure it in full."""
    weight: Finite = 1.0
    """Of `Race`: ratio of what is minimised to the time, by which entries are compared."""


@dataclass(frozen=True, slots=True)
class Time:
    """Verify and measure one entry, or those of a grid in their order."""

    entries: tuple[Entry, ...]
    grid: bool = False
    """Whether this is one of many problems of the same candidates: a code is verified at ragged sizes once, modules
    stay loaded, each entry limits those behind it, and neither clocks nor output digests are read. In the end the
    fastest of each kernel is verified repeatedly, as finals do."""
    workloads: tuple[Workload, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Verify entries repeatedly, alternately with a plain launch and as for timing; nothing is measured."""

    entries: tuple[Entry, ...]
    repeats: Positive
    """Maximum number of repeats of each entry. 75, of two runs each, find a kernel that is wrong in one run of fifty
    with 95 % probability."""
    limit_s: NonNegative | None = None
    """Time for an entry; None for half of its deadline."""
    seed: Count = 0
    """Seed of a second set of inputs, between which every two repeats alternate; 0 for none."""
    workloads: tuple[Workload, ...] = ()


REPEATS = 75
"""Verification runs of a finalist, two launches each: an error in one launch of fifty is then found with 95 %
probability, 1 - 0.98 ** 150."""
_BASE_S, _SEARCH_SHARE, _BRIEF_US = 0.8, 0.1, 1000.0
"""Finals take a second and a tenth of the time of the search at most, and those of kernels of less than a millisecond a
second: this, and what compiling and a few repeats of each check take in any case."""


def finals_limit_s(time_us: float, search_s: float) -> float:
    """Return the time that finals may take, in seconds, given that of the fastest kernel and that of the search."""
    return _BASE_S + (_SEARCH_SHARE * search_s if time_us >= _BRIEF_US else 0.0)


RACE_S = 3.0
"""GPU time of a whole race, in seconds, which bounds the number of rounds."""
MIN_ROUNDS, MAX_ROUNDS = 9, 60
"""In simulation, 60 interleaved rounds of 12 finalists left a winner 0.01 % off, at 0.8 % noise with drift."""


def race_rounds(round_us: float, limit_s: float = RACE_S, most: int = MAX_ROUNDS) -> int:
    """Return the number of rounds of a race that takes about a limited time, given the time of one in microseconds."""
    return max(MIN_ROUNDS, min(most, int(limit_s * 1e6 / max(round_us, 1.0))))


@dataclass(frozen=True, slots=True)
class Race:
    """Time entries of any problems in interleaved rounds, and verify what the timed launches wrote."""

    entries: tuple[Entry, ...]
    rounds: Positive
    seed: Count
    """Seed of the order within the rounds."""
    checks: Count = 0
    """Verifications of each entry before the first round; one that fails does not take part."""
    expected_s: NonNegative = 0.0
    """Expected time of all launches, by which the deadline is extended."""
    precision: NonNegative = 0.0
    """Half width of the intervals, relative to their values, with which it ends early; 0 for all rounds."""
    workloads: tuple[Workload, ...] = ()

    @classmethod
    def lasting(
        cls,
        entries: Sequence[Entry],
        round_us: float,
        seed: int,
        *,
        limit_s: float = RACE_S,
        most: int = MAX_ROUNDS,
        checks: int = 0,
        precision: float = 0.0,
        workloads: Sequence[Workload] = (),
    ) -> Race:
        """Return a race of about a limited time, given the expected time of a round."""
        rounds = race_rounds(round_us, limit_s, most)
        return cls(tuple(entries), rounds, seed, checks, 1e-6 * rounds * round_us, precision, tuple(workloads))


Job = Time | Check | Race


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of an entry of a job on a GPU."""

    outcome: Outcome
    reason: Text = ""
    stage: Name = ""
    measurement: Measurement | None = None
    """Time of a launch; of `Time` alone."""
    seconds: Mapping[Name, NonNegative] = field(default_factory=dict)
    """Wall time of each stage."""
    telemetry: Mapping[Name, Finite | Whole | Text] = field(default_factory=dict)
    rounds_us: tuple[TimeUs, ...] = ()
    """Times in a race, one a round."""
    began_at: NonNegative = 0.0
    """Start in the worker, by `time.perf_counter`, which all processes of a machine share; 0 if it is not known."""
    captured: Text = ""
    """Folder of the contents of buffers that were saved; see `Workload.captured`."""
    gpu: Name = ""
    """UUID of the GPU; empty if it is not known."""
    died: bool = False
    """Whether the worker crashed or hung with the entry; one that ends after a wrong result has not died."""

    def result_of(self, trial: Trial) -> Trial:
        """Return the trial of a candidate with what the reading found; what it does not state stays."""
        return replace(
            trial,
            outcome=self.outcome,
            reason=self.reason,
            stage=self.stage,
            measurement=self.measurement,
            gpu=self.gpu or trial.gpu,
            seconds={**trial.seconds, **self.seconds},
            telemetry={**trial.telemetry, **self.telemetry},
        )

    def scaled(self, scale: float | None) -> Reading:
        """Return the reading with its times multiplied by a factor, which its telemetry states; None for none."""
        measured = self.measurement
        if measured is None or scale is None:
            return self
        telemetry = {
            name: round(float(value) * scale, 3) if name.startswith(STEP_TIME) else value
            for name, value in self.telemetry.items()
        }
        # that of a GPU to its session, of that to its study
        telemetry[GPU_SCALE] = round(scale * float(telemetry.get(GPU_SCALE, 1.0)), 6)
        times = tuple(round(time_us * scale, 4) for time_us in measured.samples_us)
        time_us, low_us, high_us = (scale * each for each in (measured.time_us, measured.low_us, measured.high_us))
        return replace(self, measurement=Measurement(time_us, low_us, high_us, times, measured.l2), telemetry=telemetry)


SECOND_SEED = 1
"""Seed of the second set of inputs, with which repeated verification alternates."""
CHECK_STAGE, RACE_STAGE = "check ", "race"
"""Stages of a race: the verification of an entry before it, followed by its number, and the race."""
INPUTS_STAGE = "inputs"
"""Stage of a check in which a second set of inputs is drawn, where no candidate is at fault."""
LIBRARY_VERSION = "library_version"
"""Key of the telemetry of a library's reading: its version on the machine that ran it."""


def _with_candidates(job: Job, change: Callable[[Candidate], Candidate]) -> Job:
    entries = [one if one.candidate is None else replace(one, candidate=change(one.candidate)) for one in job.entries]
    return replace(job, entries=tuple(entries))


def with_files(job: Job, file: Callable[[str], str], workload: Callable[[Workload], Workload] = lambda one: one) -> Job:
    """Return a job whose cubins' paths and workloads are replaced by functions of them, as on another machine."""

    def moved(candidate: Candidate) -> Candidate:
        others = tuple((sizes, file(path), symbols) for sizes, path, symbols in candidate.others)
        return replace(candidate, cubin_path=file(candidate.cubin_path), others=others)

    return replace(_with_candidates(job, moved), workloads=tuple(map(workload, job.workloads)))


JOBS: Mapping[str, type[Time] | type[Check] | type[Race]] = {"time": Time, "check": Check, "race": Race}
"""Kinds of jobs by the names of their requests."""


def job_message(job: Job) -> dict[str, Any]:
    """Return a job as JSON values, in which configurations hold the computed values."""
    op = next(name for name, kind in JOBS.items() if isinstance(job, kind))
    complete = _with_candidates(job, lambda one: replace(one, config={**one.config, **one.computed}, computed={}))
    return {"op": op, **to_fields(complete)}


def read_job(message: Mapping[str, Any]) -> Job:
    """Parse the message of a job; raise `DataError` if it does not match the schema."""
    return convert(message, JOBS[message["op"]])


class Readings(msgspec.Struct):
    """Reply of the GPU worker to a job: readings in the order of its entries.

    They end at the entry that broke the worker, if one did; the worker ends with this reply then, its ``last``.
    """

    readings: list[Reading]
    last: bool = False


def loaded(candidate: Candidate, spec: KernelSpec) -> StepFunctions:
    """Load a candidate into the current context."""
    from autotile.cuda.function import StepFunctions  # of the processes that use the device only

    others = ((sizes, Path(path), symbols) for sizes, path, symbols in candidate.others)
    return StepFunctions(spec.steps, Path(candidate.cubin_path), candidate.symbols, others)
