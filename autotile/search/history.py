"""What a model may learn from: the trials of a study, by when they began and by when they ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Result = tuple[float, ...] | None
"""Values of a trial; None where it failed."""


class History:
    """Trials by number, with their rows and, once they ended, their results.

    Attributes
    ----------
    begun
        Row of each trial's number, in the order of their beginning.
    results
        Result of each trial's number, in the order of their end.
    errors
        Standard error of the first value over the value, of trials of which it is known.
    """

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.results: dict[int, Result] = {}
        self.errors: dict[int, float] = {}

    @property
    def first_success(self) -> int:
        """Trials that ended before the first that did not fail; all where there is none."""
        outcomes = enumerate(self.results.values())
        return next((index for index, result in outcomes if result is not None), len(self.results))

    def first_ended(self, count: int) -> list[int]:
        """Numbers of the trials that ended first."""
        return list(self.results)[:count]

    def rows(self, numbers: list[int]) -> NDArray[np.int64]:
        """Row of each trial."""
        return np.array([self.begun[number] for number in numbers], np.int64)

    def results_of(self, numbers: list[int]) -> list[Result]:
        """Result of each trial; all have ended."""
        return [self.results[number] for number in numbers]
