"""Options of a tuning session."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
from msgspec import Meta

from autotile.core.argument_types import check_value
from autotile.core.documents import Count, JsonObject, Positive, storable
from autotile.core.model import TIME, Config, L2Mode, Sizes
from autotile.errors import InputError
from autotile.search.samplers import BRUTE_FORCE, SAMPLERS

DEFAULT_TRIALS = 200
_L2_MODES: tuple[L2Mode, ...] = ("cold", "hot")

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9, description="seconds, 0 or more and at most 1e9")]


def check_whole(name: str, value: object, minimum: int) -> None:
    """Raise an `InputError` if an option is not an integer up to 2**31 - 1; None, which selects a default, is one."""
    if value is not None:
        check_value(name, value, Annotated[int, Meta(ge=minimum, le=2**31 - 1)])


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of one tuning session.

    Attributes
    ----------
    sampler, spend, seed, tries, transfer, fresh, sanitize, finals, workers, scheduler, insecure, database, trace
        As for `autotile.tune`; samplers are those of `autotile.search.samplers`.
    trials
        Target number of trials of the study, including those of earlier sessions. None stands for 200; for the whole
        space with the sampler ``brute-force``; and for no limit where ``budget_s`` or ``until`` is given.
    budget_s
        Wall time of the search, in seconds; the finals are not included.
    until
        Minimum gain, 0.01 for 1 %: the search ends when its last 256 candidates together were expected to raise the
        best speed by less. It needs a sampler with a model. Where neither ``trials`` nor ``budget_s`` is given, the
        search also ends when every configuration was tried.
    objectives
        Objectives to minimise, of `autotile.core.model`. Time is always one of them, and decides the winner. An
        expression of `autotile.kernel.spec` takes the place of the time; it must be the only one.
    objective, maximize
        That expression, set from ``objectives`` when the session begins, and whether it is maximised.
    l2
        State of the L2 cache before each run: ``cold`` (overwritten) or ``hot`` (as the previous run left it).
    only
        Configurations to try; None for every valid one.
    served
        Configuration that was served for the problem when the study began, which is tried right after the default; None
        if there is none.
    verify_sizes
        Additional problems for which every configuration must be correct, besides the tuned and the ragged one. A size
        that is not given keeps its tuned value.
    precision
        Half width of the 95 % intervals, relative to their values, at which the finals end: 0.005 for 0.5 %.
    discard
        Whether to prune a candidate that is clearly slower than the best after three samples. It has no effect with
        several objectives.
    sample_limit_s
        GPU time of the samples of one candidate in the search, in seconds; the finals take longer.
    compile_deadline_s, run_deadline_s
        Timeout of one compilation, and of one candidate on the GPU, in seconds.
    device_index
        Index of the CUDA device.
    devices
        Indices of the CUDA devices, of one model, that share the session; the first is `device_index`. Empty for that
        one alone. In replay, as many GPUs are simulated.
    gpu_model
        Name of the model of the scheduler's GPUs to use; empty if they are of one.
    replay
        Recording file to replay; ``"auto"`` for a built-in recording, even on a machine with a GPU; None to replay a
        built-in recording only where there is no GPU.
    captured
        Folder of a captured call, whose arguments are the inputs of the session; None for the declared contents. It is
        used with ``fresh``, as times on other inputs are not comparable.
    """

    sampler: str = "auto"
    trials: Positive | None = None
    budget_s: Seconds | None = None
    until: float | None = None
    spend: bool = False
    objectives: tuple[str, ...] = (TIME,)
    objective: str | None = None
    maximize: bool = False
    seed: Seed = 0
    l2: L2Mode = "cold"
    fresh: bool = False
    only: tuple[Config, ...] | None = None
    tries: tuple[Config, ...] = ()
    transfer: bool = True
    served: Config | None = None
    verify_sizes: tuple[Sizes, ...] = ()
    sanitize: bool = False
    finals: Count = 12
    precision: Annotated[float, Meta(ge=0, lt=1)] = 0.005
    discard: bool = True
    sample_limit_s: Seconds = 0.1
    workers: Positive | None = None
    compile_deadline_s: Seconds = 60.0
    run_deadline_s: Seconds = 30.0
    device_index: Count = 0
    devices: tuple[Count, ...] = ()
    scheduler: str = ""
    gpu_model: str = ""
    insecure: bool = False
    replay: str | Path | None = None
    database: str | None = field(default=None, repr=False)  # its URL may hold a password
    trace: str | Path | None = None
    captured: str | None = None

    def __post_init__(self) -> None:
        """Check the types and ranges of the options."""
        for name, hint in option_types().items():
            value = getattr(self, name)
            if isinstance(value, os.PathLike) and name in ("database", "captured"):
                value = os.fspath(value)
            check_value(name, value, hint)
            object.__setattr__(self, name, _plain(value))
        if len(set(self.devices)) < len(self.devices):
            raise InputError(f"devices names a GPU twice: {', '.join(map(str, self.devices))}; name each once")
        if self.l2 not in _L2_MODES:
            raise InputError(f"l2 is {self.l2!r}, expected {' or '.join(map(repr, _L2_MODES))}")

    @property
    def trial_target(self) -> int | None:
        """Number of trials at which the search ends; None where only the budget, the gain or the space ends it."""
        entry = SAMPLERS.get(self.sampler)
        is_exhaustive = entry is not None and entry.exhaustive
        unbounded = self.budget_s is not None or self.until is not None or is_exhaustive
        return DEFAULT_TRIALS if self.trials is None and not unbounded else self.trials

    @property
    def drops_slow(self) -> bool:
        """Whether slow candidates are pruned."""
        return self.discard and len(self.objectives) == 1

    def to_json(self, database: str) -> JsonObject:
        """Return a plain dictionary; ``database`` is the location to show, without a password."""
        paths = {"replay": str(self.replay or ""), "trace": str(self.trace or ""), "database": database}
        options = asdict(self) | paths  # a path need not be encoded in UTF-8
        shown = {name: storable(value) if isinstance(value, str) else value for name, value in options.items()}
        return {**shown, "trial_target": self.trial_target}


option_types = cache(lambda: get_type_hints(TuneOptions, include_extras=True))
"""Returns the types of the options, with their bounds; commands that do not tune need not find them."""


def for_given(options: TuneOptions, configs: Iterable[Config], **changes: Any) -> TuneOptions:
    """Return the options of a session that measures given configurations, all of them and no others."""
    only = tuple(configs)
    return replace(options, sampler=BRUTE_FORCE, trials=None, until=None, transfer=False, only=only, **changes)


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """Options of a family session, in addition to those of each session.

    Attributes
    ----------
    points
        Number of problems to tune.
    max_configs
        Maximum number of configurations of the rule.
    """

    points: int = 24
    max_configs: int = 8

    def __post_init__(self) -> None:
        """Check that both are positive integers."""
        check_whole("points", self.points, 1)
        check_whole("max_configs", self.max_configs, 1)


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python, which JSON has, and a list as a tuple."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
