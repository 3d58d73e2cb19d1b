"""Requests of a session to the GPUs of a cluster, each a task of the scheduler, and their replies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotile.core.documents import decode_json, encode_json, to_fields
from autotile.errors import WorkerError
from autotile.tuning.cluster.compilers import ClusterCompilers
from autotile.tuning.cluster.connection import Connection, distributed
from autotile.tuning.cluster.worker import SIMULATED, GpuReply, GpuRequest, Operation, answer
from autotile.workers.child import parsed_reply
from autotile.workers.jobs import Job, job_message, with_files

_POLL_S = 1.0
"""Interval at which a request that waits looks whether its GPU is gone."""
_ABSENT_S = 30.0
"""Time after which a GPU that is gone is given up; its nanny replaces a worker that died within seconds."""
_MAX_FAILURES = 10
"""Replies to one request that may be lost on their way."""
_GPU_PREFIXES = ("GPU-", "MIG-", SIMULATED)


class AbsentGpuError(WorkerError):
    """A GPU is gone: its machine is off or cannot be reached, or another session has it. It may come back."""


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that was sent to a GPU."""

    gpu: str
    request: str
    """A `GpuRequest` as JSON."""
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


class Cluster:
    """The GPUs and compilers of a scheduler, which sessions may share.

    A request waits for its GPU and for the scheduler: if the connection was lost, it is sent again.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        self.connection = Connection(address, insecure=insecure)
        self.compilers = ClusterCompilers(self.connection)

    def look(self) -> list[str]:
        """Return the UUIDs of the GPUs that are present."""
        offered = {name for resources in self.connection.offers() for name in resources}
        return sorted(name for name in offered if name.startswith(_GPU_PREFIXES))

    def answered(self, sent: SentRequest) -> GpuReply | None:
        """Return the reply to a request; None if it is not there yet. Errors are those of `result`."""
        if sent.future is None or self.connection.is_lost(sent.future):
            raise WorkerError(f"a request to {sent.gpu} was lost")
        return self.result(sent, 0.0) if sent.future.done() else None

    def send(self, gpu: str, op: Operation, work: GpuRequest, job: Job | None = None) -> SentRequest:
        """Send a request to a GPU, with a job and its cubins if it carries one; ``work`` is common to all of a session.

        A GPU answers one at a time, in the order in which they were sent.
        """
        cubins: dict[str, bytes] = {}

        def packed(path: str) -> str:
            if not path:
                return ""
            content = Path(path).read_bytes()
            name = hashlib.sha256(content).hexdigest()
            cubins[name] = content
            return name

        message = job_message(with_files(job, packed)) if job is not None else {}
        sent = SentRequest(gpu, encode_json(to_fields(replace(work, op=op, job=message))), cubins)
        self._submit(sent)
        return sent

    def result(
        self, sent: SentRequest, limit_s: float = math.inf, *, meanwhile: Callable[[], None] = lambda: None
    ) -> GpuReply:
        """Wait for a reply, ``limit_s`` at most; ``meanwhile`` is called about every second, and in the end.

        Raise `WorkerError` if the GPU or the scheduler is lost, the time is over, or the request was withdrawn;
        `InputError` or `ToolchainError` if the GPU cannot be set up for the session.
        """
        end, reply = time.monotonic() + limit_s, ""
        while not reply:
            if sent.is_withdrawn:
                raise WorkerError(f"a request to {sent.gpu} was withdrawn")
            if sent.future is None or self.connection.is_lost(sent.future):
                self.connection.await_look()
                self._submit(sent)
            else:
                try:
                    reply = sent.future.result(timeout=_POLL_S)
                except TimeoutError:
                    absent_s = self.connection.absent_s(sent.gpu)
                    if absent_s > _ABSENT_S:
                        sent.withdraw()
                        text = f"the cluster has lost {sent.gpu}: it is absent for {absent_s:.0f} s"
                        raise AbsentGpuError(text) from None
                except (asyncio.CancelledError, concurrent.futures.CancelledError, UnboundLocalError):
                    # the last one is of `distributed.utils.sync`, where a call is cancelled within the loop
                    sent.future = None
                except Exception as error:  # whatever Dask raises where processes die
                    sent.failures += 1
                    if sent.future.status == "error" or sent.failures > _MAX_FAILURES:
                        raise WorkerError(f"{sent.gpu}: {type(error).__name__}: {error}") from None
                    sent.future = None  # there was a reply, but its process died before it arrived
            meanwhile()
            if not reply and time.monotonic() > end:
                sent.withdraw()
                raise WorkerError(f"{sent.gpu} has not answered for {limit_s:.0f} s")
        return parsed_reply(decode_json(reply, dict), GpuReply)

    def _submit(self, sent: SentRequest) -> None:
        try:
            sent.future = self.connection.submit(answer, sent.request, sent.cubins, resource=sent.gpu)
        except WorkerError:  # it is sent again when the scheduler is back
            sent.future = None

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self.compilers.close()
        self.connection.close()
