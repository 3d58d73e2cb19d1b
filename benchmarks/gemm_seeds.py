"""Initial configurations: winners of the nearest sizes from the database, the shipped winners, or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotile.core.model import Config, config_key
from autotile.database.database import Database
from autotile.exchange.shipped import shipped_winners
from autotile.kernel.problem import size_distance
from autotile.serving.bound import BoundKernel
from autotile.settings import read_settings
from autotile.space.limits import check_config

_MAX_SEEDS = 10
"""As many as compile concurrently on a host with 16 cores, in addition to the default and the configuration served."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A configuration that won at some problem sizes."""

    kernel: str
    dtype: str
    sizes: Mapping[str, int]
    config: Config


def read_seeds(path: Path) -> list[Seed]:
    """Read the seeds of a file: ``{"float32": [{"kernel": ..., "shape": [M, N, K], "config": {...}}, ...], ...}``."""
    try:
        return [
            Seed(entry["kernel"], dtype, dict(zip("MNK", entry["shape"], strict=True)), entry["config"])
            for dtype, entries in json.loads(path.read_text()).items()
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SystemExit(f"{path}: expected lists of kernel, shape and config by dtype: {error!r}") from None


def seeds_of(served: BoundKernel, given: Iterable[Seed], database: str | None) -> list[Config]:
    """Return the default, the served configuration, and the valid winners of the nearest sizes, without duplicates.

    A parameter added to the kernel after a winner was found takes its default.
    """
    spec, problem = served.definition.spec, served.problem
    known = [seed for seed in given if (seed.kernel, seed.dtype) == (problem.kernel, problem.dtype)]
    known += _winners(problem.kernel, problem.dtype, database)
    known.sort(key=lambda seed: size_distance(seed.sizes, problem.sizes))
    configs = (
        {name: config.get(name, default) for name, default in spec.default.items()}
        for config in (spec.default, served.config, *(seed.config for seed in known))
    )
    valid = {config_key(config): config for config in configs if not check_config(spec, config, problem, served.device)}
    return list(valid.values())[: 2 + _MAX_SEEDS]


def _winners(kernel: str, dtype: str, database: str | None) -> list[Seed]:
    """Return the winners of all sizes and GPUs, including older versions of the kernel: a seed need only be valid."""
    with Database.open(database or read_settings().database) as opened:
        tuned = [best.winner for best in opened.best(kernel, dtype=dtype)]
    return [
        Seed(kernel, dtype, winner.key.sizes, winner.config) for winner in [*tuned, *shipped_winners(kernel, dtype)]
    ]
