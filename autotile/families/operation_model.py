"""A model of time over the kernels, configurations and sizes of an operation, learned from measurements on one GPU.

For every candidate (a configuration of a kernel, or a library) it gives the expected time at any sizes, and the doubt.
`autotile.families.model_inputs` states what the networks of `autotile.families.network` are given, and
`autotile.families.model_fit` learns them. Doubt is calibrated on measurements that were held out.

A library is chosen unless a kernel is expected to be faster with confidence, so that an unmeasured problem costs little
where the model is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Format, Name, convert
from autotile.errors import DataError
from autotile.families.candidate_rules import Checks, KernelRules
from autotile.families.model_inputs import Layout, ModelCandidate, Vector, Vocabulary
from autotile.families.neighbours import Neighbours
from autotile.families.network import Ensemble, Prepared
from autotile.kernel.spec import KernelSpec

_FORMAT = 1
SPREAD_COST = 0.5
"""Weight of the spread between networks in the order of candidates: of two that are expected to be equally fast, the
one that is better known is preferred."""
_OUTSIDE_DOUBT = 0.25
"""Added doubt for each doubling by which a size is outside of the range that was measured."""
_MAX_LAYOUTS = 256
_MAX_CANDIDATES = 512


class MeasuredProblem(NamedTuple):
    """A problem and the times that were measured for it.

    Attributes
    ----------
    sizes
        Sizes and flags of the operation.
    kernels
        Sizes and flags by the names of each kernel that computes the problem.
    times_us
        Time in microseconds of each measured candidate, by its number.
    """

    sizes: Mapping[str, int]
    kernels: Mapping[str, Mapping[str, int]]
    times_us: Mapping[int, float]


class Expected(NamedTuple):
    """A candidate and the time that is expected of it.

    Attributes
    ----------
    candidate
        The candidate.
    time_us
        Expected time in microseconds.
    doubt
        Standard deviation of the time's logarithm: 0.1 for about 10 %.
    """

    candidate: ModelCandidate
    time_us: float
    doubt: float


class Doubt(NamedTuple):
    """Doubt of a kernel's or a library's expected time, as a standard deviation of its logarithm.

    Attributes
    ----------
    constant
        Doubt where all networks agree.
    per_spread
        Doubt for each doubling by which they differ; the two are added in squares.
    """

    constant: float
    per_spread: float


@dataclass(frozen=True)
class OperationModel:
    """The model of an operation, for one element type and GPU.

    Attributes
    ----------
    operation, dtype, gpu_name
        What it was learned for.
    vocabulary
        Names of the inputs.
    ranges
        Smallest and largest measured value of each size and flag.
    candidates
        All candidates: configurations of kernels first, then libraries.
    kernels, libraries
        Networks of the two; None where there is none.
    library_errors
        Errors of the networks of libraries at measured problems; None where there are none.
    doubts
        Doubt by the name of the kernel or library.
    confidence
        Standard deviations of doubt by which a kernel must be expected to be faster than a library to be preferred.
    verified
        Whether each configuration was verified at the ragged sizes, too, before it was timed; those that earlier
        versions learned were not.
    """

    operation: str
    dtype: str
    gpu_name: str
    vocabulary: Vocabulary
    ranges: Mapping[str, tuple[int, int]]
    candidates: tuple[ModelCandidate, ...]
    kernels: Ensemble | None
    libraries: Ensemble | None
    library_errors: Neighbours | None
    doubts: Mapping[str, Doubt]
    confidence: float
    verified: bool = True
    _ready: dict[tuple[object, ...], _Ready] = field(default_factory=dict, compare=False, repr=False)

    def choose(
        self,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        *,
        libraries: Collection[str] = (),
        count: int = 3,
        dtype: str | None = None,
    ) -> list[Expected]:
        """Return the best candidates for a problem, best first; the first is the one to use.

        A kernel is first only if it is expected to be faster than every library with confidence. Sets of flags and
        kernels that are new take some milliseconds, others some tens of microseconds.

        Parameters
        ----------
        sizes
            Sizes and flags of the operation; other names are ignored.
        kernels
            Sizes and flags by the names of each kernel that may be used; those that the model does not know are
            ignored.
        specs
            Each of these kernels.
        device
            The device, whose limits a configuration must meet.
        libraries
            Libraries that may be used.
        count
            Number of candidates to return; fewer where fewer are valid.
        dtype
            Element type of the problem, if it is another than the model's.
        """
        kernels = self._known(kernels)
        ready = self._prepared(sizes, kernels, specs, device, libraries)
        ranking = ready.rank(sizes, kernels, self._added_doubt(sizes))
        if count == 1 and (library := ranking.unrivalled_library(self.confidence)) is not None:
            return [library]
        checks = Checks(ready.rules, kernels, dtype or self.dtype)
        own: list[Expected] = []
        others: list[Expected] = []
        for number in ranking.order:
            if ranking.candidates[number].is_library:
                others.append(ranking.expected(number))
            elif len(own) < count and checks.pass_for(number, ranking.candidates[number]):
                own.append(ranking.expected(number))
            if len(own) == count and len(others) == ranking.libraries:
                break
        return _in_order(own, others, self.confidence)[:count]

    def rank(
        self,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        *,
        libraries: Collection[str] = (),
    ) -> Ranking:
        """Return all candidates in the order of their expected times, whether valid for the problem or not.

        Parameters are those of `choose`.
        """
        kernels = self._known(kernels)
        ready = self._prepared(sizes, kernels, specs, device, libraries)
        return ready.rank(sizes, kernels, self._added_doubt(sizes))

    def _known(self, kernels: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Return the kernels that the model knows; an operation may have got others since."""
        return {name: sizes for name, sizes in kernels.items() if name in self.vocabulary.members}

    def _prepared(
        self,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        libraries: Collection[str],
    ) -> _Ready:
        key = (device.name, *(sizes[name] for name in self.vocabulary.flags), *kernels, *libraries)
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= _MAX_LAYOUTS:
                self._ready.clear()
            ready = _Ready.of(self, specs, device, libraries, sizes=sizes, kernels=kernels)
            self._ready[key] = ready
        return ready

    def _added_doubt(self, sizes: Mapping[str, int]) -> float:
        """Return the doubt for sizes outside of what was measured."""
        doublings = 0.0
        for name in self.vocabulary.sizes:
            low, high = self.ranges[name]
            size = sizes[name]
            if not low <= size <= high:
                doublings += abs(math.log2(size / (high if size > high else low)))
        return _OUTSIDE_DOUBT * doublings

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        document: dict[str, Any] = msgspec.to_builtins(
            _ModelDocument(
                self.operation,
                self.dtype,
                self.gpu_name,
                self.vocabulary,
                dict(self.ranges),
                self.candidates,
                self.kernels.to_json() if self.kernels is not None else None,
                self.libraries.to_json() if self.libraries is not None else None,
                dict(self.doubts),
                self.confidence,
                self.library_errors.to_json() if self.library_errors is not None else None,
                self.verified,
            )
        )
        return {"format": _FORMAT, **document}

    @classmethod
    def from_json(cls, data: Any) -> OperationModel:
        """Invert `to_json`.

        Raises
        ------
        DataError
            The value is damaged, or a model of another format.
        """
        found = convert(data, Format).format
        if found != _FORMAT:
            raise DataError(f"a model of format {found!r}, expected {_FORMAT}", field="format")
        document = convert(data, _ModelDocument)
        document.check()
        own = sum(not one.is_library for one in document.candidates)
        widths = document.vocabulary.widths
        return cls(
            document.operation,
            document.dtype,
            document.gpu_name,
            document.vocabulary,
            document.ranges,
            document.candidates,
            _networks(document.kernels, own, widths, "kernels"),
            _networks(document.libraries, len(document.candidates) - own, (widths[0], 0, 0), "libraries"),
            _neighbours(document.library_errors, widths[0]),
            document.doubts,
            document.confidence,
            document.verified,
        )


