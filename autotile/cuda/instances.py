"""The instances of a problem, one for each set of values of the parameters that its buffers or reference depend on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from autotile.core.model import Config
from autotile.cuda.instance import ProblemInstance
from autotile.kernel.spec import KernelSpec

MEMORY_SHARE = 0.25
"""Share of the device's memory that the instances of a problem may take together."""


class Instances:
    """Instances of a problem, made when they are first needed; the least recently used give way to new ones.

    A kernel whose arrays and reference do not depend on parameters has one.

    Parameters
    ----------
    spec, sizes
        The kernel, and the sizes and flags of the problem.
    make
        Function that makes the instance of given names: sizes, flags, and the parameters of `KernelSpec.shaping`.
    limit_bytes
        Device memory of all instances; one that is larger is kept alone.

    Attributes
    ----------
    sizes
        As given.
    """

    def __init__(
        self,
        spec: KernelSpec,
        sizes: Mapping[str, int],
        make: Callable[[Mapping[str, int]], ProblemInstance],
        limit_bytes: float,
    ) -> None:
        self.sizes = dict(sizes)
        self._spec = spec
        self._make = make
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[int, ...], ProblemInstance] = OrderedDict()

    def __iter__(self) -> Iterator[ProblemInstance]:
        """Iterate over the instances that exist."""
        return iter(list(self._kept.values()))

    def of(self, config: Config) -> ProblemInstance:
        """Return the instance that a configuration runs on.

        Raises
        ------
        InputError, ToolchainError
            As for `ProblemInstance`.
        """
        names = self._spec.shaped_sizes(self.sizes, config)
        key = tuple(names[name] for name in self._spec.shaping)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = self._make(names)
        while len(self._kept) > 1 and sum(one.size_bytes for one in self) > self._limit_bytes:
            self._kept.popitem(last=False)
        return made
