"""A connection to a scheduler of Dask that is made again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal
from uuid import uuid4

import msgspec

from autotile.core.device import DeviceProperties
from autotile.errors import WorkerError
from autotile.tuning.cluster.scheduler import check_scheduler, distributed, local_host, no_scheduler_error
from autotile.workers.jobs import Reading, Workload

_CONNECT_S = 10.0
_LOOK_S = 5.0
"""Time in which the scheduler answers."""
_POLL_S = 1.0
"""Interval at which it is asked what is offered."""
_RECONNECT_S = 300.0
"""Time that a scheduler may be gone: for a restart, or a break of the network."""
_LOGGERS = ("distributed", "distributed.client")
"""Loggers of Dask, whose records of a lost connection, with tracebacks, are not for the user."""


SIMULATED = "simulated-"
"""Prefix of the names of GPUs that replay a recording."""
Operation = Literal["describe", "open", "run", "close"]


class Request(msgspec.Struct):
    """A request of a session to a GPU. It is complete: a worker that was replaced answers it like the first one.

    The path of each cubin of its job is the SHA-256 hash of the content, which is sent along.
    """

    op: Operation
    version: str
    session: str
    kernel: str = ""
    workload: Workload | None = None
    """The session's problem; None if each entry of its jobs has one of its own."""
    deadline_s: float = 0.0
    job: dict[str, Any] = {}
    expected_s: float = 0.0


class Reply(msgspec.Struct):
    """Reply to a request; ``error`` and its kind are set if it failed.

    ``is_dead`` is whether the GPU's worker process died with the candidate, ``is_busy`` whether another session has the
    GPU. There are no readings of a race that broke.
    """

    error: str = ""
    kind: str = ""
    is_dead: bool = False
    is_busy: bool = False
    device: DeviceProperties | None = None
    readings: list[Reading] | None = None


class Connection:
    """Connection to a scheduler.

    A thread asks every second what is offered. If the scheduler does not answer, the connection is made again when it
    does. Tasks that had no result are lost then: it is up to their owner to submit them again.

    Parameters
    ----------
    address
        Address of the scheduler.
    insecure
        Whether the connection may leave the machine without TLS.

    Raises
    ------
    InputError
        The address is not allowed, or nothing answers there.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        self._security = check_scheduler(address, insecure=insecure)
        self._address = address
        with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread runs a loop of its own
            pool.submit(asyncio.run, local_host(address, self._security, _CONNECT_S)).result()
        try:
            self._client = self._connected()
        except Exception as error:  # whatever Dask raises where something else answers
            raise no_scheduler_error(address, error) from None
        self._levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._changed = threading.Condition()
        self._offers: list[Mapping[str, float]] = self._look() or []
        self._known: set[str] = set()
        """Resources that were ever offered."""
        self._gone_at: dict[str, float] = {}
        """Time at which a look first missed a resource, by `time.monotonic`."""
        self._lost_at: float | None = None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="scheduler", daemon=True)
        self._watch.start()

    @property
    def lost_s(self) -> float:
        """Time for which the scheduler has not answered, in seconds; 0 if it has answered the last time."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

    @property
    def waiting(self) -> str:
        """Remark for the user while the scheduler does not answer; otherwise empty."""
        if self._lost_at is None:
            return ""
        return f"the scheduler {self._address} does not answer; it is waited for, {_RECONNECT_S / 60:.0f} min at most"

    def offers(self) -> list[Mapping[str, float]]:
        """Return the resources of each process of Dask that is present; none while the scheduler does not answer."""
        with self._changed:
            return [] if self._lost_at is not None else list(self._offers)

    def absent_s(self, resource: str) -> float:
        """Return the time for which a resource was not offered, in seconds, by a scheduler that answers."""
        with self._changed:
            return time.monotonic() - self._gone_at.get(resource, time.monotonic())

    def submit(self, function: Callable[..., Any], *arguments: Any, resource: str) -> Any:
        """Submit a task for a process that has a resource, and return its future.

        If the process dies, the scheduler has the task run by its successor, or by another one with the resource. If
        the scheduler is lost, the task is cancelled.

        Raises
        ------
        WorkerError
            The scheduler is lost.
        """
        key = f"autotile-{uuid4().hex}"
        try:
            return self._client.submit(function, *arguments, key=key, resources={resource: 1}, pure=False)
        except Exception as error:  # of a client that is closed
            raise WorkerError(f"the scheduler {self._address} is lost: {error}") from None

    def is_lost(self, future: Any) -> bool:
        """Return whether a task was lost with an earlier connection."""
        return future.client is not self._client

    def await_look(self) -> None:
        """Wait until the scheduler was asked again.

        Raises
        ------
        WorkerError
            It has not answered for too long, or the connection is closed.
        """
        with self._changed:
            if not self._ending.is_set():
                self._changed.wait(_POLL_S + _LOOK_S + _CONNECT_S)
        if self._ending.is_set():
            raise WorkerError(f"the connection to the scheduler {self._address} is closed")
        if self.lost_s > _RECONNECT_S:
            raise WorkerError(
                f"the scheduler {self._address} has not answered for {self.lost_s:.0f} s; all trials are stored: start "
                "`dask scheduler` again, and repeat the command, which goes on from them"
            )

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()
        self._client.close(timeout=_CONNECT_S)
        self._watch.join()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def _connected(self) -> Any:
        return distributed.Client(
            self._address, security=self._security, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=False
        )

    def _keep(self) -> None:
        """Ask the scheduler what is offered, and connect again where it was lost."""
        while not self._ending.wait(_POLL_S):
            found = self._look()
            if found is None and self._client.status == "closed":
                with suppress(OSError, TimeoutError, ValueError, RuntimeError):
                    self._client = self._connected()
                    found = self._look()
            with self._changed:
                self._note(found, time.monotonic())
                self._changed.notify_all()
        self._client.close(timeout=_CONNECT_S)  # one that was connected while the other was closed

    def _look(self) -> list[Mapping[str, float]] | None:
        """Return the offers of GPUs and compilers; None if the scheduler does not answer."""
        client = self._client
        try:
            found = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=_LOOK_S)
        except Exception:  # whatever Dask raises where the connection breaks, or is closed
            return None
        return [one.get("resources", {}) for one in found["workers"].values()] if client.status == "running" else None

    def _note(self, found: list[Mapping[str, float]] | None, now: float) -> None:
        if found is None:  # what is absent cannot be known; after it, everything has time to join again
            self._lost_at = self._lost_at or now
            self._gone_at.clear()
            return
        self._lost_at, self._offers = None, found
        present = {name for resources in found for name in resources}
        self._known |= present
        self._gone_at = {name: self._gone_at.get(name, now) for name in self._known - present}
