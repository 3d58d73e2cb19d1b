"""Properties of GPUs and their ceilings: profiles, look-ups, texts, JSON, and what is refused."""

import re
import tomllib
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
from autotile.core.device import (
    _CAPABILITIES,
    DeviceProperties,
    _files,
    device_profile,
    limits_for,
    parse_profile,
    profile_names,
)
from autotile.core.documents import decode_json, encode_json
from autotile.errors import DataError, InputError

PROFILE = _files()["h200"].read_text()
FIELDS = DeviceProperties.__struct_fields__
SHARED = {*FIELDS[: FIELDS.index("name")]}
"""Figures of all devices of a compute capability."""


class TestProfiles:
    def test_every_named_profile_is_there_and_says_that_it_is_a_profile(self):
        names = profile_names()
        assert names == sorted(names)
        assert set(names) == {
            "g80", "v100", "t4", "a100", "rtx-3060", "rtx-3090", "rtx-4090", "l40s", "h100", "h200", "b200", "rtx-5090",
        }  # fmt: skip
        assert {device_profile(name).source for name in names} == {"profile"}

    @pytest.mark.parametrize(
        ("name", "tflops"),
        [
            ("g80", 0.3456), ("v100", 15.7), ("t4", 8.1), ("a100", 19.5), ("rtx-3060", 12.7), ("rtx-3090", 35.6),
            ("rtx-4090", 82.6), ("l40s", 91.6), ("h100", 66.9), ("h200", 66.9), ("rtx-5090", 104.8),
        ],
    )  # fmt: skip
    def test_sms_lanes_and_clock_give_the_published_fp32_peak(self, name, tflops):
        assert device_profile(name).peak_fp32_flops_per_s / 1e12 == pytest.approx(tflops, rel=0.006)

    def test_figures(self):
        new, old = device_profile("h200"), device_profile("g80")
        assert new.architecture == "sm_90"
        assert (new.sm_count, new.clock_mhz, new.l2_bytes) == (132, 1980.0, 60 * 2**20)
        assert (new.smem_per_sm_bytes, new.smem_per_block_optin_bytes) == (233472, 232448)
        assert new.memory_bandwidth_bytes_per_s == 4.8e12
        assert (old.max_threads_per_block, old.max_threads_per_sm, old.max_blocks_per_sm) == (512, 768, 8)
        assert old.smem_per_block_bytes == old.smem_per_sm_bytes == 16384
        assert old.max_grid_dim == (65535, 65535, 1)

    @pytest.mark.parametrize("name", profile_names())
    def test_limits_hang_together_and_the_name_of_cuda_finds_them(self, name):
        device = device_profile(name)
        assert device.smem_per_block_bytes <= device.smem_per_block_optin_bytes
        assert device.smem_per_block_optin_bytes + device.smem_reserved_per_block_bytes <= device.smem_per_sm_bytes
        assert device.max_threads_per_sm % device.warp_size == 0
        assert device_profile(device.name) == device  # found by the name that CUDA gives
        assert device.max_threads_per_block <= device.max_threads_per_sm
        assert device.registers_per_block <= device.registers_per_sm

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("RTX 3060", "rtx-3060"), ("rtx_3060", "rtx-3060"), ("NVIDIA GeForce RTX 3060", "rtx-3060"),
            ("NVIDIA H200", "h200"), ("H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
            ("Tesla V100-SXM2-16GB", "v100"), ("8800 GTX", "g80"), ("4090", "rtx-4090"),
        ],
    )  # fmt: skip
    def test_look_up_forgives_spelling(self, given, name):
        assert device_profile(given) == device_profile(name)

    def test_unknown_name_lists_the_nearest_and_all(self):
        with pytest.raises(InputError) as error:
            device_profile("RTX 3060 Ti")
        assert "nearest: rtx-3060" in str(error.value)
        assert all(name in str(error.value) for name in profile_names())
        for name in ("", "NVIDIA", "quantum"):
            with pytest.raises(InputError, match="known: a100"):
                device_profile(name)

    @pytest.mark.parametrize(
        ("unknown", "known"),
        [("10.7", "10.3"), ("9.1", "9.0"), ("8.10", "8.9"), ("13.0", "12.1"), ("7.2", "7.0"), ("2.0", "12.1")],
    )
    def test_unknown_capability_takes_the_nearest_lower_of_its_family_or_the_newest(self, unknown, known):
        assert limits_for(unknown) == limits_for(known)

    def test_capabilities_that_differ_in_one_figure_and_what_is_none(self):
        assert [limits_for(name)["max_blocks_per_sm"] for name in ("8.6", "8.9")] == [16, 24]
        assert [limits_for(name)["smem_unit_bytes"] for name in ("7.5", "8.0")] == [256, 128]
        assert limits_for("12.0") == limits_for("8.9")
        for text in ("sm_90", "9", "", "9.0a"):
            with pytest.raises(InputError, match=re.escape(f"{text!r}: expected major and minor")):
                limits_for(text)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("sm_count = {", "sm_count = [", "x.toml: Invalid value (at line"),
            ("value = 132, ", "", "x.toml: sm_count: expected int, got null"),
            ("value = 132", "value = 132.5", "sm_count: expected int"),
            ("value = 132", "value = -1", "sm_count: expected int"),
            ("value = 132", "value = true", "sm_count: expected int"),
            ("value = 4.8e12", 'value = "fast"', "memory_bandwidth_bytes_per_s: expected float, got str"),
            ("sm_count", "sms", "object missing required field sm_count"),
            ('name = "NVIDIA H200"', "name = 5", "name: expected str, got int"),
            ('compute_capability = "9.0"', "", "compute capability 'None': expected major and minor version"),
        ],
    )
    def test_a_malformed_profile_says_what_is_wrong(self, old, new, message):
        assert parse_profile(PROFILE, "x.toml") == device_profile("h200")
        assert old in PROFILE
        with pytest.raises(InputError, match=re.escape(message)):
            parse_profile(PROFILE.replace(old, new), "x.toml")

    @pytest.mark.parametrize("path", [_CAPABILITIES, *_files().values()], ids=lambda path: path.stem)
    def test_every_figure_that_ships_is_a_known_one_and_names_a_source_of_its_file(self, path):
        document = tomllib.loads(path.read_text())
        sources = document.pop("sources")
        chip = {"sm_count", "clock_mhz", "memory_bytes", "memory_bandwidth_bytes_per_s", "l2_bytes"}
        rows = document if path is _CAPABILITIES else {"": document}
        for number, (capability, row) in enumerate(rows.items()):
            names = {"name", "compute_capability"} if path is not _CAPABILITIES else set()
            figures = {name: figure for name, figure in row.items() if name not in names}
            assert figures.keys() <= ({*SHARED, "like"} if capability else chip)
            assert all(figure.keys() == {"value", "source"} for figure in figures.values())
            assert {figure["source"] for figure in figures.values()} <= sources.keys()
            assert row.get("like", {"value": None})["value"] in [None, *list(rows)[:number]]  # a row above
            assert not capability or limits_for(capability).keys() == SHARED


