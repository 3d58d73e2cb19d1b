"""What a session's search starts from: the rows that it may try, what it tries first, what others taught."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotile.files.library import Kernel
from autotile.ground.model import Config, Problem
from autotile.ground.space import SearchSpace
from autotile.search.samplers import resolve_sampler
from autotile.tuning.backend import Backend
from autotile.tuning.ledger import Ledger
from autotile.tuning.lookahead import lookahead_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.start import Known, first_to_try, rows_to_try

if TYPE_CHECKING:
    from autotile.search.shortlist import Shortlist


class SearchPlan:
    """Everything about a search that is settled before its first candidate.

    Parameters
    ----------
    kernel, problem, space, options, backend
        The session's.
    known
        What earlier sessions chose, and what other studies teach.
    workers
        Compilations at a time.

    Attributes
    ----------
    default
        The file's default configuration.
    incumbent
        What earlier sessions chose; None where there were none.
    most
        Trials that the study can come to hold.
    learnt_from
        The studies that taught the search, once it has begun.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        space: SearchSpace,
        options: TuneOptions,
        *,
        backend: Backend,
        known: Known,
        workers: int,
    ) -> None:
        self._space = space
        self._options = options
        self._sm_count = backend.device.sm_count
        self._available = rows_to_try(kernel, problem.dtype, space, backend, options)
        candidates = len(space) if self._available is None else int(self._available.sum())
        self._sources = known.sources
        self._sampler = resolve_sampler(options.sampler, space, self._available, options.granted)
        self._lookahead = lookahead_of(self._sampler, workers)
        self.default: Config = dict(kernel.spec.default)
        self.incumbent = known.incumbent
        self.most = min(candidates, options.trial_target or candidates)
        self.learnt_from: tuple[str, ...] = ()

    def begin(self, ledger: Ledger) -> Shortlist:
        """The search, taught by the trials of earlier sessions."""
        from autotile.search.search import Search  # Optuna takes 0.3 s, while the GPU worker gets ready
        from autotile.search.shortlist import Shortlist

        search = Search(
            self._space,
            self._sampler,
            self._options.seed,
            first=first_to_try(self.default, self.incumbent, ledger),
            available=self._available,
            trials=self._options.trial_target,
            ahead=self._lookahead.compiling,
            objectives=self._options.objectives,
            sources=self._sources,
        )
        self.learnt_from = search.learnt_from
        return Shortlist(search, self._lookahead, self._sm_count, earlier=ledger.trials)
