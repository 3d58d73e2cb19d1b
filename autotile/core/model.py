"""Values that the stages of the pipeline exchange, small frozen dataclasses; objectives and their Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from autotile.core.documents import (
    Bytes,
    Count,
    Finite,
    Fraction,
    Name,
    NonNegative,
    Text,
    TimeUs,
    Whole,
    canonical_json,
)
from autotile.errors import InputError, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Value = Whole | bool | Finite | Name
Config = Mapping[Name, Value]
"""A value for each tunable parameter, in the order of the search space."""

Sizes = Mapping[str, int]
"""Sizes and flags of a problem by their names."""
Values = Mapping[str, Value]
"""Value of each name that an expression uses."""

L2Mode = Literal["cold", "hot", "eager"]
"""State of the L2 cache before each launch: overwritten, or as the one before left it. Or ``eager``: the latter, where
the host launches one by one, so that its part counts."""

DTYPE_BYTES = "dtype_bytes"
"""Name in expressions: bytes of an element of the problem's type."""

OBJECTIVE, COST, METRIC = "objective", "objective_cost", "metric."
"""Names in `Trial.telemetry`: value of the session's objective, what the search minimised, and prefix of metrics."""

STEP_TIME = "step_us."
"""Prefix of the time of a step in `Trial.telemetry`, followed by its index and its function."""

GPU_SCALE = "gpu_scale"
"""Name in `Trial.telemetry`: factor by which the times were multiplied where several GPUs measured one study; each is
on the scale of the GPU that holds the finals."""

SAME_CODE = "same_code"
"""Stage of a candidate that was not measured because it compiled to the code of an earlier one."""


@cache
def dtype_names(dtype: str) -> Mapping[str, int]:
    """Return `DTYPE_BYTES` by its name; nothing for the dtype of a result that another version has stored."""
    from autotile.core.dtypes import DTYPES  # imports NumPy

    return {DTYPE_BYTES: DTYPES[dtype].size_bytes} if dtype in DTYPES else {}


def config_key(config: Config) -> str:
    """Return the canonical text of a configuration, for look-ups."""
    return canonical_json(dict(config))


def distinct_configs(configs: Iterable[Config]) -> list[Config]:
    """Return each of some configurations once, in their order."""
    return list({config_key(config): config for config in configs}.values())


def config_text(config: Config) -> str:
    """Return a configuration as shown to users: ``BM=128 BN=128``."""
    return " ".join(f"{name}={value}" for name, value in config.items())


OUTPUT_DIGEST = "output_digest"
"""Telemetry of a verified trial: a digest of the inputs and of the bits of the outputs, or `VARYING_OUTPUTS`."""
VARYING_OUTPUTS = "varies"
"""Digest of outputs whose bits differed between launches on the same inputs."""


_CLOCK_LIMITS = {
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "a thermal slowdown",
    0x40: "a thermal slowdown",
    0x80: "an external power brake",
}
"""Bits of NVML's clock event reasons that lower the clock, as in ``nvml.h``."""


class Outcome(StrEnum):
    """Outcome of a candidate. All but ``OK`` and ``PRUNED`` are failures; none ends the session."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    COMPILE_FAILED = "compile_failed"
    RESOURCE_EXCEEDED = "resource_exceeded"
    WRONG_RESULT = "wrong_result"
    OUT_OF_BOUNDS = "out_of_bounds"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    PRUNED = "pruned"
    NOT_AVAILABLE = "not_available"
    """The recording does not contain this configuration (in replay only)."""
    NOT_COMPILED = "not_compiled"
    """The system killed the compiler, as it does when memory runs out; a later session tries again."""

    @property
    def has_time(self) -> bool:
        """Whether a trial with this outcome has a measured time."""
        return self in (Outcome.OK, Outcome.PRUNED)

    @property
    def is_finding(self) -> bool:
        """Whether a trial with this outcome says something about its configuration."""
        return self not in (Outcome.NOT_AVAILABLE, Outcome.NOT_COMPILED)


@dataclass(frozen=True, slots=True)
class Problem:
    """A kernel at given sizes and dtype, which a configuration is tuned for."""

    kernel: Name
    sizes: Mapping[Name, Count]
    dtype: Name

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.sizes.items()]
        return " ".join([self.kernel, *sizes, self.dtype])

    @property
    def names(self) -> dict[str, int]:
        """The value of every name that an expression may use of a problem: sizes, flags and `DTYPE_BYTES`."""
        return {**self.sizes, **dtype_names(self.dtype)}

    def document(self, of: Literal["kernel", "operation"] = "kernel") -> dict[str, Any]:
        """Return the entries of a JSON document that state the problem."""
        return {of: self.kernel, "problem": dict(self.sizes), "dtype": self.dtype}

    def at(self, sizes: Sizes) -> Problem:
        """Return the problem of the same kernel and dtype with other sizes and flags."""
        return Problem(self.kernel, sizes, self.dtype)


class LaunchGeometry(msgspec.Struct, frozen=True, gc=False):
    """Grid, block and dynamic shared memory per block of a launch."""

    grid: tuple[Count, Count, Count]
    block: tuple[Count, Count, Count]
    dynamic_smem_bytes: Bytes

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


class Resources(msgspec.Struct, frozen=True):
    """Resources of a kernel, as reported by the compiler."""

    registers: Count
    """Registers per thread."""
    spill_store_bytes: Bytes
    spill_load_bytes: Bytes
    stack_bytes: Bytes
    static_smem_bytes: Bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes of register spills: stores to and loads from local memory."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A ``__global__`` function in a cubin."""

    symbol: Name
    """Its name in the cubin: mangled, unless the function is ``extern "C"``."""
    resources: Resources
    parameter_bytes: tuple[Bytes, ...] | None = None
    """Size of each parameter; None if the cubin does not tell."""
    max_threads: Count | None = None
    """Most threads of a block by its ``__launch_bounds__``; None if it has none."""
    cluster: tuple[Count, Count, Count] | None = None
    """Blocks of a cluster by its ``__cluster_dims__``; None if it has none."""


