"""Choices: a configuration and its origin, as data, and as a paragraph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources, config_text

Tier = Literal["exact", "family", "model", "library", "nearest", "transferred", "default"]


EPOCH = SimpleNamespace(now=object())
"""The time for which all choices that a process serves stay as they are, to compare what is known of them by: ``now``
becomes another object after a choice may have changed."""


class Estimated(msgspec.Struct, frozen=True):
    """Reason to serve another configuration than the default: how their launches differ, as a clause.

    Both times are estimates, within about a factor of two. A default that cannot run here, or that a search would not
    try here, has none.
    """

    time_us: float
    default_us: float | None
    reason: str


class Contender(msgspec.Struct, frozen=True, gc=False):
    """A kernel in one configuration, or a library without one, with its time for a problem of an operation.

    ``time_us`` is measured or expected; None if nothing is known of it. ``doubt`` is one standard deviation of the
    logarithm of an expected time, 0.08 for 8 %, and None for a measured one. ``source`` is ``replayed`` for a time from
    a recording.
    """

    kernel: str
    config: Config
    time_us: float | None
    doubt: float | None = None
    is_library: bool = False
    source: str = "cuda"

    @property
    def time_text(self) -> str:
        """The time, and how it is known."""
        if self.time_us is None:
            return "not known"
        if self.doubt is None:
            return f"{_digits(self.time_us)} us {'replayed' if self.source == 'replayed' else 'measured'}"
        return f"{_digits(self.time_us)} us expected (+-{100 * self.doubt:.0f} %)"

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values."""
        return {name.removeprefix("is_"): to_document(getattr(self, name)) for name in self.__struct_fields__}


class Compared(msgspec.Struct, frozen=True):
    """Comparison of a result of another problem, or GPU, with what an empty database would serve, the ``base``.

    ``base_tier`` is ``default``, or the tier of a result that ships with autotile. ``ratio`` is the expected time of
    the result over that of the base, in an interval whose upper end is infinite where nothing is known.
    ``tuned_sizes`` and ``tuned_on`` are of the result, ``serves`` tells whether it is served, and ``is_nearest``
    whether it is the winner of the nearest tuned problem.
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
        """Return every field as JSON values; an interval without an upper end as null."""
        document: dict[str, Any] = {name: to_document(getattr(self, name)) for name in self.__struct_fields__}
        return document if math.isfinite(self.interval[1]) else {**document, "interval": None}


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A configuration and its origin.

    ``tier`` is ``exact``: tuned for this problem on this GPU; ``family``: by a rule that was learned from other
    problems of its family on this GPU; ``model``: expected to be the fastest way to compute an operation, by a model of
    times on this GPU; ``library``: a library, as nothing is known of the kernels; ``nearest``: tuned for other sizes on
    this GPU; ``transferred``: tuned on another GPU; or ``default``: not tuned. Of the measurement, ``source`` is
    ``cuda``, ``replayed``, or empty for the default, and ``tuned_on``, ``tuned_at`` (UTC) and ``tuned_sizes`` are the
    GPU, the time and the problem. ``differences`` are the key fields in which that problem differs from the requested
    one: name, tuned value, requested value. ``aged`` are the components that are newer here, the driver and NVRTC.
    Texts are empty, and others None, where there is nothing to say.
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
    """Whether the result ships with autotile."""
    aged: tuple[str, ...] = ()
    packed: str = ""
    """Path of the bundle that it is served from, and target of its cubin."""
    rule: str = ""
    """Description of the family's rule that chose."""
    unread: str = ""
    """Reason why the user's database could not be read."""
    pinned: str = ""
    """File, or other origin, that pins the choice."""
    estimated: Estimated | None = None
    contenders: tuple[Contender, ...] = ()
    """For an operation: the best ways to compute the problem, that which is served first."""
    compared: Compared | None = None
    """Comparison by which it is served in place of what an empty database would serve, or the other way round."""
    unapplied: str = ""
    """Description of the newest rule of a family with the problem that is not in force, and the reason, if none is."""
    awaited: str = ""
    """Kernel and configuration that it stands in for, and what becomes of these."""


_KEY_NAMES = {
    "sizes": "sizes",
    "gpu_name": "GPU",
    "sm_count": "number of SMs",
    "nvrtc_version": "NVRTC version",
    "l2_mode": "L2 mode",
}
"""Names of the key fields in an explanation; a replayed time is stated in a sentence of its own."""


