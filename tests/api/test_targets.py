"""One meaning of a device, by index or by name, with and without GPUs on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotile.api import targets
from autotile.api.targets import output_file
from autotile.core.device import DeviceProperties, device_profile
from autotile.errors import InputError, UnknownKernelError


def gpu(name: str) -> DeviceProperties:
    return replace(device_profile("a100"), name=name, source="cuda")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[DeviceProperties]:
    """Three GPUs of this machine, the last of a kind without a profile."""
    present = [gpu("NVIDIA H100 80GB HBM3"), gpu("NVIDIA H100 80GB HBM3"), gpu("Acme G1")]
    monkeypatch.setattr(targets, "device_count", lambda: len(present))
    monkeypatch.setattr(targets, "live_device", lambda index=0: present[index])
    return present


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "device_count", lambda: 0)


class TestInspectedDevice:
    @pytest.mark.parametrize(("device", "index"), [(None, 0), (0, 0), (1, 1), ("2", 2), ("acme g1", 2)])
    def test_gpus_of_this_machine(self, gpus, device, index):
        assert targets.resolve_device(device) == targets.Target(gpus[index], index)

    @pytest.mark.usefixtures("gpus")
    @pytest.mark.parametrize("name", ["h100", "NVIDIA H100 80GB HBM3", "rtx-3060"])
    def test_the_profile_of_a_name_is_preferred(self, name):
        assert targets.resolve_device(name) == targets.Target(device_profile(name))

    @pytest.mark.usefixtures("no_gpus")
    def test_without_a_gpu_the_assumed_device_is_stated(self):
        target = targets.resolve_device()
        assert (target.device, target.index) == (device_profile("h200"), None)
        assert target.notice.startswith("no CUDA device here: the answer is for the NVIDIA H200")

    @pytest.mark.usefixtures("gpus")
    @pytest.mark.parametrize(
        ("device", "said"),
        [
            (3, "no CUDA device 3 on this machine: there are 0 to 2"),
            (-1, "no CUDA device -1"),
            ("3", "no CUDA device 3"),
            ("h101", "no GPU profile is named 'h101'; nearest: h100"),
            ("9" * 5000, "no GPU profile is named"),
            (1.5, "the device is 1.5, expected a CUDA index such as 0 or a name such as 'h200'"),
        ],
    )
    def test_refusals(self, device, said):
        with pytest.raises(InputError, match=said):
            targets.resolve_device(device)


class TestGpu:
    @pytest.mark.usefixtures("gpus")
    @pytest.mark.parametrize(
        ("device", "index"),
        [(None, 0), (1, 1), ("1", 1), ("h100", 0), ("nvidia h100 80gb hbm3", 0), ("H100", 0), ("Acme G1", 2)],
    )
    def test_by_index_and_by_name(self, device, index):
        assert targets.resolve_gpu(device) == index

    @pytest.mark.usefixtures("gpus")
    @pytest.mark.parametrize("name", ["h200", "no such gpu"])
    def test_a_name_must_be_that_of_a_gpu_here(self, name):
        with pytest.raises(InputError, match=f"is named '{name}': 0 is NVIDIA H100 80GB HBM3, 1 is .*, 2 is Acme G1"):
            targets.resolve_gpu(name)

    @pytest.mark.usefixtures("no_gpus")
    @pytest.mark.parametrize("device", [None, 0, "0", "h200"])
    def test_without_a_gpu(self, device):
        with pytest.raises(InputError, match="there is none"):
            targets.resolve_gpu(device)


class TestProblem:
    def test_a_path_and_its_text_name_the_same_kernel(self, scale_toml: Path):
        assert targets.open_problem(scale_toml, {"n": 8}) == targets.open_problem(str(scale_toml), {"n": 8})

    def test_missing_sizes(self, scale_toml: Path):
        assert targets.open_problem(scale_toml, {})[1].sizes == {"n": 4096}

    def test_an_unknown_kernel(self):
        with pytest.raises(UnknownKernelError):
            targets.open_problem("no_such_kernel", {})


class TestOutputFile:
    @pytest.mark.parametrize("output", ["", ".", "..", "/", Path(), "~autotile-nobody/file", "~"])
    def test_what_is_no_file(self, output: str | Path) -> None:
        with pytest.raises(InputError, match=r"names a folder|expected the path of a file|there is no home folder"):
            output_file(output)

    def test_the_home_folder_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert output_file("~/results.json") == tmp_path / "results.json"
