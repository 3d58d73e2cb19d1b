"""Models of operations, also those that ship, their networks, and corrections by the nearest measured problems."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotile.core.device import device_profile
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Config, Resources
from autotile.errors import DataError, InputError
from autotile.families.network import MAX_POINTS, Ensemble, Inputs, Neighbours, prepare
from autotile.families.operation_model import (
    CandidateKey,
    Expected,
    HeldOut,
    MeasuredProblem,
    ModelCandidate,
    OperationModel,
    choice_ratios,
    fit_model,
)
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import load_operation
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
Fitted = tuple[OperationModel, HeldOut]


def _kernels(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {**spec.sizes, **{size: value for size, value in sizes.items() if size in spec.sizes}}
        for name, spec in SPECS.items()
    }


def _times_us(sizes: dict[str, int]) -> dict[CandidateKey, float]:
    """Return times by whole rounds of blocks; the library is slow for small products, and fast for large ones."""
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    tiles = (128, 64, 128)
    rounds = [math.ceil(math.ceil(m / tile) * math.ceil(n / tile) / 132) for tile in tiles]
    rates = (1.0, 1.1, 0.8)
    times = [3 + 2e-5 * r * t * t * k * q / 3 for r, t, q in zip(rounds, tiles, rates, strict=True)]
    library = 8 * min(times) if m * n < 2**18 else 0.5 * min(times)
    return dict(zip([one.key for one in CANDIDATES], [*times, library], strict=True))


def _problem(random: np.random.Generator) -> MeasuredProblem:
    m, n, k = (int(2**x) for x in random.uniform(4, 12, 3))
    sizes = {"M": m, "N": n, "K": k, "TRANS_A": 0, "TRANS_B": int(random.integers(2))}
    return sizes, _kernels(sizes), _times_us(sizes)


def _fit(problems: list[MeasuredProblem], candidates: Any = CANDIDATES, specs: Any = SPECS, **options: Any) -> Fitted:
    measured = {"candidates": candidates, "problems": problems, "flags": ("TRANS_A", "TRANS_B")}
    return fit_model("product", "float32", DEVICE, specs, **measured, **options)


@pytest.fixture(scope="module")
def fitted():
    random = np.random.default_rng(0)
    return _fit([_problem(random) for _ in range(120)], epochs=4)


@pytest.fixture(scope="module")
def model(fitted):
    return fitted[0]


def _choose(model: OperationModel, sizes: dict[str, int], **options: Any) -> list[Expected]:
    return model.choose(sizes, _kernels(sizes), SPECS, DEVICE, **options)


def _sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"M": m, "N": n, "K": k, "TRANS_A": 0, "TRANS_B": 0}


def test_it_predicts_problems_that_were_held_out_and_seldom_loses_against_the_library_there(fitted):
    model, held_out = fitted
    _, times_us, log2_us, _ = held_out
    assert np.nanmedian(np.abs(np.log(times_us) - math.log(2) * log2_us)) < 0.2
    ratios = choice_ratios(held_out, model.doubts, model.confidence)
    assert np.percentile(ratios, 2) >= 0.95
    assert ratios.max() > 1.5


def test_the_first_of_one_is_the_first_of_many_and_all_are_valid(model):
    random = np.random.default_rng(2)
    for _ in range(60):
        sizes = dict(_problem(random)[0])
        one, many = (_choose(model, sizes, libraries=("cublas",), count=count) for count in (1, 9))
        assert one == many[:1]
        for name, config in ((each.candidate.kernel, each.candidate.config) for each in many):
            assert name == "cublas" or not check_config(
                SPECS[name], config, SPECS[name].at(_kernels(sizes)[name], "float32"), DEVICE
            )


def test_a_library_is_chosen_where_it_is_faster_and_may_be_used_and_listed_elsewhere(model):
    for size, is_faster in ((90, False), (3000, True)):
        found = _choose(model, _sizes(size, size, 1000), libraries=("cublas",))
        assert found[0].candidate.is_library is is_faster
    found = _choose(model, _sizes(3000, 3000, 1000))
    assert found
    assert not any(one.candidate.is_library for one in found)
    found = _choose(model, _sizes(200, 200, 1000), libraries=("cublas",), count=9)
    assert any(one.candidate.is_library for one in found)
    assert len(found) > 1


def test_a_kernel_that_is_not_named_or_has_no_such_configuration_is_not_chosen(model):
    spec, sizes = SPECS["sgemm"], _sizes(500, 500, 500)
    kernels = {"sgemm": _kernels(sizes)["sgemm"]}
    found = model.choose(sizes, kernels, SPECS, DEVICE, count=9)
    assert {one.candidate.kernel for one in found} == {"sgemm"}
    assert model.choose(_sizes(5, 5, 5), {}, SPECS, DEVICE) == []
    changed = replace(spec, parameters=tuple(one for one in spec.parameters if one.name != "GROUP"))
    model = OperationModel.from_json(model.to_json())
    assert model.choose(sizes, kernels, {"sgemm": changed}, DEVICE) == []
    learned = model.to_json()
    for one in learned["candidates"]:  # before the kernel had a parameter that its grid depends on
        one["config"].pop("BM", None)
    assert OperationModel.from_json(learned).choose(sizes, kernels, SPECS, DEVICE) == []


def test_doubt_grows_outside_of_the_measured_sizes(model):
    inside = _choose(model, _sizes(2048, 2048, 2048))[0]
    outside = _choose(model, _sizes(2048, 2048, 2**20))[0]
    assert outside.doubt > inside.doubt + 1


def test_json_round_trip(model):
    again = OperationModel.from_json(decode_json(encode_json(model.to_json()), dict))
    assert again.to_json() == model.to_json()
    sizes = _sizes(777, 1234, 99)
    assert _choose(again, sizes, libraries=("cublas",)) == _choose(model, sizes, libraries=("cublas",))


TOO_LARGE = {"members": 16, "first": 1024, "second": 1024, "items": 1024}
DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no network": lambda document: document.update(kernels=None),
    "twice": lambda document: document["candidates"].__setitem__(1, document["candidates"][0]),
    "format": lambda document: document.update(format=2),
    "no doubt": lambda document: document["doubts"].pop("sgemm"),
    "empty range": lambda document: document["ranges"].update(M=[0, 5]),
    "more sizes": lambda document: (document["vocabulary"]["sizes"].append("L"), document["ranges"].update(L=[1, 2])),
    "doubt": lambda document: document["doubts"]["sgemm"].__setitem__(0, -1.0),
    "one less": lambda document: document["candidates"].pop(0),
    "no kernels": lambda document: document["vocabulary"].update(members=[]),
    **{
        f"kernels {change}": lambda document, change=change: document["kernels"].update(change)
        for change in ({"members": 3}, {"items": 10**9}, {"first": -1}, {"arrays": {}}, TOO_LARGE)
    },
    **{
        f"weights {text}": lambda document, text=text: document["kernels"]["arrays"].update(out=text)
        for text in ("", "AAAA", "!", "AACAfw==")
    },
    **{
        f"errors {change}": lambda document, change=change: document["library_errors"].update(change)
        for change in ({"count": 3}, {"width": 0}, {"errors": "?"}, {"points": "AAAA"}, {"weights": None})
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused(model, damage):
    document = decode_json(encode_json(model.to_json()), dict)
    DAMAGES[damage](document)
    with pytest.raises(DataError, match="out" if damage.startswith("weights") else None):
        OperationModel.from_json(document)


def test_few_problems_are_refused_and_those_without_any_library_give_a_model_of_kernels():
    random = np.random.default_rng(0)
    problems = [_problem(random) for _ in range(30)]
    with pytest.raises(InputError, match="at least 20"):
        _fit(problems[:1])
    own = [(sizes, kernels, dict(list(times_us.items())[:3])) for sizes, kernels, times_us in problems]
    model = _fit(own, CANDIDATES[:3], epochs=2)[0]
    assert model.libraries is None
    assert _choose(OperationModel.from_json(model.to_json()), _sizes(100, 100, 100), libraries=("cublas",))


class TestSelection:
    """A model has few of the measured configurations; which, follows from the times alone."""

    KERNELS = ("sgemm", "sgemm_ws", "sgemm_2d")

    @staticmethod
    def chosen(times_us: Callable[[int], Sequence[float]], kernels: Sequence[str], count: int) -> OperationModel:
        """Fit a model to configurations of kernels, given their times at each of some problems."""
        specs = {name: load_kernel(name).spec for name in kernels}
        configs = [{**specs[name].default, **({"MIN_BLOCKS": n} if n else {})} for n, name in enumerate(kernels)]
        candidates = [ModelCandidate(name, config, RESOURCES) for name, config in zip(kernels, configs, strict=True)]
        random = np.random.default_rng(0)
        problems = []
        for number in range(24):
            sizes = {"M": 512 + 8 * number, "N": int(2 ** random.uniform(8, 11)), "K": 1024}
            named = {name: {**spec.sizes, **sizes} for name, spec in specs.items()}
            measured_us = zip([one.key for one in candidates], times_us(number), strict=True)
            problems.append((sizes, named, dict(measured_us)))
        return _fit(problems, candidates, specs, max_candidates=count, epochs=1)[0]

    @pytest.mark.parametrize(
        ("kernels", "times_us", "expected"),
        [
            (KERNELS, (10.0, 11.0, 30.0), KERNELS),  # some calls exclude others, such as those without tensor cores
            (("sgemm", "sgemm_ws", "sgemm_ws"), (10.0, 20.0, 30.0), ("sgemm", "sgemm_ws")),
        ],
        ids=["though another is always faster", "none that is never faster than another of its kernel"],
    )
    def test_each_kernel_has_a_configuration(self, kernels, times_us, expected):
        model = self.chosen(lambda _: times_us, kernels, 3)
        assert tuple(one.kernel for one in model.candidates) == expected

    def test_what_is_fastest_of_all_comes_before_what_is_only_served_alone(self):
        """Two configurations of one kernel are each twice as fast at half of the problems."""
        kernels = ("sgemm", "sgemm", "sgemm_ws")
        times_us = {0: (10.0, 20.0, 30.0), 1: (20.0, 10.0, 30.0)}
        two = self.chosen(lambda number: times_us[number % 2], kernels, 2)
        assert [one.kernel for one in two.candidates] == ["sgemm", "sgemm"]
        three = self.chosen(lambda number: times_us[number % 2], kernels, 3)
        assert {one.kernel for one in three.candidates} == {"sgemm", "sgemm_ws"}


ITEMS = 4
OFFSETS = np.array([0.0, 0.5, -0.5, 1.0])


def _rows(count: int, seed: int) -> tuple[Inputs, NDArray[np.float64]]:
    """Return rows of a function with a kink, in which each item has an offset that its inputs do not tell."""
    random = np.random.default_rng(seed)
    problem, pair = random.uniform(0, 10, (count, 2)), random.uniform(0, 5, (count, 1))
    number = random.integers(0, ITEMS, count)
    targets = np.maximum(problem[:, 0], problem[:, 1]) + 0.5 * pair[:, 0] + OFFSETS[number]
    item = np.zeros((count, 1), np.float32)
    return Inputs(problem.astype(np.float32), item, pair.astype(np.float32), number), targets


@pytest.fixture(scope="module")
def ensemble():
    inputs, targets = _rows(2000, 0)
    return Ensemble.fit(inputs, targets, np.ones(2000), ITEMS, epochs=30)


def test_equal_rows_give_equal_networks():
    inputs, targets = _rows(200, 0)
    fits = [Ensemble.fit(inputs, targets, np.ones(200), ITEMS, epochs=2) for _ in range(2)]
    assert all(np.array_equal(fits[0].arrays[name], fits[1].arrays[name]) for name in fits[0].arrays)


def test_preparing_the_items_of_one_problem_changes_nothing(ensemble):
    inputs, _ = _rows(ITEMS, 2)
    inputs = inputs._replace(problem=np.repeat(inputs.problem[:1], ITEMS, axis=0), number=np.arange(ITEMS))
    predict = prepare(ensemble.arrays, inputs.number, inputs.item)
    np.testing.assert_allclose(predict(inputs.problem[0], inputs.pair.T)[0], ensemble.predict(inputs)[0], rtol=1e-5)


def test_many_items_are_predicted_as_few(ensemble):
    inputs, _ = _rows(700, 4)
    predict = prepare(ensemble.arrays, inputs.number, inputs.item)
    for first in (0, 200, 690):
        part = slice(first, first + 10)
        of_few = prepare(ensemble.arrays, inputs.number[part], inputs.item[part])
        for rows, of_part in ((inputs.problem.T, inputs.problem[part].T), (inputs.problem[0],) * 2):
            whole, alone = predict(rows, inputs.pair.T), of_few(of_part, inputs.pair[part].T)
            for all_values, values in zip(whole, alone, strict=True):
                np.testing.assert_allclose(all_values[part], values, rtol=1e-5, atol=1e-5)


def test_an_input_that_never_varied_is_ignored_and_some_items_are_predicted_as_before(ensemble):
    inputs, _ = _rows(50, 3)
    other = inputs._replace(item=inputs.item + 1000)
    assert np.array_equal(ensemble.predict(inputs)[0], ensemble.predict(other)[0])
    chosen = inputs.rows(np.flatnonzero(inputs.number == 2))
    part = ensemble.only([3, 2]).predict(chosen._replace(number=np.ones(len(chosen.number), np.int64)))
    np.testing.assert_allclose(part[0], ensemble.predict(chosen)[0], rtol=1e-6)


def measured(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, two sizes and a flag, and errors with a step at a size of 8 doublings for flag 1."""
    random = np.random.default_rng(seed)
    inputs = np.c_[random.uniform(0, 16, (count, 2)), random.integers(0, 2, count)].astype(np.float32)
    return inputs, np.where((inputs[:, 2] > 0.5) & (inputs[:, 0] > 8), 1.5, -0.25)


