"""Choices: a configuration and its origin, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from autotile.core.model import Config, Measurement, Resources

Tier = Literal["exact", "family", "model", "library", "nearest", "transferred", "default"]


@dataclass(frozen=True, slots=True)
class Estimated:
    """Reason to serve another configuration than the default.

    Attributes
    ----------
    time_us, default_us
        Estimated times of the configuration and of the default in microseconds, each within about a factor of two; None
        for a default that cannot run here, or that a search would not try here.
    reason
        How their launches differ, as a clause.
    """

    time_us: float
    default_us: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"time_us": self.time_us, "default_us": self.default_us, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel in one configuration, or a library, with its time for a problem of an operation.

    Attributes
    ----------
    kernel, config
        Name of the kernel and its configuration; for a library its name and no configuration.
    time_us
        Time, measured or expected; None if nothing is known of it.
    doubt
        One standard deviation of the logarithm of an expected time: 0.08 is 8 %. None for a measured time.
    is_library
        Whether it is a library.
    source
        ``replayed`` for a measured time from a recording; ``cuda`` otherwise.
    """

    kernel: str
    config: Config
    time_us: float | None
    doubt: float | None = None
    is_library: bool = False
    source: str = "cuda"

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {
            "kernel": self.kernel,
            "config": dict(self.config),
            "time_us": self.time_us,
            "doubt": self.doubt,
            "library": self.is_library,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of a result of another problem, or GPU, with what an empty database would serve.

    Attributes
    ----------
    config, base
        Configurations of the result, and of what an empty database would serve.
    base_tier
        How the base was chosen: ``default``, or the tier of a result that ships with autotile.
    ratio, interval
        Expected time of the result over that of the base, and its interval; the upper end is infinite where nothing is
        known.
    tuned_sizes, tuned_on
        Problem and GPU that the result was measured at.
    serves
        Whether the result is served.
    is_nearest
        Whether it is the winner of the nearest tuned problem.
    """

    config: Config
    base: Config
    base_tier: Tier
    ratio: float
    interval: tuple[float, float]
    tuned_sizes: Mapping[str, int]
    tuned_on: str
    serves: bool
    is_nearest: bool = False

    @property
    def text(self) -> str:
        """The expectation as a clause."""
        low, high = self.interval
        if not math.isfinite(high):
            return "its time here cannot be estimated"
        base = f"what an empty database serves ({self.base_tier})"
        return f"it is expected to take {self.ratio:.2f} times as long here as {base}, {low:.2f} to {high:.2f} times"

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object; an interval without an upper end as null."""
        return {
            "config": dict(self.config),
            "base": dict(self.base),
            "base_tier": self.base_tier,
            "ratio": self.ratio,
            "interval": list(self.interval) if math.isfinite(self.interval[1]) else None,
            "tuned_sizes": dict(self.tuned_sizes),
            "tuned_on": self.tuned_on,
            "serves": self.serves,
            "is_nearest": self.is_nearest,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration and its origin.

    Attributes
    ----------
    tier
        ``exact``: tuned for this problem on this GPU; ``family``: by a rule that was learned from other problems of its
        family on this GPU; ``model``: expected to be the fastest way to compute an operation, by a model of times on
        this GPU; ``library``: a library, as nothing is known of the kernels; ``nearest``: tuned for other sizes on this
        GPU; ``transferred``: tuned on another GPU; ``default``: not tuned, see
        `Estimated`.
    measurement, resources
        Time and compiled resources where it was tuned; None if unknown.
    source
        Source of the measurement: ``cuda``, ``replayed``, or empty for the default.
    tuned_on, tuned_at, tuned_sizes
        GPU, time (UTC) and problem of the measurement.
    differences
        Key fields in which the tuned problem differs from the requested one: name, tuned value, requested value.
    shipped
        Whether the result ships with autotile.
    aged
        Components that are newer here than where the result was measured, as text: the driver, NVRTC.
    packed
        Path of the bundle that it is served from and target of its cubin, as text; empty without a bundle.
    rule
        Description of the family's rule; empty if none chose.
    estimated
        Estimates for which a configuration is served in place of the default; None if none is.
    unread
        Reason why the user's database could not be read; empty if it was read or there is none.
    pinned
        File, or other origin, that pins the choice; empty if it is not pinned.
    contenders
        For an operation: the best ways to compute the problem, that which is served first.
    compared
        Comparison by which it is served in place of what an empty database would serve, or the other way round; None if
        there was nothing to compare.
    unapplied
        Description of the newest rule of a family with the problem that is not in force, and the reason; empty if there
        is none, or another rule chose.
    """

    tier: Tier
    config: Config
    measurement: Measurement | None = None
    resources: Resources | None = None
    source: Literal["cuda", "replayed", ""] = ""
    tuned_on: str = ""
    tuned_at: datetime | None = None
    tuned_sizes: Mapping[str, int] | None = None
    differences: tuple[tuple[str, str, str], ...] = ()
    shipped: bool = False
    aged: tuple[str, ...] = ()
    packed: str = ""
    rule: str = ""
    unread: str = ""
    pinned: str = ""
    estimated: Estimated | None = None
    contenders: tuple[Contender, ...] = ()
    compared: Compared | None = None
    unapplied: str = ""
