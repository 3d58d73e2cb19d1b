"""Operations: the kernels and libraries that compute a problem, the sources of choices among them, and ``matmul``.

A library is cuBLAS, or a callable that a program adds. Measurements of this very problem on this GPU decide, of the
kernels and of the libraries. Else the model of times does, if there is one for this GPU; else a library is called, if
there is one; else the kernel is served that was measured for the nearest problem, or the first that computes it. What
the model expects to be clearly faster than all that was measured is served, too: that one kernel was tuned says little
of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from autotile.core.device import DeviceProperties
from autotile.core.model import L2Mode, Problem, config_key
from autotile.cuda.cublas import GemmLayout, cublas_version
from autotile.cuda.toolchain import load_cupy
from autotile.database.keys import library_key
from autotile.database.winners import CHANGES, Changes, Winner, file_signature, read_file
from autotile.errors import ArgumentError, InputError, ToolchainError
from autotile.kernel.operation import LIBRARIES, Library, Member, Operation
from autotile.kernel.problem import resolve_problem, size_distance, unsupported_reason
from autotile.serving.arrays import VECTOR_BYTES, ArrayLibrary, as_cupy, element_type, library_of, new_array, on_stream
from autotile.serving.aside import choices, compilations
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import EPOCH, Choice, Code, Contender, KernelCode, LibraryCode, RecentCache
from autotile.serving.selection import (
    DatabaseShelf,
    KernelRequest,
    Shelf,
    choose,
    model_of,
    packed_origin,
    stored_choice,
)
from autotile.settings import Numerics, read_settings

if TYPE_CHECKING:
    from autotile.exchange.bundle import Bundle
    from autotile.families.operation_model import ModelCandidate

_GEMM_SIZES = {"M", "N", "K"}
_GEMM_NAMES = _GEMM_SIZES | {"BATCH", "TRANS_A", "TRANS_B", "OUT_FP32"}
"""Sizes and flags of an operation that cuBLAS may compute."""
_added: dict[str, dict[str, Library]] = {}
"""Libraries that the program has added, by operation and name."""


def keep_library(operation: Operation, library: Library) -> None:
    """Add a library to an operation; one of the same name is replaced, that of a built-in one is an `InputError`."""
    if library.name in LIBRARIES or not library.name.isidentifier():
        expected = f"an identifier other than {LIBRARIES[0]!r}"
        raise InputError(f"a library cannot be added as {library.name!r}: expected {expected}")
    _added.setdefault(operation.name, {})[library.name] = library


def libraries_for(operation: Operation, *, is_present: bool = True) -> list[Library]:
    """Return the libraries that may compute an operation, built-in ones first.

    If they are not to be called on this machine (``is_present``), a built-in library counts as installed, and its
    version is empty if it is not.
    """
    found = []
    for name in operation.libraries:
        try:
            found.append(Library(name, cublas_version()))
        except ToolchainError:
            if not is_present:
                found.append(Library(name, ""))
    return [*found, *_added.get(operation.name, {}).values()]


def computes(library: Library, operation: Operation, problem: Problem) -> bool:
    """Return True if a library computes a problem of an operation."""
    if library.call is not None:
        return True
    names = set(operation.sizes) - set(operation.conditions)
    return _GEMM_SIZES <= names <= _GEMM_NAMES and GemmLayout.of(problem.sizes, problem.dtype).is_supported


SHOWN = 3
"""Contenders that an explanation states. A look-up asks the model for the first only, since each one is checked."""
_CLEARLY = 3.0
"""Standard deviations by which the model must expect something to be faster than what was measured."""
_RECHECK_S = 1.0
"""Time for which a database is not looked at again, unless it is known to have changed."""

Sizes = Mapping[str, int]


class Way(NamedTuple):
    """A way to compute a problem: a choice, the code that it is of, and its time as in `Contender`."""

    code: Code
    choice: Choice
    time_us: float | None = None
    doubt: float | None = None

    @property
    def problem(self) -> Problem:
        """The problem by the names of the kernel."""
        return self.code.problem

    @property
    def contender(self) -> Contender:
        """The way as an explanation states it."""
        source = self.choice.source if self.time_us is not None else ""
        is_library, config = self.code.library is not None, self.choice.config
        return Contender(self.code.name, config, self.time_us, self.doubt, is_library, source or "cuda")


class _MemberResults:
    """A kernel of an operation with its results on one GPU, by sizes."""

    def __init__(self, member: Member, shelf: DatabaseShelf, device: DeviceProperties) -> None:
        self.member, self.shelf, self.checks = member, shelf, shelf.checks
        self.kernel = member.load()
        self.refusal = unsupported_reason(self.kernel.spec, device)
        self.results: dict[tuple[int, ...], list[Winner]] = {}
        """Results on the device, by `key_of_sizes`."""
        for winner in shelf.winners:
            if winner.key.gpu_name == device.name:
                self.results.setdefault(self.key_of_sizes(winner.key.sizes), []).append(winner)

    def key_of_sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the sizes by the kernel's names in order, with the defaults of those that are not given."""
        return tuple([sizes.get(name, default) for name, default in self.kernel.spec.sizes.items()])


