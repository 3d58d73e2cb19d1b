"""Ceilings of a GPU: look-ups, texts, JSON, and what is refused."""

from dataclasses import replace

import pytest
from stored_rows import CEILINGS, DEVICE

from autotile.core.ceilings import (
    Ceiling,
    DeviceCeilings,
    check_ceilings,
    datasheet_ceilings,
    impossible,
    imprecise,
    unit_ceiling,
)
from autotile.core.device import device_profile
from autotile.core.documents import convert, decode_json, encode_json
from autotile.errors import DataError


def named(name: str, value: float, half: float = 0.0) -> DeviceCeilings:
    return replace(CEILINGS, ceilings=(Ceiling(name, value, value - half, value + half, ""),))


def test_the_slope_of_a_roofline_is_the_faster_of_reading_and_copying() -> None:
    assert CEILINGS.memory == CEILINGS.find("dram_read")
    assert CEILINGS.l2 is None


def test_an_element_type_has_the_roofs_of_its_units() -> None:
    assert [one.name for one in CEILINGS.compute("float32")] == ["tensor_tf32", "fma_float32"]
    assert [one.name for one in CEILINGS.compute("bfloat16")] == ["fma_float32"]
    assert CEILINGS.compute("int32") == ()


def test_texts_have_units() -> None:
    texts = {one.name: (one.label, one.text, one.interval_text) for one in CEILINGS.ceilings}
    assert texts["dram_read"] == ("DRAM, read", "4,200 GB/s", "4,100 to 4,300 GB/s")
    assert texts["fma_float32"] == ("fp32 FMA", "59 TFLOP/s", "58 to 60 TFLOP/s")
    assert texts["launch_graph"] == ("empty kernel in a graph", "1.5 us", "1.4 to 1.6 us")
    assert Ceiling("fma_float64", 1e12, 0.9e12, 1.1e12, "").interval_text == "900 GFLOP/s to 1.1 TFLOP/s"
    assert "2 other processes use the GPU" in CEILINGS._repr_html_()


def test_json_is_read_back() -> None:
    text = encode_json(CEILINGS.to_json())
    assert decode_json(text, DeviceCeilings) == CEILINGS
    assert CEILINGS.to_json()["ceilings"][0]["unit"] == "B/s"


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_uuid": "GPU-<script>"},
        {"measured_at": "yesterday"},
        {"ceilings": [{"name": "dram_read", "value": -1.0, "low": 1.0, "high": 1.0, "method": ""}]},
        {"compute_capability": "nine"},
    ],
)
def test_what_does_not_match_the_schema_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(DataError):
        convert({**CEILINGS.to_json(), **change}, DeviceCeilings)


@pytest.mark.parametrize(
    ("ceilings", "fault"),
    [
        ((Ceiling("warp", 1.0, 1.0, 1.0, ""),), "not a ceiling"),
        ((CEILINGS.ceilings[0],) * 2, "twice"),
        ((Ceiling("l2_read", 3.0, 1.0, 2.0, ""),), "outside its interval"),
    ],
)
def test_names_and_intervals_are_checked(ceilings: tuple[Ceiling, ...], fault: str) -> None:
    check_ceilings(CEILINGS)
    with pytest.raises(DataError, match=fault):
        check_ceilings(replace(CEILINGS, ceilings=ceilings))


def test_a_rate_above_what_the_units_can_do_is_found() -> None:
    assert impossible(CEILINGS, DEVICE) == ()
    peak = DEVICE.peak_fp32_flops_per_s
    assert impossible(named("fma_float32", peak), DEVICE) == ()
    (line,) = impossible(named("fma_float32", 1.05 * peak), DEVICE)
    assert "1,980 MHz" in line
    (line,) = impossible(named("dram_read", 1.05 * DEVICE.memory_bandwidth_bytes_per_s), DEVICE)
    assert "clock and bus" in line


def test_a_wide_interval_is_a_warning() -> None:
    assert imprecise(named("dram_read", 4e12, 0.19e12)) == ()
    (line,) = imprecise(named("dram_read", 4e12, 0.4e12))
    assert "10.0 %" in line


def test_figures_of_a_datasheet_are_not_stored_as_a_measurement() -> None:
    figures = datasheet_ceilings(DEVICE)
    assert figures.memory is not None
    assert figures.memory.value == DEVICE.memory_bandwidth_bytes_per_s
    assert repr(figures) == "<DeviceCeilings: NVIDIA H200, by its datasheet>"
    assert impossible(figures, DEVICE) == ()
    with pytest.raises(DataError, match="UUID"):
        check_ceilings(figures)


@pytest.mark.parametrize(
    ("gpu", "name", "tflops"),
    [
        ("v100", "tensor_float16", 125), ("t4", "tensor_float16", 65), ("t4", "tensor_int8", 130),
        ("a100", "tensor_bfloat16", 312), ("a100", "tensor_tf32", 156), ("a100", "tensor_int8", 624),
        ("a100", "tensor_float64", 19.5), ("h100", "tensor_float16", 989.4), ("h200", "tensor_tf32", 494.7),
        ("h200", "tensor_float8_e4m3fn", 1979), ("h200", "tensor_int8", 1979), ("h200", "tensor_float64", 67),
        ("l40s", "tensor_bfloat16", 362), ("l40s", "tensor_float8_e4m3fn", 733), ("rtx-3090", "tensor_float16", 71),
        ("rtx-3090", "tensor_int8", 284), ("rtx-4090", "tensor_bfloat16", 165.2),
        ("rtx-4090", "tensor_float8_e4m3fn", 330.3), ("rtx-4090", "tensor_int8", 660.6),
        ("rtx-5090", "tensor_float16", 209.5), ("rtx-5090", "tensor_float8_e4m3fn", 419),
        ("b200", "tensor_float16", 2250), ("b200", "tensor_float8_e4m3fn", 4500), ("b200", "tensor_float64", 37),
    ],
)  # fmt: skip
def test_peaks_of_tensor_cores_are_those_of_the_datasheets(gpu: str, name: str, tflops: float) -> None:
    """Dense products with sums in fp32, or int32."""
    found = datasheet_ceilings(device_profile(gpu)).find(name)
    assert found is not None
    assert found.value / 1e12 == pytest.approx(tflops, rel=0.015)


def test_a_gpu_without_such_cores_has_no_such_peak() -> None:
    assert datasheet_ceilings(device_profile("v100")).find("tensor_bfloat16") is None
    assert [one.name for one in datasheet_ceilings(device_profile("g80")).ceilings] == ["dram_copy", "fma_float32"]


@pytest.mark.parametrize(
    ("unit", "dtype", "name"),
    [
        ("tensor", "bfloat16", "tensor_bfloat16"), ("tensor", "float32", "tensor_tf32"),
        ("tensor", "int8", "tensor_int8"), ("tensor", "int64", None), ("fma", "float16", "fma_float16"),
        ("fma", "bfloat16", "fma_float32"), ("tensor_bfloat16", "float32", "tensor_bfloat16"),
    ],
)  # fmt: skip
def test_a_unit_is_that_of_the_element_type_unless_it_names_its_own(unit: str, dtype: str, name: str | None) -> None:
    assert unit_ceiling(unit, dtype) == name