def named(name: str, value: float, half: float = 0.0) -> DeviceCeilings:
    return replace(CEILINGS, ceilings=(Ceiling(name, value, value - half, value + half, ""),))


class TestCeilings:
    def test_a_roofline_has_the_faster_of_reading_and_copying_and_the_units_of_the_element_type(self):
        assert CEILINGS.memory == CEILINGS.find("dram_read")
        assert CEILINGS.l2 is None
        assert [one.name for one in CEILINGS.compute("float32")] == ["tensor_tf32", "fma_float32"]
        assert [one.name for one in CEILINGS.compute("bfloat16")] == ["fma_float32"]
        assert CEILINGS.compute("int32") == ()

    def test_texts_have_units_and_json_is_read_back(self):
        texts = {one.name: (one.label, one.text, one.interval_text) for one in CEILINGS.ceilings}
        assert texts["dram_read"] == ("DRAM, read", "4,200 GB/s", "4,100 to 4,300 GB/s")
        assert texts["fma_float32"] == ("fp32 FMA", "59 TFLOP/s", "58 to 60 TFLOP/s")
        assert texts["launch_graph"] == ("empty kernel in a graph", "1.5 us", "1.4 to 1.6 us")
        assert Ceiling("fma_float64", 1e12, 0.9e12, 1.1e12, "").interval_text == "900 GFLOP/s to 1.1 TFLOP/s"
        assert "2 other processes use the GPU" in CEILINGS._repr_html_()
        text = encode_json(CEILINGS.to_json())
        assert decode_json(text, DeviceCeilings) == CEILINGS
        assert CEILINGS.to_json()["ceilings"][0]["unit"] == "B/s"

    @pytest.mark.parametrize(
        ("ceilings", "fault"),
        [
            ((Ceiling("warp", 1.0, 1.0, 1.0, ""),), "not a ceiling"),
            ((CEILINGS.ceilings[0],) * 2, "twice"),
            ((Ceiling("l2_read", 3.0, 1.0, 2.0, ""),), "outside its interval"),
        ],
    )
    def test_names_and_intervals_are_checked(self, ceilings, fault):
        check_ceilings(CEILINGS)
        with pytest.raises(DataError, match=fault):
            check_ceilings(replace(CEILINGS, ceilings=ceilings))

    def test_a_rate_above_what_the_units_can_do_is_found_and_a_wide_interval_is_a_warning(self):
        assert impossible(CEILINGS, DEVICE) == ()
        peak = DEVICE.peak_fp32_flops_per_s
        assert impossible(named("fma_float32", peak), DEVICE) == ()
        (line,) = impossible(named("fma_float32", 1.05 * peak), DEVICE)
        assert "1,980 MHz" in line
        (line,) = impossible(named("dram_read", 1.05 * DEVICE.memory_bandwidth_bytes_per_s), DEVICE)
        assert "clock and bus" in line
        assert imprecise(named("dram_read", 4e12, 0.19e12)) == ()
        (line,) = imprecise(named("dram_read", 4e12, 0.4e12))
        assert "10.0 %" in line

    def test_figures_of_a_datasheet_are_not_stored_as_a_measurement(self):
        figures = datasheet_ceilings(DEVICE)
        assert figures.memory.value == DEVICE.memory_bandwidth_bytes_per_s
        assert repr(figures) == "<DeviceCeilings: NVIDIA H200, by its datasheet>"
        assert impossible(figures, DEVICE) == ()
        with pytest.raises(DataError, match="UUID"):
            check_ceilings(figures)
        assert datasheet_ceilings(device_profile("v100")).find("tensor_bfloat16") is None  # it has no such cores
        assert [one.name for one in datasheet_ceilings(device_profile("g80")).ceilings] == ["dram_copy", "fma_float32"]

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
    def test_peaks_of_tensor_cores_are_those_of_the_datasheets(self, gpu, name, tflops):
        """Dense products with sums in fp32, or int32."""
        found = datasheet_ceilings(device_profile(gpu)).find(name)
        assert found.value / 1e12 == pytest.approx(tflops, rel=0.015)

    @pytest.mark.parametrize(
        ("unit", "dtype", "name"),
        [
            ("tensor", "bfloat16", "tensor_bfloat16"), ("tensor", "float32", "tensor_tf32"),
            ("tensor", "int8", "tensor_int8"), ("tensor", "int64", None), ("fma", "float16", "fma_float16"),
            ("fma", "bfloat16", "fma_float32"), ("tensor_bfloat16", "float32", "tensor_bfloat16"),
        ],
    )  # fmt: skip
    def test_a_unit_is_of_the_element_type_unless_it_names_one(self, unit, dtype, name):
        assert unit_ceiling(unit, dtype) == name
