"""The fp32 templates are right on a device: layouts, edges, batches, beta, splits, alignment."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autotile.core.model import Config
from autotile.cuda.driver import live_device
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.search_space import feasible_space

pytestmark = pytest.mark.gpu(shared=True)
LAYOUTS = list(product((0, 1), repeat=2))
SHAPES = [(1, 1, 1, 1), (389, 277, 149, 2), (256, 128, 64, 1), (70, 516, 1036, 3)]
SPACES_OF = [(261, 132, 484), (261, 130, 482), (261, 131, 483)]  # rows of 4, 2 and 1 floats that lie side by side


@pytest.fixture(params=["sgemm", "sgemm_ws"])
def kernel(request):
    if request.param == "sgemm_ws":
        request.getfixturevalue("hopper")
    return load_kernel(request.param)


def spread(kernel: Kernel, flags: dict[str, int]) -> list[Config]:
    """Configurations from all over the spaces of middling problems: all widths of loads, padded and swizzled tiles."""
    configs = []
    for place, (m, n, k) in enumerate(SPACES_OF):
        space = feasible_space(
            kernel.spec, kernel.spec.at({"M": m, "N": n, "K": k, "BATCH": 1, **flags}), live_device()
        )
        for swizzle in (0, 1):
            rows = np.flatnonzero(space.column("SWIZZLE") == swizzle)
            if rows.size:
                configs.append(space.config(int(rows[(len(rows) - 1) * (2 * place + swizzle) // 5])))
    return configs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nondeterministic", [0, 1])
def test_configurations_over_the_space_are_right(kernel, on_device, layout, nondeterministic):
    template = on_device(kernel.name)
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "NONDETERMINISTIC": nondeterministic}
    for config in spread(kernel, flags)[nondeterministic :: 1 + nondeterministic]:
        function = template.compiled(config, "float32", flags)
        for m, n, k, batch in SHAPES:
            sizes = {"M": m, "N": n, "K": k, "BATCH": batch, **flags}
            for check in (False, True):
                template.expect_right(function, config, "float32", sizes, check=check)
