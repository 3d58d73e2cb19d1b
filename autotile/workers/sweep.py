"""Times of many configurations of several kernels, and of libraries, at one problem of an operation after another.

The inputs and the expected outputs are made once a problem, for all kernels that take the same; modules stay loaded.
Each configuration is verified by what its last timed launch wrote, at every problem. One that is clearly slower than
the best keeps the time of its first launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from autotile.core.model import Config, Measurement, Outcome
from autotile.cuda.cubin_cache import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.expected_outputs import ExpectedOutputs
from autotile.cuda.function import StepFunctions
from autotile.cuda.instance import MEMORY_SHARE, Instances, ProblemInstance
from autotile.cuda.support import SupportKernels
from autotile.cuda.timing import Launch, Timer, discard_reason
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.workers.library_race import Entrant, built_in_library, library_entrant
from autotile.workers.protocol import Candidate, LibraryCall, SweepSetup, SweptTime
from autotile.workers.workbench import launch_sequence, reference_kernel

_SAMPLE_LIMIT_S = 2e-3
"""GPU time of the samples of a configuration beyond the first nine, in seconds."""
_SLOW_RATIO = 2.0
_FLOOR_US = 5.0
"""A first launch that takes this much longer than the best, and more than the ratio, is not repeated. A launch alone
between two events is a few microseconds longer than one in a graph."""
_MAX_MODULES = 4096

Entry = tuple[int, Candidate]
"""Number of a kernel, and a candidate of it."""


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
        self._is_warm = False

    def measure(
        self,
        sizes: Sequence[Mapping[str, int] | None],
        libraries: Sequence[LibraryCall],
        entries: Sequence[Entry],
        begin: Callable[[int], None],
        done: list[SweptTime],
    ) -> None:
        """Time libraries and candidates at one problem.

        Parameters
        ----------
        sizes
            Sizes of the problem by the names of each kernel; None for a kernel that does not compute it.
        libraries
            Libraries, which are timed first, on the buffers of the first kernel that computes the problem.
        entries
            Candidates, best first: the others are compared with the fastest before them.
        begin
            Called with the number of each library and candidate before it runs.
        done
            Results are appended to it, of the libraries and then of the candidates.
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
        best_us: float | None = None
        for number, call in enumerate(libraries):
            begin(number)
            try:
                on = built_in_library(call, self.setup.device_index)
                instance = instances_of(first).of(self._specs[first].default)
                swept = self._timed(library_entrant(instance, on), None)
            except AutotileError as error:
                swept = SweptTime(Outcome.CRASHED, str(error))
            done.append(swept)
            best_us = _faster(best_us, swept)
        for number, (kernel, candidate) in enumerate(entries, start=len(libraries)):
            begin(number)
            swept = self._timed(self._entrant(instances_of(kernel), kernel, candidate), best_us)
            done.append(swept)
            best_us = _faster(best_us, swept)

    def _instance(self, kernel: int, made: list[ProblemInstance], names: Mapping[str, int]) -> ProblemInstance:
        """Return the problem of a kernel, which shares the inputs of the first kernel that has the same."""
        instance = ProblemInstance(
            self._specs[kernel],
            names,
            self.setup.dtype,
            self._support,
            check=False,
            references=self._references[kernel],
            like=tuple(made),
        )
        made.append(instance)
        return instance

    def _entrant(self, instances: Instances, kernel: int, candidate: Candidate) -> Entrant:
        config: Config = candidate.config
        instance = instances.of(config)
        bound = instance.bind(config, self._device)
        launch = launch_sequence(self._functions(kernel, candidate), instance, bound)
        return Entrant(launch, partial(instance.prepare, bound), partial(instance.verdict, bound))

    def _functions(self, kernel: int, candidate: Candidate) -> StepFunctions:
        path = candidate.cubin_path
        found = self._modules.pop(path, None)
        if found is None:
            if len(self._modules) >= _MAX_MODULES:
                self._modules.popitem(last=False)
            found = StepFunctions(self._specs[kernel].steps, Path(path), candidate.symbols)
        self._modules[path] = found
        return found

    def _timed(self, entrant: Entrant, best_us: float | None) -> SweptTime:
        """Time an entrant, and verify what its last launch wrote."""
        self._warm_up(entrant.launch, entrant.prepare)
        once_us = self._timer.samples(entrant.launch, 1, entrant.prepare)[0]
        if best_us is not None and once_us > max(_SLOW_RATIO * best_us, best_us + _FLOOR_US):
            measurement, is_slow = Measurement(once_us, once_us, once_us, (round(once_us, 3),), self._timer.l2), True
        else:
            timing = self._timer.measure(entrant.launch, best_us, entrant.prepare)
            measurement, is_slow = timing.measurement, timing.discarded
        verdict = entrant.verdict()
        if verdict.outcome is not Outcome.OK:
            return SweptTime(verdict.outcome, verdict.reason)
        if is_slow and best_us is not None:
            return SweptTime(Outcome.PRUNED, discard_reason(best_us), measurement, verdict.max_error)
        return SweptTime(Outcome.OK, "", measurement, verdict.max_error)

    def _warm_up(self, launch: Launch, prepare: Launch) -> None:
        if not self._is_warm:
            self._is_warm = True
            self._timer.warm_up(launch, prepare)


def _faster(best_us: float | None, swept: SweptTime) -> float | None:
    """Return the best time after one more result."""
    if swept.outcome is not Outcome.OK or swept.measurement is None:
        return best_us
    time_us = swept.measurement.time_us
    return time_us if best_us is None else min(best_us, time_us)
