"""Sessions on many simulated GPUs, in processes of their own; `scaling.py --simulated` measures with it.

    python benchmarks/simulated_gpus.py session|machine JSON

Simulated GPUs replay a recording, each candidate taking the same time, with compilers that take none; every 50th GPU of
a session in one process is 3 % slower. What is measured is CPU time: of the session from its first trial to its last,
of the scheduler, of the processes that stand for the machines, and of the database server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from instant_compilers import InstantCompilers

from autotile.core.model import Measurement, Outcome, Trial
from autotile.database.database import Database
from autotile.database.runs import RunRecord
from autotile.exchange.recording import Recording, find_recording, read_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings
from autotile.tuning import backend, session
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.session import tune

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from postgresql_server import programs_folder, running_server

KERNEL, SIZES, DTYPE = "sgemm_2d", {"M": 2048, "N": 2048, "K": 2048}, "float32"
COMMANDS = 8
"""Sessions that share a study through a server."""
MOST_GPUS = {"dask": 64, "postgresql": 64}
"""GPUs at most; docs/scaling.md says what happened with more workers of Dask."""
_CUBIN_BYTES = 100_000
_GPUS_A_PROCESS = 8
"""Workers of Dask in a process, which share an interpreter."""
_CLAIMING_S = 6.0
_SETTINGS = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=1000")
"""Settings of the server, which flushes each commit."""
_TICKS = os.sysconf("SC_CLK_TCK")


def through_threads(count: int, trials: int, seconds: float, sampler: str) -> dict[str, Any]:
    """Tune on GPUs of this machine, a thread each."""
    with tempfile.TemporaryDirectory() as folder:
        return _described("threads", count, [_session(Path(folder), count, trials, seconds, sampler)])


def through_dask(count: int, trials: int, seconds: float, sampler: str) -> dict[str, Any]:
    """Tune through a scheduler of Dask and processes that offer eight GPUs each, a worker of Dask for each."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "cubin").write_bytes(os.urandom(_CUBIN_BYTES))
        file = folder / "scheduler.json"
        words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        words += ["--dashboard-address", "127.0.0.1:0"]
        scheduler = stack.enter_context(_running([sys.executable, "-m", "dask", *words]))
        while not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        given = json.dumps({"scheduler": address, "count": count, "seconds": seconds})
        machine = stack.enter_context(_running([sys.executable, __file__, "machine", given]))
        assert machine.stdout is not None
        machine.stdout.readline()  # all GPUs have joined
        watched = {"scheduler": scheduler.pid, "machine": machine.pid}
        found = _session(folder, 1, trials, seconds, sampler, scheduler=address, watched=watched)
        return _described("dask", count, [found])


