"""Steps that share no parameters: their parameters are tuned apart, with the times of the steps in common trials.

A trial of such a kernel gives the time of each step, and that of a step depends on its own parameters only. So a trial
can try another value for every step at once, and the best of each step make up a configuration that is then verified
and raced whole. Steps are taken to be independent only if the search-space file and the source show it: a parameter
that occurs outside of the functions of the steps, or in what several of them use, ties all of these together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np

from autotile.core.model import STEP_TIME, Config, Trial, Value
from autotile.kernel.library import Kernel
from autotile.kernel.sources import strip_comments
from autotile.kernel.spec import KernelSpec, Step
from autotile.space.search_space import SearchSpace

_WORD = re.compile(r"\w+")
_OWN_INCLUDE = re.compile(r'#\s*include\s*"')
_TOGETHER = 16
"""Trials between two looks at the stopping rules, which keeps the compilers busy."""
_KEPT = 2
"""Best settings of each group that are combined, as the time of a step is less certain than that of a call."""


class StepGroup(NamedTuple):
    """Steps that share parameters with each other, and with no other step."""

    steps: tuple[int, ...]
    """Indices of the steps."""
    parameters: tuple[str, ...]


def independent_groups(kernel: Kernel) -> list[StepGroup]:
    """Return groups of steps that share no parameters, at least two; an empty list if there are none."""
    spec = kernel.spec
    tied = spec.build.names | {*spec.shaping}
    if len(spec.steps) < 2 or spec.computed or spec.objective is not None or _OWN_INCLUDE.search(kernel.source):
        return []
    bodies, outside = _split_source(strip_comments(kernel.source), spec.entries)
    if bodies is None:
        return []
    parameters = {parameter.name for parameter in spec.parameters}
    used = [_names_of(spec, step) | bodies[step.entry] for step in spec.steps]
    ties = [parameters & names for names in ({*tied} | outside, *(rule.expression.names for rule in spec.rules))]
    ties += [parameters & rule.expression.names for rule in spec.heuristics]
    groups = _united([({index}, parameters & names) for index, names in enumerate(used)], ties)
    free = [group for group in groups if group.parameters]
    return free if len(free) > 1 and all(group.steps for group in free) else []


def _names_of(spec: KernelSpec, step: Step) -> set[str]:
    """Return the names that what a step launches depends on, without its code."""
    launch = step.launch
    optional = (launch.dynamic_smem_bytes, launch.static_smem_bytes, launch.min_registers, step.when, step.times)
    expressions = [*launch.block, *launch.grid, *launch.cluster, *(each for each in optional if each is not None)]
    for name in step.arguments:
        argument = spec.argument(name)
        expressions += argument.expressions
        if argument.described_buffer:
            expressions += spec.argument(argument.described_buffer).expressions
    names = {name for expression in expressions for name in expression.names}
    return names | set(_WORD.findall(step.entry))


def _split_source(source: str, entries: Iterable[str]) -> tuple[dict[str, set[str]] | None, set[str]]:
    """Return the words of each function and those of everything else; no functions if one is not found."""
    spans: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.partition("<")[0].rpartition("::")[2].strip()
        found = [match.start() for match in re.finditer(rf"\b{re.escape(name)}\s*\(", source)]
        spanned = [span for start in found if (span := _definition(source, start)) is not None]
        if len(spanned) != 1:
            return None, set()
        spans[entry] = spanned[0]
    words = {entry: set(_WORD.findall(source[start:end])) for entry, (start, end) in spans.items()}
    rest, at = [], 0
    for start, end in sorted(spans.values()):
        rest.append(source[at:start])
        at = max(at, end)
    return words, set(_WORD.findall(" ".join([*rest, source[at:]])))


def _definition(source: str, name_at: int) -> tuple[int, int] | None:
    """Return the extent of the ``__global__`` function whose name begins here, to its last brace; None if none does."""
    start = source.rfind("__global__", 0, name_at)
    if start < 0 or any(mark in source[start:name_at] for mark in ";{}"):
        return None
    body = source.find("{", name_at)
    if body < 0 or ";" in source[name_at:body]:
        return None
    depth = 0
    for match in re.finditer(r"[{}]", source[body:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start, body + match.end()
    return None


def _united(used: list[tuple[set[int], set[str]]], ties: Sequence[set[str]]) -> list[StepGroup]:
    """Unite what shares a parameter."""
    pending = [*used, *((set[int](), names) for names in ties if names)]
    groups: list[tuple[set[int], set[str]]] = []
    while pending:
        steps, names = pending.pop(0)
        touching = [group for group in groups if group[1] & names]
        groups = [group for group in groups if not group[1] & names]
        groups.append((steps.union(*(group[0] for group in touching)), names.union(*(group[1] for group in touching))))
    return sorted(StepGroup(tuple(sorted(steps)), tuple(sorted(names))) for steps, names in groups)


class StepTimes:
    """The settings of each group and the times of its steps.

    Parameters
    ----------
    groups
        From `independent_groups`.
    space
        Valid configurations.
    default, seed
        The default configuration, and the seed of the order in which settings are tried.
    """

    def __init__(self, groups: Sequence[StepGroup], space: SearchSpace, default: Config, seed: int) -> None:
        self._groups = groups
        self._space = space
        self._default = default
        generator = np.random.default_rng(seed)
        self._settings = [_settings(space, group.parameters, default, generator) for group in groups]

    @property
    def count(self) -> int:
        """Trials in which every setting of every group is tried."""
        return max(len(settings) for settings in self._settings)

    def first_configs(self) -> Iterator[Config]:
        """Yield configurations that together have every setting of every group; shorter groups repeat their default."""
        for row in zip_longest(*self._settings):
            config = dict(self._default)
            for group, values in zip(self._groups, row, strict=True):
                if values is not None:
                    config |= dict(zip(group.parameters, values, strict=True))
            if self._space.row_of(config) is not None:
                yield config

    def chunks(self, trials: Callable[[], Iterable[Trial]]) -> Iterator[list[Config]]:
        """Yield the configurations that time every setting, some at a time.

        Parameters
        ----------
        trials
            Return all trials so far.
        """
        for configs in (self.first_configs, lambda: self.untimed_configs(trials())):
            waiting = list(configs())
            for start in range(0, len(waiting), _TOGETHER):
                yield waiting[start : start + _TOGETHER]

    def untimed_configs(self, trials: Iterable[Trial]) -> list[Config]:
        """Return the default with each setting that has no time because another group's setting failed."""
        times = self._times(trials)
        alone = (
            {**self._default, **dict(zip(group.parameters, values, strict=True))}
            for group, settings, known in zip(self._groups, self._settings, times, strict=True)
            for values in settings
            if values not in known
        )
        return [config for config in alone if self._space.row_of(config) is not None]

    def best_configs(self, trials: Iterable[Trial]) -> list[Config]:
        """Return combinations of the best few settings of each group, best first."""
        times = self._times(trials)
        if not all(times):
            return []
        best = [sorted(known.items(), key=lambda item: item[1])[:_KEPT] for known in times]
        found: list[tuple[float, Config]] = []
        for chosen in product(*best):
            config = dict(self._default)
            for group, (values, _) in zip(self._groups, chosen, strict=True):
                config |= dict(zip(group.parameters, values, strict=True))
            if self._space.row_of(config) is not None:
                found.append((sum(time_us for _, time_us in chosen), config))
        return [config for _, config in sorted(found, key=lambda pair: pair[0])]

    def _times(self, trials: Iterable[Trial]) -> list[dict[tuple[Value, ...], float]]:
        """Return the shortest time of each setting of each group."""
        times: list[dict[tuple[Value, ...], float]] = [{} for _ in self._groups]
        for trial in trials:
            for group, known in zip(self._groups, times, strict=True):
                time_us = _time_of(trial, group.steps)
                if time_us is not None:
                    setting = tuple(trial.config[name] for name in group.parameters)
                    known[setting] = min(time_us, known.get(setting, time_us))
        return times

    def notice(self, spec: KernelSpec, trials: int) -> str:
        """Return one line for the user."""
        parts = (
            f"{' and '.join(spec.steps[step].entry for step in group.steps)} ({', '.join(group.parameters)})"
            for group in self._groups
        )
        return (
            f"steps that share no parameters were tuned apart in {trials} trials, by their own times: "
            f"{'; '.join(parts)}; the best of each were combined"
        )


def _settings(
    space: SearchSpace, parameters: Sequence[str], default: Config, generator: np.random.Generator
) -> list[tuple[Value, ...]]:
    """Return the settings of some parameters that occur in a space, the default first, the others shuffled."""
    index = [position for position, one in enumerate(space.parameters) if one.name in parameters]
    by_name: Mapping[str, int] = {space.parameters[position].name: position for position in index}
    columns = [by_name[name] for name in parameters]
    rows = generator.permutation(np.unique(space.codes[:, columns], axis=0))
    settings = [
        tuple(space.parameters[column].values[int(code)] for column, code in zip(columns, row, strict=True))
        for row in rows
    ]
    first = tuple(default[name] for name in parameters)
    return [first, *(setting for setting in settings if setting != first)]


def _time_of(trial: Trial, steps: Sequence[int]) -> float | None:
    """Return the time of some steps in a trial, 0 for one that was not launched; None if it was not measured."""
    measured = {name: value for name, value in trial.telemetry.items() if name.startswith(STEP_TIME)}
    if not measured:
        return None
    prefixes = tuple(f"{STEP_TIME}{step}." for step in steps)
    return sum(float(value) for name, value in measured.items() if name.startswith(prefixes))
