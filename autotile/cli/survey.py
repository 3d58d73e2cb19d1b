"""``autotile survey``: a whole space as compiled, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.arguments import (
    CsvOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SizesArgument,
    WorkersOption,
    check_seed,
)
from autotile.cli.output import (
    INTERRUPTED,
    NOTHING_FOUND,
    STANDARD_OUTPUT,
    check_csv,
    check_output,
    error_console,
    examples,
    notice,
    print_json,
    show,
    write_table_file,
)
from autotile.cli.tables import RIGHT, Listing, below, device_document, facts, table, title
from autotile.core.model import config_text
from autotile.core.text import NOTHING, device_text, duration_text, percent_text, plural, time_text

if TYPE_CHECKING:
    from autotile.report.failures import FailureGroup
    from autotile.report.survey import Survey

_SHOWN = 12
_SHOWN_FAILURES = 8


def survey(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Compile N configurations, chosen at random.", show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the choice.", callback=check_seed)] = 0,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Configurations in the table; --json and --csv have all.")
    ] = _SHOWN,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="Write a page, too.", show_default="no"),
    ] = None,
    csv: CsvOption = None,
    workers: WorkersOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every valid configuration, or a sample, without a GPU.

    Shows registers, spills, shared memory, occupancy and waves, and what does not compile or fit, with the compiler's
    words. Ctrl-C ends it and shows what there is; compiled code is kept, so that the same command goes on from there.
    """
    from autotile.api.surveying import survey as run_survey
    from autotile.cli.assignments import read_sizes
    from autotile.cli.progress import CountProgress

    check_csv(csv, as_json=as_json)
    check_output(output)
    given = read_sizes(sizes or [])
    with CountProgress(error_console(), "compiling", "cannot be launched") as progress:
        found = run_survey(
            kernel, given, dtype=dtype, device=device, sample=sample, seed=seed, workers=workers, observe=progress
        )
    for text in found.notices:
        notice(text)
    if output is not None:
        from autotile.api.targets import output_file
        from autotile.report.page import write_page
        from autotile.report.survey_page import survey_page

        write_page(survey_page(found), path := output_file(output))
        notice(f"wrote {path}")
    if csv is not None:
        write_table_file(csv, found.table(), "configuration")
    if as_json:
        print_json(survey_document(found))
    elif csv != STANDARD_OUTPUT:
        show(found, lambda result: survey_table(result, limit), survey_document, as_json=False)
    if found.interrupted:
        notice(f"interrupted after {len(found):,} of {found.planned:,}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if not found.is_usable.any():
        raise typer.Exit(NOTHING_FOUND)


def survey_table(found: Survey, limit: int = _SHOWN) -> RenderableType:
    """Render the counts, the range of each quantity, the failures by reason, and some configurations."""
    parts: list[RenderableType] = [
        title(f"{found.problem} on {device_text(found.device)}"),
        facts([*found.facts(), ("took", duration_text(found.seconds))]),
    ]
    if quantities := found.ranges():
        ranges = table("of those that compiled", *(f"{RIGHT}{name}" for name in ("least", "median", "greatest")))
        for one in quantities:
            name = f"{one.name}, {one.unit}" if one.unit else one.name
            ranges.add_row(name, *(f"{value:,.5g}" for value in (one.least, one.median, one.greatest)))
        parts.append(below(ranges))
    if found.failures:
        parts.append(below(_failures_table(found.failures)))
    if limit and (shown := found.promising(limit)):
        order = "least estimated time" if found.estimated_us is not None else "highest occupancy"
        parts += [below(f"{plural(len(shown), 'configuration')} of the {order}:"), below(_configs_table(found, shown))]
    return Group(*parts)


def _failures_table(failures: tuple[FailureGroup, ...]) -> Table:
    rows = table(f"{RIGHT}failed", "outcome", "reason, and an example")
    for group in failures[:_SHOWN_FAILURES]:
        rows.add_row(f"{group.count:,}", str(group.outcome), f"{group.reason}\n{config_text(group.examples[0])}")
    if left := failures[_SHOWN_FAILURES:]:
        count = sum(group.count for group in left)
        rows.add_row(f"{count:,}", NOTHING, f"{plural(len(left), 'further reason')}; --json has all")
    return rows


def _configs_table(found: Survey, indices: list[int]) -> Listing:
    headings = [
        *(f"{RIGHT}{name}" for name in ("registers", "spills, B", "static, B", "dynamic, B", "threads", "occupancy")),
        "limited by",
        f"{RIGHT}waves",
        *([f"{RIGHT}estimate"] if found.estimated_us is not None else []),
        "configuration",
    ]
    columns = found.columns
    rows = [
        [
            f"{columns['registers'][index]:,}",
            f"{found.spill_bytes[index]:,.0f}",
            f"{columns['static_smem_bytes'][index]:,}",
            f"{columns['dynamic_smem_bytes'][index]:,}",
            f"{columns['threads'][index]:,}",
            percent_text(found.occupancy[index]),
            ", ".join(found.limited_by(index)).replace("_", " "),
            f"{found.waves[index]:,.2f}",
            *([time_text(found.estimated_us[index])] if found.estimated_us is not None else []),
            config_text(found.config(index)),
        ]
        for index in indices
    ]
    return Listing(headings, rows, ("configuration", "limited by"))


def survey_document(found: Survey) -> dict[str, Any]:
    """Return the survey for JSON, with an entry for each configuration."""
    columns = found.table().columns
    names = [column.name for column in columns if not column.name.startswith("param.")]
    values = {column.name: column.values for column in columns}
    return {
        "kernel": found.problem.kernel,
        "problem": dict(found.problem.sizes),
        "dtype": found.problem.dtype,
        "device": device_document(found.device),
        "valid": len(found.space),
        "planned": found.planned,
        "compiled": len(found),
        "usable": int(found.is_usable.sum()),
        "distinct_code": found.distinct,
        "interrupted": found.interrupted,
        "seconds": round(found.seconds, 3),
        "ranges": {
            one.name: {"unit": one.unit, "least": one.least, "median": one.median, "greatest": one.greatest}
            for one in found.ranges()
        },
        "failures": [
            {
                "outcome": str(group.outcome),
                "stage": group.stage,
                "reason": group.reason,
                "count": group.count,
                "examples": [dict(config) for config in group.examples],
            }
            for group in found.failures
        ],
        "configurations": [
            {"config": found.config(index), **{name: values[name][index] for name in names}}
            for index in range(len(found))
        ],
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile survey sgemm_2d M=4096 N=4096 K=4096 --device h200 --sample 200",
            "autotile survey matmul_tiled --device rtx-3060 -o survey.html",
            "autotile survey matmul_tiled --device a100 --csv survey.csv",
        )
    )(survey)
