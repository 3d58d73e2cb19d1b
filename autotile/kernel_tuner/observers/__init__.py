"""Observers, as Kernel Tuner's scripts define and pass them.

autotile measures in a process of its own, launches by launch without a stop, so nothing of an observer runs between the
launches. `autotile.kernel_tuner.observation` states what is called, and when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class BenchmarkObserver(ABC):
    """Base class of observers: adds values to the results of each configuration."""

    def register_device(self, dev: Any) -> None:
        """Keep the device: an object with ``name``, ``max_threads`` and ``env``."""
        self.dev = dev

    def register_configuration(self, params: Mapping[str, Any]) -> None:  # noqa: B027 - to override, not abstract
        """Receive the configuration that is measured next."""

    def before_start(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def after_start(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def during(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def after_finish(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    @abstractmethod
    def get_results(self) -> dict[str, Any]:
        """Return the values to add to the results."""


class IterationObserver(BenchmarkObserver):
    """An observer of each launch."""


class ContinuousObserver(BenchmarkObserver):
    """An observer of power during a long sequence of launches."""


class OutputObserver(BenchmarkObserver):
    """An observer of what the kernel wrote."""

    @abstractmethod
    def process_output(self, answer: Sequence[Any], output: Sequence[Any]) -> None:
        """Receive the answer, and the arrays that the kernel wrote for it."""


class PrologueObserver(BenchmarkObserver):
    """An observer of one launch before the measurement."""