def through_postgresql(count: int, trials: int, seconds: float, sampler: str) -> dict[str, Any]:
    """Tune one study with several commands that share a database on a server, each on its part of the GPUs."""
    with _server() as (url, server_pid), tempfile.TemporaryDirectory() as name:
        Database.open(url).close()  # creates the tables
        before_s = _tree_s(server_pid)
        shares = [count // COMMANDS + (number < count % COMMANDS) for number in range(COMMANDS)]
        found: list[dict[str, Any]] = []

        def run(number: int) -> None:
            found.append(_session(Path(name), shares[number], trials, seconds, sampler, database=url, seed=number))

        threads = [threading.Thread(target=run, args=(number,)) for number, share in enumerate(shares) if share]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server_s = _tree_s(server_pid) - before_s
        entry = _described("postgresql", count, found)
        return entry | {"commands": len(found), "server_ms_per_trial": _ms(server_s, entry["trials"])}


def claims(count: int, seconds: float) -> dict[str, Any]:
    """Claim configurations and store their trials as so many GPUs would that each have a session of their own."""
    with _server() as (url, server_pid):
        recording = _recording()
        key, device = recording.header.key, recording.header.device
        assert device is not None
        records = []
        for _ in range(count):
            record = RunRecord(Database.open(url), key, device)
            record.start(sampler="random", seed=0, settings={}, driver="", host="", gates={}, shares=True)
            record.claim({"claimant": -1 - len(records)})  # opens the connection
            records.append(record)
        times: dict[str, list[float]] = {"claim": [], "store": []}
        begin = threading.Barrier(count + 1)
        ending = threading.Event()

        def work(number: int) -> None:
            pause = np.random.default_rng(number)
            begin.wait()
            ending.wait(seconds * pause.random())
            for step in range(1_000_000):
                if ending.is_set():
                    return
                config = {"claimant": number, "step": step}
                start = time.perf_counter()
                assert all(records[number].claim(config))
                times["claim"].append(time.perf_counter() - start)
                ending.wait(seconds)
                start = time.perf_counter()
                records[number].add(Trial(config, Outcome.OK, stage="measure", measurement=Measurement(1.0, 0.9, 1.1)))
                times["store"].append(time.perf_counter() - start)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        load = os.getloadavg()[0]
        begin.wait()
        started_s, used_s, server_s = time.perf_counter(), time.process_time(), _tree_s(server_pid)
        time.sleep(_CLAIMING_S)
        ending.set()
        for thread in threads:
            thread.join()
        wall_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
        server_s = _tree_s(server_pid) - server_s
        trials = len(times["store"])
        with Database.open(url) as database:
            study = database.find_study(key)
            assert study is not None
            assert len(database.trials(study)) == trials  # nothing that was stored is lost
        for record in records:
            record._end_claims()
            record._database.close()
        return {
            "through": "claims",
            "gpus": count,
            "trials": trials,
            "per_s": round(trials / wall_s, 1),
            "wanted_per_s": round(count / seconds, 1),
            "claim_ms": round(1e3 * statistics.median(times["claim"]), 2),
            "store_ms": round(1e3 * statistics.median(times["store"]), 2),
            "claimant_ms_per_trial": _ms(used_s, trials),
            "server_ms_per_trial": _ms(server_s, trials),
            "load": round(load, 1),
        }


def _described(through: str, count: int, sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of sessions that ran together."""
    trials = max(one["in_study"] for one in sessions)
    counted = trials - len(sessions)  # from the first trial of each
    wall_s = max(one["end"] for one in sessions) - min(one["start"] for one in sessions)
    entry = {
        "through": through,
        "gpus": count,
        "sampler": sessions[0]["sampler"],
        "seconds": sessions[0]["seconds"],
        "trials": trials,
        "search_s": round(wall_s, 2),
        "per_s": round(counted / wall_s, 1),
        "gpus_busy": round(counted * sessions[0]["seconds"] / wall_s / count, 3),
        "parent_ms_per_trial": _ms(sum(one["cpu_s"] for one in sessions), counted),
        "start_cpu_s": round(statistics.mean(one["start_cpu_s"] for one in sessions), 2),
        "loss": min(one["loss"] for one in sessions),
        "load": sessions[0]["load"],
    }
    return entry | {f"{name}_ms_per_trial": _ms(used, counted) for name, used in sessions[0]["watched"].items()}


def _ms(seconds: float, count: int) -> float:
    return round(1e3 * seconds / max(1, count), 2)


def _session(folder: Path, count: int, trials: int, seconds: float, sampler: str, **more: Any) -> dict[str, Any]:
    """Run a session in a fresh process; return its figures."""
    given = {"count": count, "trials": trials, "seconds": seconds, "sampler": sampler, "folder": str(folder), **more}
    done = subprocess.run(
        [sys.executable, __file__, "session", json.dumps(given)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"a session failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_session(given: dict[str, Any]) -> dict[str, Any]:
    """Tune in this process; return its CPU time from the first trial to the last, in seconds, and what it found."""
    count, seconds = given["count"], given["seconds"]

    class Simulated(backend.ReplayBackend):
        def __init__(
            self, recording: Recording, options: TuneOptions | None = None, *, uuid: str = "simulated-0"
        ) -> None:
            number = int(uuid.rpartition("-")[2])
            super().__init__(
                recording, options, uuid=uuid, seconds=seconds, slowness=1.03 if number % 50 == 49 else 1.0
            )

    if "scheduler" in given:
        InstantCompilers.cubin = Path(given["folder"]) / "cubin"
    else:
        backend.ReplayBackend = Simulated  # type: ignore[assignment, misc]
    session.CompilePool = InstantCompilers  # type: ignore[assignment, misc]
    pids: dict[str, int] = given.get("watched", {})
    marks: list[tuple[float, float, dict[str, float]]] = []
    load = os.getloadavg()[0]

    def observe(progress: Progress) -> None:
        if progress.phase == "searching" and progress.last is not None:
            mark = time.time(), time.process_time(), {name: _tree_s(pid) for name, pid in pids.items()}
            marks[1:] = [mark]

    kernel = load_kernel(KERNEL)
    options = TuneOptions(
        replay="auto",
        devices=tuple(range(count)) if count > 1 else (),
        database=given.get("database") or str(Path(given["folder"]) / "tuning.db"),
        trials=given["trials"],
        sampler=given["sampler"],
        seed=given.get("seed", 0),
        scheduler=given.get("scheduler", ""),
        transfer=False,
        spend=True,
        discard=False,
        finals=0,
    )
    result = tune(kernel, resolve_problem(kernel.spec, SIZES, None), read_settings(), options, observe=observe)
    (start, cpu_s, others), (end, cpu_at_end_s, others_at_end) = marks[0], marks[-1]
    recording = _recording()
    best_us = float(np.min(recording.columns["time_us"][recording.ok]))
    assert result.winner is not None
    assert result.winner.time_us is not None
    return {
        "sampler": given["sampler"],
        "seconds": seconds,
        "in_study": sum(result.outcomes.values()),
        "start": start,
        "end": end,
        "start_cpu_s": cpu_s,
        "cpu_s": cpu_at_end_s - cpu_s,
        "watched": {name: others_at_end[name] - others[name] for name in pids},
        "loss": round(max(0.0, result.winner.time_us / best_us - 1.0), 4),
        "load": round(load, 1),
    }


def offer_gpus(given: dict[str, Any]) -> None:
    """Offer simulated GPUs to a scheduler until this process is ended, eight in a process that is forked for them."""
    import distributed  # noqa: F401 - before the fork, which copies nothing of it

    numbers = range(given["count"])
    children = []
    for start in numbers[::_GPUS_A_PROCESS]:
        joined, joining = os.pipe()
        if (pid := os.fork()) == 0:
            asyncio.run(_offer(given, numbers[start : start + _GPUS_A_PROCESS], joining))
            os._exit(0)
        os.read(joined, 1)
        children.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in children] and os._exit(0))
    print("joined", flush=True)
    signal.pause()


async def _offer(given: dict[str, Any], numbers: range, joining: int) -> None:
    import distributed

    from autotile.tuning.cluster.worker import replayed_gpus

    gpus = replayed_gpus(_recording_path(), numbers, given["seconds"])
    workers = [
        distributed.Worker(
            given["scheduler"],
            nthreads=1,
            memory_limit=0,
            resources={gpu.uuid: 1, gpu.device.name: 1},
            plugins=(gpu,),
            host="127.0.0.1",
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            local_directory=tempfile.gettempdir(),
        )
        for gpu in gpus
    ]
    for worker in workers:
        await worker
    os.write(joining, b".")
    await asyncio.gather(*(worker.finished() for worker in workers))


def _recording_path() -> Path:
    found = find_recording(read_settings().recording_folders, KERNEL, SIZES, DTYPE)
    assert found is not None
    return found


def _recording() -> Recording:
    return read_recording(_recording_path())


@contextmanager
def _server() -> Iterator[tuple[str, int]]:
    """Start a PostgreSQL server; yield the URL of a database and the id of its process."""
    programs = programs_folder()
    if programs is None:
        raise SystemExit("PostgreSQL is not installed (Debian's package postgresql)")
    with running_server(programs, _SETTINGS) as server:
        assert server._process is not None
        yield server.new_database(), server._process.pid


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tree_s(pid: int) -> float:
    """Return the CPU time of a process and its children, of those that have ended too, in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()
        ]
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_tree_s, children))


THROUGH = {"threads": through_threads, "dask": through_dask, "postgresql": through_postgresql}


if __name__ == "__main__":
    what, document = sys.argv[1], json.loads(sys.argv[2])
    if what == "machine":
        offer_gpus(document)
    else:
        print(json.dumps(run_session(document)))
