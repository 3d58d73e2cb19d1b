"""``autotile clean``: deletion of stored trials that are no longer wanted."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument, complete_device, read_moment
from autotile.cli.output import examples, notice, show
from autotile.errors import InputError


class _OldName(TyperCommand):
    """The command under its old name."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Point to the new name, then run the command."""
        notice("`autotile prune` is deprecated; use `autotile clean`")
        return super().invoke(ctx)


def clean(
    kernel: OptionalKernelArgument = None,
    *,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Delete trials older than 90d, or than 2026-01-31.", show_default="no"),
    ] = None,
    keep_gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Delete trials of all other GPUs. May be given again.",
            autocompletion=complete_device,
            show_default="no",
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Delete trials of other versions of a kernel than the current one.")
    ] = False,
    winners: Annotated[
        bool, typer.Option("--winners", help="Delete the best of each study, too; otherwise it is kept.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; show what would be deleted.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete trials that are no longer wanted.

    It does not ask for confirmation. The best configuration of each study, and the verdicts on wrong ones, are kept
    unless --winners is given; the trials of a session that may still be running are kept in any case.
    """
    from autotile.api import databases

    if older_than is None and not keep_gpu and not stale:
        raise InputError("nothing selects the trials to delete; give --older-than, --keep-gpu or --stale")
    result = databases.clean(
        kernel,
        before=read_moment(older_than) if older_than is not None else None,
        keep_gpus=keep_gpu or (),
        stale=stale,
        winners=winners,
        dry_run=dry_run,
        database=database,
    )
    show(result, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command, also under its old name."""
    epilog = examples(
        "autotile clean --older-than 90d --dry-run",
        "autotile clean sgemm_2d --stale --winners",
        "autotile clean --keep-gpu h200",
    )
    app.command(epilog=epilog)(clean)
    app.command("prune", cls=_OldName, hidden=True, help="Deprecated name of `autotile clean`.", epilog=epilog)(clean)
