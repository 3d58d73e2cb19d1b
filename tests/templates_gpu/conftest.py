"""Templates on the device of these tests."""

from __future__ import annotations

import pytest
from template_kit import TemplateOnDevice

from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.support import SupportKernels
from autotile.kernel.library import load_kernel


@pytest.fixture(scope="module")
def on_device(tmp_path_factory):
    """Return a function that prepares a kernel's template by its name."""
    device = live_device()
    support = SupportKernels(CubinCache(tmp_path_factory.mktemp("support"), 2**28), device.architecture)
    return lambda name: TemplateOnDevice(load_kernel(name), device, support)
