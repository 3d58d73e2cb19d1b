"""A session survives every fault of the kit and names a healthy winner; compute-sanitizer finds each by its tool."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from candidates import compiled
from faults.fault_kit import HEALTHY, fault_kernel, read_faults
from faults.fault_session import RUN_DEADLINE_S, tune_faults
from faults.traces import no_traces, settles

from autotile.core.model import Config, Outcome
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.errors import ToolchainError
from autotile.kernel.library import Kernel, load_kernel
from autotile.workers.jobs import Candidate, Workload
from autotile.workers.sanitizer import TOOLS, Sanitizer, Tool, find_sanitizer

pytestmark = pytest.mark.gpu


FAULTS = read_faults()
INTERMITTENT = "wrong_sometimes"
_LEAK_BYTES = 100 << 20
"""Tolerated growth of the GPU memory in use, by other programs; a leaked context holds several times as much."""


def used_gpu_bytes() -> int:
    """Return the memory in use on the GPU of these tests, in bytes."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.runtime.deviceGetPCIBusId(0).encode())
    return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Fail if the ``with`` block leaves a process, an open file, a temporary file or GPU memory behind."""
    temporary = folder / "temporary"
    temporary.mkdir()
    live_device()  # the driver opens its files in this process before the count
    used = used_gpu_bytes()
    with pytest.MonkeyPatch.context() as patch, no_traces(temporary, patch):
        yield
    assert settles(lambda: used_gpu_bytes() < used + _LEAK_BYTES), f"{used_gpu_bytes() - used} bytes of the GPU left"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def everything(cache, tmp_path_factory):
    """One session with every fault but the intermittent one."""
    folder = tmp_path_factory.mktemp("everything")
    names = [fault.name for fault in FAULTS if fault.name != INTERMITTENT]
    with nothing_left(folder):
        return tune_faults(folder, *names, cache=cache)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name != INTERMITTENT], ids=lambda fault: fault.name)
def test_each_fault_is_blamed_on_its_configuration(everything, fault):
    assert fault.complaint(everything.trial_of(fault.name)) == ""


def test_no_other_configuration_suffers(everything):
    assert (everything.damage(), len(everything.trials)) == ([], 4 + len(FAULTS) - 1)


AT_ONCE = ("illegal_address", "infinite_loop", "write_overhang", "write_astray", "trap")
LATER = (INTERMITTENT, "keeps_result", "wrong_later", "stores_once", "skips_work")


@pytest.mark.parametrize("name", [*AT_ONCE, *LATER])
def test_one_fault_alone_costs_a_few_seconds_and_neither_wins_nor_ties(cache, tmp_path, name):
    with nothing_left(tmp_path):
        session = tune_faults(tmp_path, name, cache=cache)
    assert session.damage() == []
    assert [config for config in session.result.ties if config["FAULT"] != HEALTHY] == []
    if name in AT_ONCE:
        fault = next(fault for fault in FAULTS if fault.name == name)
        assert fault.complaint(session.trial_of(name)) == ""
        assert session.seconds < RUN_DEADLINE_S + 16


def test_a_finalist_that_keeps_its_result_is_refused_with_the_reason(cache, tmp_path):
    session = tune_faults(tmp_path, "keeps_result", cache=cache, finals=8)
    kept = session.trial_of("keeps_result")
    if kept.outcome is Outcome.OK:  # unless it happened to be pruned
        (refused,) = session.result.refused
        assert (refused.config, refused.outcome) == (kept.config, Outcome.WRONG_RESULT)
        assert "in repeat 3 of " in refused.reason  # the first with other inputs


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
SANITIZED = [HEALTHY, *FINDINGS]
LETHAL = ["illegal_address", "infinite_loop"]


class Kit:
    """The fault kit's kernel, or another one, compiled for this device."""

    def __init__(self, folder: Path, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or fault_kernel(folder, *FINDINGS, *LETHAL)
        self._cache = CubinCache(folder / "cache", 10**8)
        self._program = find_sanitizer()

    def candidate(self, fault: str) -> Candidate:
        return self.compiled({"THREADS": 128, "FAULT": fault})

    def compiled(self, config: Config) -> Candidate:
        return compiled(self._kernel, config, self._cache)

    def sanitizer(self, deadline_s: float) -> Sanitizer:
        spec = self._kernel.spec
        workload = Workload(spec.text, spec.source, spec.sizes, "float32", "cold", "", 10**8, 0.1)
        return Sanitizer(workload, self._program, deadline_s)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    try:
        kit = Kit(tmp_path_factory.mktemp("kit"))
    except ToolchainError as error:
        pytest.skip(str(error))
    found = kit.sanitizer(DEADLINE_S).check(kit.candidate(HEALTHY), "memcheck")
    if "not supported" in found.reason:
        pytest.skip(found.reason)
    return kit


@pytest.fixture(scope="module")
def findings(kit, tmp_path_factory):
    candidates = [kit.candidate(fault) for fault in SANITIZED]
    with pytest.MonkeyPatch.context() as patch, no_traces(tmp_path_factory.mktemp("temporary"), patch):
        rows = kit.sanitizer(DEADLINE_S).check_all(candidates)
    return {(fault, found.tool): found for fault, row in zip(SANITIZED, rows, strict=True) for found in row}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_healthy_kernel_passes(findings, tool):
    assert (findings[HEALTHY, tool].result, findings[HEALTHY, tool].reason) == ("passed", "")


@pytest.mark.parametrize("fault", FINDINGS)
def test_each_fault_is_found_by_its_tool_and_by_no_other(findings, fault):
    tool, reason = FINDINGS[fault]
    failed = {each: findings[fault, each].reason for each in TOOLS if findings[fault, each].result == "failed"}
    assert failed.keys() == {tool}, failed
    assert re.fullmatch(reason, failed[tool]), failed


def test_a_crash_is_a_fault_for_memcheck_alone(kit):
    crash = kit.candidate("illegal_address")
    memory, races = kit.sanitizer(DEADLINE_S).check_all([crash], ["memcheck", "racecheck"])[0]
    assert memory.result == "failed", memory.reason
    assert "Invalid __global__ write of size 4 bytes" in memory.reason
    assert races.result == "unchecked", races.reason


@pytest.mark.parametrize("tool", TOOLS)
def test_a_kernel_without_end_is_given_up(kit, tool, tmp_path, monkeypatch):
    endless = kit.candidate("infinite_loop")
    with no_traces(tmp_path, monkeypatch):
        found = kit.sanitizer(20).check(endless, tool)
    expected = "could not be checked: not finished within 20 s at n=1001"
    assert (found.result, found.reason) == ("unchecked", expected)


def test_what_a_kernel_prints_is_not_taken_for_a_report(kit, scale_toml, tmp_path):
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
    talking = Kit(tmp_path, kernel)
    found = talking.sanitizer(DEADLINE_S).check(talking.compiled(kernel.spec.default), "memcheck")
    assert (found.result, found.reason) == ("passed", "")
