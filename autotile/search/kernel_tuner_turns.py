"""A function that runs in turns with its caller, as a generator does that may yield at any depth of its calls."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_ulong, py_object, pythonapi
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

THREAD_NAME = "kernel-tuner-strategy"

_MOST_SECONDS = 60.0
"""Most that a turn may take: a strategy may loop for ever where it cannot draw what it wants. Over 14,712 rows the
longest turn took 0.7 s; NSGA-II took 7 s where nearly every row was tried."""

_turn = Lock()
"""Held by the turn under way: there is one random state for all."""


class TurnsEndedError(BaseException):
    """Raised where the function waits for a turn that will not come; not to be caught by ``except Exception``."""


class Turns(Generic[T]):
    """A function in a thread of its own, which runs only while its caller waits for what it gives next.

    The global random states that it draws from are its own: seeded, in force during its turns, and put back after
    each. The thread ends with the function, when nobody refers to this object any more, or with the process.

    Parameters
    ----------
    function
        Called with a function that gives a value to the caller and returns at the next turn. It must not refer to
        this object.
    seed
        Of its random states, 0 to 2**32 - 1.

    Attributes
    ----------
    failure
        What the function raised, as text; empty where it did not.
    thread
        The thread.
    """

    def __init__(self, function: Callable[[Callable[[T], None]], None], seed: int) -> None:
        self.failure = ""
        self._randomness = Randomness(seed)
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._given: SimpleQueue[tuple[T | None, str]] = SimpleQueue()
        self.thread = Thread(target=_run, args=(function, self._turns, self._given), daemon=True, name=THREAD_NAME)
        self.thread.start()
        weakref.finalize(self, self._turns.put, False)

    def next(self) -> T | None:
        """What the function gives next; None when it has ended, or was ended since its turn took too long."""
        with _turn, self._randomness.in_force(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what strategies divide by is not the user's to mend
            self._turns.put(True)
            try:
                given, self.failure = self._given.get(timeout=_MOST_SECONDS)
            except Empty:
                self._interrupt()
                return None
        return given

    def _interrupt(self) -> None:
        """End a function that loops in Python code; its thread may not draw from the random states of others."""
        self.failure = f"it proposed nothing for {_MOST_SECONDS:g} s"
        self._turns.put(False)
        pythonapi.PyThreadState_SetAsyncExc(c_ulong(self.thread.ident or 0), py_object(TurnsEndedError))
        self.thread.join(1.0)


class Randomness:
    """What one seed makes of the random states that a process has only once.

    They are those of `random` and of `numpy.random`, and the seed of NumPy's generators that are asked for without one,
    as SciPy's Latin hypercubes are.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Exchange the states for a while."""
        python, numpy, default_rng = random.getstate(), np.random.get_state(), np.random.default_rng

        def seeded(seed: Any = None) -> np.random.Generator:
            return default_rng(np.random.randint(2**31) if seed is None else seed)

        random.setstate(self._python)
        np.random.set_state(self._numpy)
        np.random.default_rng = seeded
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
            np.random.default_rng = default_rng


def _run(
    function: Callable[[Callable[[T], None]], None],
    turns: SimpleQueue[bool],
    given: SimpleQueue[tuple[T | None, str]],
) -> None:
    def wait() -> None:
        if not turns.get():
            raise TurnsEndedError

    def give(value: T) -> None:
        given.put((value, ""))
        wait()

    failure = ""
    try:
        wait()
        function(give)
    except TurnsEndedError:
        pass
    except Exception as error:  # belongs to the caller, who may not want to go on
        failure = f"{type(error).__name__}: {error}"
    given.put((None, failure))
