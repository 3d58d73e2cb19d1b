"""Constants of cuda.h in the package equal those of the bindings."""

import pytest

from autotile.cuda.driver import _RELAXED
from autotile.cuda.packing import DATA_TYPES, PROMOTIONS, SWIZZLES

driver = pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize(("dtype", "number"), DATA_TYPES.items())
def test_types_of_a_tensor_maps_elements(dtype: str, number: int) -> None:
    name = driver.CUtensorMapDataType(number).name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_").lower()
    unsigned = dict.fromkeys(("int8", "bool", "float8_e4m3fn", "float8_e5m2"), "uint8") | {"int16": "uint16"}
    assert name == unsigned.get(dtype, dtype)


@pytest.mark.parametrize(("size_bytes", "number"), SWIZZLES.items())
def test_swizzles(size_bytes: int, number: int) -> None:
    name = driver.CUtensorMapSwizzle(number).name.removeprefix("CU_TENSOR_MAP_SWIZZLE_")
    assert name == (f"{size_bytes}B" if size_bytes else "NONE")


@pytest.mark.parametrize(("size_bytes", "number"), PROMOTIONS.items())
def test_promotions(size_bytes: int, number: int) -> None:
    name = driver.CUtensorMapL2promotion(number).name.removeprefix("CU_TENSOR_MAP_L2_PROMOTION_")
    assert name == (f"L2_{size_bytes}B" if size_bytes else "NONE")


def test_the_mode_in_which_a_capture_forbids_nothing() -> None:
    assert driver.CUstreamCaptureMode(_RELAXED).name == "CU_STREAM_CAPTURE_MODE_RELAXED"
