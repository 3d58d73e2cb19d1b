"""Learn a model of time from measurements, and calibrate its doubt on problems that are held out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.errors import InputError
from autotile.families.network import Ensemble, Inputs, Neighbours
from autotile.families.operation_model import (
    SPREAD_COST,
    Doubt,
    Layout,
    MeasuredProblem,
    ModelCandidate,
    OperationModel,
    Vocabulary,
)
from autotile.kernel.spec import KernelSpec

_FOLDS = 4
_MEMBERS = 2
"""Networks of an ensemble."""
_MAX_CANDIDATES = 80
_ALONE = 0.3
"""Weight of problems served by a single kernel, in the selection of candidates: some calls exclude the other ones."""
_MISSING = 1.0
"""Loss, in the logarithm, that is assumed where no selected candidate was measured."""
_NEAR = 1.3
"""Candidates up to this ratio to the fastest decide how large the doubt is."""
_MIN_PROBLEMS = 20
_MIN_DOUBT = 0.02
_CONFIDENCES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
_PERCENTILE, _SAFE_RATIO = 1.0, 0.98
"""A confidence is enough if this percentile of the held-out problems is served at least so fast, relative to the
library."""
_FEW_ROWS, _MAX_REPEATS = 2000, 4
"""Fewer rows than this get more passes over them, by up to this factor."""
_MAX_ROW_PASSES = (2_500_000, 1_000_000)
"""Maximum number of rows times passes, of configurations and of libraries: more changes little and takes minutes."""

Times = NDArray[np.float64]


class Measurements(NamedTuple):
    """Data that a model is learned from.

    Attributes
    ----------
    candidates
        Configurations and libraries that were measured.
    problems
        Problems and times; those with times of libraries alone are welcome, as these are harder to predict.
    """

    candidates: Sequence[ModelCandidate]
    problems: Sequence[MeasuredProblem]


class HeldOut(NamedTuple):
    """Predictions for problems that the networks were not fitted to, NaN where nothing was measured.

    Attributes
    ----------
    times_us
        Measured times, shape (problems, candidates).
    log2_us, spread
        Predicted logarithms and their spread, same shape.
    """

    times_us: Times
    log2_us: Times
    spread: Times


class Fitted(NamedTuple):
    """A model and the predictions that its doubt was calibrated on."""

    model: OperationModel
    held_out: HeldOut
    candidates: tuple[ModelCandidate, ...]
    """Candidates of the columns of ``held_out``; those of the model are some of them."""


def fit_model(
    operation: str,
    dtype: str,
    device: DeviceProperties,
    specs: Mapping[str, KernelSpec],
    measured: Measurements,
    *,
    flags: Collection[str] = (),
    max_candidates: int = _MAX_CANDIDATES,
    epochs: int = 120,
) -> Fitted:
    """Learn a model.

    Parameters
    ----------
    operation, dtype, device
        What was measured, and where.
    specs
        All kernels of the candidates, by name.
    measured
        Candidates, problems and times.
    flags
        Names among the sizes of the problems that select what is computed.
    max_candidates
        Maximum number of configurations that the model chooses among.
    epochs
        Passes over the measurements.

    Raises
    ------
    InputError
        There are fewer than 20 problems.
    """
    candidates, problems = measured
    if len(problems) < _MIN_PROBLEMS:
        raise InputError(f"{len(problems)} problems were measured; a model needs at least {_MIN_PROBLEMS}")
    ordered = sorted(range(len(candidates)), key=lambda n: candidates[n].is_library)
    rank = {n: place for place, n in enumerate(ordered)}
    own = tuple(candidates[n] for n in ordered)
    times_us = np.full((len(problems), len(own)), np.nan)
    for row, problem in enumerate(problems):
        for n, time_us in problem.times_us.items():
            times_us[row, rank[n]] = time_us
    skeleton = _skeleton(operation, dtype, device, specs, Measurements(own, problems), flags=flags)
    rows = _Rows.of(skeleton, specs, device, problems, times_us)
    held_out = _cross_validate(rows, times_us, own, epochs)
    doubts = _doubts(own, held_out)
    kept = _select(own, times_us, max_candidates)
    kept += [n for n, one in enumerate(own) if one.is_library]
    networks = rows.fit(np.ones(len(problems), np.bool_), epochs)
    count = sum(not one.is_library for one in own)
    model = replace(
        skeleton,
        candidates=tuple(own[n] for n in kept),
        kernels=_only(networks.kernels, [n for n in kept if n < count]),
        libraries=networks.libraries,
        library_errors=networks.library_errors,
        doubts=doubts,
        confidence=_confidence(own, held_out, doubts),
    )
    return Fitted(model, held_out, own)


def _skeleton(
    operation: str,
    dtype: str,
    device: DeviceProperties,
    specs: Mapping[str, KernelSpec],
    measured: Measurements,
    *,
    flags: Collection[str],
) -> OperationModel:
    candidates, problems = tuple(measured.candidates), measured.problems
    names = list(problems[0].sizes)
    values = {name: [problem.sizes[name] for problem in problems] for name in names}
    members = dict.fromkeys(one.kernel for one in candidates if not one.is_library)
    arrays = [{buffer.name for buffer in specs[name].buffers} for name in members]
    vocabulary = Vocabulary(
        tuple(name for name in names if name not in flags),
        tuple(name for name in names if name in flags),
        tuple(sorted(set.intersection(*arrays))) if arrays else (),
        tuple(members),
        tuple(sorted({name for one in candidates for name in one.config})),
    )
    ranges = {name: (min(column), max(column)) for name, column in values.items()}
    return OperationModel(operation, dtype, device.name, vocabulary, ranges, candidates, None, None, None, {}, 0.0)


@dataclass(frozen=True)
class _Rows:
    """All measurements as inputs and targets: of configurations, and of libraries."""

    kernels: Inputs
    libraries: Inputs
    targets: tuple[Times, Times]
    weights: tuple[Times, Times]
    problems: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Problem of each row."""
    items: tuple[int, int]
    sizes: int
    """Number of sizes, which are the first inputs of a problem."""

    @classmethod
    def of(
        cls,
        skeleton: OperationModel,
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        problems: Sequence[MeasuredProblem],
        times_us: Times,
    ) -> _Rows:
        count = sum(not one.is_library for one in skeleton.candidates)
        layouts: dict[object, Layout] = {}
        parts: tuple[list[Inputs], list[Inputs]] = ([], [])
        owners: tuple[list[int], list[int]] = ([], [])
        for row, (sizes, kernels, _) in enumerate(problems):
            key = (*(sizes[name] for name in skeleton.vocabulary.flags), *kernels)
            if key not in layouts:
                layouts[key] = Layout.of(
                    skeleton.vocabulary, skeleton.candidates, specs, device, sizes=sizes, kernels=kernels
                )
            layout = layouts[key]
            problem = layout.problem_inputs(sizes, kernels)
            measured = np.isfinite(times_us[row])
            chosen = measured[layout.numbers]
            numbers = layout.numbers[chosen]
            if chosen.any():
                pair = layout.pair_inputs(kernels).T[chosen]
                whole = np.repeat(problem[None], len(numbers), axis=0)
                parts[0].append(Inputs(whole, layout.item_inputs[chosen], pair, numbers))
                owners[0].extend([row] * len(numbers))
            others = np.flatnonzero(measured[count:])
            if len(others):
                nothing = np.zeros((len(others), 0), np.float32)
                parts[1].append(Inputs(np.repeat(problem[None], len(others), axis=0), nothing, nothing, others))
                owners[1].extend([row] * len(others))
        best = np.nanmin(np.where(np.isfinite(times_us[:, :count]), times_us[:, :count], np.inf), axis=1)
        joined = [_join(part, len(skeleton.vocabulary.sizes)) for part in parts]
        found = []
        for place, inputs in enumerate(joined):
            rows = np.array(owners[place], np.int64)
            found.append((rows, times_us[rows, inputs.number + place * count]))
        ratio = found[0][1] / best[found[0][0]]
        return cls(
            joined[0],
            joined[1],
            targets=(np.log2(found[0][1]), np.log2(found[1][1])),
            weights=(1.0 / (1.0 + 2.0 * (ratio - 1.0)), np.ones(len(found[1][0]))),
            problems=(found[0][0], found[1][0]),
            items=(count, len(skeleton.candidates) - count),
            sizes=len(skeleton.vocabulary.sizes),
        )

    def fit(self, used: NDArray[np.bool_], epochs: int) -> _Networks:
        """Fit the networks of configurations and of libraries to the rows of some of the problems."""
        fitted: list[Ensemble | None] = []
        for place, inputs in enumerate((self.kernels, self.libraries)):
            chosen = np.flatnonzero(used[self.problems[place]])
            if not len(chosen):
                fitted.append(None)
                continue
            repeats = min(max(round(_FEW_ROWS / len(chosen)), 1), _MAX_REPEATS)
            fitted.append(
                Ensemble.fit(
                    inputs.rows(chosen),
                    self.targets[place][chosen],
                    self.weights[place][chosen],
                    self.items[place],
                    epochs=max(min(epochs * repeats, _MAX_ROW_PASSES[place] // len(chosen)), 1),
                    members=_MEMBERS,
                )
            )
        kernels, libraries = fitted
        return _Networks(kernels, libraries, self._errors(libraries, used))

    def _errors(self, libraries: Ensemble | None, used: NDArray[np.bool_]) -> Neighbours | None:
        """Return the errors of the networks of libraries at the problems that they were fitted to."""
        if libraries is None:
            return None
        chosen = np.flatnonzero(used[self.problems[1]])
        inputs = self.libraries.rows(chosen)
        errors = self.targets[1][chosen] - libraries.predict(inputs)[0]
        return Neighbours.fit(inputs.problem, errors, inputs.number, self.sizes)


class _Networks(NamedTuple):
    """Networks of configurations and of libraries, and the errors of the latter at measured problems."""

    kernels: Ensemble | None
    libraries: Ensemble | None
    library_errors: Neighbours | None


def _join(parts: Sequence[Inputs], sizes: int) -> Inputs:
    if not parts:
        nothing = np.zeros((0, sizes), np.float32)
        return Inputs(nothing, nothing, nothing, np.zeros(0, np.int64))
    return Inputs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _cross_validate(rows: _Rows, times_us: Times, candidates: Sequence[ModelCandidate], epochs: int) -> HeldOut:
    """Predict the times of each fold of the problems by networks that are fitted to the other folds."""
    count = len(times_us)
    fold = np.random.default_rng(0).permutation(count) % _FOLDS
    log2_us, spread = np.full_like(times_us, np.nan), np.full_like(times_us, np.nan)
    for number in range(_FOLDS):
        networks = rows.fit(fold != number, epochs)
        pairs = ((rows.kernels, networks.kernels), (rows.libraries, networks.libraries))
        for place, (inputs, ensemble) in enumerate(pairs):
            left_out = np.flatnonzero(fold[rows.problems[place]] == number)
            if ensemble is None or not len(left_out):
                continue
            part = inputs.rows(left_out)
            mean, wide = ensemble.predict(part)
            if place == 1 and networks.library_errors is not None:
                near = [
                    networks.library_errors.look_up(*row)
                    for row in zip(part.problem, part.number.tolist(), strict=True)
                ]
                mean, wide = mean + np.array(near, np.float32)[:, 0], np.array(near, np.float32)[:, 1]
            columns = part.number + place * rows.items[0]
            log2_us[rows.problems[place][left_out], columns] = mean
            spread[rows.problems[place][left_out], columns] = wide
    return HeldOut(times_us, log2_us, spread)


def _doubts(candidates: Sequence[ModelCandidate], held_out: HeldOut) -> dict[str, Doubt]:
    """Fit the squared residuals of each kernel's best configurations by a constant and the squared spread."""
    own = np.array([not one.is_library for one in candidates])
    best = np.nanmin(np.where(own & np.isfinite(held_out.times_us), held_out.times_us, np.inf), axis=1)
    near = ~own | (held_out.times_us <= _NEAR * best[:, None])
    residuals = np.log(held_out.times_us) - math.log(2.0) * held_out.log2_us
    found = {}
    for name in dict.fromkeys(one.kernel for one in candidates):
        of_kernel = np.array([one.kernel == name for one in candidates])
        mask = near & of_kernel & np.isfinite(residuals)
        if mask.sum() < 10:
            found[name] = Doubt(0.5, 1.0)
            continue
        squares = np.minimum(np.square(residuals[mask]), 1.0)
        spread = np.square(held_out.spread[mask])
        per_spread = max(float(np.cov(spread, squares)[0, 1] / max(float(spread.var()), 1e-12)), 0.0)
        constant = max(float(squares.mean() - per_spread * spread.mean()), _MIN_DOUBT**2)
        found[name] = Doubt(math.sqrt(constant), min(math.sqrt(per_spread), 10.0))
    return found


def _confidence(candidates: Sequence[ModelCandidate], held_out: HeldOut, doubts: Mapping[str, Doubt]) -> float:
    """Return the smallest confidence with which kernels that are chosen seldom lose against the library."""
    own = [n for n, one in enumerate(candidates) if not one.is_library]
    if len(own) == len(candidates):
        return _CONFIDENCES[-1]
    for confidence in _CONFIDENCES:
        ratios = choice_ratios(candidates, held_out, doubts, own, confidence=confidence)
        if len(ratios) and np.percentile(ratios, _PERCENTILE) >= _SAFE_RATIO:
            return confidence
    return _CONFIDENCES[-1]


def choice_ratios(
    candidates: Sequence[ModelCandidate],
    held_out: HeldOut,
    doubts: Mapping[str, Doubt],
    columns: Sequence[int],
    *,
    confidence: float | None,
) -> Times:
    """Return a library's time over that of the choice, for each held-out problem where both are known.

    Parameters
    ----------
    candidates, held_out
        Candidates of the columns, and the predictions.
    doubts
        Doubt by kernel and library.
    columns
        Configurations to choose among.
    confidence
        As in `OperationModel`: where the lead is smaller, the library is chosen, so that the ratio is 1. None: it never
        is.
    """
    other = next(n for n, one in enumerate(candidates) if one.is_library)
    score = np.full((len(held_out.times_us), len(columns)), np.inf)
    known = np.isfinite(held_out.log2_us[:, columns])
    score[known] = (held_out.log2_us + SPREAD_COST * held_out.spread)[:, columns][known]
    rows = np.flatnonzero(known.any(axis=1) & np.isfinite(held_out.log2_us[:, other]))
    chosen = np.array(columns)[score[rows].argmin(axis=1)]
    ratios = held_out.times_us[rows, other] / held_out.times_us[rows, chosen]
    if confidence is None:
        return np.asarray(ratios)
    lead = math.log(2.0) * (held_out.log2_us[rows, other] - held_out.log2_us[rows, chosen])
    pairs = np.array([doubts[one.kernel] for one in candidates])
    variance = np.square(pairs[:, 0]) + np.square(pairs[:, 1] * held_out.spread[rows])
    needed = confidence * np.sqrt(variance[np.arange(len(rows)), chosen] + variance[:, other])
    return np.where(lead > needed, ratios, 1.0)


def _select(candidates: Sequence[ModelCandidate], times_us: Times, count: int) -> list[int]:
    """Select configurations one by one, each time that which lowers the mean loss most."""
    own = [n for n, one in enumerate(candidates) if not one.is_library]
    losses, weights = [], []
    groups = [np.ones(len(own), np.bool_)]
    groups += [np.array([candidates[n].kernel == name for n in own]) for name in {candidates[n].kernel for n in own}]
    for number, group in enumerate(groups):
        part = np.where(group & np.isfinite(times_us[:, own]), times_us[:, own], np.inf)
        best = part.min(axis=1)
        known = np.isfinite(best)
        losses.append(np.minimum(np.log(part[known] / best[known, None]), _MISSING))
        weights.append(np.full(int(known.sum()), 1.0 if number == 0 else _ALONE))
    loss, weight = np.concatenate(losses), np.concatenate(weights)
    lowest = np.full(len(loss), _MISSING)
    chosen: list[int] = []
    while len(chosen) < min(count, len(own)):
        gain = weight @ np.maximum(lowest[:, None] - loss, 0.0)
        best_gain = int(np.argmax(gain))
        if gain[best_gain] <= 0.0:
            break
        chosen.append(best_gain)
        lowest = np.minimum(lowest, loss[:, best_gain])
    return [own[n] for n in sorted(chosen)]


def _only(ensemble: Ensemble | None, items: Sequence[int]) -> Ensemble | None:
    return ensemble.only(items) if ensemble is not None and items else None
