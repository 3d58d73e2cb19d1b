"""A model of time over the kernels, configurations and sizes of an operation, learned from measurements on one GPU.

For every candidate (a configuration of a kernel, or a library) it gives the expected time at any sizes, and the doubt.
`Layout` states the inputs of the networks of `autotile.families.network`, and `autotile.families.model_fit` fits them:
those of a problem are its sizes, their alignment, that of the rows of its arrays, and its flags; those of a
configuration its kernel, parameters, tiles and resources; those of a pair the blocks, the rounds of the busiest SM, the
whole waves, and the waste of the last round, of the last wave and of the padding at the edges. Doubt is calibrated on
measurements that were held out.

A library is chosen unless a kernel is expected to be faster with confidence, so that an unmeasured problem costs little
where the model is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Format, Name, convert
from autotile.core.model import Config, Resources, Value, config_key
from autotile.errors import AutotileError, DataError
from autotile.families.network import Ensemble, Neighbours, Prepared
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import LaunchPlan, fixed_names
from autotile.kernel.spec import STEP, KernelSpec
from autotile.space.limits import Limit, check_config, compiled_occupancy, demand_of, limit_violation, limits_of

_UNLIMITED_SMS = 2**40
"""Number of SMs at which no persistent kernel limits its grid."""
_LARGE = 2**14 * 3**2 * 5 * 7
"""A size that most tiles divide."""
UNTILED = 2.0**40
"""Tile of a size that the grid does not depend on; no size exceeds it."""
_TESTED = ((1, 2, 3, 5), (64, 65, 127, 1000), (4096, 33, 2049, 7), (777, 5555, 16384, 2))
"""Sizes of the problems at which a tiling is tested, repeated for further sizes."""
_UNCOMPILED = Resources(64, 0, 0, 0, 0)
"""Assumed where the compiler's report is not known."""

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Tilings:
    """Tilings of several configurations of a kernel, for given flags.

    Attributes
    ----------
    names
        Names of the kernel's sizes that are no flags.
    tiles
        Extent of a tile along each size, shape (configurations, sizes); `2**40` where the grid does not depend on it.
    units
        Blocks of one tile, such as the parts of split-K, shape (configurations,).
    resident
        Blocks that one SM holds, at least 1, shape (configurations,).
    threads, smem_bytes, registers
        Threads and bytes of shared memory of a block and registers of a thread, shape (configurations,).
    irregular
        Configurations whose grid has another form, with the expressions of each step's grid.
    """

    names: tuple[str, ...]
    tiles: Column
    units: Column
    resident: Column
    threads: Column
    smem_bytes: Column
    registers: Column
    irregular: Mapping[int, _Grid]

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        device: DeviceProperties,
        configs: Sequence[Config],
        resources: Sequence[Resources | None],
        flags: Mapping[str, int],
    ) -> Tilings:
        """Find the tilings.

        Parameters
        ----------
        spec, device
            Kernel and device.
        configs, resources
            Configurations, and what the compiler reported of each, None where that is not known.
        flags
            Value of each flag of the kernel.
        """
        names = tuple(name for name in spec.sizes if name not in spec.flags)
        irregular = {}
        rows = []
        for number, (config, compiled) in enumerate(zip(configs, resources, strict=True)):
            grid = _Grid(spec, config, names, flags, device)
            tiles, units = grid.tiling()
            if not grid.has(tiles, units):
                irregular[number] = grid
            rows.append([*tiles, units, *_shape(spec, config, flags, device, compiled or _UNCOMPILED)])
        table = np.array(rows, float).reshape(len(rows), len(names) + 5)
        split = len(names)
        units, resident, threads, smem, registers = table[:, split:].T
        return cls(names, table[:, :split], units, resident, threads, smem, registers, irregular)


