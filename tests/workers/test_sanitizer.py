"""Candidates under a stand-in for compute-sanitizer that reports, hangs, dies or prints garbage; needs no GPU."""

import json
import os
import re
import signal
import sys
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interrupts import heeded_interrupts

from autotile.core.device import device_profile
from autotile.core.documents import to_fields
from autotile.errors import ToolchainError
from autotile.kernel.library import load_kernel
from autotile.workers import sanitizer
from autotile.workers.jobs import Candidate, Workload
from autotile.workers.sanitizer import (
    TOOLS,
    Finding,
    Notice,
    Sanitizer,
    Tool,
    _judged,
    find_sanitizer,
    format_notice,
    launch_at_all_sizes,
)

pytestmark = pytest.mark.usefixtures("clean")
CANDIDATE = Candidate({"THREADS": 128}, "/nowhere/a.cubin")
AT_RAGGED, AT_TUNED = "autotile: at n=1001", "autotile: at n=4096"
ENDED = "autotile: done "
CLEAN = "========= ERROR SUMMARY: 0 errors"
CLEAN_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"

RECORDED = tomllib.loads(Path(__file__).with_name("sanitizer_reports.toml").read_text())
REPORTS = {name: str(report["text"]) for name, report in RECORDED.items()}


@pytest.fixture
def stand_in(tmp_path):
    """Build a sanitizer from a few lines of Python."""

    def make(code: str, deadline_s: float = 20.0) -> Sanitizer:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{code}\n")
        program.chmod(0o755)
        workload = Workload("", "scale.toml", {"n": 4096}, "float32", "cold", "/nowhere", 10**8, 0.1)
        return Sanitizer(workload, program, deadline_s)

    return make


def judged(*texts: str, tool: Tool = "memcheck", trouble: str = "") -> Finding:
    """Judge the output of a run that exited, unless there was trouble."""
    text = "\n".join(["========= COMPUTE-SANITIZER", *(text.strip("\n") for text in texts)]) + "\n"
    ended = "it ended with exit code 0"
    return Finding(tool, *_judged(text, trouble, ended, ended))


@pytest.mark.parametrize(
    ("tool", "texts"),
    [
        *((tool, (AT_RAGGED, AT_TUNED, ENDED, CLEAN_RACES if tool == "racecheck" else CLEAN)) for tool in TOOLS),
        ("racecheck", (AT_TUNED, ENDED, REPORTS["race_in_a_warp"])),  # a race among the threads of a warp
        ("memcheck", ("element 7", "error: fail", AT_TUNED, "==", "", "\x00\x1b[1m", ENDED, CLEAN)),
    ],
)
def test_a_run_to_the_end_without_errors_passes(tool, texts):
    assert judged(*texts, tool=tool) == Finding(tool, "passed")


class TestFailed:
    @pytest.mark.parametrize("name", [name for name, report in RECORDED.items() if "reason" in report])
    def test_the_first_report_is_told(self, name):
        report, ended = RECORDED[name], "========= ERROR SUMMARY: 2 errors"
        found = judged(AT_RAGGED, report["text"], AT_TUNED, ENDED, ended, tool=report["tool"])
        assert (found.result, found.reason) == ("failed", report["reason"])
        of_another_version = report["text"].replace("Error:", "ERROR:")
        assert judged(AT_RAGGED, of_another_version, AT_TUNED, ENDED, ended, tool=report["tool"]) == found

    def test_at_the_sizes_that_it_was_reported_at_whatever_became_of_the_run_then(self):
        assert judged(AT_RAGGED, AT_TUNED, REPORTS["uninitialized"], ENDED, CLEAN).reason.endswith(", at n=4096")
        launch_failure = "autotile: error cudaErrorLaunchFailure"
        assert judged(AT_RAGGED, REPORTS["invalid_write"], launch_failure, REPORTS["aftermath"]).result == "failed"
        assert judged(REPORTS["invalid_write"], trouble="not finished within 1 s").result == "failed"

    def test_errors_in_an_unknown_form(self):
        found = judged(AT_TUNED, "========= Something new", ENDED, "========= ERROR SUMMARY: 3 errors")
        assert (found.result, found.reason) == ("failed", "3 errors in a form that autotile does not know")


SLEEPER = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


