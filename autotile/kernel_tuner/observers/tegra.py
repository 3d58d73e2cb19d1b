"""An observer of Kernel Tuner that has no counterpart here."""

from __future__ import annotations

from typing import Any, NoReturn

from autotile.kernel_tuner.observers.unsupported import refuse


def TegraObserver(*arguments: Any, **options: Any) -> NoReturn:
    """Raise an `InputError` that names what to use instead."""
    refuse("TegraObserver")
