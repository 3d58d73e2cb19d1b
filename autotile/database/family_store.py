"""Families of problems in the database: the state of their tuning, and their rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, delete, select

from autotile.core.device import DeviceProperties
from autotile.core.documents import canonical_json
from autotile.database.keys import TuningKey
from autotile.database.schema import FAMILIES, insert_for, now_text
from autotile.database.winners import RULE_COLUMNS, StoredRule
from autotile.families.family import Family
from autotile.families.rule import FamilyRule

if TYPE_CHECKING:
    from autotile.database.database import Database


@dataclass(frozen=True, slots=True)
class FamilyState:
    """State of a family whose tuning has not finished, from which a killed run is resumed.

    Attributes
    ----------
    plan
        The points and the effort at each, as JSON values. A run with another plan starts over.
    tuned, measured
        Number of points, in the plan's order, that were tuned, and at which the best configurations of all points were
        measured.
    seconds
        Wall time spent.
    """

    plan: Mapping[str, Any]
    tuned: int = 0
    measured: int = 0
    seconds: float = 0.0


class FamilyStore:
    """Access to the families of a database; each method is one transaction.

    Parameters
    ----------
    database
        An open database; methods that write need one that was opened for writing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def state(self, key: TuningKey, family: Family) -> FamilyState | None:
        """Return the state of a family; None if its tuning never started, or has finished."""
        query = select(FAMILIES.c.progress).where(FAMILIES.c.digest == _digest(key, family))
        with self._database.reading() as connection:
            found = connection.execute(query).scalar_one_or_none()
        return FamilyState(**found) if found else None

    def save_state(self, key: TuningKey, family: Family, device: DeviceProperties, state: FamilyState) -> None:
        """Store the state of a family; a rule that the family already has remains in effect."""
        row = {
            "digest": _digest(key, family),
            "kernel": key.kernel,
            "dtype": key.dtype,
            "key": key.to_json(),
            "device": device.to_json(),
            "family": family.to_json(),
            "progress": asdict(state),
        }
        with self._database.writing() as connection:
            insert = insert_for(connection, FAMILIES).values(**row)
            change = {"progress": insert.excluded.progress}
            connection.execute(insert.on_conflict_do_update(index_elements=["digest"], set_=change))

    def save_rule(self, key: TuningKey, device: DeviceProperties, rule: FamilyRule) -> None:
        """Store the rule of a family that has a state, replacing an older rule, and clear the state."""
        values = {"rule": rule.to_json(), "device": device.to_json(), "progress": None, "learned_at": now_text()}
        with self._database.writing() as connection:
            replace_family(connection, _digest(key, rule.family), values)

    def rules(self, kernel: str | None = None, dtype: str | None = None) -> list[StoredRule]:
        """Return the rules of a kernel, or of all, newest first; rules that this version cannot read are skipped."""
        with self._database.reading() as connection:
            rows = connection.execute(rules_query(kernel, dtype)).mappings().all()
        return [rule for row in rows if (rule := _rule(row)) is not None]


def replace_family(connection: Connection, digest: str, changes: Mapping[str, Any]) -> None:
    """Replace the row of a family by a changed one with a new id, so that its rule is the newest, if there is one."""
    row = connection.execute(select(FAMILIES).where(FAMILIES.c.digest == digest)).mappings().one_or_none()
    if row is None:
        return
    connection.execute(delete(FAMILIES).where(FAMILIES.c.id == row["id"]))
    kept = {name: value for name, value in row.items() if name != "id"}
    connection.execute(FAMILIES.insert(), kept | dict(changes))


def rules_query(kernel: str | None, dtype: str | None) -> Select[Any]:
    """Return the query of the rules of a kernel, or of all, newest first: in the order of learning, not by date."""
    selected = (FAMILIES.c[name] for name in RULE_COLUMNS)
    query = select(*selected).where(FAMILIES.c.learned_at.is_not(None)).order_by(FAMILIES.c.id.desc())
    filters = ((FAMILIES.c.kernel, kernel), (FAMILIES.c.dtype, dtype))
    return query.where(*(column == value for column, value in filters if value is not None))


def _rule(row: Mapping[Any, Any]) -> StoredRule | None:
    try:
        return StoredRule.from_json(row)
    except (KeyError, TypeError, ValueError):
        return None


def _digest(key: TuningKey, family: Family) -> str:
    return hashlib.sha256(canonical_json([key.to_json(), family.to_json()]).encode()).hexdigest()
