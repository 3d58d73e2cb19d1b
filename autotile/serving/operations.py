"""Sources of choices for a problem of an operation: one of its kernels in some configuration, or a library.

Measurements of this very problem on this GPU decide, of the kernels and of the libraries. Else the model of times does,
if there is one for this GPU; else a library is called, if there is one; else the kernel is served that was measured for
the nearest problem, or the first that computes it. What the model expects to be clearly faster than all that was
measured is served, too: that one kernel was tuned says little of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, config_key
from autotile.database.keys import key_of, library_key
from autotile.database.winners import CHANGES, Changes, Winner, file_signature, read_file
from autotile.errors import InputError
from autotile.kernel.operation import Library, Member, Operation
from autotile.kernel.problem import resolve_problem, size_distance, unsupported_reason
from autotile.serving.bound import BoundKernel, Code, KernelCode
from autotile.serving.choice import Choice, Contender
from autotile.serving.libraries import LibraryCode, computes, libraries_for
from autotile.serving.selection import Request, choose, exact, first_allowed, neighbours, wrong_configs
from autotile.serving.shelf import DatabaseShelf, Shelf, model_of
from autotile.settings import read_settings

SHOWN = 3
"""Contenders that an explanation states. A look-up asks the model for the first only, since each one is checked."""
_CLEARLY = 3.0
"""Standard deviations by which the model must expect something to be faster than what was measured."""
_RECHECK_S = 1.0
"""Time for which a database is not looked at again, unless it is known to have changed."""

Sizes = Mapping[str, int]


class Way(NamedTuple):
    """A way to compute a problem: a choice, the code that it is of, and both with a time as a contender."""

    code: Code
    choice: Choice
    contender: Contender


class _Member:
    """A kernel of an operation with its results on one GPU, by sizes.

    Parameters
    ----------
    member
        The kernel.
    shelf
        Its stored results, of all GPUs.
    device
        The device.
    flags
        Flags and conditions of the operation.
    """

    def __init__(
        self,
        member: Member,
        shelf: Shelf,
        device: DeviceProperties,
        flags: tuple[str, ...],
    ) -> None:
        self.member = member
        self.kernel = kernel = member.load()
        self.shelf = shelf
        self.checks = shelf.checks()
        self.refusal = unsupported_reason(kernel.spec, device)
        self._names = kernel.spec.sizes
        self._device = device
        names = {name for name in member.when.names if "." not in name} if member.when is not None else set()
        self._conditions = tuple(sorted(names)) if names <= set(flags) else ()
        self._holds: dict[tuple[int, ...], bool] = {}
        """Whether the condition of the kernel holds, by the flags and conditions of a problem."""
        self._unconditional = replace(member, when=None)
        self._exact: dict[tuple[int, ...], list[Winner]] = {}
        for winner in shelf.winners():
            if winner.key.gpu_name == device.name:
                self._exact.setdefault(self._key(winner.key.sizes), []).append(winner)

    def sizes_for(self, problem: Problem) -> dict[str, int] | None:
        """Return the sizes of a problem by the kernel's names, as the member does; None if it does not compute it."""
        when, given = self.member.when, problem.sizes
        if when is None or not self._conditions:
            return self.member.sizes_for(problem, self._device)
        key = tuple([given[name] for name in self._conditions])
        holds = self._holds.get(key)
        if holds is None:
            names = {name: getattr(self._device, name.removeprefix("device.")) for name in when.names if "." in name}
            holds = self._holds[key] = bool(when.value({**given, **names}))
        return self._unconditional.sizes_for(problem) if holds else None

    def exact(self, sizes: Sizes) -> list[Winner]:
        """Return the results for sizes by the kernel's names."""
        return self._exact.get(self._key(sizes), [])

    def _key(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple([sizes.get(name, default) for name, default in self._names.items()])


class OperationShelf:
    """Stored results of an operation for one dtype on one device, to be looked up by sizes.

    Parameters
    ----------
    operation, dtype
        The operation, and the element type.
    location
        Path or URL of the user's database.
    find_device
        Returns the CUDA device, None if what is served can only be inspected, and its properties, given all results.
    find_nvrtc
        Returns the version of NVRTC, given all results.
    """

    def __init__(
        self,
        operation: Operation,
        dtype: str,
        location: str,
        find_device: Callable[[list[Winner]], tuple[int | None, DeviceProperties]],
        find_nvrtc: Callable[[Callable[[], list[Winner]]], str],
    ) -> None:
        self.operation = operation
        self._location = location
        self._dtype = dtype
        self._signature, self._checked_s = file_signature(location), time.monotonic()
        stored = {member.name: DatabaseShelf(location, member.name, dtype) for member in operation.members}
        winners = {name: shelf.winners() for name, shelf in stored.items()}
        every = [winner for found in winners.values() for winner in found]
        self.device_index, self.device = find_device(every)
        self._nvrtc_version = find_nvrtc(lambda: every)
        self._members = {
            member.name: _Member(
                member,
                stored[member.name],
                self.device,
                (*operation.flags, *operation.conditions),
            )
            for member in operation.members
        }
        self.fault = next((shelf.fault for shelf in stored.values() if shelf.fault), "")
        self._measured_names = [name for name in operation.sizes if name not in operation.conditions]
        self._races = read_settings().race and read_settings().numerics != "same"
        self._specs = {name: table.kernel.spec for name, table in self._members.items()}
        self._model = model_of(location, operation.name, dtype, self.device.name)
        self._libraries = libraries_for(operation, is_present=self.device_index is not None)
        self._library_times = {library.name: self._times_of(library) for library in self._libraries}
        self._changes = self._relevant_changes()

    def is_outdated(self, *, anew: bool = False) -> bool:
        """Return whether results have been decided since it was made.

        Parameters
        ----------
        anew
            Look even if the database was looked at within the last second.
        """
        now_s = time.monotonic()
        if not anew and now_s - self._checked_s <= _RECHECK_S:
            return False
        self._checked_s, signature = now_s, file_signature(self._location)
        if signature is None:  # a server, which thousands of processes may share
            return anew
        if signature == self._signature:
            return False
        self._signature = signature
        return self._relevant_changes() != self._changes

    def _relevant_changes(self) -> Changes:
        """Return the decisions on the operation, its kernels and its libraries."""
        names = {
            self.operation.name,
            *self._members,
            *(f"{self.operation.name}:{library.name}" for library in self._libraries),
        }
        return frozenset(one for one in read_file(self._location, CHANGES) or () if one[0] in names)

    def serve(
        self, problem: Problem, *, library: bool = True, race: bool = False, may_race: bool = True
    ) -> BoundKernel:
        """Return the best way to compute a problem, ready to be launched.

        Parameters
        ----------
        problem
            Problem of the operation, with its conditions.
        library
            Whether a library may compute it.
        race
            Whether the first call may race the best few ways, if nothing was measured for the problem.
        may_race
            False: it does not, whatever the setting says.

        Raises
        ------
        InputError
            No kernel computes the problem on the device.
        """
        race = may_race and (race or self._races) and self.device_index is not None
        request = _Request(self, problem, library=library, expected=SHOWN if race else 1)
        ways = request.ways()
        served = self.bind(ways[0])
        if not race or served.tier == "exact":
            served.find_contenders = partial(_shown, self, problem, library)
            return served
        from autotile.serving.racing import Race

        present = [served, *map(self.bind, ways[1:SHOWN])]
        names = {one.kernel for one in present}
        present += [self.bind(way) for way in called(request) if way.code.name not in names]
        if not self._model and served.is_library:
            present += map(self.bind, islice(nearest(request), 1))
        if len(present) > 1:
            first_use = partial(Race, present, self.operation, self._location)
            served = self.bind(ways[0], first_use=first_use)
        served.find_contenders = partial(_shown, self, problem, library)
        return served

    def bind(self, way: Way, *, first_use: Any = None) -> BoundKernel:
        """Return a way to compute a problem as a served kernel; ``first_use`` is as for `BoundKernel`."""
        choice = replace(way.choice, contenders=(way.contender,), unread=self.fault)
        return BoundKernel(way.code, choice, self.device, self.device_index, first_use=first_use)

    def request_for(self, kernel: str, sizes: Sizes, shelf: Shelf | None = None) -> Request | None:
        """Return a problem of one of the kernels, by its name and its sizes; None if there is no such kernel.

        Raises
        ------
        InputError
            The sizes are not those of the kernel.
        """
        member = self._members.get(kernel)
        if member is None:
            return None
        problem = resolve_problem(member.kernel.spec, sizes, self._dtype)
        return Request(member.kernel, problem, self.device, self._nvrtc_version, shelf or member.shelf)

    def library_for(self, name: str, problem: Problem) -> Way | None:
        """Return a library as a way to compute a problem; None if it is not here, or does not compute it."""
        return next((way for way in called(_Request(self, problem)) if way.code.name == name), None)

    def _times_of(self, library: Library) -> dict[tuple[int, ...], Winner]:
        """Return the stored times of a library on this GPU, by sizes and flags."""
        operation = self.operation
        problem = Problem(f"{operation.name}:{library.name}", {}, self._dtype)
        request = Problem(operation.name, {}, self._dtype)
        key = library_key(
            operation, request, self.device, library.name, library.version, nvrtc_version=self._nvrtc_version
        )
        found: dict[tuple[int, ...], Winner] = {}
        for winner in DatabaseShelf(self._location, problem.kernel, problem.dtype).winners():
            known = winner.key
            is_same = known.gpu_name == self.device.name and known.template_hash == operation.digest
            if (
                is_same
                and winner.measurement is not None
                and (not library.version or known.space_hash == key.space_hash)
            ):
                found.setdefault(tuple([known.sizes.get(name, 0) for name in self._measured_names]), winner)
        return found


class _Request:
    """A problem of an operation.

    Parameters
    ----------
    shelf, problem, library
        Results of the operation, the problem, and whether a library may compute it.
    expected
        Number of ways to ask the model for.

    Attributes
    ----------
    fits
        Kernels that compute it, each with the sizes by its names.
    libraries
        Libraries that compute it.
    """

    def __init__(self, shelf: OperationShelf, problem: Problem, *, library: bool = True, expected: int = 1) -> None:
        self.shelf, self.problem, self.expected = shelf, problem, expected
        self.fits = {
            name: sizes
            for name, member in shelf._members.items()
            if not member.refusal and (sizes := member.sizes_for(problem)) is not None
        }
        if not self.fits:
            refusals = [f"{name}: {one.refusal}" for name, one in shelf._members.items() if one.refusal]
            raise InputError(f"no kernel computes {problem}: {'; '.join(refusals) or 'none is written for it'}")
        libraries = shelf._libraries if library else []
        self.libraries = [one for one in libraries if computes(one, shelf.operation, problem)]

    def ways(self) -> list[Way]:
        """Return ways to compute the problem, the one to serve first."""
        known, likely = list(measured(self)), list(expected(self))
        if known and likely and _is_clearly_faster(likely[0].contender, known[0].contender):
            return [likely[0], *known, *likely[1:]]
        return [*known, *likely] or list(called(self)) or list(nearest(self))

    def library_way(self, library: Library, choice: Choice, time_us: float | None, doubt: float | None = None) -> Way:
        """Return a library as a way to compute the problem."""
        name, sizes = next(iter(self.fits.items()))
        code = LibraryCode(library, self.problem, self.shelf._members[name].kernel, sizes)
        contender = Contender(library.name, {}, time_us, doubt, is_library=True, source=choice.source or "cuda")
        return Way(code, choice, contender)


def measured(request: _Request) -> Iterator[Way]:
    """Yield what was measured for exactly this problem on this GPU, the fastest first."""
    shelf, ways = request.shelf, []
    for name, sizes in request.fits.items():
        member = shelf._members[name]
        stored = member.exact(sizes)
        of_kernel = shelf.request_for(name, sizes, Shelf(stored, checks=member.checks)) if stored else None
        choice = first_allowed(of_kernel, exact, neighbours) if of_kernel is not None else None
        if of_kernel is None or choice is None or choice.measurement is None or choice.tier == "transferred":
            continue
        contender = Contender(name, choice.config, choice.measurement.time_us, source=choice.source)
        code = KernelCode(member.kernel, of_kernel.problem, shelf.device, choice.config)
        ways.append(Way(code, choice, contender))
    key = tuple([request.problem.sizes[name] for name in shelf._measured_names])
    for library in request.libraries:
        winner = shelf._library_times[library.name].get(key)
        if winner is not None and winner.measurement is not None:
            choice = Choice(
                "exact",
                {},
                measurement=winner.measurement,
                source=winner.key.source,
                tuned_on=winner.key.gpu_name,
                tuned_at=winner.tuned_at,
                tuned_sizes=winner.key.sizes,
                shipped=winner.shipped,
            )
            ways.append(request.library_way(library, choice, winner.measurement.time_us))
    yield from sorted(ways, key=lambda way: way.contender.time_us or math.inf)


def expected(request: _Request) -> Iterator[Way]:
    """Yield what the model of times expects to be the fastest; nothing if there is no model for this GPU."""
    shelf, own = request.shelf, {library.name: library for library in request.libraries}
    if shelf._model is None:
        return
    sizes, fits, names = request.problem.sizes, request.fits, list(own)
    for one in shelf._model.choose(
        sizes, fits, shelf._specs, shelf.device, libraries=names, count=request.expected, dtype=shelf._dtype
    ):
        name, config = one.candidate.kernel, one.candidate.config
        choice = Choice("model", config)
        if name in own:
            yield request.library_way(own[name], choice, one.time_us, one.doubt)
            continue
        member = shelf._members[name]
        kernel, given = member.kernel, fits[name]
        values = {size: given.get(size, default) for size, default in kernel.spec.sizes.items()}
        problem = Problem(kernel.name, values, shelf._dtype)
        if member.checks:  # it may have been found to be wrong for the problem
            key = key_of(kernel, problem, shelf.device, nvrtc_version=shelf._nvrtc_version, l2_mode="cold")
            if config_key(config) in wrong_configs(member.checks, key):
                continue
        code = KernelCode(kernel, problem, shelf.device, config)
        yield Way(code, choice, Contender(name, config, one.time_us, one.doubt))


def called(request: _Request) -> Iterator[Way]:
    """Yield the libraries, of which no time is known."""
    for library in request.libraries:
        yield request.library_way(library, Choice("library", {}), None)


def nearest(request: _Request) -> Iterator[Way]:
    """Yield the kernels, that which was measured for the nearest problem first.

    Raises
    ------
    InputError
        None of them has a configuration for the problem.
    """
    shelf, refusals = request.shelf, []
    found: list[tuple[tuple[Any, ...], Way]] = []
    for name, sizes in request.fits.items():
        member = shelf._members[name]
        try:
            problem = resolve_problem(member.kernel.spec, sizes, shelf._dtype)
            choice = choose(Request(member.kernel, problem, shelf.device, shelf._nvrtc_version, member.shelf))
            code = KernelCode(member.kernel, problem, shelf.device, choice.config)
            way = Way(code, choice, Contender(name, choice.config, None))
            found.append((_nearness(member.member, problem, choice), way))
        except InputError as error:
            refusals.append(f"{name}: {error}")
    if not found:
        raise InputError(f"no kernel computes {request.problem}: {'; '.join(refusals)}")
    yield from (way for _, way in sorted(found, key=lambda one: one[0]))


def _shown(shelf: OperationShelf, problem: Problem, library: bool) -> tuple[Contender, ...]:
    """Return the contenders that an explanation states, each once."""
    shown: dict[tuple[str, tuple[tuple[str, Any], ...]], Contender] = {}
    for way in _Request(shelf, problem, library=library, expected=SHOWN).ways():
        shown.setdefault((way.contender.kernel, tuple(way.contender.config.items())), way.contender)
    return tuple(shown.values())[:SHOWN]


def serve_bundled(operation: Operation, problem: Problem, find: Callable[[str, Sizes], BoundKernel]) -> BoundKernel:
    """Return the kernel for a problem of an operation among those of a bundle: the one measured nearest to it.

    Parameters
    ----------
    operation, problem
        The operation, and its problem.
    find
        Returns the best configuration of a kernel for sizes by its own names.

    Raises
    ------
    InputError
        The bundle holds no kernel that computes the problem.
    """
    found: list[tuple[Member, BoundKernel]] = []
    refusals = []
    for member, sizes in operation.fitting(problem):
        try:
            found.append((member, find(member.name, sizes)))
        except InputError as error:
            refusals.append(f"{member.name}: {error}")
    if not found:
        raise InputError(f"no kernel computes {problem}: {'; '.join(refusals) or 'none is written for it'}")
    return min(found, key=lambda one: _nearness(one[0], one[1].problem, one[1].choice))[1]


_ORDER = {"exact": 0, "family": 0, "nearest": 0, "transferred": 1, "default": 2}


def _nearness(member: Member, problem: Problem, choice: Choice) -> tuple[Any, ...]:
    """Return a sort key: measured on this GPU, on another or not at all, then the distance in size, then the time."""
    order = _ORDER[choice.tier]
    if order > 0 and member.measured_only:
        order = 3
    time_us = choice.measurement.time_us if choice.measurement is not None else math.inf
    return order, size_distance(choice.tuned_sizes or {}, problem.sizes), time_us


def _is_clearly_faster(expected: Contender, measured: Contender) -> bool:
    if expected.time_us is None or measured.time_us is None or expected.kernel == measured.kernel:
        return False
    return expected.time_us * math.exp(_CLEARLY * (expected.doubt or 0.0)) < measured.time_us
