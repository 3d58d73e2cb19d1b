"""Samplers that need no model of what they search."""

from __future__ import annotations

import numpy as np
from optuna.study import Study

from autotile.search.row_sampler import RowSampler


class UniformSampler(RowSampler):
    """Any row that is left, each as likely: nothing is drawn that would have to be rejected."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        return self.candidates.uniform(rng)


class InOrderSampler(RowSampler):
    """Every row, from the first to the last."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        return self.candidates.first()
