"""A model of time over the kernels, configurations and sizes of an operation, learned from measurements on one GPU.

For every candidate (a configuration of a kernel, or a library) it gives the expected time at any sizes, and the doubt.
`model_inputs` states the inputs of the networks of `autotile.families.network`: those of a problem are its sizes, their
alignment, that of the rows of its arrays, and its flags; those of a configuration its kernel, parameters, tiles and
resources; those of a pair the blocks, the rounds of the busiest SM, the whole waves, and the waste of the last round,
of the last wave and of the padding at the edges. `fit_model` fits them, and calibrates the doubt on measurements that
were held out.

A library is chosen unless a kernel is expected to be faster with confidence, so that an unmeasured problem costs little
where the model is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Format, Name, convert, to_document
from autotile.core.forks import cached_property
from autotile.core.model import Config, Problem, Resources, Sizes, config_key
from autotile.core.text import plural
from autotile.errors import DataError, InputError
from autotile.families.features import TILING_COLUMNS, UNTILED, Column, array_extents, blocks_at, tilings
from autotile.families.network import Ensemble, Inputs, Neighbours, prepare
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import Limit, check_config, demand_of, limits_of

_MAX_ALIGNMENT = 4
"""Doublings of alignment beyond which it does not matter: 16 elements."""
_PAIR_INPUTS = 7
_ITEM_INPUTS = 5
_PROBLEM_INPUTS = 2
"""Inputs besides those for each size, flag, array, kernel and parameter."""
_SMALL_TILE = 2.0**30
"""Tiles below it are tiles; a size that the grid does not depend on has none."""
_MAX_LOG2_TILE = 20.0
_MANY_ROUNDS = 4.0
"""Rounds beyond which their number has no other effect than in proportion."""

Vector = NDArray[np.float32]
Times = NDArray[np.float64]
KernelSizes = Mapping[str, Sizes]
"""Sizes and flags of a problem by the names of each kernel that computes it."""
Specs = Mapping[str, KernelSpec]
"""Kernels by name."""
CandidateKey = tuple[str, str]
"""Name of a kernel or library, and `config_key` of its configuration."""


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A configuration of a kernel with the compiler's report, if known; or a library, whose configuration is empty."""

    kernel: Name
    config: Config
    resources: Resources | None = None

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which has no configuration."""
        return not self.config

    @property
    def key(self) -> CandidateKey:
        """Kernel and configuration, to compare by."""
        return self.kernel, config_key(self.config)


@dataclass(frozen=True)
class Vocabulary:
    """Names that stand for inputs, in their order.

    Sizes and flags are those of the operation, arrays those that all kernels have, members its kernels, and parameters
    those of their configurations.
    """

    sizes: tuple[str, ...]
    flags: tuple[str, ...]
    arrays: tuple[str, ...]
    members: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Number of inputs of a problem, a configuration and a pair."""
        sizes = len(self.sizes)
        return (
            2 * sizes + len(self.flags) + len(self.arrays) + _PROBLEM_INPUTS,
            len(self.members) + len(self.parameters) + sizes + _ITEM_INPUTS,
            sizes + _PAIR_INPUTS,
        )


class ModelInputs(NamedTuple):
    """Inputs of the networks for problems of given flags and kernels."""

    numbers: NDArray[np.int64]
    """Numbers of the kernels' configurations among all candidates, without those that a kernel no longer declares,
    shape (configurations,)."""
    items: Vector
    """Inputs of these configurations, shape (configurations, inputs)."""
    of_problem: Callable[[Sizes, KernelSizes], Vector]
    """Function that returns the inputs of a problem, shape (problem inputs,)."""
    of_pairs: Callable[[KernelSizes], Vector]
    """Function that returns the inputs of each configuration for a problem, shape (pair inputs, configurations)."""


