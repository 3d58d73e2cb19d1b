"""The same choices in all ranks of a distributed job."""

from __future__ import annotations

from typing import Any

import torch

from autotile.errors import PinError
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.pinning import MAX_BYTES


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
    distributed = torch.distributed
    source = 0 if group is None else distributed.get_global_rank(group, 0)
    on_host = "cpu:" in distributed.get_backend_config(group)  # NCCL alone takes tensors on the GPU only
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    is_first = bool(distributed.get_rank(group) == 0)

    def broadcast(data: bytes) -> bytes:
        length = torch.tensor([len(data)], dtype=torch.int64, device=device)
        distributed.broadcast(length, source, group=group)
        size = int(length.item())
        if size > MAX_BYTES:  # in every rank
            raise PinError(f"rank 0 serves too many choices: {size:,} bytes, and at most {MAX_BYTES:,} can be sent")
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_first else torch.empty(size, dtype=torch.uint8)
        sent = own.to(device)
        distributed.broadcast(sent, source, group=group)
        return bytes(sent.cpu().numpy().tobytes())

    def all_agree(agrees: bool) -> bool:
        least = torch.tensor([int(agrees)], dtype=torch.int64, device=device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=group)
        return bool(least.item())

    default_dispatcher.pins.synchronize(broadcast, all_agree, is_first=is_first, strict=strict)
    default_dispatcher.products.notes.clear()  # what was left to PyTorch by the times that each rank knows
