"""What a user may choose about a tuning session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from autotile.core.model import Config, L2Mode
from autotile.core.objectives import TIME
from autotile.errors import InputError
from autotile.search.samplers import is_exhaustive

DEFAULT_TRIALS = 200
_LEAST_WHOLE = {"trials": 1, "seed": 0, "finals": 0, "workers": 1, "device_index": 0}
_L2_MODES: tuple[L2Mode, ...] = ("cold", "hot")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, or too small; None is left to its meaning.

    Raises
    ------
    InputError
        It is either.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
        raise InputError(f"{name} is {value!r}, expected a whole number of at least {least}")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Settings of one session.

    Attributes
    ----------
    sampler
        Name of a search method; see `autotile.search`.
    trials
        Trials that the study is to hold in the end, those of earlier sessions included. None: 200; or the whole space
        for ``brute-force``; or as many as ``budget_s`` and ``until`` allow where one of them is given.
    budget_s
        Wall time of the search, in seconds; the finals come on top.
    until
        Stop when the candidates that lie ready are together expected to raise the best speed by less than this, 0.01
        for 1 %; of use with a sampler that has a model. The space ends the search where neither ``trials`` nor
        ``budget_s`` is given.
    objectives
        What to minimise, of `autotile.core.objectives`; time is always among them, and names the winner.
    seed
        Makes the search repeatable.
    l2
        Whether inputs start in memory (``cold``) or where the last run left them (``hot``).
    fresh
        Measure again instead of resuming what the database holds.
    only
        Configurations to try; None for every valid one.
    transfer
        Learn from trials of other studies of the kernel: other sizes, other GPUs, other versions.
    verify_sizes
        More problems that every configuration must be right on, beside the tuned and the ragged one; a size that is
        left out is the tuned one.
    sanitize
        Run the finalists under compute-sanitizer, and refuse those in which it finds a fault.
    finals
        Candidates that are re-measured interleaved at the end; 0 for no finals.
    discard
        Drop a candidate that is clearly slower than the best after three samples; of effect where only time counts.
    sample_limit_s
        GPU time that the samples of one candidate may take in the search; the finals time the best ones longer.
    workers
        Compile processes; None: one a core.
    compile_deadline_s, run_deadline_s
        Seconds until a compilation or a candidate on the GPU is given up.
    device_index
        CUDA device.
    replay
        A recording file to answer launches from; ``"auto"``: a built-in one, even where there is a GPU; None: only
        where there is no GPU.
    database
        Path or URL of the tuning database; None: the user's own.
    """

    sampler: str = "auto"
    trials: int | None = None
    budget_s: float | None = None
    until: float | None = None
    objectives: tuple[str, ...] = (TIME,)
    seed: int = 0
    l2: L2Mode = "cold"
    fresh: bool = False
    only: tuple[Config, ...] | None = None
    transfer: bool = True
    verify_sizes: tuple[Mapping[str, int], ...] = ()
    sanitize: bool = False
    finals: int = 12
    discard: bool = True
    sample_limit_s: float = 0.1
    workers: int | None = None
    compile_deadline_s: float = 60.0
    run_deadline_s: float = 30.0
    device_index: int = 0
    replay: str | Path | None = None
    database: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no session could work with.

        Raises
        ------
        InputError
            A number is of another type or out of its range, or ``l2`` is neither ``cold`` nor ``hot``.
        """
        for name, least in _LEAST_WHOLE.items():
            check_whole(name, getattr(self, name), least)
        for name in ("budget_s", "sample_limit_s", "compile_deadline_s", "run_deadline_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0):
                raise InputError(f"{name} is {value!r}, expected seconds, 0 or more")
        if self.l2 not in _L2_MODES:
            raise InputError(f"l2 is {self.l2!r}, expected {' or '.join(map(repr, _L2_MODES))}")

    @property
    def trial_target(self) -> int | None:
        """Trials to stop at; None where only the budget, the gain or the end of the space ends the search."""
        unbounded = self.budget_s is not None or self.until is not None or is_exhaustive(self.sampler)
        return DEFAULT_TRIALS if self.trials is None and not unbounded else self.trials

    @property
    def granted(self) -> int | None:
        """Trials that are sure to be made where the space has as many; None where that is not known."""
        return self.trial_target if self.until is None else None

    @property
    def drops_slow(self) -> bool:
        """Whether a candidate may be dropped for being slow."""
        return self.discard and len(self.objectives) == 1

    def to_json(self, database: str) -> dict[str, Any]:
        """Plain dictionary, with the database as it may be shown: without a password."""
        return {**asdict(self), "replay": str(self.replay or ""), "database": database}
