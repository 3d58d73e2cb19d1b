"""How many candidates are proposed, and compiled, ahead of the one that is measured."""

from __future__ import annotations

from autotile.tuning.options import BRUTE_FORCE

_AHEAD = 16
"""Candidates proposed before the oldest of them is measured. It is part of the search, since it decides what a sampler
knows when it proposes, and so must not depend on the machine's cores. Replayed over 5,000 recorded configurations of
sgemm_2d with 10 seeds, TPE found the fastest in 200 trials every time with 1 to 16 ahead, but not with 32."""
_UNTAUGHT_AHEAD = 4
"""The same a compile worker, for samplers that learn nothing: one slow compilation then leaves no worker idle."""
_UNTAUGHT = ("random", BRUTE_FORCE)
"""Samplers that propose the same whatever they are told."""


def candidates_ahead(sampler: str, workers: int) -> int:
    """Candidates that are proposed before the oldest of them is measured.

    Parameters
    ----------
    sampler
        As the user names it.
    workers
        Compilations at a time.
    """
    return max(_AHEAD, _UNTAUGHT_AHEAD * workers) if sampler in _UNTAUGHT else _AHEAD
