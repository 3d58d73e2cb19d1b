"""What a bundle holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, below, facts, table
from autotile.core.text import bytes_text


@dataclass(frozen=True, slots=True)
class BundleRow:
    """One kernel of a bundle."""

    kernel: str
    problems: int
    cubins: int
    """Configurations, each counted once for every architecture."""
    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BundleReport:
    """A bundle that was written."""

    file: str
    digest: str
    size_bytes: int
    rows: Sequence[BundleRow]
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "file": self.file,
            "digest": self.digest,
            "bytes": self.size_bytes,
            "kernels": [{**asdict(row), "architectures": list(row.architectures)} for row in self.rows],
            "notices": list(self.notices),
        }

    def __rich__(self) -> RenderableType:
        """The file, then one line a kernel."""
        kernels = table("kernel", f"{RIGHT}problems", f"{RIGHT}cubins", "architectures")
        for row in self.rows:
            kernels.add_row(row.kernel, f"{row.problems:,}", f"{row.cubins:,}", " ".join(row.architectures))
        head = facts([("bundle", f"{self.file} ({bytes_text(self.size_bytes)})"), ("digest", self.digest)])
        return Group(head, below(kernels), *(below(Text(notice)) for notice in self.notices))
