"""Rules of families with what they belong to, as dispatch needs them; the SQL behind them is in ``families``.

A file of rules is JSON, and files of this kind come with autotile, so that its own kernels are served well at any size:
``GPU.KERNEL.json``, so that a kernel's rules are found without reading the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from autotile.ground.errors import InputError
from autotile.ground.frozen import dataclass
from autotile.ground.hardware import DeviceProperties
from autotile.ground.rule import FamilyRule
from autotile.store.keys import TuningKey
from autotile.store.shipped_file import read_document
from autotile.store.whole_file import whole_file

_FORMAT = 1


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
    shipped
        Whether it came with autotile and was not learned by the user.
    """

    key: TuningKey
    device: DeviceProperties
    rule: FamilyRule
    learned_at: datetime
    shipped: bool = False

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


def shipped_rules(files: Iterable[Path], kernel: str, dtype: str) -> list[StoredRule]:
    """Rules of a kernel that come with autotile, of every GPU.

    Parameters
    ----------
    files
        As `autotile.store.shipped_file.rule_files` finds them.

    Raises
    ------
    InputError
        One of the files is damaged.
    """
    found = (rule for path in files for rule in read_rules_file(path))
    return [replace(rule, shipped=True) for rule in found if (rule.key.kernel, rule.key.dtype) == (kernel, dtype)]


@lru_cache
def read_rules_file(path: Path) -> tuple[StoredRule, ...]:
    """Read a file of rules, once a process.

    Raises
    ------
    InputError
        It cannot be read, is damaged, or was written by a newer autotile.
    """

    def rules(document: Any) -> tuple[StoredRule, ...]:
        return tuple(StoredRule.from_json(entry) for entry in document["rules"])

    return read_document(path, "rules", _FORMAT, rules)


def write_rules_file(path: Path, rules: Iterable[StoredRule]) -> int:
    """Write a file of rules, and return how many.

    Raises
    ------
    InputError
        It cannot be written.
    """
    entries = [rule.to_json() for rule in rules]
    try:
        with whole_file(path) as stream:
            stream.write((json.dumps({"format": _FORMAT, "rules": entries}, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write the rules to {path}: {error.strerror}") from None
    return len(entries)
