"""Kernel Tuner's strategies under the names of their modules: ``strategies.minimize``."""

from __future__ import annotations

from typing import Any

from autotile.kernel_tuner.installed import installed_module


class Strategy:
    """A strategy of Kernel Tuner, by the name of its module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<strategy {self.name}>"

    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> Any:
        """Run the strategy of the installed Kernel Tuner."""
        return installed_strategy(self.name).tune(searchspace, runner, tuning_options)


def installed_strategy(name: str) -> Any:
    """Return the module of a strategy of the installed Kernel Tuner.

    Raises
    ------
    ImportError
        It, or a package that it needs, is not installed.
    """
    known = installed_module("interface", f"the strategy {name!r}").strategy_map
    return known[name] if name in known else installed_module(f"strategies.{name}", f"the strategy {name!r}")


def __getattr__(name: str) -> Strategy:
    if name.startswith("_"):
        raise AttributeError(name)
    return Strategy(name)