class Occupancy(msgspec.Struct, frozen=True):
    """Resident blocks per SM, and the resources that limit them."""

    blocks_per_sm: Count
    warps_per_sm: Count
    occupancy: Fraction
    """Resident warps as a fraction of the SM's maximum, 0 to 1."""
    limited_by: tuple[Name, ...]
    """Keys of ``limits`` that allow no more than ``blocks_per_sm``."""
    limits: Mapping[Name, Whole]
    """Blocks per SM allowed by each of ``threads``, ``registers``, ``shared_memory`` and ``blocks``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time of a configuration: median of ``samples_us`` with its 95 % confidence interval."""

    time_us: TimeUs
    low_us: NonNegative
    high_us: NonNegative
    samples_us: tuple[NonNegative, ...] = ()
    l2: L2Mode = "cold"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, without the samples."""
        return {"time_us": self.time_us, "interval_us": [self.low_us, self.high_us], "l2": self.l2}


def timed_config(config: Config, measurement: Measurement | None) -> dict[str, Any]:
    """Return a configuration with its time and the 95 % interval of that, in microseconds, as JSON values."""
    found = {"time_us": None, "interval_us": None} if measurement is None else measurement.to_json()
    return {"config": dict(config), "time_us": found["time_us"], "interval_us": found["interval_us"]}


@dataclass(frozen=True, slots=True)
class Trial:
    """Record of one candidate: configuration, outcome, reason, and all measured values."""

    config: Config
    outcome: Outcome
    reason: Text = ""
    """Reason for the outcome, as one line; empty if the candidate was measured and is ``OK``."""
    stage: Name = ""
    """Stage that determined the outcome: ``limits``, ``compile``, ``resources``, `SAME_CODE`, ``load``, ``verify``,
    ``measure``, ``finals`` or ``sanitize``."""
    geometry: LaunchGeometry | None = None
    resources: Resources | None = None
    occupancy: Occupancy | None = None
    measurement: Measurement | None = None
    cubin_hash: Name = ""
    source: Literal["cuda", "replayed"] = "cuda"
    gpu: Name = ""
    """UUID of the GPU that it ran on, as ``nvidia-smi -L`` lists it; empty if it is not known, or nothing ran."""
    seconds: Mapping[Name, NonNegative] = field(default_factory=dict)
    """Wall time of each completed stage, in seconds."""
    telemetry: Mapping[Name, Finite | Whole | Text] = field(default_factory=dict)
    """Clock, power, temperature and throttle reasons during measurement, if NVML provides them; the time of the
    reference kernel (``reference_us``), which tracks the drift of the GPU, and of an empty interval between two events
    (``event_floor_us``); the maximum error in verification (``max_error``); if requested, the energy of a run
    (``energy_mj``) and whether NVML's energy ``counter`` or its ``power`` readings gave it (``energy_source``); and
    `OUTPUT_DIGEST`."""

    @property
    def config_key(self) -> str:
        """Canonical text of the configuration, for look-ups."""
        return config_key(self.config)

    @property
    def clock_limits(self) -> tuple[str, ...]:
        """Limits that lowered the clock of the GPU right after it was measured, as far as NVML states them."""
        mask = self.telemetry.get("throttle_reasons")
        found = (text for bit, text in _CLOCK_LIMITS.items() if isinstance(mask, int) and mask & bit)
        return tuple(dict.fromkeys(found))

    @property
    def time_us(self) -> float | None:
        """Measured time in microseconds; None if the candidate was not measured."""
        return self.measurement.time_us if self.measurement is not None else None

    @property
    def cost(self) -> float | None:
        """Value that the search minimises: the time in microseconds, unless it has another objective.

        Of an objective that is maximised it is the reciprocal. None if the candidate was not measured.
        """
        if self.measurement is None:
            return None
        cost = self.telemetry.get(COST)
        return float(cost) if cost is not None else self.measurement.time_us

    @property
    def scores(self) -> dict[str, float]:
        """Value of the objective, if it is not the time, then the metrics of the user's own."""
        own = {name: value for name, value in self.telemetry.items() if name == OBJECTIVE or name.startswith(METRIC)}
        ordered = sorted(own.items(), key=lambda item: item[0] != OBJECTIVE)
        return {name.removeprefix(METRIC): float(value) for name, value in ordered}


