"""What a program calls: one thin function for each command, which returns a value and prints nothing.

A module is imported when its function is first used: asking for an occupancy loads neither Optuna nor SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.ops.families import list_families, tune_family
    from autotile.ops.misses import list_misses, missed_problems
    from autotile.ops.results import check_database, database_location, installed_recordings, list_studies, list_trials
    from autotile.ops.serving import best
    from autotile.ops.tuning import tune

__all__ = [
    "best",
    "check_database",
    "database_location",
    "installed_recordings",
    "list_families",
    "list_misses",
    "list_studies",
    "list_trials",
    "missed_problems",
    "tune",
    "tune_family",
]

_HOME = {
    "best": "serving",
    "check_database": "results",
    "database_location": "results",
    "installed_recordings": "results",
    "list_families": "families",
    "list_misses": "misses",
    "list_studies": "results",
    "list_trials": "results",
    "missed_problems": "misses",
    "tune": "tuning",
    "tune_family": "families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotile.ops' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autotile.ops.{_HOME[name]}"), name)
