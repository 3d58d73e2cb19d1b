"""Launches with attributes, cooperative ones and those in clusters, through cuLaunchKernelEx, which CuPy lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from autotile.core.model import LaunchGeometry
from autotile.cuda.driver import load_driver
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError

_COOPERATIVE = 2
"""``CU_LAUNCH_ATTRIBUTE_COOPERATIVE``, cuda.h."""
_CLUSTER_DIMENSION = 4
"""``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION``, cuda.h."""
_REQUIRED_CLUSTER_WIDTH = 11
"""``CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH``, cuda.h."""

Cluster = tuple[int, int, int]


class _Value(ctypes.Union):
    """``CUlaunchAttributeValue``, cuda.h."""

    _fields_: ClassVar[Any] = [("bytes", ctypes.c_char * 64), ("words", ctypes.c_uint * 16)]


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``, cuda.h."""

    _fields_: ClassVar[Any] = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _Value)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``, cuda.h."""

    _fields_: ClassVar[Any] = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def attribute_launch(
    function_pointer: int, geometry: LaunchGeometry, *, is_cooperative: bool, cluster: Cluster | None
) -> Callable[[int, int, int], None]:
    """Return a function of the stream handle, the address of a parameter block, and 0, which launches.

    Parameters
    ----------
    function_pointer, geometry
        Driver handle of the function, and the geometry.
    is_cooperative
        Whether all blocks are resident at once, so that they may wait for each other.
    cluster
        Blocks of a cluster in x, y, z; None if there are none, or if the function declares them itself.

    Raises
    ------
    ToolchainError
        The driver is too old.
    """
    try:
        launch_with_attributes = load_driver().cuLaunchKernelEx
    except AttributeError:
        raise ToolchainError("this driver has no cuLaunchKernelEx; install a driver for CUDA 12 or newer") from None
    attributes = (_Attribute * 2)()
    count = 0
    if is_cooperative:
        attributes[count].id, attributes[count].value.words[0] = _COOPERATIVE, 1
        count += 1
    if cluster is not None:
        attributes[count].id, attributes[count].value.words[:3] = _CLUSTER_DIMENSION, cluster
        count += 1
    grid, block = (ctypes.c_uint * 3)(*geometry.grid), (ctypes.c_uint * 3)(*geometry.block)
    function, error = ctypes.c_void_p(function_pointer), load_cupy().cuda.driver.CUDADriverError

    def launch(stream: int, address: int, _: int) -> None:
        config = _Config(grid, block, geometry.dynamic_smem_bytes, stream, attributes, count)
        status = launch_with_attributes(ctypes.byref(config), function, ctypes.c_void_p(address), None)
        if status:
            raise error(status)

    return launch


def declares_cluster(function_pointer: int) -> bool:
    """Return whether a function has a cluster of its own, ``__cluster_dims__``."""
    driver, value = load_driver(), ctypes.c_int()
    function = ctypes.c_void_p(function_pointer)
    return driver.cuFuncGetAttribute(ctypes.byref(value), _REQUIRED_CLUSTER_WIDTH, function) == 0 and value.value > 0
