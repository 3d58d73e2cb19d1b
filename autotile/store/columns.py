"""Values that several columns of a row make up, read without an SQL engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotile.ground.model import Resources

_RESOURCES = tuple(field.name for field in fields(Resources))


def resources_of(row: Mapping[Any, Any]) -> Resources | None:
    """What a trial was compiled to, from its row; None where it was not."""
    return None if row["registers"] is None else Resources(**{name: row[name] for name in _RESOURCES})
