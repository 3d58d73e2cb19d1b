"""What is shown of a family's tuning while it runs: a line a point, and under it that point's session."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console

from autotile.kernel.spec import KernelSpec
from autotile.kernel.workrate import Workrate
from autotile.report.progress import TuneProgress
from autotile.tuning.family_session import FamilyStep


class FamilyProgress:
    """Observer of a family's tuning; use it in a ``with`` block and hand it to the tuning.

    Parameters
    ----------
    console
        Where to show it: standard error.
    spec
        The kernel, whose work turns times into rates.
    """

    def __init__(self, console: Console, spec: KernelSpec) -> None:
        self._console = console
        self._spec = spec
        self._at: tuple[str, int] | None = None
        self._session: TuneProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __call__(self, step: FamilyStep) -> None:
        """Take note of how far the tuning has come."""
        is_first = self._at is None
        if self._at != (step.phase, step.number):
            self._leave()
            self._at = (step.phase, step.number)
            self._console.print(f"{step.phase} point {step.number} of {step.count}: {step.problem}", soft_wrap=True)
            self._session = TuneProgress(self._console, step.problem, Workrate.of(self._spec, step.problem))
            self._session.__enter__()
        if self._session is not None:
            self._session(step.progress if is_first else replace(step.progress, notices=()))

    def _leave(self) -> None:
        if self._session is not None:
            self._session.__exit__(None, None, None)
            self._session = None
