"""Runs of candidates under NVIDIA's compute-sanitizer, and their reports."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from autotile.core.documents import encode_json
from autotile.errors import ToolchainError
from autotile.settings import toolkit_folders, worker_environment
from autotile.workers.jobs import Candidate, Workload

_TOOL_PREFIX = "========="
_CHILD_PREFIX = "autotile: "
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error")
_RACE = re.compile(r"error: (race reported|potential \w+ hazard)", re.IGNORECASE)
_MINOR = re.compile(r"(warning|info): ", re.IGNORECASE)
"""Warnings of racecheck concern the threads of one warp, which may be intended."""
_LOCATION = re.compile(r"(at|by thread|and (read|write) access at) ", re.IGNORECASE)
_TOOL_FAILURE = re.compile(r"internal|error|fail|unable|unsupported|not supported|disabled", re.IGNORECASE)
"""In a headline about the tool itself: it may have missed faults."""
_MINOR_TOOL_FAILURE = re.compile(r"might|incorrect", re.IGNORECASE)
_CONSEQUENCE = re.compile(r"target application|terminate successfully|exit code", re.IGNORECASE)
"""In a headline that only states that the child failed; the child's own notice states the reason."""


class Notice(StrEnum):
    """Kind of a line that the child prints."""

    AT = "at"
    """A launch begins, at the sizes that follow."""
    ERROR = "error"
    """The child ends, for the reason that follows."""
    DONE = "done"
    """All launches completed."""


def format_notice(notice: Notice, text: str) -> bytes:
    """Return the line that the child prints for `read_report`."""
    return f"{_CHILD_PREFIX}{notice} {' '.join(text.split())}\n".encode()


@dataclass(frozen=True, slots=True)
class SanitizerReport:
    """Output of one run."""

    finding: str
    """First fault of the kernel, on one line; empty if there is none."""
    trouble: str
    """Reason why faults may have been missed; empty if there is none."""
    sizes: str
    """Sizes of the child's last launch."""
    done: bool
    """Whether all launches completed."""
    errors: int | None
    """Number of errors in the tool's summary; None without a summary."""


def read_report(text: str) -> SanitizerReport:
    """Parse the output of the tool and the child; other lines are ignored."""
    blocks: list[_Block] = []
    notices = dict.fromkeys(Notice, "")
    done, errors = False, None
    for prefix, line in _lines(text):
        if prefix == _CHILD_PREFIX:
            word, _, rest = line.partition(" ")
            done = done or word == Notice.DONE
            notices |= {known: rest for known in Notice if known == word}
        elif found := _SUMMARY.search(line):
            errors = int(found[1] or found[2])
        elif line.startswith("  ") and blocks:
            blocks[-1].details.append(line.strip())
        elif line.strip() and "COMPUTE-SANITIZER" not in line:
            blocks.append(_Block(line.strip(), notices[Notice.AT]))
    finding = next((block.summary() for block in blocks if block.is_finding), "")
    failures = [block.headline for block in blocks if block.is_tool_failure]
    failures.sort(key=lambda headline: bool(_CONSEQUENCE.search(headline)))
    trouble = notices[Notice.ERROR] if not failures or _CONSEQUENCE.search(failures[0]) else failures[0]
    return SanitizerReport(finding, trouble or next(iter(failures), ""), notices[Notice.AT], done, errors)