class Ranking(NamedTuple):
    """Candidates for a problem with their expected times.

    Attributes
    ----------
    candidates
        The candidates.
    libraries
        Number of libraries among them.
    log2_us, spread
        Logarithm of each one's expected time, and the spread between networks, shape (candidates,).
    doubts, added_doubt
        Doubt by kernel and library, and that of the sizes.
    order
        Their positions, the one that is expected to be fastest first.
    """

    candidates: tuple[ModelCandidate, ...]
    libraries: int
    log2_us: Vector
    spread: Vector
    doubts: Mapping[str, Doubt]
    added_doubt: float
    order: list[int]

    def expected(self, number: int) -> Expected:
        """Return the candidate at a position with its time."""
        candidate = self.candidates[number]
        constant, per_spread = self.doubts[candidate.kernel]
        doubt = math.hypot(constant, per_spread * float(self.spread[number])) + self.added_doubt
        return Expected(candidate, 2.0 ** float(self.log2_us[number]), doubt)

    def unrivalled_library(self, confidence: float) -> Expected | None:
        """Return the fastest library if no configuration, valid or not, is expected to be faster with confidence."""
        library: Expected | None = None
        for number in self.order:
            if self.candidates[number].is_library:
                library = self.expected(number)
                break
        if library is None:
            return None
        for number in self.order:
            one = self.expected(number)
            if one.candidate.is_library:
                continue
            lead = math.log(library.time_us / one.time_us)
            if lead > confidence * math.hypot(one.doubt, library.doubt):
                return None
            if lead <= confidence * library.doubt:  # the others are slower still
                break
        return library


