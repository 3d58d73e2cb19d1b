"""`get_best_kernel`: from a name and sizes to a bound kernel; a second call is a dictionary look-up."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Problem
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import load_cupy, nvrtc_version
from autotile.database.fast_read import read_rules_fast, read_winners_fast
from autotile.database.keys import key_differences, key_of
from autotile.database.winners import Winner
from autotile.errors import DatabaseError, NotTunedError, ToolchainError
from autotile.exchange.shipped import shipped_rules, shipped_winners
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import choose
from autotile.settings import read_settings

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.database.winners import StoredRule
    from autotile.exchange.bundle import Bundle


def refusal(served: BoundKernel, stored: Sequence[Winner], nvrtc_version: str) -> NotTunedError:
    """The error that takes the place of a fallback.

    Parameters
    ----------
    served
        What would be served.
    stored
        What is tuned of the kernel, other versions of it too.
    nvrtc_version
        Of the compiler here.
    """
    found = served.choice.differences
    asked = key_of(served.definition, served.problem, served.device, nvrtc_version=nvrtc_version, l2_mode="cold")
    if not found and stored:
        found = min((key_differences(winner.key, asked) for winner in stored), key=len)
    return NotTunedError(f"{_what(served, stored)}{_where(found, stored)}", found)


def _what(served: BoundKernel, stored: Sequence[Winner]) -> str:
    asked = f"{served.problem} on {served.device.name} is not tuned, and strict=True takes no fallback"
    return f"{asked} ({served.tier})" if stored else f"{asked}: nothing is tuned of {served.kernel}"


def _where(found: Sequence[tuple[str, str, str]], stored: Sequence[Winner]) -> str:
    cure = "; run `autotile tune`, or ask without strict"
    if not stored:
        return cure
    if not found:
        return f": what was tuned for it breaks a rule or a limit here{cure}"
    listed = "; ".join(f"{name}: tuned {tuned}, asked {asked}" for name, tuned, asked in found)
    return f": the nearest result differs in {listed}{cure}"


_PERIOD_S = 30.0
_PATIENCE_S = 5.0
"""How long the end of a process waits for a writing that is under way."""


@dataclass(slots=True)
class _Watched:
    """A kernel, where its calls are counted, and how many of them are written."""

    location: str
    kernel: BoundKernel
    written: int = 0

    @property
    def total(self) -> int:
        """Calls so far; a program that only asked counts as one."""
        return max(1, self.kernel.calls)


class MissCounter:
    """The kernels whose calls are counted in this process."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._process = 0
        self._children_write = False
        self._begin()

    def watch(self, location: str, kernel: BoundKernel) -> None:
        """Count a kernel's calls from now on, in the database at ``location`` where there is one."""
        self._watched.append(_Watched(location, kernel))
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self.flush, wait_s=_PATIENCE_S)
            os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)
            self._flush_at_end_of_child()
            self._start_thread()

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what was counted since the last time; what cannot be written stays for the next."""
        if not self._writing.acquire(timeout=wait_s) if wait_s else not self._writing.acquire(blocking=False):
            return
        try:
            for location in dict.fromkeys(watched.location for watched in self._watched):
                _write(location, [watched for watched in self._watched if watched.location == location])
        finally:
            self._writing.release()

    def forget(self) -> None:
        """Drop what was counted and not written."""
        self._watched.clear()

    def _begin(self) -> None:
        self._writing = threading.Lock()

    def _start_thread(self) -> None:
        threading.Thread(target=self._keep_writing, name="autotile misses", daemon=True).start()

    def _keep_writing(self) -> None:
        pause = threading.Event()
        while not pause.wait(_PERIOD_S):
            self.flush()

    def _before_fork(self) -> None:
        """See that a child of `multiprocessing`, which ends without running what is registered at exit, writes too."""
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None and not self._children_write:
            self._children_write = True
            multiprocessing.register_after_fork(self, MissCounter._flush_at_end_of_child)

    def _in_child(self) -> None:
        """What the parent counted is the parent's to write."""
        self._begin()
        self._process = os.getpid()
        for watched in self._watched:
            watched.written = watched.total
        self._start_thread()

    def _flush_at_end_of_child(self) -> None:
        """What `multiprocessing` runs at the end of this process, if it is one of its own."""
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:
            multiprocessing.Finalize(None, self.flush, kwargs={"wait_s": _PATIENCE_S}, exitpriority=0)


