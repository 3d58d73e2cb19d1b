from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotile.core.device import device_profile
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Config, Resources
from autotile.errors import DataError, InputError
from autotile.families.operation_model import (
    Expected,
    Fitted,
    MeasuredProblem,
    ModelCandidate,
    OperationModel,
    choice_ratios,
    fit_model,
)
from autotile.kernel.library import load_kernel
from autotile.space.limits import check_config

DEVICE = device_profile("h200")
SPECS = {name: load_kernel(name).spec for name in ("sgemm", "sgemm_ws")}
SMALL: Config = {**SPECS["sgemm"].default, "BM": 64, "BN": 64, "WM": 32, "WN": 32, "TM": 8, "TN": 4, "MIN_BLOCKS": 1}
RESOURCES = Resources(128, 0, 0, 0, 0)
CANDIDATES = (
    ModelCandidate("sgemm", SPECS["sgemm"].default, RESOURCES),
    ModelCandidate("sgemm", SMALL, RESOURCES),
    ModelCandidate("sgemm_ws", SPECS["sgemm_ws"].default, RESOURCES),
    ModelCandidate("cublas", {}),
)


def _kernels(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {**spec.sizes, **{size: value for size, value in sizes.items() if size in spec.sizes}}
        for name, spec in SPECS.items()
    }


def _times_us(sizes: dict[str, int]) -> dict[int, float]:
    """Return times by whole rounds of blocks; the library is slow for small products, and fast for large ones."""
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    tiles = (128, 64, 128)
    rounds = [math.ceil(math.ceil(m / tile) * math.ceil(n / tile) / 132) for tile in tiles]
    rates = (1.0, 1.1, 0.8)
    times = [3 + 2e-5 * r * t * t * k * q / 3 for r, t, q in zip(rounds, tiles, rates, strict=True)]
    library = 8 * min(times) if m * n < 2**18 else 0.5 * min(times)
    return dict(enumerate([*times, library]))


def _problem(random: np.random.Generator) -> MeasuredProblem:
    m, n, k = (int(2**x) for x in random.uniform(4, 12, 3))
    sizes = {"M": m, "N": n, "K": k, "TRANS_A": 0, "TRANS_B": int(random.integers(2))}
    return MeasuredProblem(sizes, _kernels(sizes), _times_us(sizes))


def _fit(problems: list[MeasuredProblem], candidates: Any = CANDIDATES, **options: Any) -> Fitted:
    flags = ("TRANS_A", "TRANS_B")
    measured = {"candidates": candidates, "problems": problems}
    return fit_model("product", "float32", DEVICE, SPECS, **measured, flags=flags, **options)


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    random = np.random.default_rng(0)
    return _fit([_problem(random) for _ in range(120)], epochs=12)


def _choose(model: OperationModel, sizes: dict[str, int], **options: Any) -> list[Expected]:
    return model.choose(sizes, _kernels(sizes), SPECS, DEVICE, **options)


def _sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"M": m, "N": n, "K": k, "TRANS_A": 0, "TRANS_B": 0}


def test_it_predicts_problems_that_were_held_out(fitted: Fitted) -> None:
    held_out = fitted.held_out
    errors = np.abs(np.log(held_out.times_us) - math.log(2) * held_out.log2_us)
    assert np.nanmedian(errors) < 0.2


def test_kernels_and_library_are_each_chosen_where_they_are_faster(fitted: Fitted) -> None:
    assert not _choose(fitted.model, _sizes(90, 90, 1000), libraries=("cublas",))[0].candidate.is_library
    assert _choose(fitted.model, _sizes(3000, 3000, 1000), libraries=("cublas",))[0].candidate.is_library


def test_choices_seldom_lose_against_the_library(fitted: Fitted) -> None:
    ratios = choice_ratios(
        CANDIDATES, fitted.held_out, fitted.model.doubts, [0, 1, 2], confidence=fitted.model.confidence
    )
    assert np.percentile(ratios, 2) >= 0.95
    assert ratios.max() > 1.5


