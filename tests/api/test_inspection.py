"""Functions that run nothing on a GPU: spaces, surveys, devices and the doctor."""

import doctest
import os
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from stored_rows import CEILINGS

import autotile
from autotile.api import doctor, inspection, targets
from autotile.api.doctor import HealthCheck, HealthReport
from autotile.api.inspection import survey
from autotile.core.device import DeviceProperties, device_profile, profile_names
from autotile.database.database import Database
from autotile.database.learned import save_ceilings
from autotile.errors import ConfigError, DatabaseError, InputError, UnknownKernelError
from autotile.settings import output_path
from autotile.tuning.options import TuneOptions
from autotile.workers import compile_pool

MACRO_BOMB = """
#define TIMES_16(x) x x x x x x x x x x x x x x x x
#define TIMES_65536(x) TIMES_16(TIMES_16(TIMES_16(TIMES_16(x))))
__device__ const char text[] = TIMES_65536(TIMES_65536("."));
"""
"""A string of 4 GiB: minutes and gigabytes of the compiler's front end."""


def add_code(search_space: Path, code: str) -> None:
    template = search_space.with_suffix(".cu")
    template.write_text(f"{code}\n{template.read_text()}")


def test_a_repr_is_one_short_line(scale_toml):
    of, explained = "float32 on NVIDIA H200 (profile)", partial(inspection.explain, scale_toml, device="h200")
    occupied = "66.7 %: 1 block on an SM, 32 of 48 warps; limited by threads"
    for result, line in (
        (inspection.space(scale_toml, device="h200", n=100), f"scale n=100 {of}: 3 of 12 valid"),
        (explained(THREADS=64, n=1000), f"scale n=1000 {of}: valid, occupancy 100.0 %"),
        (explained(THREADS=256, n=100), f"scale n=100 {of}: cannot be used, occupancy 100.0 %"),
        (inspection.occupancy(1024, 32, 8192, device="rtx-3060"), f"NVIDIA GeForce RTX 3060 (profile): {occupied}"),
    ):
        assert repr(result) == f"<{type(result).__name__}: {line}>"


def test_examples_and_heuristics_which_are_distinguished_from_rules():
    examples = doctest.testmod(inspection)  # of which one is skipped; Python 3.13 counts it as attempted
    assert (examples.failed, examples.attempted - getattr(examples, "skipped", 0)) == (0, 3)
    funnel = inspection.space("gemm_mma", device="a100").funnel()
    assert {stage.split()[0] for stage, _ in funnel} == {"all", "rule", "heuristic", "limit"}
    assert "are ignored" in inspection.space("sgemm_ws", device="h200", M=8, N=8, K=8).notices[-1]


class TestExplain:
    def test_values_have_their_own_types_and_may_be_huge(self, scale_toml):
        found = inspection.explain("matmul_tiled", {"TILE": np.int64(32)}, device="h200", GUARDED=False, N=np.int64(64))
        assert (found.config["TILE"], found.config["GUARDED"], found.problem.sizes["N"]) == (32, False, 64)
        assert type(found.config["TILE"]) is int
        for value in (0, False, np.False_):
            assert inspection.explain("matmul_tiled", device="h200", GUARDED=value).config["GUARDED"] is False
        text = scale_toml.read_text().replace("[parameters]", f"[parameters]\nBIG = [1, {2**62}]")
        scale_toml.write_text(text.replace("[default]", "[default]\nBIG = 1"))
        assert inspection.explain(scale_toml, device="h200", BIG=2**62).config["BIG"] == 2**62

    @pytest.mark.parametrize(
        ("name", "value"),
        [("TILE", "16"), ("TILE", True), ("TILE", 16.0), ("TILE", 10**7), ("GUARDED", "false"), ("GUARDED", 2)],
    )
    def test_values_of_another_type_are_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"{name} = {value!r} is not among its values"):
            inspection.explain("matmul_tiled", {name: value}, device="h200")

    def test_compiled_resources_and_a_value_that_is_not_listed(self, scale_toml, monkeypatch):
        found = inspection.explain(scale_toml, device="h200", THREADS=96)
        assert (found.resources, found.not_compiled) == (None, "it would not be compiled")
        without_value = inspection.explain("sgemm_2d", device="h200", BM=7)
        assert without_value.fault == "BM = 7 is not among its values 32, 64, 128, 256"
        details = {check.name: check.detail for check in without_value.checks if not check.holds}
        assert details["whole_trips_of_A"].startswith("division by zero where BK = 8, BM = 7")
        found = inspection.explain(scale_toml, device="h200", THREADS=64)
        assert found.block == inspection.BlockResources(64, found.resources.registers, 0)
        assert found.occupancy.limited_by == ("threads", "blocks")
        monkeypatch.setattr(compile_pool, "Child", None)  # what is compiled needs no process
        assert inspection.explain(scale_toml, device="h200", THREADS=64).resources == found.resources

    @pytest.mark.parametrize(
        ("assignments", "named", "said"),
        [
            ({"THREAD": 64}, {}, "neither a parameter nor a size 'THREAD'; did you mean 'THREADS'"),
            ({"THREADS": 64}, {"THREADS": 32}, "THREADS is given twice, in the mapping and by keyword"),
            ({}, {"n": "8"}, "size n is '8'"),
            ({}, {"dtype": "float16"}, "does not support dtype 'float16'"),
        ],
    )
    def test_refusals(self, scale_toml, assignments, named, said):
        with pytest.raises(InputError, match=said):
            inspection.explain(scale_toml, assignments, device="h200", **named)

    def test_a_compilation_that_does_not_end_is_stopped(self, scale_toml, monkeypatch):
        monkeypatch.setattr(
            import_module("autotile.tuning.options"), "TuneOptions", lambda: TuneOptions(compile_deadline_s=1.0)
        )
        add_code(scale_toml, MACRO_BOMB)
        found = inspection.explain(scale_toml, device="h200")
        assert found.resources is None
        assert found.fault == "it does not compile: the compiler was stopped after 1 s"
        assert found.checks[-1] == inspection.ConfigCheck("compiled", "source", False, found.fault)