class TestUnchecked:
    @pytest.mark.parametrize(
        ("texts", "reason"),
        [
            (
                (REPORTS["not_supported"], "autotile: error cudaErrorUnknown", REPORTS["aftermath"]),
                "Device not supported. Please refer",
            ),
            ((REPORTS["driver_too_old"], REPORTS["aftermath"]), "Detected an unsupported driver version"),
            ((REPORTS["never_started"], CLEAN), "Error: Target application terminated before"),
            ((AT_TUNED, "autotile: error out of memory", REPORTS["aftermath"], CLEAN), "out of memory at n=4096"),
            ((AT_TUNED, REPORTS["untracked"], ENDED, CLEAN), "Internal Sanitizer Error: .* Errors might go undetected"),
            ((AT_TUNED, REPORTS["untracked"], ENDED, "========= ERROR SUMMARY: 1 error"), "Internal Sanitizer Error"),
            ((AT_TUNED, REPORTS["overflow"], ENDED, CLEAN), "Warning: Detected overflow .* Results might be incorrect"),
            ((AT_RAGGED, CLEAN), "it ended with exit code 0 at n=1001"),
            ((CLEAN,), "it ended with exit code 0$"),
            ((AT_TUNED, ENDED), "it ended with exit code 0 and no summary"),
            (("=========",), "it ended with exit code 0"),
            ((), "it ended with exit code 0"),
        ],
    )
    def test_what_proves_nothing(self, texts, reason):
        assert_told(judged(*texts), reason)

    @pytest.mark.parametrize(
        ("code", "deadline_s", "reason"),
        [
            ("os.kill(os.getpid(), 9)", 20.0, "it ended with exit code -9"),
            (r"sys.stdout.buffer.write(b'\xff\0' * 1000)", 20.0, "it ended with exit code 0"),
            ("sys.exit('Traceback\\n  x\\nModuleNotFoundError: cupy')", 20.0, "ModuleNotFoundError: cupy$"),
            (f"{SLEEPER}; time.sleep(60)", 1.0, "not finished within 1 s"),
            (f"{SLEEPER}; os._exit(3)", 20.0, "it ended with exit code 3"),
        ],
    )
    def test_it_and_what_it_started_die(self, stand_in, code, deadline_s, reason):
        assert_told(stand_in(code, deadline_s).check(CANDIDATE, "memcheck"), reason)

    def test_no_such_program(self, tmp_path, stand_in):
        checker = stand_in("")
        (tmp_path / "compute-sanitizer").unlink()
        assert_told(checker.check(CANDIDATE, "memcheck"), ".*compute-sanitizer cannot be started: No such file")

    def test_a_deadline_names_the_problem(self, stand_in, tmp_path, monkeypatch):
        told = tmp_path / "told"
        clock = SimpleNamespace(monotonic=lambda: 2.0 * told.exists(), perf_counter=time.perf_counter)
        monkeypatch.setattr(sanitizer, "time", clock)
        said = f"print({AT_TUNED!r}, {ENDED!r}, {CLEAN!r}, sep='\\n', flush=True)"
        checker = stand_in(f"{said}; open({str(told)!r}, 'w'); time.sleep(60)", 1.0)
        assert_told(checker.check(CANDIDATE, "racecheck"), "not finished within 1 s at n=4096$")

    @pytest.mark.parametrize("stream", [1, 2])
    def test_a_flood_is_stopped(self, stand_in, stream):
        found = stand_in(f"while True: os.write({stream}, b'x' * 100_000)").check(CANDIDATE, "memcheck")
        assert_told(found, "it printed more than 16 MiB")


class TestCommand:
    def test_the_child_runs_under_the_tool_on_the_request(self, stand_in, tmp_path):
        record = tmp_path / "record"
        code = f"open({str(record)!r}, 'w').write(repr((sys.argv, open(sys.argv[-1]).read(), os.environ['TMPDIR'])))"
        stand_in(code).check(CANDIDATE, "initcheck")
        text = record.read_text()
        assert "'--tool', 'initcheck'" in text
        assert "'-P', '-m', 'autotile.workers.sanitizer'" in text
        assert json.dumps(to_fields(CANDIDATE)) in text

    def test_the_real_child_tells_why_it_gives_up(self, stand_in):
        under = "index = sys.argv.index(sys.executable); os.execv(sys.executable, sys.argv[index:])"
        found = stand_in(under).check(CANDIDATE, "memcheck")
        assert_told(found, r"scale\.toml: .*\[kernel\]")


class TestAll:
    def test_a_row_a_candidate(self, stand_in):
        code = f"""
tool, request = sys.argv[sys.argv.index("--tool") + 1], open(sys.argv[-1]).read()
if tool == "racecheck" and '"THREADS": 64' in request:
    print({REPORTS["race"]!r})
print({ENDED!r}, {CLEAN!r}, sep="\\n")
"""
        other = Candidate({"THREADS": 64}, "/nowhere/b.cubin")
        rows = stand_in(code).check_all([CANDIDATE, other], ["racecheck", "memcheck"])
        assert [[(found.tool, found.result) for found in row] for row in rows] == [
            [("racecheck", "passed"), ("memcheck", "passed")],
            [("racecheck", "failed"), ("memcheck", "passed")],
        ]

    def test_several_at_a_time(self, stand_in, tmp_path):
        """Each waits until all of them run."""
        (begun := tmp_path / "begun").mkdir()
        waits = "while len(os.listdir(begun)) < 4: time.sleep(0.01)"
        code = f"begun = {str(begun)!r}\nos.mkdir(os.path.join(begun, str(os.getpid())))\n{waits}\n"
        rows = stand_in(f"{code}print({ENDED!r}, {CLEAN!r}, sep='\\n')", 100.0).check_all([CANDIDATE])
        assert [found.result for found in rows[0]] == ["passed"] * 4

    def test_an_interrupt_leaves_nothing_running(self, stand_in):
        checker = stand_in("time.sleep(1000)", 1000.0)
        timer = Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        with heeded_interrupts(), ExitStack() as stack:
            timer.start()
            stack.callback(timer.join)
            with pytest.raises(KeyboardInterrupt):
                checker.check_all([CANDIDATE, CANDIDATE], at_once=2)


