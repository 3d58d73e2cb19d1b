"""Shell completion of arguments and options.

A completion must neither fail nor print: it runs while the user types.
"""

from __future__ import annotations

from collections.abc import Callable

from autotile.errors import AutotileError


def complete_kernel(incomplete: str) -> list[str]:
    """Return the matching names of kernels."""
    from autotile.kernel.library import kernel_names

    return _matching(incomplete, kernel_names)


def complete_device(incomplete: str) -> list[str]:
    """Return the matching names of GPU profiles."""
    from autotile.core.device import profile_names

    return _matching(incomplete, profile_names)


def complete_sampler(incomplete: str) -> list[str]:
    """Return the matching names of samplers."""
    from autotile.search.samplers import sampler_names

    return _matching(incomplete, sampler_names)


def complete_dtype(incomplete: str) -> list[str]:
    """Return the matching names of element types."""
    from autotile.core.dtypes import DTYPES

    return _matching(incomplete, lambda: list(DTYPES))


def complete_outcome(incomplete: str) -> list[str]:
    """Return the matching names of trial outcomes."""
    from autotile.core.model import Outcome

    return _matching(incomplete, lambda: [str(outcome) for outcome in Outcome])


def _matching(incomplete: str, names: Callable[[], list[str]]) -> list[str]:
    """Return the names with a given prefix; none if they cannot be listed."""
    try:
        return [name for name in names() if name.startswith(incomplete)]
    except (AutotileError, OSError):
        return []
