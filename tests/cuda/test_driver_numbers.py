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


@pytest.mark.parametrize(
    ("kind", "prefix", "numbers"), [("Swizzle", "SWIZZLE_", SWIZZLES), ("L2promotion", "L2_PROMOTION_L2_", PROMOTIONS)]
)
def test_swizzles_and_promotions(kind: str, prefix: str, numbers: dict[int, int]) -> None:
    names = [getattr(driver, f"CUtensorMap{kind}")(number).name for number in numbers.values()]
    none = "CU_TENSOR_MAP_" + prefix.removesuffix("L2_") + "NONE"
    assert names == [f"CU_TENSOR_MAP_{prefix}{size}B" if size else none for size in numbers]


def test_the_mode_in_which_a_capture_forbids_nothing() -> None:
    assert driver.CUstreamCaptureMode(_RELAXED).name == "CU_STREAM_CAPTURE_MODE_RELAXED"
