"""How far a search looks ahead of what is measured."""

from __future__ import annotations

from dataclasses import dataclass

_BEFORE_A_MODEL = 6
"""Candidates that are measured before a model chooses any; what is proposed by then is proposed knowing nothing."""

_KEPT = 128
"""Most candidates that wait, compiled: each costs the model time at every choice, and old ones are hardly chosen."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How many candidates are proposed, and compiled, ahead of the one that is measured.

    It is part of the search, for it decides what is known when a candidate is proposed; so it must not depend on the
    machine where the sampler learns.

    Attributes
    ----------
    compiling
        The newest candidates, which have until then to compile, the one that is tried next included where all are
        tried.
    per_measured
        Candidates that are proposed for each that is measured; 1 where they are measured as they were proposed.
    kept
        Most candidates that wait to be chosen.
    """

    compiling: int
    per_measured: int = 1
    kept: int = _KEPT

    @property
    def ranks(self) -> bool:
        """Whether there is a choice."""
        return self.per_measured > 1

    def ready(self, measured: int) -> int:
        """Candidates to choose among when so many were measured, had none been set aside."""
        return 1 + (self.per_measured - 1) * measured

    def open(self, measured: int) -> int:
        """Candidates that are proposed and not tried then.

        Where there will be a choice, the first that compile are few: each was proposed knowing nothing.
        """
        compiling = self.compiling
        if self.ranks:
            compiling = min(compiling, _BEFORE_A_MODEL + 2 * max(0, measured + 1 - _BEFORE_A_MODEL))
        return self.ready(measured) + compiling - 1

    def useful(self, measured: int, room: int) -> int:
        """Of those, how many could still be chosen where so many more trials may begin."""
        return room - 1 + self.ready(measured + room - 1)
