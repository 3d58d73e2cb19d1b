"""What a program calls: one thin function for each command, which returns a value and prints nothing.

A module is imported when its function is first used: asking for an occupancy loads neither Optuna nor SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.ops.doctor import examine
    from autotile.ops.explaining import block_occupancy, explain_config
    from autotile.ops.families import list_families, tune_family
    from autotile.ops.misses import list_misses, missed_problems
    from autotile.ops.results import check_database, database_location, installed_recordings, list_studies, list_trials
    from autotile.ops.serving import best
    from autotile.ops.spaces import count_space
    from autotile.ops.targets import known_devices, open_problem, target_device
    from autotile.ops.tuning import tune

__all__ = [
    "best",
    "block_occupancy",
    "check_database",
    "count_space",
    "database_location",
    "examine",
    "explain_config",
    "installed_recordings",
    "known_devices",
    "list_families",
    "list_misses",
    "list_studies",
    "list_trials",
    "missed_problems",
    "open_problem",
    "target_device",
    "tune",
    "tune_family",
]

_HOME = {
    "best": "serving",
    "block_occupancy": "explaining",
    "check_database": "results",
    "count_space": "spaces",
    "database_location": "results",
    "examine": "doctor",
    "explain_config": "explaining",
    "installed_recordings": "results",
    "known_devices": "targets",
    "list_families": "families",
    "list_misses": "misses",
    "list_studies": "results",
    "list_trials": "results",
    "missed_problems": "misses",
    "open_problem": "targets",
    "target_device": "targets",
    "tune": "tuning",
    "tune_family": "families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotile.ops' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autotile.ops.{_HOME[name]}"), name)
