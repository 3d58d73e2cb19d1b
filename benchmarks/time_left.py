"""Error of the estimated time left over whole sessions, before and after the estimate follows pace, rules and finals.

    python benchmarks/time_left.py [--seeds 2] [--limit 400] [--processes N] [--output time_left.json]

Sessions are made of replayed searches, which give the trials after which a search ends, and of simulated times: compile
processes and a GPU in a pipeline, whose speed is steady or changes. Three real sessions are added, whose times were
recorded on two cores that other programs used too (``time_left_sessions.json``). At nineteen points of each,
the estimate is compared with the time that the session then took. "Before" is the mean time of a trial since the start,
times the trials up to the target.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from compiled import KERNEL, bench_of
from provenance import provenance
from search_methods import session

from autotile.core.model import Measurement, Outcome, Trial
from autotile.core.text import percent_text
from autotile.search.samplers import DEFAULT, lookahead_of
from autotile.search.search import Search, Shortlist
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import SETTLED_GAIN, TimeLeft

RESULTS = Path(__file__).parent / "results"
RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
POINTS = np.arange(0.05, 0.96, 0.05)
UNTIL = 0.01
AHEAD, CHOSEN_AMONG, VALID = 32, 16, 10_000
MEASURED = Trial(
    {"BM": 1}, Outcome.OK, measurement=Measurement(2500.0, 2490.0, 2510.0), seconds={"load": 0.01, "verify": 0.03}
)
FINALS_S = 2.0
"""Time of finals at 2500 us a run: benchmarks/results/h200/unseen_sgemm.json."""


@dataclass(frozen=True)
class ReplayedSearch:
    """A replayed search: for each trial, after how many more each rule is foreseen to hold; and where it held."""

    settles_after: list[float | None]
    until_after: list[float | None]
    settled_at: int | None
    until_at: int | None


@dataclass(frozen=True)
class Times:
    """Ends of the trials of a session in seconds since it began, and the time of its finals."""

    ends_s: Sequence[float]
    finals_s: float = FINALS_S
    trial: Trial = MEASURED


def main() -> None:
    """Replay the searches, compare the estimates, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=int, default=400, help="maximum trials per search")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    paths = sorted(RECORDINGS.glob(f"{KERNEL}-*.npz"))
    jobs = [(path, seed) for path in paths for seed in range(arguments.seeds)]
    with get_context("fork").Pool(arguments.processes) as pool:
        searches = pool.starmap(partial(search, limit=arguments.limit), jobs)
    rows = [summary(name, errors) for name, errors in all_errors(searches).items()]
    print(f"{'session':32} {'before: mean, 90 %':>22} {'after: mean, 90 %':>22}   of the session's time")
    for row in rows:
        print(f"{row['session']:32} {text(row['before']):>22} {text(row['after']):>22}")
    if arguments.output:
        report = {**provenance(), "recordings": len(paths), "seeds": arguments.seeds, "limit": arguments.limit}
        arguments.output.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


def search(path: Path, seed: int, limit: int) -> ReplayedSearch:
    """Replay a search to the limit."""
    bench = bench_of(path)
    lookahead = lookahead_of(DEFAULT, workers=1)
    shortlist = Shortlist(Search(bench.space, DEFAULT, seed), lookahead)
    found = ReplayedSearch([], [], None, None)
    settled_at = until_at = None
    for _ in session(shortlist, bench.trial):
        found.settles_after.append(shortlist.trials_until(SETTLED_GAIN))
        found.until_after.append(shortlist.trials_until(UNTIL))
        count, expected = len(found.settles_after), shortlist.expected_gain
        if settled_at is None and expected is not None and expected < SETTLED_GAIN:
            settled_at = count
        if until_at is None and expected is not None and expected < UNTIL:
            until_at = count
        if count >= limit:
            break
    return ReplayedSearch(found.settles_after, found.until_after, settled_at, until_at)


def simulated(
    seed: int,
    trials: int,
    *,
    cores: int = 8,
    compile_s: float = 1.0,
    gpu_s: float = 0.1,
    start_s: float = 2.5,
    change: tuple[float, int] | None = None,
    slower: float = 0.0,
) -> Times:
    """Return the times of a session: compile processes, whose number may change, ahead of one GPU.

    Parameters
    ----------
    change
        Time in seconds at which the number of compile processes changes, and the new number.
    slower
        Growth of the time on the GPU over 200 trials, 1 for twice as long.
    """
    random = np.random.default_rng(seed)
    free_s = [0.2 * start_s] * cores
    compiled_s: list[float] = []

    def compile_at(at_s: float) -> None:
        nonlocal change, free_s
        begin_s = max(heappop(free_s), at_s)
        if change is not None and begin_s >= change[0]:
            others = change[1] - 1
            free_s = (sorted(free_s) + [change[0]] * others)[:others]
            heapify(free_s)
            change = None
        compiled_s.append(begin_s + compile_s * random.lognormal(0.0, 0.5))
        heappush(free_s, compiled_s[-1])

    for _ in range(min(AHEAD, trials)):
        compile_at(0.0)
    ends_s, end_s = [], start_s
    for number in range(trials):
        ready = min(len(compiled_s), number + CHOSEN_AMONG) - 1
        end_s = max(end_s, sorted(compiled_s)[ready])
        end_s += gpu_s * (1 + slower * number / 200) * random.lognormal(0.0, 0.4)
        ends_s.append(end_s)
        if len(compiled_s) < trials:
            compile_at(end_s)
    return Times(ends_s)


