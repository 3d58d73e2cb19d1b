"""Tell a kernel that is broken from candidates that are bad."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.ground.errors import InputError
from autotile.ground.model import Config, Outcome, Trial, config_text
from autotile.tuning.ledger import Ledger

_ENOUGH = 8
"""When so many candidates, the default among them, fail alike and none runs, the fault is the kernel's own."""

_FAULTS = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def kernel_fault(outcomes: Mapping[Outcome, int], last: Trial, default: Trial | None, most: int) -> str:
    """What is wrong with the kernel itself, where every candidate failed for the same reason; else empty.

    Parameters
    ----------
    outcomes
        Trials by how they ended.
    last
        The newest of them.
    default
        The default configuration's, where it was tried. The default is expected to run: without it nothing is said
        before all have failed.
    most
        Candidates that are to be tried.
    """
    enough = most if default is None else min(_ENOUGH, most)
    if len(outcomes) != 1 or sum(outcomes.values()) < enough or last.outcome not in _FAULTS:
        return ""
    example = default or last
    return f"{_FAULTS[example.outcome]} {config_text(example.config)}: {example.reason}"


def check_kernel(source: str, ledger: Ledger, last: Trial, default: Config, most: int) -> None:
    """Say once what is wrong with the kernel itself, instead of failing every candidate for the same reason.

    Raises
    ------
    InputError
        There is a `kernel_fault`; ``source`` is the kernel's file.
    """
    fault = kernel_fault(ledger.outcomes, last, ledger.find(default), most)
    if fault:
        raise InputError(f"{source}: {fault}")