def look_up(inputs: np.ndarray, errors: np.ndarray, place: list[float], items: Any = None, item: int = 0) -> Any:
    numbers = np.zeros(len(errors), np.int64) if items is None else items
    return Neighbours.fit(inputs, errors, numbers, 2).look_up(np.array(place, np.float32), item)


def test_a_step_that_the_prediction_missed_is_found_and_the_deviation_is_large_at_it():
    assert look_up(*measured(), [13, 5, 1])[0] == pytest.approx(1.5, abs=0.3)
    assert look_up(*measured(), [3, 5, 1])[0] == pytest.approx(-0.25, abs=0.3)
    assert look_up(*measured(4000), [8, 5, 1])[1] > 0.4 > look_up(*measured(4000), [14, 5, 1])[1]


def test_each_item_has_errors_of_its_own_and_a_long_list_is_thinned_out():
    inputs, errors = measured()
    items = np.arange(400) % 2
    errors = np.where(items == 1, 3.0, errors)
    assert look_up(inputs, errors, [3, 5, 0], items, 1) == pytest.approx((3.0, 0.0))
    assert look_up(inputs, errors, [3, 5, 0], items, 7) == (0.0, 1.0)
    inputs, errors = measured(MAX_POINTS + 5)
    assert len(Neighbours.fit(inputs, errors, np.zeros(len(errors), np.int64), 2).points) <= MAX_POINTS


