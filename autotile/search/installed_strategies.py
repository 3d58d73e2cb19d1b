"""Kernel Tuner's strategies as samplers: the configurations that a strategy asks to time are proposed.

The strategies by name, and the packages that they need, are in `autotile.search.samplers`.
"""

from __future__ import annotations

import weakref
from base64 import b64encode
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.errors import InputError, WorkerError, WorkerTimeoutError
from autotile.search.gaussian_process import positions
from autotile.search.row_sampler import Result, RowSampler
from autotile.space.search_space import SearchSpace
from autotile.workers.child import Child

_WORKER_MODULE = "autotile.workers.strategy_worker"
_STARTUP_S = 60.0
"""Time limit of the import of Kernel Tuner, which takes one to a few seconds."""
_MAX_SILENCE_S = 60.0
"""Time limit of a strategy between two proposals, since it may loop forever if it cannot draw what it wants. Over
14,712 rows the longest time was 0.7 s; NSGA-II took 7 s when nearly every row had been tried."""
_MAX_FRUITLESS_RUNS = 3
"""Consecutive runs that ask for no row that earlier runs did not ask for, after which the strategy is given up."""


class KernelTunerSampler(RowSampler):
    """Proposes the rows whose times a strategy of Kernel Tuner asks for.

    The strategy runs in a child process, which starts with this object and ends with it. There it waits for the time of
    each row, or of all rows of a generation, but not for known times, whatever proposed the row. A failure is reported
    to it as an invalid configuration.

    A run that ends before the search, as a local search does in its optimum, is followed by a run with another seed.
    After several consecutive runs without new rows, rows are drawn uniformly.

    If a row is requested while all rows that the strategy waits for are pending, the row nearest to the last of these
    is proposed. In a resumed session the strategy starts again, and the known times bring it to its previous state.
    Some strategies schedule their search by the number of ``trials`` granted; None if it is not limited. Raise
    `WorkerError` if the child process cannot be started.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        objectives: int = 1,
        *,
        strategy: str,
        trials: int | None = None,
    ) -> None:
        super().__init__(space, seed, available, objectives)
        self._strategy = strategy
        self._rows: NDArray[np.int64] = np.flatnonzero(self.candidates.free)
        self._numbers = {row: number for number, row in enumerate(self._rows.tolist())}
        """Row of each configuration of the strategy, ascending, and the number of that of each row."""
        self._evaluations = min(trials or len(self._rows), len(self._rows))
        self._times_ms: dict[int, float | None] = {}
        """Time in milliseconds of each row that was tried; None for a failure."""
        self._wanted: deque[int] = deque()
        """Rows that the strategy waits for."""
        self._runs = 0
        self._fruitless_runs = 0
        self._has_asked = False
        """Whether the strategy ever asked for a row."""
        self._is_running = False
        self._child: Child | None = self._start()
        """None after it has died."""

    def close(self) -> None:
        """End the child process."""
        self._end_process()

    def _choose(self, rng: np.random.Generator) -> int:
        while True:
            while self._wanted and self._wanted[0] in self._times_ms:
                self._wanted.popleft()
            if self._wanted or self._fruitless_runs >= _MAX_FRUITLESS_RUNS:
                break
            # the strategy runs until it asks for an unknown time, or ends
            try:
                wanted, new, failure = self._step()
            except WorkerError as error:
                wanted, new, failure = [], 0, str(error)
                self._end_process()
                self._child = None
            self._is_running = bool(wanted)
            self._wanted = deque(self._rows[wanted].tolist())
            self._has_asked |= self._is_running or new > 0
            if failure and not self._has_asked:
                raise InputError(
                    f"Kernel Tuner's strategy {self._strategy} cannot search these {len(self._rows)} configurations "
                    f"({failure}); choose another sampler"
                )
            if not self._is_running:
                self._runs += 1
                self._fruitless_runs = 0 if new else self._fruitless_runs + 1
        for row in self._wanted:
            if self.candidates.free[row]:
                return row
        if self._wanted:
            return self.candidates.nearest(self.candidates.space.codes[self._wanted[-1]], rng)
        return self.candidates.uniform(rng)

    def tell(self, row: int, result: Result, error: float = 0.0) -> None:
        """Take note of the time of a row."""
        self._times_ms[row] = self._unsent[row] = 1e-3 * result[0] if result is not None else None

    def _start(self) -> Child:
        child = Child(_WORKER_MODULE)
        self._end_process = weakref.finalize(self, child.kill)
        self._has_space = False
        self._unsent = dict(self._times_ms)
        """Times that the strategy has not received yet."""
        return child

    def _step(self) -> tuple[list[int], int, str]:
        """Pass on the times, and wait until the strategy asks for others or its run ends; begin one if none goes on.

        Return the indices of the configurations whose times it waits for, none at the end of the run; then, the number
        of configurations that no earlier run asked for, and the error of the strategy, empty if there was none. Raise
        `WorkerError` if the process died, or proposed nothing in time.
        """
        child = self._child = self._child or self._start()
        if not self._has_space:
            values = {}
            for each in self.candidates.space.parameters:
                # Kernel Tuner keeps values in sets, and the order of a set of strings varies
                is_numeric = positions(each.values) is not None
                values[each.name] = list(each.values) if is_numeric else list(range(len(each.values)))
            codes = self.candidates.space.codes[self._rows]
            table = {"codes": b64encode(codes.tobytes()).decode(), "dtype": codes.dtype.str}
            child.request({"op": "open", "strategy": self._strategy, "values": values, **table}, _STARTUP_S)
            self._has_space = True
        message: dict[str, Any] = {"op": "resume"}
        if not self._is_running:
            seed = int(np.random.SeedSequence((self._seed, self._runs)).generate_state(1)[0])
            message = {"op": "run", "seed": seed, "evaluations": self._evaluations}
        times = [(self._numbers[row], time_ms) for row, time_ms in self._unsent.items() if row in self._numbers]
        self._unsent = {}
        try:
            reply = child.request({**message, "times_ms": times}, _MAX_SILENCE_S)
        except WorkerTimeoutError:
            raise WorkerError(f"it proposed nothing for {_MAX_SILENCE_S:g} s") from None
        if not isinstance(wanted := reply.get("wanted"), list):
            raise WorkerError(f"the worker's reply is malformed: {reply!r:.80}")
        return wanted, reply.get("new", 0), reply.get("failure", "")
