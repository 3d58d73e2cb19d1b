"""Whether a database is whole, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from autotile.cli.tables import facts
from autotile.core.text import plural
from autotile.database.upgrade import DatabaseCheck


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What a look through a database found; ``check`` is None where there is no database."""

    location: str
    check: DatabaseCheck | None

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong; a database that is not there yet is not wrong."""
        return self.check is None or self.check.whole

    def to_json(self) -> dict[str, Any]:
        """Counts and problems."""
        check = self.check
        return {
            "database": self.location,
            "exists": check is not None,
            "ok": self.whole,
            "revision": check.revision if check is not None else None,
            "rows": dict(check.counts) if check is not None else {},
            "unfinished_runs": check.unfinished_runs if check is not None else 0,
            "problems": list(check.problems) if check is not None else [],
        }

    def __rich__(self) -> RenderableType:
        """The state in a few lines."""
        rows = [("database", self.location)]
        check = self.check
        if check is None:
            rows.append(("state", "not there yet; the first `autotile tune` makes it"))
            return facts(rows)
        rows.append(("schema", check.revision))
        rows.append(("rows", ", ".join(f"{name} {count:,}" for name, count in check.counts.items()) or "unknown"))
        if check.unfinished_runs:
            rows.append(("unfinished", f"{plural(check.unfinished_runs, 'run')}: still going, or killed"))
        rows.append(("state", "whole" if check.whole else "\n".join(check.problems)))
        return facts(rows)


@dataclass(frozen=True, slots=True)
class LocationReport:
    """Where the database lies."""

    location: str

    def to_json(self) -> dict[str, Any]:
        """The path or URL."""
        return {"database": self.location}

    def __rich__(self) -> RenderableType:
        """The path or URL alone."""
        return self.location
