"""A scheduler of Dask on the loopback address and workers of `autotile worker`, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120.0


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition, which holds within two minutes."""
    end = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


class ClusterKit:
    """Processes of a cluster.

    Attributes
    ----------
    scheduler
        Address of the scheduler.
    cache
        Folder of the cubin cache of the workers.
    """

    def __init__(self, folder: Path) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.cache = folder / "cache of the workers"
        file = folder / "scheduler.json"
        words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        self._start("dask", words)
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        self.scheduler = str(json.loads(file.read_text())["address"])

    def worker(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `autotile worker` with arguments behind the address."""
        return self._start("autotile", ["worker", self.scheduler, *words])

    def simulated(self, recordings: Path, number: int, seconds: float = 0.0) -> subprocess.Popen[bytes]:
        """Start a worker with a simulated GPU."""
        words = ["--replay", str(recordings), "--devices", str(number), "--replay-seconds", str(seconds)]
        return self.worker(*words)

    def end(self) -> None:
        """End all processes."""
        for one in self._started:
            one.terminate()
        for one in self._started:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    def _start(self, module: str, words: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "AUTOTILE_CACHE": str(self.cache)}
        command = [sys.executable, "-m", module, *words]
        self._started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment))
        return self._started[-1]


@contextmanager
def running_cluster(folder: Path) -> Iterator[ClusterKit]:
    """Start a scheduler, and end all processes in the end."""
    kit = ClusterKit(folder)
    try:
        yield kit
    finally:
        kit.end()


def children(pid: int) -> list[int]:
    """Return the processes below one, of Dask and of multiprocessing."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(word) for file in found for word in file.read_text().split()]
    return [*direct, *(below for one in direct for below in children(one))]