def test_the_first_of_one_is_the_first_of_many(fitted: Fitted) -> None:
    random = np.random.default_rng(2)
    for _ in range(60):
        sizes = dict(_problem(random).sizes)
        one, many = (_choose(fitted.model, sizes, libraries=("cublas",), count=count) for count in (1, 9))
        assert one == many[:1]


def test_a_library_that_may_not_be_used_is_not_chosen(fitted: Fitted) -> None:
    found = _choose(fitted.model, _sizes(3000, 3000, 1000))
    assert found
    assert not any(one.candidate.is_library for one in found)


def test_the_library_is_listed_even_if_many_kernels_are_faster(fitted: Fitted) -> None:
    found = _choose(fitted.model, _sizes(200, 200, 1000), libraries=("cublas",), count=9)
    assert any(one.candidate.is_library for one in found)
    assert len(found) > 1


def test_only_valid_configurations_are_chosen(fitted: Fitted) -> None:
    random = np.random.default_rng(1)
    for _ in range(40):
        sizes = dict(_problem(random).sizes)
        for one in _choose(fitted.model, sizes, count=9):
            name = one.candidate.kernel
            assert not check_config(SPECS[name], one.candidate.config, _kernels(sizes)[name], DEVICE, "float32")


def test_a_configuration_that_the_kernel_no_longer_has_is_not_chosen(fitted: Fitted) -> None:
    spec = SPECS["sgemm"]
    changed = replace(spec, parameters=tuple(one for one in spec.parameters if one.name != "GROUP"))
    sizes = _sizes(500, 500, 500)
    kernels = {"sgemm": _kernels(sizes)["sgemm"]}
    model = OperationModel.from_json(fitted.model.to_json())
    assert model.choose(sizes, kernels, {"sgemm": changed}, DEVICE) == []


def test_a_kernel_that_is_not_named_is_not_chosen(fitted: Fitted) -> None:
    sizes = _sizes(500, 500, 500)
    kernels = {"sgemm": _kernels(sizes)["sgemm"]}
    found = fitted.model.choose(sizes, kernels, SPECS, DEVICE, count=9)
    assert {one.candidate.kernel for one in found} == {"sgemm"}


def test_nothing_is_chosen_where_no_kernel_is_named(fitted: Fitted) -> None:
    assert fitted.model.choose(_sizes(5, 5, 5), {}, SPECS, DEVICE) == []


def test_doubt_grows_outside_of_the_measured_sizes(fitted: Fitted) -> None:
    inside = _choose(fitted.model, _sizes(2048, 2048, 2048))[0]
    outside = _choose(fitted.model, _sizes(2048, 2048, 2**20))[0]
    assert outside.doubt > inside.doubt + 1


def test_json_round_trip(fitted: Fitted) -> None:
    again = OperationModel.from_json(decode_json(encode_json(fitted.model.to_json()), dict))
    assert again.to_json() == fitted.model.to_json()
    sizes = _sizes(777, 1234, 99)
    assert _choose(again, sizes, libraries=("cublas",)) == _choose(fitted.model, sizes, libraries=("cublas",))


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(kernels=None),
        lambda document: document["candidates"].__setitem__(1, document["candidates"][0]),
        lambda document: document.update(format=2),
        lambda document: document["doubts"].pop("sgemm"),
        lambda document: document["ranges"].update(M=[0, 5]),
        lambda document: (document["vocabulary"]["sizes"].append("L"), document["ranges"].update(L=[1, 2])),
        lambda document: document["doubts"]["sgemm"].__setitem__(0, -1.0),
        lambda document: document["candidates"].pop(0),
        lambda document: document["vocabulary"].update(members=[]),
    ],
    ids=["no network", "twice", "format", "no doubt", "empty range", "more sizes", "doubt", "one less", "no kernels"],
)
def test_a_damaged_model_is_refused(fitted: Fitted, damage: Any) -> None:
    document = decode_json(encode_json(fitted.model.to_json()), dict)
    damage(document)
    with pytest.raises(DataError):
        OperationModel.from_json(document)