SPEEDS: Mapping[str, Callable[[int, int], Times]] = {
    "8 cores": partial(simulated),
    "2 cores": partial(simulated, cores=2),
    "the GPU binds": partial(simulated, cores=16, compile_s=0.3, gpu_s=0.5),
    "slower candidates later": partial(simulated, cores=16, compile_s=0.3, gpu_s=0.3, slower=2.0),
    "16 cores, then 4": partial(simulated, cores=16, change=(8.0, 4)),
    "2 cores, then 16": partial(simulated, cores=2, change=(40.0, 16)),
    "a slow start": partial(simulated, cores=8, compile_s=0.5, start_s=15.0),
}


def all_errors(searches: Sequence[ReplayedSearch]) -> dict[str, list[tuple[float, float]]]:
    """Return the errors before and after at each point of each session, by kind of session."""
    found: dict[str, list[tuple[float, float]]] = {}
    never: list[float | None] = [None] * 2000
    for name, times_of in SPEEDS.items():
        for seed in range(6):
            times = times_of(seed, 200)
            found.setdefault(f"200 trials, {name}", []).extend(errors(times, 200, never, trials=200))
            budget_s = 0.6 * times.ends_s[-1]
            within = sum(end_s < budget_s for end_s in times.ends_s)
            by_both = errors(times, within, never, trials=200, budget_s=budget_s)
            found.setdefault(f"200 trials or a budget, {name}", []).extend(by_both)
    for number, one in enumerate(searches):
        times = simulated(number, 400)
        if one.settled_at is not None:
            ended = errors(times, one.settled_at, one.settles_after, trials=400)
            found.setdefault("nothing more is expected", []).extend(ended)
        if one.until_at is not None:
            ended = errors(times, one.until_at, one.until_after, until=UNTIL, trials=400)
            found.setdefault("--until 1%", []).extend(ended)
    for recorded in json.loads(Path(__file__).with_name("time_left_sessions.json").read_text()):
        trial = Trial({"BM": 1}, Outcome.OK, source="replayed")
        times = Times(recorded["ends_s"], recorded["finals_s"], trial)
        found[f"recorded: {recorded['name']}"] = errors(times, len(times.ends_s), never, trials=recorded["target"])
    return found


def errors(times: Times, count: int, ends_after: Sequence[float | None], **options: Any) -> list[tuple[float, float]]:
    """Return the errors of both estimates at each point of a session, as shares of its time."""
    ends_s = list(times.ends_s[:count])
    total_s = ends_s[-1] + times.finals_s
    target, budget_s = options["trials"], options.get("budget_s")
    left, shown, found = TimeLeft(TuneOptions(**options), VALID), 0, []
    for at_s in POINTS * total_s:
        while shown < count and ends_s[shown] <= at_s:
            left.add(ends_s[shown], times.trial)
            shown += 1
        now_s = ends_s[shown - 1] if shown else 0.0
        after_s = left.search_s(shown, now_s, ends_after[shown - 1] if shown else None)
        if shown < 5 or after_s is None or (options.get("until") and ends_after[shown - 1] is None):
            continue  # a session states "at most" where the end by --until is not foreseen
        before_s = now_s / shown * (target - shown)
        if budget_s is not None:
            before_s = min(before_s, max(0.0, budget_s - now_s))
        actual_s = total_s - now_s
        estimates = (before_s, after_s + left.finals_s)
        found.append((abs(estimates[0] - actual_s) / total_s, abs(estimates[1] - actual_s) / total_s))
    return found


def summary(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the mean and the 90th percentile of the errors of one kind of session."""
    before, after = np.array(pairs).T
    figures = {
        key: {"mean": round(float(values.mean()), 4), "p90": round(float(np.quantile(values, 0.9)), 4)}
        for key, values in (("before", before), ("after", after))
    }
    return {"session": name, "points": len(pairs), **figures}


def text(figures: Mapping[str, float]) -> str:
    """Format a mean and a 90th percentile."""
    return f"{percent_text(figures['mean'])}, {percent_text(figures['p90'])}"


if __name__ == "__main__":
    main()
