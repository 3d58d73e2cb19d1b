"""Optuna without its remarks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import ExperimentalWarning


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Keep Optuna's remarks from the user for a while: log lines below errors, and two warnings.

    These say that a feature is experimental, and that CMA-ES ignores constraints; it learns of failures by their
    values.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
