"""``autotile watch``: a local page that follows running sessions."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import complete_kernel
from autotile.cli.output import examples, notice
from autotile.cli.report import is_database


def watch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB|KERNEL",
            help="Databases to follow, which need not exist yet; and kernels, if only theirs are to be shown.",
            show_default="the user's own database",
            autocompletion=complete_kernel,
        ),
    ] = None,
    *,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="TCP port of 127.0.0.1; 0 for any that is free.")
    ] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address; open no browser.")] = False,
) -> None:
    """Show running sessions in the browser, several GPUs side by side.

    Their charts follow the trials. The page is served to this machine only, at an address with a random token, until
    Ctrl-C ends it. It reads the database, and writes nothing.
    """
    from autotile.report.live import watch as serve

    given = words or []
    databases = [word for word in given if is_database(word)]
    kernels = [word for word in given if not is_database(word)]
    notice("Ctrl-C ends it")
    serve(*databases, kernels=kernels, port=port, open_browser=not no_open)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile watch", "autotile watch gpu0.db gpu1.db --port 8000 --no-open", "autotile watch sgemm_2d"
        )
    )(watch)
