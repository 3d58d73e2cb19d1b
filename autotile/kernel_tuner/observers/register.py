"""The registers of a thread, which the compiler reports."""

from __future__ import annotations

from typing import Any

from autotile.kernel_tuner.observers import BenchmarkObserver


class RegisterObserver(BenchmarkObserver):
    """Adds ``num_regs``, the registers of a thread, to the results."""

    def get_results(self) -> dict[str, Any]:
        """Return nothing: the session knows the registers from the compiler."""
        return {}
