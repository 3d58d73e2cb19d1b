"""Seconds until a session has its first trial, a good configuration, and its answer; two versions in turn.

    python benchmarks/quick.py [--data FOLDER] [--before CHECKOUT] [--budget 10] [--rounds 1] [--output quick.json]

Each session is a process of its own with an empty database and an empty cubin cache. Examples are tuned by
``autotile tune``, and seconds count from its start. Kernels of other people's suites (``--data``, see suites.py) are
tuned by `autotile.kernel_tuner.tune_kernel`, and seconds count from its call, as a script makes its inputs before. With
``--before`` another checkout of the package runs each session right before this one, on the same files.

The table has the medians of the rounds: the seconds until the first trial with a time is stored, until one within 5 %
and 1 % of the best that any session of that kernel has measured, the seconds of the finals, and those until the answer.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from checkouts import ROOT, environment_of
from provenance import provenance
from rich.console import Console
from rich.table import Table
from suites import bat_calls, run_tool, script_calls

SUITES = ("bat/gemm", "bat/nbody", "bat/convolution", "bat/triad", "bat/pnpoly", "bat/hotspot", "kt/spmv", "kt/stencil")
EXAMPLES = ("reduction", "softmax_template", "attention", "stencil_2d")
LIMIT_S = 120.0
MARGINS = {"first": float("inf"), "to 5 %": 1.05, "to 1 %": 1.01}
COLUMNS = (*MARGINS, "finals", "answer")


def main() -> None:
    """Run the sessions, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the suites")
    parser.add_argument("--before", type=Path, help="folder of another checkout")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each search")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kernels", nargs="+")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.data = arguments.data and arguments.data.resolve()
    if arguments.call:
        call_of_suite(arguments.data, arguments.call, arguments.budget)
        return
    known = [*(SUITES if arguments.data else ()), *EXAMPLES]
    if unknown := [name for name in arguments.kernels or () if name not in known]:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
    versions = {**({"before": arguments.before.resolve()} if arguments.before else {}), "now": ROOT}
    report: dict[str, Any] = {**provenance(), "budget_s": arguments.budget, "sessions": []}
    for number in range(arguments.rounds):
        for name in arguments.kernels or known:
            for version, checkout in versions.items():
                session = run(name, checkout, arguments)
                print(
                    f"{name}, {version}: {session.get('error') or len(session['trials'])}", file=sys.stderr, flush=True
                )
                report["sessions"].append({"kernel": name, "version": version, "round": number, **session})
                write(report, arguments.output)
    report["rows"] = rows(report["sessions"])
    for session in report["sessions"]:
        session["trials"] = len(session.get("trials", ()))
    write(report, arguments.output)
    show(report["rows"], [*versions])


def write(report: Mapping[str, Any], output: Path | None) -> None:
    """Write the report so far, so that an interruption does not lose it."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


def run(name: str, checkout: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one session; return the seconds and the time of each trial, and the seconds of the finals and in all."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(checkout, Path(folder))
        if name in EXAMPLES:
            file = ROOT / "examples" / name / f"{name}.toml"
            sizes = tomllib.loads(file.read_text())["problem"]["sizes"]  # which another version may want to be given
            command = ["-m", "autotile", "tune", str(file), *(f"{size}={value}" for size, value in sizes.items())]
            command += ["--budget", f"{arguments.budget}s", "--json"]
        else:
            command = [__file__, "--call", name, "--data", str(arguments.data), "--budget", str(arguments.budget)]
        start_s = time.time()
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {LIMIT_S:.0f} s"}
        end_s = time.time()
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        if name not in EXAMPLES:
            called = json.loads(done.stdout.splitlines()[-1])
            start_s, end_s = called["start_s"], called["end_s"]
        with closing(sqlite3.connect(environment["AUTOTILE_DB"])) as connection:
            found = connection.execute(
                "SELECT created_at, time_us FROM trials WHERE phase = 'search' AND outcome = 'ok' ORDER BY id"
            ).fetchall()
            (summary,) = connection.execute("SELECT summary FROM runs").fetchone()
        trials = [(datetime.fromisoformat(at).timestamp() - start_s, time_us) for at, time_us in found]
        return {"trials": trials, "finals_s": json.loads(summary)["phases"]["finals"], "answer_s": end_s - start_s}


def call_of_suite(data: Path, name: str, budget_s: float) -> None:
    """Tune a kernel of a suite as a script does, and print the seconds since the epoch around the call."""
    call = {**bat_calls(data), **script_calls(data)}[name]()
    import autotile.kernel_tuner  # noqa: F401 - a script has imported it before its call

    start_s = time.time()
    run_tool("autotile", call, budget_s, "")
    print(json.dumps({"start_s": start_s, "end_s": time.time()}))


def rows(sessions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each kernel and version: the medians of its sessions."""
    table = []
    for name in dict.fromkeys(session["kernel"] for session in sessions):
        ran = [session for session in sessions if session["kernel"] == name and session.get("trials")]
        if not ran:
            continue
        best_us = min(time_us for session in ran for _, time_us in session["trials"])
        for version in dict.fromkeys(session["version"] for session in ran):
            own = [seconds(session, best_us) for session in ran if session["version"] == version]
            # a margin that a session has not reached takes longer than any that did
            medians = {column: float(np.median([one[column] for one in own])) for column in COLUMNS}
            reached = {column: round(value, 2) if np.isfinite(value) else None for column, value in medians.items()}
            table.append({"kernel": name, "version": version, "best_us": best_us, **reached})
    return table


def seconds(session: Mapping[str, Any], best_us: float) -> dict[str, float]:
    """Return the seconds of a session by the columns of the table; infinite where it did not get there."""
    trials = session["trials"]
    reached = {
        name: min((at for at, time_us in trials if time_us <= margin * best_us), default=float("inf"))
        for name, margin in MARGINS.items()
    }
    return {**reached, "finals": session["finals_s"], "answer": session["answer_s"]}


def show(table: Sequence[Mapping[str, Any]], versions: Sequence[str]) -> None:
    """Print the rows of each kernel, with those of the versions one below the other, and their medians."""
    shown = Table("kernel", "version", *(f"{column} s" for column in COLUMNS))
    for row in table:
        cells = [f"{row[column]:.2f}" if row[column] is not None else "-" for column in COLUMNS]
        shown.add_row(row["kernel"], row["version"], *cells)
    for version in versions:
        own = [row for row in table if row["version"] == version]
        values = [[row[column] if row[column] is not None else np.inf for row in own] for column in COLUMNS]
        if own:
            shown.add_row("median", version, *(f"{np.median(column):.2f}" for column in values))
    Console(width=110).print(shown)


if __name__ == "__main__":
    main()
