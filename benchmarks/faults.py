"""Handling of failing kernels: autotile and, optionally, Kernel Tuner on the same fault kit.

    python benchmarks/faults.py [--only NAME ...] [--kernel-tuner] [--output faults.json]
    python benchmarks/faults.py --gpus 2 4 [--random-kills 50] [--seed 0] [--output faults_gpus.json]
    python benchmarks/faults.py --gpus 2 --simulated-seconds 0.1 [--random-kills 50]

Each fault has its own session with four healthy configurations and one that fails. The table lists the outcome of the
faulty configuration, whether the healthy ones and the winner are correct, and how many seconds longer the session took
than one without a fault. Kernel Tuner runs the same five configurations with its CuPy backend in a separate process,
which is killed after 15 seconds. Results already in the output file are kept.

With ``--gpus``, sessions on several GPUs are disturbed instead: a GPU worker is killed, one GPU hangs for good, workers
are killed at random, and kernels hang. Each is compared with the undisturbed session: one trial of each configuration,
no trial lost, the same winner within 1 %. Simulated GPUs, whose workers replay a recording, run no hanging kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fault_runs import show_runs
from gpu_faults import run_gpu_faults
from provenance import provenance
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotile.errors import AutotileError

# the kit is part of the tests; this script's folder, which comes first in the path, has a module of the same name
sys.path[0] = str(Path(__file__).parents[1] / "tests")

from faults.fault_kit import HEALTHY, Fault, fault_kernel, read_faults  # noqa: E402
from faults.fault_session import tune_faults  # noqa: E402

_LIMIT_S = 15.0
_HANGING = ("infinite_loop", "hangs_later")
"""Faults of the kit that several GPUs are tried with."""
_STYLES = {"survived": "green", "as expected": "green"}


def main() -> None:
    """Run the kit, or Kernel Tuner on one fault in a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {fault.name: fault for fault in read_faults()}
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", default=list(known))
    parser.add_argument("--kernel-tuner", action="store_true", help="compare with Kernel Tuner")
    parser.add_argument("--gpus", nargs="+", type=int, metavar="N", help="numbers of GPUs of a session")
    parser.add_argument("--trials", type=int, default=400, help="configurations that it tries")
    parser.add_argument("--random-kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills")
    parser.add_argument("--simulated-seconds", type=float, metavar="S", help="simulate the GPUs; time of a candidate")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--child", choices=[HEALTHY, *known], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_kernel_tuner(arguments.child)))
        return
    if arguments.gpus:
        on_several(arguments, known)
        return
    earlier = json.loads(arguments.output.read_text()) if arguments.output and arguments.output.exists() else {}
    measured = {entry["fault"]: entry for entry in earlier.get("faults", [])}
    undisturbed_s = earlier.get("undisturbed_s") or run_undisturbed()
    entries = []
    for name in arguments.only:
        entry = measured.get(name, {"fault": name})
        if "autotile" not in entry:
            entry["autotile"] = run_autotile(known[name], undisturbed_s)
        if arguments.kernel_tuner and "kernel_tuner" not in entry:
            entry["kernel_tuner"] = run_child(name)
        entries.append(entry)
        print(f"{name}: {entry['autotile']['verdict']}", file=sys.stderr, flush=True)
        if arguments.output:
            results = {"undisturbed_s": undisturbed_s, "faults": entries}
            arguments.output.write_text(json.dumps({**provenance(), **results}, indent=1) + "\n")
    show(entries, undisturbed_s)


def on_several(arguments: argparse.Namespace, known: Mapping[str, Fault]) -> None:
    """Run the faults of sessions on several GPUs; exit with 1 if something was lost."""
    entries = []
    for entry in faults_on_several(arguments, known):
        entries.append(entry)
        print(f"{entry['fault']}: {entry['verdict']}, {entry['seconds']} s", file=sys.stderr, flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps({**provenance(), "runs": entries}, indent=1) + "\n")
    show_runs(entries)
    sys.exit(any(entry["verdict"] != "nothing lost" for entry in entries))