def test_few_problems_are_refused() -> None:
    with pytest.raises(InputError, match="at least 20"):
        _fit([_problem(np.random.default_rng(0))])


def test_problems_without_any_library_give_a_model_of_kernels() -> None:
    random = np.random.default_rng(0)
    problems = [_problem(random) for _ in range(30)]
    own = [problem._replace(times_us={n: problem.times_us[n] for n in range(3)}) for problem in problems]
    model = _fit(own, CANDIDATES[:3], epochs=2).model
    assert model.libraries is None
    assert _choose(OperationModel.from_json(model.to_json()), _sizes(100, 100, 100), libraries=("cublas",))


class TestSelection:
    """A model has few of the measured configurations; which, follows from the times alone."""

    KERNELS = ("sgemm", "sgemm_ws", "sgemm_2d")

    @staticmethod
    def chosen(times_us: Callable[[int], Sequence[float]], kernels: Sequence[str], count: int) -> OperationModel:
        """Fit a model to configurations of kernels, given their times at each of some problems."""
        specs = {name: load_kernel(name).spec for name in kernels}
        configs = [{**specs[name].default, **({"MIN_BLOCKS": 1} if n else {})} for n, name in enumerate(kernels)]
        candidates = [ModelCandidate(name, config, RESOURCES) for name, config in zip(kernels, configs, strict=True)]
        random = np.random.default_rng(0)
        problems = []
        for number in range(24):
            sizes = {"M": 512 + 8 * number, "N": int(2 ** random.uniform(8, 11)), "K": 1024}
            named = {name: {**spec.sizes, **sizes} for name, spec in specs.items()}
            problems.append(MeasuredProblem(sizes, named, dict(enumerate(times_us(number)))))
        measured = {"candidates": candidates, "problems": problems}
        return fit_model("product", "float32", DEVICE, specs, **measured, max_candidates=count, epochs=1).model

    def test_each_kernel_has_a_configuration_though_another_is_always_faster(self) -> None:
        """Some calls exclude the others, such as those that allow no tensor cores."""
        model = self.chosen(lambda _: (10.0, 11.0, 30.0), self.KERNELS, 3)
        assert {one.kernel for one in model.candidates} == set(self.KERNELS)

    def test_of_each_kernel_it_is_the_one_that_is_fastest_among_its_own(self) -> None:
        kernels = ("sgemm", "sgemm_ws", "sgemm_ws", "sgemm_2d")
        model = self.chosen(lambda _: (10.0, 40.0, 20.0, 30.0), kernels, 3)
        served = {one.kernel: one.config for one in model.candidates}
        assert set(served) == set(self.KERNELS)
        assert served["sgemm_ws"] == {**load_kernel("sgemm_ws").spec.default, "MIN_BLOCKS": 1}

    def test_what_is_fastest_of_all_comes_before_what_is_only_served_alone(self) -> None:
        """Two configurations of one kernel are each twice as fast at half of the problems."""
        kernels = ("sgemm", "sgemm", "sgemm_ws")
        times_us = {0: (10.0, 20.0, 30.0), 1: (20.0, 10.0, 30.0)}
        two = self.chosen(lambda number: times_us[number % 2], kernels, 2)
        assert [one.kernel for one in two.candidates] == ["sgemm", "sgemm"]
        three = self.chosen(lambda number: times_us[number % 2], kernels, 3)
        assert {one.kernel for one in three.candidates} == {"sgemm", "sgemm_ws"}

    def test_what_is_never_faster_than_another_of_its_kernel_is_left_out(self) -> None:
        model = self.chosen(lambda _: (10.0, 20.0, 30.0), ("sgemm", "sgemm_ws", "sgemm_ws"), 3)
        assert [one.kernel for one in model.candidates] == ["sgemm", "sgemm_ws"]
