"""Times of many configurations of several kernels, and of libraries, at one problem of an operation after another.

The inputs and the expected outputs are made once a problem, for all kernels that take the same; modules stay loaded.
Each configuration is verified as in a tuning session: once at the ragged sizes, whose problems stay laid out, and at
every problem before it is timed and by what its last timed launch wrote. The fastest of each kernel at a problem is
verified repeatedly, as in finals. One that is clearly slower than the best keeps the time of its first launch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from autotile.core.model import Measurement, Outcome
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.driver import live_device, rejected
from autotile.cuda.expected_outputs import ExpectedOutputs
from autotile.cuda.function import StepFunctions
from autotile.cuda.instance import MEMORY_SHARE, Instances, ProblemInstance, Verdict
from autotile.cuda.support import SupportKernels
from autotile.cuda.timing import Launch, Timer, discard_reason
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.workers.library_race import Entrant, built_in_library, library_entrant
from autotile.workers.protocol import SECOND_SEED, Candidate, LibraryCall, SweepSetup, SweptTime
from autotile.workers.workbench import launch_sequence, reference_kernel

_SAMPLE_LIMIT_S = 2e-3
"""GPU time of the samples of a configuration beyond the first nine, in seconds."""
_SLOW_RATIO = 2.0
_FLOOR_US = 5.0
"""A first launch that takes this much longer than the best, and more than the ratio, is not repeated. A launch alone
between two events is a few microseconds longer than one in a graph."""
_MAX_MODULES = 4096

_REPEATS, _RAGGED_REPEATS = 75, 8
"""Verifications of the fastest configuration of each kernel at a problem, as in finals, and of each configuration at
the ragged sizes; alternately as for timing, and with two sets of inputs."""
_REPEATS_S = 0.2
"""Time after which these end, in seconds: the fastest of the finals of a problem alone have longer."""
_MAX_RAGGED = 16
"""Ragged problems that are kept laid out: one of each kernel and layout."""


class Entry(NamedTuple):
    """A candidate of a sweep.

    Attributes
    ----------
    kernel
        Number of its kernel.
    candidate
        The candidate.
    ragged
        Sizes and flags at which it is verified first; None where it was, or need not be.
    """

    kernel: int
    candidate: Candidate
    ragged: Mapping[str, int] | None = None


class BrokenSweepError(Exception):
    """A library or candidate after which the process cannot go on; ``number`` and ``outcome`` are its own."""

    def __init__(self, number: int, outcome: Outcome, reason: str) -> None:
        self.number = number
        self.outcome = outcome
        super().__init__(reason)


class Sweeper:
    """Measures problems one after the other.

    Parameters
    ----------
    setup
        Kernels, element type and device.
    """

    def __init__(self, setup: SweepSetup) -> None:
        load_cupy().cuda.Device(setup.device_index).use()
        self.setup = setup
        self._device = live_device(setup.device_index)
        cache = CubinCache(Path(setup.cache), setup.cache_limit_bytes)
        self._support = SupportKernels(cache, self._device.architecture)
        self._specs: list[KernelSpec] = []
        self._references: list[ExpectedOutputs] = []
        for kernel in setup.kernels:
            spec = parse_spec(kernel.spec_text, kernel.spec_source, folder=kernel.spec_folder)
            source = reference_kernel(spec, kernel.reference_source) if kernel.reference_source else None
            self._specs.append(spec)
            self._references.append(
                ExpectedOutputs(spec, setup.dtype, self._support, device=self._device, cache=cache, source=source)
            )
        self._timer = Timer(self._device.l2_bytes, setup.l2, _SAMPLE_LIMIT_S)
        self._modules: OrderedDict[str, StepFunctions] = OrderedDict()
        self._ragged: OrderedDict[tuple[int, tuple[tuple[str, int], ...]], Instances] = OrderedDict()
        self._is_warm = False

    def measure(
        self,
        sizes: Sequence[Mapping[str, int] | None],
        libraries: Sequence[LibraryCall],
        entries: Sequence[Entry],
        begin: Callable[[int], None],
    ) -> list[SweptTime]:
        """Verify and time libraries and candidates at one problem; return the results, libraries first.

        Parameters
        ----------
        sizes
            Sizes of the problem by the names of each kernel; None for a kernel that does not compute it.
        libraries
            Libraries, which are timed first, on the buffers of the first kernel that computes the problem.
        entries
            Candidates, best first: the others are compared with the fastest before them.
        begin
            Called with the number of each library and candidate before it runs, and again before the fastest ones run
            repeatedly.

        Raises
        ------
        BrokenSweepError
            One of them broke the context, or wrote out of bounds, so that the data of the others may be damaged.
        """
        made: list[ProblemInstance] = []
        instances: dict[int, Instances] = {}

        def instances_of(kernel: int) -> Instances:
            if kernel not in instances:
                own = sizes[kernel]
                assert own is not None
                make = partial(self._instance, kernel, made)
                instances[kernel] = Instances(self._specs[kernel], own, make, MEMORY_SHARE * self._device.memory_bytes)
            return instances[kernel]

        first = next(number for number, own in enumerate(sizes) if own is not None)
        done: list[SweptTime] = []
        best_us: float | None = None
        for number, call in enumerate(libraries):
            begin(number)
            library = partial(self._library, call, lambda: instances_of(first).of(self._specs[first].default))
            done.append(self._guarded(number, library))
            best_us = _faster(best_us, done[-1])
        for number, entry in enumerate(entries, start=len(libraries)):
            begin(number)
            done.append(self._guarded(number, partial(self._candidate, entry, instances_of, best_us)))
            best_us = _faster(best_us, done[-1])
        for kernel in dict.fromkeys(entry.kernel for entry in entries):
            own = [n for n, entry in enumerate(entries, start=len(libraries)) if entry.kernel == kernel]
            while (fastest := _fastest(done, own)) is not None:
                begin(fastest)
                candidate = entries[fastest - len(libraries)].candidate
                instance = instances_of(kernel).of(candidate.config)
                swept = self._guarded(fastest, partial(self._verified, kernel, candidate, instance, _REPEATS))
                if swept.outcome is Outcome.OK:
                    break
                done[fastest] = swept
        return done

    def _guarded(self, number: int, run: Callable[[], SweptTime]) -> SweptTime:
        """Run a library or candidate, whose rejected launch is a result."""
        cuda = load_cupy().cuda
        try:
            swept = run()
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            outcome = rejected(error)
            if outcome is None:
                raise BrokenSweepError(number, Outcome.CRASHED, str(error)) from None
            return SweptTime(outcome, str(error))
        if swept.outcome is Outcome.OUT_OF_BOUNDS:
            raise BrokenSweepError(number, swept.outcome, swept.reason)
        return swept

    def _library(self, call: LibraryCall, instance: Callable[[], ProblemInstance]) -> SweptTime:
        try:
            on = built_in_library(call, self.setup.device_index)
            return self._timed(library_entrant(instance(), on), None)
        except AutotileError as error:
            return SweptTime(Outcome.CRASHED, str(error))

    def _candidate(self, entry: Entry, instances_of: Callable[[int], Instances], best_us: float | None) -> SweptTime:
        """Verify a candidate at the ragged sizes, if that is asked for, and at the problem; then time it."""
        kernel, candidate = entry.kernel, entry.candidate
        if entry.ragged is not None:
            ragged = self._ragged_instances(kernel, entry.ragged).of(candidate.config)
            swept = self._verified(kernel, candidate, ragged, _RAGGED_REPEATS)
            if swept.outcome is not Outcome.OK:
                return swept
        return self._timed(self._entrant(instances_of(kernel).of(candidate.config), kernel, candidate), best_us)

    def _ragged_instances(self, kernel: int, sizes: Mapping[str, int]) -> Instances:
        """Return the ragged problem of a kernel, laid out with check values."""
        key = kernel, tuple(sizes.items())
        found = self._ragged.pop(key, None)
        if found is None:
            while len(self._ragged) >= _MAX_RAGGED:
                self._ragged.popitem(last=False)
            make = partial(self._instance, kernel, [], check=True)
            found = Instances(self._specs[kernel], sizes, make, MEMORY_SHARE * self._device.memory_bytes)
        self._ragged[key] = found
        return found

    def _verified(self, kernel: int, candidate: Candidate, instance: ProblemInstance, repeats: int) -> SweptTime:
        """Verify a candidate repeatedly, alternately with a plain launch and as for timing; see `Workbench.verify`."""
        end = time.perf_counter() + _REPEATS_S
        seeds = (0, SECOND_SEED) if _draw_second(instance) else (0,)
        verdict, done = Verdict(Outcome.OK), 0
        try:
            while done < 2 * len(seeds) or (done < repeats and time.perf_counter() < end):
                instance.use_inputs(seeds[done // 2 % len(seeds)])
                entrant = self._entrant(instance, kernel, candidate)
                verdict = self._checked(entrant, as_measured=done % 2 == 1)
                done += 1
                if verdict.outcome is not Outcome.OK:
                    return SweptTime(verdict.outcome, f"{verdict.reason}, in repeat {done} of {repeats}")
        finally:
            instance.use_inputs(0)
        return SweptTime(Outcome.OK, max_error=verdict.max_error)

    def _checked(self, entrant: Entrant, *, as_measured: bool = False) -> Verdict:
        """Return the verdict on one launch."""
        if as_measured:
            self._timer.samples(entrant.launch, 1, entrant.prepare)
        else:
            entrant.prepare()
            entrant.launch()
        return entrant.verdict()

    def _instance(
        self, kernel: int, made: list[ProblemInstance], names: Mapping[str, int], *, check: bool = False
    ) -> ProblemInstance:
        """Return the problem of a kernel, which shares the inputs of the first kernel that has the same."""
        instance = ProblemInstance(
            self._specs[kernel],
            names,
            self.setup.dtype,
            self._support,
            check=check,
            references=self._references[kernel],
            like=tuple(made),
        )
        made.append(instance)
        return instance

    def _entrant(self, instance: ProblemInstance, kernel: int, candidate: Candidate) -> Entrant:
        bound = instance.bind(candidate.config, self._device)
        launch = launch_sequence(self._functions(kernel, candidate, instance.sizes), instance, bound)
        return Entrant(launch, partial(instance.prepare, bound), partial(instance.verdict, bound))

    def _functions(self, kernel: int, candidate: Candidate, sizes: Mapping[str, int]) -> StepFunctions:
        """Return the functions of a candidate, where sizes are compiled in those of the given ones."""
        other = next((one for one in candidate.others if all(sizes[n] == s for n, s in one.sizes.items())), None)
        path, symbols = (
            (candidate.cubin_path, candidate.symbols) if other is None else (other.cubin_path, other.symbols)
        )
        found = self._modules.pop(path, None)
        if found is None:
            if len(self._modules) >= _MAX_MODULES:
                self._modules.popitem(last=False)
            found = StepFunctions(self._specs[kernel].steps, Path(path), symbols)
        self._modules[path] = found
        return found

    def _timed(self, entrant: Entrant, best_us: float | None) -> SweptTime:
        """Verify an entrant, time it, and verify what its last launch wrote."""
        verdict = self._checked(entrant)
        if verdict.outcome is not Outcome.OK:
            return SweptTime(verdict.outcome, verdict.reason)
        self._warm_up(entrant.launch, entrant.prepare)
        once_us = self._timer.samples(entrant.launch, 1, entrant.prepare)[0]
        if best_us is not None and once_us > max(_SLOW_RATIO * best_us, best_us + _FLOOR_US):
            measurement, is_slow = Measurement(once_us, once_us, once_us, (round(once_us, 3),), self._timer.l2), True
        else:
            timing = self._timer.measure(entrant.launch, best_us, entrant.prepare)
            measurement, is_slow = timing.measurement, timing.discarded
        verdict = entrant.verdict()
        if verdict.outcome is not Outcome.OK:
            return SweptTime(verdict.outcome, f"{verdict.reason}, in a timed launch after a correct one")
        if is_slow and best_us is not None:
            return SweptTime(Outcome.PRUNED, discard_reason(best_us), measurement, verdict.max_error)
        return SweptTime(Outcome.OK, "", measurement, verdict.max_error)

    def _warm_up(self, launch: Launch, prepare: Launch) -> None:
        if not self._is_warm:
            self._is_warm = True
            self._timer.warm_up(launch, prepare)


def _draw_second(instance: ProblemInstance) -> bool:
    """Draw a second set of inputs; return False if there is no room for it, or no reference."""
    try:
        instance.add_inputs(SECOND_SEED)
    except (InputError, ToolchainError, load_cupy().cuda.memory.OutOfMemoryError):
        return False
    return True


def _fastest(swept: Sequence[SweptTime], numbers: Sequence[int]) -> int | None:
    """Return the number of the fastest correct result among some; None if there is none."""
    right = [n for n in numbers if swept[n].outcome is Outcome.OK and swept[n].measurement is not None]
    return min(right, key=lambda n: _time_us(swept[n]), default=None)


def _time_us(swept: SweptTime) -> float:
    assert swept.measurement is not None
    return swept.measurement.time_us


def _faster(best_us: float | None, swept: SweptTime) -> float | None:
    """Return the best time after one more result."""
    if swept.outcome is not Outcome.OK or swept.measurement is None:
        return best_us
    time_us = swept.measurement.time_us
    return time_us if best_us is None else min(best_us, time_us)
