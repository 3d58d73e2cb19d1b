"""The two faces of a report."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import RenderableType


class Report(Protocol):
    """What a command has found; it holds plain values and decides nothing."""

    def to_json(self) -> Any:
        """Everything found, as dictionaries, lists, strings and numbers."""

    def __rich__(self) -> RenderableType:
        """What a person wants to see of it."""
