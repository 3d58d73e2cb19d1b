"""The GPUs of a cluster that the sessions of a command share."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from autotile.core.device import DeviceProperties, is_name_of
from autotile.errors import AutotileError, InputError
from autotile.tuning.cluster.client import Cluster, Sent
from autotile.tuning.cluster.connection import SIMULATED, Reply
from autotile.tuning.cluster.gpus import no_gpu_error
from autotile.tuning.options import TuneOptions
from autotile.tuning.schedule import GpuName, Lane

_FIRST_GPU_S = 60.0
"""Time that a command waits for a first GPU."""
_SETTLE_S = 5.0
"""Time that it then waits for the properties of the others."""
_FRESH_S = 3.0
"""Time after which a GPU is asked again whether another command uses it."""
_POLL_S = 0.05


class ClusterLane(Lane):
    """All GPUs of a cluster that are of use to a command; they may join and leave at any time.

    Parameters
    ----------
    options
        Options of the sessions: the scheduler, and the name of the model, if one is chosen.
    is_of_one_model
        Whether the GPUs must be of one model. Others that join later are not used.

    Raises
    ------
    InputError
        The scheduler cannot be reached, it has no GPU, or GPUs of several models.
    """

    cluster: Cluster

    def __init__(self, options: TuneOptions, *, is_of_one_model: bool = True) -> None:
        super().__init__()
        self._is_replay = options.replay is not None
        self._asked_model = options.gpu_model
        self._model: DeviceProperties | None = None
        self._replies: dict[str, tuple[Reply, float]] = {}
        """The last known state of each GPU, and its time."""
        self._requests: dict[str, Sent] = {}
        """Those whose replies are awaited."""
        self._error = ""
        self._lock = threading.Lock()
        """Held while GPUs are asked: a session looks for late ones in a thread of its own."""
        self.cluster = Cluster(options.scheduler, insecure=options.insecure)
        try:
            self._wait()
            if is_of_one_model:
                self._model = self._only_model()
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> tuple[GpuName, ...]:
        """UUIDs of the GPUs that are present, those that other commands use included."""
        present = self._present()
        self._ask([gpu for gpu in present if gpu not in self._replies])  # one that joins late
        return tuple(gpu for gpu in present if self._is_of_use(gpu))

    @property
    def device(self) -> DeviceProperties | None:
        """Properties of the GPUs of the only model; None in replay."""
        return None if self._is_replay else self._model

    def device_of(self, gpu: GpuName) -> DeviceProperties | None:
        """Return the properties of a GPU; None in replay."""
        return None if self._is_replay else self._device_of(gpu)

    def free(self, held: Collection[GpuName]) -> list[GpuName]:
        """Return the GPUs that neither hold a problem nor work for another command."""
        present = self._present()
        self._ask([gpu for gpu in present if gpu not in held])
        known = {gpu: self._replies[gpu][0] for gpu in present if gpu in self._replies}
        return [gpu for gpu, reply in known.items() if gpu not in held and not reply.is_busy and self._is_of_use(gpu)]

    def close(self) -> None:
        """Disconnect."""
        self.cluster.close()

    def _present(self) -> list[str]:
        return [gpu for gpu in self.cluster.look() if gpu.startswith(SIMULATED) == self._is_replay]

    def _device_of(self, gpu: GpuName) -> DeviceProperties | None:
        reply, _ = self._replies.get(str(gpu), (None, 0.0))
        return reply.device if reply is not None else None

    def _is_of_use(self, gpu: GpuName) -> bool:
        device = self._device_of(gpu)
        if device is None or (self._asked_model and not is_name_of(self._asked_model, device)):
            return False
        model = self._model
        return model is None or (device.name, device.compute_capability) == (model.name, model.compute_capability)

    def _ask(self, gpus: Collection[str]) -> None:
        """Ask GPUs for their properties and whether they work for another session, and take replies that are there."""
        with self._lock:
            self._ask_alone(gpus)

    def _ask_alone(self, gpus: Collection[str]) -> None:
        now = time.monotonic()
        for gpu in gpus:
            if gpu not in self._requests and now - self._replies.get(gpu, (None, -_FRESH_S))[1] >= _FRESH_S:
                self._requests[gpu] = self.cluster.describe(gpu)
        for gpu, request in list(self._requests.items()):
            try:
                reply = self.cluster.description(request)
            except AutotileError as error:  # it is gone, or runs another version
                del self._requests[gpu]
                self._error = str(error)
                continue
            if reply is not None:
                del self._requests[gpu]
                self._replies[gpu] = reply, now

    def _wait(self) -> None:
        """Wait for a first GPU of use, and a little for the others."""
        begun = time.monotonic()
        while True:
            present, now = self._present(), time.monotonic()
            if self.free(()) and (all(gpu in self._replies for gpu in present) or now - begun > _SETTLE_S):
                return
            if now - begun > _FIRST_GPU_S:
                self._check_kind(present)
                raise no_gpu_error(present, self._asked_model, self._error)
            time.sleep(_POLL_S)

    def _check_kind(self, present: Sequence[str]) -> None:
        """Raise if all GPUs there replay recordings and the session does not, or the other way round."""
        if present or not (others := self.cluster.look()):
            return
        fault = (
            "measure, and the session replays; leave --replay out"
            if self._is_replay
            else "replay recordings; to try the cluster with them, add --replay"
        )
        raise InputError(f"the GPUs of the scheduler ({', '.join(others)}) {fault}")

    def _only_model(self) -> DeviceProperties:
        found = filter(None, map(self._device_of, self.devices))
        models = {device.name: device for device in found}
        if len(models) > 1:
            raise InputError(
                f"the scheduler has GPUs of {len(models)} models, whose times are studies of their own: "
                f"{', '.join(models)}; choose one, as in --device {next(iter(models))!r}, or use a plan, which tunes "
                "for each"
            )
        return next(iter(models.values()))
