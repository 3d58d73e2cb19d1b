"""The fault kit under compute-sanitizer: each fault is found by its tool, and by no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.fault_kit import HEALTHY, fault_kernel
from faults.traces import no_traces

from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.errors import ToolchainError
from autotile.kernel.library import load_kernel
from autotile.workers.jobs import Candidate, Workload
from autotile.workers.sanitizer import TOOLS, Finding, Sanitizer, Tool, ToolResult, find_sanitizer

pytestmark = pytest.mark.gpu
DEADLINE_S = 120.0
PLACE = r"at faults.*\+0x[0-9a-f]+"
THREAD = r"by thread \(\d+,0,0\) in block \(\d+,0,0\)"
FINDINGS: dict[str, tuple[Tool, str]] = {
    "write_outside": ("memcheck", rf"Invalid __global__ write of size 4 bytes {PLACE} {THREAD}, at n=1001"),
    "shared_race": ("racecheck", rf"Race reported between \w+ access {PLACE}.* and \w+ access {PLACE}.*, at n=1001"),
    "uninitialized_read": (
        "initcheck",
        rf"Uninitialized __global__ memory read of size 4 bytes {PLACE} {THREAD}, at n=1001",
    ),
    "divergent_barrier": (
        "synccheck",
        rf"Barrier error detected\. Divergent thread\(s\) in \w+ {PLACE} {THREAD}, at n=1001",
    ),
}
Findings = dict[tuple[str, str], Finding]
FAULTS = [HEALTHY, *FINDINGS]
LETHAL = ["illegal_address", "infinite_loop"]


class Kit:
    """The fault kit's kernel, compiled for this device."""

    def __init__(self, folder: Path) -> None:
        self._kernel = fault_kernel(folder, *FINDINGS, *LETHAL)
        self._cache = CubinCache(folder / "cache", 10**8)
        self._program = find_sanitizer()

    def candidate(self, fault: str) -> Candidate:
        config = {"THREADS": 128, "FAULT": fault}
        job = compile_job(self._kernel, config, "float32", live_device().architecture)
        return Candidate(config, str(self._cache.get_or_compile(job).path))

    def sanitizer(self, deadline_s: float) -> Sanitizer:
        spec = self._kernel.spec
        workload = Workload(spec.text, spec.source, spec.sizes, "float32", "cold", "", 10**8, 0.1)
        return Sanitizer(workload, self._program, deadline_s)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    try:
        kit = Kit(tmp_path_factory.mktemp("kit"))
    except ToolchainError as error:
        pytest.skip(str(error))
    found = kit.sanitizer(DEADLINE_S).check(kit.candidate(HEALTHY), "memcheck")
    if "not supported" in found.reason:
        pytest.skip(found.reason)
    return kit


@pytest.fixture(scope="module")
def findings(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Findings of each tool for each fault."""
    candidates = [kit.candidate(fault) for fault in FAULTS]
    with pytest.MonkeyPatch.context() as patch, no_traces(tmp_path_factory.mktemp("temporary"), patch):
        rows = kit.sanitizer(DEADLINE_S).check_all(candidates)
    return {(fault, found.tool): found for fault, row in zip(FAULTS, rows, strict=True) for found in row}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_healthy_kernel_passes(findings: Findings, tool: Tool) -> None:
    assert (findings[HEALTHY, tool].result, findings[HEALTHY, tool].reason) == (ToolResult.PASSED, "")


@pytest.mark.parametrize("fault", FINDINGS)
def test_each_fault_is_found_by_its_tool(findings: Findings, fault: str) -> None:
    tool, reason = FINDINGS[fault]
    found = findings[fault, tool]
    assert found.result is ToolResult.FAILED, found.reason
    assert re.fullmatch(reason, found.reason), found.reason


@pytest.mark.parametrize("fault", FINDINGS)
def test_and_by_no_other(findings: Findings, fault: str) -> None:
    others = [findings[fault, tool] for tool in TOOLS if tool != FINDINGS[fault][0]]
    assert [(found.tool, found.reason) for found in others if found.result is ToolResult.FAILED] == []


def test_a_crash_is_a_fault_for_memcheck_alone(kit: Kit) -> None:
    crash = kit.candidate("illegal_address")
    memory, races = kit.sanitizer(DEADLINE_S).check_all([crash], ["memcheck", "racecheck"])[0]
    assert memory.result is ToolResult.FAILED, memory.reason
    assert "Invalid __global__ write of size 4 bytes" in memory.reason
    assert races.result is ToolResult.UNCHECKED, races.reason


@pytest.mark.parametrize("tool", TOOLS)
def test_a_kernel_without_end_is_given_up(
    kit: Kit, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = kit.candidate("infinite_loop")
    with no_traces(tmp_path, monkeypatch):
        found = kit.sanitizer(20).check(endless, tool)
    expected = "could not be checked: not finished within 20 s at n=1001"
    assert (found.result, found.reason) == (ToolResult.UNCHECKED, expected)


def test_what_a_kernel_prints_is_not_taken_for_a_report(kit: Kit, scale_toml: Path, tmp_path: Path) -> None:
    """It prints what the tool prints of a fault, and what the child prints when it fails."""
    lines = (
        "========= Invalid __global__ write of size 4 bytes",
        "=========     at nowhere+0x10",
        "========= ERROR SUMMARY: 7 errors",
        "autotile: error it never ran",
    )
    said = "".join(f"{line}\\n" for line in lines)
    template = scale_toml.with_suffix(".cu")
    template.write_text(
        template.read_text().replace("{\n", f'{{\n    if (blockIdx.x + threadIdx.x == 0) printf("{said}");\n', 1)
    )
    kernel = load_kernel(str(scale_toml))
    spec = kernel.spec
    job = compile_job(kernel, spec.default, "float32", live_device().architecture)
    cubin = CubinCache(tmp_path / "cache", 10**8).get_or_compile(job)
    workload = Workload(spec.text, spec.source, spec.sizes, "float32", "cold", "", 10**8, 0.1)
    candidate = Candidate(spec.default, str(cubin.path), cubin.symbols)
    found = Sanitizer(workload, find_sanitizer(), DEADLINE_S).check(candidate, "memcheck")
    assert (found.result, found.reason) == (ToolResult.PASSED, "")