def _write(location: str, counted: list[_Watched]) -> None:
    totals = [(watched, watched.total) for watched in counted]
    new = [(watched, total) for watched, total in totals if total > watched.written]
    if not new or ("://" not in location and not Path(location).expanduser().exists()):
        return
    try:
        from autotile.database.database import Database

        present = Database.open_readonly(location)
        if present is None:
            return
        present.close()
        with Database.open(location, set_damage_aside=False) as database:
            for watched, total in new:
                kernel = watched.kernel
                database.record_miss(kernel.problem, kernel.device.name, kernel.tier, total - watched.written)
                watched.written = total
    except (DatabaseError, ImportError):
        return  # serving depends neither on being allowed to write nor on an SQL engine


misses = MissCounter()


Result = TypeVar("Result")

_FALLBACK_PROFILE = "h200"
"""Device to serve for where there is no GPU and nothing is tuned: the one that the recordings come from."""

_served: dict[tuple[object, ...], BoundKernel] = {}
_bundles: dict[str, Bundle] = {}
_devices = 0
"""CUDA devices of the machine; 0 until they were counted. Where there is one, it is the current one."""


def get_best_kernel(
    name: str | Path,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    bundle: str | Path | None = None,
    strict: bool = False,
    **sizes: int,
) -> BoundKernel:
    """The best known configuration of a kernel for a problem, ready to launch.

    It never tunes, and never fails because a database is missing: the ``tier`` of what it returns says what it is.
    The calls of what a CUDA device could not be served exactly are counted as misses, so that it can be tuned.

    Parameters
    ----------
    name
        Name of a kernel, or path of its search-space file.
    dtype
        One of the kernel's; None for its first.
    device
        CUDA device index; None for CuPy's current device. Or the name of a GPU profile: then the configuration can be
        looked at, but not launched.
    database
        Path or URL; None for the user's own.
    bundle
        A file of ``autotile bundle`` to be served from, with neither compiler nor database; the kernel is then one of
        those that it holds.
    strict
        Raise in place of serving a fallback: anything but the ``exact`` tier.
    **sizes
        The problem's sizes, such as ``M=4096``.

    Raises
    ------
    InputError
        Unknown kernel, size or dtype, a malformed search-space file, or an empty space at these sizes.
    BundleError
        The bundle is damaged, was made by a newer autotile, or holds nothing for this device and problem.
    NotTunedError
        With ``strict``: nothing is tuned for exactly this problem and device; its ``differences`` are the fields of the
        key in which the nearest result differs.

    Examples
    --------
    >>> kernel = get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    >>> C = kernel(A, B)  # doctest: +SKIP
    """
    place = device
    if device is None:  # CUDA is asked for its current device only where there is more than one
        place = 0 if _devices == 1 else _current_device()
    key = (name, dtype, place, database, bundle, *sizes, *sizes.values())
    served = _served.get(key)
    if served is None:
        location = str(database or read_settings().database)
        kernel = find_best_kernel(str(name), dtype, place, location, sizes, bundle=bundle)
        served = _served.setdefault(key, kernel)  # of threads that ask together, all are served the same
        if served is kernel and kernel.tier != "exact" and not isinstance(device, str) and kernel.can_launch:
            misses.watch(location, kernel)
    if strict and served.tier != "exact":
        raise _refusal(served, str(database or read_settings().database), bundle)
    return served


def forget_served() -> None:
    """Forget what was served, so that new tuning results and new bundles are seen."""
    _served.clear()
    chosen = sys.modules.get("autotile.serving.matmul")
    if chosen is not None:
        chosen.forget_chosen()
    _bundles.clear()


def find_best_kernel(
    name: str,
    dtype: str | None,
    device: int | str | None,
    location: str,
    sizes: Mapping[str, int],
    *,
    bundle: str | Path | None = None,
) -> BoundKernel:
    """`get_best_kernel` for a look: nothing is remembered, and no miss is counted.

    Parameters
    ----------
    location
        Path or URL of the database.
    name, dtype, device, sizes, bundle
        As for `get_best_kernel`.

    Raises
    ------
    InputError
        As for `get_best_kernel`.
    """
    if bundle is not None:
        return _find_packed(bundle, name, dtype, device, sizes)
    kernel = load_kernel(name)
    problem = resolve_problem(kernel.spec, sizes, dtype)
    faults: list[str] = []
    stored = _stored(location, problem, faults)
    index, properties = _device(device, stored)
    rules = _rules(location, problem, faults)
    choice = choose(kernel, problem, properties, _nvrtc_version(stored), stored, rules=rules)
    if faults:
        choice = replace(choice, unread=faults[0])
    return BoundKernel(kernel, problem, properties, index, choice)


