"""How many candidates are proposed, and compiled, ahead of the one that is measured."""

from __future__ import annotations

from autotile.search.kernel_tuner_names import PREFIX
from autotile.search.lookahead import Lookahead
from autotile.search.samplers import TRANSFERRING
from autotile.tuning.options import BRUTE_FORCE

_AHEAD = 16
"""Candidates proposed before the oldest of them is measured, for samplers that learn: they know that much less
when they propose, so it must not depend on the machine's cores."""
_RANKED_AHEAD = 32
"""The same where what was compiled is ranked before it is measured: the newest so many have until then to compile."""
_PER_MEASURED = 2
"""Candidates that are then proposed for each that is measured; figures of both are in docs/search.md."""
_UNTAUGHT_AHEAD = 4
"""The same a compile worker, for samplers that learn nothing: one slow compilation then leaves no worker idle."""
_UNTAUGHT = ("random", BRUTE_FORCE)
"""Samplers that propose the same whatever they are told."""
_STRATEGY_AHEAD = 1
"""The same for strategies of Kernel Tuner, which wait for each time before they want another."""


def lookahead_of(sampler: str, workers: int) -> Lookahead:
    """How far a search looks ahead.

    Parameters
    ----------
    sampler
        The sampler at work.
    workers
        Compilations at a time.
    """
    if sampler == TRANSFERRING:
        return Lookahead(_RANKED_AHEAD, _PER_MEASURED)
    if sampler.startswith(PREFIX):
        return Lookahead(_STRATEGY_AHEAD)
    return Lookahead(max(_AHEAD, _UNTAUGHT_AHEAD * workers) if sampler in _UNTAUGHT else _AHEAD)
