"""Tell a kernel that is broken from candidates that are bad."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.ground.model import Outcome, Trial, config_text

_ENOUGH = 8
"""When so many candidates, the default among them, fail alike and none runs, the fault is the kernel's own."""

_FAULTS = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def kernel_fault(outcomes: Mapping[Outcome, int], example: Trial, most: int) -> str:
    """What is wrong with the kernel itself, where every candidate failed for the same reason; else empty.

    Parameters
    ----------
    outcomes
        Trials by how they ended.
    example
        One of them, whose reason is shown.
    most
        Candidates that can be tried at all, where those are few.
    """
    if len(outcomes) != 1 or sum(outcomes.values()) < min(_ENOUGH, most) or example.outcome not in _FAULTS:
        return ""
    return f"{_FAULTS[example.outcome]} {config_text(example.config)}: {example.reason}"