def _find_packed(
    path: str | Path, name: str, dtype: str | None, device: int | str | None, sizes: Mapping[str, int]
) -> BoundKernel:
    """`find_best_kernel` in a bundle, its manifest read once a process."""
    from autotile.exchange.bundle import Bundle
    from autotile.serving.choice import choose_packed

    bundle = _bundles.get(str(path)) or _bundles.setdefault(str(path), Bundle(Path(path)))
    held = bundle.kernel(name)
    problem = resolve_problem(held.kernel.spec, sizes, dtype)
    index, properties = _device(device, list(held.winners))
    choice, cubin = choose_packed(bundle, held, problem, properties)
    return BoundKernel(held.kernel, problem, properties, index, choice, packed=cubin)


def _refusal(served: BoundKernel, location: str, bundle: str | Path | None) -> NotTunedError:
    """Why strict serving refuses what was found."""
    if bundle is not None:
        held = _bundles[str(bundle)].kernel(served.kernel)
        return refusal(served, held.winners, held.nvrtc_version)
    stored = _stored(location, served.problem, [])
    return refusal(served, stored, _nvrtc_version(stored))


def _device(device: int | str | None, stored: list[Winner]) -> tuple[int | None, DeviceProperties]:
    """Index of the CUDA device to launch on, None where the kernel can only be looked at; and its properties."""
    if isinstance(device, str):
        return None, _absent_device(device, stored)
    index = _current_device() if device is None else device
    return index, live_device(index) if index is not None else _absent_device(None, stored)


def _current_device() -> int | None:
    """CuPy's current device; None where there is no device."""
    global _devices  # noqa: PLW0603 - asking CUDA again at every call would cost a quarter of it
    _devices = device_count()
    if _devices == 0:
        return None
    return int(load_cupy().cuda.runtime.getDevice())


def _absent_device(name: str | None, stored: list[Winner]) -> DeviceProperties:
    """A device to look at: the named one, else where the user tuned last; measured goes before replayed."""
    own_first = sorted(stored, key=lambda best: (best.shipped, best.key.source != "cuda"))
    tuned = [best.device for best in own_first if best.device is not None]
    if name is None:
        return tuned[0] if tuned else device_profile(_FALLBACK_PROFILE)
    by_name = {device.name.lower(): device for device in reversed(tuned)}
    if name.lower() in by_name:
        return by_name[name.lower()]
    profile = device_profile(name)
    return by_name.get(profile.name.lower(), profile)


def _stored(location: str, problem: Problem, faults: list[str]) -> list[Winner]:
    """The user's best results of the kernel, then those that come with autotile."""
    return [*_own(location, problem, faults), *shipped_winners(problem.kernel, problem.dtype)]


def _own(location: str, problem: Problem, faults: list[str]) -> list[Winner]:
    """Best results of the kernel; none where the database is missing, or cannot be read, which ``faults`` then tell."""
    winners = read_winners_fast(location, problem.kernel, problem.dtype)
    if winners is not None:
        return winners
    return _from_database(
        location, lambda found: [best.winner for best in found.best(problem.kernel, dtype=problem.dtype)], faults
    )


def _rules(location: str, problem: Problem, faults: list[str]) -> Iterator[StoredRule]:
    """Rules of the kernel's families, read when they are asked for: the user's, newest first, then autotile's own."""
    yield from _own_rules(location, problem, faults)
    yield from shipped_rules(problem.kernel, problem.dtype)


def _own_rules(location: str, problem: Problem, faults: list[str]) -> list[StoredRule]:
    """The user's rules; none where the database is missing, or cannot be read, which ``faults`` then tell."""
    rules = read_rules_fast(location, problem.kernel, problem.dtype)
    if rules is not None:
        return rules
    from autotile.database.family_store import FamilyStore

    return _from_database(location, lambda found: FamilyStore(found).rules(problem.kernel, problem.dtype), faults)


def _from_database(location: str, read: Callable[[Database], list[Result]], faults: list[str]) -> list[Result]:
    """What a database holds that cannot be read quickly; nothing where there is none, or it cannot be read at all."""
    from autotile.database.database import Database

    try:
        database = Database.open_readonly(location)
        if database is None:
            return []
        with database:
            return read(database)
    except DatabaseError as error:
        faults.append(str(error))
        return []


def _nvrtc_version(stored: list[Winner]) -> str:
    """The NVRTC that would compile here; where there is none, the one that the newest result was compiled with."""
    try:
        return nvrtc_version()
    except ToolchainError:
        return stored[0].key.nvrtc_version if stored else ""
