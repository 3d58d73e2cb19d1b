"""A kernel that was exported for C++ programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import below, facts
from autotile.core.text import plural


@dataclass(frozen=True, slots=True)
class HeaderReport:
    """A header that was written."""

    header: str
    namespace: str
    cubins: Sequence[str]
    problems: int
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "action": "exported",
            "format": "c-header",
            "file": self.header,
            "namespace": self.namespace,
            "cubins": list(self.cubins),
            "problems": self.problems,
            "notices": list(self.notices),
        }

    def __rich__(self) -> RenderableType:
        """A few lines."""
        rows: list[tuple[str, RenderableType]] = [
            (
                "exported",
                f"{plural(self.problems, 'tuned problem')}, {plural(len(self.cubins), 'cubin')} beside the header",
            ),
            ("header", self.header),
            ("namespace", self.namespace),
        ]
        return Group(facts(rows), *(below(Text(notice)) for notice in self.notices))
