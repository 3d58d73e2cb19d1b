import re

import pytest

from autotile.core.device import Capabilities, device_profile, limits_for, parse_profile, profile_names
from autotile.errors import InputError

PROFILE = """
name = "NVIDIA Example"
compute_capability = "9.0"
sm_count = { value = 132, source = "sheet" }
clock_mhz = { value = 1980, source = "sheet" }
memory_bytes = { value = 1024, source = "sheet" }
memory_bandwidth_bytes_per_s = { value = 4.8e12, source = "sheet" }
l2_bytes = { value = 0, source = "sheet" }

[sources]
sheet = "Example data sheet"
"""


def test_every_named_profile_is_there_and_says_that_it_is_a_profile():
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
def test_sms_lanes_and_clock_give_the_published_fp32_peak(name, tflops):
    assert device_profile(name).peak_fp32_flops_per_s / 1e12 == pytest.approx(tflops, rel=0.006)


def test_h200_figures():
    device = device_profile("h200")
    assert device.architecture == "sm_90"
    assert (device.sm_count, device.clock_mhz, device.l2_bytes) == (132, 1980.0, 60 * 2**20)
    assert (device.smem_per_sm_bytes, device.smem_per_block_optin_bytes) == (233472, 232448)
    assert device.memory_bandwidth_bytes_per_s == 4.8e12


def test_g80_figures():
    device = device_profile("g80")
    assert (device.max_threads_per_block, device.max_threads_per_sm, device.max_blocks_per_sm) == (512, 768, 8)
    assert device.smem_per_block_bytes == device.smem_per_sm_bytes == 16384
    assert device.max_grid_dim == (65535, 65535, 1)


@pytest.mark.parametrize("name", profile_names())
def test_limits_hang_together(name):
    device = device_profile(name)
    assert device.smem_per_block_bytes <= device.smem_per_block_optin_bytes
    assert device.smem_per_block_optin_bytes + device.smem_reserved_per_block_bytes <= device.smem_per_sm_bytes
    assert device.max_threads_per_sm % device.warp_size == 0
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
def test_look_up_forgives_spelling(given, name):
    assert device_profile(given) == device_profile(name)


@pytest.mark.parametrize("name", profile_names())
def test_the_name_that_cuda_gives_finds_the_profile(name):
    assert device_profile(device_profile(name).name) == device_profile(name)


def test_unknown_name_lists_the_nearest_and_all():
    with pytest.raises(InputError) as error:
        device_profile("RTX 3060 Ti")
    assert "nearest: rtx-3060" in str(error.value)
    assert all(name in str(error.value) for name in profile_names())


@pytest.mark.parametrize("name", ["", "NVIDIA", "quantum"])
def test_a_name_near_to_nothing_is_refused(name):
    with pytest.raises(InputError, match="known: a100"):
        device_profile(name)


@pytest.mark.parametrize(
    ("unknown", "known"), [("10.7", "10.3"), ("9.1", "9.0"), ("8.10", "8.9"), ("13.0", "12.1"), ("7.2", "7.0")]
)
def test_unknown_capability_takes_the_nearest_lower_of_its_family_or_the_newest(unknown, known):
    assert limits_for(unknown) == limits_for(known)


def test_capabilities_that_differ_in_one_figure():
    assert limits_for("8.6").max_blocks_per_sm == 16
    assert limits_for("8.9").max_blocks_per_sm == 24
    assert limits_for("12.0") == limits_for("8.9")
    assert limits_for("7.5").smem_unit_bytes == 256
    assert limits_for("8.0").smem_unit_bytes == 128


@pytest.mark.parametrize("text", ["sm_90", "9", "", "9.0a"])
def test_capability_must_have_two_numbers(text):
    with pytest.raises(InputError, match=re.escape(f"{text!r}: expected major and minor")):
        limits_for(text)


def test_a_profile_reads_back():
    device = parse_profile(PROFILE, "example.toml")
    assert (device.name, device.sm_count, device.l2_bytes) == ("NVIDIA Example", 132, 0)
    assert device.max_threads_per_sm == limits_for("9.0").max_threads_per_sm


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sm_count = {", "sm_count = [", "example.toml: not TOML"),
        ("value = 132, ", "", "sm_count: object missing required field value"),
        ("value = 132", "value = 132.5", "sm_count: expected int"),
        ("value = 132", "value = -1", "sm_count: expected int"),
        ("value = 132", "value = true", "sm_count: expected int"),
        ("value = 4.8e12", 'value = "fast"', "memory_bandwidth_bytes_per_s: expected float, got str"),
        ('value = 132, source = "sheet"', 'value = 132, source = "rumour"', "source 'rumour' is not in [sources]"),
        ("[sources]", "[documents]", "there is no [sources] table"),
        ("sm_count", "sms", "does not belong here: sms"),
        ("l2_bytes", "warp_size", "does not belong here: warp_size"),
        ("\n[sources]", 'warp_unit = { value = 4, source = "sheet" }\n[sources]', "does not belong here: warp_unit"),
        ('name = "NVIDIA Example"', "name = 5", "name: expected str, got int"),
        ('compute_capability = "9.0"', "", "object missing required field compute_capability"),
    ],
)
def test_a_malformed_profile_says_what_is_wrong(old, new, message):
    assert old in PROFILE
    with pytest.raises(InputError, match=re.escape(message)):
        parse_profile(PROFILE.replace(old, new), "example.toml")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('["9.9"]\nlike = { value = "9.8", source = "s" }', "like: '9.8' is not a row above"),
        ('["9.9"]\nwarp_size = { value = 32, source = "s" }', "object missing required field"),
        ('["9.9"]\nmax_block_dim = { value = [1, 2], source = "s" }', "max_block_dim: expected array of length 3"),
        ('"9.9" = 3', "expected a table of figures"),
    ],
)
def test_a_malformed_table_of_capabilities_says_what_is_wrong(row, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Capabilities(row.replace('"9.9" = 3', '"9.9" = 3\n') + '\n[sources]\ns = "a document"\n', "table.toml").limits(
            (9, 9)
        )
