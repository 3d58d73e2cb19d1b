"""The winners that come with autotile belong to the kernels that come with it, and may be served."""

from pathlib import Path

import pytest

from autotile.dispatch.matmul import best_matmul
from autotile.dispatch.product import Product
from autotile.dispatch.serving import find_best_kernel
from autotile.files.library import load_kernel
from autotile.files.settings import data_folder
from autotile.ground.space import check_config
from autotile.store.keys import space_hash
from autotile.store.winners import Winner, read_winners

WINNERS = [winner for path in sorted(data_folder("tuned").glob("*.json")) for winner in read_winners(path)]


def _name(winner: Winner) -> str:
    return str(winner.key.problem)


def test_there_are_some() -> None:
    assert WINNERS


@pytest.mark.parametrize("winner", WINNERS, ids=_name)
def test_each_belongs_to_its_kernel_as_it_is(winner: Winner) -> None:
    kernel = load_kernel(winner.key.kernel)
    assert winner.key.template_hash == kernel.source_hash
    assert winner.key.space_hash == space_hash(kernel.spec)
    assert winner.device is not None
    assert not check_config(kernel.spec, winner.config, winner.key.sizes, winner.device, winner.key.dtype)


def test_they_are_served_where_nothing_is_tuned(tmp_path: Path) -> None:
    winner = WINNERS[0]
    assert winner.device is not None
    kernel = find_best_kernel(
        winner.key.kernel, winner.key.dtype, winner.device.name, str(tmp_path / "none.db"), winner.key.sizes
    )
    assert kernel.config == winner.config
    assert kernel.tier in {"exact", "nearest"}  # by the NVRTC that is installed
    assert "came with autotile" in kernel.explain()


def test_a_product_is_computed_by_the_kernel_that_won(tmp_path: Path) -> None:
    winner = max(WINNERS, key=lambda winner: winner.key.sizes["M"])
    product = Product.of_sizes(winner.key.sizes, winner.key.dtype)
    assert winner.device is not None
    kernel = best_matmul(product, device=winner.device.name, database=str(tmp_path / "none.db"))
    assert (kernel.kernel, kernel.config) == (winner.key.kernel, winner.config)
