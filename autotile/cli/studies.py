"""Columns and JSON entries that several commands share: of a study, of a timed configuration, of a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.core.model import Config, Measurement
    from autotile.core.statistics import Interval
    from autotile.database.keys import TuningKey

STUDY_HEADINGS = ("kernel", "problem", "device")
"""Column headings of `study_columns`."""


def study_columns(key: TuningKey) -> tuple[str, str, str]:
    """Format a study's kernel, problem and device, one for each of `STUDY_HEADINGS`."""
    from autotile.api.listings import key_columns

    return key_columns(key)


def study_document(key: TuningKey) -> dict[str, Any]:
    """Return the entries of a study's key, with the device as an object."""
    return {
        "kernel": key.kernel,
        "problem": dict(key.sizes),
        "dtype": key.dtype,
        "device": {"name": key.gpu_name, "source": key.source},
        "source": key.source,
        "l2": key.l2_mode,
    }


def versioned_document(key: TuningKey) -> dict[str, Any]:
    """Return the entries of a study's key, with the versions of compiler and template that tell studies apart."""
    return {
        "kernel": key.kernel,
        "problem": dict(key.sizes),
        "dtype": key.dtype,
        "device": key.gpu_name,
        "source": key.source,
        "nvrtc_version": key.nvrtc_version,
        "l2": key.l2_mode,
        "template_hash": key.template_hash,
    }


def ratio_document(ratio: Interval | None) -> dict[str, Any] | None:
    """Return a ratio of times with its interval."""
    return {"value": ratio.value, "interval": [ratio.low, ratio.high]} if ratio is not None else None


def timed_config_document(config: Config, measurement: Measurement | None) -> dict[str, Any]:
    """Return a configuration with its time and the 95 % interval of that, in microseconds."""
    return {
        "config": dict(config),
        "time_us": measurement.time_us if measurement is not None else None,
        "interval_us": [measurement.low_us, measurement.high_us] if measurement is not None else None,
    }
