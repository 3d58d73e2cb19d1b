"""Choose what computes a problem of an operation: one of its kernels in some configuration, or a library.

Measurements of this very problem on this GPU decide, of the kernels and of the libraries. Else the model of times does,
if there is one for this GPU; else a library is called, if there is one; else the kernel is served that was measured for
the nearest problem, or the first that computes it. What the model expects to be clearly faster than all that was
measured is served, too: that one kernel was tuned says little of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, config_key
from autotile.database.fast_access import Changes, file_signature, read_changes_fast
from autotile.database.keys import key_of, library_key
from autotile.database.winners import Check, Winner
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Member, Operation
from autotile.kernel.problem import resolve_problem, size_distance, unsupported_reason
from autotile.serving.bound import BoundKernel
from autotile.serving.candidates import Candidates, model_of
from autotile.serving.choice import Choice, Contender, choose, choose_stored, wrong_configs
from autotile.serving.libraries import BoundLibrary, Library, computes, libraries_for
from autotile.serving.numerics import Requested
from autotile.settings import read_settings

SHOWN = 3
"""Contenders that an explanation states. A look-up asks the model for the first only, since each one is checked."""
_CLEARLY = 3.0
"""Standard deviations by which the model must expect something to be faster than what was measured."""
_RECHECK_S = 1.0
"""Time for which a database is not looked at again, unless it is known to have changed."""

Sizes = Mapping[str, int]


class _Way(NamedTuple):
    """A way to compute a problem: its time, and the function that binds it, given the contenders."""

    contender: Contender
    bind: Callable[[tuple[Contender, ...]], BoundKernel]


class _MemberTable:
    """A kernel of an operation with its results on one GPU, by sizes.

    Parameters
    ----------
    member
        The kernel.
    winners
        Its stored results, of all GPUs.
    checks
        Verdicts on its configurations.
    device
        The device.
    flags
        Flags and conditions of the operation.
    """

    def __init__(
        self,
        member: Member,
        winners: list[Winner],
        checks: list[Check],
        device: DeviceProperties,
        flags: tuple[str, ...],
    ) -> None:
        self.member = member
        self.kernel = kernel = member.load()
        self.winners = winners
        self.checks = checks
        self.refusal = unsupported_reason(kernel.spec, device)
        self._names = kernel.spec.sizes
        self._device = device
        names = {name for name in member.when.names if "." not in name} if member.when is not None else set()
        self._conditions = tuple(sorted(names)) if names <= set(flags) else ()
        self._holds: dict[tuple[int, ...], bool] = {}
        """Whether the condition of the kernel holds, by the flags and conditions of a problem."""
        self._unconditional = replace(member, when=None)
        self._exact: dict[tuple[int, ...], list[Winner]] = {}
        for winner in winners:
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


class OperationTable:
    """What is known of an operation for one dtype on one device, to be looked up by sizes.

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
        stored = {member.name: Candidates(location, Problem(member.name, {}, dtype)) for member in operation.members}
        winners = {name: candidates.winners() for name, candidates in stored.items()}
        every = [winner for found in winners.values() for winner in found]
        self.device_index, self.device = find_device(every)
        self._nvrtc_version = find_nvrtc(lambda: every)
        self._members = {
            member.name: _MemberTable(
                member,
                winners[member.name],
                stored[member.name].checks(),
                self.device,
                (*operation.flags, *operation.conditions),
            )
            for member in operation.members
        }
        self.fault = next((candidates.fault for candidates in stored.values() if candidates.fault), "")
        self._stored = stored
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
        """Return what was decided of the operation, of its kernels and libraries."""
        names = {
            self.operation.name,
            *self._members,
            *(f"{self.operation.name}:{library.name}" for library in self._libraries),
        }
        return frozenset(one for one in read_changes_fast(self._location) or () if one[0] in names)

    def serve(
        self, problem: Problem, *, library: bool = True, race: bool = False, may_race: bool = True
    ) -> BoundKernel:
        """Return what computes a problem.

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
        fits = {
            name: sizes
            for name, table in self._members.items()
            if not table.refusal and (sizes := table.sizes_for(problem)) is not None
        }
        if not fits:
            raise InputError(f"no kernel computes {problem}: {self._refusals() or 'none is written for it'}")
        libraries = [one for one in self._libraries if computes(one, self.operation, problem)] if library else []
        race = may_race and (race or self._races) and self.device_index is not None
        ways = self._ways(problem, fits, libraries, SHOWN if race else 1)
        served = ways[0].bind((ways[0].contender,)) if ways else self._nearest(problem, fits)
        if ways:
            served.find_contenders = lambda: _shown(self._ways(problem, fits, libraries, SHOWN))
        if race and served.tier != "exact":
            return self._raced(served, ways, problem, fits, libraries)
        return served

    def _ways(self, problem: Problem, fits: Mapping[str, Sizes], libraries: list[Library], count: int) -> list[_Way]:
        """Return ways to compute a problem, the one to serve first, with at most ``count`` of the model; maybe none."""
        measured = self._measured(problem, fits, libraries)
        expected = self._expected(problem, fits, libraries, count)
        if measured and expected and _is_clearly_faster(expected[0].contender, measured[0].contender):
            return [expected[0], *measured, *expected[1:]]
        return [*measured, *expected] or [self._library(one, problem, fits, None) for one in libraries]

    def _raced(
        self,
        served: BoundKernel,
        ways: list[_Way],
        problem: Problem,
        fits: Mapping[str, Sizes],
        libraries: list[Library],
    ) -> BoundKernel:
        """Return a kernel whose first call races what is served, the next best ways, and the libraries."""
        from autotile.serving.racing import RacedKernel

        rivals = [way.bind(()) for way in ways[1:SHOWN]]
        present = [served, *rivals]
        names = {one.kernel for one in present}
        present += [self._library(one, problem, fits, None).bind(()) for one in libraries if one.name not in names]
        if not self._model and served.is_library:
            present.append(self._nearest(problem, fits))
        return RacedKernel(present, self.operation, self._location) if len(present) > 1 else served

    def _measured(self, problem: Problem, fits: Mapping[str, Sizes], libraries: list[Library]) -> list[_Way]:
        """Return what was measured for exactly this problem on this GPU, the fastest first."""
        ways = [way for name, sizes in fits.items() if (way := self._measured_kernel(name, sizes)) is not None]
        key = tuple([problem.sizes[name] for name in self._measured_names])
        for library in libraries:
            if (winner := self._library_times[library.name].get(key)) is not None:
                ways.append(self._library(library, problem, fits, winner))
        return sorted(ways, key=lambda way: way.contender.time_us or math.inf)

    def _measured_kernel(self, name: str, sizes: Sizes) -> _Way | None:
        table = self._members[name]
        stored = table.exact(sizes)
        if not stored:
            return None
        problem = resolve_problem(table.kernel.spec, sizes, self._dtype)
        choice = choose_stored(
            table.kernel, problem, self.device, self._nvrtc_version, stored, checks=lambda: table.checks
        )
        if choice is None or choice.measurement is None or choice.tier == "transferred":
            return None
        contender = Contender(name, choice.config, choice.measurement.time_us, source=choice.source)
        return _Way(contender, lambda shown: self._bind(table.kernel, problem, choice, shown))

    def _expected(
        self, problem: Problem, fits: Mapping[str, Sizes], libraries: list[Library], count: int
    ) -> list[_Way]:
        """Return what the model of times expects to be the fastest; nothing if there is no model for this GPU."""
        if self._model is None:
            return []
        own = {library.name: library for library in libraries}
        found = self._model.choose(
            problem.sizes, fits, self._specs, self.device, libraries=list(own), count=count, dtype=self._dtype
        )
        ways = []
        for expected in found:
            name, config = expected.candidate.kernel, expected.candidate.config
            contender = Contender(name, config, expected.time_us, expected.doubt, name in own)
            choice = Choice("model", config)
            if name in own:
                ways.append(_Way(contender, self._binder(own[name], problem, fits, choice)))
            elif (way := self._expected_kernel(contender, fits[name], choice)) is not None:
                ways.append(way)
        return ways

    def _expected_kernel(self, contender: Contender, sizes: Sizes, choice: Choice) -> _Way | None:
        """Return a kernel as a way to compute a problem; None if it was found to be wrong for it."""
        table = self._members[contender.kernel]
        names = table.kernel.spec.sizes
        problem = Problem(table.kernel.name, {name: sizes.get(name, names[name]) for name in names}, self._dtype)
        if table.checks:
            requested = key_of(table.kernel, problem, self.device, nvrtc_version=self._nvrtc_version, l2_mode="cold")
            if config_key(contender.config) in wrong_configs(table.checks, requested):
                return None
        return _Way(contender, lambda shown: self._bind(table.kernel, problem, choice, shown))

    def _nearest(self, problem: Problem, fits: Mapping[str, Sizes]) -> BoundKernel:
        """Return the kernel that was measured for the nearest problem; if none was, the first that computes it."""
        found: list[tuple[Kernel, Problem, Choice]] = []
        refusals = []
        for name, sizes in fits.items():
            table = self._members[name]
            try:
                own = resolve_problem(table.kernel.spec, sizes, self._dtype)
                choice = choose(
                    table.kernel,
                    own,
                    self.device,
                    self._nvrtc_version,
                    table.winners,
                    rules=self._stored[name].rules(),
                    checks=lambda table=table: table.checks,  # type: ignore[misc]
                    finalists=self._stored[name].finalists,
                )
                found.append((table.kernel, own, choice))
            except InputError as error:
                refusals.append(f"{name}: {error}")
        if not found:
            raise InputError(f"no kernel computes {problem}: {'; '.join(refusals)}")
        found.sort(key=lambda one: _nearness(self._members[one[0].name].member, one[1], one[2]))
        contenders = tuple(Contender(kernel.name, choice.config, None) for kernel, _, choice in found)
        return self._bind(*found[0], contenders[:SHOWN])

    def _bind(self, kernel: Kernel, problem: Problem, choice: Choice, contenders: tuple[Contender, ...]) -> BoundKernel:
        choice = replace(choice, contenders=contenders, unread=self.fault)
        return BoundKernel(kernel, problem, self.device, self.device_index, choice)

    def _library(self, library: Library, problem: Problem, fits: Mapping[str, Sizes], winner: Winner | None) -> _Way:
        """Return a library as a way to compute a problem, with its stored time if there is one."""
        choice, time_us = Choice("library", {}), None
        if winner is not None and winner.measurement is not None:
            time_us = winner.measurement.time_us
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
        contender = Contender(library.name, {}, time_us, is_library=True, source=choice.source or "cuda")
        return _Way(contender, self._binder(library, problem, fits, choice))

    def _binder(
        self, library: Library, problem: Problem, fits: Mapping[str, Sizes], choice: Choice
    ) -> Callable[[tuple[Contender, ...]], BoundKernel]:
        name, sizes = next(iter(fits.items()))
        definition = self._members[name].kernel

        def bind(contenders: tuple[Contender, ...]) -> BoundKernel:
            return BoundLibrary(
                library,
                problem,
                self.device,
                self.device_index,
                replace(choice, contenders=contenders, unread=self.fault),
                definition=definition,
                sizes=sizes,
            )

        return bind

    def _times_of(self, library: Library) -> dict[tuple[int, ...], Winner]:
        """Return the stored times of a library on this GPU, by sizes and flags."""
        operation = self.operation
        problem = Problem(f"{operation.name}:{library.name}", {}, self._dtype)
        request = Problem(operation.name, {}, self._dtype)
        key = library_key(
            operation, request, self.device, library.name, library.version, nvrtc_version=self._nvrtc_version
        )
        found: dict[tuple[int, ...], Winner] = {}
        for winner in Candidates(self._location, problem).winners():
            known = winner.key
            is_same = known.gpu_name == self.device.name and known.template_hash == operation.digest
            if (
                is_same
                and winner.measurement is not None
                and (not library.version or known.space_hash == key.space_hash)
            ):
                found.setdefault(tuple([known.sizes.get(name, 0) for name in self._measured_names]), winner)
        return found

    def requested(self, kernel: str, sizes: Sizes) -> Requested | None:
        """Return a problem of one of the kernels, given its name and its sizes; None if there is no such kernel.

        Raises
        ------
        InputError
            The sizes are not those of the kernel.
        """
        member = self._members.get(kernel)
        if member is None:
            return None
        problem = resolve_problem(member.kernel.spec, sizes, self._dtype)
        return Requested(member.kernel, problem, self.device, self._nvrtc_version, self._location)

    def bind_kernel(self, request: Requested, choice: Choice) -> BoundKernel:
        """Return a kernel with a choice that was made elsewhere."""
        return BoundKernel(request.kernel, request.problem, self.device, self.device_index, choice)

    def bind_library(self, name: str, problem: Problem, choice: Choice) -> BoundKernel | None:
        """Return a library with a choice that was made elsewhere; None if it is not here."""
        library = next((one for one in self._libraries if one.name == name), None)
        if library is None or not computes(library, self.operation, problem):
            return None
        fits = {member.name: sizes for member, sizes in self.operation.fitting(problem, self.device)}
        served = self._library(library, problem, fits, None).bind(choice.contenders)
        served.choice = choice
        return served

    def _refusals(self) -> str:
        return "; ".join(f"{name}: {table.refusal}" for name, table in self._members.items() if table.refusal)


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


def _shown(ways: list[_Way]) -> tuple[Contender, ...]:
    """Return the contenders that an explanation states, each once."""
    shown: dict[tuple[str, tuple[tuple[str, Any], ...]], Contender] = {}
    for way in ways:
        shown.setdefault((way.contender.kernel, tuple(way.contender.config.items())), way.contender)
    return tuple(shown.values())[:SHOWN]


def _is_clearly_faster(expected: Contender, measured: Contender) -> bool:
    if expected.time_us is None or measured.time_us is None or expected.kernel == measured.kernel:
        return False
    return expected.time_us * math.exp(_CLEARLY * (expected.doubt or 0.0)) < measured.time_us