Rule = Literal["interrupt", "trials", "budget", "until", "settled", "space"]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The reason for the end of a search."""

    rule: Name
    """A `Rule`, such as ``settled`` where nothing more was expected, and ``space`` where every configuration was tried;
    of a stored run, it may be one of a later version."""
    expected_gain: Finite | None = None
    """Expected relative gain in speed from `more_trials` further trials, 0.01 for 1 %; None for a sampler that does not
    estimate it."""
    more_trials: int | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one parameter; both shares are 0 unless it ``matters``: it explains more than chance would."""

    parameter: Name
    share: Finite = 0.0
    """Share of the variance of the logarithm of the time over the valid configurations, 0 to 1: the share that it
    explains alone, plus half of the share of each pair with another parameter. All shares and the unexplained variance
    add up to 1."""
    alone: Finite = 0.0
    matters: bool = True


TIME, REGISTERS, ENERGY, ERROR = "time", "registers", "energy", "error"

OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {TIME: "time_us", REGISTERS: "registers", ENERGY: "energy_mj", ERROR: "max_error"}
)
"""JSON names of the objectives: time in microseconds, registers per thread, energy in millijoules per run, and maximum
error of an output element, relative to the larger of its expected magnitude and the output's RMS."""


def split_objectives(names: Iterable[str], metrics: Iterable[str] = ()) -> tuple[tuple[str, ...], str | None]:
    """Return the named objectives, each once and time first, and the expression among them, None if there is none.

    A name may be several, separated by commas. The name of a metric is an expression. Raise `InputError` if there is no
    such objective, or an expression is not the only one.
    """
    given = [name.strip() for name in names]
    known = {*metrics}
    expressions = [text for text in given if text in known or not all(each.isalpha() or each in ", " for each in text)]
    if expressions and len(given) - given.count(TIME) > 1:
        raise InputError(
            f"the objective {expressions[0]!r} is an expression, which must be the only one; leave others out"
        )
    if expressions:
        return (TIME,), expressions[0]
    requested = [name.strip() for text in given for name in text.split(",")]
    for name in requested:
        if name not in OBJECTIVES:
            hint = f"{nearest(name, OBJECTIVES)} (known: {', '.join(OBJECTIVES)})"
            raise InputError(f"there is no objective {name!r}{hint}")
    return tuple(dict.fromkeys([TIME, *requested])), None


def objective_values(trial: Trial, objectives: Sequence[str]) -> tuple[float, ...] | None:
    """Return the values of a trial for the objectives; None if it did not run or has no value for one of them."""
    if not trial.outcome.has_time:
        return None
    values: list[float] = []
    for name in objectives:
        if name == TIME:
            value = trial.cost
        elif name == REGISTERS:
            value = trial.resources.registers if trial.resources is not None else None
        else:
            found = trial.telemetry.get(OBJECTIVES[name])
            value = float(found) if found is not None else None
        if value is None:
            return None
        values.append(value)
    return tuple(values)


def non_dominated(points: ArrayLike) -> NDArray[np.bool_]:
    """Return the points that no other point dominates, that is, equals or betters in all and betters in one objective.

    Equal points are either all included or all excluded. With two objectives, the cost is that of a sort; with more,
    each retained point is compared with all remaining points once. ``points`` are finite values to minimize, shape
    (points, objectives).
    """
    import numpy as np  # the help of the command line needs none

    values = np.asarray(points, dtype=np.float64)
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    ascending, inverse = np.unique(values, axis=0, return_inverse=True)
    if values.shape[1] == 2:
        # All previous points are no worse in the first objective.
        kept = np.append(True, ascending[1:, 1] < np.minimum.accumulate(ascending[:, 1])[:-1])
    else:
        # A dominating point comes first, so the first remaining point is kept.
        kept = np.zeros(len(ascending), dtype=np.bool_)
        remaining = np.arange(len(ascending))
        while len(remaining):
            kept[remaining[0]] = True
            remaining = remaining[(ascending[remaining] < ascending[remaining[0]]).any(axis=1)]
    return kept[inverse.ravel()]
