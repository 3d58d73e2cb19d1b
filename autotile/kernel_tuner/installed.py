"""Parts of an installed Kernel Tuner, for what autotile leaves to it: its strategies and their search space."""

from __future__ import annotations

from importlib import import_module
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


def installed_name(module: str, name: str) -> Any:
    """Return a name of a module of Kernel Tuner; for the ``__getattr__`` of its counterpart here.

    Raises
    ------
    AttributeError
        Neither has such a name.
    ImportError
        As for `installed_module`.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(installed_module(module, f"autotile.kernel_tuner.{module}.{name}"), name)
