"""``autotile worker``: offer the GPUs of this machine to the sessions of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import InsecureOption
from autotile.cli.output import examples, notice


def worker(
    scheduler: Annotated[str, typer.Argument(metavar="SCHEDULER", help="Its address: tls://HOST:PORT.")],
    *,
    devices: Annotated[
        str, typer.Option(metavar="all|0,2,3", help="GPUs to offer; of a replay, numbers of simulated ones.")
    ] = "all",
    insecure: InsecureOption = False,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Offer GPUs that replay a recording, to try a cluster without a GPU."),
    ] = None,
    replay_seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, max=60.0, help="Time that these take for a candidate.")
    ] = 0.0,
) -> None:
    """Offer GPUs to `autotile tune --scheduler`, until Ctrl-C ends it.

    A process for each GPU joins the scheduler, which `dask scheduler` starts, and is replaced when it dies. Whoever may
    connect to the scheduler can run programs here: use TLS.
    """
    from autotile.api.devices import worker as offer

    offer(scheduler, devices=devices, insecure=insecure, replay=replay, replay_seconds=replay_seconds, observe=notice)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile worker tls://head:8786",
            "autotile worker tls://head:8786 --devices 0,2",
            "autotile worker tcp://127.0.0.1:8786 --replay recording.npz --devices 0,1",
        )
    )(worker)
