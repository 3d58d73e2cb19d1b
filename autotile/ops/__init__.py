"""What a program calls: one thin function for each command, which returns a value and prints nothing.

A module is imported when its function is first used: asking for an occupancy loads neither Optuna nor SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.ops.families import tune_family
    from autotile.ops.tuning import tune

__all__ = [
    "tune",
    "tune_family",
]

_HOME = {
    "tune": "tuning",
    "tune_family": "families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotile.ops' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autotile.ops.{_HOME[name]}"), name)