def model_inputs(
    vocabulary: Vocabulary,
    candidates: Sequence[ModelCandidate],
    specs: Specs,
    device: DeviceProperties,
    *,
    sizes: Sizes,
    kernels: KernelSizes,
    dtype: str,
) -> ModelInputs:
    """Prepare all that does not depend on the sizes; those given are of any problem of these flags and kernels."""
    numbers: list[int] = []
    source: list[int] = []  # position of each configuration's kernel
    columns = [np.zeros((0, TILING_COLUMNS))]
    extents_of_tiles = np.full((len(candidates), len(vocabulary.sizes)), UNTILED)
    irregular: list[tuple[int, KernelSpec, Config]] = []  # configurations whose grid is no tiling, by position
    for place, name in enumerate(kernels):
        of_kernel = [n for n, one in enumerate(candidates) if one.kernel == name and not one.is_library]
        own = [n for n in of_kernel if is_declared(specs[name], candidates[n].config)]
        configs = [candidates[n].config for n in own]
        problem = Problem(name, kernels[name], dtype)
        resources = [candidates[n].resources for n in own]
        of_sizes, of_grids, others = tilings(specs[name], device, configs, resources, problem)
        irregular += [(len(numbers) + n, specs[name], configs[n]) for n in others]
        width = min(len(vocabulary.sizes), of_sizes.shape[1])
        extents_of_tiles[len(numbers) : len(numbers) + len(own), :width] = of_sizes[:, :width]
        columns.append(of_grids)
        numbers += own
        source += [place] * len(own)
    count, widest = len(numbers), len(vocabulary.sizes)
    extents_of_tiles = extents_of_tiles[:count]
    quantities = np.concatenate(columns)
    log2_tiles = np.log2(extents_of_tiles)
    is_tiled = extents_of_tiles < _SMALL_TILE
    sources = np.array(source, np.int64)
    covers = np.zeros((count, len(kernels), widest), np.float32)
    covers[np.arange(count), sources] = is_tiled
    covering = covers.reshape(count, len(kernels) * widest)  # 1 for each size of its kernel that a configuration tiles
    tiles = np.ascontiguousarray(extents_of_tiles.T, np.float32)  # along each size of the kernel
    log2_tile: Vector = (is_tiled * log2_tiles).sum(axis=1).astype(np.float32)  # of the outputs of a tile
    units: Vector = quantities[:, 0].astype(np.float32)
    resident = np.stack([np.ones(count), quantities[:, 1]])
    slots: Vector = device.sm_count * resident.astype(np.float32)  # SMs, and the blocks that they hold at once
    flags = tuple(float(sizes[name]) for name in vocabulary.flags)
    names = tuple((name, specs[name].proper_sizes) for name in kernels)
    first = next(iter(kernels), None)
    of_arrays = array_extents(specs[first], kernels[first]) if first is not None else {}
    extents = tuple(of_arrays.get(name, ()) for name in vocabulary.arrays)  # of the first kernel, as places of sizes

    def of_problem(sizes: Sizes, kernels: KernelSizes) -> Vector:
        values = [sizes[name] for name in vocabulary.sizes]
        own = [kernels[kernel][name] for kernel, own_names in names[:1] for name in own_names]
        rows = [
            _alignment(own[extent[-1]]) if extent and extent[-1] is not None else _MAX_ALIGNMENT for extent in extents
        ]
        elements = sum(math.prod([own[place] for place in extent if place is not None]) for extent in extents)
        inputs = [*map(math.log2, values), *map(_alignment, values), *flags, *rows]
        inputs += (min(rows, default=_MAX_ALIGNMENT), math.log2(elements) if elements else 0.0)
        return np.array(inputs, np.float32)

    def of_pairs(kernels: KernelSizes) -> Vector:
        table = [[kernels[name][size] for size in own_names[:widest]] for name, own_names in names]
        rows = np.array([row + [1] * (widest - len(row)) for row in table], np.float32).reshape(len(table), widest)
        counts = rows.T.take(sources, axis=1)
        counts /= tiles
        np.ceil(counts, out=counts)
        blocks = np.multiply.reduce(counts)
        blocks *= units
        for number, spec, config in irregular:
            blocks[number] = blocks_at(spec, device, config, spec.at(kernels[spec.name], dtype))
        shares = np.empty((4, count), np.float32)
        np.divide(blocks, slots, out=shares[:2])
        np.ceil(shares[:2], out=shares[2:])
        inputs = np.empty((_PAIR_INPUTS + widest, count), np.float32)
        logs = np.log2(shares)
        inputs[0] = logs[0]
        inputs[1:3] = logs[2:]
        np.subtract(logs[2:], logs[:2], out=inputs[3:5])
        log2_counts = np.log2(counts, out=inputs[_PAIR_INPUTS:])
        np.add.reduce(log2_counts, out=inputs[5])
        inputs[5] += log2_tile
        inputs[5] -= covering @ np.log2(rows).reshape(-1)
        np.minimum(shares[0], _MANY_ROUNDS, out=inputs[6])
        return inputs

    items = _item_inputs(vocabulary, [candidates[n] for n in numbers], log2_tiles, quantities)
    return ModelInputs(np.array(numbers, np.int64), items, of_problem, of_pairs)


def _alignment(size: int) -> int:
    """Return the doublings by which a size is aligned, 4 at most."""
    return min((size & -size).bit_length() - 1, _MAX_ALIGNMENT)


