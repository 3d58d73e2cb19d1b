"""The GPUs and compilers of a scheduler, and requests to them, which `autotile.tuning.cluster.worker` answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotile.core.documents import decode_json, encode_json
from autotile.errors import AutotileError, InputError, ToolchainError, WorkerError
from autotile.tuning.cluster.compilers import ClusterCompilers
from autotile.tuning.cluster.connection import SIMULATED, Connection, Operation, Reply
from autotile.tuning.cluster.scheduler import distributed
from autotile.version import __version__
from autotile.workers.jobs import Job, Workload, job_message, with_files

_POLL_S = 1.0
"""Interval at which a request that waits looks whether its GPU is gone."""
_ABSENT_S = 30.0
"""Time after which a GPU that is gone is given up; its nanny replaces a worker that died within seconds."""
_MAX_FAILURES = 10
"""Replies to one request that may be lost on their way."""
_GPU_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class RemoteWork:
    """The common part of all requests of a session.

    Attributes
    ----------
    kernel
        Name of the kernel.
    workload
        The session's problem; None if each entry of its jobs has one of its own.
    deadline_s
        Time after which the worker of a candidate is killed, in seconds.
    session
        Identity of the session, for which a GPU works until it is closed.
    """

    kernel: str
    workload: Workload | None
    deadline_s: float
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class Cluster:
    """The GPUs and compilers of a scheduler, which sessions may share.

    A request waits for its GPU and for the scheduler: if the connection was lost, it is sent again.

    Parameters
    ----------
    address, insecure
        As for `autotile.tuning.cluster.connection.Connection`, whose errors are raised.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        self._connection = Connection(address, insecure=insecure)
        self.compilers = ClusterCompilers(self._connection)

    @property
    def is_lost(self) -> bool:
        """Whether the scheduler does not answer."""
        return self._connection.lost_s > 0

    @property
    def waiting(self) -> str:
        """Remark for the user while the scheduler does not answer; otherwise empty."""
        return self._connection.waiting

    def look(self) -> list[str]:
        """Return the UUIDs of the GPUs that are present."""
        return sorted({name for resources in self._connection.offers() for name in resources if _is_gpu(name)})

    def describe(self, gpu: str) -> Sent:
        """Ask a GPU for its properties, and whether it works for a session."""
        sent = Sent(gpu, encode_json({"op": "describe", "version": __version__, "session": ""}), {})
        self._submit(sent)
        return sent

    def description(self, sent: Sent) -> Reply | None:
        """Return the answer to `describe`; None if it is not there yet. Errors are those of `result`."""
        if sent.future is None or self._connection.is_lost(sent.future):
            raise WorkerError(f"a request to {sent.gpu} was lost")
        return self.result(sent, 0.0) if sent.future.done() else None

    def send(
        self, gpu: str, op: Operation, work: RemoteWork, job: Job | None = None, *, expected_s: float = 0.0
    ) -> Sent:
        """Send a request to a GPU, with a job and its cubins if it carries one.

        A GPU answers one at a time, in the order in which they were sent.
        """
        cubins: dict[str, bytes] = {}
        common = {"op": op, "version": __version__, **asdict(work), "expected_s": expected_s}
        packed = job_message(with_files(job, lambda path: _packed(path, cubins))) if job is not None else {}
        sent = Sent(gpu, encode_json({**common, "job": packed}), cubins)
        self._submit(sent)
        return sent

    def result(self, sent: Sent, limit_s: float = math.inf, *, meanwhile: Callable[[], None] = lambda: None) -> Reply:
        """Wait for the reply to a request.

        Parameters
        ----------
        sent
            The request.
        limit_s
            Time to wait at most, in seconds.
        meanwhile
            Called about every second, and in the end.

        Raises
        ------
        WorkerError
            The GPU or the scheduler is lost, the time is over, or the request was withdrawn.
        InputError, ToolchainError
            The GPU cannot be set up for the session.
        """
        end = time.monotonic() + limit_s
        while (reply := self._poll(sent)) is None:
            meanwhile()
            if time.monotonic() > end:
                sent.withdraw()
                raise WorkerError(f"{sent.gpu} has not answered for {limit_s:.0f} s")
        meanwhile()
        if reply.error:
            raise {"input": InputError, "toolchain": ToolchainError}.get(reply.kind, WorkerError)(reply.error)
        return reply

    def _poll(self, sent: Sent) -> Reply | None:
        """Wait a moment for the reply, and send the request again if it was lost; None if there is no reply yet."""
        if sent.is_withdrawn:
            raise WorkerError(f"a request to {sent.gpu} was withdrawn")
        if sent.future is None or self._connection.is_lost(sent.future):
            self._connection.await_look()
            self._submit(sent)
            return None
        try:
            return decode_json(sent.future.result(timeout=_POLL_S), Reply)
        except TimeoutError:
            absent_s = self._connection.absent_s(sent.gpu)
            if absent_s > _ABSENT_S:
                sent.withdraw()
                raise AbsentGpuError(f"the cluster has lost {sent.gpu}: it is absent for {absent_s:.0f} s") from None
        except (asyncio.CancelledError, concurrent.futures.CancelledError, UnboundLocalError):
            sent.future = None  # the last one is of `distributed.utils.sync`, where a call is cancelled within the loop
        except AutotileError:
            raise
        except Exception as error:  # whatever Dask raises where processes die
            sent.failures += 1
            if sent.future.status == "error" or sent.failures > _MAX_FAILURES:
                raise WorkerError(f"{sent.gpu}: {type(error).__name__}: {error}") from None
            sent.future = None  # there was a reply, but its process died before it arrived
        return None

    def _submit(self, sent: Sent) -> None:
        try:
            from autotile.tuning.cluster.worker import answer  # which imports what a worker runs

            sent.future = self._connection.submit(answer, sent.request, sent.cubins, resource=sent.gpu)
        except WorkerError:  # it is sent again when the scheduler is back
            sent.future = None

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self.compilers.close()
        self._connection.close()


@dataclass(eq=False, slots=True)
class Sent:
    """A request that was sent to a GPU."""

    gpu: str
    request: str
    """A `Request` as JSON."""
    cubins: Mapping[str, bytes]
    future: Any = None
    """Future of Dask; None while the scheduler is lost."""
    failures: int = 0
    """Number of replies that did not arrive."""
    is_withdrawn: bool = False

    def withdraw(self) -> None:
        """Let nobody wait for the reply any more."""
        self.is_withdrawn = True
        if self.future is not None and not self.future.done():
            with suppress(Exception):  # of a connection that is closed, and the future with it
                self.future.cancel()

    def forget(self) -> None:
        """Have the request answered although nobody waits for the reply."""
        if self.future is not None:
            with suppress(Exception):
                distributed.fire_and_forget(self.future)


class AbsentGpuError(WorkerError):
    """A GPU is gone: its machine is off or cannot be reached. It may come back."""


def _is_gpu(resource: str) -> bool:
    return resource.startswith((*_GPU_PREFIXES, SIMULATED))


def _packed(path: str, cubins: dict[str, bytes]) -> str:
    """Return the hash of a cubin, which is added to ``cubins``; empty for none, as in replay."""
    if not path:
        return ""
    content = Path(path).read_bytes()
    name = hashlib.sha256(content).hexdigest()
    cubins[name] = content
    return name
