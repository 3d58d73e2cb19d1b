"""Choices: a configuration and its origin, as data and as a paragraph, and the code that they are of."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.forks import cached_property
from autotile.core.model import Config, Measurement, Problem, Resources, config_key, config_text
from autotile.core.text import interval_text, short_text, time_text
from autotile.kernel.launch import LaunchData, LaunchPlan, problem_scalars
from autotile.kernel.library import Kernel
from autotile.settings import read_settings

if TYPE_CHECKING:
    from autotile.cuda.compiler import CachedCubin
    from autotile.cuda.function import PackedCubin
    from autotile.exchange.bundle import Bundle
    from autotile.kernel.operation import Library

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

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
            return f"{time_text(self.time_us)} {'replayed' if self.source == 'replayed' else 'measured'}"
        return f"{time_text(self.time_us)} expected (+-{100 * self.doubt:.0f} %)"

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


class RecentCache(dict[Key, Value]):
    """The entries that were used last, up to a limit, read with `dict.get`.

    An order of use would cost time at each hit. Instead there are two generations: this dictionary, and the one that it
    was when it last became full. An entry of the older generation that is asked for moves into this one; the others are
    dropped when this one is full again.
    """

    __slots__ = ("_full", "_lock", "_older")  # without a dictionary of attributes, `get` is found as fast as in a dict

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._full = limit // 2
        self._older: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def recall(self, key: Key, new: Value | None = None) -> Value | None:
        """Return an entry of either generation, after `get` has found nothing; else add one, unless it is None."""
        with self._lock:
            found = self.get(key)
            if found is None and (found := self._older.pop(key, new)) is not None:
                if len(self) >= self._full:
                    self._older = dict(self)
                    super().clear()
                self[key] = found
            return found

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry unless the key has one, and return the entry: concurrent callers get the same object."""
        found = self.recall(key, value)
        return value if found is None else found

    def set_aside(self) -> None:
        """Leave all entries to `recall`, as those of the older generation."""
        with self._lock:
            self._older |= self
            super().clear()

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            super().clear()
            self._older = {}


class KernelCode:
    """A kernel in a configuration, for its problem, which is ``asked`` for by the kernel's own names.

    ``packed`` is the cubin in the bundle that it is served from; None if it is compiled or cached on this machine.
    """

    library = None

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        device: DeviceProperties,
        config: Config,
        *,
        packed: PackedCubin | None = None,
    ) -> None:
        self.name, self.definition, self.problem, self.asked = kernel.name, kernel, problem, problem
        self.packed = packed
        self._device, self.config = device, config

    @cached_property
    def plan(self) -> tuple[LaunchPlan, Mapping[str, Any], LaunchData]:
        """Launches of a call, the scalars that the problem determines, and workspaces and tensor maps.

        That the value of a scalar, computed from the problem sizes, does not fit in its type is an `ArgumentError`.
        """
        spec, problem = self.definition.spec, self.problem
        of = spec, self.config, problem, self._device
        return LaunchPlan.of(*of), problem_scalars(spec, problem, check=False), LaunchData.of(*of)

    @property
    def cubin(self) -> CachedCubin:
        """The cubin, compiled or found in the cache."""
        return self._find_cubin(may_compile=True)  # type: ignore[return-value] # compiled, it is there

    def needs_compiler(self, *, looks: bool = True) -> bool:
        """Return True if neither a bundle nor this process nor, as far as it was looked for, the cache holds a cubin.

        The cache is looked at once in a process, and not at all unless it ``looks``: a call must not wait for files.
        """
        key = self.key
        if self.find_packed() is not None or _cubins.get(key) or _cubins.recall(key):
            return False
        if not looks or _absent.get(key):
            return True
        if self._find_cubin(may_compile=False) is not None:
            return False
        _absent.keep(key, True)
        return True

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that the code depends on: it is the same for many problems, as few kernels have sizes compiled in."""
        kernel, problem = self.definition, self.problem
        compiled_in = tuple([problem.sizes[name] for name in kernel.spec.compiled_names])
        target = problem.dtype, self._device.architecture
        return kernel.template_path, kernel.source_hash, target, tuple(self.config.items()), compiled_in

    def find_packed(self) -> PackedCubin | None:
        """Return the cubin in the bundle that it is served from, else in that of the setting, if it is of this source.

        That the bundle of the setting is damaged is a `BundleError`.
        """
        path = read_settings().bundle
        if self.packed is None and path is not None:
            from autotile.exchange.bundle import Bundle

            bundle = _bundles.get(path) or _bundles.setdefault(path, Bundle(path))
            if self.name in bundle.kernels and (held := bundle.kernel(self.name)).kernel.has_source_of(self.definition):
                cubin = held.cubins_for(self.problem, self._device.compute_capability).get(config_key(self.config))
                self.packed = bundle.packed(cubin) if cubin is not None else None
        return self.packed

    def _find_cubin(self, *, may_compile: bool) -> CachedCubin | None:
        known = _cubins.recall(self.key)
        if known is None or not known.path.exists():  # it may have been trimmed from the cache
            from autotile.cuda.compiler import CubinCache, check_signatures, compile_cubin, compile_job

            settings, problem = read_settings(), self.problem
            job = compile_job(self.definition, self.config, problem, self._device.architecture)
            cache = CubinCache(settings.cache, settings.cache_limit_bytes)
            known = cache.get(job.key)
            if known is None and may_compile:
                known = cache.put(job.key, compile_cubin(job))
            if known is not None:
                check_signatures(self.definition, problem.dtype, known)
                _cubins.keep(self.key, known)
        return known


class LibraryCode:
    """A library for a problem of an operation; a kernel of it declares the arrays, and ``sizes`` are by its names."""

    def __init__(self, library: Library, asked: Problem, definition: Kernel, sizes: Mapping[str, int]) -> None:
        self.name, self.library, self.asked, self.definition = library.name, library, asked, definition
        self._sizes = sizes

    @cached_property
    def problem(self) -> Problem:
        """The problem by the names of the kernel, made at the first call rather than within a look-up."""
        return Problem(self.definition.name, {**self.definition.spec.sizes, **self._sizes}, self.asked.dtype)


Code = KernelCode | LibraryCode

MAX_CUBINS = 512
_cubins: RecentCache[tuple[object, ...], CachedCubin] = RecentCache(MAX_CUBINS)
"""Cubins that this process has used."""
_bundles: dict[Path, Bundle] = {}
"""Those of the setting."""
_absent: RecentCache[tuple[object, ...], bool] = RecentCache(16 * MAX_CUBINS)
"""Those that the cache did not hold when it was looked at."""


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
        when = ""
        if choice.tuned_at is not None:
            days = (datetime.now(UTC) - choice.tuned_at).days
            age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
            ahead = f", on {choice.tuned_at:%Y-%m-%d} by a clock ahead of this one"
            when = f" when tuned{ahead}" if days < -1 else f" when tuned {age}"
        state = "launched one by one by the host" if measured.l2 == "eager" else f"{measured.l2} L2"
        interval = f"95 % interval {interval_text(measured)}"
        sentences.append(f"{took} {time_text(measured.time_us)} ({interval}, {state}){when}.")
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
        time_us = f"about {short_text(estimated.time_us, 2)} us, estimated, not measured"
        if estimated.default_us is None:
            return f"{nothing}, and the default does not suit it: {time_us}; run `autotile tune`."
        return (
            f"{nothing}. It is estimated to be faster than the default: {time_us}, and "
            f"{short_text(estimated.default_us, 2)} us the default, each within about a factor of two "
            f"({estimated.reason}); run `autotile tune`."
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
