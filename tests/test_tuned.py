"""The shipped winners and rules match the shipped kernels, and can be served."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.database.keys import space_hash
from autotile.exchange.shipped import read_rules, read_winners
from autotile.kernel.library import load_kernel
from autotile.serving.dispatcher import default_dispatcher, find_best_kernel
from autotile.serving.operations import MatmulOptions
from autotile.settings import data_folder
from autotile.space.limits import check_config

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gemm_product import Product, emulating_kernels

WINNERS = [winner for path in sorted(data_folder("tuned").glob("*.json")) for winner in read_winners(path)]


@pytest.mark.parametrize("winner", WINNERS, ids=lambda winner: str(winner.key.problem))
def test_each_belongs_to_its_kernel_as_it_is(winner):
    kernel = load_kernel(winner.key.kernel)
    assert (winner.key.template_hash, winner.key.space_hash) == (kernel.source_hash, space_hash(kernel.spec))
    assert not check_config(kernel.spec, winner.config, winner.key.problem, winner.device)


def test_they_are_served_where_nothing_is_tuned(tmp_path):
    winner = WINNERS[0]
    kernel = find_best_kernel(
        winner.key.kernel, winner.key.dtype, winner.device.name, str(tmp_path / "none.db"), winner.key.sizes
    )
    assert kernel.config == winner.config
    assert kernel.tier in {"exact", "nearest"}  # by the NVRTC that is installed
    assert "came with autotile" in kernel.explain()


def test_the_rules_that_come_with_autotile_belong_to_its_kernels(tmp_path):
    files = sorted((data_folder("tuned") / "families").glob("*.json"))
    rules = [rule for path in files for rule in read_rules(path)]
    assert [path.name for path in files] == [f"nvidia-h200.{rule.key.kernel}.json" for rule in rules]
    for rule in rules:
        kernel = load_kernel(rule.key.kernel)
        assert (rule.key.template_hash, rule.key.space_hash) == (kernel.source_hash, space_hash(kernel.spec))
    served = find_best_kernel(
        "gemm_mma", "bfloat16", rules[0].device.name, str(tmp_path / "none.db"), {"M": 300, "N": 4096, "K": 4096}
    )
    assert served.tier == "family"


PRODUCTS = {(winner.key.dtype, *(winner.key.sizes[name] for name in "MNK")) for winner in WINNERS}


@pytest.mark.parametrize("product", sorted(PRODUCTS), ids=str)
def test_a_product_is_computed_by_the_kernel_that_won(product, tmp_path):
    dtype = product[0]
    rivals = [one for one in WINNERS if (one.key.dtype, *(one.key.sizes[name] for name in "MNK")) == product]
    fastest = min(rivals, key=lambda winner: winner.measurement.time_us)
    # An emulating kernel may be expected to be faster still, from smaller products.
    asked = replace(Product.of_sizes(fastest.key.sizes, dtype), emulate=fastest.key.kernel in emulating_kernels())
    options = MatmulOptions(database=str(tmp_path / "none.db"))
    kernel = default_dispatcher.serve_product(asked.sizes, dtype, options, fastest.device.name)
    assert (kernel.kernel, kernel.config, kernel.choice.shipped) == (fastest.key.kernel, fastest.config, True)
    times_us = [one.time_us for one in kernel.contenders if one.doubt is None]
    assert kernel.measurement.time_us == min(times_us)
