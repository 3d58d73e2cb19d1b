"""The same choices in all ranks of a distributed job."""

from __future__ import annotations

from typing import Any

import torch

from autotile.errors import PinError
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.pinning import MAX_BYTES


class _Group:
    """Ranks of a process group; tensors are on the GPU for NCCL, else on the host."""

    def __init__(self, group: Any) -> None:
        distributed = torch.distributed
        self._group = group
        self._source = 0 if group is None else distributed.get_global_rank(group, 0)
        on_gpu = distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return bool(torch.distributed.get_rank(self._group) == 0)

    def broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        torch.distributed.broadcast(length, self._source, group=self._group)
        size = int(length.item())
        if size > MAX_BYTES:  # in every rank
            raise PinError(f"rank 0 serves too many choices: {size:,} bytes, and at most {MAX_BYTES:,} can be sent")
        own = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.is_first
            else torch.empty(size, dtype=torch.uint8)
        )
        sent = own.to(self._device)
        torch.distributed.broadcast(sent, self._source, group=self._group)
        return bytes(sent.cpu().numpy().tobytes())

    def all_agree(self, agrees: bool) -> bool:
        least = torch.tensor([int(agrees)], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(least.item())


def sync_choices(group: Any = None, *, strict: bool = False) -> None:
    """Serve in all ranks what rank 0 serves: the same kernels and libraries in the same configurations.

    Every rank of the group calls it, after rank 0 has asked for what it will use, such as after a warm-up step. The
    choices are in force in each process from then on, as with `autotile.pin`, and reach kernels that it has already.

    Parameters
    ----------
    group
        Process group of ``torch.distributed``; None for all ranks.
    strict
        Refuse what rank 0 did not serve, rather than serve it as usual with a `PinWarning`.

    Raises
    ------
    PinError
        A rank cannot serve the choices; then nothing is changed in any, and all ranks raise it.
    """
    ranks = _Group(group)
    default_dispatcher.pins.synchronize(ranks.broadcast, ranks.all_agree, is_first=ranks.is_first, strict=strict)
    default_dispatcher.products.notes.clear()  # what was left to PyTorch by the times that each rank knows
