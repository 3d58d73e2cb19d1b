"""``autotile worker``: offer the GPUs and cores of this machine to the sessions of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import InsecureOption
from autotile.cli.output import examples, notice
from autotile.settings import forget_passwords


def worker(
    scheduler: Annotated[str, typer.Argument(metavar="SCHEDULER", help="Its address: tls://HOST:PORT.")],
    *,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="all|0,2,3",
            help="GPUs to offer; of a replay, numbers of simulated ones.",
            show_default="all that there are, maybe none",
        ),
    ] = None,
    compilers: Annotated[
        int | None,
        typer.Option(
            "--compile",
            metavar="N",
            min=0,
            max=1024,
            help="Compilations at the same time, for sessions on any machine; 0 for none.",
            show_default="one a core that the GPUs leave",
        ),
    ] = None,
    insecure: InsecureOption = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz|FOLDER", help="Offer GPUs that replay recordings, to try a cluster without a GPU."
        ),
    ] = None,
    replay_seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, max=60.0, help="Time that these take for a candidate.")
    ] = 0.0,
) -> None:
    """Offer GPUs and cores to `autotile tune --scheduler`, until Ctrl-C ends it.

    A process for each GPU, and one for all compilers, join the scheduler, which `dask scheduler` starts, and are
    replaced when they die. They listen on the interface by which this machine reaches the scheduler. A machine
    without a GPU offers its cores. Whoever may connect to the scheduler can run programs here: use TLS.
    """
    from autotile.api.devices import worker as offer

    forget_passwords()
    offer(
        scheduler,
        devices=devices,
        compilers=compilers,
        insecure=insecure,
        replay=replay,
        replay_seconds=replay_seconds,
        observe=notice,
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile worker tls://head:8786",
            "autotile worker tls://head:8786 --devices 0,2 --compile 16",
            "autotile worker tcp://127.0.0.1:8786 --replay recording.npz --devices 0,1",
        )
    )(worker)
