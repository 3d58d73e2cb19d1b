"""Choices: a configuration and its origin, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources, config_text
from autotile.errors import InputError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotile.serving.bound import BoundKernel

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


_NAMES = {
    "sizes": "sizes",
    "gpu_name": "GPU",
    "sm_count": "number of SMs",
    "nvrtc_version": "NVRTC version",
    "l2_mode": "L2 mode",
}
"""Names of the key fields in an explanation; a replayed time is stated in a sentence of its own."""


_REASONS = {
    "exact": "It was tuned for exactly this problem on this GPU.",
    "model": "A model of the times that were measured on this GPU expects it to be the fastest.",
    "library": "Nothing that is known here is faster than this library; `autotile tune` may find a kernel that is.",
}


def explain(problem: Problem, device: DeviceProperties, choice: Choice) -> str:
    """Return a short paragraph about a choice."""
    by = choice.contenders[0].kernel if choice.contenders else ""
    served = " ".join(filter(None, ["is served", by, config_text(choice.config)]))
    sentences = [f"{problem} on {device.name} {served}.", _reason(choice)]
    if choice.compared is not None and choice.tier != "family":
        sentences.append(_comparison(choice.compared))
    if choice.unapplied:
        sentences.append(choice.unapplied)
    if choice.measurement is not None:
        time = choice.measurement
        took = "It took" if choice.tier == "exact" else _where(choice)
        interval = f"{_digits(time.low_us)} to {_digits(time.high_us)}"
        sentences.append(
            f"{took} {_digits(time.time_us)} us (95 % interval {interval}, {time.l2} L2){_when(choice.tuned_at)}."
        )
    if choice.aged:
        sentences.append(
            f"It has aged ({'; '.join(choice.aged)}); `autotile verify {problem.kernel}` measures it again."
        )
    if choice.packed:
        sentences.append(f"It comes from the bundle {choice.packed}.")
    if choice.pinned and choice.measurement is not None:
        sentences.append(f"It computes the same bits as the configuration that {choice.pinned} pins.")
    if choice.shipped:
        sentences.append("The result came with autotile; tuning here may find a better one.")
    if choice.source == "replayed":
        sentences.append("The time was replayed from a recording, not measured on this machine.")
    if len(choice.contenders) > 1:
        rivals = (f"{one.kernel} {time_text(one)}" for one in choice.contenders)
        sentences.append(f"Compared were: {'; '.join(rivals)}.")
    if choice.unread:
        sentences.append(f"Your own results could not be read: {choice.unread}.")
    return " ".join(sentences)


def _reason(choice: Choice) -> str:
    if choice.pinned and choice.measurement is None:
        return f"It is pinned by {choice.pinned}, where its tier was {choice.tier}."
    if choice.tier in _REASONS:
        return _REASONS[choice.tier]
    if choice.tier == "default":
        return _untuned(choice)
    named = [(_NAMES[name], tuned, requested) for name, tuned, requested in choice.differences if name in _NAMES]
    differences = "; ".join(f"{name} {tuned} instead of {requested}" for name, tuned, requested in named)
    if choice.tier == "family":
        return f"A rule chose it for the family {choice.rule}. Rules and limits hold here too."
    if not differences:
        return "It was tuned from a recording of this GPU, not on the GPU itself."
    how = "was tuned elsewhere"
    if choice.tier == "nearest":
        is_nearest = choice.compared is None or choice.compared.is_nearest
        how = "is the nearest that was tuned on this GPU" if is_nearest else "was among the fastest at other sizes"
    return f"It {how}: {differences}. Rules and limits hold here too."


def _untuned(choice: Choice) -> str:
    estimated = choice.estimated
    nothing = "Nothing is tuned for it" if choice.compared is not None else "Nothing is tuned that may be served for it"
    if estimated is None:
        return f"{nothing}, so this is the default configuration; run `autotile tune`."
    time_us = f"about {_rough(estimated.time_us)} us, estimated, not measured"
    if estimated.default_us is None:
        return f"{nothing}, and the default does not suit it: {time_us}; run `autotile tune`."
    return (
        f"{nothing}. It is estimated to be faster than the default: {time_us}, and {_rough(estimated.default_us)} us "
        f"the default, each within about a factor of two ({estimated.reason}); run `autotile tune`."
    )


def _comparison(compared: Compared) -> str:
    """Return why a result is served in place of what an empty database would serve, or is not."""
    if compared.serves:
        return f"By the measurements there, {compared.text}."
    sizes = " ".join(f"{name}={value}" for name, value in compared.tuned_sizes.items())
    return f"The result for {sizes} on {compared.tuned_on} is not served: {compared.text}, so it is not surely faster."


def _where(choice: Choice) -> str:
    if choice.tier != "family" or choice.tuned_sizes is None:
        return "There it took"
    sizes = " ".join(f"{name}={value}" for name, value in choice.tuned_sizes.items())
    return f"At {sizes}, the nearest problem where it was timed, it took"


def time_text(contender: Contender) -> str:
    """Return the time of a contender, and how it is known."""
    if contender.time_us is None:
        return "not known"
    if contender.doubt is None:
        return f"{_digits(contender.time_us)} us {'replayed' if contender.source == 'replayed' else 'measured'}"
    return f"{_digits(contender.time_us)} us expected (+-{100 * contender.doubt:.0f} %)"


def _digits(time_us: float) -> str:
    """Format a time with four significant digits, all integer digits, and no exponent."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _rough(time_us: float) -> str:
    """Format an estimated time with two significant digits and no exponent."""
    return f"{float(f'{time_us:.2g}'):g}"