@dataclass(slots=True)
class _Block:
    """One message of the tool."""

    headline: str
    sizes: str
    """Sizes of the child's last launch before it."""
    details: list[str] = field(default_factory=list)

    @property
    def is_finding(self) -> bool:
        """Whether the message concerns the kernel: such messages have a location in it."""
        if _MINOR.match(self.headline):
            return False
        return bool(_RACE.match(self.headline)) or any(detail.startswith("at ") for detail in self.details)

    @property
    def is_tool_failure(self) -> bool:
        """Whether the message states that the tool may have missed faults."""
        return bool((_MINOR_TOOL_FAILURE if _MINOR.match(self.headline) else _TOOL_FAILURE).search(self.headline))

    def summary(self) -> str:
        """Return the message on one line, with the sizes of the launch."""
        headline = re.sub("^error: ", "", self.headline, flags=re.IGNORECASE).rstrip(".")
        locations = [detail for detail in self.details if _LOCATION.match(detail)]
        return " ".join([headline, *locations]) + (f", at {self.sizes}" if self.sizes else "")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the prefix and the rest of each line of the tool and the child."""
    for line in text.splitlines():
        for prefix in (_TOOL_PREFIX, _CHILD_PREFIX):
            if line.startswith(prefix):
                yield prefix, line.removeprefix(prefix)


Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

_PROGRAM = "compute-sanitizer"
_WHEEL = Path("nvidia", "cu13", "compute-sanitizer")
_WORKER_MODULE = "autotile.workers.sanitizer_worker"
_MAX_OUTPUT_BYTES = 1 << 24
"""Limit of the output; twenty messages of the tool are a few thousand bytes."""
_POLL_S = 0.05
_GRACE_S = 5
"""Time after the deadline at which a child that was not killed ends itself, in seconds."""
_REAP_S = 30.0
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # the child reports failed calls; with 1 MiB between buffers, a tile that overhangs one does not reach the next
    "memcheck": ("--report-api-errors", "no", "--padding", "1048576"),
    "racecheck": ("--print-level", "error"),
    "initcheck": (),
    "synccheck": (),
}


class ToolResult(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    """The tool reports a fault of the kernel."""
    UNCHECKED = "unchecked"
    """The tool did not start, did not finish, or states that it may have missed faults."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one tool for one candidate."""

    tool: Tool
    result: ToolResult
    reason: str = ""
    """Reason, on one line; empty if the candidate passed."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the tool ran to its end and found nothing."""
        return self.result is ToolResult.PASSED

    @property
    def failed(self) -> bool:
        """Whether the tool found a fault of the candidate; it may also not have run to its end."""
        return self.result is ToolResult.FAILED


def find_sanitizer(named: str = "") -> Path:
    """Find compute-sanitizer in ``PATH``, in a CUDA toolkit, or in its wheel.

    Parameters
    ----------
    named
        The setting ``sanitizer``: a path or a name in ``PATH``; if given, no other program is searched for.

    Raises
    ------
    ToolchainError
        There is no such program.
    """
    toolkits = [folder / inner for folder in toolkit_folders() for inner in ("bin", _PROGRAM)]
    wheel = Path(sysconfig.get_path("platlib")) / _WHEEL
    folders = [None] if named else [None, *toolkits, wheel]  # None: PATH
    for folder in folders:
        found = shutil.which(named or _PROGRAM, path=folder)
        if found:
            return Path(found)
    if named:
        raise ToolchainError(f"the setting sanitizer is {named!r}, which is not an executable program; correct it")
    raise ToolchainError(
        f"{_PROGRAM} was not found in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; install it with the CUDA toolkit "
        "or, for a driver of 580 or newer, with pip install nvidia-cuda-sanitizer-api; or set AUTOTILE_SANITIZER to it"
    )


