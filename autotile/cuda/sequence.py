"""The launches of a call, in order, through CuPy or through the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from autotile.cuda.attributes import attribute_launch, declares_cluster
from autotile.cuda.function import WORD_BYTES, Function, Module, ParameterBlock, driver_launch
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.launch import LaunchPlan, StepLaunch
from autotile.kernel.spec import Step

DriverLaunch = Callable[[int, int, int], None]
"""Launches on a stream, with the parameters at an address; the last argument is 0."""


class StepFunctions:
    """The functions of a kernel's steps, loaded into the current context.

    Parameters
    ----------
    steps
        The steps.
    image
        Cubin that holds their functions.
    symbols
        Name in the cubin of each entry; one that is not listed has its own name.

    Attributes
    ----------
    module
        Driver handle of the module, which the functions keep loaded.
    """

    def __init__(self, steps: Sequence[Step], image: Path | bytes, symbols: Mapping[str, str]) -> None:
        module = Module(image)
        self.module = module.pointer
        self._entries = [step.entry for step in steps]
        self._functions = {entry: module.function(symbols.get(entry, entry)) for entry in self._entries}

    def __getitem__(self, step: int) -> Function:
        """Return the function of a step, by its index."""
        return self._functions[self._entries[step]]

    def opt_in(self, plan: LaunchPlan) -> None:
        """Allow the dynamic shared memory of every launch."""
        needed: dict[str, int] = {}
        for step, launch in plan.steps.items():
            entry = self._entries[step]
            needed[entry] = max(needed.get(entry, 0), launch.geometry.dynamic_smem_bytes)
        for entry, smem_bytes in needed.items():
            self._functions[entry].opt_in(smem_bytes)

    def step_launch(self, one: StepLaunch) -> DriverLaunch:
        """Return a function that makes one launch, with its attributes."""
        pointer = self[one.step].pointer
        cluster = None if one.cluster is None or declares_cluster(pointer) else one.cluster
        if cluster is None and not one.is_cooperative:
            return driver_launch(pointer, one.geometry)
        return attribute_launch(pointer, one.geometry, is_cooperative=one.is_cooperative, cluster=cluster)

    def driver_launch(self, plan: LaunchPlan) -> DriverLaunch:
        """Return a function that launches a plan from one parameter block, which holds the parameters of all launches.

        A single launch costs as much as the driver's own call; nothing is checked.
        """
        launches = [self.step_launch(one) for one in plan.launches]
        if len(launches) == 1:
            return launches[0]
        starts = accumulate((WORD_BYTES * len(one.arguments) for one in plan.launches), initial=0)
        pairs = list(zip(launches, starts, strict=False))

        def launch_all(stream: int, address: int, extra: int) -> None:
            for launch, start in pairs:
                launch(stream, address + start, extra)

        return launch_all


class SizedFunctions:
    """The functions of a kernel's steps for the problem that is tuned, and for others if sizes are compiled in.

    Parameters
    ----------
    steps
        The steps.
    image, symbols
        Cubin for the problem that is tuned, and the names in it; as for `StepFunctions`.
    others
        Sizes, cubin and names of each other problem.

    Attributes
    ----------
    tuned
        The functions for the problem that is tuned.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        image: Path,
        symbols: Mapping[str, str],
        others: Iterable[tuple[Mapping[str, int], Path, Mapping[str, str]]] = (),
    ) -> None:
        self.tuned = StepFunctions(steps, image, symbols)
        self._others = [(dict(sizes), StepFunctions(steps, path, names)) for sizes, path, names in others]

    def at(self, sizes: Mapping[str, int]) -> StepFunctions:
        """Return the functions for a problem."""
        wanted = dict(sizes)
        return next((functions for own, functions in self._others if own == wanted), self.tuned)


def _launch_with(functions: StepFunctions, one: StepLaunch, values: Sequence[Any]) -> Callable[[], None]:
    """Return a function that makes one launch on CuPy's current stream."""
    if one.cluster is None and not one.is_cooperative:
        geometry = one.geometry
        launch = functions[one.step].launch
        return partial(launch, geometry.grid, geometry.block, values, geometry.dynamic_smem_bytes)
    block, launch_on, cuda = ParameterBlock(values), functions.step_launch(one), load_cupy().cuda
    return lambda: launch_on(cuda.get_current_stream().ptr, block.address, 0)


class LaunchSequence:
    """Launches on CuPy's current stream, in order.

    Parameters
    ----------
    functions, plan
        Loaded functions, and what to launch.
    arguments
        Arguments of each launch: CuPy arrays or NumPy scalars of the exact types.

    Attributes
    ----------
    count
        Number of launches.
    """

    def __init__(self, functions: StepFunctions, plan: LaunchPlan, arguments: Sequence[Sequence[Any]]) -> None:
        functions.opt_in(plan)
        self.count = len(plan.launches)
        self._plan = plan
        self._launches = [
            _launch_with(functions, one, values) for one, values in zip(plan.launches, arguments, strict=True)
        ]

    def __call__(self) -> None:
        """Queue the launches."""
        for launch in self._launches:
            launch()

    def by_step(self) -> dict[int, list[Callable[[], None]]]:
        """Return the launches of each step that is launched, by its index."""
        grouped: dict[int, list[Callable[[], None]]] = {}
        for one, launch in zip(self._plan.launches, self._launches, strict=True):
            grouped.setdefault(one.step, []).append(launch)
        return grouped
