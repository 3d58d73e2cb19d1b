"""Winners and rules: the results that are served, their JSON and the database columns that they are read from.

The database (`autotile.database.queries`, `autotile.database.studies`), the files that ship with autotile
(`autotile.exchange.shipped`) and bundles (`autotile.exchange.bundle`) all use the conversions of this module.
It does not import SQLAlchemy, whose import takes longer than the rest of a process's first look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import Moment, NonNegative, Text, TimeUs, convert
from autotile.core.model import Config, L2Mode, Measurement, Resources
from autotile.database.keys import TuningKey
from autotile.errors import DataError

if TYPE_CHECKING:
    from autotile.families.rule import FamilyRule

MEASUREMENT_COLUMNS = ("time_us", "low_us", "high_us", "l2")
RESOURCE_COLUMNS = tuple(field.name for field in fields(Resources))

WINNER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "studies": (*(field.name for field in fields(TuningKey)), "device"),
    "trials": ("config", *RESOURCE_COLUMNS, "time_us", "low_us", "high_us", "l2", "created_at"),
    "runs": ("driver", "sampler"),
}
"""Columns that `Winner.from_row` reads, by table; no name occurs twice."""

RULE_COLUMNS = ("id", "key", "device", "rule", "learned_at")
"""Columns of the table ``families`` that `RuleDocument` has, and the row's id."""

CHECK_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "studies": tuple(field.name for field in fields(TuningKey)),
    "trials": ("id", "config_key", "outcome"),
}
"""Columns that `Check.from_row` reads, by table."""

JSON_COLUMNS = frozenset({"options", "sizes", "device", "config", "key", "rule", "telemetry"})
"""Columns of winners, rules and digests that hold JSON."""


UNVERIFIED_SAMPLER = "sweep"
"""Sampler of the runs in which earlier versions measured a family of an operation. Their configurations were verified
at the measured sizes only, not at ragged ones, so that they are not served; the family measures them again."""


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
    tuned_at: Moment
    shipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json() if self.device else None,
            **self.result_to_json(),
            "shipped": self.shipped,
        }

    def result_to_json(self) -> dict[str, Any]:
        """Return the fields that are specific to one result, without key and device, as a JSON object."""
        return {
            "config": dict(self.config),
            "resources": asdict(self.resources) if self.resources else None,
            "measurement": self.measurement.to_json() if self.measurement else None,
            "tuned_at": self.tuned_at.isoformat(timespec="seconds"),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], device: DeviceProperties | None) -> Winner:
        """Return the winner in a row of the database.

        Parameters
        ----------
        row
            Values of `WINNER_COLUMNS`, those of JSON columns decoded by `autotile.core.documents.json_cell`.
        device
            The study's device, decoded by the caller since many rows share it. A study may outlive the driver that it
            was started with, so the driver of the winner's run takes the place of the device's.

        Raises
        ------
        DataError
            A value does not match the schema, or it is a configuration of a run of `UNVERIFIED_SAMPLER`.
        """
        if row.get("sampler") == UNVERIFIED_SAMPLER and row["config"]:
            raise DataError("the configuration was not verified at ragged sizes", field="sampler")
        driver = convert(row["driver"], str)
        if device is not None and driver and driver != device.driver:
            device = replace(device, driver=driver)
        parts = {
            "config": row["config"],
            "tuned_at": row["created_at"],
            "resources": part_of(row, RESOURCE_COLUMNS),
            "measurement": part_of(row, MEASUREMENT_COLUMNS),
        }
        return replace(convert({"key": row, "device": None, **parts}, cls), device=device)


def part_of(row: Mapping[str, Any], columns: Iterable[str]) -> Mapping[str, Any] | None:
    """Return a row if one of some columns, whose names are those of the fields, is not null, else None."""
    return row if any(row[name] is not None for name in columns) else None


class MeasurementDocument(msgspec.Struct):
    """JSON of a measurement."""

    time_us: TimeUs
    interval_us: tuple[NonNegative, NonNegative]
    l2: L2Mode


class ResultDocument(msgspec.Struct):
    """JSON of `Winner.result_to_json`."""

    config: Config
    resources: Resources | None
    measurement: MeasurementDocument | None
    tuned_at: Moment

    def winner_of(self, key: TuningKey, device: DeviceProperties | None, *, shipped: bool) -> Winner:
        """Return the winner with this result."""
        found = self.measurement
        measurement = Measurement(found.time_us, *found.interval_us, l2=found.l2) if found is not None else None
        return Winner(key, device, self.config, self.resources, measurement, self.tuned_at, shipped)


class WinnerDocument(ResultDocument):
    """JSON of `Winner.to_json`."""

    key: TuningKey
    device: DeviceProperties | None
    shipped: bool

    def winner(self) -> Winner:
        """Return the winner."""
        return self.winner_of(self.key, self.device, shipped=self.shipped)


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
    config: Text
    passed: bool

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Check:
        """Return the verdict in a row of the database, with the values of `CHECK_COLUMNS`.

        Raises
        ------
        DataError
            A value does not match the schema.
        """
        return convert({"key": row, "config": row["config_key"], "passed": row["outcome"] == "ok"}, cls)


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
    learned_at: Moment
    shipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return every field but `shipped` as a JSON object."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json(),
            "rule": self.rule.to_json(),
            "learned_at": self.learned_at.isoformat(),
        }


class RuleDocument(msgspec.Struct):
    """JSON of `StoredRule.to_json`, or columns of a row of the table ``families``."""

    key: TuningKey
    device: DeviceProperties
    rule: Any
    learned_at: Moment

    def stored_rule(self) -> StoredRule:
        """Return the rule.

        Raises
        ------
        DataError
            ``rule`` does not match the schema of rules.
        """
        from autotile.families.rule import FamilyRule  # most kernels have no rule

        try:
            rule = FamilyRule.from_json(self.rule)
        except DataError as error:
            raise DataError(error.fault, field=".".join(filter(None, ["rule", error.field]))) from None
        return StoredRule(self.key, self.device, rule, self.learned_at)
