"""Put a kernel's arguments together, in the form that a launch takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotile.device.tensor_maps import encode_tensor_map
from autotile.ground.launch_data import LaunchData
from autotile.ground.spec import BufferArgument, KernelSpec, ScalarArgument, WorkspaceArgument


def pack_arguments(
    spec: KernelSpec,
    data: LaunchData,
    *,
    pointers: Mapping[str, int],
    scalars: Mapping[str, Any],
    workspaces: Mapping[str, int],
) -> tuple[Any, ...]:
    """Arguments of a launch, in order.

    Parameters
    ----------
    spec
        The kernel.
    data
        What the configuration decides.
    pointers
        Device address of each buffer; the caller keeps the buffers alive.
    scalars
        NumPy scalars of the exact types.
    workspaces
        Device address of each workspace; 0 for one that is empty.

    Raises
    ------
    ArgumentError
        A buffer with a tensor map does not start on 16 bytes.
    ToolchainError
        The driver refuses a tensor map.
    """
    maps = {tensor_map.name: tensor_map for tensor_map in data.tensor_maps}
    packed: list[Any] = []
    for argument in spec.arguments:
        if isinstance(argument, BufferArgument):
            if argument.passed:
                packed.append(np.uint64(pointers[argument.name]))
        elif isinstance(argument, ScalarArgument):
            packed.append(scalars[argument.name])
        elif isinstance(argument, WorkspaceArgument):
            packed.append(np.uint64(workspaces[argument.name]))
        else:
            packed.append(encode_tensor_map(maps[argument.name], pointers[argument.buffer]))
    return tuple(packed)