class Sanitizer:
    """Runs candidates under compute-sanitizer's tools, each in a process of its own.

    Parameters
    ----------
    workload
        The problem; a candidate is launched at its ragged sizes, if the rules allow them, and at its own.
    program
        Path of the program, see `find_sanitizer`.
    deadline_s
        Time limit of a check, in seconds. The tools slow a kernel down by a factor of ten to some hundred.
    """

    def __init__(self, workload: Workload, program: Path, deadline_s: float) -> None:
        self._workload = workload
        self._program = program
        self._deadline_s = deadline_s
        self._stop = threading.Event()

    def check(self, candidate: Candidate, tool: Tool) -> Finding:
        """Run one candidate under one tool; failures of the run are findings, not errors."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="autotile-", ignore_cleanup_errors=True) as folder:
            result, reason = self._run(candidate, tool, Path(folder))
        return Finding(tool, result, reason, round(time.perf_counter() - start, 3))

    def check_all(
        self, candidates: Sequence[Candidate], tools: Sequence[Tool] = TOOLS, at_once: int = 4
    ) -> list[list[Finding]]:
        """Run each candidate under each tool, ``at_once`` runs concurrently.

        Returns
        -------
        list of list of Finding
            One row per candidate, with one finding per tool.
        """
        self._stop.clear()
        with ThreadPoolExecutor(at_once, thread_name_prefix="sanitizer") as threads:
            futures = [[threads.submit(self.check, candidate, tool) for tool in tools] for candidate in candidates]
            try:
                return [[future.result() for future in row] for row in futures]
            except BaseException:  # Ctrl-C, too, must not wait for the runs
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _run(self, candidate: Candidate, tool: Tool, folder: Path) -> tuple[ToolResult, str]:
        request, output, errors = (folder / name for name in ("request.json", "output", "errors"))
        max_s = math.ceil(self._deadline_s) + _GRACE_S
        message = {"workload": self._workload.to_json(), "candidate": candidate.to_json(), "max_s": max_s}
        request.write_text(encode_json(message), encoding="utf-8")
        try:
            with output.open("wb") as stdout, errors.open("wb") as stderr:
                process = subprocess.Popen(
                    self._command(tool, request),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**worker_environment(), "TMPDIR": str(folder)},
                    start_new_session=True,
                )
        except OSError as error:
            reason = f"could not be checked: {self._program} cannot be started: {error.strerror}"
            return ToolResult.UNCHECKED, reason
        try:
            interruption = self._watch(process, [output, errors])
        finally:
            exit_code = _end(process)
        return _result(read_report(_text(output)), interruption, exit_code, _text(errors))

    def _command(self, tool: Tool, request: Path) -> list[str]:
        options = [
            *("--tool", tool),
            *("--launch-timeout", str(math.ceil(self._deadline_s))),
            "--kill",
            *("--target-processes", "application-only"),
            *("--show-backtrace", "no"),  # of the host code, which is autotile's
            *("--print-limit", "20"),
            *_OPTIONS[tool],
        ]
        return [str(self._program), *options, sys.executable, "-P", "-m", _WORKER_MODULE, str(request)]

    def _watch(self, process: subprocess.Popen[bytes], files: Sequence[Path]) -> str:
        """Wait for the end of a run; return why it was not waited for, empty if it ended."""
        end = time.monotonic() + self._deadline_s
        while _is_running(process):
            if self._stop.wait(_POLL_S):
                return "interrupted"
            if time.monotonic() > end:
                return f"not finished within {self._deadline_s:g} s"
            if sum(file.stat().st_size for file in files) > _MAX_OUTPUT_BYTES:
                return f"it printed more than {_MAX_OUTPUT_BYTES >> 20} MiB"
        return ""


def _result(report: SanitizerReport, interruption: str, exit_code: int | None, errors: str) -> tuple[ToolResult, str]:
    """Return the result of a run and its reason.

    Only a message about the kernel is a failure, and only a run that completed without trouble is a pass.
    """
    if report.finding:
        return ToolResult.FAILED, report.finding
    trouble = _trouble(report, interruption, exit_code, errors)
    if trouble:
        return ToolResult.UNCHECKED, f"could not be checked: {trouble}"
    if report.errors:
        return ToolResult.FAILED, f"{report.errors} errors in a form that autotile does not know"
    return ToolResult.PASSED, ""


def _trouble(report: SanitizerReport, interruption: str, exit_code: int | None, errors: str) -> str:
    """Return why a run without a finding is no pass; empty if it is one."""
    sizes = f" at {report.sizes}" if report.sizes else ""
    if interruption:
        return f"{interruption}{sizes}"
    ended = f"it ended with exit code {exit_code}"
    if not report.done:
        last = next(reversed(errors.strip().splitlines()), ended)
        return f"{report.trouble or last}{sizes}"
    return report.trouble or (f"{ended} and no summary" if report.errors is None else "")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process runs, without reaping it: a zombie's process group id is not reused."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill the tool and the child under it; return the tool's exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    return process.returncode


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_MAX_OUTPUT_BYTES).decode(errors="replace").replace("\0", "")