def _in_order(own: list[Expected], libraries: list[Expected], confidence: float) -> list[Expected]:
    """Return candidates with the best library first unless a kernel is expected to be faster with confidence."""
    ranked = sorted([*own, *libraries], key=lambda one: one.time_us)
    if not own or not libraries:
        return ranked
    first, library = own[0], libraries[0]
    lead = math.log(library.time_us / first.time_us)
    chosen = first if lead > confidence * math.hypot(first.doubt, library.doubt) else library
    return [chosen, *(one for one in ranked if one is not chosen)]


@dataclass(frozen=True, slots=True)
class _Ready:
    """The networks, ready for problems of given flags and kernels."""

    layout: Layout
    candidates: tuple[ModelCandidate, ...]
    libraries: int
    parts: tuple[Prepared | None, Prepared | None]
    no_pairs: Vector
    """Inputs of the pairs with libraries, which have none."""
    listed: tuple[int, ...]
    """Number of each library among all libraries."""
    errors: Neighbours | None
    doubts: Mapping[str, Doubt]
    rules: tuple[KernelRules, ...]

    @classmethod
    def of(
        cls,
        model: OperationModel,
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        libraries: Collection[str],
        *,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
    ) -> _Ready:
        layout = Layout.of(model.vocabulary, model.candidates, specs, device, sizes=sizes, kernels=kernels)
        count = sum(not one.is_library for one in model.candidates)
        listed = [n for n, one in enumerate(model.candidates) if one.is_library and one.kernel in libraries]
        candidates = tuple(model.candidates[n] for n in (*layout.numbers.tolist(), *listed))
        no_pairs = np.zeros((0, len(listed)), np.float32)
        own = others = None
        if model.kernels is not None and len(layout.numbers):
            own = model.kernels.prepare(layout.numbers, layout.item_inputs)
        if model.libraries is not None and listed:
            others = model.libraries.prepare(np.array(listed) - count, no_pairs.T)
        rules = tuple(KernelRules.of(specs[name], kernels[name], device) for name in kernels)
        numbers = tuple(n - count for n in listed)
        return cls(
            layout, candidates, len(listed), (own, others), no_pairs, numbers, model.library_errors, model.doubts, rules
        )

    def rank(self, sizes: Mapping[str, int], kernels: Mapping[str, Mapping[str, int]], added_doubt: float) -> Ranking:
        """Return the candidates for a problem."""
        problem = self.layout.problem_inputs(sizes, kernels)
        own, others = self.parts
        parts = []
        if own is not None:
            parts.append(own.predict(problem, self.layout.pair_inputs(kernels)))
        if others is not None:
            parts.append(self._corrected(problem, *others.predict(problem, self.no_pairs)))
        if not parts:
            nothing = np.zeros(0, np.float32)
            return Ranking((), 0, nothing, nothing, self.doubts, added_doubt, [])
        log2_us, spread = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
        order: list[int] = np.argsort(log2_us + SPREAD_COST * spread).tolist()
        return Ranking(self.candidates, self.libraries, log2_us, spread, self.doubts, added_doubt, order)

    def _corrected(self, problem: Vector, log2_us: Vector, spread: Vector) -> tuple[Vector, Vector]:
        """Return the times of libraries, and their spread, after the correction by the nearest measured problems."""
        if self.errors is None:
            return log2_us, spread
        found = np.array([self.errors.look_up(problem, number) for number in self.listed], np.float32)
        return log2_us + found[:, 0], found[:, 1]