class TestOccupancy:
    @pytest.mark.parametrize("resources", [(1024, 255, 232448), (1025, 0, 0), (32, 256, 0), (32, 0, 232449)])
    def test_a_block_that_cannot_be_launched_has_a_reason(self, resources):
        allows = "a block has at most 1,024 threads, 255 registers a thread and 232,448 bytes on NVIDIA H200"
        found = inspection.occupancy(*resources, device="h200")
        assert found.notices == (() if resources == (1024, 255, 232448) else (allows,))
        unused = "<td>not known</td><td>65,536</td><td>no limit</td>"
        assert (unused in found._repr_html_()) == (resources[1] == 0)

    @pytest.mark.parametrize("resources", [(0, 0, 0), (-1, 0, 0), (32, -1, 0), (32, 0, -1), (32, 0, 2**31)])
    def test_impossible_blocks(self, resources):
        with pytest.raises(InputError, match="are no block; expected at least 1 thread"):
            inspection.occupancy(*resources, device="h200")


FAILING = """
#if THREADS == 64
#error "64 threads, WORK is not supported"
#endif
#if WORK == 4
__device__ int wide[WORK] = {a_name_that_is_not_declared};
#endif
"""


@pytest.fixture(scope="module")
def surveys(tmp_path_factory, write_scale, cubin_cache_folder):
    """Surveys of the kernel, and of one whose blocks of 64 threads, and 4 outputs a thread, do not compile."""
    kernels = {name: write_scale(tmp_path_factory.mktemp(name) / "kernels") for name in ("whole", "failing")}
    add_code(kernels["failing"], FAILING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTILE_CACHE", str(cubin_cache_folder))
        return {name: survey(path, device="h200", n=4096) for name, path in kernels.items()}


class TestSurvey:
    def test_every_valid_configuration_is_compiled_as_explain_shows_it(self, surveys, scale_toml):
        found = surveys["whole"]
        assert len(found) == len(found.space) == found.planned == 12
        assert found.is_usable.all()
        assert (found.failures, found.interrupted) == ((), False)
        assert "12 configurations compiled, 12 usable" in repr(found)
        for index in range(0, 12, 5):
            one = autotile.explain(scale_toml, found.config(index), device="h200", n=4096)
            assert found.columns["registers"][index] == one.resources.registers
            assert found.columns["threads"][index] == one.geometry.threads
            assert found.columns["blocks"][index] == one.geometry.blocks
            assert found.occupancy[index] == pytest.approx(one.occupancy.occupancy)
            assert found.columns["blocks_per_sm"][index] == one.occupancy.blocks_per_sm
            assert set(found.limited_by(index)) == set(one.occupancy.limited_by)
            resident = one.occupancy.blocks_per_sm * one.device.sm_count
            assert found.waves[index] == pytest.approx(one.geometry.blocks / resident)

    def test_failures_are_grouped_by_the_words_of_the_compiler(self, surveys):
        found = surveys["failing"]
        assert (len(found), int(found.is_usable.sum())) == (12, 6)
        reasons = [group.reason for group in found.failures]
        assert len(reasons) == 2
        assert any("64 threads, WORK is not supported" in reason for reason in reasons)
        assert any("a_name_that_is_not_declared" in reason for reason in reasons)
        assert [group.count for group in found.failures] == [3, 3]  # #error comes before anything else
        failed = np.flatnonzero(~found.is_usable)
        assert all(found.reason(int(index)) in reasons for index in failed)
        assert np.isnan(found.occupancy[failed]).all()

    def test_a_sample_is_a_part_of_a_larger_one_and_another_device_has_other_limits(self, scale_toml):
        few, more = (survey(scale_toml, device="h200", n=4096, sample=count, seed=3) for count in (4, 8))
        assert len(few) == 4
        assert set(few.rows) < set(more.rows)
        whole = survey(scale_toml, device="h200", n=4096, sample=99)
        assert whole.notices[-1] == "only 12 configurations are valid: all are compiled"
        found = survey(scale_toml, device="rtx-3060", n=4096, sample=2)
        assert found.device.compute_capability == "8.6"
        assert (found.columns["warps_per_sm"] <= found.device.max_warps_per_sm).all()

    @pytest.mark.parametrize(("name", "value"), [("sample", 0), ("sample", 1.5), ("seed", -1), ("workers", 0)])
    def test_a_number_out_of_range_is_refused(self, scale_toml, name, value):
        with pytest.raises(InputError, match=name):
            survey(scale_toml, device="h200", n=4096, **{name: value})


def gpu(name: str) -> DeviceProperties:
    return replace(device_profile("a100"), name=name, source="cuda")


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs of this machine, the last of a kind without a profile."""
    present = [gpu("NVIDIA H100 80GB HBM3"), gpu("NVIDIA H100 80GB HBM3"), gpu("Acme G1")]
    monkeypatch.setattr(targets, "device_count", lambda: len(present))
    monkeypatch.setattr(targets, "live_device", lambda index=0: present[index])
    return present


class TestDevice:
    @pytest.mark.parametrize(
        ("device", "index"), [(None, 0), (0, 0), (1, 1), ("1", 1), ("2", 2), ("acme g1", 2), ("Acme G1", 2)]
    )
    def test_gpus_of_this_machine(self, gpus, device, index):
        assert (targets.resolve_device(device), targets.resolve_gpu(device)) == ((gpus[index], ""), index)

    @pytest.mark.usefixtures("gpus")
    @pytest.mark.parametrize("name", ["h100", "H100", "NVIDIA H100 80GB HBM3", "nvidia h100 80gb hbm3"])
    def test_the_profile_of_a_name_is_preferred_where_nothing_runs(self, name):
        assert (targets.resolve_device(name), targets.resolve_gpu(name)) == ((device_profile("h100"), ""), 0)

    @pytest.mark.parametrize("device", [None, 0, "0", "h200"])
    def test_without_a_gpu_the_assumed_device_is_stated(self, monkeypatch, device):
        monkeypatch.setattr(targets, "device_count", lambda: 0)
        found, notice = targets.resolve_device()
        assert found == device_profile("h200")
        assert notice.startswith("no CUDA device here: the answer is for the NVIDIA H200")
        with pytest.raises(InputError, match="there is none"):
            targets.resolve_gpu(device)

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
        for name in ("h200", "no such gpu"):  # of no GPU here
            with pytest.raises(InputError, match=f"named '{name}': 0 is NVIDIA H100 80GB HBM3, 1 is .*, 2 is Acme G1"):
                targets.resolve_gpu(name)


def test_a_path_and_its_text_name_the_same_kernel_whose_sizes_have_defaults(scale_toml):
    assert targets.open_problem(scale_toml, {"n": 8}) == targets.open_problem(str(scale_toml), {"n": 8})
    assert targets.open_problem(scale_toml, {})[1].sizes == {"n": 4096}
    with pytest.raises(UnknownKernelError):
        targets.open_problem("no_such_kernel", {})


def test_the_path_of_an_output_file(tmp_path, monkeypatch):
    for output in ("", "-", ".", "..", "/", Path(), "~autotile-nobody/file", "~"):
        with pytest.raises(InputError, match=r"names a folder|expected the path of a file|there is no home folder"):
            output_path(output)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output_path("~/results.json") == tmp_path / "results.json"
    source = tmp_path / "mine.toml"
    assert output_path(source) == source
    source.touch()
    with pytest.raises(InputError, match="it is a source file, which is not overwritten"):
        output_path(source)


def test_profiles_and_stored_ceilings_are_shown(tmp_path):
    found, path = autotile.devices(), tmp_path / "own.db"
    assert (len(found.gpus), found.ceilings) == (targets.device_count(), ())
    assert repr(found).endswith(f"on this machine, {len(profile_names())} profiles>")
    with pytest.raises(DatabaseError, match="there is no database"):
        autotile.devices(database=path)
    with Database.open(path) as database:
        save_ceilings(database, CEILINGS)
    found = autotile.devices(database=path)
    assert found.ceilings == (CEILINGS,)


def test_a_warning_is_no_failure_and_the_display_is_the_verdict_and_a_row_for_each_check():
    checks = [HealthCheck("cache", "ok", "5 < 6"), HealthCheck("headers", "warn", "none", "install them")]
    found = HealthReport(tuple(checks), "tuning works here")
    assert found.works
    assert not HealthReport((*checks, HealthCheck("database", "fail", "it is damaged")), "").works
    assert repr(found) == "<HealthReport: tuning works here>"
    assert "<td>warn</td><td>headers</td><td>none\ninstall them</td>" in found._repr_html_()


def test_a_database_is_given_as_a_path_and_one_of_the_settings_that_does_not_exist_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_compiler_text", lambda target, _: target)
    monkeypatch.setenv("AUTOTILE_KERNELS", f"{tmp_path}{os.pathsep}{tmp_path / 'gone'}")
    found = doctor.doctor(tmp_path / "none.db").checks
    details = {check.name: check.detail for check in found}
    assert details["database"].startswith(f"{tmp_path / 'none.db'}: not there yet")
    assert details["compiler"] == "sm_80"
    assert [check.detail for check in found if check.name == "settings"] == [f"{tmp_path / 'gone'} does not exist"]
