"""A synthetic GPU: times of configurations of ``sgemm_2d``, with whole blocks per SM, latency and ragged edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import device_profile
from autotile.core.model import Value
from autotile.families.family import (
    Family,
    LearnedRule,
    TrainingData,
    find_leaf,
    learn_rule,
    parse_family,
    sample_members,
    select_points,
)
from autotile.families.features import Traits, list_features, meet_rules
from autotile.kernel.launch import fixed_names
from autotile.kernel.library import load_kernel
from autotile.space.limits import occupancy
from autotile.space.search_space import feasible_space

SPEC = load_kernel("sgemm_2d").spec
DEVICE = device_profile("h200")
MAX_CONFIGS = 6


@dataclass(frozen=True)
class SyntheticGpu:
    """Configurations, with factors on their times, and the relative standard deviation of a measurement."""

    configs: tuple[dict[str, Value], ...]
    blocks_per_sm: NDArray[np.int64]
    quality: NDArray[np.float64]
    noise: float

    @classmethod
    def make(cls, seed: int, count: int = 40, noise: float = 0.005) -> SyntheticGpu:
        rng = np.random.default_rng(seed)
        space = feasible_space(SPEC, SPEC.at({"M": 4096, "N": 4096, "K": 4096}), DEVICE)
        configs = [space.config(int(row)) for row in rng.choice(len(space), 2 * count, replace=False)]
        resident = np.array([_blocks_per_sm(config) for config in configs])
        kept = np.flatnonzero(resident)[:count]
        return cls(tuple(configs[k] for k in kept), resident[kept], 1 + 0.1 * rng.random(len(kept)), noise)

    def times_us(self, sizes: Mapping[str, int], rng: np.random.Generator | None = None) -> NDArray[np.float64]:
        """Return the time of each configuration, with noise if a generator is given."""
        BM, BN, BK, TM, TN, VEC = (self._column(name) for name in ("BM", "BN", "BK", "TM", "TN", "VEC"))
        M, N, K = sizes["M"], sizes["N"], sizes["K"]
        rounds = np.ceil(np.ceil(M / BM) * np.ceil(N / BN) / DEVICE.sm_count)
        reuse = TM * TN / (TM * TN + 2 * (TM + TN))
        vectors_fit = (K % VEC == 0) & (N % VEC == 0)
        per_fma_us = self.quality / (128 * 1.7e3 * reuse * np.where(vectors_fit, 1.0, 0.85))
        steps = np.ceil(K / BK)
        work_us = rounds * BM * BN * steps * BK * per_fma_us
        latency_us = steps * (0.3 + 0.01 * BK)
        found = 2.5 + np.maximum(work_us, latency_us)
        return found if rng is None else found * (1 + self.noise * rng.standard_normal(len(found)))

    def traits(self, problems: list[dict[str, int]]) -> Traits:
        of = SPEC, DEVICE, self.configs, [int(blocks) for blocks in self.blocks_per_sm]
        return Traits.of(*of, [SPEC.at(sizes) for sizes in problems])

    def measured(
        self, words: list[str], points: int, seed: int = 0
    ) -> tuple[Family, list[dict[str, int]], TrainingData]:
        """Return a family, its points, and their measurements; each point proposes its best two configurations."""
        family, chosen, members = _selected(tuple(words), points)
        rng = np.random.default_rng(seed)
        times_us = np.array([self.times_us(sizes, rng) for sizes in chosen])
        proposed_by = times_us <= np.sort(times_us, axis=1)[:, 1:2]
        valid = meet_rules(SPEC, DEVICE, self.configs, [SPEC.at(sizes) for sizes in members])
        return family, chosen, TrainingData(times_us, proposed_by, self.traits(chosen), self.traits(members), valid)

    def served(self, learned: LearnedRule, problems: list[dict[str, int]]) -> list[int]:
        chosen, tree, _, _ = learned
        view = self.traits(problems).select(chosen)
        return [chosen[find_leaf(tree, view.rows(np.array([row])))[0]] for row in range(len(problems))]

    def _column(self, name: str) -> NDArray[np.float64]:
        return np.array([float(config[name]) for config in self.configs])


def learned_from(measured: TrainingData) -> LearnedRule:
    """Learn a rule over at most `MAX_CONFIGS` configurations."""
    return learn_rule(measured, list_features(SPEC, MAX_CONFIGS), MAX_CONFIGS)


@cache
def _selected(words: tuple[str, ...], points: int) -> tuple[Family, list[dict[str, int]], list[dict[str, int]]]:
    family = parse_family(SPEC, words)
    return family, select_points(family, points), sample_members(family)[::8]


def _blocks_per_sm(config: Mapping[str, Value]) -> int:
    names = {**fixed_names(SPEC, SPEC.at({"M": 1, "N": 1, "K": 1}), DEVICE), **config}
    launch = SPEC.steps[0].launch
    threads = int(launch.block[0].evaluate(names))
    registers = min(int(launch.min_registers.evaluate(names)) + 24, 255)
    return occupancy(threads, registers, int(launch.static_smem_bytes.evaluate(names)), DEVICE).blocks_per_sm
