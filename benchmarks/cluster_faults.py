"""Faults in a session on the GPUs of several machines: what is lost, tried twice, or wins wrongly.

    python benchmarks/cluster_faults.py [--only NAME ...] [--random-kills 50] [--seed 0] [--output cluster_faults.json]

Starts a scheduler of Dask, two machines with two simulated GPUs each, a PostgreSQL server, and a session for each
fault.
As root, the scheduler and each machine have a network namespace of their own, and their network can be cut; otherwise
they share the loopback address, and nothing is cut. The GPUs replay a recording, each candidate taking ``--seconds``;
compilers take no time. Each session is compared with the undisturbed one: one trial of each configuration, the trials
that were reported among them, and the same winner.

Random kills are of processes of GPUs (60 %), machines (20 %), the scheduler and the database (10 % each). What was
killed is started again at once, as a service manager does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cluster_site import HEAD, Site, cluster_site
from fault_runs import Disturbance, Run, Watch, at_random, run_session, show_runs, some_configs
from gpu_faults import KERNEL, SIZES, short_stall
from instant_compilers import InstantCompilers
from provenance import provenance

from autotile.exchange.recording import find_recording, read_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import read_settings
from autotile.tuning import session
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.result import TuneResult

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from postgresql_server import PostgresqlServer, programs_folder, running_server

GPUS = {"one": (0, 1), "two": (2, 3)}
_CUTS_S = (30.0, 80.0)
"""A cut that the connections survive, or that they are made again after; and one after which GPUs are given up."""
_JOIN_S = 5.0
"""Time in which GPUs that are offered again join the session."""
_DOWN_S = 5.0
"""Time for which the scheduler, a machine or the database is down."""
_DEADLINE_S = 10.0
_SPREAD_S = 6.0
_KINDS = {"gpu": 6, "machine": 2, "scheduler": 1, "database": 1}
"""Weights of the random kills."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What can be done to a session of a site.

    Attributes
    ----------
    after
        Number of trials after which each fault begins.
    starter
        Thread that starts the server, which ends with the thread that started it.
    """

    site: Site
    server: PostgresqlServer
    after: int
    starter: ThreadPoolExecutor

    def disturbances(self, kills: int, trials: int, seed: int) -> dict[str, Disturbance]:
        """Return the faults by their names."""
        found: dict[str, Disturbance] = {
            "process of a GPU killed": self._once(self._kill_gpu),
            "process of a GPU hangs": self._hang,
            "machine killed for good": self._once(self._kill_machine),
            "machine killed and restarted": self._once(self._kill_machine, self._start_machine),
            "scheduler killed and restarted": self._once(self._kill_scheduler, self._start_scheduler),
            "database killed and restarted": self._once(self._kill_database, self._start_database),
        }
        if self.site.network.can_cut:
            for seconds in _CUTS_S:
                found[f"network of a machine cut for {seconds:.0f} s"] = self._cut("one", seconds)
                found[f"network of the scheduler cut for {seconds:.0f} s"] = self._cut(HEAD, seconds)
        if kills:
            found[f"{kills} random kills"] = at_random(kills, trials, seed, self._kill_any, spread_s=_SPREAD_S)
        return found

    def _once(self, *steps: Callable[[], str]) -> Disturbance:
        """Return a disturbance of some steps, with a pause between them."""

        def disturb(watch: Watch) -> None:
            if not watch.await_trials(self.after):
                return
            for number, step in enumerate(steps):
                if number:
                    watch.ended.wait(_DOWN_S)
                watch.faults.append(f"after {len(watch.acknowledged)} trials: {step()}")

        return disturb

    def _cut(self, name: str, seconds: float) -> Disturbance:
        """Return a cut of the network, after which the session goes on to its end when all GPUs are back."""

        def disturb(watch: Watch) -> None:
            if not watch.await_trials(self.after):
                return
            watch.held_at = 3 * self.after
            self.site.network.cut(name)
            watch.faults.append(f"after {len(watch.acknowledged)} trials: cut {name}")
            time.sleep(seconds)
            self.site.network.mend(name)
            self.site.await_gpus()
            time.sleep(_JOIN_S)
            watch.held_at = None

        return disturb

    def _kill_gpu(self) -> str:
        pid = self.site.gpu_processes()[0]
        os.kill(pid, signal.SIGKILL)
        return f"killed process {pid} of a GPU"

    def _hang(self, watch: Watch) -> None:
        """Stop a process of a GPU until the session has ended."""
        if not watch.await_trials(self.after):
            return
        pid = self.site.gpu_processes()[0]
        os.kill(pid, signal.SIGSTOP)
        watch.faults.append(f"after {len(watch.acknowledged)} trials: stopped process {pid} of a GPU")
        watch.ended.wait()
        os.kill(pid, signal.SIGKILL)

    def _kill_machine(self) -> str:
        self.site.kill("one")
        return "killed machine one"

    def _start_machine(self) -> str:
        self.site.start("one")
        return "started machine one"

    def _kill_scheduler(self) -> str:
        self.site.kill(HEAD)
        return "killed the scheduler"

    def _start_scheduler(self) -> str:
        self.site.start(HEAD)
        return "started the scheduler"

    def _kill_database(self) -> str:
        self.server.stop(signal.SIGQUIT)
        return "stopped the database as a crash does"

    def _start_database(self) -> str:
        self.starter.submit(self.server.start).result()
        return "started the database"

    def _kill_any(self, rng: Random) -> str | None:
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        match kind:
            case "gpu":
                processes = self.site.gpu_processes()
                if not processes:
                    return None
                pid = rng.choice(processes)
                os.kill(pid, signal.SIGKILL)
                return f"killed process {pid} of a GPU"
            case "machine":
                name = rng.choice(list(self.site.gpus))
            case "scheduler":
                name = HEAD
            case _:
                return f"{self._kill_database()}, {self._start_database()}"
        self.site.kill(name)
        self.site.start(name)
        return f"killed {name}"


def main() -> None:
    """Run the sessions, and show and write what was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="words of the names of the faults to inject")
    parser.add_argument("--trials", type=int, default=200, help="configurations that a session tries")
    parser.add_argument("--seconds", type=float, default=0.25, help="time of a candidate on a simulated GPU")
    parser.add_argument("--random-kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # and all is cleaned up
    programs = programs_folder()
    if programs is None:
        sys.exit("PostgreSQL is not installed; on Debian: apt install postgresql")
    found = find_recording(read_settings().recording_folders, KERNEL, SIZES, "float32")
    assert found is not None
    recording = read_recording(found)
    configs = some_configs(KERNEL, SIZES, ReplayBackend(recording).device, arguments.trials, recording)
    results: dict[str, Any] = provenance() | {"seconds": arguments.seconds, "runs": []}
    with (
        ThreadPoolExecutor(1) as starter,
        running_server(programs) as server,
        cluster_site(GPUS, recording=found, seconds=arguments.seconds) as site,
        instant_compilers(),
    ):
        results["network"] = "namespaces" if site.network.can_cut else "loopback; nothing is cut"
        faults = Faults(site, server, arguments.trials // 4, starter)
        chosen = faults.disturbances(arguments.random_kills, arguments.trials, arguments.seed)
        undisturbed: Run | None = None
        for name, disturb in {"none": lambda watch: None, **chosen}.items():
            if undisturbed is not None and arguments.only and not any(word in name for word in arguments.only):
                continue
            site.ensure()
            options = TuneOptions(
                sampler=BRUTE_FORCE,
                only=tuple(configs),
                replay=found,
                scheduler=site.address,
                insecure=True,
                database=server.new_database(),
                run_deadline_s=_DEADLINE_S,
                transfer=False,
            )
            with short_stall() if "hangs" in name else nullcontext():
                run = run_session(
                    name, lambda watch, chosen=options: tune(chosen, watch), str(options.database), disturb
                )
            undisturbed = undisturbed or run
            entry = {"gpus": sum(map(len, GPUS.values())), **run.compared(undisturbed, configs)}
            results["runs"].append(entry)
            print(f"{name}: {entry['verdict']}, {entry['seconds']} s", file=sys.stderr, flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    show_runs(results["runs"])
    sys.exit(any(entry["verdict"] != "nothing lost" for entry in results["runs"]))


def tune(options: TuneOptions, watch: Watch) -> TuneResult:
    """Run the session of the benchmark."""
    kernel = load_kernel(KERNEL)
    return session.tune(kernel, resolve_problem(kernel.spec, SIZES, None), read_settings(), options, watch)


@contextmanager
def instant_compilers() -> Iterator[None]:
    """Let compilers take no time."""
    known = session.CompilePool
    session.CompilePool = InstantCompilers  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        session.CompilePool = known  # type: ignore[misc]


if __name__ == "__main__":
    main()