def test_the_program_is_searched_for_on_the_path_in_toolkits_and_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sanitizer, "toolkit_folders", lambda: (tmp_path / "cuda",))
    monkeypatch.setattr(sanitizer.sysconfig, "get_path", lambda _: str(tmp_path / "site"))
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-sanitizer-api"):
        find_sanitizer()
    for folder in ("cuda/compute-sanitizer", "site/nvidia/cu13/compute-sanitizer", "cuda/bin"):
        program = installed(tmp_path / folder)
        assert find_sanitizer() == program
        if folder != "cuda/bin":
            program.unlink()
    first, named = installed(tmp_path / "path"), installed(tmp_path / "mine")
    assert (find_sanitizer(), find_sanitizer(str(named))) == (first, named)
    with pytest.raises(ToolchainError, match=r"the setting sanitizer is .*not an executable program"):
        find_sanitizer(str(tmp_path / "others"))


def assert_told(found: Finding, reason: str) -> None:
    """Assert that a candidate could not be checked, with a reason on one line."""
    assert found.result == "unchecked"
    assert re.match(f"could not be checked: {reason}", found.reason), found.reason
    assert "\n" not in found.reason


def installed(folder: Path) -> Path:
    folder.mkdir(parents=True)
    program = folder / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


class RecordedArray:
    """A device array that keeps the data copied into it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.data = SimpleNamespace(ptr=id(self))
        self.shape, self.stored = shape, None
        made.append(self)

    def set(self, stored: Any) -> None:
        self.stored = stored


made: list[RecordedArray] = []
launches: list[tuple[Any, ...]] = []


@pytest.fixture
def device(monkeypatch):
    """A device that records launches without running them."""
    made.clear()
    launches.clear()
    cuda = SimpleNamespace(
        Device=lambda _: SimpleNamespace(use=lambda: None),
        set_allocator=lambda allocator: None,
        runtime=SimpleNamespace(deviceSynchronize=lambda: launches.append(("wait",))),
    )
    function = SimpleNamespace(opt_in=lambda _: None, launch=lambda *launch: launches.append(launch))
    monkeypatch.setattr(sanitizer, "load_cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=RecordedArray))
    monkeypatch.setattr(sanitizer, "live_device", lambda _: device_profile("h200"))
    monkeypatch.setattr(
        "autotile.cuda.function.Module", lambda _: SimpleNamespace(function=lambda _: function, pointer=1)
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("config", "others", "expected"),
    [
        ({"THREADS": 64, "WORK": 1}, (7777,), [(1001, 16), (7777, 122), (4096, 64)]),
        ({"THREADS": 256, "WORK": 4}, (5000, 100), [(5000, 5), (4096, 4)]),  # the rules exclude two
    ],
)
def test_the_tuned_problem_is_launched_last_and_only_what_is_read_is_filled(scale_toml, config, others, expected):
    """And only at the other sizes, the scalar has its value for verification."""
    spec, sizes = load_kernel(str(scale_toml)).spec, tuple({"n": n} for n in others)
    workload = Workload(spec.text, spec.source, {"n": 4096}, "float32", "cold", "", 1, 0.1, verify_sizes=sizes)
    notices: list[tuple[Notice, str]] = []
    launch_at_all_sizes(workload, Candidate(config, ""), lambda *notice: notices.append(notice))
    assert notices == [("at", f"n={n}") for n, _ in expected]
    for number, (n, blocks) in enumerate(expected):
        read, written = made[2 * number : 2 * number + 2]
        assert [(array.shape, array.stored is None) for array in (read, written)] == [((n,), False), ((n,), True)]
        pointers, factor = (np.uint64(read.data.ptr), np.uint64(written.data.ptr)), 2.0 if n == 4096 else -0.5
        arguments = (*pointers, np.int32(n), np.float32(factor))
        launch = ((blocks, 1, 1), (config["THREADS"], 1, 1), arguments, 0)
        assert launches[2 * number : 2 * number + 2] == [launch, ("wait",)]
    assert len(launches) == 2 * len(expected)


def test_a_notice_is_one_line():
    line = format_notice("error", "first\nsecond\n\n third")
    assert re.fullmatch(rb"autotile: error first second third\n", line)
