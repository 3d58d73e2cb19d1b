"""A family tuned on a GPU: other sizes are served with correct results, by its rule if that is in force."""

from pathlib import Path

import pytest

import autotile

pytestmark = pytest.mark.gpu


def test_sizes_that_were_not_tuned_are_served(scale_toml: Path) -> None:
    cupy = pytest.importorskip("cupy")
    plan, options = autotile.FamilyPlan(points=3, max_configs=2), autotile.TuneOptions(trials=4, finals=0, workers=4)
    result = autotile.tune_family(str(scale_toml), n="1000..1000000", plan=plan, options=options)
    assert result.rule is not None
    assert len(result.rule.points) == 3
    assert all(point.best_us > 0 and point.loss >= 0 for point in result.rule.points)
    for n in (1001, 4097, 999_999):
        kernel = autotile.get_best_kernel(str(scale_toml), n=n)
        assert (kernel.tier == "family", kernel.source) == (result.rule.in_force, "cuda")
        x = cupy.arange(n, dtype=cupy.float32)
        assert bool((kernel(x, factor=3.0) == 3.0 * x).all())
