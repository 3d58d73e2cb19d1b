"""A small cluster for benchmarks: a scheduler and machines with simulated GPUs, each in a network namespace of its own.

Network namespaces need root; without it, all processes share the loopback address, and no network can be cut.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from autotile.tuning.cluster.connection import Connection

HEAD = "head"
_START_S = 120.0
_POLL_S = 0.1
_PORT = 8786


class Network:
    """Namespaces on a bridge, whose own address is that of this process."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=2)}
        self._tag = f"at{os.getpid()}"
        self._prefix = f"10.231.{os.getpid() % 256}"

    can_cut = True

    def __enter__(self) -> Network:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._prefix}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name in self._numbers:
            space, outer, inner = self._space(name), self._outer(name), f"{self._tag}i"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", inner, "netns", space)
            _ip("link", "set", outer, "master", self._bridge, "up")
            for words in (
                ["addr", "add", f"{self.address(name)}/24", "dev", inner],
                ["link", "set", inner, "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", space, *words)
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._numbers:
            _ip("netns", "del", self._space(name), check=False)
            _ip("link", "del", self._outer(name), check=False)
        _ip("link", "del", self._bridge, check=False)

    def address(self, name: str) -> str:
        """Return the address of a machine."""
        return f"{self._prefix}.{self._numbers[name]}"

    def command(self, name: str) -> list[str]:
        """Return the words that run a program on a machine."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, name: str) -> None:
        """Let all packets of a machine vanish."""
        _ip("link", "set", self._outer(name), "nomaster")

    def mend(self, name: str) -> None:
        """Connect a machine again."""
        _ip("link", "set", self._outer(name), "master", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"{self._tag}b"

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _outer(self, name: str) -> str:
        return f"{self._tag}o{self._numbers[name]}"


class Loopback:
    """The loopback address in place of a network."""

    can_cut = False

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def address(self, name: str) -> str:
        """Return the loopback address."""
        return "127.0.0.1"

    def command(self, name: str) -> list[str]:
        """Return no words: programs run here."""
        return []

    def cut(self, name: str) -> None:
        """Refuse: nothing can be cut."""
        raise NotImplementedError

    mend = cut


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def can_make_namespaces() -> bool:
    """Return whether this user may make network namespaces."""
    name = f"at{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    _ip("netns", "del", name)
    return True


class Site:
    """A scheduler, and machines with simulated GPUs.

    Parameters
    ----------
    network
        Its network, entered.
    folder
        Folder for the logs of all processes.
    gpus
        Numbers of the GPUs of each machine.
    recording, seconds
        What they replay, and the time of a candidate.
    """

    def __init__(
        self,
        network: Network | Loopback,
        folder: Path,
        gpus: dict[str, Sequence[int]],
        *,
        recording: Path,
        seconds: float,
    ) -> None:
        self.network = network
        self.gpus = gpus
        self._folder = folder
        self._recording = recording
        self._seconds = seconds
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        host = network.address(HEAD)
        port = _PORT if network.can_cut else _free_port()
        self.address = f"tcp://{host}:{port}"

    def ensure(self) -> None:
        """Start what does not run, and wait until all GPUs are offered."""
        for name in (HEAD, *self.gpus):
            if name not in self._running or self._running[name].poll() is not None:
                self.start(name)
        self.await_gpus()

    def await_gpus(self) -> None:
        """Wait until all GPUs are offered."""
        end = time.monotonic() + _START_S
        with closing(self._connected(end)) as connection:
            expected = sum(len(numbers) for numbers in self.gpus.values())
            while len({name for offer in connection.offers() for name in offer if name[-1].isdigit()}) < expected:
                if time.monotonic() > end:
                    raise RuntimeError(f"the cluster does not start; see the logs in {self._folder}")
                time.sleep(_POLL_S)

    def start(self, name: str) -> None:
        """Start the scheduler or a machine."""
        if name == HEAD:
            host, _, port = self.address.removeprefix("tcp://").rpartition(":")
            words = ["dask", "scheduler", "--host", host, "--port", port, "--no-dashboard"]
            words += ["--dashboard-address", "127.0.0.1:0"]
        else:
            numbers = ",".join(map(str, self.gpus[name]))
            words = ["autotile", "worker", self.address, "--insecure", "--replay", str(self._recording)]
            words += ["--devices", numbers, "--replay-seconds", str(self._seconds), "--compile", "0"]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*self.network.command(name), sys.executable, "-m", *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill the scheduler, or a machine with all its processes."""
        process = self._running[name]
        doomed = [process.pid, *_below(process.pid)]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def gpu_processes(self) -> list[int]:
        """Return the processes of Dask that hold the GPUs, the oldest first."""
        pids = [pid for name in self.gpus for pid in _children(self._running[name].pid)]
        return sorted(pid for pid in pids if b"spawn_main" in _command(pid))

    def close(self) -> None:
        """End all processes."""
        for name in [*self.gpus, HEAD]:
            if name in self._running:
                self.kill(name)

    def _connected(self, end: float) -> Connection:
        while True:
            with suppress(Exception):
                return Connection(self.address, insecure=True)
            if time.monotonic() > end:
                raise RuntimeError(f"the scheduler does not start; see the logs in {self._folder}")


@contextmanager
def cluster_site(gpus: dict[str, Sequence[int]], *, recording: Path, seconds: float) -> Iterator[Site]:
    """Start a cluster, and end it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = Network([HEAD, *gpus]) if can_make_namespaces() else Loopback()
        stack.enter_context(network)
        site = Site(network, folder, gpus, recording=recording, seconds=seconds)
        stack.callback(site.close)
        yield site


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


def _children(pid: int) -> list[int]:
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(word) for file in files for word in file.read_text().split()]
    except OSError:
        return []


def _below(pid: int) -> list[int]:
    direct = _children(pid)
    return [*direct, *(below for one in direct for below in _below(one))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
