"""``autotile trials``: the stored trials of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autotile.cli.arguments import (
    CsvOption,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SelectedSizesArgument,
    complete_outcome,
)
from autotile.cli.output import check_csv, check_output, examples, print_json, show, write_table_file
from autotile.cli.tables import RIGHT, Listing, study_columns, study_document
from autotile.core.model import config_text
from autotile.core.text import NOTHING, interval_text, percent_text, time_text

if TYPE_CHECKING:
    from autotile.api.listings import StudyTrial, TrialList
    from autotile.database.rows import StoredTrial


def trials(
    kernel: KernelArgument,
    sizes: SelectedSizesArgument = None,
    *,
    dtype: DtypeOption = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            metavar="OUTCOME",
            help="Only trials with this outcome: ok, pruned, wrong_result ...",
            autocompletion=complete_outcome,
            show_default="all",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of trials, fastest first.", show_default="all"),
    ] = None,
    csv: CsvOption = None,
    parquet: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write every column of the trials as Parquet; needs the extra autotile[parquet].",
            show_default="no",
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the stored trials of a kernel, fastest first, or write them to a file.

    Those without a time follow, in the order in which they were tried.
    """
    from autotile.api import results
    from autotile.cli.assignments import read_sizes

    check_csv(csv, as_json=as_json)
    check_output(parquet)
    given = read_sizes(sizes or [])
    found = results.trials(kernel, given, dtype=dtype, outcome=outcome, limit=limit, database=database)
    if csv is None and parquet is None:
        show(found, trials_table, trials_document, as_json=as_json)
        return
    columns = found.columns()
    if parquet is not None:
        write_table_file(parquet, columns, "trial", as_parquet=True)
    if csv is not None:
        write_table_file(csv, columns, "trial")
    if as_json:
        print_json(trials_document(found))


def trials_table(found: TrialList) -> RenderableType:
    """Render one row per trial, with its problem if there are several."""
    if not found.trials:
        return Text("no such trial is stored")
    several = len({entry.stored.study_id for entry in found.trials}) > 1
    figures = (f"{RIGHT}time", "95 % interval, us", f"{RIGHT}registers", f"{RIGHT}occupancy")
    scores = list(dict.fromkeys(name for entry in found.trials for name in entry.stored.trial.scores))
    own = [f"{RIGHT}{name}" for name in scores]
    headings = ("outcome", *figures, *own, "configuration", "remark", *(["problem"] if several else []))
    rows = [(*_row(entry.stored, scores), *([_problem_text(entry)] if several else [])) for entry in found.trials]
    return Listing(headings, rows, ("configuration", "remark", "problem"))


def _problem_text(entry: StudyTrial) -> str:
    _, problem, device = study_columns(entry.key)
    return f"{problem}, {device}"


def _row(stored: StoredTrial, scores: Sequence[str]) -> tuple[str, ...]:
    trial = stored.trial
    own = trial.scores
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    remarks = [f"finals, place {stored.rank}"] if stored.phase == "final" else []
    if trial.source == "replayed":
        remarks.append("replayed")
    if trial.reason:
        remarks.append(trial.reason.splitlines()[0])
    return (
        str(trial.outcome),
        time_text(trial.time_us),
        interval_text(measured.low_us, measured.high_us) if measured is not None else NOTHING,
        str(resources.registers) if resources is not None else NOTHING,
        percent_text(occupancy.occupancy) if occupancy is not None else NOTHING,
        *(f"{own[name]:.6g}" if name in own else NOTHING for name in scores),
        config_text(trial.config),
        ", ".join(remarks),
    )


def trials_document(found: TrialList) -> list[dict[str, Any]]:
    """Return one entry per trial for JSON."""
    return [_document(entry) for entry in found.trials]


def _document(entry: StudyTrial) -> dict[str, Any]:
    stored, trial = entry.stored, entry.stored.trial
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    return {
        "trial": stored.trial_id,
        "study": stored.study_id,
        "run": stored.run_id,
        **study_document(entry.key),
        "phase": stored.phase,
        "rank": stored.rank,
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": trial.reason,
        "time_us": trial.time_us,
        "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
        "samples": len(measured.samples_us) if measured is not None else 0,
        "registers": resources.registers if resources is not None else None,
        "spill_bytes": resources.spill_bytes if resources is not None else None,
        "static_smem_bytes": resources.static_smem_bytes if resources is not None else None,
        "occupancy": occupancy.occupancy if occupancy is not None else None,
        "limited_by": list(occupancy.limited_by) if occupancy is not None else [],
        "seconds": dict(trial.seconds),
        "telemetry": dict(trial.telemetry),
        "created_at": stored.created_at.isoformat(),
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile trials sgemm_2d --limit 20",
            "autotile trials sgemm_2d M=4096 N=4096 K=4096 --outcome wrong_result",
            "autotile trials sgemm_2d --csv trials.csv",
        )
    )(trials)