@dataclass(frozen=True)
class _Grid:
    """The expressions of a configuration's grid."""

    spec: KernelSpec
    config: Config
    names: tuple[str, ...]
    flags: Mapping[str, int]
    device: DeviceProperties

    def blocks(self, sizes: Sequence[int]) -> float:
        """Return the blocks of the main step, or else the largest, without a limit by the number of SMs."""
        unlimited = replace(self.device, sm_count=_UNLIMITED_SMS)
        problem = {**self.spec.sizes, **self.flags, **dict(zip(self.names, sizes, strict=True))}
        names = {**fixed_names(self.spec, problem, unlimited), **self.config, STEP: 0}
        try:
            return max(_product(step.launch.grid, names) for step in self.spec.main_steps)
        except AutotileError:  # such as a division by zero at sizes for which the configuration is not meant
            return 1.0

    def tiling(self) -> tuple[list[float], float]:
        """Return the tile along each size, and the blocks of one tile, as far as a tiling explains the grid."""
        ones = [1] * len(self.names)
        units = self.blocks(ones)
        tiles = []
        for place in range(len(self.names)):
            large = self.blocks([_LARGE if place == other else 1 for other in range(len(self.names))])
            tiles.append(_LARGE * units / large if large > units else UNTILED)
        return tiles, units

    def has(self, tiles: Sequence[float], units: float) -> bool:
        """Return whether a tiling gives the number of blocks at the tested problems."""
        for row in _TESTED:
            sizes = [row[place % len(row)] for place in range(len(self.names))]
            counts = [-(-size // tile) for size, tile in zip(sizes, tiles, strict=True)]
            if float(np.prod(counts)) * units != self.blocks(sizes):
                return False
        return True


def _product(grid: Sequence[Expression], names: Mapping[str, Any]) -> float:
    return reduce(lambda product, extent: product * max(float(extent.value(names)), 1.0), grid, 1.0)


def _shape(
    spec: KernelSpec, config: Config, flags: Mapping[str, int], device: DeviceProperties, compiled: Resources
) -> tuple[float, float, float, float]:
    """Return resident blocks, threads, shared memory in bytes and registers of the main launch."""
    try:
        geometry = LaunchPlan.of(spec, config, {**spec.sizes, **flags}, device).main.geometry
    except AutotileError:
        return 1.0, 128.0, 0.0, float(compiled.registers)
    found = compiled_occupancy(geometry, compiled, device).blocks_per_sm
    smem_bytes = geometry.dynamic_smem_bytes + compiled.static_smem_bytes
    return float(max(found, 1)), float(geometry.threads), float(smem_bytes), float(compiled.registers)


def array_extents(spec: KernelSpec, flags: Mapping[str, int]) -> dict[str, tuple[int | None, ...]]:
    """Return, for each array of a kernel, which of the sizes each extent is; None where it is none of them.

    Sizes are counted in the order of the kernel's file, without flags.
    """
    proper = [name for name in spec.sizes if name not in spec.flags]
    distinct = {name: 10007 + 2 * place for place, name in enumerate(proper)}
    places = {value: place for place, value in enumerate(distinct.values())}
    names = {**spec.sizes, **flags, **distinct, **spec.default}
    found: dict[str, tuple[int | None, ...]] = {}
    for buffer in spec.buffers:
        try:
            found[buffer.name] = tuple(places.get(int(extent.value(names))) for extent in buffer.shape)
        except AutotileError:
            found[buffer.name] = ()
    return found


_MAX_ALIGNMENT = 4
"""Doublings of alignment beyond which it does not matter: 16 elements."""
_PAIR_INPUTS = 7
_ITEM_INPUTS = 5
_PROBLEM_INPUTS = 2
"""Inputs besides those for each size, flag, array, kernel and parameter."""
_SMALL_TILE = 2.0**30
"""Tiles below it are tiles; a size that the grid does not depend on has none."""
_MAX_LOG2_TILE = 20.0

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A configuration of a kernel, or a library.

    Attributes
    ----------
    kernel
        Name of the kernel or the library.
    config
        The configuration; empty for a library.
    resources
        What the compiler reported; None where that is unknown, and for a library.
    """

    kernel: Name
    config: Config
    resources: Resources | None = None

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which has no configuration."""
        return not self.config

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and configuration, to compare by."""
        return self.kernel, config_key(self.config)


@dataclass(frozen=True)
class Vocabulary:
    """Names that stand for inputs, in their order.

    Attributes
    ----------
    sizes, flags
        Sizes and flags of the operation.
    arrays
        Arrays that all kernels have.
    members, parameters
        Kernels, and the parameters of their configurations.
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


@dataclass(frozen=True)
class Layout:
    """All that does not depend on the sizes, for problems of given flags and kernels.

    Attributes
    ----------
    flags
        Values of the operation's flags.
    names
        Name of each kernel and of its sizes.
    numbers
        Numbers of the configurations of these kernels among all candidates, shape (configurations,).
    item_inputs
        Inputs of each of these configurations, shape (configurations, inputs).
    """

    vocabulary: Vocabulary
    flags: tuple[float, ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]
    numbers: NDArray[np.int64]
    item_inputs: Vector
    _source: NDArray[np.int64]
    """Position of each configuration's kernel."""
    _tilings: tuple[tuple[int, Tilings], ...]
    """Tilings of each kernel, and the position of its first configuration."""
    _tiles: Vector
    """Tile along each size of the kernel, shape (sizes, configurations)."""
    _covering: Vector
    """Matrix of 1 for each size of its kernel that a configuration tiles, shape (configurations, kernels x sizes)."""
    _log2_tile: Vector
    """Logarithm of the outputs of a tile."""
    _units: Vector
    _slots: Vector
    """Number of SMs, and of the blocks that they hold at once, shape (2, configurations)."""
    _extents: tuple[tuple[int | None, ...], ...]
    """Extents of each array of the first kernel, as positions of its sizes."""

    @classmethod
    def of(
        cls,
        vocabulary: Vocabulary,
        candidates: Sequence[ModelCandidate],
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        *,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
    ) -> Layout:
        """Prepare a layout.

        Parameters
        ----------
        vocabulary, candidates
            Those of the model.
        specs, device
            The kernels, and the device.
        sizes, kernels
            Any problem of these flags and kernels: its sizes and flags by the names of the operation, and by those of
            each kernel.
        """
        own = {
            name: [n for n, one in enumerate(candidates) if one.kernel == name and not one.is_library]
            for name in kernels
        }
        found = [
            Tilings.of(
                specs[name],
                device,
                [candidates[n].config for n in chosen],
                [candidates[n].resources for n in chosen],
                {flag: kernels[name][flag] for flag in specs[name].flags},
            )
            for name, chosen in own.items()
        ]
        numbers = [n for chosen in own.values() for n in chosen]
        tiles = np.full((len(numbers), len(vocabulary.sizes)), UNTILED)
        starts = np.cumsum([0, *map(len, own.values())]).tolist()
        for start, tilings in zip(starts, found, strict=False):
            width = min(tiles.shape[1], tilings.tiles.shape[1])
            tiles[start : start + len(tilings.tiles), :width] = tilings.tiles[:, :width]
        columns = {name: _joined([getattr(tilings, name) for tilings in found]) for name in _COLUMNS}
        first = next(iter(kernels), None)
        extents = array_extents(specs[first], kernels[first]) if first is not None else {}
        log2_tiles = np.log2(tiles)
        is_tiled = tiles < _SMALL_TILE
        source = np.repeat(np.arange(len(own)), list(map(len, own.values())))
        covering = np.zeros((len(numbers), len(own), tiles.shape[1]), np.float32)
        covering[np.arange(len(numbers)), source] = is_tiled
        return cls(
            vocabulary,
            tuple(float(sizes[name]) for name in vocabulary.flags),
            tuple((name, tilings.names) for name, tilings in zip(kernels, found, strict=True)),
            np.array(numbers, np.int64),
            _item_inputs(vocabulary, [candidates[n] for n in numbers], log2_tiles, columns),
            source,
            tuple(zip(starts, found, strict=False)),
            np.ascontiguousarray(tiles.T, np.float32),
            covering.reshape(len(numbers), len(own) * tiles.shape[1]),
            (is_tiled * log2_tiles).sum(axis=1).astype(np.float32),
            columns["units"].astype(np.float32),
            device.sm_count * np.stack([np.ones(len(numbers)), columns["resident"]]).astype(np.float32),
            tuple(extents.get(name, ()) for name in vocabulary.arrays),
        )

    def problem_inputs(self, sizes: Mapping[str, int], kernels: Mapping[str, Mapping[str, int]]) -> Vector:
        """Return the inputs of a problem, shape (problem inputs,); parameters as for `of`."""
        values = [sizes[name] for name in self.vocabulary.sizes]
        own: Sequence[int] = ()
        if self.names:
            kernel, names = self.names[0]
            own = [kernels[kernel][name] for name in names]
        rows = [
            _alignment(own[extent[-1]]) if extent and extent[-1] is not None else _MAX_ALIGNMENT
            for extent in self._extents
        ]
        elements = sum(math.prod([own[place] for place in extent if place is not None]) for extent in self._extents)
        inputs = [*map(math.log2, values), *map(_alignment, values), *self.flags, *rows]
        inputs += (min(rows, default=_MAX_ALIGNMENT), math.log2(elements) if elements else 0.0)
        return np.array(inputs, np.float32)

    def pair_inputs(self, kernels: Mapping[str, Mapping[str, int]]) -> Vector:
        """Return the inputs of each configuration for a problem, shape (pair inputs, configurations)."""
        sizes = len(self.vocabulary.sizes)
        table = [[kernels[name][size] for size in names[:sizes]] for name, names in self.names]
        rows = np.array([row + [1] * (sizes - len(row)) for row in table], np.float32).reshape(len(table), sizes)
        counts = rows.T.take(self._source, axis=1)
        counts /= self._tiles
        np.ceil(counts, out=counts)
        blocks = np.multiply.reduce(counts)
        blocks *= self._units
        for start, tilings in self._tilings:
            for number, grid in tilings.irregular.items():
                given = kernels[grid.spec.name]
                blocks[start + number] = grid.blocks([given[name] for name in grid.names])
        shares = np.empty((4, len(blocks)), np.float32)
        np.divide(blocks, self._slots, out=shares[:2])
        np.ceil(shares[:2], out=shares[2:])
        inputs = np.empty((_PAIR_INPUTS + sizes, len(blocks)), np.float32)
        logs = np.log2(shares)
        inputs[0] = logs[0]
        inputs[1:3] = logs[2:]
        np.subtract(logs[2:], logs[:2], out=inputs[3:5])
        log2_counts = np.log2(counts, out=inputs[_PAIR_INPUTS:])
        np.add.reduce(log2_counts, out=inputs[5])
        inputs[5] += self._log2_tile
        inputs[5] -= self._covering @ np.log2(rows).reshape(-1)
        np.minimum(shares[0], _MANY_ROUNDS, out=inputs[6])
        return inputs


_COLUMNS = ("units", "resident", "threads", "smem_bytes", "registers")
_MANY_ROUNDS = 4.0
"""Rounds beyond which their number has no other effect than in proportion."""


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0)


def _alignment(size: int) -> int:
    """Return the doublings by which a size is aligned, 4 at most."""
    return min((size & -size).bit_length() - 1, _MAX_ALIGNMENT)


def _item_inputs(
    vocabulary: Vocabulary, candidates: Sequence[ModelCandidate], log2_tiles: Column, columns: Mapping[str, Column]
) -> Vector:
    """Return the inputs of configurations: their kernel, parameters, tiles and resources."""
    kernel = [[float(one.kernel == name) for name in vocabulary.members] for one in candidates]
    values = [[_number(one.config.get(name)) for name in vocabulary.parameters] for one in candidates]
    resources = [
        np.log2(columns["units"]),
        np.log2(columns["resident"]),
        np.log2(columns["threads"]),
        np.log2(columns["smem_bytes"] + 1024.0),
        columns["registers"] / 128.0,
    ]
    parts = (
        np.array(kernel).reshape(len(candidates), len(vocabulary.members)),
        np.array(values).reshape(len(candidates), len(vocabulary.parameters)),
        np.minimum(log2_tiles, _MAX_LOG2_TILE),
        np.stack(resources, axis=1),
    )
    return np.concatenate(parts, axis=1).astype(np.float32)


def _number(value: object) -> float:
    """Return the logarithm of a parameter's value; 0 for text, which the offset of a candidate stands for."""
    return math.log2(abs(value) + 1.0) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class KernelRules:
    """The rules and limits of a kernel for given flags, parted so that candidates are checked quickly.

    Attributes
    ----------
    spec, device
        The kernel and the device.
    fixed
        ``device.*`` by name.
    of_problem
        Rules about sizes and flags alone, which hold for all configurations or for none.
    of_pair
        Rules about sizes and parameters.
    of_config
        Rules about parameters and flags alone, which hold for all sizes or for none.
    pair_limits, config_limits
        Limits that depend on the sizes, and the others.
    valid
        Whether a configuration meets the rules and limits that do not depend on the sizes, by its position and the
        element type.
    """

    spec: KernelSpec
    device: DeviceProperties
    fixed: Mapping[str, Value]
    of_problem: tuple[Expression, ...]
    of_pair: tuple[Expression, ...]
    of_config: tuple[Expression, ...]
    pair_limits: tuple[Limit, ...]
    config_limits: tuple[Limit, ...]
    valid: dict[tuple[int, str], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> KernelRules:
        """Part the rules of a kernel; ``sizes`` are those of any problem."""
        names = fixed_names(spec, sizes, device)
        proper = spec.sizes.keys() - set(spec.flags)
        rules = [rule.expression for rule in spec.rules]
        limits = limits_of(spec)
        sized = {one.name for one in limits if any(not part.names.isdisjoint(proper) for part in one.expressions(spec))}
        return cls(
            spec,
            device,
            {name: value for name, value in names.items() if name not in sizes},
            tuple(rule for rule in rules if rule.names <= names.keys()),
            tuple(rule for rule in rules if not rule.names <= names.keys() and not rule.names.isdisjoint(proper)),
            tuple(rule for rule in rules if not rule.names <= names.keys() and rule.names.isdisjoint(proper)),
            tuple(limit for limit in limits if limit.name in sized),
            tuple(limit for limit in limits if limit.name not in sized),
        )

    def names_of(self, sizes: Mapping[str, int]) -> dict[str, Value] | None:
        """Return the value of every name that no parameter determines; None if no configuration is valid."""
        names = {**self.fixed, **sizes}
        return names if all(rule.value(names) for rule in self.of_problem) else None

    def are_met(
        self, number: int, config: Config, sizes: Mapping[str, int], names: Mapping[str, Value], dtype: str
    ) -> bool:
        """Return whether a configuration is valid for a problem; ``names`` are those of `names_of`."""
        if self.spec.computed:
            return not check_config(self.spec, config, sizes, self.device, dtype)
        names = {**names, **config}
        valid = self.valid.get((number, dtype))
        if valid is None:
            valid = self.valid[number, dtype] = (
                _is_declared(self.spec, config)
                and all(rule.value(names) for rule in self.of_config)
                and not limit_violation(
                    demand_of(self.spec, names, sizes, dtype), self.device, self.spec, self.config_limits
                )
            )
        return (
            valid
            and all(rule.value(names) for rule in self.of_pair)
            and not limit_violation(demand_of(self.spec, names, sizes, dtype), self.device, self.spec, self.pair_limits)
        )


class Checks:
    """Checks of configurations for one problem."""

    def __init__(self, rules: Sequence[KernelRules], kernels: Mapping[str, Mapping[str, int]], dtype: str) -> None:
        self._rules = dict(zip(kernels, rules, strict=True))
        self._kernels, self._dtype = kernels, dtype
        self._names: dict[str, dict[str, Value] | None] = {}
        """Names of each kernel; None where no configuration is valid."""

    def pass_for(self, number: int, candidate: ModelCandidate) -> bool:
        """Return whether a configuration is valid for the problem; ``number`` is its position in the layout."""
        name = candidate.kernel
        rules, sizes = self._rules[name], self._kernels[name]
        if name not in self._names:
            self._names[name] = rules.names_of(sizes)
        names = self._names[name]
        return names is not None and rules.are_met(number, candidate.config, sizes, names, self._dtype)


def _is_declared(spec: KernelSpec, config: Config) -> bool:
    """Return whether a kernel, which may have changed since a model was learned, has the parameters and values."""
    declared = {parameter.name: parameter.values for parameter in spec.parameters}
    return config.keys() == declared.keys() and all(config[name] in values for name, values in declared.items())


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
