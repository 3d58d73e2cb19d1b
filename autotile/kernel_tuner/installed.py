"""Parts of an installed Kernel Tuner, for what autotile leaves to it: its strategies and their search space.

Its modules that strategies import have the same names here; what is in them is looked up in the installed Kernel Tuner
when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def installed_module(name: str, purpose: str) -> Any:
    """Return a module of Kernel Tuner.

    Raises
    ------
    ImportError
        Kernel Tuner, or a package that the module needs, is not installed.
    """
    try:
        return import_module(f"kernel_tuner.{name}")
    except ImportError as error:
        raise ImportError(
            f'{purpose} needs the package kernel_tuner: pip install "autotile[kernel-tuner]" ({error})'
        ) from None


class _InstalledModule(ModuleType):
    """A module of the installed Kernel Tuner, by its name below ``kernel_tuner``."""

    def __init__(self, name: str) -> None:
        super().__init__(f"autotile.kernel_tuner.{name}", f"Names of the installed ``kernel_tuner.{name}``.")
        self._path = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(installed_module(self._path, f"{self.__name__}.{name}"), name)


def provide_modules() -> None:
    """Make the modules of the installed Kernel Tuner importable under the names of this package."""
    for name in ("integration", "searchspace", "strategies.common", "strategies.wrapper"):
        sys.modules[f"autotile.kernel_tuner.{name}"] = _InstalledModule(name)
