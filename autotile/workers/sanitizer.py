"""Run candidates under NVIDIA's compute-sanitizer and read its report."""

from __future__ import annotations

import contextlib
import json
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

from autotile.errors import ToolchainError
from autotile.settings import child_environment, toolkit_folders
from autotile.workers.protocol import Candidate, Workload

_TOOL = "========="
_CHILD = "autotile: "
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error")
_RACE = re.compile(r"error: (race reported|potential \w+ hazard)", re.IGNORECASE)
_MILD = re.compile(r"(warning|info): ", re.IGNORECASE)
"""Warnings of racecheck concern the threads of one warp, which the author may have meant."""
_WHERE = re.compile(r"(at|by thread|and (read|write) access at) ", re.IGNORECASE)
_DOUBT = re.compile(r"internal|error|fail|unable|unsupported|not supported|disabled", re.IGNORECASE)
"""In a headline of the tool's about itself: what was not reported may have gone unseen."""
_MILD_DOUBT = re.compile(r"might|incorrect", re.IGNORECASE)
_AFTERMATH = re.compile(r"target application|terminate successfully|exit code", re.IGNORECASE)
"""In a headline that says no more than that the child failed; the child itself says why."""


class Said(StrEnum):
    """What the child says."""

    AT = "at"
    """It launches at the sizes that follow."""
    ERROR = "error"
    """It gives up, for the reason that follows."""
    DONE = "done"
    """It has launched everything, and all came to its end."""


def spoken(word: Said, text: str) -> bytes:
    """A line of the child's, as `read_report` takes it."""
    return f"{_CHILD}{word} {' '.join(text.split())}\n".encode()


@dataclass(frozen=True, slots=True)
class Report:
    """What was said during a run."""

    finding: str
    """The first fault of the kernel, on one line; empty where there is none."""
    trouble: str
    """Why no fault found means nothing; empty where nothing is known against it."""
    sizes: str
    """What the child launched last."""
    done: bool
    """Whether it launched everything."""
    errors: int | None
    """How many the tool counted; None where it did not come to its summary."""


def read_report(text: str) -> Report:
    """Read what the tool and the child printed; anything else in it is left out."""
    blocks: list[_Block] = []
    said = dict.fromkeys(Said, "")
    done, errors = False, None
    for speaker, line in _lines(text):
        if speaker == _CHILD:
            word, _, rest = line.partition(" ")
            done = done or word == Said.DONE
            said |= {known: rest for known in Said if known == word}
        elif found := _SUMMARY.search(line):
            errors = int(found[1] or found[2])
        elif line.startswith("  ") and blocks:
            blocks[-1].details.append(line.strip())
        elif line.strip() and "COMPUTE-SANITIZER" not in line:
            blocks.append(_Block(line.strip(), said[Said.AT]))
    finding = next((block.told() for block in blocks if block.is_finding), "")
    doubts = [block.headline for block in blocks if block.is_doubt]
    doubts.sort(key=lambda headline: bool(_AFTERMATH.search(headline)))
    trouble = said[Said.ERROR] if not doubts or _AFTERMATH.search(doubts[0]) else doubts[0]
    return Report(finding, trouble or next(iter(doubts), ""), said[Said.AT], done, errors)


@dataclass(slots=True)
class _Block:
    """A message of the tool's."""

    headline: str
    sizes: str
    """What the child launched last before it."""
    details: list[str] = field(default_factory=list)

    @property
    def is_finding(self) -> bool:
        """Whether it is about the kernel: those messages have a place in it."""
        if _MILD.match(self.headline):
            return False
        return bool(_RACE.match(self.headline)) or any(detail.startswith("at ") for detail in self.details)

    @property
    def is_doubt(self) -> bool:
        """Whether it is about the tool, and bad news."""
        return bool((_MILD_DOUBT if _MILD.match(self.headline) else _DOUBT).search(self.headline))

    def told(self) -> str:
        """On one line, with the problem that was launched."""
        headline = re.sub("^error: ", "", self.headline, flags=re.IGNORECASE).rstrip(".")
        places = [detail for detail in self.details if _WHERE.match(detail)]
        return " ".join([headline, *places]) + (f", at {self.sizes}" if self.sizes else "")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Who speaks, and what, line by line."""
    for line in text.splitlines():
        for speaker in (_TOOL, _CHILD):
            if line.startswith(speaker):
                yield speaker, line.removeprefix(speaker)


Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

_PROGRAM = "compute-sanitizer"
_WHEEL = Path("nvidia", "cu13", "compute-sanitizer")
_WORKER_MODULE = "autotile.workers.sanitized"
_MOST_BYTES = 1 << 24
"""Twenty reports are a few thousand bytes; what prints more than this has gone mad."""
_LOOK_S = 0.05
_GRACE_S = 5
"""Past its deadline, before a child that nobody killed ends itself."""
_KILLED_S = 30.0
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # a failed call is the child's to tell; 1 MiB apart, a tile that overhangs one buffer does not land in the next
    "memcheck": ("--report-api-errors", "no", "--padding", "1048576"),
    "racecheck": ("--print-level", "error"),
    "initcheck": (),
    "synccheck": (),
}


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The tool reports a fault of the kernel."""
    UNCHECKED = "unchecked"
    """Nothing is known: the tool did not start, or did not finish, or says itself that it may have missed something."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one tool says of one candidate."""

    tool: Tool
    verdict: Verdict
    reason: str = ""
    """One line; empty where it passed."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the tool ran to its end and found nothing."""
        return self.verdict is Verdict.PASSED


