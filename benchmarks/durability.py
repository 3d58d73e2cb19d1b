"""Durability of tuning results: killed sessions, and many processes sharing one database.

    python benchmarks/durability.py [--kills 100] [--processes 16] [--seconds 60] [--seed 0] [--output FILE.json]

`autotile tune --replay` is killed (SIGKILL) at random moments: a stage is drawn, from the first import to the end of
the process, and then a moment within that stage. The same command is restarted until it completes, and the content of
the database is compared, trial by trial and in order, with that of an undisturbed session. After each kill, the
database is checked for damage, for every trial that the process had reported as stored, and for leftover workers.

Then a number of processes tune, read, import and export concurrently on one database file.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

# the bench is part of the tests; replace this script's folder, which comes first in the path
sys.path[0] = str(Path(__file__).parents[1] / "tests")

from endurance.crowd import Crowd, run_crowd  # noqa: E402
from endurance.kills import GONE_WITHIN_S, Kill, Scenario, Series, kill_and_resume  # noqa: E402
from endurance.progress_marks import STAGES  # noqa: E402

_SGEMM = ("sgemm_2d", "M=1024", "N=1024", "K=1024", "--replay")
_TILED = ("matmul_tiled", "M=2048", "N=2048", "K=2048", "--replay")
SCENARIOS = (
    Scenario("sgemm_2d tpe", _SGEMM),
    Scenario("sgemm_2d nsga2", (*_SGEMM, "--sampler", "nsga2", "--seed", "1")),
    Scenario("matmul_tiled tpe, compiling", (*_TILED, "--sampler", "tpe", "--trials", "24"), cold=True),
    Scenario("matmul_tiled brute-force", _TILED),
)


def main() -> None:
    """Run both parts, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        series = list(_reporting(kill_and_resume(folder, SCENARIOS, arguments.kills, arguments.seed, cache)))
        (folder / "crowd").mkdir()
        crowd = run_crowd(folder / "crowd", arguments.processes, arguments.seconds, cache)
    console = Console(width=140)
    show_kills(console, series)
    show_crowd(console, crowd)
    if arguments.output:
        arguments.output.write_text(json.dumps(_document(series, crowd), indent=1) + "\n")
    sys.exit(any(one.faults for one in series) or bool(crowd.faults))


def _reporting(series: Iterable[Series]) -> Iterator[Series]:
    """Yield the series, reporting each on standard error as it ends."""
    for one in series:
        print(f"{one.scenario}: {len(one.kills)} kills, {'; '.join(one.faults) or 'the same result'}", file=sys.stderr)
        yield one


def show_kills(console: Console, series: Sequence[Series]) -> None:
    """Print one line per stage, and one line per scenario."""
    kills = [kill for one in series for kill in one.kills]
    table = Table("killed while", "kills", "with workers", "trials lost", "databases damaged", "workers gone after")
    for stage in (*STAGES, ""):
        shown = [kill for kill in kills if stage in ("", kill.stage)]
        table.add_row(stage or "all", *_figures(shown), end_section=stage == STAGES[-1])
    console.print(table)
    table = Table("scenario", "kills", "studies ended", "same result as undisturbed")
    for name in dict.fromkeys(one.scenario for one in series):
        ended = [one for one in series if one.scenario == name]
        same = sum(not one.difference for one in ended)
        table.add_row(name, str(sum(len(one.kills) for one in ended)), str(len(ended)), str(same))
    console.print(table)


def _figures(kills: Sequence[Kill]) -> list[str]:
    slowest = max((kill.gone_s for kill in kills if kill.workers), default=0.0)
    return [
        str(len(kills)),
        str(sum(bool(kill.workers) for kill in kills)),
        str(sum(kill.lost for kill in kills)),
        str(sum(bool(kill.damage) for kill in kills)),
        f"{slowest:.1f} s" if slowest <= GONE_WITHIN_S else "never",
    ]


def show_crowd(console: Console, crowd: Crowd) -> None:
    """Print the commands of the concurrent processes, and the faults found."""
    commands = ", ".join(f"{count} {name}" for name, count in crowd.commands.items())
    console.print(f"{crowd.processes} processes on one database for {crowd.seconds:.0f} s: {commands}")
    state = "; ".join(crowd.damage) or "the database is intact"
    console.print(
        f"{len(crowd.errors)} errors; {crowd.acknowledged} trials reported as stored, {crowd.lost} of them lost; "
        f"{crowd.imported} imports, {crowd.lost_imports} of them lost; {state}"
    )
    for fault in crowd.faults:
        console.print(f"[red]{fault}[/red]")


def _document(series: Sequence[Series], crowd: Crowd) -> dict[str, Any]:
    return {
        **provenance(),
        "sqlite": sqlite3.sqlite_version,
        "series": [asdict(one) for one in series],
        "crowd": asdict(crowd),
    }


if __name__ == "__main__":
    main()