class OperationShelf:
    """Stored results of an operation for one dtype on one device, to be looked up by sizes.

    ``find_device`` returns the CUDA device, None if what is served can only be inspected, and its properties, given all
    results; ``find_nvrtc`` the version of NVRTC. Times with the L2 cache in another state than ``l2`` count only where
    there are no others.
    """

    def __init__(
        self,
        operation: Operation,
        dtype: str,
        location: str,
        find_device: Callable[[Shelf], tuple[int | None, DeviceProperties]],
        find_nvrtc: Callable[[Shelf], str],
        *,
        l2: L2Mode = "cold",
    ) -> None:
        self.operation, self.dtype, self.l2 = operation, dtype, l2
        self._location = location
        self._signature, self._checked_s = file_signature(location), time.monotonic()
        members = operation.members_for(dtype)
        stored = {member.name: DatabaseShelf(location, member.name, dtype) for member in members}
        every = Shelf([winner for shelf in stored.values() for winner in shelf.winners])
        self.device_index, self.device = find_device(every)
        self.nvrtc_version = find_nvrtc(every)
        self.members = {one.name: _MemberResults(one, stored[one.name], self.device) for one in members}
        self.specs = {name: member.kernel.spec for name, member in self.members.items()}
        self.fault = next((shelf.fault for shelf in stored.values() if shelf.fault), "")
        self.measured_names = [name for name in operation.sizes if name not in operation.conditions]
        self.races = read_settings().race and read_settings().numerics != "same"
        """Whether the settings ask for races."""
        self.model = model_of(location, operation.name, dtype, self.device)
        self.libraries = libraries_for(operation, is_present=self.device_index is not None)
        self.library_times = {library.name: self._times_of(library) for library in self.libraries}
        self._codes: dict[tuple[int, ...], KernelCode] = {}
        """Code of candidates of the model, by identity and the sizes that are compiled in."""
        self._sought: set[tuple[object, ...]] = set()
        """Kernels and flags for which the model's configurations were looked for in the cache."""
        self._changes = self._relevant_changes()

    def is_outdated(self, *, anew: bool = False) -> bool:
        """Return True if results have been decided since it was made.

        A database that was looked at within the last second is not looked at again, unless ``anew``.
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
        own = self.operation.name
        names = {own, *self.members, *(f"{own}:{library.name}" for library in self.libraries)}
        return frozenset(one for one in read_file(self._location, CHANGES) or () if one[0] in names)

    def serve(self, problem: Problem, *, library: bool = True, race: bool = False) -> BoundKernel:
        """Return the best way to compute a problem, ready to be launched.

        With ``race``, the first call races the best few ways if nothing was measured for the problem. Raise
        `InputError` if no kernel computes the problem on the device.
        """
        served = self.bind(OperationRequest(self, problem, library=library).ways()[0])
        if race and self.device_index is not None and served.tier != "exact":
            from autotile.serving.racing import adopt_fastest

            present = self.contenders(problem, library=library)
            if len(present) > 1:
                served.first_use = present[0], partial(adopt_fastest, present, self.operation, self._location)
        served.find_ways = self.find_ways
        return served

    def contenders(self, problem: Problem, *, library: bool) -> list[BoundKernel]:
        """Return the best few ways to compute a problem, that which is served first, and the libraries."""
        request = OperationRequest(self, problem, library=library, expected=SHOWN)
        present = [self.bind(way) for way in request.ways()[:SHOWN]]
        names = {one.kernel for one in present}
        is_library = present[0].is_library
        present += [self.bind(way) for way in called(request) if way.code.name not in names]
        if not self.model and is_library:
            present += map(self.bind, nearest(request)[:1])
        return present

    def find_ways(self, problem: Problem, library: bool, kernels: bool) -> tuple[Contender, ...]:
        """Return the best ways to compute a problem with their times, the one that is served first.

        Without ``kernels``, return the fastest library, whether a ``library`` may be served or not.
        """
        if not kernels:
            ways = OperationRequest(self, problem, accepts=lambda _: False).ways()
            return tuple(way.contender for way in ways if way.code.library is not None)[:1]
        shown: dict[tuple[str, str], Contender] = {}
        for way in OperationRequest(self, problem, library=library, expected=SHOWN).ways():
            shown.setdefault((way.code.name, config_key(way.choice.config)), way.contender)
        return tuple(shown.values())[:SHOWN]

    def stand_in(self, problem: Problem, *, library: bool) -> BoundKernel | None:
        """Return the best way to compute a problem that needs no compiler; None if there is none.

        Only the configurations of the model that are known to be compiled count: the first call looks for all of them
        in the cache, aside.
        """

        def code_of(candidate: ModelCandidate) -> KernelCode:
            kernel, own = self.members[candidate.kernel].kernel, request.problem_of(candidate.kernel)
            key = id(candidate), *[own.sizes[name] for name in kernel.spec.compiled_names]
            return self._codes.get(key) or self._codes.setdefault(
                key, KernelCode(kernel, own, self.device, candidate.config)
            )

        def look_for_all() -> None:
            for candidate in self.model.candidates if self.model is not None else ():
                if candidate.kernel in request.fits:
                    code_of(candidate).needs_compiler()

        request = OperationRequest(
            self, problem, library=library, accepts=lambda one: not code_of(one).needs_compiler(looks=False)
        )
        sought = tuple(request.fits), *[problem.sizes[name] for name in self.operation.flags]
        if sought not in self._sought:
            self._sought.add(sought)
            compilations.add(look_for_all)
        for way in (*request.ways(), *called(request)):
            if not isinstance(way.code, KernelCode) or not way.code.needs_compiler():
                return self.bind(way)
        return None

    def serve_packed(
        self, problem: Problem, bundle: Bundle, find: Callable[[str, Sizes], BoundKernel], *, library: bool
    ) -> BoundKernel:
        """Return the kernel or library that a bundle holds for a problem: exactly, by its model, or the nearest.

        ``find`` returns the best configuration that the bundle holds of a kernel, for sizes by the kernel's own names.
        That the bundle holds nothing for the problem is an `InputError`.
        """
        try:
            nearest = _nearest_first(problem, self.operation.fitting(problem), find)[0]
        except InputError:
            if (packed := self._expected_packed(problem, bundle, library=library)) is None:
                raise
            return packed
        if nearest.tier == "exact":
            return nearest
        return self._expected_packed(problem, bundle, library=library) or nearest

    def _expected_packed(self, problem: Problem, bundle: Bundle, *, library: bool) -> BoundKernel | None:
        """Return the fastest by the model, of libraries and what a bundle holds; None without a model or any."""
        request = OperationRequest(self, problem, library=library)
        held = {
            name: bundle.kernel(name).cubins_for(request.problem_of(name), self.device.compute_capability)
            for name in request.fits.keys() & bundle.kernels
            if bundle.kernel(name).kernel.has_source_of(self.members[name].kernel)
        }
        request.accepts = lambda one: config_key(one.config) in held.get(one.kernel, ())
        for way in expected(request):
            if not isinstance(way.code, KernelCode):
                return self.bind(way)
            bundled, cubin = bundle.kernel(way.code.name), held[way.code.name][config_key(way.choice.config)]
            packed = bundle.packed(cubin)
            code = KernelCode(bundled.kernel, way.code.problem, self.device, way.choice.config, packed=packed)
            choice = replace(way.choice, packed=packed_origin(bundle, bundled, cubin))
            return self.bind(way._replace(code=code, choice=choice))
        return None

    def bind(self, way: Way) -> BoundKernel:
        """Return a way to compute a problem as a served kernel."""
        choice = replace(way.choice, contenders=(way.contender,), unread=self.fault)
        return BoundKernel(way.code, choice, self.device, self.device_index)

    def request_for(self, kernel: str, sizes: Sizes, shelf: Shelf | None = None) -> KernelRequest:
        """Return a problem of one of the kernels, by its name and its sizes."""
        member = self.members[kernel]
        problem = resolve_problem(member.kernel.spec, sizes, self.dtype)
        of = member.kernel, problem, self.device, self.nvrtc_version, shelf or member.shelf
        return KernelRequest(*of, l2=self.l2)

    def _times_of(self, library: Library) -> dict[tuple[int, ...], tuple[Choice, float]]:
        """Return the stored results of a library on this GPU, each with its time, by sizes and flags."""
        operation = self.operation
        request = Problem(operation.name, {}, self.dtype)
        of = operation, request, self.device, library.name, library.version
        key = library_key(*of, nvrtc_version=self.nvrtc_version)
        found: dict[tuple[int, ...], tuple[Choice, float]] = {}
        stored = DatabaseShelf(self._location, f"{operation.name}:{library.name}", self.dtype).winners
        for winner in sorted(stored, key=lambda winner: winner.key.l2_mode != self.l2):
            known = winner.key
            if (
                known.gpu_name == self.device.name
                and known.template_hash == operation.digest
                and winner.measurement is not None
                and (not library.version or known.space_hash == key.space_hash)
            ):
                differences = (("l2_mode", known.l2_mode, self.l2),) if known.l2_mode != self.l2 else ()
                choice = stored_choice(winner, "nearest" if differences else "exact", differences)
                sizes = tuple([known.sizes.get(name, 0) for name in self.measured_names])
                found.setdefault(sizes, (choice, winner.measurement.time_us))
        return found


class OperationRequest:
    """A problem of an operation, with the kernels that compute it, each with the sizes by its names, and the libraries.

    The model is asked for ``expected`` ways, among the configurations that it ``accepts``; None for all.
    """

    def __init__(
        self,
        shelf: OperationShelf,
        problem: Problem,
        *,
        library: bool = True,
        expected: int = 1,
        accepts: Callable[[ModelCandidate], bool] | None = None,
    ) -> None:
        self.shelf, self.problem, self.expected, self.accepts = shelf, problem, expected, accepts
        self.fits = {
            name: sizes
            for name, member in shelf.members.items()
            if not member.refusal and (sizes := member.member.sizes_for(problem, shelf.device)) is not None
        }
        if not self.fits:
            refusals = [f"{name}: {one.refusal}" for name, one in shelf.members.items() if one.refusal]
            raise InputError(f"no kernel computes {problem}: {'; '.join(refusals) or 'none is written for it'}")
        libraries = shelf.libraries if library else []
        self.libraries = [one for one in libraries if computes(one, shelf.operation, problem)]

    def ways(self) -> list[Way]:
        """Return ways to compute the problem, the one to serve first."""
        known, likely = measured(self), list(expected(self))
        if known and likely and self.shelf.l2 != "eager":  # a model expects times of the GPU alone
            first, best = likely[0], known[0]
            if (
                first.code.name != best.code.name
                and first.time_us is not None
                and best.time_us is not None
                and first.time_us * math.exp(_CLEARLY * (first.doubt or 0.0)) < best.time_us
            ):
                return [first, *known, *likely[1:]]
        return [*known, *likely] or called(self) or nearest(self)

    def problem_of(self, name: str) -> Problem:
        """Return the problem by the names of one of the kernels that compute it; its sizes are not checked again."""
        kernel = self.shelf.members[name].kernel
        return Problem(kernel.name, {**kernel.spec.sizes, **self.fits[name]}, self.shelf.dtype)

    def library_way(
        self, library: Library, choice: Choice, time_us: float | None = None, doubt: float | None = None
    ) -> Way:
        """Return a library as a way to compute the problem."""
        name = next(iter(self.fits))
        code = LibraryCode(library, self.problem, self.shelf.members[name].kernel, self.fits[name])
        return Way(code, choice, time_us, doubt)


def measured(request: OperationRequest) -> list[Way]:
    """Return the ways that were measured for exactly this problem on this GPU, the fastest first."""
    shelf, ways = request.shelf, []
    for name, sizes in request.fits.items():
        member = shelf.members[name]
        if not (stored := member.results.get(member.key_of_sizes(sizes))):
            continue
        of_kernel = shelf.request_for(name, sizes, Shelf(stored, checks=member.checks))
        choice = of_kernel.stored()
        if choice is not None and choice.measurement is not None and choice.tier != "transferred":
            ways.append(Way(of_kernel.code(choice), choice, choice.measurement.time_us))
    key = tuple([request.problem.sizes[name] for name in shelf.measured_names])
    for library in request.libraries:
        if (timed := shelf.library_times[library.name].get(key)) is not None:
            ways.append(request.library_way(library, *timed))
    comparable = [way for way in ways if not any(name == "l2_mode" for name, *_ in way.choice.differences)]
    return sorted(comparable or ways, key=lambda way: way.time_us or math.inf)


def expected(request: OperationRequest) -> Iterator[Way]:
    """Yield what the model of times expects to be the fastest; nothing if there is no model for this GPU."""
    shelf, own = request.shelf, {library.name: library for library in request.libraries}
    if shelf.model is None:
        return
    fits = request.fits
    learned_on = shelf.model.gpu_name if shelf.model.gpu_name != shelf.device.name else ""
    options: dict[str, Any] = {"count": request.expected, "dtype": shelf.dtype, "accepts": request.accepts}
    of = request.problem.sizes, fits, shelf.specs, shelf.device
    for one in shelf.model.choose(*of, libraries=list(own), **options):
        name, config = one.candidate.kernel, one.candidate.config
        choice = Choice("model", config, tuned_on=learned_on)
        if name in own:
            yield request.library_way(own[name], choice, one.time_us, one.doubt)
            continue
        member = shelf.members[name]
        if member.checks and config_key(config) in shelf.request_for(name, fits[name]).wrong:
            continue
        code = KernelCode(member.kernel, request.problem_of(name), shelf.device, config)
        yield Way(code, choice, one.time_us, one.doubt)


def called(request: OperationRequest) -> list[Way]:
    """Return the libraries, of which no time is known."""
    return [request.library_way(library, Choice("library", {})) for library in request.libraries]


def nearest(request: OperationRequest) -> list[Way]:
    """Return the kernels, that which was measured for the nearest problem first; none of them is an `InputError`."""
    shelf = request.shelf

    def find(name: str, sizes: Sizes) -> Way:
        of_kernel = shelf.request_for(name, sizes)
        choice = choose(of_kernel)
        return Way(of_kernel.code(choice), choice)

    fits = [(shelf.members[name].member, sizes) for name, sizes in request.fits.items()]
    return _nearest_first(request.problem, fits, find)


Found = TypeVar("Found", Way, BoundKernel)


def _nearest_first(
    problem: Problem, fits: Iterable[tuple[Member, Sizes]], find: Callable[[str, Sizes], Found]
) -> list[Found]:
    """Return a choice for each kernel, that which was measured for the nearest problem first."""
    found: list[tuple[tuple[Any, ...], Found]] = []
    refusals = []
    for member, sizes in fits:
        try:
            one = find(member.name, sizes)
            choice, tuned = one.choice, one.choice.measurement
            # Measured on this GPU, on another, not at all, and what must be measured; the distance; the time.
            place = {"transferred": 1, "default": 2}.get(choice.tier, 0)
            order = 3 if place and member.measured_only else place
            distance = size_distance(choice.tuned_sizes or {}, one.problem.sizes)
            found.append(((order, distance, tuned.time_us if tuned is not None else math.inf), one))
        except InputError as error:
            refusals.append(f"{member.name}: {error}")
    if not found:
        raise InputError(f"no kernel computes {problem}: {'; '.join(refusals) or 'none is written for it'}")
    return [one for _, one in sorted(found, key=lambda each: each[0])]


class MatmulOptions(NamedTuple):
    """Options of `autotile.matmul`, with the database as an absolute path or URL."""

    deterministic: bool = True
    emulate: bool = True
    library: bool = True
    numerics: Numerics | None = None
    race: bool = False
    wait: bool = False
    database: str | None = None


def takes_product(kernel: BoundKernel) -> bool:
    """Return True if the arrays that a kernel declares are those of the product that it is served for.

    A kernel of the user's in the operation may declare others, which only a call refuses.
    """
    asked, own, buffers = kernel.operation, kernel.problem, kernel.definition.spec.buffers
    if kernel.is_library or asked is None:
        return False
    sizes = asked.sizes
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    matrices = (k, m) if sizes["TRANS_A"] else (m, k), (n, k) if sizes["TRANS_B"] else (k, n), (m, n)
    dtypes = asked.dtype, asked.dtype, "float32" if sizes["OUT_FP32"] else asked.dtype
    expected = [((sizes["BATCH"], *matrix), dtype) for matrix, dtype in zip(matrices, dtypes, strict=True)]
    declared = zip(kernel.shapes.values(), (one.element_type(own.dtype, own.sizes) for one in buffers), strict=True)
    return expected == list(declared)


class KnownProduct(msgspec.Struct, frozen=True, gc=False):
    """Products of arrays of one kind: what computes them, the function that allocates the result, and the device."""

    kernel: BoundKernel
    allocate: Callable[[], Any]
    device_index: int
    library: ArrayLibrary

    def launch(self, a: Any, b: Any, out: Any = None, bias: Any = None) -> Any:
        """Compute the product of such arrays into one like a new one, or a new one, and return it.

        A ``bias`` is added by the library. Return None, and launch nothing, where only a call can.
        """
        library = self.library
        if out is None:
            out = self.allocate()
        address = library.address
        pointers: tuple[int, ...] = address(a), address(b), address(out)
        if bias is not None:
            pointers += (address(bias),)
        kernel, stream = self.kernel, library.stream(self.device_index)
        is_launched = kernel.launch_at(stream, pointers) or (
            # The first launch of a kernel, which may have taken over just now.
            bias is None and takes_product(kernel) and kernel.launch_at(stream, pointers, starts=True)
        )
        return out if is_launched else None


class Products(RecentCache[tuple[object, ...], KnownProduct]):
    """Products that were computed before, by the kind of their arrays: a call that comes again is hardly checked.

    ``serve`` and ``is_current`` are `Dispatcher.serve_product` and `Dispatcher.is_current`; ``may_defer`` tells
    whether the first product of a size may be computed by PyTorch, while what serves the next is chosen aside.
    ``kernels`` are those that were served, and ``notes`` what a front end keeps until the products are forgotten.
    """

    __slots__ = ("_deferred", "_is_current", "_libraries", "_limit", "_may_defer", "_serve", "kernels", "notes")

    def __init__(
        self,
        limit: int,
        serve: Callable[..., BoundKernel],
        is_current: Callable[[int], bool],
        may_defer: Callable[[MatmulOptions], bool] = lambda options: False,
    ) -> None:
        super().__init__(limit)
        self._may_defer = may_defer
        self._deferred: dict[object, bool] = {}
        """Whether the choice for a product is under way, rather than failed."""
        self._libraries: dict[type, ArrayLibrary] = {}
        self._serve, self._is_current = serve, is_current
        self.kernels: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(limit)
        self.notes: dict[object, Any] = {}
        self._limit = limit

    def note(self, key: object, value: Any) -> Any:
        """Keep a note, and return it; when there are too many, all are dropped."""
        if len(self.notes) >= self._limit:
            self.notes.clear()
        self.notes[_untracked(key)] = value
        return value

    def find(self, a: Any, b: Any, options: object) -> KnownProduct | None:
        """Return the kernel that computed a product like one before, if there was one."""
        library = self._libraries.get(type(a))
        if library is None or type(b) not in self._libraries:
            return None
        return self.get(library.kind(a, b, options))

    def clear(self) -> None:
        """Forget the products and the kernels."""
        EPOCH.now = object()
        super().clear()
        self.kernels.clear()
        self.notes.clear()
        self._deferred = {}

    def keeper(
        self, a: Any, b: Any, options: object, shape: tuple[int, ...]
    ) -> Callable[[BoundKernel], KnownProduct] | None:
        """Return a function that keeps what computes such products, and holds no array; None if none may be kept."""
        library, kinds = library_of(a), (type(a), type(b))
        if not all(map(_is_plain, kinds)) or library is None or not (key := library.kind(a, b, options)):
            return None
        allocate, device = library.allocator(a, shape), _device_index(a)

        def keep(kernel: BoundKernel) -> KnownProduct:
            self._libraries.update(dict.fromkeys(kinds, library))
            return self.keep(_untracked(key), KnownProduct(kernel, allocate, device, library))

        return keep

    def multiply(self, arrays: Sequence[Any], scalars: Mapping[str, float], stream: Any, options: MatmulOptions) -> Any:
        """Compute a product as `autotile.matmul` does, with a kernel that is chosen once for arrays of a kind.

        ``arrays`` are the factors, and the array for the result or None; ``scalars`` are empty if they have no effect.
        """
        a, b, out = arrays
        is_new = out is None
        if stream is not None:
            with on_stream((a, b), stream):  # copies and allocations are ordered by the stream, too
                return self.multiply(arrays, scalars, None, options)
        left = _native(a, "a")
        device = _device_index(left)
        if not self._is_current(device):
            with load_cupy().cuda.Device(device):
                return self.multiply(arrays, scalars, None, options)
        left_order = _order(left, "a")
        right = _native(b, "b")
        right_order = _order(right, "b")
        dtype, other = element_type(a, "a"), element_type(b, "b")
        if dtype != other:
            raise ArgumentError(f"a has dtype {dtype} and b {other}; convert one of them")
        x, y = tuple(left.shape), tuple(right.shape)
        if x[-1] != y[-2]:
            raise ArgumentError(f"a has {x[-1]} columns and b {y[-2]} rows, expected equal numbers; a is {x}, b is {y}")
        batch, others = (shape[0] if len(shape) == 3 else 1 for shape in (x, y))
        if batch != others:
            raise ArgumentError(
                f"a is a stack of {batch} matrices and b one of {others}, expected stacks of equal length"
            )
        shape = (batch, x[-2], y[-1]) if len(x) == 3 or len(y) == 3 else (x[-2], y[-1])
        if out is None:
            if scalars.get("beta"):
                raise ArgumentError("beta is given without out; expected the array to be scaled by beta")
            out = new_array(a, shape, dtype, zeroed=False)
        stored = _stored(left, left_order), _stored(right, right_order), _native(out, "out")
        result = element_type(out, "out")
        aligned = all(
            int(one.data_ptr() if hasattr(one, "data_ptr") else one.data.ptr) % VECTOR_BYTES == 0 for one in stored
        )
        transposed = left_order == "columns", right_order == "columns"
        key = (stored[0].shape, stored[1].shape, dtype, result, *transposed, _device_index(stored[0]), aligned, options)
        made = library_of(out) if is_new and not scalars and type(left) is type(right) is type(out) else None
        """The library of all three arrays, if it may compute such a product, too."""
        kernel = self.kernels.get(key) or self.kernels.recall(key)
        if kernel is None:
            if result not in (dtype, "float32"):
                raise ArgumentError(f"out has dtype {result}, expected {dtype} or float32")
            sizes = {"M": x[-2], "N": y[-1], "K": x[-1], "BATCH": batch}
            sizes |= {"TRANS_A": transposed[0], "TRANS_B": transposed[1], "OUT_FP32": result != dtype}
            sizes |= {"NONDETERMINISTIC": not options.deterministic, "ALIGNED": aligned, "EMULATE": options.emulate}
            whole = {name: int(value) for name, value in sizes.items()}  # in the order of `find_product`, as a key
            serve = partial(self._serve, whole, dtype, options, _device_index(stored[0]))
            may_defer = self._may_defer(options) and self._deferred.get(key, True)
            if made is not None and may_defer and made.multiply(left, right, out):
                # Afterwards, as the other thread takes the interpreter's lock.
                self.choose_aside(key, serve, partial(self.kernels.keep, _untracked(key)))
                return out
            kernel = self.kernels.keep(_untracked(key), serve())
        is_plain = not scalars and result == dtype and _device_index(right) == device
        if not (
            made is not None
            and is_plain
            and _is_plain(type(out))
            and kernel.launch_at(made.stream(device), tuple(map(made.address, stored)), starts=takes_product(kernel))
        ):
            kernel(*stored, **scalars)
        is_direct = left is a and right is b and left_order and right_order and options.database is None
        if is_plain and is_direct and (keep := self.keeper(a, b, options[:-1], shape)):
            keep(kernel)
        return out

    def choose_aside(
        self,
        key: object,
        serve: Callable[[], BoundKernel | None],
        keep: Callable[[BoundKernel], object],
        loads: Callable[[BoundKernel], bool] = lambda kernel: True,
    ) -> None:
        """Choose aside what computes a product from its next call on, unless that is under way or has failed."""
        deferred = self._deferred

        def choose_and_keep() -> None:
            try:
                kernel = serve()
                time.sleep(0)  # lets a thread that waits for the interpreter's lock go on
                if kernel is not None:
                    if loads(kernel):
                        kernel.load(waits=False)
                    if self._deferred is deferred:  # the products were not forgotten meanwhile
                        keep(kernel)
                del deferred[key]
            except BaseException:
                deferred[key] = False  # the next call of `multiply` chooses itself, and raises
                raise

        if key not in deferred:
            deferred[key] = True
            choices.add(choose_and_keep)


def _untracked(key: Any) -> Any:
    """Return an equal key of tuples only: the garbage collector visits a `torch.Size` again and again, and no tuple."""
    return tuple([_untracked(one) for one in key]) if isinstance(key, tuple) else key


def _is_plain(kind: type) -> bool:
    """Return True for a class of arrays that no library derived from another one, to compute in a way of its own."""
    module = kind.__module__.partition(".")[0]
    return kind.__name__ in ("Tensor", "Parameter") if module == "torch" else module == "cupy"


def _native(array: Any, name: str) -> Any:
    """Return a CuPy array or a PyTorch tensor on a GPU unchanged, and any other array as a CuPy view."""
    if library_of(array) is not None and _device_index(array) >= 0:
        return array
    return as_cupy(array, name)


def _device_index(array: Any) -> int:
    """Return the CUDA device of a CuPy array or a PyTorch tensor; -1 for a tensor on the host."""
    return int(array.get_device() if hasattr(array, "get_device") else array.data.device_id)


def _order(array: Any, name: str) -> str:
    """Return the contiguous axis of a matrix, or of each of a stack: "rows", "columns", or "" for neither."""
    shape = tuple(array.shape)
    if len(shape) not in (2, 3):
        raise ArgumentError(f"{name} has shape {shape}, expected a matrix or a stack of matrices (2 or 3 axes)")
    if 0 in shape:
        raise ArgumentError(f"{name} has shape {shape}, expected at least one element")
    return "rows" if _is_contiguous(array) else "columns" if _is_contiguous(array.swapaxes(-1, -2)) else ""


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous)


def _stored(array: Any, order: str) -> Any:
    """Return the row-major array that a kernel is given for a factor: a copy if it is contiguous in neither order."""
    if not order:
        return array.contiguous() if hasattr(array, "contiguous") else array.copy(order="C")
    return array.swapaxes(-1, -2) if order == "columns" else array
