"""Results of the functions that run nothing on a GPU: their values, their displays, and what importing them loads."""

from __future__ import annotations

import doctest
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from autotile.api import devices, inspection, targets
from autotile.core.device import profile_names
from autotile.core.text import Result
from autotile.errors import ConfigError, InputError, ProblemError
from autotile.settings import child_environment
from autotile.tuning.options import TuneOptions
from autotile.workers import compile_pool

MACRO_BOMB = """
#define TIMES_16(x) x x x x x x x x x x x x x x x x
#define TIMES_65536(x) TIMES_16(TIMES_16(TIMES_16(TIMES_16(x))))
__device__ const char text[] = TIMES_65536(TIMES_65536("."));
"""
"""A string of 4 GiB: minutes and gigabytes of the compiler's front end."""

HEAVY = ("rich", "typer", "optuna", "sqlalchemy", "alembic", "kernel_tuner", "cupy")


def results(scale_toml: Path) -> dict[str, Result]:
    return {
        "space": inspection.space(scale_toml, device="h200", n=100),
        "explain": inspection.explain(scale_toml, device="h200", THREADS=64, n=1000),
        "occupancy": inspection.occupancy(1024, 32, 8192, device="rtx-3060"),
        "devices": devices.devices(),
    }


class TestDisplay:
    def test_a_repr_is_one_short_line(self, scale_toml):
        shown = {name: repr(result) for name, result in results(scale_toml).items()}
        assert shown["space"] == "<SpaceSummary: scale n=100 float32 on NVIDIA H200 (profile): 3 of 12 valid>"
        assert shown["explain"] == (
            "<Explanation: scale n=1000 float32 on NVIDIA H200 (profile): valid, occupancy 100.0 %>"
        )
        assert shown["occupancy"] == (
            "<OccupancyResult: NVIDIA GeForce RTX 3060 (profile): "
            "66.7 %: 1 block on an SM, 32 of 48 warps; limited by threads>"
        )
        assert shown["devices"].endswith(f"on this machine, {len(profile_names())} profiles>")
        assert all(len(text) <= 120 and "\n" not in text for text in shown.values())

    @pytest.mark.parametrize(
        ("name", "cells"),
        [
            ("space", ["<th>THREADS</th><td>32 64 128 256</td>", "<td>rule enough_blocks</td><td>3</td>"]),
            ("explain", ["<th>verdict</th><td>valid</td>", "<td>rule</td><td>enough_blocks</td><td>yes</td>"]),
            ("occupancy", ["<td>threads</td><td>1,024</td><td>1,536</td><td>1</td><td>binds</td>"]),
            ("devices", ["<td>rtx-3060</td><td>NVIDIA GeForce RTX 3060</td><td>8.6</td>"]),
        ],
    )
    def test_notebooks_show_tables(self, scale_toml, name, cells):
        html = results(scale_toml)[name]._repr_html_()
        assert [cell for cell in cells if cell not in html] == []

    def test_a_fault_is_in_the_repr_and_its_reason_in_the_html(self, scale_toml):
        found = inspection.explain(scale_toml, device="h200", THREADS=256, n=100)
        assert "cannot be used" in repr(found)
        assert "the rule &#x27;enough_blocks&#x27; is broken" in found._repr_html_()


def test_importing_the_functions_loads_neither_the_command_line_nor_the_search_nor_the_database():
    code = f"import autotile.api.inspection, sys; print([name for name in {HEAVY} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_examples_of_the_docstrings():
    failed, attempted = doctest.testmod(inspection)
    assert (failed, attempted) == (0, 3)


class TestSpace:
    def test_counts(self, scale_toml):
        found = inspection.space(scale_toml, {"n": 100}, device="h200")
        assert list(found.funnel())[:2] == [("all combinations", 12), ("rule enough_blocks", 3)]
        assert list(found.funnel())[-1] == ("limit occupancy", 3)
        assert (found.valid, found.parameters["WORK"], found.notices) == (3, (1, 2, 4), ())

    def test_heuristics_are_distinguished_from_rules(self):
        stages = dict(inspection.space("gemm_mma", device="a100").funnel())
        assert {stage.split()[0] for stage in stages} == {"all", "rule", "heuristic", "limit"}

    def test_assumptions_are_notices(self, scale_toml, monkeypatch):
        monkeypatch.setattr(targets, "device_count", lambda: 0)
        device_notice, sizes_notice = inspection.space(scale_toml).notices
        assert device_notice.startswith("no CUDA device here: the answer is for the NVIDIA H200")
        assert sizes_notice == "not given, so as in the search-space file: n=4096"


