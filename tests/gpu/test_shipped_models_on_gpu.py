"""Every configuration of the models that ship is right at the ragged sizes, with two sets of inputs, in each layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotile.cuda.driver import live_device
from autotile.exchange.shipped import shipped_model
from autotile.families.operation_model import ModelCandidate
from autotile.kernel.operation import load_operation
from autotile.tuning.family_session import FAULTS
from autotile.tuning.operation_family import Sweep, problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("layout", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_its_configurations_are_right(dtype: str, layout: tuple[int, int], sweep_of: Callable[..., Sweep]) -> None:
    operation, device = load_operation("matmul"), live_device()
    model = shipped_model("matmul", dtype, device.name)
    if model is None:
        pytest.skip(f"no model ships for {device.name}")
    kernels = {member.name: member.load() for member in operation.members if dtype in member.dtypes}
    candidates = [ModelCandidate(one.kernel, one.config) for one in model.candidates if not one.is_library]
    assert candidates
    sweep = sweep_of(operation, dtype)
    valid, verified = set(), set()
    for m, n, k in ((1024, 1024, 1024), (8, 4096, 4096), (1000, 999, 1001), (4096, 8, 4096)):
        sizes = {"M": m, "N": n, "K": k, "TRANS_A": layout[0], "TRANS_B": layout[1]}
        problem = operation.resolve(sizes, dtype)
        job = sweep.prepare(problem, problem_of(operation, kernels, problem, device), candidates)
        valid |= {one.key for one in job.candidates}
        swept = sweep.run(job)
        assert swept is not None
        faults = {key: trial.reason for key, trial in swept.trials.items() if trial.outcome in FAULTS}
        assert faults == {}
        verified |= {key for key, trial in swept.trials.items() if trial.outcome.has_time}
    assert len(valid) > len(candidates) // 3
    assert len(verified) >= 0.9 * len(valid)  # the others need more memory than estimated, or do not compile
