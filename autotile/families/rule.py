"""A family's rule: a few configurations and a small decision tree that chooses among them.

It is data. A person can read it, and a program reads it back part by part; nothing in it is executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Resources, config_key
from autotile.families.family import Family
from autotile.families.features import Feature, Traits
from autotile.kernel.problem import size_distance
from autotile.kernel.spec import KernelSpec

_DEEPEST = 32
"""Splits above a leaf of a tree that is read from a file."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Numbers of configurations, the best first; where one breaks a rule, the next is served."""

    order: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """The order."""
        return {"serve": list(self.order)}


@dataclass(frozen=True, slots=True)
class Split:
    """A question: problems whose feature is at most a threshold go one way, all others the other."""

    feature: Feature
    at_most: float
    then: Tree
    otherwise: Tree

    def to_json(self) -> dict[str, Any]:
        """Question and branches."""
        question = {"if": self.feature.to_json(), "at_most": self.at_most}
        return {**question, "then": self.then.to_json(), "else": self.otherwise.to_json()}


Tree = Leaf | Split


def tree_from_json(data: Any, sizes: Sequence[str], configs: int, depth: int = 0) -> Tree:
    """Inverse of ``to_json``.

    Raises
    ------
    ValueError
        It is no tree over these sizes and so many configurations.
    """
    if not isinstance(data, Mapping) or depth > _DEEPEST:
        raise ValueError("a rule's tree is damaged")
    if "serve" in data:
        order = data["serve"]
        if not isinstance(order, list) or sorted(order) != list(range(configs)):
            raise ValueError(f"a leaf serves {order}, expected every number below {configs} once")
        return Leaf(tuple(order))
    threshold = data["at_most"]
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise ValueError(f"{threshold!r} is no threshold")
    return Split(
        Feature.from_json(data["if"], sizes, configs),
        float(threshold),
        tree_from_json(data["then"], sizes, configs, depth + 1),
        tree_from_json(data["else"], sizes, configs, depth + 1),
    )


def leaf_of(tree: Tree, problem: Traits) -> Leaf:
    """The leaf that a single problem comes to."""
    while isinstance(tree, Split):
        tree = tree.then if problem.column(tree.feature)[0] <= tree.at_most else tree.otherwise
    return tree


_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One of the configurations that a rule serves.

    Attributes
    ----------
    resources
        What it was compiled to; None where that is unknown.
    blocks_per_sm
        Blocks of it that an SM holds.
    """

    config: Config
    resources: Resources | None
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class RulePoint:
    """One problem that the rule was learned from.

    Attributes
    ----------
    times_us
        Time of each of the rule's configurations with its 95 % interval, low and high; None where it cannot be served.
    best_us
        Time of the fastest configuration known there, be it the rule's or not.
    loss
        Time of what the rule serves over ``best_us``, minus 1.
    held_out
        That loss of a rule that was learned without the point; None for a single point.
    """

    sizes: Mapping[str, int]
    times_us: tuple[tuple[float, float, float] | None, ...]
    best_us: float
    loss: float
    held_out: float | None


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """What to serve for the problems of a family on the device that it was learned on."""

    family: Family
    configs: tuple[RuleConfig, ...]
    tree: Tree
    points: tuple[RulePoint, ...]

    @property
    def mean_loss(self) -> float:
        """Over the points, 0.02 for 2 %."""
        return math.fsum(point.loss for point in self.points) / len(self.points)

    @property
    def worst(self) -> RulePoint:
        """The point where most is lost."""
        return max(self.points, key=lambda point: point.loss)

    @property
    def held_out_losses(self) -> list[float]:
        """Losses at points that were left out of learning; empty for a single point."""
        return [point.held_out for point in self.points if point.held_out is not None]

    @property
    def mean_held_out(self) -> float | None:
        """What a size that was not tuned is expected to lose."""
        losses = self.held_out_losses
        return math.fsum(losses) / len(losses) if losses else None

    def order(self, spec: KernelSpec, device: DeviceProperties, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Numbers of all configurations for a problem of the family, the best first.

        Whether one may be served is not asked: rules and limits are checked by who serves it.
        """
        if isinstance(self.tree, Leaf):
            return self.tree.order
        configs, resident = [one.config for one in self.configs], [one.blocks_per_sm for one in self.configs]
        return leaf_of(self.tree, Traits.of(spec, device, configs, resident, [sizes])).order

    def nearest_point(self, number: int, sizes: Mapping[str, int]) -> RulePoint | None:
        """The nearest point at which a configuration was timed."""
        timed = [point for point in self.points if point.times_us[number] is not None]
        return min(timed, key=lambda point: size_distance(point.sizes, sizes), default=None)

    def lines(self) -> Iterator[str]:
        """The tree as a person reads it, a line a question or answer."""
        yield from _lines(self.tree, "")

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of everything."""
        return {
            "format": _FORMAT,
            "family": self.family.to_json(),
            "configs": [
                {
                    "config": dict(one.config),
                    "blocks_per_sm": one.blocks_per_sm,
                    "resources": asdict(one.resources) if one.resources is not None else None,
                }
                for one in self.configs
            ],
            "tree": self.tree.to_json(),
            "points": [{**asdict(point), "sizes": dict(point.sizes)} for point in self.points],
        }

    @classmethod
    def from_json(cls, data: Any) -> FamilyRule:
        """Inverse of `to_json`.

        Raises
        ------
        ValueError
            It is no rule, or one of another format.
        """
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"a rule of format {data['format']!r}, expected {_FORMAT}")
            family = Family.from_json(data["family"])
            configs = tuple(_config(entry) for entry in data["configs"])
            tree = tree_from_json(data["tree"], tuple(family.extents), len(configs))
            points = tuple(_point(entry, len(configs)) for entry in data["points"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a family's rule is damaged: {error!r}") from None
        if not configs or not points or len({config_key(one.config) for one in configs}) < len(configs):
            raise ValueError("a family's rule is damaged: it needs points and configurations, each of these once")
        return cls(family, configs, tree, points)


def _config(entry: Mapping[str, Any]) -> RuleConfig:
    resources, blocks_per_sm = entry["resources"], entry["blocks_per_sm"]
    if type(blocks_per_sm) is not int or blocks_per_sm < 0:
        raise ValueError(f"{blocks_per_sm!r} is no number of blocks")
    return RuleConfig(dict(entry["config"]), Resources(**resources) if resources is not None else None, blocks_per_sm)


def _point(entry: Mapping[str, Any], configs: int) -> RulePoint:
    times_us = tuple(None if time is None else _interval(time) for time in entry["times_us"])
    if len(times_us) != configs:
        raise ValueError(f"a point has {len(times_us)} times, expected {configs}")
    held_out = entry["held_out"]
    return RulePoint(
        {str(name): int(value) for name, value in entry["sizes"].items()},
        times_us,
        float(entry["best_us"]),
        float(entry["loss"]),
        float(held_out) if held_out is not None else None,
    )


def _interval(entry: Sequence[float]) -> tuple[float, float, float]:
    time_us, low_us, high_us = map(float, entry)
    return time_us, low_us, high_us


def _lines(tree: Tree, indent: str) -> Iterator[str]:
    if isinstance(tree, Leaf):
        yield f"{indent}#{tree.order[0]}{_others(tree.order[1:])}"
        return
    yield f"{indent}{tree.feature} <= {tree.at_most:g}:"
    yield from _lines(tree.then, indent + "  ")
    yield f"{indent}else:"
    yield from _lines(tree.otherwise, indent + "  ")


def _others(order: Sequence[int]) -> str:
    return f", else {' '.join(f'#{number}' for number in order)}" if order else ""
