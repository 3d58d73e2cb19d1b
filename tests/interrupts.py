"""Ctrl-C in tests that run in the background of a shell, which lets all that it starts there ignore it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` in this process, and in children that are started meanwhile.

    A child inherits that a signal is ignored; a handler of its parent's, it does not inherit, and installs its own.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
