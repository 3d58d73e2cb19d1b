"""Whether tuning can work here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType

from autotile.cli.tables import below, table

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
