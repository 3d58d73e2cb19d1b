"""Whether tuning can work here, and whether a database is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType

from autotile.cli.tables import below, facts, table
from autotile.core.text import plural
from autotile.database.upgrade import DatabaseCheck

Status = Literal["ok", "warn", "fail"]

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    cure: str = ""
    """What to do; empty where nothing is to be done."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings; ``verdict`` says in one line what works."""

    findings: Sequence[Finding]
    verdict: str

    @property
    def works(self) -> bool:
        """Whether tuning works, on a GPU or from a recording."""
        return all(finding.status != "fail" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Whether tuning works, and every finding."""
        return {"ok": self.works, "verdict": self.verdict, "checks": [asdict(finding) for finding in self.findings]}

    def __rich__(self) -> RenderableType:
        """One line a finding, its cure under it."""
        shown = table("", "looked at", "found")
        for finding in self.findings:
            found = finding.detail + (f"\n{finding.cure}" if finding.cure else "")
            shown.add_row(finding.status, finding.name, found, style=_STYLES[finding.status])
        return Group(shown, below(self.verdict))


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What a look through a database found; ``check`` is None where there is no database."""

    location: str
    check: DatabaseCheck | None

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong; a database that is not there yet is not wrong."""
        return self.check is None or self.check.ok

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
        rows.append(("state", "whole" if check.ok else "\n".join(check.problems)))
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