class _ModelDocument(msgspec.Struct):
    """JSON of a model, besides its format."""

    operation: Name
    dtype: Name
    gpu_name: Name
    vocabulary: Vocabulary
    ranges: Annotated[dict[Name, tuple[Count, Count]], Meta(max_length=64)]
    candidates: Annotated[tuple[ModelCandidate, ...], Meta(min_length=1, max_length=_MAX_CANDIDATES)]
    kernels: Any
    libraries: Any
    doubts: Annotated[dict[Name, Doubt], Meta(max_length=64)]
    confidence: Annotated[float, Meta(ge=0.0, le=100.0)]
    library_errors: Any = None
    verified: bool = False

    def check(self) -> None:
        """Raise `DataError` if parts do not match each other."""
        own = tuple(one for one in self.candidates if not one.is_library)
        if self.candidates[: len(own)] != own or len({one.key for one in self.candidates}) < len(self.candidates):
            raise DataError("a candidate is listed twice, or a library before a kernel", field="candidates")
        if not self.vocabulary.sizes or max(self.vocabulary.widths) > _MAX_CANDIDATES:
            raise DataError("no sizes, or too many names", field="vocabulary")
        if not {one.kernel for one in own} <= set(self.vocabulary.members):
            raise DataError("a candidate of a kernel that is not listed", field="vocabulary")
        if self.ranges.keys() != {*self.vocabulary.sizes, *self.vocabulary.flags}:
            raise DataError("expected the range of every size and flag", field="ranges")
        if any(not 1 <= self.ranges[name][0] <= self.ranges[name][1] for name in self.vocabulary.sizes):
            raise DataError("expected ranges from 1, in ascending order", field="ranges")
        if not {one.kernel for one in self.candidates} <= self.doubts.keys():
            raise DataError("expected the doubt of every kernel and library", field="doubts")
        if not all(0.0 <= value <= _MAX_DOUBT for doubt in self.doubts.values() for value in doubt):
            raise DataError(f"expected numbers from 0 to {_MAX_DOUBT:g}", field="doubts")


_MAX_DOUBT = 100.0


def _neighbours(data: Any, width: int) -> Neighbours | None:
    """Parse the errors at measured problems."""
    if data is None:
        return None
    found = Neighbours.from_json(data)
    if len(found.weights) != width:
        raise DataError(f"expected {width} inputs of a problem", field="library_errors")
    return found


def _networks(data: Any, items: int, widths: tuple[int, int, int], name: str) -> Ensemble | None:
    """Parse the networks of ``items`` candidates."""
    if data is None and not items:
        return None
    ensemble = Ensemble.from_json(data)
    if ensemble.widths != widths or ensemble.items != items:
        raise DataError(f"expected networks of {widths} inputs for {items} candidates", field=name)
    return ensemble
