"""Failures of configurations, grouped by reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotile.core.model import Config, Outcome, Trial

_EXAMPLES = 3
"""Configurations that are shown of a group of failures."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_MAX_GROUPS = 1000
"""Groups that are kept apart, which bounds the memory; a kernel has a handful."""
_MAX_REASON = 4000
"""Characters of a reason that tell groups apart, and that are kept of it."""
_OTHERS = "other reasons"


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed configurations with one reason, whose numbers may differ.

    Attributes
    ----------
    outcome, stage
        Outcome, and stage that determined it.
    reason
        The compiler's, the verification's or the sanitizer's words for the first of them.
    count
        Number of configurations.
    examples
        Some of the configurations.
    """

    outcome: Outcome
    stage: str
    reason: str
    count: int
    examples: tuple[Config, ...]


class FailureGroups:
    """Groups of failures, to which failed trials are added one by one; memory does not grow with their number."""

    def __init__(self) -> None:
        self._index: dict[tuple[Outcome, str, str], int] = {}
        self._groups: list[FailureGroup] = []

    def add(self, trial: Trial) -> int:
        """Add a failed trial, and return the number of its group, from 0."""
        reason = trial.reason[:_MAX_REASON]
        same = (trial.outcome, trial.stage, _NUMBER.sub("#", reason))
        if same not in self._index and len(self._groups) >= _MAX_GROUPS:
            reason, same = _OTHERS, (trial.outcome, "", _OTHERS)
        index = self._index.setdefault(same, len(self._groups))
        if index == len(self._groups):
            self._groups.append(FailureGroup(same[0], same[1], reason, 0, ()))
        group = self._groups[index]
        examples = group.examples if group.count >= _EXAMPLES else (*group.examples, trial.config)
        self._groups[index] = replace(group, count=group.count + 1, examples=examples)
        return index

    @property
    def count(self) -> int:
        """Number of failed trials."""
        return sum(group.count for group in self._groups)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reason of each group, by its number."""
        return tuple(group.reason for group in self._groups)

    @property
    def groups(self) -> tuple[FailureGroup, ...]:
        """The groups, the most frequent first."""
        return tuple(sorted(self._groups, key=lambda group: -group.count))


def group_failures(trials: Iterable[Trial]) -> tuple[FailureGroup, ...]:
    """Return the groups of the trials that failed for a reason of their own, the most frequent first."""
    found = FailureGroups()
    for trial in trials:
        if not trial.outcome.has_time and trial.outcome.is_finding:
            found.add(trial)
    return found.groups
