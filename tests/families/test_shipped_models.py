"""The models that ship choose well among times that were measured on the same GPU, a part of what they learned from."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autotile.core.device import device_profile
from autotile.core.documents import decode_json
from autotile.families.operation_model import OperationModel
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import load_operation

MODELS = sorted((Path(__file__).parents[2] / "tuned" / "models").glob("*.json"))
TIMES = decode_json((Path(__file__).parent / "recorded_times.json").read_bytes(), dict[str, list[dict[str, Any]]])
DEVICE = device_profile("h200")
OPERATION = load_operation("matmul")


@cache
def _model(dtype: str) -> OperationModel:
    path = next(path for path in MODELS if path.name == f"nvidia-h200.matmul.{dtype}.json")
    return OperationModel.from_json(decode_json(path.read_bytes(), dict))


def _ratios(dtype: str, libraries: tuple[str, ...]) -> list[float]:
    """Return the time of the library over that of the choice, where the choice was measured."""
    model = _model(dtype)
    specs = {name: load_kernel(name).spec for name in model.vocabulary.members}
    numbers = {candidate.key: str(number) for number, candidate in enumerate(model.candidates)}
    library = next(number for number, one in enumerate(model.candidates) if one.is_library)
    ratios = []
    for row in TIMES[dtype]:
        problem = OPERATION.resolve(row["sizes"], dtype)
        kernels = {member.name: sizes for member, sizes in OPERATION.fitting(problem, DEVICE)}
        found = model.choose(problem.sizes, kernels, specs, DEVICE, libraries=libraries)
        time_us = row["times_us"].get(numbers[found[0].candidate.key])
        if time_us is not None:
            ratios.append(row["times_us"][str(library)] / time_us)
    return ratios


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_every_model_is_read(path: Path) -> None:
    model = OperationModel.from_json(decode_json(path.read_bytes(), dict))
    assert path.name.endswith(f".{model.operation}.{model.dtype}.json")
    for candidate in model.candidates:
        if not candidate.is_library:
            spec = load_kernel(candidate.kernel).spec
            assert candidate.config.keys() == {parameter.name for parameter in spec.parameters}


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.02), ("float32", 1.15)])
def test_choices_gain_and_hardly_ever_lose_against_the_library(dtype: str, least: float) -> None:
    ratios = _ratios(dtype, ("cublas",))
    assert len(ratios) > 40
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= least
    assert sorted(ratios)[1] >= 0.9  # a library is erratic: one in sixty may surprise


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.0), ("float32", 1.3)])
def test_choices_without_the_library_are_fast(dtype: str, least: float) -> None:
    ratios = _ratios(dtype, ())
    assert len(ratios) > 30
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= least
