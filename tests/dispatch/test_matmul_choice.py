"""Which kernel computes a product, without a device."""

import pytest

from autotile.dispatch.counting import misses
from autotile.dispatch.matmul import best_matmul
from autotile.dispatch.product import Product


@pytest.mark.usefixtures("live_gpu")
def test_only_what_is_launched_counts_as_a_miss() -> None:
    kernel = best_matmul(Product(1001, 999, 1003))
    assert kernel.tier != "exact"
    assert [watched.kernel for watched in misses._watched] == [kernel]
    assert best_matmul(Product(1001, 999, 1003)) is kernel