@given(st.integers(300, 400), st.integers(0, 99), st.floats(2, 14), st.floats(2, 14))
def test_the_nearest_of_all_decide(count, seed, first, second):
    inputs, _ = measured(count, seed)
    errors = np.random.default_rng(seed).uniform(-1, 1, count)
    place = np.array([first, second, 1], np.float32)
    weights = np.array([1.0, 1.0, 0.7 if np.ptp(inputs[:, 2]) > 0 else 0.0])
    points = (inputs * weights).astype(np.float16).astype(float)
    distances = np.square(points - place * weights).sum(axis=1)
    nearest, others = np.split(distances.argsort(), [8])
    assume(distances[others[0]] - distances[nearest[-1]] > 1e-3)  # else rounding in float32 decides which is nearer
    share = 1 / (distances[nearest] + 0.05)
    expected = (share * errors.astype(np.float16)[nearest]).sum() / share.sum()
    found = Neighbours.fit(inputs, errors, np.zeros(count, np.int64), 2)
    assert found.look_up(place, 0)[0] == pytest.approx(expected, abs=0.02)


MODELS = sorted((Path(__file__).parents[2] / "tuned" / "models").glob("*.json"))
TIMES = decode_json((Path(__file__).parent / "recorded_times.json").read_bytes(), dict[str, list[dict[str, Any]]])
OPERATION = load_operation("matmul")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_every_model_is_read(path):
    model = OperationModel.from_json(decode_json(path.read_bytes(), dict))
    assert path.name.endswith(f".{model.operation}.{model.dtype}.json")
    for candidate in model.candidates:
        if not candidate.is_library:
            spec = load_kernel(candidate.kernel).spec
            assert candidate.config.keys() == {parameter.name for parameter in spec.parameters}