def find_sanitizer(named: str = "") -> Path:
    """Find compute-sanitizer: in ``PATH``, in a CUDA toolkit, or from its wheel.

    Parameters
    ----------
    named
        The setting ``sanitizer``: a path or a name in ``PATH``, and then no other will do.

    Raises
    ------
    ToolchainError
        There is none.
    """
    toolkits = [folder / inner for folder in toolkit_folders() for inner in ("bin", _PROGRAM)]
    wheel = Path(sysconfig.get_path("platlib")) / _WHEEL
    places = [None] if named else [None, *toolkits, wheel]  # None: PATH
    for place in places:
        found = shutil.which(named or _PROGRAM, path=place)
        if found:
            return Path(found)
    if named:
        raise ToolchainError(f"the setting sanitizer is {named!r}, which is no program that can be run; correct it")
    raise ToolchainError(
        f"{_PROGRAM} was not found in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; install it with the CUDA toolkit "
        "or, for a driver of 580 or newer, with pip install nvidia-cuda-sanitizer-api; or set AUTOTILE_SANITIZER to it"
    )


class Sanitizer:
    """Runs candidates under compute-sanitizer's tools, each in a process of its own.

    Parameters
    ----------
    workload
        The problem; a candidate is launched at its ragged sizes, where the rules allow them, and at its own.
    program
        As `find_sanitizer` gives it.
    deadline_s
        Seconds until a check is given up. A kernel runs ten to some hundred times as long as it does alone.
    """

    def __init__(self, workload: Workload, program: Path, deadline_s: float) -> None:
        self._workload = workload
        self._program = program
        self._deadline_s = deadline_s
        self._stop = threading.Event()

    def check(self, candidate: Candidate, tool: Tool) -> Finding:
        """Run one candidate under one tool; whatever becomes of it is a finding."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="autotile-", ignore_cleanup_errors=True) as folder:
            verdict, reason = self._run(candidate, tool, Path(folder))
        return Finding(tool, verdict, reason, round(time.perf_counter() - start, 3))

    def check_all(
        self, candidates: Sequence[Candidate], tools: Sequence[Tool] = TOOLS, at_once: int = 4
    ) -> list[list[Finding]]:
        """Run every candidate under every tool, several at a time.

        Returns
        -------
        list of list of Finding
            A row a candidate, in it a finding a tool.
        """
        self._stop.clear()
        with ThreadPoolExecutor(at_once, thread_name_prefix="sanitizer") as threads:
            futures = [[threads.submit(self.check, candidate, tool) for tool in tools] for candidate in candidates]
            try:
                return [[future.result() for future in row] for row in futures]
            except BaseException:  # Ctrl-C, too, must not wait for what runs
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _run(self, candidate: Candidate, tool: Tool, folder: Path) -> tuple[Verdict, str]:
        request, output, errors = (folder / name for name in ("request.json", "output", "errors"))
        most_s = math.ceil(self._deadline_s) + _GRACE_S
        message = {"workload": self._workload.to_json(), "candidate": candidate.to_json(), "most_s": most_s}
        request.write_text(json.dumps(message), encoding="utf-8")
        try:
            with output.open("wb") as stdout, errors.open("wb") as stderr:
                process = subprocess.Popen(
                    self._command(tool, request),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**child_environment(), "TMPDIR": str(folder)},
                    start_new_session=True,
                )
        except OSError as error:
            reason = f"could not be checked: {self._program} cannot be started: {error.strerror}"
            return Verdict.UNCHECKED, reason
        try:
            cut_short = self._watch(process, [output, errors])
        finally:
            exit_code = _end(process)
        return _judge(read_report(_text(output)), cut_short, exit_code, _text(errors))

    def _command(self, tool: Tool, request: Path) -> list[str]:
        options = [
            *("--tool", tool),
            *("--launch-timeout", str(math.ceil(self._deadline_s))),
            "--kill",
            *("--target-processes", "application-only"),
            *("--show-backtrace", "no"),  # of the host; it is our own
            *("--print-limit", "20"),
            *_OPTIONS[tool],
        ]
        return [str(self._program), *options, sys.executable, "-P", "-m", _WORKER_MODULE, str(request)]

    def _watch(self, process: subprocess.Popen[bytes], files: Sequence[Path]) -> str:
        """Wait for its end; why it was not waited for, if so."""
        end = time.monotonic() + self._deadline_s
        while _is_running(process):
            if self._stop.wait(_LOOK_S):
                return "interrupted"
            if time.monotonic() > end:
                return f"not finished within {self._deadline_s:g} s"
            if sum(file.stat().st_size for file in files) > _MOST_BYTES:
                return f"it printed more than {_MOST_BYTES >> 20} MiB"
        return ""


def _judge(report: Report, cut_short: str, exit_code: int | None, errors: str) -> tuple[Verdict, str]:
    """Only a report about the kernel is a failure, and only a run that came to its end without doubts is a pass."""
    if report.finding:
        return Verdict.FAILED, report.finding
    doubt = _doubt(report, cut_short, exit_code, errors)
    if doubt:
        return Verdict.UNCHECKED, f"could not be checked: {doubt}"
    if report.errors:
        return Verdict.FAILED, f"{report.errors} errors in a form that autotile does not know"
    return Verdict.PASSED, ""


def _doubt(report: Report, cut_short: str, exit_code: int | None, errors: str) -> str:
    """Why nothing found means nothing; empty where it means that there is nothing."""
    place = f" at {report.sizes}" if report.sizes else ""
    if cut_short:
        return f"{cut_short}{place}"
    ended = f"it ended with exit code {exit_code}"
    if not report.done:
        last = next(reversed(errors.strip().splitlines()), ended)
        return f"{report.trouble or last}{place}"
    return report.trouble or (f"{ended} and no summary" if report.errors is None else "")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether it runs, leaving it unreaped: while it is a zombie, its process group is certain to be its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill what is left of it, the child under the tool too; its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
    return process.returncode


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_MOST_BYTES).decode(errors="replace")
