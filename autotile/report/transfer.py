"""What was written to or read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from autotile.cli.tables import facts
from autotile.core.model import Problem


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One file written or read.

    Attributes
    ----------
    action
        ``exported``, ``imported`` or ``recorded``.
    rows
        Configurations that were transferred.
    more
        What else is worth saying, by label.
    """

    action: str
    file: str
    file_format: str
    problem: Problem
    device: str
    rows: int
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "action": self.action,
            "file": self.file,
            "format": self.file_format,
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device,
            "configurations": self.rows,
            **self.more,
        }

    def __rich__(self) -> RenderableType:
        """A few lines."""
        more = [(label.replace("_", " "), str(value)) for label, value in self.more.items()]
        return facts(
            [
                (self.action, f"{self.rows:,} configurations of {self.problem} on {self.device}"),
                ("file", f"{self.file} ({self.file_format})"),
                *more,
            ]
        )
