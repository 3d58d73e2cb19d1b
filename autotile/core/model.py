"""The values that pass from one stage of the pipeline to the next: small, frozen, printable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal

from autotile.core.frozen import dataclass

Value = int | bool | str
Config = Mapping[str, Value]
"""One value for each tunable parameter, in the order of the search space."""

L2Mode = Literal["cold", "hot"]

SAME_CODE = "same_code"
"""Stage of a candidate that compiled to the code of another one, and so was not measured again."""


def canonical_json(value: Any) -> str:
    """Text that is equal for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def config_key(config: Config) -> str:
    """Canonical text of a configuration, for look-ups."""
    return canonical_json(dict(config))


def config_text(config: Config) -> str:
    """How a configuration is shown to a person: ``BM=128 BN=128``."""
    return " ".join(f"{name}={value}" for name, value in config.items())


class Outcome(StrEnum):
    """How a candidate ended. Every outcome but ``OK`` and ``PRUNED`` is a failure; none ends the run."""

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
    """Only in replay: the recording does not hold this configuration."""

    @property
    def has_time(self) -> bool:
        """Whether a trial with this outcome carries a measured time."""
        return self in (Outcome.OK, Outcome.PRUNED)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a configuration is tuned for: a kernel at given sizes and dtype."""

    kernel: str
    sizes: Mapping[str, int]
    dtype: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items())
        return f"{self.kernel} {sizes} {self.dtype}"


@dataclass(frozen=True, slots=True)
class LaunchGeometry:
    """How many blocks of how many threads, and the dynamic shared memory of each block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says a kernel uses."""

    registers: int
    """Registers a thread."""
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Bytes stored to and loaded from local memory for want of registers."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that fit on an SM at once, and which limit binds."""

    blocks_per_sm: int
    warps_per_sm: int
    occupancy: float
    """Resident warps over the most that the SM can hold, 0 to 1."""
    limited_by: tuple[str, ...]
    """The limits that allow no more than ``blocks_per_sm``, among the keys of ``limits``."""
    limits: Mapping[str, int]
    """Blocks per SM that ``threads``, ``registers``, ``shared_memory`` and ``blocks`` each allow."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time of one configuration: the median of ``samples_us`` with its 95 % interval."""

    time_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...] = ()
    l2: L2Mode = "cold"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary, without the samples."""
        return {"time_us": self.time_us, "interval_us": [self.low_us, self.high_us], "l2": self.l2}


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate's whole story: what was tried, how it ended and why."""

    config: Config
    outcome: Outcome
    reason: str = ""
    """One line for a person; empty where the candidate was measured itself and is ``OK``."""
    stage: str = ""
    """The stage that decided the outcome: ``limits``, ``compile``, ``resources``, `SAME_CODE`, ``load``, ``verify``,
    ``measure``, ``finals`` or ``sanitize``."""
    geometry: LaunchGeometry | None = None
    resources: Resources | None = None
    occupancy: Occupancy | None = None
    measurement: Measurement | None = None
    cubin_hash: str = ""
    source: Literal["cuda", "replayed"] = "cuda"
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each stage that ran."""
    telemetry: Mapping[str, float | int | str] = field(default_factory=dict)
    """Clock, power, temperature and throttle reasons while measuring, where NVML gives them; the time of the reference
    kernel (``reference_us``), which drifts as the GPU does, and of no kernel at all (``event_floor_us``); the greatest
    error that verifying saw (``max_error``); where it was asked for, the energy of a run (``energy_mj``) and whether
    NVML's ``counter`` or its readings of ``power`` gave it (``energy_source``)."""

    @property
    def time_us(self) -> float | None:
        """Measured time, or None where the candidate was not measured."""
        return self.measurement.time_us if self.measurement is not None else None