def faults_on_several(arguments: argparse.Namespace, known: Mapping[str, Fault]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each run with the undisturbed one, as it ends."""
    for count in arguments.gpus:
        if arguments.simulated_seconds is None:
            yield run_hanging(count, [known[name] for name in _HANGING])
        yield from run_gpu_faults(
            count,
            trials=arguments.trials,
            kills=arguments.random_kills,
            seed=arguments.seed,
            seconds=arguments.simulated_seconds,
        )


def run_hanging(count: int, faults: list[Fault]) -> dict[str, Any]:
    """Run the kit's healthy kernels on several GPUs, with some that hang."""
    with tempfile.TemporaryDirectory() as folder:
        found = tune_faults(Path(folder), *(fault.name for fault in faults), devices=tuple(range(count)))
    complaints = [*filter(None, (fault.complaint(found.trial_of(fault.name)) for fault in faults)), *found.damage()]
    return {
        "gpus": count,
        "fault": "kernels hang",
        "injected": len(faults),
        "trials": len(found.trials),
        "candidates_without_a_trial": 4 + len(faults) - len(found.trials),
        "gpus_at_end": sum(not use.lost for use in found.result.gpus),
        "seconds": round(found.seconds, 2),
        "verdict": "; ".join(complaints) or "nothing lost",
        "faults": [
            f"{trial.config['FAULT']}: {trial.outcome}, {trial.reason}" for trial in found.trials if trial.reason
        ],
    }


def run_undisturbed() -> float:
    """Return the seconds of a session without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        return tune_faults(Path(folder), HEALTHY).seconds


def run_autotile(fault: Fault, undisturbed_s: float) -> dict[str, Any]:
    """Run the session of one fault."""
    expected = " or ".join(fault.outcomes)
    with tempfile.TemporaryDirectory() as folder:
        try:
            session = tune_faults(Path(folder), fault.name)
        except AutotileError as error:
            return {"expected": expected, "outcome": "", "reason": str(error), "verdict": "stopped", "lost_s": None}
    trial = session.trial_of(fault.name)
    complaints = [*filter(None, [fault.complaint(trial)]), *session.damage()]
    return {
        "expected": expected,
        "outcome": str(trial.outcome) if trial is not None else "",
        "reason": trial.reason if trial is not None else "",
        "verdict": "; ".join(complaints) or "as expected",
        "lost_s": session.seconds - undisturbed_s,
    }


def run_child(name: str) -> dict[str, Any]:
    """Run Kernel Tuner on one fault in a fresh process; return the verdict and its last line of output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUPY_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return {"verdict": "hang", "reason": f"did not end within {_LIMIT_S:.0f} s"}
    if process.returncode:
        said = [line for line in errors.splitlines() if line.strip()]
        return {"verdict": "stopped", "reason": said[-1] if said else f"exit code {process.returncode}"}
    found = json.loads(output.splitlines()[-1])
    if found["winner"]["FAULT"] != HEALTHY:
        return {"verdict": "faulty winner", "reason": json.dumps(found["winner"])}
    lost = 4 - found["healthy"]
    return {"verdict": f"lost {lost} healthy" if lost else "survived", "reason": ""}


def run_kernel_tuner(name: str) -> dict[str, Any]:
    """Run Kernel Tuner on the kit's kernel with one fault, in this process."""
    import kernel_tuner
    from constraint import FunctionConstraint  # a bare lambda would be parsed from its source, without its closure

    with tempfile.TemporaryDirectory() as folder:
        kernel = fault_kernel(Path(folder), name)
    n = kernel.spec.sizes["n"]
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    faulty_threads = 1024 if name == "registers" else 128
    optin_bytes = 227 * 1024
    results, _ = kernel_tuner.tune_kernel(
        kernel.spec.entry,
        kernel.source,
        n,
        [x, np.zeros_like(x), np.int32(n)],
        {parameter.name: list(parameter.values) for parameter in kernel.spec.parameters},
        grid_div_x=["THREADS"],
        block_size_names=["THREADS"],
        restrictions=[FunctionConstraint(lambda threads, fault: fault == HEALTHY or threads == faulty_threads)],
        smem_args={"size": lambda config: optin_bytes - 8192 if config["FAULT"] == "shared_memory" else 0},
        answer=[None, 2 * x + 1, None],
        atol=1e-4,
        lang="CUPY",
        compiler_options=["--std=c++17"],
        strategy="brute_force",
        quiet=True,
    )
    timed = [result for result in results if isinstance(result["time"], float)]
    best = min(timed, key=lambda result: result["time"])
    healthy = sum(result["FAULT"] == HEALTHY for result in timed)
    return {"winner": {key: best[key] for key in ("THREADS", "FAULT")}, "healthy": healthy}


def show(entries: list[dict[str, Any]], undisturbed_s: float) -> None:
    """Print one line per fault."""
    compared = any("kernel_tuner" in entry for entry in entries)
    table = Table("fault", "expected", "outcome", "reason", "seconds lost", "verdict")
    if compared:
        table.add_column("Kernel Tuner")
    for entry in entries:
        own = entry["autotile"]
        lost = f"{own['lost_s']:.1f}" if own["lost_s"] is not None else ""
        reason = re.sub(r"\s+", " ", own["reason"])
        row = [entry["fault"], own["expected"], own["outcome"], escape(reason), lost, styled(own["verdict"])]
        if compared:
            row.append(styled(entry["kernel_tuner"]["verdict"]))
        table.add_row(*row)
    console = Console(width=180)
    console.print(table)
    as_expected = sum(entry["autotile"]["verdict"] == "as expected" for entry in entries)
    console.print(f"{as_expected} of {len(entries)} as expected; a session without a fault takes {undisturbed_s:.1f} s")
    if compared:
        survived = sum(entry["kernel_tuner"]["verdict"] == "survived" for entry in entries)
        console.print(f"Kernel Tuner survived {survived} of {len(entries)}")


def styled(verdict: str) -> str:
    """Return a verdict as Rich markup: green if good, red otherwise."""
    style = _STYLES.get(verdict, "red")
    return f"[{style}]{escape(verdict)}[/{style}]"


if __name__ == "__main__":
    main()
