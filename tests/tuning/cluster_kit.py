"""A scheduler of Dask on the loopback address and workers of `autotile worker`, in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")


class ClusterKit:
    """Processes of a cluster; `tls` has variables that name certificates, `cache` the cubins of the workers."""

    def __init__(self, folder: Path, tls: Mapping[str, str] | None = None, host: str = "127.0.0.1") -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = tls or {}
        self._file = folder / "scheduler.json"
        self.cache = folder / "cache of the workers"
        self.farm: subprocess.Popen[bytes] | None = None
        self.scheduler = f"{'tls' if tls else 'tcp'}://{host}:0"
        self.start_scheduler()
        wait_until(lambda: self._file.exists() and self._file.read_text().endswith("}"))
        self.scheduler = str(json.loads(self._file.read_text())["address"])

    def start_scheduler(self) -> None:
        """Start the scheduler, a second time at the same address."""
        host, _, port = self.scheduler.rpartition(":")
        words = ["--host", host, "--port", port, "--no-dashboard", "--scheduler-file", str(self._file)]
        words += ["--dashboard-address", "127.0.0.1:0"]
        self._scheduler = self._start("dask", ["scheduler", *words])

    def kill_scheduler(self) -> None:
        self._scheduler.kill()
        self._scheduler.wait()

    def worker(self, *words: str, **given: Any) -> subprocess.Popen[Any]:
        """Start `autotile worker` with arguments behind the address."""
        return self._start("autotile", ["worker", self.scheduler, *words], **given)

    def simulated(self, recordings: Path, number: int, seconds: float = 0.0, **given: Any) -> subprocess.Popen[Any]:
        words = ["--replay", str(recordings), "--devices", str(number), "--replay-seconds", str(seconds)]
        return self.worker(*words, "--compile", "0", **given)

    def restore(self) -> None:
        """End the workers, and start the scheduler if a test has killed it."""
        self.end_workers()
        if self._scheduler.poll() is not None:
            self.start_scheduler()

    def end_workers(self) -> None:
        self.end(but=self._scheduler)

    def end(self, but: subprocess.Popen[Any] | None = None) -> None:
        """End the processes but one."""
        doomed = [one for one in self._started if one is not but]
        for one in doomed:
            one.terminate()
        for one in doomed:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
            if one.stderr is not None:
                one.stderr.close()
        self._started = [one for one in self._started if one is but]

    def _start(self, module: str, words: list[str], **given: Any) -> subprocess.Popen[Any]:
        environment = {**os.environ, **self._environment, "AUTOTILE_CACHE": str(self.cache)}
        command, given = [sys.executable, "-m", module, *words], {"stderr": subprocess.DEVNULL, **given}
        self._started.append(subprocess.Popen(command, env=environment, **given))
        return self._started[-1]


@contextmanager
def running_cluster(
    folder: Path, tls: Mapping[str, str] | None = None, host: str = "127.0.0.1"
) -> Iterator[ClusterKit]:
    """Start a scheduler, and end all processes in the end."""
    kit = ClusterKit(folder, tls, host)
    try:
        yield kit
    finally:
        kit.end()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(word) for file in found for word in file.read_text().split()]
    return [*direct, *(below for one in direct for below in children(one))]


def kill_all(worker: subprocess.Popen[bytes]) -> int:
    """Kill a worker and the processes below it; return how many these were together."""
    doomed = [worker.pid, *children(worker.pid)]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    return len(doomed)


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the TCP and UDP ports at which a process and those below it can be reached, with their addresses."""
    import psutil  # comes with Dask

    found = set[tuple[str, int]]()
    for one in [pid, *children(pid)]:
        with suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(one).net_connections("inet"):
                is_open = connection.type == socket.SOCK_DGRAM and connection.laddr
                if connection.status == psutil.CONN_LISTEN or is_open:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def loopback_host() -> str:
    """Return the loopback address of IPv6, or that of IPv4 where this machine has none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "[::1]"


def not_loopback(ports: set[tuple[str, int]]) -> list[str]:
    """Return the addresses of ports that other machines may reach."""
    return [address for address, _ in ports if not ip_address(address).is_loopback]


def outer_address() -> str | None:
    """Return an IPv4 address of this machine that others may reach; None if it has none."""
    import psutil

    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not ip_address(one.address).is_loopback:
                return str(one.address)
    return None
