"""The samplers by name: the traits of each, and how it is made.

Importing this module loads neither Optuna nor Kernel Tuner: the module of a sampler is imported when the sampler is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from autotile.core.model import TIME
from autotile.errors import InputError, nearest

if TYPE_CHECKING:
    from autotile.search.row_sampler import RowSampler
    from autotile.space.search_space import SearchSpace

AUTO = "auto"
DEFAULT = "feasible"
BRUTE_FORCE = "brute-force"
STRATEGY_PREFIX = "kernel-tuner:"
"""Prefix of the samplers that run a strategy of Kernel Tuner."""

_AHEAD = 16
"""Candidates proposed before the oldest of them is measured, by samplers that learn. It is the number of results that a
proposal lacks, so it must not depend on the machine's cores."""
RANKED_AHEAD = 32
"""The same where compiled candidates are ranked: the newest ones, which have until then to compile."""
_PER_MEASURED = 2
"""Candidates proposed per measured one where they are ranked; figures for both are in docs/search.md."""
_MIN_DELAY = 2
"""Minimum number of trials that begin while a candidate compiles, where candidates are ranked."""
_MAX_LACK = 1 / 6
"""Maximum share of the results that a choice among them lacks, beyond that minimum; as often with several GPUs."""
_MAX_LACK_OF_ALL = 1 / 2
"""The same with any number of GPUs."""
_MAX_PER_TRIAL = 8
"""Maximum number of candidates proposed per trial."""
_QUEUED = 1
"""Trials chosen while others have no result, by samplers whose results may arrive in any order or that do not learn."""
_AHEAD_PER_WORKER = 4
"""Candidates proposed per compile worker by samplers that do not learn: a slow compilation leaves no worker idle."""
_FEW_TRIALS = 24
"""Trials until which each of several GPUs holds a single candidate: one more result is worth more than a wait."""
_BATCHES_PER_DELAY = 4
"""Batches of nominations between the nomination of a candidate and its first choice."""
_UNINFORMED = 6
"""Measurements before a model chooses; candidates proposed by then are proposed without one."""
_MAX_WAITING = 128
"""Compiled candidates that wait at most: each adds to the cost of every choice, and old ones are rarely chosen."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Number of candidates that are proposed, and compiled, ahead of the measured one; docs/search.md gives reasons.

    It is part of the search: it determines the results that a proposal knows. It therefore must not depend on the
    machine if the sampler learns.

    ``compiling`` is the maximum number of the newest candidates, which may still compile, and ``max_waiting`` that of
    compiled ones that wait. Per measured candidate, ``per_measured`` are proposed; 1 if they are measured in the order
    of the proposals. Another one is chosen when ``queued`` chosen ones have no result: the GPU has it at hand when it
    has measured these. With several GPUs, fewer are chosen at first, see `held`.
    """

    compiling: int
    per_measured: int = 1
    queued: int = 0
    max_waiting: int = _MAX_WAITING
    gpus: int = 1

    @property
    def ranks(self) -> bool:
        """Whether the next candidate to measure is chosen among several."""
        return self.per_measured > 1

    def nominated(self, begun: int) -> int:
        """Number of candidates that were proposed when some trials had begun, if these rank and none was set aside.

        Those of some trials are nominated together, as a model then ranks the rows once for all of them.
        """
        return _nominated(self, 1 << max(8, begun.bit_length()))[begun]

    def held(self, begun: int) -> int:
        """Number of chosen candidates without a result at which another one is chosen, when some trials had begun."""
        return self.gpus - 1 if self.gpus > 1 and begun < _FEW_TRIALS else self.queued

    def compiled(self, begun: int) -> int:
        """Number of these that are ready to choose among, including those that had begun."""
        if begun < _UNINFORMED + self.held(0):  # in the order of the proposals, which there is no model to improve on
            return begun + 1
        return self.nominated(max(0, begun - self._delay(begun) + self._together(begun) - 1))

    def _delay(self, begun: int) -> int:
        """Number of trials that begin between the nomination of a candidate and the first choice of it."""
        lack = int(min(_MAX_LACK * self.gpus, _MAX_LACK_OF_ALL) * begun)
        return min(max(_MIN_DELAY * self.gpus, lack), max(1, self.compiling // self.per_measured))

    def _together(self, begun: int) -> int:
        """Number of trials for which candidates are nominated together."""
        return max(1, self._delay(begun) // _BATCHES_PER_DELAY)


@cache
def _nominated(lookahead: Lookahead, size: int) -> list[int]:
    uninformed = _UNINFORMED + lookahead.held(0)
    counts = [max(lookahead.compiling // 2, uninformed + _MIN_DELAY * lookahead.gpus)] * uninformed
    while len(counts) < size:
        begun, together = len(counts), lookahead._together(len(counts))
        idle = (lookahead.compiling // 2 // lookahead._delay(begun + each) for each in range(together))
        counts += [counts[-1] + sum(max(lookahead.per_measured, min(_MAX_PER_TRIAL, one)) for one in idle)] * together
    return counts[:size]


@dataclass(frozen=True, slots=True)
class SamplerEntry:
    """A sampler and its traits.

    ``kind`` is what makes it, with the module of this package, and ``options`` are arguments of that besides space,
    seed, available rows and number of objectives. Of ``sources``, ``trials`` and ``estimate`` of a search, it takes
    those in ``takes``.

    ``lookahead`` ranks only with a sampler that has the methods of `autotile.search.gp_sampler.FeasibleGPSampler`. By
    the gain of proposals that one predicts, ``--until`` stops. One that takes sources learns from trials of other
    studies, and an exhaustive one covers the whole space unless the number of trials is limited.

    ``packages`` are those beyond autotile's own dependencies: name of the module, name in messages, and argument of
    ``pip install``; ``alternative`` is the sampler to use if one is missing.
    """

    summary: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    lookahead: Lookahead = Lookahead(_AHEAD)
    learns: bool = True
    predicts_gain: bool = False
    multi_objective: bool = True
    exhaustive: bool = False
    packages: tuple[tuple[str, str, str], ...] = ()
    alternative: str = "tpe"

    @property
    def missing_package(self) -> tuple[str, str, str] | None:
        """First of the packages that is not installed; None if all are."""
        return next((package for package in self.packages if find_spec(package[0]) is None), None)

    def make(
        self, space: SearchSpace, seed: int, available: ArrayLike | None = None, objectives: int = 1, **given: Any
    ) -> RowSampler:
        """Make the sampler with what it takes of what is given; its module is imported now."""
        module, _, of_module = self.kind.partition(".")
        kind: Callable[..., RowSampler] = getattr(import_module(f"autotile.search.{module}"), of_module)
        taken = {name: value for name, value in given.items() if name in self.takes}
        return kind(space, seed, available, objectives, **self.options, **taken)


SAMPLERS: Mapping[str, SamplerEntry] = MappingProxyType(
    {
        DEFAULT: SamplerEntry(
            "Gaussian process over the valid configurations: fewest measurements",
            "gp_sampler.FeasibleGPSampler",
            takes=("sources", "estimate"),
            lookahead=Lookahead(RANKED_AHEAD, _PER_MEASURED, queued=_QUEUED),
            predicts_gain=True,
        ),
        "tpe": SamplerEntry(
            "tree-structured Parzen estimator: models where the fast configurations lie", "optuna_samplers.tpe"
        ),
        "gp": SamplerEntry(
            "Optuna's Gaussian process: slow proposals", "optuna_samplers.gp", packages=(("torch", "torch", "torch"),)
        ),
        "cmaes": SamplerEntry(
            "CMA-ES: an evolution strategy over the order of the values",
            "optuna_samplers.cmaes",
            multi_objective=False,
            packages=(("cmaes", "cmaes", "cmaes"),),
        ),
        "nsga2": SamplerEntry(
            "genetic algorithm: crosses and mutates the best configurations", "optuna_samplers.nsga2"
        ),
        "random": SamplerEntry("uniform over the configurations that are left", "row_sampler.RowSampler", learns=False),
        BRUTE_FORCE: SamplerEntry(
            "every configuration, in order", "row_sampler.in_order", learns=False, exhaustive=True
        ),
    }
)
"""The samplers except `AUTO` and the strategies of Kernel Tuner, of which `sampler_entry` makes the entries."""


_KERNEL_TUNER = ("kernel_tuner", "kernel_tuner", '"autotile[kernel-tuner]"')
_STRATEGY_PACKAGES = {
    "bayes_opt": ("sklearn", "scikit-learn", "scikit-learn"),
    "nsga2": ("pymoo", "pymoo", "pymoo"),
    "nsga3": ("pymoo", "pymoo", "pymoo"),
    "skopt": ("skopt", "scikit-optimize", "scikit-optimize"),
}
"""Packages that strategies import besides Kernel Tuner's own dependencies."""
_UNSUPPORTED_STRATEGIES = {
    "pyatf_strategies": "pyATF builds the space anew from rules, of which only the outcome is known here, and "
    "takes Ctrl-C for itself"
}
"""Strategies that cannot search a list of configurations, with the reason."""
_STRATEGY_TABLES = ("_STRATEGY_IMPORTS", "strategy_map")
"""Names of the table of strategies in ``kernel_tuner/interface.py``."""


def sampler_entry(name: str) -> SamplerEntry:
    """Return the entry of a sampler; of a strategy of Kernel Tuner, whether or not it exists.

    Raise `InputError` if there is no such sampler.
    """
    if name.startswith(STRATEGY_PREFIX):
        strategy = name.removeprefix(STRATEGY_PREFIX)
        return SamplerEntry(
            f"Kernel Tuner's strategy {strategy}",
            "installed_strategies.KernelTunerSampler",
            {"strategy": strategy},
            ("trials",),
            lookahead=Lookahead(1),  # a strategy waits for each time before it wants another
            multi_objective=False,
            packages=(_KERNEL_TUNER, *filter(None, [_STRATEGY_PACKAGES.get(strategy)])),
            alternative="another strategy" if _strategy_names() else "another sampler",
        )
    if (entry := SAMPLERS.get(name)) is None:
        known = [AUTO, *SAMPLERS, f"{STRATEGY_PREFIX}STRATEGY"]
        raise InputError(f"there is no sampler {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    return entry


def sampler_names() -> list[str]:
    """Return the names of all samplers, including those whose packages are missing."""
    return [AUTO, *SAMPLERS, *_strategy_names()]


def lookahead_of(name: str, workers: int, gpu_count: int = 1) -> Lookahead:
    """Return how far a sampler looks ahead with a number of compile workers and of GPUs, each of which holds two."""
    entry = sampler_entry(name)
    lookahead = entry.lookahead
    if not entry.learns:
        compiling = max(lookahead.compiling, _AHEAD_PER_WORKER * workers)
        lookahead = replace(lookahead, compiling=compiling, queued=_QUEUED)
    if gpu_count == 1 or lookahead.compiling == 1:  # one that waits for each result cannot use another GPU
        return lookahead
    return replace(lookahead, compiling=lookahead.compiling * gpu_count, queued=2 * gpu_count - 1, gpus=gpu_count)


def resolve_sampler(
    name: str, space: SearchSpace, available: ArrayLike | None = None, trials: int | None = None
) -> str:
    """Return the name of the sampler that ``auto`` stands for; any other name is returned unchanged.

    ``auto`` is ``brute-force`` if the granted trials cover all rows that can be proposed, else ``feasible``.
    """
    if name != AUTO:
        return name
    rows = len(space) if available is None else int(np.count_nonzero(available))
    return BRUTE_FORCE if trials is not None and trials >= rows else DEFAULT


def check_sampler(name: str, objectives: Sequence[str] = (TIME,)) -> None:
    """Raise `InputError` if there is no such sampler, it lacks a package, or it cannot minimise several objectives."""
    if name == AUTO:
        return
    entry = sampler_entry(name)
    if name.startswith(STRATEGY_PREFIX):
        if reason := _UNSUPPORTED_STRATEGIES.get(name.removeprefix(STRATEGY_PREFIX)):
            raise InputError(f"the sampler {name!r} cannot be used: {reason}; choose another strategy")
        known = _strategy_names()
        if known and name not in known:
            after = ", ".join(each.removeprefix(STRATEGY_PREFIX) for each in known)
            raise InputError(f"there is no sampler {name!r}{nearest(name, known)} (after {STRATEGY_PREFIX!r}: {after})")
    if len(objectives) > 1 and not entry.multi_objective:
        able = ", ".join(each for each, other in SAMPLERS.items() if other.multi_objective)
        raise InputError(f"the sampler {name!r} cannot follow several objectives ({', '.join(objectives)}); {able} can")
    if (package := entry.missing_package) is not None:
        _, needed, install = package
        raise InputError(f"the sampler {name!r} needs {needed}: pip install {install}, or choose {entry.alternative}")


def strategy_names() -> tuple[str, ...]:
    """Return the names of Kernel Tuner's strategies, supported or not; empty if it is not installed."""
    found = find_spec(_KERNEL_TUNER[0])
    if found is None or found.origin is None:
        return ()
    return _strategies_in(Path(found.origin).with_name("interface.py"))


def _strategy_names() -> list[str]:
    """Return the names of the samplers that run a strategy; empty if Kernel Tuner is not installed."""
    return [STRATEGY_PREFIX + strategy for strategy in strategy_names() if strategy not in _UNSUPPORTED_STRATEGIES]


@cache
def _strategies_in(interface: Path) -> tuple[str, ...]:
    """Read Kernel Tuner's table of strategies from its source, since importing it takes a second.

    Empty if there is no such table; whether a strategy exists is then found out when it is run.
    """
    import ast

    try:
        tree = ast.parse(interface.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=table)], value=ast.Dict(keys=keys)) if table in _STRATEGY_TABLES:
                return tuple(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return ()
