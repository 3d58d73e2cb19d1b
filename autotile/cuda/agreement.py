"""Verification without a reference: configurations are compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from autotile.core.model import Config, config_key
from autotile.cuda.reference_solution import ReferenceOutput
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.spec import KernelSpec

_MAX_KEPT = 6
"""Number of results that wait for another that agrees; the oldest gives way."""

Outputs = Mapping[str, ReferenceOutput]


class Agreement:
    """Results of configurations for one set of inputs, until two of different launches agree."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Hashable, Outputs]] = []

    def offer(self, launch: Hashable, agrees: Callable[[Outputs], bool], outputs: Callable[[], Outputs]) -> Any:
        """Compare the result of a configuration with those that wait.

        Parameters
        ----------
        launch
            Key of its launches, see `launch_key`.
        agrees
            Whether it agrees with other outputs.
        outputs
            Function that copies its outputs.

        Returns
        -------
        Mapping or None
            The outputs with which it agrees, from a configuration of another launch; None if it waits now.
        """
        for other, waiting in self._waiting:
            if agrees(waiting):
                if other != launch:
                    self._waiting.clear()
                    return waiting
                return None
        self._waiting = [*self._waiting[1 - _MAX_KEPT :], (launch, outputs())]
        return None


def launch_key(spec: KernelSpec, config: Config, plan: LaunchPlan) -> Hashable:
    """Return what tells apart the launches of two configurations: blocks and grids, or all if these are always equal.

    Two configurations of one launch may share an error, such as a loop that ends too early.
    """
    parameters = {parameter.name for parameter in spec.parameters}
    extents = [extent for step in spec.steps for extent in (*step.launch.block, *step.launch.grid)]
    if not any(extent.names & parameters for extent in extents):
        return config_key(config)
    return tuple((launch.step, launch.geometry.grid, launch.geometry.block) for launch in plan.launches)