def _item_inputs(
    vocabulary: Vocabulary, candidates: Sequence[ModelCandidate], log2_tiles: Column, columns: Column
) -> Vector:
    """Return the inputs of configurations: their kernel, parameters, tiles and resources."""
    rows = []
    for one in candidates:  # 0 for text, which the offset of a candidate stands for
        given = (one.config.get(name) for name in vocabulary.parameters)
        values = (math.log2(abs(value) + 1.0) if isinstance(value, int | float) else 0.0 for value in given)
        rows.append([*(float(one.kernel == name) for name in vocabulary.members), *values])
    units, resident, threads, smem_bytes, registers = columns.T
    logs = (np.log2(one) for one in (units, resident, threads, smem_bytes + 1024.0))
    parts = (
        np.array(rows).reshape(len(candidates), len(vocabulary.members) + len(vocabulary.parameters)),
        np.minimum(log2_tiles, _MAX_LOG2_TILE),
        np.stack([*logs, registers / 128.0], axis=1),
    )
    return np.concatenate(parts, axis=1).astype(np.float32)


IsValid = Callable[[int, Config], bool]
"""Tells whether a configuration, at a position among the candidates, is valid for a problem."""


def validity(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> Callable[[Problem], IsValid]:
    """Return a function of a problem that returns the check of configurations against a kernel's rules and limits.

    ``problem`` is any of the same flags. The rules are parted so that candidates are checked quickly: those about sizes
    and flags hold for all configurations or for none, those about parameters and flags for all sizes or for none.
    """
    names = fixed_names(spec, problem, device)
    of_device = {name: value for name, value in names.items() if name.startswith("device.")}
    proper = set(spec.proper_sizes)
    of_problem: list[Expression] = []
    of_config: list[Expression] = []
    of_pair: list[Expression] = []
    for rule in (rule.expression for rule in spec.rules):
        kind = of_problem if rule.names <= names.keys() else of_config if rule.names.isdisjoint(proper) else of_pair
        kind.append(rule)
    sized: list[Limit] = []
    others: list[Limit] = []
    for limit in limits_of(spec):
        is_sized = any(not part.names.isdisjoint(proper) for part in limit.expressions(spec))
        (sized if is_sized else others).append(limit)
    known: dict[tuple[int, str], bool] = {}  # of the rules and limits that do not depend on sizes, by element type

    def check_of(problem: Problem) -> IsValid:
        of_sizes = {**of_device, **problem.names}
        if not all(rule.value(of_sizes) for rule in of_problem):
            return lambda number, config: False

        def is_valid(number: int, config: Config) -> bool:
            if spec.computed:
                return not check_config(spec, config, problem, device)
            names = {**of_sizes, **config}
            demand = demand_of(spec, names, problem)
            own = known.get((number, problem.dtype))
            if own is None:
                own = all(rule.value(names) for rule in of_config) and all(one.fits(demand, device) for one in others)
                known[number, problem.dtype] = own
            if not own or not all(rule.value(names) for rule in of_pair):
                return False
            return all(one.fits(demand, device) for one in sized)

        return is_valid

    return check_of


def is_declared(spec: KernelSpec, config: Config) -> bool:
    """Return True if a kernel, maybe of another version than a configuration, has its parameters and values."""
    declared = {parameter.name: parameter.values for parameter in spec.parameters}
    return config.keys() == declared.keys() and all(config[name] in values for name, values in declared.items())


_FORMAT = 1
SPREAD_COST = 0.5
"""Weight of the spread between networks in the order of candidates: of two that are expected to be equally fast, the
one that is better known is preferred."""
_OUTSIDE_DOUBT = 0.25
"""Added doubt for each doubling by which a size is outside of the range that was measured."""
_MAX_INPUTS = 256
"""Sets of flags and kernels for which the networks are kept ready."""
_MAX_CANDIDATES = 512
_MAX_DOUBT = 100.0


MeasuredProblem = tuple[Sizes, KernelSizes, Mapping[CandidateKey, float]]
"""Sizes and flags of an operation, those of each kernel, and the time in microseconds of each measured candidate."""


class Expected(NamedTuple):
    """A candidate and its expected time in microseconds.

    ``doubt`` is the standard deviation of the time's logarithm: 0.1 for about 10 %.
    """

    candidate: ModelCandidate
    time_us: float
    doubt: float


Doubt = tuple[float, float]
"""Doubt of a kernel's or a library's expected time, as a standard deviation of its logarithm: where all networks agree,
and for each doubling by which they differ. The two are added in squares."""


Ranked = tuple[list[int], list[int], Callable[[int], Expected]]
"""Positions of configurations, and of libraries, the one that is expected to be fastest first; what is expected of
each."""
_Ready = tuple[
    tuple[ModelCandidate, ...], Callable[[Sizes, KernelSizes], Ranked], Mapping[str, Callable[[Problem], IsValid]]
]
"""Candidates for problems of given flags and kernels, a function that ranks them, valid or not, and the `validity` of
each kernel."""


@dataclass(frozen=True)
class OperationModel:
    """The model of an operation, for one element type and GPU."""

    operation: Name
    dtype: Name
    gpu_name: Name
    vocabulary: Vocabulary
    ranges: Annotated[Mapping[Name, tuple[Count, Count]], Meta(max_length=64)]
    """Smallest and largest measured value of each size and flag."""
    candidates: Annotated[tuple[ModelCandidate, ...], Meta(min_length=1, max_length=_MAX_CANDIDATES)]
    """Configurations of kernels, then libraries."""
    kernels: Ensemble | None
    libraries: Ensemble | None
    """Networks of the two; None where there is none."""
    doubts: Annotated[Mapping[Name, Doubt], Meta(max_length=64)]
    """Doubt by the name of the kernel or library."""
    confidence: Annotated[float, Meta(ge=0.0, le=100.0)]
    """Standard deviations of doubt by which a kernel must be expected to be faster than a library to be preferred."""
    library_errors: Neighbours | None = None
    """Errors of the networks of libraries at measured problems; None where there are none."""
    verified: bool = False
    """Whether each configuration was verified at the ragged sizes, too, before it was timed; those that earlier
    versions learned were not."""

    def choose(
        self,
        sizes: Sizes,
        kernels: KernelSizes,
        specs: Specs,
        device: DeviceProperties,
        *,
        libraries: Collection[str] = (),
        count: int = 3,
        dtype: str | None = None,
        accepts: Callable[[ModelCandidate], bool] | None = None,
    ) -> list[Expected]:
        """Return the best candidates for a problem, best first; the first is the one to use.

        A kernel is first only if it is expected to be faster than every library with confidence. Sets of flags and
        kernels that are new take some milliseconds, others some tens of microseconds.

        ``sizes`` are the sizes and flags of the operation, ``kernels`` those of each kernel that may be used, and
        ``specs`` these kernels, by name; other names, and kernels that the model does not know, are ignored. A
        configuration must meet the limits of the device, be valid for ``dtype``, the element type of the problem if it
        is another than the model's, and be one that ``accepts``. Fewer than ``count`` are returned where fewer are.
        """
        candidates, rank, rules = self._prepared(sizes, kernels, specs, device, libraries)
        configurations, listed, expected = rank(sizes, kernels)
        others = [expected(number) for number in listed]
        if count == 1 and others:  # the library, if no configuration, valid or not, can be faster with confidence
            for one in map(expected, configurations):
                lead = math.log(others[0].time_us / one.time_us)
                if lead > self.confidence * math.hypot(one.doubt, others[0].doubt):
                    break
                if lead <= self.confidence * others[0].doubt:  # the others are slower still
                    return others[:1]
            else:
                return others[:1]
        check_of = cache(lambda name: rules[name](Problem(name, kernels[name], dtype or self.dtype)))
        accepted = (n for n in configurations if accepts is None or accepts(candidates[n]))
        valid = (n for n in accepted if check_of(candidates[n].kernel)(n, candidates[n].config))
        own = [expected(number) for number in itertools.islice(valid, count)]
        ranked = sorted([*own, *others], key=lambda one: one.time_us)
        if own and others:
            first, library = own[0], others[0]
            lead = math.log(library.time_us / first.time_us)
            chosen = first if lead > self.confidence * math.hypot(first.doubt, library.doubt) else library
            ranked = [chosen, *(one for one in ranked if one is not chosen)]
        return ranked[:count]

    def rank(
        self,
        sizes: Sizes,
        kernels: KernelSizes,
        specs: Specs,
        device: DeviceProperties,
        *,
        libraries: Collection[str] = (),
    ) -> Ranked:
        """Return the candidates that `choose` knows in their order, whether valid or not; arguments are as there."""
        return self._prepared(sizes, kernels, specs, device, libraries)[1](sizes, kernels)

    _ready = cached_property[dict[tuple[object, ...], _Ready]](lambda self: {})
    """Prepared networks and rules by the device, the flags, the kernels and the libraries."""

    def _prepared(
        self, sizes: Sizes, kernels: KernelSizes, specs: Specs, device: DeviceProperties, libraries: Collection[str]
    ) -> _Ready:
        """Prepare the networks, and the rules of the kernels, for problems of the same flags and kernels."""
        kernels = {name: own for name, own in kernels.items() if name in self.vocabulary.members}
        key = (device.name, *(sizes[name] for name in self.vocabulary.flags), *kernels, *libraries)
        if (ready := self._ready.get(key)) is not None:
            return ready
        if len(self._ready) >= _MAX_INPUTS:
            self._ready.clear()
        inputs = model_inputs(
            self.vocabulary, self.candidates, specs, device, sizes=sizes, kernels=kernels, dtype=self.dtype
        )
        count = sum(not one.is_library for one in self.candidates)
        listed = [n for n, one in enumerate(self.candidates) if one.is_library and one.kernel in libraries]
        of_libraries = [n - count for n in listed]  # numbers among all libraries
        candidates = tuple(self.candidates[n] for n in (*inputs.numbers.tolist(), *listed))
        doubts = [self.doubts[one.kernel] for one in candidates]
        no_pairs: Vector = np.zeros((0, len(listed)), np.float32)  # libraries have no inputs of pairs
        own = others = None
        if self.kernels is not None and len(inputs.numbers):
            own = prepare(self.kernels.arrays, inputs.numbers, inputs.items)
        if self.libraries is not None and listed:
            others = prepare(self.libraries.arrays, np.array(of_libraries), no_pairs.T)
        last: tuple[list[int], Ranked] | None = None  # what stands in for a choice is sought for the same sizes

        def rank(sizes: Sizes, kernels: KernelSizes) -> Ranked:
            nonlocal last
            place = [sizes[name] for name in self.vocabulary.sizes]
            if (known := last) is not None and known[0] == place:
                return known[1]
            doublings = 0.0
            for name, size in zip(self.vocabulary.sizes, place, strict=True):
                low, high = self.ranges[name]
                if not low <= size <= high:
                    doublings += abs(math.log2(size / (high if size > high else low)))
            problem = inputs.of_problem(sizes, kernels)
            times = spreads = listed_times = listed_spreads = np.zeros(0, np.float32)
            if own is not None:
                times, spreads = own(problem, inputs.of_pairs(kernels))
            if others is not None:
                listed_times, listed_spreads = others(problem, no_pairs)
                if self.library_errors is not None:  # correct by the nearest measured problems
                    pairs = [self.library_errors.look_up(problem, number) for number in of_libraries]
                    errors = np.array(pairs, np.float32)
                    listed_times, listed_spreads = listed_times + errors[:, 0], errors[:, 1]
            all_times, all_spreads = times.tolist() + listed_times.tolist(), spreads.tolist() + listed_spreads.tolist()

            def expected(number: int) -> Expected:
                constant, per_spread = doubts[number]
                doubt = math.hypot(constant, per_spread * all_spreads[number]) + _OUTSIDE_DOUBT * doublings
                return Expected(candidates[number], 2.0 ** all_times[number], doubt)

            configurations = np.argsort(times + SPREAD_COST * spreads)
            libraries = np.argsort(listed_times + SPREAD_COST * listed_spreads) + len(configurations)
            last = place, (configurations.tolist(), libraries.tolist(), expected)
            return last[1]

        rules = {name: validity(specs[name], specs[name].at(given), device) for name, given in kernels.items()}
        return self._ready.setdefault(key, (candidates, rank, rules))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {"format": _FORMAT, **{each.name: to_document(getattr(self, each.name)) for each in fields(self)}}

    @classmethod
    def from_json(cls, data: Any) -> OperationModel:
        """Invert `to_json`; a `DataError` if the value is damaged, or a model of another format."""
        found = convert(data, Format).format
        if found != _FORMAT:
            raise DataError(f"a model of format {found!r}, expected {_FORMAT}", field="format")
        parts: dict[str, type[Ensemble | Neighbours]] = {
            "kernels": Ensemble,
            "libraries": Ensemble,
            "library_errors": Neighbours,
        }
        decoded = {name: part.from_json(data[name]) for name, part in parts.items() if data.get(name) is not None}
        model = convert({**data, **decoded}, cls)
        candidates, vocabulary, ranges = model.candidates, model.vocabulary, model.ranges
        widths = vocabulary.widths
        own = tuple(one for one in candidates if not one.is_library)
        if candidates[: len(own)] != own or len({one.key for one in candidates}) < len(candidates):
            raise DataError("a candidate is listed twice, or a library before a kernel", field="candidates")
        if not vocabulary.sizes or max(widths) > _MAX_CANDIDATES:
            raise DataError("no sizes, or too many names", field="vocabulary")
        if not {one.kernel for one in own} <= set(vocabulary.members):
            raise DataError("a candidate of a kernel that is not listed", field="vocabulary")
        if ranges.keys() != {*vocabulary.sizes, *vocabulary.flags}:
            raise DataError("expected the range of every size and flag", field="ranges")
        if any(not 1 <= ranges[name][0] <= ranges[name][1] for name in vocabulary.sizes):
            raise DataError("expected ranges from 1, in ascending order", field="ranges")
        if not {one.kernel for one in candidates} <= model.doubts.keys():
            raise DataError("expected the doubt of every kernel and library", field="doubts")
        if not all(0.0 <= value <= _MAX_DOUBT for doubt in model.doubts.values() for value in doubt):
            raise DataError(f"expected numbers from 0 to {_MAX_DOUBT:g}", field="doubts")
        expected = {"kernels": (len(own), widths), "libraries": (len(candidates) - len(own), (widths[0], 0, 0))}
        for name, (items, shape) in expected.items():
            network: Ensemble | None = getattr(model, name)
            if (network is not None or items) and (network is None or network.widths != (*shape, items)):
                raise DataError(f"expected networks of {shape} inputs for {items} candidates", field=name)
        if model.library_errors is not None and len(model.library_errors.weights) != widths[0]:
            raise DataError(f"expected {widths[0]} inputs of a problem", field="library_errors")
        return model


_FOLDS = 4
_MAX_FITTED = 80
"""Configurations that a model chooses among."""
_ALONE = 0.3
"""Weight of problems served by a single kernel, in the selection of candidates: some calls exclude the other ones."""
_MISSING = 1.0
"""Loss, in the logarithm, that is assumed where no selected candidate was measured."""
_NEAR = 1.3
"""Candidates up to this ratio to the fastest decide how large the doubt is."""
_MIN_PROBLEMS = 20
_MIN_DOUBT = 0.02
_CONFIDENCES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
_PERCENTILE, _SAFE_RATIO = 1.0, 0.98
"""A confidence is enough if this percentile of the held-out problems is served at least so fast, relative to the
library."""
_FEW_ROWS, _MAX_REPEATS = 2000, 4
"""Fewer rows than this get more passes over them, by up to this factor."""
_MAX_ROW_PASSES = (2_500_000, 1_000_000)
"""Maximum number of rows times passes, of configurations and of libraries: more changes little and takes minutes."""


HeldOut = tuple[tuple[ModelCandidate, ...], Times, Times, Times]
"""Candidates, configurations first; measured times, and logarithms and spread that networks predict which were not
fitted to them, shape (problems, candidates). NaN where nothing was measured."""


def fit_model(
    operation: str,
    dtype: str,
    device: DeviceProperties,
    specs: Specs,
    *,
    candidates: Sequence[ModelCandidate],
    problems: Sequence[MeasuredProblem],
    flags: Collection[str] = (),
    max_candidates: int = _MAX_FITTED,
    epochs: int = 120,
) -> tuple[OperationModel, HeldOut]:
    """Learn a model, and hold out problems in turn to calibrate its doubt; return both.

    The candidates of the model are all libraries, and some of the configurations that were measured. Problems with
    times of libraries alone are welcome, as these are harder to predict. ``flags`` are names among the sizes of the
    problems, and ``epochs`` the passes over the measurements. An `InputError` says that there are fewer than 20
    problems.
    """
    if len(problems) < _MIN_PROBLEMS:
        raise InputError(f"{plural(len(problems), 'problem')} measured; a model needs at least {_MIN_PROBLEMS}")
    own = tuple(sorted(candidates, key=lambda one: one.is_library))
    count = sum(not one.is_library for one in own)
    keys = [one.key for one in own]
    times_us = np.array([[measured_us.get(key, np.nan) for key in keys] for _, _, measured_us in problems])
    names = list(problems[0][0])
    columns = {name: [sizes[name] for sizes, _, _ in problems] for name in names}
    members = dict.fromkeys(one.kernel for one in own[:count])
    arrays = [{buffer.name for buffer in specs[name].buffers} for name in members]
    vocabulary = Vocabulary(
        tuple(name for name in names if name not in flags),
        tuple(name for name in names if name in flags),
        tuple(sorted(set.intersection(*arrays))) if arrays else (),
        tuple(members),
        tuple(sorted({name for one in own for name in one.config})),
    )
    known: dict[object, ModelInputs] = {}
    parts: tuple[list[Inputs], list[Inputs]] = ([], [])
    for row, (sizes, kernels, _) in enumerate(problems):
        key = (*(sizes[name] for name in vocabulary.flags), *kernels)
        if key not in known:
            known[key] = model_inputs(vocabulary, own, specs, device, sizes=sizes, kernels=kernels, dtype=dtype)
        inputs = known[key]
        problem, measured = inputs.of_problem(sizes, kernels), np.isfinite(times_us[row])
        chosen, others = measured[inputs.numbers], np.flatnonzero(measured[count:])
        of_configs = inputs.items[chosen], inputs.of_pairs(kernels).T[chosen], inputs.numbers[chosen]
        nothing = np.zeros((len(others), 0), np.float32)
        for place, (item, pair, number) in enumerate((of_configs, (nothing, nothing, others))):
            parts[place].append(Inputs(np.repeat(problem[None], len(number), axis=0), item, pair, number))
    best = np.nan_to_num(times_us[:, :count], nan=np.inf).min(axis=1)
    firsts = (0, count, len(own))
    rows: list[_Rows] = []  # of configurations, and of libraries
    for place, part in enumerate(parts):
        joined = Inputs(*(np.concatenate(column) for column in zip(*part, strict=True)))
        numbers = np.repeat(np.arange(len(problems)), [len(one.number) for one in part])
        time_us = times_us[numbers, joined.number + firsts[place]]
        weights = np.ones(len(numbers)) if place else 1.0 / (1.0 + 2.0 * (time_us / best[numbers] - 1.0))
        items = len(vocabulary.sizes), firsts[place + 1] - firsts[place], firsts[place], place == 1
        rows.append(_Rows(joined, np.log2(time_us), weights, numbers, *items))
    held_out = (own, times_us, *_cross_validate(rows, times_us, epochs))
    doubts = _doubts(held_out)
    confidence = _CONFIDENCES[-1]
    if count < len(own):  # the least with which kernels that are chosen seldom lose against it
        ratios = {tried: choice_ratios(held_out, doubts, tried) for tried in _CONFIDENCES}
        safe = (c for c, found in ratios.items() if len(found) and np.percentile(found, _PERCENTILE) >= _SAFE_RATIO)
        confidence = next(safe, confidence)
    kept = _select([one.kernel for one in own[:count]], times_us[:, :count], max_candidates)
    every = np.ones(len(problems), np.bool_)
    (networks, _), (libraries, errors) = (_fit_networks(of, every, epochs) for of in rows)
    model = OperationModel(
        operation,
        dtype,
        device.name,
        vocabulary,
        {name: (min(column), max(column)) for name, column in columns.items()},
        (*(own[n] for n in kept), *own[count:]),
        networks.only(kept) if networks is not None and kept else None,
        libraries,
        doubts,
        confidence,
        errors,
        verified=True,
    )
    return model, held_out


class _Rows(NamedTuple):
    """Measurements as inputs and targets, of all configurations or of all libraries; arrays have shape (rows,)."""

    inputs: Inputs
    targets: Times
    weights: Times
    problems: NDArray[np.int64]
    """Number of each row's problem."""
    sizes: int
    """Number of sizes, which are the first inputs of a problem."""
    items: int
    first: int
    """Column of the first item among all candidates."""
    is_library: bool


def _fit_networks(of: _Rows, used: NDArray[np.bool_], epochs: int) -> tuple[Ensemble | None, Neighbours | None]:
    """Fit networks to the rows of some of the problems, and keep their errors if the items are libraries."""
    chosen = np.flatnonzero(used[of.problems])
    if not len(chosen):
        return None, None
    repeats = min(max(round(_FEW_ROWS / len(chosen)), 1), _MAX_REPEATS)
    passes = max(min(epochs * repeats, _MAX_ROW_PASSES[of.is_library] // len(chosen)), 1)
    inputs, targets = of.inputs.rows(chosen), of.targets[chosen]
    ensemble = Ensemble.fit(inputs, targets, of.weights[chosen], of.items, epochs=passes)
    if not of.is_library:
        return ensemble, None
    return ensemble, Neighbours.fit(inputs.problem, targets - ensemble.predict(inputs)[0], inputs.number, of.sizes)


def _cross_validate(rows: Sequence[_Rows], times_us: Times, epochs: int) -> tuple[Times, Times]:
    """Predict each fold of the problems by networks that are fitted to the others; return logarithms and spread."""
    fold = np.random.default_rng(0).permutation(len(times_us)) % _FOLDS
    log2_us, spread = np.full_like(times_us, np.nan), np.full_like(times_us, np.nan)
    for number, of in itertools.product(range(_FOLDS), rows):
        ensemble, errors = _fit_networks(of, fold != number, epochs)
        left_out = np.flatnonzero(fold[of.problems] == number)
        if ensemble is None or not len(left_out):
            continue
        part = of.inputs.rows(left_out)
        mean, wide = ensemble.predict(part)
        if errors is not None:
            pairs = zip(part.problem, part.number.tolist(), strict=True)
            near = np.array([errors.look_up(*pair) for pair in pairs], np.float32)
            mean, wide = mean + near[:, 0], near[:, 1]
        at = of.problems[left_out], part.number + of.first
        log2_us[at], spread[at] = mean, wide
    return log2_us, spread


def _doubts(held_out: HeldOut) -> dict[str, Doubt]:
    """Fit the squared residuals of each kernel's best configurations by a constant and the squared spread."""
    candidates, times_us, log2_us, spreads = held_out
    own = np.array([not one.is_library for one in candidates])
    best = np.nan_to_num(times_us[:, own], nan=np.inf).min(axis=1, initial=np.inf)
    near = ~own | (times_us <= _NEAR * best[:, None])
    residuals = np.log(times_us) - math.log(2.0) * log2_us
    found: dict[str, Doubt] = {}
    for name in dict.fromkeys(one.kernel for one in candidates):
        of_kernel = np.array([one.kernel == name for one in candidates])
        mask = near & of_kernel & np.isfinite(residuals)
        if mask.sum() < 10:
            found[name] = 0.5, 1.0
            continue
        squares = np.minimum(np.square(residuals[mask]), 1.0)
        spread = np.square(spreads[mask])
        per_spread = max(float(np.cov(spread, squares)[0, 1] / max(float(spread.var()), 1e-12)), 0.0)
        constant = max(float(squares.mean() - per_spread * spread.mean()), _MIN_DOUBT**2)
        found[name] = math.sqrt(constant), min(math.sqrt(per_spread), 10.0)
    return found


def choice_ratios(held_out: HeldOut, doubts: Mapping[str, Doubt], confidence: float) -> Times:
    """Return a library's time over that of the choice, for each held-out problem where both are known.

    Where the lead of the best configuration is smaller than the confidence asks for, as in `OperationModel`, the choice
    is the library, so that the ratio is 1.
    """
    candidates, times_us, log2_us, spread = held_out
    other = next(n for n, one in enumerate(candidates) if one.is_library)  # behind all configurations
    score = np.full((len(times_us), other), np.inf)
    known = np.isfinite(log2_us[:, :other])
    score[known] = (log2_us + SPREAD_COST * spread)[:, :other][known]
    rows = np.flatnonzero(known.any(axis=1) & np.isfinite(log2_us[:, other]))
    chosen = score[rows].argmin(axis=1)
    ratios = times_us[rows, other] / times_us[rows, chosen]
    lead = math.log(2.0) * (log2_us[rows, other] - log2_us[rows, chosen])
    pairs = np.array([doubts[one.kernel] for one in candidates])
    variance = np.square(pairs[:, 0]) + np.square(pairs[:, 1] * spread[rows])
    needed = confidence * np.sqrt(variance[np.arange(len(rows)), chosen] + variance[:, other])
    return np.where(lead > needed, ratios, 1.0)


def _select(kernels: Sequence[str], times_us: Times, count: int) -> list[int]:
    """Select configurations of kernels one by one, each time that which lowers the mean loss most."""
    losses, weights, groups = [], [], [np.ones(len(kernels), np.bool_)]
    groups += [np.array([one == name for one in kernels]) for name in dict.fromkeys(kernels)]  # in one order always
    for number, group in enumerate(groups):
        part = np.where(group, np.nan_to_num(times_us, nan=np.inf), np.inf)
        best = part.min(axis=1)
        known = np.isfinite(best)
        losses.append(np.minimum(np.log(part[known] / best[known, None]), _MISSING))
        weights.append(np.full(int(known.sum()), 1.0 if number == 0 else _ALONE))
    loss, weight = np.concatenate(losses), np.concatenate(weights)
    lowest = np.full(len(loss), _MISSING)
    chosen: list[int] = []
    while len(chosen) < min(count, len(kernels)):
        gain = weight @ np.maximum(lowest[:, None] - loss, 0.0)
        best_gain = int(np.argmax(gain))
        if gain[best_gain] <= 0.0:
            break
        chosen.append(best_gain)
        lowest = np.minimum(lowest, loss[:, best_gain])
    return sorted(chosen)
