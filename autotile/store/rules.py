"""Rules of families with what they belong to, as dispatch needs them; the SQL behind them is in ``families``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autotile.ground.hardware import DeviceProperties
from autotile.ground.rule import FamilyRule
from autotile.store.keys import TuningKey


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule that was learned.

    Attributes
    ----------
    key
        What it was learned for; its ``sizes`` are empty, the rule's family stands for them.
    device
        Properties of the GPU that it was learned on.
    learned_at
        When (UTC).
    """

    key: TuningKey
    device: DeviceProperties
    rule: FamilyRule
    learned_at: datetime

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of everything."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json(),
            "rule": self.rule.to_json(),
            "learned_at": self.learned_at.isoformat(),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredRule:
        """Inverse of `to_json`; other entries are passed over.

        Raises
        ------
        KeyError, TypeError, ValueError
            The entry is none.
        """
        return cls(
            TuningKey.from_json(entry["key"]),
            DeviceProperties.from_json(entry["device"]),
            FamilyRule.from_json(entry["rule"]),
            datetime.fromisoformat(entry["learned_at"]),
        )
