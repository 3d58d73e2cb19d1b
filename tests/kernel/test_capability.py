"""Devices that a kernel supports."""

import pytest
from feature_kernels import CLUSTER_SPACE, SPLIT_SPACE

from autotile.core.device import device_profile
from autotile.errors import DeviceError, InputError, SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import capability_of, is_below, unsupported_reason
from autotile.space.limits import check_config
from autotile.space.search_space import enumerate_space


def declared(line: str, text: str = SPLIT_SPACE) -> str:
    return text.replace('entry = "split"\n', f'entry = "split"\n{line}\n')


@pytest.mark.parametrize(
    ("line", "device", "said"),
    [
        ("", "g80", ""),
        ('minimum_compute_capability = "8.0"', "a100", ""),
        ('minimum_compute_capability = "8.0"', "b200", ""),
        ('minimum_compute_capability = "8.0"', "t4", "split needs compute capability 8.0, but Tesla T4 has 7.5"),
        ('architecture = "sm_90a"', "h100", ""),
        ('architecture = "sm_90a"', "b200", "for sm_90a only, which requires compute capability 9.0, but NVIDIA B200"),
        ('architecture = "sm_90a"', "a100", "choose a device of capability 9.0, or another kernel"),
    ],
)  # fmt: skip
def test_devices(line: str, device: str, said: str) -> None:
    spec = parse_spec(declared(line), "split.toml")
    fault = unsupported_reason(spec, device_profile(device))
    assert said in fault
    assert bool(said) == bool(fault)
    if said:
        assert check_config(spec, spec.default, spec.sizes, device_profile(device)) == fault
        with pytest.raises(DeviceError, match="compute capability"):
            enumerate_space(spec, spec.sizes, device_profile(device))


def test_what_the_file_uses_is_needed_though_it_says_nothing() -> None:
    spec = parse_spec(CLUSTER_SPACE.replace('architecture = "sm_90a"', ""), "swap.toml")
    assert "swap needs compute capability 9.0 for its clusters" in unsupported_reason(spec, device_profile("a100"))
    assert unsupported_reason(spec, device_profile("b200")) == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('architecture = "sm90"', "expected a target such as 'sm_90a'"),
        ('architecture = "compute_90"', "expected a target"),
        ('minimum_compute_capability = "9"', "expected a compute capability such as '8.0'"),
        ("minimum_compute_capability = 9.0", "expected a string"),
    ],
)
def test_refusals(line: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(declared(line), "split.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            declared('architecture = "sm_90a"\nminimum_compute_capability = "10.0"'),
            "sm_90a runs on compute capability 9.0 only, but the kernel needs 10.0, its minimum_compute_capability",
        ),
        (
            CLUSTER_SPACE.replace('"sm_90a"', '"sm_80"'),
            "sm_80 runs on compute capability 8.0 only, but the kernel needs 9.0 for its clusters",
        ),
    ],
)
def test_what_no_device_meets_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        parse_spec(text, "split.toml")
    assert caught.value.key == "kernel.architecture"


def test_a_minimum_below_the_one_architecture_is_no_contradiction() -> None:
    spec = parse_spec(declared('architecture = "sm_90a"\nminimum_compute_capability = "8.0"'), "split.toml")
    assert unsupported_reason(spec, device_profile("h200")) == ""


def test_capabilities_are_numbers_not_texts() -> None:
    assert is_below("9.0", "10.0")
    assert not is_below("9.0", "9.0")
    assert [capability_of(name) for name in ("sm_80", "sm_90a", "sm_120")] == ["8.0", "9.0", "12.0"]
    assert issubclass(DeviceError, InputError)


def test_with_a_lower_minimum_older_devices_run_clusters_of_one_block() -> None:
    text = CLUSTER_SPACE.replace('architecture = "sm_90a"', 'minimum_compute_capability = "8.0"')
    spec = parse_spec(text, "swap.toml")
    assert unsupported_reason(spec, device_profile("a100")) == ""
    assert "NVIDIA A100" in check_config(spec, spec.default, spec.sizes, device_profile("a100"))
