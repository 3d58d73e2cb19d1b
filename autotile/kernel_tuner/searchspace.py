"""Names that scripts import from ``kernel_tuner.searchspace``: the installed Kernel Tuner provides it."""

from __future__ import annotations

from typing import Any

from autotile.kernel_tuner.installed import installed_name


def __getattr__(name: str) -> Any:
    return installed_name("searchspace", name)
