"""Messages between the tuner and its workers, the worker's end of the pipe, and the resource limits of a worker."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Finite, Name, NonNegative, Text, TimeUs, Whole, decode_json, encode_json
from autotile.core.model import Config, L2Mode, Measurement, Outcome
from autotile.cuda.compiler import CompiledFunction

if TYPE_CHECKING:
    from autotile.cuda.function import SizedFunctions
    from autotile.kernel.spec import KernelSpec

_MAX_FILE_BYTES = 1 << 30
"""Limit of each file that a worker writes, such as the output of a kernel that prints without end; a cubin is a
thousandth of it."""
_MEMORY_SHARE = 0.75
"""Share of the machine's memory for all compile workers together; the rest is left to the system and the user."""
_MIN_MEMORY_BYTES = 2 << 30
"""NVRTC takes 0.2 GiB for a plain kernel; the heaviest template libraries need 1 to 2 GiB."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of a container, of cgroups version 2 and 1."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def limit_disk_use() -> None:
    """Disable core dumps, which hold the gigabytes that CUDA maps, and limit the size of files that are written."""
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)


def limit_memory(max_bytes: int) -> None:
    """Limit the memory of this process to what it has mapped and ``max_bytes``; allocations beyond it fail.

    The process also offers itself to the kernel's out-of-memory killer before all others.
    """
    with contextlib.suppress(OSError):  # not permitted on every system
        Path("/proc/self/oom_score_adj").write_text("1000")
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower_limit(resource.RLIMIT_AS, mapped_pages * _PAGE_BYTES + max_bytes)


def memory_share_bytes(workers: int) -> int:
    """Return the memory limit of each of several compile workers: equal parts of 75 %, of 2 GiB at least."""
    total = min([os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, *_container_limits(_CGROUP_LIMITS)])
    return max(_MIN_MEMORY_BYTES, int(_MEMORY_SHARE * total / workers))


def _container_limits(files: Iterable[Path]) -> list[int]:
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdecimal()]


@contextlib.contextmanager
def files_of_any_size() -> Iterator[None]:
    """Lift the limit of `limit_disk_use` on files, for the contents of large buffers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _lower_limit(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(kind, (limit, hard))


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Source of a reference kernel; fields are those of `autotile.kernel.library.Kernel`."""

    source: str
    template_path: str
    source_hash: Name
    include_folders: tuple[str, ...] = ()
    template_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """The problem that a worker sets up once and evaluates candidates on."""

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
    verify_sizes: tuple[Mapping[Name, Count], ...] = ()
    """Sizes at which a candidate is verified besides the ragged and the tuned ones."""
    energy: bool = False
    """Whether the energy of a launch is measured, too."""
    verify_seed: int = 0
    """Seed of a second set of inputs, with which repeated verification alternates; 0 for none."""
    captured: tuple[Name, ...] = ()
    """Buffers whose content after the verified launch is saved, for a check by the parent."""
    capture_folder: str = ""
    """Folder of the saved contents."""
    reference_source: KernelSource | None = None
    """Source of the reference kernel, if the reference is one."""
    reference_folder: str = ""
    """Folder of the results of a reference in Python, or of those on which configurations agreed; "" for none."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of running one candidate on the device."""

    outcome: Outcome
    reason: Text = ""
    stage: Name = ""
    measurement: Measurement | None = None
    seconds: Mapping[Name, NonNegative] = field(default_factory=dict)
    telemetry: Mapping[Name, Finite | Whole | Text] = field(default_factory=dict)
    began_at: NonNegative = 0.0
    """Start in the worker, by `time.perf_counter`, which all processes of a machine share; 0 if it is not known."""
    captured: Text = ""
    """Folder of the contents of buffers that were saved; see `Workload.captured`."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RaceTimes:
    """Times of one candidate in a race, and the verdict on the output that its last timed launch wrote.

    Attributes
    ----------
    times_us
        Times in microseconds, one per round.
    outcome, reason
        The verdict, and the reason unless it is ``OK``.
    """

    times_us: tuple[TimeUs, ...]
    outcome: Outcome = Outcome.OK
    reason: Text = ""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A problem of an operation that a library computes.

    Attributes
    ----------
    library
        Name of `autotile.kernel.operation.LIBRARIES`.
    sizes
        Sizes and flags of the operation.
    dtype
        Element type.
    """

    library: Name
    sizes: Mapping[Name, Count]
    dtype: Name

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {"library": self.library, "sizes": dict(self.sizes), "dtype": self.dtype}


@dataclass(frozen=True, slots=True)
class SweepKernel:
    """A kernel of an operation, as the GPU worker parses it."""

    spec_text: str
    spec_source: str
    spec_folder: str = ""
    reference_source: KernelSource | None = None


@dataclass(frozen=True, slots=True)
class SweepSetup:
    """What the problems of a sweep have in common; see `autotile.workers.sweep`."""

    kernels: tuple[SweepKernel, ...]
    dtype: Name
    l2: L2Mode
    cache: str
    cache_limit_bytes: Whole
    device_index: Count = 0


@dataclass(frozen=True, slots=True)
class SweptTime:
    """Result of a configuration or library at one problem of a sweep.

    Attributes
    ----------
    outcome, reason
        ``pruned`` if it is clearly slower than the best.
    measurement
        Its time, if it is correct.
    max_error
        Maximum error of an output element, see `autotile.cuda.instance.Verdict`.
    """

    outcome: Outcome
    reason: Text = ""
    measurement: Measurement | None = None
    max_error: NonNegative = 0.0


@dataclass(frozen=True, slots=True)
class SizedCubin:
    """A configuration compiled for other sizes than those that are tuned."""

    sizes: Mapping[Name, Count]
    cubin_path: str
    symbols: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compiled configuration, ready to load."""

    config: Config
    cubin_path: str
    symbols: Mapping[str, str] = field(default_factory=dict)
    """Name in the cubin of each entry; one that is not listed has its own name."""
    computed: Config = field(default_factory=dict)
    """Computed values, which the worker has no functions for."""
    weight: float = 1.0
    """Ratio of what the search minimises to the time, by which a race compares it with others."""
    others: tuple[SizedCubin, ...] = ()
    """Cubins for the other problems of the verification, where sizes are compiled in."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary, whose configuration includes the computed values."""
        config = {**self.config, **self.computed}
        others = [asdict(replace(one, sizes=dict(one.sizes), symbols=dict(one.symbols))) for one in self.others]
        return {
            "config": config,
            "cubin_path": self.cubin_path,
            "symbols": dict(self.symbols),
            "weight": self.weight,
            **({"others": others} if others else {}),
        }


def sized_functions(spec: KernelSpec, candidate: Candidate) -> SizedFunctions:
    """Load a candidate into the current context."""
    from autotile.cuda.function import SizedFunctions  # of the processes that use the device only

    others = ((one.sizes, Path(one.cubin_path), one.symbols) for one in candidate.others)
    return SizedFunctions(spec.steps, Path(candidate.cubin_path), candidate.symbols, others)


class ErrorReply(msgspec.Struct):
    """Reply to a request that failed."""

    error: Text
    kind: Name = ""
    stage: Name = ""
    """Stage in which the candidate failed, if one did."""


class Opened(msgspec.Struct):
    """Reply of the GPU worker to ``open``."""

    device: DeviceProperties


class Race(msgspec.Struct):
    """Reply of the GPU worker to ``race``."""

    raced: list[RaceTimes]


class Swept(msgspec.Struct):
    """Reply of the GPU worker to ``sweep``: results in the order of the request, all of them unless one broke it."""

    swept: list[SweptTime]
    failed: Text = ""
    """Reason why one of them broke the worker, which ends; the results are then incomplete."""
    outcome: Outcome = Outcome.OK
    number: Count | None = None
    """Number of the one that broke it; None for the one after the last result."""


class DriverOccupancy(msgspec.Struct):
    """Reply of the GPU worker to ``occupancy``."""

    blocks_per_sm: Count


class CompiledCubin(msgspec.Struct):
    """Reply of a compile worker."""

    path: str
    cubin_hash: Name
    functions: dict[Name, CompiledFunction]


class SanitizerRequest(msgspec.Struct):
    """Request of a run under compute-sanitizer."""

    workload: Workload
    candidate: Candidate
    max_s: Count


class _Request(msgspec.Struct):
    id: int
    request: dict[str, Any]


class Answer(msgspec.Struct):
    """Line that a worker writes: the reply to a request, or the stage that it enters."""

    id: int
    reply: dict[str, Any] | None = None
    stage: Name | None = None


SECOND_SEED = 1
"""Seed of the second set of inputs, with which repeated verification alternates."""
SWEEP_STAGE = "sweep "
"""Stage of a sweep: a library or candidate, followed by its number."""
CONTEST_STAGE, RACE_STAGE = "contest ", "race"
"""Stages of a contest: the verification of a participant, followed by its number, and the race."""

Stage = Callable[[str], None]
"""Called with the name of a stage before the worker enters it."""
Handler = Callable[[Mapping[str, Any], Stage], Mapping[str, Any]]

_PARENT_CHECK_S = 1.0


class FinalReply(Exception):  # noqa: N818 - it is a reply, not an error
    """Raised by a handler to reply and then end the process, such as one whose CUDA context is corrupt."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply
        super().__init__("the worker ends itself after this reply")


class Channel:
    """The worker's end of the pipe: requests arrive on standard input, replies go to standard output.

    From its construction on, other output to standard output, such as a kernel's ``printf``, goes to standard error;
    the process exits when its parent dies.
    """

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        limit_disk_use()
        exit_with_parent()
        self._is_orphan = _is_orphan()
        self._request_id = 0

    def receive(self) -> Mapping[str, Any] | None:
        """Return the next request; None after the parent closed the pipe."""
        line = b"" if self._is_orphan else sys.stdin.buffer.readline()
        if not line:
            return None
        _truncate_standard_error()
        message = decode_json(line, _Request)
        self._request_id = message.id
        return message.request

    def enter(self, stage: str) -> None:
        """Tell the parent which stage of the request follows."""
        self._write({"id": self._request_id, "stage": stage})

    def reply(self, reply: Mapping[str, Any]) -> None:
        """Reply to the last request."""
        self._write({"id": self._request_id, "reply": reply})

    def _write(self, message: Mapping[str, Any]) -> None:
        self._output.write(encode_json(message).encode() + b"\n")
        self._output.flush()


def _truncate_standard_error() -> None:
    """Discard the output of earlier requests, where standard error is a file, from which the parent reads it."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def serve(handler: Handler) -> None:
    """Answer requests until the parent closes the pipe; see `Channel`."""
    channel = Channel()
    while (request := channel.receive()) is not None:
        try:
            channel.reply(handler(request, channel.enter))
        except FinalReply as final:
            channel.reply(final.reply)
            os._exit(0)  # a regular exit would wait for the corrupt context


def _is_orphan() -> bool:
    """Return whether the parent died while this process started, so that it was adopted by another process.

    Only the parent writes to standard input, and it closes it only when no request will follow.
    """
    poll = select.poll()
    poll.register(0, 0)  # only for the hang-up of the other end; a request may still wait in the pipe
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def exit_with_parent() -> None:
    """End this process when its parent dies, even during a kernel that never returns."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
