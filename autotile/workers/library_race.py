"""Races between the kernels of an operation, and with the libraries that compute it, in one process.

Each kernel has a workbench of its own, with the same inputs. A library takes the buffers of the first one, is verified
against its reference like a candidate, and timed by the same timer: cold L2, in CUDA graphs where kernels are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.core.model import Outcome
from autotile.cuda.instance import ProblemInstance, Verdict
from autotile.cuda.timing import Launch, Timer
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, InputError
from autotile.workers.protocol import Candidate, LibraryCall, RaceTimes

if TYPE_CHECKING:
    from autotile.workers.workbench import Workbench

_REPEATS = 4
"""Verifications of a candidate or a library before a contest; a kernel's own finals verified its winner repeatedly."""
_CHECK_S = 2.0
"""Time after which these end."""

LibraryOn = Callable[[ProblemInstance], Launch]
"""Returns the launch of a library on the buffers of an instance; an `InputError` if the library refuses the problem."""


class Entrant(NamedTuple):
    """A verified candidate or library, ready to be timed.

    Attributes
    ----------
    launch, prepare
        As for `autotile.cuda.timing.Timer.race`.
    verdict
        Verifies what the last launch wrote.
    weight
        Factor of the times by which entrants are compared.
    """

    launch: Launch
    prepare: Launch
    verdict: Callable[[], Verdict]
    weight: float = 1.0


def race(timer: Timer, entrants: Sequence[Entrant], rounds: int, seed: int, *, graphs: bool = True) -> list[RaceTimes]:
    """Time entrants in interleaved rounds, and verify the outputs that timed launches wrote."""
    verdicts: list[Verdict] = []
    timer.warm_up(entrants[0].launch, entrants[0].prepare)
    times = timer.race(
        [entrant.launch for entrant in entrants],
        rounds,
        seed,
        prepares=[entrant.prepare for entrant in entrants],
        weights=[entrant.weight for entrant in entrants],
        check=lambda index: verdicts.append(entrants[index].verdict()),
        graphs=graphs,
    )
    return [RaceTimes(tuple(row), v.outcome, v.reason) for row, v in zip(times, verdicts, strict=True)]


def hold_contest(
    pairs: Sequence[tuple[Workbench, Candidate]],
    libraries: Sequence[LibraryOn],
    rounds: int,
    seed: int,
    *,
    begin: Callable[[int | None], None] = lambda _: None,
) -> list[RaceTimes]:
    """Verify candidates and libraries, and race those that are correct.

    Parameters
    ----------
    pairs
        Candidates, each with the workbench of its kernel; one at least.
    libraries
        Libraries, which run on the buffers of the first workbench.
    rounds, seed
        Number of rounds, and seed of the order within them.
    begin
        Called with the number of each candidate and library before it is verified, and with None before the race.

    Returns
    -------
    list of RaceTimes
        Of the candidates, then of the libraries; one that failed has no times.
    """
    timer = pairs[0][0].timer
    verdicts: dict[int, Verdict] = {}
    entrants: dict[int, Entrant] = {}
    graphs = True
    for index, (bench, candidate) in enumerate(pairs):
        begin(index)
        found = bench.verify(candidate, _REPEATS, _CHECK_S, lambda _: None)
        verdicts[index] = Verdict(found.outcome, found.reason)
        if found.outcome is Outcome.OK:
            entrants[index] = bench.entrant(candidate)
    for index, library in enumerate(libraries, start=len(pairs)):
        begin(index)
        try:
            entrant = pairs[0][0].library_entrant(library)
            verdicts[index] = _verified(timer, entrant)
        except AutotileError as error:
            verdicts[index] = Verdict(Outcome.CRASHED, str(error))
        if verdicts[index].outcome is Outcome.OK:
            entrants[index] = entrant
            graphs = graphs and timer.can_capture(entrant.launch)
    begin(None)
    raced = race(timer, list(entrants.values()), rounds, seed, graphs=graphs) if entrants else []
    results = dict(zip(entrants, raced, strict=True))
    failed = {index: RaceTimes((), v.outcome, v.reason) for index, v in verdicts.items() if index not in results}
    return [{**results, **failed}[index] for index in sorted(verdicts)]


def _verified(timer: Timer, entrant: Entrant) -> Verdict:
    """Return the verdict on repeated launches."""
    verdict = Verdict(Outcome.OK)
    for _ in range(_REPEATS):
        timer.samples(entrant.launch, 1, entrant.prepare)
        verdict = entrant.verdict()
        if verdict.outcome is not Outcome.OK:
            break
    return verdict


def built_in_library(call: LibraryCall, device_index: int) -> LibraryOn:
    """Return a library that an operation file may name, on the current device.

    Raises
    ------
    InputError
        There is no such library, or it does not compute such a problem.
    ToolchainError
        It is not installed.
    """
    if call.library != "cublas":
        raise InputError(f"there is no library {call.library!r} here")
    from autotile.cuda.cublas import Gemm, Layout

    layout = Layout.of(call.sizes, call.dtype)
    if not layout.is_supported:
        raise InputError("cuBLAS does not compute such a product")
    gemm = Gemm(layout, device_index)

    def on(instance: ProblemInstance) -> Launch:
        addresses = [int(array.data.ptr) for array in instance.arrays]
        current_stream = load_cupy().cuda.get_current_stream
        return lambda: gemm(current_stream().ptr, addresses)

    return on


def own_library(call: Callable[..., Any]) -> LibraryOn:
    """Return a library that is a Python function of the arrays of the kernels, in the order of their arguments.

    It is given arrays of CuPy, or tensors of PyTorch if it does not take these, and queues its work on the current
    stream of its library.
    """

    def on(instance: ProblemInstance) -> Launch:
        fault: Exception | None = None
        for arrays in _as_passed(instance):
            launch = partial(_call, call, arrays)
            try:
                launch()
            except InputError as error:
                fault = fault or error
            else:
                return launch
        raise fault or InputError("there are no arrays to call it with")

    return on


def _call(call: Callable[..., Any], arrays: Sequence[Any]) -> None:
    try:
        with _torch_stream():
            call(*arrays)
    except AutotileError:
        raise
    except Exception as error:
        raise InputError(f"the library failed: {type(error).__name__}: {error}") from error


def _as_passed(instance: ProblemInstance) -> Iterator[list[Any]]:
    """Yield the arrays of an instance as a caller would pass them."""
    yield instance.arrays
    torch = sys.modules.get("torch")
    if torch is not None:
        yield [
            torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
            if element == "bfloat16"
            else torch.from_dlpack(array)
            for array, element in zip(instance.arrays, instance.element_types, strict=True)
        ]


def _torch_stream() -> Any:
    """Make CuPy's current stream that of PyTorch, if it is loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(load_cupy().cuda.get_current_stream().ptr))


def library_entrant(instance: ProblemInstance, library: LibraryOn) -> Entrant:
    """Return a library on the buffers of an instance."""
    bound = instance.bind_library()
    return Entrant(library(instance), partial(instance.prepare, bound), partial(instance.verdict, bound))