class TestExplain:
    def test_values_have_their_own_types(self):
        found = inspection.explain("matmul_tiled", {"TILE": np.int64(32)}, device="h200", GUARDED=False, N=np.int64(64))
        assert (found.config["TILE"], found.config["GUARDED"], found.problem.sizes["N"]) == (32, False, 64)
        assert type(found.config["TILE"]) is int

    @pytest.mark.parametrize("value", [0, False, np.False_])
    def test_booleans(self, value):
        assert inspection.explain("matmul_tiled", device="h200", GUARDED=value).config["GUARDED"] is False

    @pytest.mark.parametrize(
        ("name", "value"),
        [("TILE", "16"), ("TILE", True), ("TILE", 16.0), ("TILE", 10**7), ("GUARDED", "false"), ("GUARDED", 2)],
    )
    def test_values_of_another_type_are_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"{name} = {value!r} is not among its values"):
            inspection.explain("matmul_tiled", {name: value}, device="h200")

    def test_a_value_that_is_not_listed_is_a_failed_check(self, scale_toml):
        found = inspection.explain(scale_toml, device="h200", THREADS=96)
        assert [(check.kind, check.name) for check in found.checks if not check.holds] == [("value", "THREADS")]
        assert (found.resources, found.not_compiled) == (None, "it would not be compiled")

    def test_declared_resources_without_a_compilation(self):
        found = inspection.explain("sgemm_2d", device="g80", BM=64)
        assert found.resources is None
        assert found.block is not None
        assert found.block.registers >= 92

    def test_compiled_resources(self, scale_toml):
        found = inspection.explain(scale_toml, device="h200", THREADS=64)
        assert found.resources is not None
        assert found.block == inspection.BlockResources(64, found.resources.registers, 0)
        assert found.occupancy is not None
        assert found.occupancy.limited_by == ("threads", "blocks")

    @pytest.mark.parametrize(
        ("assignments", "named", "said"),
        [
            ({"THREADS": 64}, {"THREADS": 32}, "THREADS is given twice, in the mapping and by keyword"),
            ({"THREAD": 64}, {}, "neither a parameter nor a size 'THREAD'; did you mean 'THREADS'"),
            ({}, {"n": "8"}, "size n is '8'"),
            ({"n": 0}, {}, "size n is 0, expected 1 to"),
        ],
    )
    def test_refusals(self, scale_toml, assignments, named, said):
        with pytest.raises(InputError, match=said):
            inspection.explain(scale_toml, assignments, device="h200", **named)

    def test_only_sizes_that_are_not_given_are_noted(self, scale_toml):
        assert inspection.explain(scale_toml, device="h200", n=8).notices == ()
        assert inspection.explain(scale_toml, device="h200", WORK=2).notices == (
            "not given, so as in the search-space file: n=4096",
        )

    def test_an_unknown_dtype(self, scale_toml):
        with pytest.raises(ProblemError, match="does not support dtype 'float16'"):
            inspection.explain(scale_toml, device="h200", dtype="float16")

    def test_a_compilation_that_does_not_end_is_stopped(self, scale_toml, monkeypatch):
        monkeypatch.setattr("autotile.tuning.options.TuneOptions", lambda: TuneOptions(compile_deadline_s=1.0))
        template = scale_toml.parent / "scale.cu"
        template.write_text(MACRO_BOMB + template.read_text())
        start = time.monotonic()
        found = inspection.explain(scale_toml, device="h200")
        assert time.monotonic() - start < 10
        assert found.resources is None
        assert found.fault == "it does not compile: the compiler was stopped after 1 s"
        assert found.checks[-1] == inspection.ConfigCheck("compiled", "source", False, found.fault)

    def test_a_compilation_that_takes_all_memory_is_refused(self, scale_toml, monkeypatch):
        monkeypatch.setattr(compile_pool, "memory_share_bytes", lambda workers: 2**28)
        template = scale_toml.parent / "scale.cu"
        template.write_text(MACRO_BOMB + template.read_text())
        found = inspection.explain(scale_toml, device="h200")
        assert "out of memory" in found.fault

    def test_a_compiled_configuration_needs_no_process(self, scale_toml, monkeypatch):
        first = inspection.explain(scale_toml, device="h200", THREADS=64)
        monkeypatch.setattr(compile_pool, "Child", None)
        assert inspection.explain(scale_toml, device="h200", THREADS=64).resources == first.resources

    def test_a_compiler_error_is_shown(self, scale_toml):
        template = scale_toml.parent / "scale.cu"
        template.write_text(template.read_text() + "oops;\n")
        found = inspection.explain(scale_toml, device="h200")
        assert found.fault.startswith("it does not compile: ")
        assert "oops" in found.fault
        assert found.not_compiled == "the compiler refuses it"


class TestOccupancy:
    def test_values(self):
        found = inspection.occupancy(256, registers=128, device="h200")
        assert (found.occupancy.blocks_per_sm, found.occupancy.limited_by) == (2, ("registers",))
        assert (found.block.threads, found.block.registers, found.block.smem_bytes) == (256, 128, 0)

    def test_a_resource_that_is_not_used_is_no_limit(self):
        assert (
            "<td>not known</td><td>65,536</td><td>no limit</td>"
            in inspection.occupancy(32, device="h200")._repr_html_()
        )

    @pytest.mark.parametrize("resources", [(0, 0, 0), (-1, 0, 0), (32, -1, 0), (32, 0, -1), (32, 0, 2**31)])
    def test_impossible_blocks(self, resources):
        with pytest.raises(InputError, match="are no block; expected at least 1 thread"):
            inspection.occupancy(*resources, device="h200")
