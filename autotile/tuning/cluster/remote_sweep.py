"""GPU workers of other machines for a sweep, see `autotile.tuning.operation_sweep`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from autotile.errors import WorkerError
from autotile.tuning.cluster.client import AbsentGpuError
from autotile.tuning.problem_queue import Lane

_POLL_S = 1.0
_WAIT_S = 300.0
"""Time that a sweep waits for a GPU that is free."""


class RemoteSweepWorker:
    """The GPU worker of a machine of a cluster; if the machine is gone, that of another one.

    Parameters
    ----------
    lane
        GPUs of the cluster.
    versions
        Version of each library, which the machine must have.
    """

    def __init__(self, lane: Lane, versions: Mapping[str, str]) -> None:
        assert lane.cluster is not None
        self._lane = lane
        self._cluster = lane.cluster
        self._session = uuid.uuid4().hex
        self._gpu = ""
        self._versions = versions

    def request(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises
        ------
        WorkerError
            The worker died, in the stage that the error states; or no GPU is free.
        ToolchainError
            The machine has another version of a library.
        """
        while True:
            self._gpu = self._gpu or self._free_gpu()
            try:
                fields = {"deadline_s": deadline_s, "versions": dict(self._versions)}
                reply = self._cluster.result(self._cluster.sweep(self._gpu, self._session, message, **fields))
                break
            except AbsentGpuError:
                self._gpu = ""
        if reply.failure or reply.swept is None:
            raise WorkerError(reply.failure or "the reply holds no times", reply.stage)
        return reply.swept

    def kill(self) -> None:
        """Release the GPU."""
        gpu, self._gpu = self._gpu, ""
        if gpu:
            self._cluster.end(gpu, self._session)

    def _free_gpu(self) -> str:
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            present = self._cluster.look()
            for gpu in map(str, self._lane.free(())):
                if gpu in present:
                    return gpu
            time.sleep(_POLL_S)
        raise WorkerError("no GPU of the cluster is free")


class RemoteSweepWorkers:
    """Source of the worker of a sweep.

    Parameters
    ----------
    lane, versions
        As for `RemoteSweepWorker`.
    """

    def __init__(self, lane: Lane, versions: Mapping[str, str]) -> None:
        self._lane = lane
        self._versions = versions

    def acquire(self, module: str) -> RemoteSweepWorker:
        """Return a worker, which takes a GPU with its first request."""
        return RemoteSweepWorker(self._lane, self._versions)

    def release(self, child: RemoteSweepWorker) -> None:
        """Release the GPU of a worker."""
        child.kill()
