"""What a configuration decides of a kernel's arguments: the shapes of its workspaces and its tensor maps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ConfigError
from autotile.ground.frozen import dataclass
from autotile.ground.model import Value
from autotile.ground.spec import KernelSpec, WorkspaceArgument
from autotile.ground.tensor_maps import TensorMap


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace of known shape and element type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    zeroed: bool

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes; 0 where a null pointer is passed."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes

    @classmethod
    def of(cls, argument: WorkspaceArgument, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> Workspace:
        """Evaluate an argument.

        Raises
        ------
        ConfigError
            An extent is negative.
        """
        shape = tuple(int(extent.evaluate(names)) for extent in argument.shape)
        if min(shape) < 0:
            raise ConfigError(
                f"{spec.name}: the workspace {argument.name} would have the shape {shape}; add a rule that excludes it"
            )
        sizes = {name: int(names[name]) for name in spec.sizes}
        return cls(argument.name, argument.dtype.of(dtype, sizes), shape, argument.zeroed)


@dataclass(frozen=True, slots=True)
class LaunchData:
    """Workspaces and tensor maps of one configuration, in the order of the arguments; equal where they are the same."""

    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...]

    @classmethod
    def of(cls, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> LaunchData:
        """Evaluate a kernel's arguments.

        Parameters
        ----------
        spec, dtype
            The kernel and the problem's element type.
        names
            A value for every size, flag, parameter and ``device.*``: see `autotile.ground.geometry.known_names`.

        Raises
        ------
        ConfigError
            A workspace has a negative extent.
        """
        return cls(
            tuple(Workspace.of(argument, spec, dtype, names) for argument in spec.workspaces),
            tuple(TensorMap.of(argument, spec, dtype, names) for argument in spec.tensor_maps),
        )