@pytest.mark.parametrize(
    ("dtype", "libraries", "least"),
    [("bfloat16", ("cublas",), 1.02), ("float32", ("cublas",), 1.15), ("bfloat16", (), 1.0), ("float32", (), 1.3)],
)
def test_choices_gain_and_hardly_lose_against_the_library(dtype, libraries, least):
    path = next(path for path in MODELS if path.name == f"nvidia-h200.matmul.{dtype}.json")
    model = OperationModel.from_json(decode_json(path.read_bytes(), dict))
    specs = {name: load_kernel(name).spec for name in model.vocabulary.members}
    numbers = {candidate.key: str(number) for number, candidate in enumerate(model.candidates)}
    library = next(number for number, one in enumerate(model.candidates) if one.is_library)
    ratios = []  # of the library's time to that of the choice, where the choice was measured
    for row in TIMES[dtype]:
        problem = OPERATION.resolve(row["sizes"], dtype)
        kernels = {member.name: sizes for member, sizes in OPERATION.fitting(problem, DEVICE)}
        found = model.choose(problem.sizes, kernels, specs, DEVICE, libraries=libraries)
        time_us = row["times_us"].get(numbers[found[0].candidate.key])
        if time_us is not None:
            ratios.append(row["times_us"][str(library)] / time_us)
    assert len(ratios) > (40 if libraries else 30)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= least
    assert not libraries or sorted(ratios)[1] >= 0.9  # a library is erratic: one in sixty may surprise
