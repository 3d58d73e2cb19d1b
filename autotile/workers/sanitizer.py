"""Runs of candidates under NVIDIA's compute-sanitizer: their reports, and the process that runs under it.

That process launches one candidate once per problem, and nothing else. Each buffer is an allocation of its own, so that
out-of-bounds accesses are detected to the byte. Outputs are left uninitialized, so that reads of them are detected.
Results are not verified.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from autotile.core.documents import decode_json, encode_json
from autotile.core.dtypes import DTYPES
from autotile.core.text import sizes_text
from autotile.cuda.driver import constant_copies, copy_constants, live_device
from autotile.cuda.function import LaunchSequence
from autotile.cuda.packing import pack_launches
from autotile.cuda.toolchain import load_cupy
from autotile.errors import AutotileError, ToolchainError
from autotile.kernel.inputs import input_maker, missing_input
from autotile.kernel.launch import LaunchData, LaunchPlan, problem_scalars
from autotile.settings import toolkit_folders, worker_environment
from autotile.space.limits import check_config
from autotile.workers.child import exit_with_parent, is_running, kill_group, limit_disk_use, reap
from autotile.workers.jobs import Candidate, Entry, Time, Workload, job_message, loaded, read_job

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

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

_PROGRAM = "compute-sanitizer"
_WHEEL = Path("nvidia", "cu13", "compute-sanitizer")
_WORKER_MODULE = "autotile.workers.sanitizer"
_MAX_OUTPUT_BYTES = 1 << 24
"""Limit of the output; twenty messages of the tool are a few thousand bytes."""
_POLL_S = 0.05
_GRACE_S = 5
"""Time after the deadline at which a child that was not killed ends itself."""
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # the child reports failed calls; with 1 MiB between buffers, a tile that overhangs one does not reach the next
    "memcheck": ("--report-api-errors", "no", "--padding", "1048576"),
    "racecheck": ("--print-level", "error"),
    "initcheck": (),
    "synccheck": (),
}


Notice = Literal["at", "error", "done"]
"""Kind of a line that the child prints: a launch begins, at the sizes that follow; the child ends, for the reason that
follows; all launches completed."""
ToolResult = Literal["passed", "failed", "unchecked"]
"""Result of a check. Failed: the tool reports a fault of the kernel. Unchecked: it did not start, did not finish, or
states that it may have missed faults."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one tool for one candidate."""

    tool: Tool
    result: ToolResult
    reason: str = ""
    """Reason, on one line; empty if the candidate passed."""


