"""Winners and rules: the results that are served, their JSON and the database columns that they are read from.

The database (`autotile.database.fast_access`, `autotile.database.studies`), the files that ship with autotile
(`autotile.exchange.shipped`) and bundles (`autotile.exchange.bundle`) all use the conversions of this module.
It does not import SQLAlchemy, whose import takes longer than the rest of a process's first look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Measurement, Resources
from autotile.database.keys import TuningKey

if TYPE_CHECKING:
    from autotile.families.rule import FamilyRule

RESOURCE_COLUMNS = tuple(field.name for field in fields(Resources))

WINNER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "studies": (*(field.name for field in fields(TuningKey)), "device"),
    "trials": ("config", *RESOURCE_COLUMNS, "time_us", "low_us", "high_us", "l2", "created_at"),
    "runs": ("driver",),
}
"""Columns that `Winner.from_row` reads, by table; no name occurs twice."""

RULE_COLUMNS = ("key", "device", "rule", "learned_at")
"""Columns of the table ``families`` that `StoredRule.from_json` reads."""

CHECK_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "studies": tuple(field.name for field in fields(TuningKey)),
    "trials": ("config_key", "outcome"),
}
"""Columns that `Check.from_row` reads, by table."""

JSON_COLUMNS = frozenset({"options", "sizes", "device", "config", "key", "rule"})
"""Columns of winners and rules that hold JSON."""


def resources_from_row(row: Mapping[Any, Any]) -> Resources | None:
    """Return the resources in a row of the table ``trials``; None if the configuration was not compiled."""
    return None if row["registers"] is None else Resources(**{name: row[name] for name in RESOURCE_COLUMNS})


def measurement_from_row(row: Mapping[Any, Any], samples_us: tuple[float, ...] = ()) -> Measurement | None:
    """Return the measurement in a row of the table ``trials``; None if the configuration was not measured."""
    if row["time_us"] is None:
        return None
    return Measurement(row["time_us"], row["low_us"], row["high_us"], samples_us, row["l2"])


@dataclass(frozen=True, slots=True)
class Winner:
    """The best configuration of one tuned problem.

    Attributes
    ----------
    key
        The key that it was tuned under.
    device
        Properties of the GPU that it was tuned on; None if an imported result does not state them.
    resources
        Resources of the compiled kernel; None if unknown.
    measurement
        Time without its samples; None if unknown.
    tuned_at
        Time of the measurement (UTC).
    shipped
        Whether it ships with autotile rather than having been tuned by the user.
    """

    key: TuningKey
    device: DeviceProperties | None
    config: Config
    resources: Resources | None
    measurement: Measurement | None
    tuned_at: datetime
    shipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json() if self.device else None,
            **self.result_to_json(),
            "shipped": self.shipped,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Winner:
        """Invert `to_json`.

        Raises
        ------
        KeyError, TypeError, ValueError
            ``entry`` is not a winner.
        """
        device = DeviceProperties.from_json(entry["device"]) if entry["device"] else None
        return cls.from_result_json(entry, TuningKey.from_json(entry["key"]), device, shipped=bool(entry["shipped"]))

    def result_to_json(self) -> dict[str, Any]:
        """Return the fields that are specific to one result, without key and device, as a JSON object."""
        return {
            "config": dict(self.config),
            "resources": asdict(self.resources) if self.resources else None,
            "measurement": self.measurement.to_json() if self.measurement else None,
            "tuned_at": self.tuned_at.isoformat(timespec="seconds"),
        }

    @classmethod
    def from_result_json(
        cls, entry: Mapping[str, Any], key: TuningKey, device: DeviceProperties | None, *, shipped: bool
    ) -> Winner:
        """Invert `result_to_json`; other entries are ignored.

        Raises
        ------
        KeyError, TypeError, ValueError
            ``entry`` is not a result.
        """
        resources, measurement = entry["resources"], entry["measurement"]
        return cls(
            key=key,
            device=device,
            config=entry["config"],
            resources=Resources(**resources) if resources else None,
            measurement=_measurement_from_json(measurement) if measurement else None,
            tuned_at=datetime.fromisoformat(entry["tuned_at"]),
            shipped=shipped,
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], device: DeviceProperties | None) -> Winner:
        """Return the winner in a row of the database.

        Parameters
        ----------
        row
            Values of `WINNER_COLUMNS`, those of JSON columns decoded.
        device
            The study's device, decoded by the caller since many rows share it. A study may outlive the driver that it
            was started with, so the driver of the winner's run takes the place of the device's.

        Raises
        ------
        KeyError, TypeError, ValueError
            A value is missing or damaged.
        """
        driver = row["driver"]
        if device is not None and driver and driver != device.driver:
            device = replace(device, driver=driver)
        return cls(
            key=TuningKey.from_json(row),
            device=device,
            config=row["config"],
            resources=resources_from_row(row),
            measurement=measurement_from_row(row),
            tuned_at=datetime.fromisoformat(row["created_at"]),
        )


def _measurement_from_json(entry: Mapping[str, Any]) -> Measurement:
    low_us, high_us = entry["interval_us"]
    return Measurement(entry["time_us"], low_us, high_us, l2=entry["l2"])


@dataclass(frozen=True, slots=True)
class Check:
    """Verdict of finals or of a verification on a configuration that is not ranked for a problem.

    Attributes
    ----------
    key
        Key of the problem.
    config
        `config_key` of the configuration.
    passed
        Whether it was correct.
    """

    key: TuningKey
    config: str
    passed: bool

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Check:
        """Return the verdict in a row of the database, with the values of `CHECK_COLUMNS`.

        Raises
        ------
        KeyError, TypeError, ValueError
            A value is missing or damaged.
        """
        return cls(TuningKey.from_json(row), row["config_key"], row["outcome"] == "ok")


@dataclass(frozen=True, slots=True)
class StoredRule:
    """The rule of a family with the key and device that it was learned on.

    Attributes
    ----------
    key
        Key of the family; its ``sizes`` are empty, since the rule states the family's.
    device
        Properties of the GPU that it was learned on.
    learned_at
        Time at which it was learned (UTC).
    shipped
        Whether it ships with autotile rather than having been learned by the user.
    """

    key: TuningKey
    device: DeviceProperties
    rule: FamilyRule
    learned_at: datetime
    shipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return every field but `shipped` as a JSON object."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json(),
            "rule": self.rule.to_json(),
            "learned_at": self.learned_at.isoformat(),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredRule:
        """Invert `to_json`, or read the same fields from a row of the table ``families``; other entries are ignored.

        Raises
        ------
        KeyError, TypeError, ValueError
            ``entry`` is not a rule.
        """
        from autotile.families.rule import FamilyRule  # most kernels have no rule

        return cls(
            TuningKey.from_json(entry["key"]),
            DeviceProperties.from_json(entry["device"]),
            FamilyRule.from_json(entry["rule"]),
            datetime.fromisoformat(entry["learned_at"]),
        )
