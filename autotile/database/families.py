"""Families of problems in the database: how far each is tuned, so that a killed run goes on, and its rule."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from autotile.core.device import DeviceProperties
from autotile.core.model import canonical_json
from autotile.database.keys import TuningKey
from autotile.database.schema import FAMILIES, insert_for, now_text
from autotile.database.winners import StoredRule
from autotile.families.family import Family
from autotile.families.rule import FamilyRule

if TYPE_CHECKING:
    from autotile.database.database import Database


@dataclass(frozen=True, slots=True)
class FamilyProgress:
    """How far a family is tuned.

    Attributes
    ----------
    plan
        What is being done, as JSON values: the points, the effort at each. Another plan begins anew.
    tuned, measured
        Points, in the plan's order, that were tuned, and at which the best of all were measured.
    seconds
        Wall time that this took.
    """

    plan: Mapping[str, Any]
    tuned: int = 0
    measured: int = 0
    seconds: float = 0.0


class Families:
    """The families of a database; each method is one transaction.

    Parameters
    ----------
    database
        It is open; what writes needs one that was opened for writing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def progress(self, key: TuningKey, family: Family) -> FamilyProgress | None:
        """How far a family is tuned; None where it was never begun, or is finished."""
        query = select(FAMILIES.c.progress).where(FAMILIES.c.digest == _digest(key, family))
        with self._database.reading() as connection:
            found = connection.execute(query).scalar_one_or_none()
        return FamilyProgress(**found) if found else None

    def save_progress(self, key: TuningKey, family: Family, device: DeviceProperties, progress: FamilyProgress) -> None:
        """Remember how far a family is tuned, so that a killed run can go on; a rule that it has stays in force."""
        row = {
            "digest": _digest(key, family),
            "kernel": key.kernel,
            "dtype": key.dtype,
            "key": key.to_json(),
            "device": device.to_json(),
            "family": family.to_json(),
            "progress": asdict(progress),
        }
        with self._database.writing() as connection:
            insert = insert_for(connection, FAMILIES).values(**row)
            change = {"progress": insert.excluded.progress}
            connection.execute(insert.on_conflict_do_update(index_elements=["digest"], set_=change))

    def save_rule(self, key: TuningKey, device: DeviceProperties, rule: FamilyRule) -> None:
        """Store the rule of a family that was begun, in place of an older one; the family is finished by that."""
        values = {"rule": rule.to_json(), "device": device.to_json(), "progress": None, "learned_at": now_text()}
        change = update(FAMILIES).where(FAMILIES.c.digest == _digest(key, rule.family)).values(**values)
        with self._database.writing() as connection:
            connection.execute(change)

    def rules(self, kernel: str | None = None, dtype: str | None = None) -> list[StoredRule]:
        """Rules of a kernel, or of all, the newest first; one that this version cannot read is left out."""
        query = select(FAMILIES).where(FAMILIES.c.learned_at.is_not(None)).order_by(FAMILIES.c.learned_at.desc())
        for column, value in ((FAMILIES.c.kernel, kernel), (FAMILIES.c.dtype, dtype)):
            query = query.where(column == value) if value is not None else query
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [rule for row in rows if (rule := _rule(row)) is not None]


def _rule(row: Mapping[Any, Any]) -> StoredRule | None:
    try:
        return StoredRule.from_json(row)
    except (KeyError, TypeError, ValueError):
        return None


def _digest(key: TuningKey, family: Family) -> str:
    return hashlib.sha256(canonical_json([key.to_json(), family.to_json()]).encode()).hexdigest()