def find_sanitizer(named: str = "") -> Path:
    """Find compute-sanitizer in ``PATH``, in a CUDA toolkit, or in its wheel; raise `ToolchainError` if it is nowhere.

    If the setting ``sanitizer`` names a path or a name in ``PATH``, no other program is searched for.
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


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """Runs candidates under compute-sanitizer's tools, each in a process of its own.

    A candidate is launched at the ragged sizes of the problem, if the rules allow them, and at its own. The deadline is
    that of a check: the tools slow a kernel down by a factor of ten to some hundred.
    """

    _workload: Workload
    _program: Path
    _deadline_s: float
    _stop: threading.Event = field(default_factory=threading.Event)

    def check(self, candidate: Candidate, tool: Tool) -> Finding:
        """Run one candidate under one tool; failures of the run are findings, not errors.

        Only a message about the kernel is a failure, and only a run that completed without trouble is a pass.
        """
        with tempfile.TemporaryDirectory(prefix="autotile-", ignore_cleanup_errors=True) as folder:
            request, output, errors = (Path(folder) / name for name in ("request.json", "output", "errors"))
            job = Time((Entry(candidate, problem=0),), workloads=(self._workload,))
            request.write_text(encode_json(job_message(job)), encoding="utf-8")
            limit_s = math.ceil(self._deadline_s)
            command = [
                *(str(self._program), "--tool", tool),
                *("--launch-timeout", str(limit_s)),
                "--kill",
                *("--target-processes", "application-only"),
                *("--show-backtrace", "no"),  # of the host code, which is autotile's
                *("--print-limit", "20"),
                *_OPTIONS[tool],
                *(sys.executable, "-P", "-m", _WORKER_MODULE, str(limit_s + _GRACE_S), str(request)),
            ]
            try:
                with output.open("wb") as stdout, errors.open("wb") as stderr:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        env={**worker_environment(), "TMPDIR": folder},
                        start_new_session=True,
                    )
            except OSError as error:
                reason = f"could not be checked: {self._program} cannot be started: {error.strerror}"
                return Finding(tool, "unchecked", reason)
            try:
                trouble = self._watch(process, [output, errors])
            finally:
                kill_group(process)  # the tool and the child under it
                ended = f"it ended with exit code {reap(process)}"
            last = next(reversed(_text(errors).strip().splitlines()), ended)
            return Finding(tool, *_judged(_text(output), trouble, ended, last))

    def check_all(
        self, candidates: Sequence[Candidate], tools: Sequence[Tool] = TOOLS, at_once: int = 4
    ) -> list[list[Finding]]:
        """Run each candidate under each tool, ``at_once`` runs concurrently; return a row of findings per candidate."""
        self._stop.clear()
        with ThreadPoolExecutor(at_once, thread_name_prefix="sanitizer") as threads:
            futures = [[threads.submit(self.check, candidate, tool) for tool in tools] for candidate in candidates]
            try:
                return [[future.result() for future in row] for row in futures]
            except BaseException:  # Ctrl-C, too, must not wait for the runs
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _watch(self, process: subprocess.Popen[bytes], files: Sequence[Path]) -> str:
        """Wait for the end of a run; return why it was not waited for, empty if it ended."""
        end = time.monotonic() + self._deadline_s
        while is_running(process.pid):
            if self._stop.wait(_POLL_S):
                return "interrupted"
            if time.monotonic() > end:
                return f"not finished within {self._deadline_s:g} s"
            if sum(file.stat().st_size for file in files) > _MAX_OUTPUT_BYTES:
                return f"it printed more than {_MAX_OUTPUT_BYTES >> 20} MiB"
        return ""


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_MAX_OUTPUT_BYTES).decode(errors="replace").replace("\0", "")


def _judged(text: str, trouble: str, ended: str, last_error: str) -> tuple[ToolResult, str]:
    """Return the result of a run and its reason by the output of the tool and the child; other lines are ignored.

    ``trouble`` is why its end was not waited for, empty if it was; ``ended`` says how it ended, and ``last_error`` is
    the last line of its errors.
    """
    blocks: list[tuple[str, str, list[str]]] = []  # headline, sizes of the last launch before it, and details
    notices = dict.fromkeys(get_args(Notice), "")
    done, errors = False, None
    for whole in text.splitlines():
        prefix = next((known for known in (_TOOL_PREFIX, _CHILD_PREFIX) if whole.startswith(known)), None)
        if prefix is None:
            continue
        line = whole.removeprefix(prefix)
        if prefix == _CHILD_PREFIX:
            word, _, rest = line.partition(" ")
            done = done or word == "done"
            notices |= {word: rest} if word in notices else {}
        elif found := _SUMMARY.search(line):
            errors = int(found[1] or found[2])
        elif line.startswith("  ") and blocks:
            blocks[-1][2].append(line.strip())
        elif line.strip() and "COMPUTE-SANITIZER" not in line:
            blocks.append((line.strip(), notices["at"], []))
    failures = []
    for headline, sizes, details in blocks:
        is_minor = _MINOR.match(headline)
        # a message that concerns the kernel has a location in it
        is_located = _RACE.match(headline) or any(detail.startswith("at ") for detail in details)
        if not is_minor and is_located:
            words = [re.sub("^error: ", "", headline, flags=re.IGNORECASE).rstrip(".")]
            words += [detail for detail in details if _LOCATION.match(detail)]
            return "failed", " ".join(words) + (f", at {sizes}" if sizes else "")
        if (_MINOR_TOOL_FAILURE if is_minor else _TOOL_FAILURE).search(headline):
            failures.append(headline)
    failures.sort(key=lambda headline: bool(_CONSEQUENCE.search(headline)))
    stated = notices["error"] if not failures or _CONSEQUENCE.search(failures[0]) else failures[0]
    stated = stated or next(iter(failures), "")
    at = f" at {notices['at']}" if notices["at"] else ""
    if trouble or not done:
        trouble = f"{trouble or stated or last_error}{at}"
    else:
        trouble = stated or (f"{ended} and no summary" if errors is None else "")
    if trouble:
        return "unchecked", f"could not be checked: {trouble}"
    if errors:
        return "failed", f"{errors} errors in a form that autotile does not know"
    return "passed", ""


def launch_at_all_sizes(workload: Workload, candidate: Candidate, notify: Callable[[Notice, str], None]) -> None:
    """Load a candidate, and launch it once at each size that the rules allow; the tuned one comes last.

    At the others, scalars take their values for verification.
    """
    config, dtype, spec = candidate.config, workload.dtype, workload.spec()
    cupy = load_cupy()
    cupy.cuda.Device(workload.device_index).use()
    cupy.cuda.set_allocator(None)  # no pool
    device = live_device(workload.device_index)
    loaded_functions = loaded(candidate, spec)
    tuned = spec.at(workload.sizes, dtype)
    ragged = tuned.at(spec.ragged_sizes(tuned.sizes))
    others = [*([] if missing_input(spec, ragged) else [ragged]), *map(tuned.at, workload.verify_sizes)]
    problems = [(problem, True) for problem in others if not check_config(spec, config, problem, device)]
    for problem, check in (*problems, (tuned, False)):
        functions = loaded_functions.at(problem.sizes)
        plan = LaunchPlan.of(spec, config, problem, device)
        data = LaunchData.of(spec, config, problem, device)
        shaped = spec.shaped(problem, config)
        names = shaped.names
        inputs = input_maker(spec, shaped, check=check)
        buffers = {}
        for buffer in spec.buffers:
            storage = DTYPES[buffer.element_type(dtype, names)].storage
            buffers[buffer.name] = cupy.ndarray(buffer.array_shape(names), storage)
            if buffer.is_initialized:
                buffers[buffer.name].set(inputs(buffer.name))
        workspaces = {}
        for workspace in data.workspaces:
            if workspace.size_bytes:
                make, kind = cupy.zeros if workspace.zeroed else cupy.ndarray, DTYPES[workspace.dtype]
                workspaces[workspace.name] = make(kind.array_shape(workspace.shape), kind.storage)
        addresses = {name: array.data.ptr for name, array in {**buffers, **workspaces}.items()}
        scalars = problem_scalars(spec, problem, check=check)
        arguments = pack_launches(spec, plan, data, dtype, addresses=addresses, scalars=scalars)
        copy_constants(constant_copies(spec, functions.module, shaped), addresses, 0)
        notify("at", sizes_text(problem.sizes))
        LaunchSequence(functions, plan, arguments)()
        cupy.cuda.runtime.deviceSynchronize()


def format_notice(notice: Notice, text: str) -> bytes:
    """Return the line that the child prints for `_judged`."""
    return f"{_CHILD_PREFIX}{notice} {' '.join(text.split())}\n".encode()


def main() -> None:
    """Run the job in the file that the command line names, within the seconds before it."""
    output = os.dup(1)  # for notices, as the sanitizer writes there; that of kernels goes to standard error
    os.dup2(2, 1)

    def notify(notice: Notice, text: str) -> None:
        os.write(output, format_notice(notice, text))

    limit_disk_use()
    exit_with_parent()
    signal.alarm(int(sys.argv[1]))  # ends the process even if its parent was killed
    job = read_job(decode_json(Path(sys.argv[2]).read_bytes(), dict))
    asked = job.entries[0].candidate
    assert asked is not None
    faults: tuple[type[Exception], ...] = (AutotileError,)
    try:
        cuda = load_cupy().cuda
        faults += (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError)
        launch_at_all_sizes(job.workloads[0], asked, notify)
    except faults as error:
        notify("error", str(error))
        sys.exit(1)
    notify("done", "")


if __name__ == "__main__":
    main()
