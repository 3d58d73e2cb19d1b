"""Small decision trees whose leaves put configurations in order; how they are grown is in ``growing``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotile.ground.features import Feature, Traits
from autotile.ground.frozen import dataclass

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
