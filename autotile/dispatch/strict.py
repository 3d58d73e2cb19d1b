"""Say why strict serving refuses: in which fields of the key the nearest result differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotile.ground.errors import NotTunedError
from autotile.store.keys import key_differences, key_of
from autotile.store.winners import Winner

if TYPE_CHECKING:
    from autotile.dispatch.bound import BoundKernel


def refusal(served: BoundKernel, stored: Sequence[Winner], nvrtc_version: str) -> NotTunedError:
    """The error that takes the place of a fallback.

    Parameters
    ----------
    served
        What would be served.
    stored
        What is tuned of the kernel, other versions of it too.
    nvrtc_version
        Of the compiler here.
    """
    found = served.choice.differences
    asked = key_of(served.definition, served.problem, served.device, nvrtc_version=nvrtc_version, l2_mode="cold")
    if not found and stored:
        found = min((key_differences(winner.key, asked) for winner in stored), key=len)
    return NotTunedError(f"{_what(served, stored)}{_where(found, stored)}", found)


def _what(served: BoundKernel, stored: Sequence[Winner]) -> str:
    asked = f"{served.problem} on {served.device.name} is not tuned, and strict=True takes no fallback"
    return f"{asked} ({served.tier})" if stored else f"{asked}: nothing is tuned of {served.kernel}"


def _where(found: Sequence[tuple[str, str, str]], stored: Sequence[Winner]) -> str:
    cure = "; run `autotile tune`, or ask without strict"
    if not stored:
        return cure
    if not found:
        return f": what was tuned for it breaks a rule or a limit here{cure}"
    listed = "; ".join(f"{name}: tuned {tuned}, asked {asked}" for name, tuned, asked in found)
    return f": the nearest result differs in {listed}{cure}"
