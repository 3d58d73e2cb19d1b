"""Kernel Tuner's interface on autotile's engine: change the import of a script from ``kernel_tuner`` to this package.

See docs/from-kernel-tuner.md for what each argument does here.
"""

from typing import Any

from autotile.kernel_tuner import accuracy, observers, strategies, util
from autotile.kernel_tuner.interface import run_kernel, tune_cache, tune_kernel
from autotile.kernel_tuner.strategies import installed_module

__all__ = ["accuracy", "observers", "run_kernel", "strategies", "tune_cache", "tune_kernel", "util"]


def __getattr__(name: str) -> Any:
    if name in ("store_results", "create_device_targets"):
        return getattr(installed_module("integration", f"autotile.kernel_tuner.{name}"), name)
    raise AttributeError(f"autotile.kernel_tuner has no {name!r}; docs/from-kernel-tuner.md names what it has")
