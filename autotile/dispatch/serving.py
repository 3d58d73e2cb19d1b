"""`get_best_kernel`: from a name and sizes to a bound kernel; a second call is a dictionary look-up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autotile.device.properties import device_count, live_device
from autotile.device.toolchain import load_cupy, nvrtc_version
from autotile.dispatch.bound import BoundKernel
from autotile.dispatch.choose import choose
from autotile.files.library import load_kernel
from autotile.files.profiles import device_profile
from autotile.files.settings import read_settings
from autotile.ground.errors import DatabaseError, NotTunedError, ToolchainError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem
from autotile.ground.problem import resolve_problem
from autotile.store.quick import read_rules_quickly, read_winners_quickly
from autotile.store.shipped_file import rule_files
from autotile.store.winners import Winner, shipped_winners

if TYPE_CHECKING:
    from autotile.store.bundle import Bundle
    from autotile.store.database import Database
    from autotile.store.rules import StoredRule

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
            from autotile.dispatch.counting import misses  # what is not needed for an exact result is imported here

            misses.watch(location, kernel)
    if strict and served.tier != "exact":
        raise _refusal(served, str(database or read_settings().database), bundle)
    return served


def forget_served() -> None:
    """Forget what was served, so that new tuning results and new bundles are seen."""
    _served.clear()
    chosen = sys.modules.get("autotile.dispatch.matmul")
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
    from autotile.dispatch.packed import choose_packed  # reading archives is for who has bundles
    from autotile.store.bundle import Bundle

    bundle = _bundles.get(str(path)) or _bundles.setdefault(str(path), Bundle(Path(path)))
    held = bundle.kernel(name)
    problem = resolve_problem(held.kernel.spec, sizes, dtype)
    index, properties = _device(device, list(held.winners))
    choice, cubin = choose_packed(bundle, held, problem, properties)
    return BoundKernel(held.kernel, problem, properties, index, choice, packed=cubin)


def _refusal(served: BoundKernel, location: str, bundle: str | Path | None) -> NotTunedError:
    """Why strict serving refuses what was found."""
    from autotile.dispatch.strict import refusal

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
    winners = read_winners_quickly(location, problem.kernel, problem.dtype)
    if winners is not None:
        return winners
    return _from_database(
        location, lambda found: [best.winner for best in found.best(problem.kernel, dtype=problem.dtype)], faults
    )


def _rules(location: str, problem: Problem, faults: list[str]) -> Iterator[StoredRule]:
    """Rules of the kernel's families, read when they are asked for: the user's, newest first, then autotile's own."""
    yield from _own_rules(location, problem, faults)
    if files := rule_files(problem.kernel):  # trees and families are for kernels that have some
        from autotile.store.rules import shipped_rules

        yield from shipped_rules(files, problem.kernel, problem.dtype)


def _own_rules(location: str, problem: Problem, faults: list[str]) -> list[StoredRule]:
    """The user's rules; none where the database is missing, or cannot be read, which ``faults`` then tell."""
    rules = read_rules_quickly(location, problem.kernel, problem.dtype)
    if rules is not None:
        return rules
    from autotile.store.families import Families

    return _from_database(location, lambda found: Families(found).rules(problem.kernel, problem.dtype), faults)


def _from_database(location: str, read: Callable[[Database], list[Result]], faults: list[str]) -> list[Result]:
    """What a database holds that cannot be read quickly; nothing where there is none, or it cannot be read at all."""
    from autotile.store.database import Database

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
