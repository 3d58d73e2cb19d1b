"""Run scripts of Kernel Tuner with their import changed alone, each in a process of its own, and print a table.

    python benchmarks/kernel_tuner_scripts.py --data FOLDER [--only NAME] [--seconds N] [--json FILE] [--compile]

FOLDER holds the scripts and the files that they read; it is copied, and its scripts are changed in the copy. With
``--compile`` nothing is launched: `tune_kernel` compiles some configurations for an H200, on any machine, and ends the
script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_IMPORTS = (
    (re.compile(r"^(\s*)import kernel_tuner\s*$", re.MULTILINE), r"\1import autotile.kernel_tuner as kernel_tuner"),
    (re.compile(r"^(\s*)import kernel_tuner as (\w+)", re.MULTILINE), r"\1import autotile.kernel_tuner as \2"),
    (re.compile(r"^(\s*)from kernel_tuner\b", re.MULTILINE), r"\1from autotile.kernel_tuner"),
)

_COMPILE_ONLY = """
import random, sys
import autotile.kernel_tuner.interface as _interface
from autotile.core.device import device_profile
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.errors import CompileError
from autotile.space.search_space import feasible_space

def _compile(kernel):
    device = device_profile("h200")
    space = feasible_space(kernel.spec, kernel.spec.sizes, device)
    for row in random.Random(0).sample(range(len(space)), min(4, len(space))):
        config = space.config(row)
        try:
            found = compile_cubin(compile_job(kernel, config, kernel.spec.dtypes[0], device.architecture)).resources
        except CompileError as error:  # an ordinary result of a configuration
            found = error
        print("compiled", config, found)
    print(f"{len(space)} valid configurations")

def _tune(self, described):
    _compile(described.build())
    sys.exit(0)

def _once(described, device_index):
    _compile(described.build())
    return list(described.arguments)

_interface._TuneCall.tune = _tune
_interface.run_once = _once
"""


def changed(text: str) -> str:
    """Return a script with its imports of Kernel Tuner changed to autotile's."""
    for pattern, replacement in _IMPORTS:
        text = pattern.sub(replacement, text)
    return text


def run_script(script: Path, seconds: float, *, compile_only: bool) -> dict[str, object]:
    """Run a script in its folder; return its exit status, time and last lines."""
    text = changed(script.read_text())
    if compile_only:
        script.with_name("sitecustomize.py").write_text(_COMPILE_ONLY)
    script.write_text(text)
    is_test = script.name.startswith("test_")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", script.name] if is_test else [sys.executable, script.name]
    folder = str(script.parent)
    environment = os.environ | {
        "AUTOTILE_DB": f"{folder}/{script.stem}.db",
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")])),
    }
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        status, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        status, output = "late", raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    lines = [line for line in output.splitlines() if line.strip()]
    timed = sum(re.search(r"\btime=[\d.]+ms", line) is not None for line in lines)
    return {
        "script": script.name,
        "status": status,
        "seconds": round(time.perf_counter() - started, 1),
        "configurations": timed,
        "last": lines[-1][:200] if lines else "",
        "tail": lines[-12:],
    }


def main() -> None:
    """Run the scripts of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", action="store_true", help="compile only; needs no GPU")
    arguments = parser.parse_args()
    rows = []
    for script in sorted(arguments.data.glob("*.py")):
        if arguments.only not in script.name:
            continue
        with tempfile.TemporaryDirectory(prefix="kernel-tuner-scripts-") as folder:
            copy = Path(folder) / "scripts"
            shutil.copytree(arguments.data, copy)
            row = run_script(copy / script.name, arguments.seconds, compile_only=arguments.compile)
        rows.append(row)
        print(f"{row['script']:<36} {row['status']:>5} {row['seconds']:>7} s {row['configurations']:>6}  {row['last']}")
        if row["status"] != "0":
            print(*(f"    {line}" for line in row["tail"]), sep="\n")  # type: ignore[attr-defined]
        sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
