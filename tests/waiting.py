"""Wait for what another thread or process does, however slow the machine is."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Time for what takes seconds on a machine with nothing else to do."""


def wait_until(is_true: Callable[[], object], said: Callable[[], str] = str) -> None:
    """Wait until a condition holds, and fail with what is said then if it does not in time."""
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, said()
        time.sleep(0.01)