def explain(problem: Problem, device: DeviceProperties, choice: Choice) -> str:
    """Return a short paragraph about a choice."""
    by = choice.contenders[0].kernel if choice.contenders else ""
    served = " ".join(filter(None, ["is served", by, config_text(choice.config)]))
    compared, measured = choice.compared, choice.measurement
    sentences = [f"{problem} on {device.name} {served}.", _reason(choice)]
    if compared is not None and choice.tier != "family":
        if compared.serves:
            sentences.append(f"By the measurements there, {compared.text}.")
        else:
            where = f"{config_text(compared.tuned_sizes)} on {compared.tuned_on}"
            sentences.append(f"The result for {where} is not served: {compared.text}, so it is not surely faster.")
    sentences.append(choice.unapplied)
    if measured is not None:
        took = "It took" if choice.tier == "exact" else "There it took"
        if choice.tier == "family" and choice.tuned_sizes is not None:
            took = f"At {config_text(choice.tuned_sizes)}, the nearest problem where it was timed, it took"
        interval = f"{_digits(measured.low_us)} to {_digits(measured.high_us)}"
        when = ""
        if choice.tuned_at is not None:
            days = (datetime.now(UTC) - choice.tuned_at).days
            age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
            ahead = f", on {choice.tuned_at:%Y-%m-%d} by a clock ahead of this one"
            when = f" when tuned{ahead}" if days < -1 else f" when tuned {age}"
        state = "launched one by one by the host" if measured.l2 == "eager" else f"{measured.l2} L2"
        sentences.append(f"{took} {_digits(measured.time_us)} us (95 % interval {interval}, {state}){when}.")
    if choice.aged:
        sentences.append(
            f"It has aged ({'; '.join(choice.aged)}); `autotile verify {problem.kernel}` measures it again."
        )
    if choice.packed:
        sentences.append(f"It comes from the bundle {choice.packed}.")
    if choice.pinned and measured is not None:
        sentences.append(f"It computes the same bits as the configuration that {choice.pinned} pins.")
    if choice.shipped:
        sentences.append("The result came with autotile; tuning here may find a better one.")
    if choice.source == "replayed":
        sentences.append("The time was replayed from a recording, not measured on this machine.")
    if len(choice.contenders) > 1:
        rivals = (f"{one.kernel} {one.time_text}" for one in choice.contenders)
        sentences.append(f"Compared were: {'; '.join(rivals)}.")
    if choice.awaited:
        sentences.append(f"It stands in for {choice.awaited}.")
    if choice.unread:
        sentences.append(f"Your own results could not be read: {choice.unread}.")
    return " ".join(filter(None, sentences))


def _reason(choice: Choice) -> str:
    tier, compared, estimated = choice.tier, choice.compared, choice.estimated
    if choice.pinned and choice.measurement is None:
        return f"It is pinned by {choice.pinned}, where its tier was {tier}."
    if tier == "exact":
        return "It was tuned for exactly this problem on this GPU."
    if tier == "model":
        where = f"{choice.tuned_on}, which has the same SMs," if choice.tuned_on else "this GPU"
        if not choice.config:
            return f"By a model of the times that were measured on {where}, no kernel is faster than it for sure."
        return f"A model of the times that were measured on {where} expects it to be the fastest."
    if tier == "library":
        return "Nothing that is known here is faster than this library; `autotile tune` may find a kernel that is."
    if tier == "family":
        return f"A rule chose it for the family {choice.rule}. Rules and limits hold here too."
    if tier == "default":
        nothing = "Nothing is tuned for it" if compared is not None else "Nothing is tuned that may be served for it"
        if estimated is None:
            return f"{nothing}, so this is the default configuration; run `autotile tune`."
        time_us = f"about {_rough(estimated.time_us)} us, estimated, not measured"
        if estimated.default_us is None:
            return f"{nothing}, and the default does not suit it: {time_us}; run `autotile tune`."
        return (
            f"{nothing}. It is estimated to be faster than the default: {time_us}, and "
            f"{_rough(estimated.default_us)} us the default, each within about a factor of two ({estimated.reason}); "
            "run `autotile tune`."
        )
    differences = "; ".join(
        f"{_KEY_NAMES[name]} {tuned} instead of {requested}"
        for name, tuned, requested in choice.differences
        if name in _KEY_NAMES
    )
    if not differences:
        return "It was tuned from a recording of this GPU, not on the GPU itself."
    how = "was tuned elsewhere"
    if tier == "nearest":
        is_nearest = compared is None or compared.is_nearest
        how = "is the nearest that was tuned on this GPU" if is_nearest else "was among the fastest at other sizes"
    return f"It {how}: {differences}. Rules and limits hold here too."


def _digits(time_us: float) -> str:
    """Format a time with four significant digits, all integer digits, and no exponent."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _rough(time_us: float) -> str:
    """Format an estimated time with two significant digits and no exponent."""
    return f"{float(f'{time_us:.2g}'):g}"


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
