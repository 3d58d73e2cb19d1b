"""What the tuner and the GPU worker say to each other, as values on both sides of the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autotile.ground.model import Config, L2Mode, Measurement, Outcome


@dataclass(frozen=True, slots=True)
class Workload:
    """The problem that a worker lays out once and evaluates candidates on."""

    spec_text: str
    spec_source: str
    sizes: Mapping[str, int]
    dtype: str
    l2: L2Mode
    cache: str
    cache_limit_bytes: int
    sample_limit_s: float
    device_index: int = 0
    verify_sizes: tuple[Mapping[str, int], ...] = ()
    """More problems that a candidate must be right on, besides the ragged and the tuned one."""
    energy: bool = False
    """Whether to measure the energy of a run, too."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What running one candidate on the device gave."""

    outcome: Outcome
    reason: str = ""
    stage: str = ""
    measurement: Measurement | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    telemetry: Mapping[str, float | int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_json`."""
        measurement = data["measurement"]
        if measurement is not None:
            measurement = Measurement(**{**measurement, "samples_us": tuple(measurement["samples_us"])})
        return cls(**{**data, "outcome": Outcome(data["outcome"]), "measurement": measurement})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compiled configuration, ready to load."""

    config: Config
    cubin_path: str

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {"config": dict(self.config), "cubin_path": self.cubin_path}
