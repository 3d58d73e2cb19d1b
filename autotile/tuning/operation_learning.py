"""The model of time of an operation, from the results of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import Resources
from autotile.families.model_fit import Fitted, Measurements, fit_model
from autotile.families.operation_model import MeasuredProblem, ModelCandidate, OperationModel
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Operation
from autotile.tuning.operation_result import Losses
from autotile.tuning.operation_sweep import CandidateKey, SweepCandidate, SweptProblem

_MIN_VERIFIED = 2
"""Problems at which a configuration must have been verified to be in the model."""


def learn_model(
    operation: Operation,
    dtype: str,
    *,
    device: DeviceProperties,
    kernels: Mapping[str, Kernel],
    measured: Sequence[SweptProblem],
    usable: Mapping[CandidateKey, SweepCandidate],
    resources: Mapping[CandidateKey, Resources],
) -> tuple[OperationModel, Losses]:
    """Learn the model of an operation; return it with its losses at problems that were held out.

    Parameters
    ----------
    operation, dtype, device, kernels
        What was measured, and where.
    measured
        Problems with their results.
    usable
        Configurations that failed at no problem.
    resources
        Resources of each of them.

    Raises
    ------
    InputError
        Too few problems were measured.
    """
    verified = Counter(key for one in measured for key, trial in one.trials.items() if trial.outcome.has_time)
    kept = [key for key in usable if verified[key] >= _MIN_VERIFIED]
    numbers = {key: number for number, key in enumerate(kept)}
    timed = dict.fromkeys(name for one in measured for name in one.libraries)
    library_numbers = {name: len(kept) + place for place, name in enumerate(timed)}
    candidates = [
        *(ModelCandidate(key[0], usable[key].config, resources[key]) for key in kept),
        *(ModelCandidate(name, {}) for name in library_numbers),
    ]
    problems = []
    for one in measured:
        times_us = {
            numbers[key]: trial.time_us
            for key, trial in one.trials.items()
            if key in numbers and trial.time_us is not None
        }
        times_us |= {library_numbers[name]: time_us for name, time_us in one.libraries.items()}
        if times_us:
            problems.append(MeasuredProblem(one.sizes, one.kernels, times_us))
    specs = {name: kernel.spec for name, kernel in kernels.items()}
    fitted = fit_model(operation.name, dtype, device, specs, Measurements(candidates, problems), flags=operation.flags)
    return fitted.model, _held_out_losses(fitted)


def _held_out_losses(fitted: Fitted) -> Losses:
    """Return the losses of what the networks choose at problems that they were not fitted to."""
    held_out, candidates = fitted.held_out, fitted.candidates
    times_us = np.asarray(held_out.times_us)
    chosen_by = np.where(np.isfinite(times_us), held_out.log2_us, np.inf)
    rows = np.flatnonzero(np.isfinite(chosen_by).any(axis=1))
    chosen = np.argmin(chosen_by[rows], axis=1)
    served_us = times_us[rows, chosen]
    losses = served_us / np.nanmin(times_us[rows], axis=1) - 1.0
    library = [number for number, one in enumerate(candidates) if one.is_library]
    over: tuple[float, float, float] | None = None
    if library:
        library_us = np.nanmin(
            np.where(np.isfinite(times_us[rows][:, library]), times_us[rows][:, library], np.inf), axis=1
        )
        ratios = (library_us / served_us)[np.isfinite(library_us)]
        if ratios.size:
            over = float(np.exp(np.log(ratios).mean())), float(np.percentile(ratios, 1)), float(ratios.min())
    return Losses(float(losses.mean()), float(np.percentile(losses, 99)), float(losses.max()), over)