def _when(tuned_at: datetime | None) -> str:
    if tuned_at is None:
        return ""
    days = (datetime.now(UTC) - tuned_at).days
    if days < -1:
        return f" when tuned, on {tuned_at:%Y-%m-%d} by a clock ahead of this one"
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return f" when tuned {age}"


def document(kernel: BoundKernel) -> dict[str, Any]:
    """Return all facts about a served kernel as JSON values; compile it if its resources are not known."""
    measurement, choice, device = kernel.measurement, kernel.choice, kernel.device
    geometry = kernel.geometry if kernel.resources is not None else None  # a library has neither
    return {
        "kernel": kernel.kernel,
        "problem": dict(kernel.problem.sizes),
        "dtype": kernel.problem.dtype,
        "tier": kernel.tier,
        "config": dict(kernel.config),
        "time_us": measurement.time_us if measurement else None,
        "interval_us": [measurement.low_us, measurement.high_us] if measurement else None,
        "device": device.identity,
        "source": kernel.source,
        "tuned_on": kernel.tuned_on,
        "tuned_at": kernel.tuned_at.isoformat() if kernel.tuned_at else None,
        "contenders": [contender.to_json() for contender in kernel.contenders],
        "differences": [list(difference) for difference in choice.differences],
        "aged": list(choice.aged),
        "shipped": choice.shipped,
        "bundle": choice.packed or None,
        "pinned": choice.pinned or None,
        "estimated": choice.estimated.to_json() if choice.estimated is not None else None,
        "resources": resources_document(kernel.resources, geometry, kernel.occupancy),
        "explain": kernel.explain(),
        **({"compared": choice.compared.to_json()} if choice.compared is not None else {}),
        **({"unapplied": choice.unapplied} if choice.unapplied else {}),
    }


def html(kernel: BoundKernel) -> str:
    """Return the served configuration and the reason, as HTML for a notebook; nothing is compiled."""
    from autotile.core.text import Facts, html_of

    facts: Facts = [("tier", kernel.tier)]
    facts += [(name, str(value)) for name, value in kernel.config.items()]
    if kernel.config:
        geometry = kernel.geometry
        grid, block = (" x ".join(map(str, extent)) for extent in (geometry.grid, geometry.block))
        facts.append(("launch", f"{grid} blocks of {block} threads, {geometry.dynamic_smem_bytes:,} B dynamic smem"))
    facts.append(("reason", kernel.explain()))
    return html_of(f"{kernel.kernel}: {kernel.problem} on {kernel.device.name}", [facts])


def limits_figure(kernel: BoundKernel, *, dark: bool | None) -> go.Figure:
    """Return a Plotly figure of the number of blocks that each resource of an SM allows; see `BoundKernel.plot_limits`.

    Raises
    ------
    InputError
        The occupancy is not known: the kernel cannot be compiled, or is a library.
    ToolchainError
        Plotly is not installed.
    """
    from autotile.report.space_charts import block_limits_chart
    from autotile.report.theme import figure_of

    if kernel.occupancy is None:
        raise InputError(f"the occupancy of {kernel!r} is not known: it was not compiled, or is a library")
    return figure_of(block_limits_chart(kernel.device, kernel.occupancy), dark=dark)


def resources_document(
    resources: Resources | None, geometry: LaunchGeometry | None, occupancy: Occupancy | None
) -> dict[str, Any] | None:
    """Return the demands of a configuration and its resident blocks for JSON; None if not known."""
    if resources is None or geometry is None:
        return None
    return {
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "static_smem_bytes": resources.static_smem_bytes,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
        "threads": geometry.threads,
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy is not None else None,
        "occupancy": occupancy.occupancy if occupancy is not None else None,
        "limited_by": list(occupancy.limited_by) if occupancy is not None else None,
    }
