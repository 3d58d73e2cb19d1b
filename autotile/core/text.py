"""Figures as text: units, thousands separators, significant digits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome

NOTHING = "-"
"""Stands where there is no value."""


def time_text(time_us: float | None) -> str:
    """Microseconds with four significant digits or more: ``4,790 us``, ``12.35 us``."""
    return NOTHING if time_us is None else f"{_digits(time_us)} us"


def interval_text(low_us: float, high_us: float) -> str:
    """A 95 % interval in microseconds: ``4,788 to 4,795``."""
    return f"{_digits(low_us)} to {_digits(high_us)}"


def energy_text(energy_mj: float) -> str:
    """Millijoules with four significant digits or more: ``1,250 mJ``, ``0.125 mJ``."""
    return f"{_digits(energy_mj)} mJ"


def bytes_text(count: float) -> str:
    """Bytes in the largest binary unit of which there is at least one: ``228 KiB``, ``141 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:,.0f} B"


def percent_text(share: float) -> str:
    """A share of 1 in percent: ``42.9 %``."""
    return f"{100 * share:.1f} %"


def duration_text(seconds: float) -> str:
    """Wall time: ``3.7 ms``, ``54 ms``, ``6.67 s``, ``21.3 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if seconds < 0.1:
        milliseconds = 1e3 * seconds
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def moment_text(moment: datetime | None) -> str:
    """Local date and time to the minute."""
    return NOTHING if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M}"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Problem sizes as they are typed: ``M=4096 N=4096``."""
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def device_text(device: DeviceProperties) -> str:
    """A device's name, and where its figures come from unless that is the device itself."""
    return device.name if device.source == "cuda" else f"{device.name} ({device.source})"


def source_text(name: str, source: str) -> str:
    """A device's name, marked where the times are replayed."""
    return f"{name} (replayed)" if source == "replayed" else name


def plural(count: int, singular: str, several: str = "") -> str:
    """A count with its noun: ``1 trial``, ``1,200 trials``."""
    return f"{count:,} {singular if count == 1 else several or singular + 's'}"


def _digits(value: float) -> str:
    """Four significant digits, more in front of the point where there are more."""
    if value >= 1000:
        return f"{value:,.0f}"
    decimals = 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{decimals}f}"


def funnel_text(gates: Mapping[str, int], outcomes: Mapping[Outcome, int]) -> str:
    """``8,294,400 combinations -> 24,906 valid -> 200 tried: 180 ok, 12 pruned``."""
    tried = sum(outcomes.values())
    left = f"{gates['combinations']:,} combinations -> {gates['limits']:,} valid -> {tried:,} tried"
    return f"{left}: {outcomes_text(outcomes)}" if tried else left


def outcomes_text(outcomes: Mapping[Outcome, int]) -> str:
    """``180 ok, 12 pruned, 8 compile_failed``, in the order of the pipeline, without those that did not occur."""
    return ", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in Outcome if outcomes.get(outcome))
