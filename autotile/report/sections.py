"""The sections of a report, in their order: the answer first, then what supports it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.documents import encode_json
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Problem, Trial, config_key, config_text
from autotile.core.statistics import is_tie
from autotile.core.text import (
    NOTHING,
    duration_text,
    interval_text,
    moment_text,
    percent_text,
    plain_heading,
    plural,
    source_text,
    time_text,
)
from autotile.database.database import open_existing
from autotile.database.keys import key_text
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.kernel.operation import find_operation, load_operation
from autotile.report.charts import (
    failures_chart,
    finals_chart,
    front_chart,
    funnel_chart,
    limits_chart,
    roofline_chart,
)
from autotile.report.family_charts import family_loss_chart, operation_chart, rule_tree_chart, tree_lines
from autotile.report.notebook import PageContent
from autotile.report.page import Column, DataTable, Markup, Page, joined, static_table, tag, write_page
from autotile.report.parameter_charts import (
    heat_map_chart,
    importance_chart,
    parallel_coordinates_chart,
    study_effects,
    time_by_parameter_chart,
)
from autotile.report.report_data import (
    ContenderData,
    OperationData,
    ReportData,
    read_operation_report,
    read_report,
    study_title,
)
from autotile.report.session_charts import best_so_far_chart, drift_chart
from autotile.report.theme import Chart, measured_text, with_units
from autotile.settings import user_path

if TYPE_CHECKING:
    from autotile.report.study_data import StudyData

_MAX_PARAMETERS = 12
"""Parameters that the time is drawn against, the most important first."""
_MAX_BYTES = 9_000_000
"""Figures and tables of a page, so that it stays below 15 MB with Plotly's 5 MB."""


def report_page(data: ReportData) -> str:
    """Return the page of a report as HTML.

    Raises
    ------
    ToolchainError
        Plotly is not installed.
    """
    page = Page(data.title, f"From {data.location}, read {moment_text(data.made_at)}.")
    alone = len(data.studies) == 1 and not data.operations
    parts = [_operation(page, number, one, data) for number, one in enumerate(data.operations, start=1)]
    if not alone or data.others:
        parts.append(_overview(page, data))
    parts += [_family(page, number, one) for number, one in enumerate(data.families, start=1)]
    for number, study in enumerate(data.studies, start=1):
        if page.size_bytes > _MAX_BYTES:
            left = plural(len(data.studies) - number + 1, "study", "studies")
            parts.append(
                tag("p", f"{left} more would make the page too large; name one with its sizes.", class_="note")
            )
            break
        prefix = "" if alone else f"s{number}-"
        of_operation = bool(data.operations)
        path = "" if of_operation else data.path
        sections = study_sections(page, study, prefix, linked=alone, of_operation=of_operation, path=path)
        parts.append(joined(sections) if alone else _folded(study, number, sections))
    page.body.extend(parts)
    return page.html()


def write_report_of(content: PageContent, output: str | Path) -> Path:
    """Write the page of a session's result, and return its path.

    Parameters
    ----------
    content
        Database that the session stored in, and what selects its studies.
    output
        File to write, or folder to write ``report.html`` into.

    Raises
    ------
    InputError
        The database cannot be read, or the file cannot be written.
    ToolchainError
        Plotly is not installed.
    """
    path = user_path(output, "a report")
    path = path / "report.html" if path.is_dir() else path
    database, kernel, sizes, dtype, gpu_name = content
    if "***" in database:  # the password of a server
        raise InputError("the database is on a server; write the report with `autotile.report(..., database=URL)`")
    with open_existing(database) as opened:
        if find_operation(kernel) is not None:
            operation = load_operation(kernel)
            data = read_operation_report(opened, operation, sizes, dtype=dtype, gpu_name=gpu_name)
        else:
            data = read_report(opened, kernel, sizes, dtype=dtype, gpu_name=gpu_name)
    write_page(report_page(data), path)
    return path


def study_sections(
    page: Page,
    study: StudyData,
    prefix: str = "",
    *,
    linked: bool = True,
    of_operation: bool = False,
    path: str = "",
) -> list[Markup]:
    """Return the sections of one study in the order of a report.

    Parameters
    ----------
    page
        Page that they are for, which keeps their figures and tables.
    prefix
        Text before all anchors, which makes them unique on the page.
    linked
        Whether the navigation of the page leads to them.
    of_operation
        Whether the study is of a kernel of an operation, which has an answer of its own.
    path
        Path by which the user named the kernel; empty for a name.
    """

    def section(anchor: str, heading: str, link: str, *content: Markup | None) -> Markup:
        return page.section(f"{prefix}{anchor}", heading, *content, link=link if linked else "")

    def chart(made: Chart, *, wide: bool = False, table: str = "") -> Markup:
        return page.chart(made, prefix, wide=wide, table=table)

    effects = study_effects(study)
    order = effects.order(study.parameters)[:_MAX_PARAMETERS]
    trials = f"{prefix}{_TABLE}-table"
    found = [
        section(
            "answer",
            "The kernel" if of_operation else "The answer",
            "Answer",
            answer(study),
            _serving_of(study, "Serve this kernel alone" if of_operation else "Serve it", path),
        ),
        section("finals", "Finals", "Finals", chart(finals_chart(study))),
        section("limits", "What limits the best", "Limits", chart(limits_chart(study), wide=True)),
        section(
            "progress",
            "Best so far",
            "Progress",
            chart(best_so_far_chart(study)),
            chart(best_so_far_chart(study, "seconds")),
        ),
        section(
            "parameters",
            "What matters",
            "Parameters",
            chart(importance_chart(study, effects)),
            tag("div", [chart(time_by_parameter_chart(study, name)) for name in order], class_="grid"),
            chart(heat_map_chart(study, *order[:2])),
        ),
        section(
            "gates",
            "Gates and failures",
            "Gates",
            chart(funnel_chart(study)),
            chart(failures_chart(study)),
            failure_words(study),
        ),
        section(
            "trials",
            "All trials",
            "Trials",
            chart(parallel_coordinates_chart(study), wide=True, table=trials),
            page.data_table(trial_table(study), prefix),
        ),
        section("roofline", "Roofline", "Roofline", chart(roofline_chart([study])), ceilings_table(study)),
        section("session", "The session", "Session", chart(drift_chart(study)), session_facts(study)),
    ]
    if len(study.objectives) > 1:
        found.append(section("front", "Several objectives", "Front", chart(front_chart(study))))
    return found


def answer(study: StudyData) -> Markup:
    """Return the winner, its speed-up, and how it was found and verified."""
    winner, default, speedup = study.winner, study.default, study.speedup
    if winner is None:
        state = "is running" if study.is_running else "has ended"
        return tag("p", f"No configuration has been verified and timed yet; the session {state}.", class_="empty")
    is_default = default is not None and config_key(default.config) == config_key(winner.config)
    if is_default:
        headline, detail = "The default is the best", "no configuration was faster"
    elif speedup is not None:
        headline = f"{speedup.value:.3f}\N{MULTIPLICATION SIGN} faster than the default"
        detail = f"95 % interval {speedup.low:.3f}\N{MULTIPLICATION SIGN} to {speedup.high:.3f}\N{MULTIPLICATION SIGN}"
    else:
        headline = with_units(source_text(time_text(winner.time_us), winner.source))
        detail = "the default was not timed"
    facts = [(name, content) for name, content in _answer_facts(study, winner, default) if content]
    return joined(
        tag("p", tag("strong", headline), " ", tag("span", detail), class_="headline"),
        _facts_list(facts),
    )


def _facts_list(facts: Iterable[tuple[str, str | Markup]]) -> Markup:
    return tag("dl", [(tag("dt", name), tag("dd", content)) for name, content in facts], class_="facts")


def _serving_of(study: StudyData, heading: str, path: str) -> Markup | None:
    """Return the line of code that serves the winner of a study; a remark where it is not served."""
    if study.winner is None:
        return None
    if not study.study_id:
        sizes = [f"{name}={value}" for name, value in study.key.sizes.items()]
        words = ["autotile", "tune", path or study.key.kernel, *sizes, "--dtype", study.key.dtype]
        command = tag("code", shlex.join([*words, "--replay", study.location]))
        return tag("p", "A recording is not served; ", command, " stores its winner.", class_="note")
    if not study.key.template_hash:
        return tag("p", "Imported results are not served.", class_="note")
    return _serving(study.key.problem, heading, path)


def _serving(problem: Problem, heading: str, path: str = "") -> Markup:
    line = tag("pre", tag("code", serving_line(problem, path)), tabindex=0, class_="code")
    return joined(tag("h3", heading), line)


def _answer_facts(study: StudyData, winner: Trial, default: Trial | None) -> Iterable[tuple[str, str | Markup]]:
    yield (
        "Winner",
        joined(tag("code", config_text(winner.config) or "one configuration"), tag("br"), measured_text(winner)),
    )
    for name, value in winner.scores.items():
        yield f"{name} of the winner", f"{value:.6g}"
    if default is not None:
        measured = measured_text(default) or str(default.outcome).replace("_", " ")
        yield "Default", joined(tag("code", config_text(default.config)), tag("br"), measured)
    yield "Ties", _ties_text(study)
    bound = study.bound(winner)
    yield "Binding limit", with_units(bound.text) if bound is not None else "unknown: the kernel states no [work]"
    yield "Device", _device_text(study)
    yield "Clocks", _clock_text(study)
    yield "Verified", verification_text(study, winner)
    yield "Trials", f"{plural(len(study.newest), 'configuration')} tried in {plural(len(study.runs) or 1, 'session')}"
    notices = study.summary.notices
    if notices:
        yield "Remarks", tag("ul", [tag("li", notice) for notice in notices])


def _ties_text(study: StudyData) -> str:
    if study.finals is None:
        return "no finals were held"
    ties = [one for one in study.finals.ranked if one.is_tie]
    places = ", ".join(f"#{one.rank}" for one in ties)
    return f"{plural(len(ties), 'configuration ties', 'configurations tie')}: {places}" if ties else "none"


def _device_text(study: StudyData) -> str:
    key, device = study.key, study.device
    replayed = ", replayed from a recording" if key.source == "replayed" else ""
    driver = next((f", driver {run.run.driver}" for run in reversed(study.runs) if run.run.driver), "")
    count = f", {device.sm_count} SMs" if device is not None else ""
    compiler = f", compiler {key.nvrtc_version}" if key.nvrtc_version else ""
    return f"{key.gpu_name}{count}, compute capability {key.compute_capability}{driver}{compiler}{replayed}"


def _clock_text(study: StudyData) -> str:
    found = [one.trial.telemetry.get("sm_clock_mhz") for one in study.trials]
    clocks = [value for value in found if isinstance(value, int | float)]
    if not clocks:
        return "not recorded"
    return f"SM {min(clocks):,.0f} to {max(clocks):,.0f} MHz during the trials; L2 cache {study.key.l2_mode}"


def verification_text(study: StudyData, winner: Trial) -> str:
    """Return how the winner was verified, as far as it is stored."""
    found = []
    errors = [one.trial for one in study.trials if config_key(one.trial.config) == config_key(winner.config)]
    error = next((t.telemetry["max_error"] for t in reversed(errors) if "max_error" in t.telemetry), None)
    if winner.outcome.has_time:
        text = "outputs compared with the reference"
        found.append(f"{text}, maximum relative error {error:.2g}" if isinstance(error, int | float) else text)
    if extra := len(study.settings.verify_sizes):
        found.append(f"at {plural(extra, 'further problem')} too")
    if study.finals is not None and study.key.source == "cuda":
        found.append("repeatedly in the finals, with two sets of inputs")
    if study.settings.sanitize:
        found.append("compute-sanitizer found nothing")
    digest = winner.telemetry.get(OUTPUT_DIGEST)
    if digest is not None:
        same = "differ between launches" if digest == VARYING_OUTPUTS else "are the same at every launch"
        found.append(f"the bits of the outputs {same}")
    if study.key.source == "replayed":
        found.append("when it was recorded; nothing ran here")
    return "; ".join(found)


def serving_line(problem: Problem, path: str = "") -> str:
    """Return the line of Python that serves a problem of a kernel or an operation, which a path may name."""
    sizes = [f"{name}={value}" for name, value in problem.sizes.items()]
    if not all(name.isidentifier() for name in problem.sizes):
        sizes = [encode_json(dict(problem.sizes))]
    words = [encode_json(path or problem.kernel), *sizes, f"dtype={encode_json(problem.dtype)}"]
    return f"kernel = autotile.get_best_kernel({', '.join(words)})"


def failure_words(study: StudyData) -> Markup | None:
    """Return the reasons of the failures in full, with configurations that they are of."""
    groups = study.failures
    if not groups:
        return None
    rows = [
        (
            f"{place}. {str(group.outcome).replace('_', ' ')}",
            group.stage or NOTHING,
            f"{group.count:,}",
            tag("span", group.reason or NOTHING, class_="words"),
            tag("code", config_text(group.examples[0])),
        )
        for place, group in enumerate(groups[:50], start=1)
    ]
    headings = ("outcome", "stage", "configurations", "what was said", "for example")
    return static_table(headings, rows, caption="Failures, with the words of the compiler, verification or sanitizer")


_TABLE = "trials"


def trial_table(study: StudyData) -> DataTable:
    """Return the trials of the search as a table of data, the newest of each configuration."""
    parameters = study.parameters
    micro = "\N{MICRO SIGN}s"
    figures = (
        Column("trial", "", True),
        Column("outcome"),
        Column("time", micro, True),
        Column("low", micro, True),
        Column("high", micro, True),
        Column("registers", "", True),
        Column("spills", "B", True),
        Column("occupancy", "%", True),
        Column("after", "s", True),
    )
    own = [Column(name) for name in parameters]
    newest = {one.trial_id for one in study.newest}
    rows = [
        [
            *_trial_cells(place, one.trial, after_s),
            *(_cell(one.trial.config.get(name)) for name in parameters),
            one.trial.reason[:300],
        ]
        for place, (one, after_s) in enumerate(zip(study.trials, study.elapsed_s, strict=True), start=1)
        if one.trial_id in newest
    ]
    return DataTable(_TABLE, (*figures, *own, Column("reason")), rows)


def _trial_cells(place: int, trial: Trial, after_s: float) -> list[str | float | int | None]:
    measured, used, occupancy = trial.measurement, trial.resources, trial.occupancy
    return [
        place,
        str(trial.outcome),
        round(measured.time_us, 4) if measured is not None else None,
        round(measured.low_us, 4) if measured is not None else None,
        round(measured.high_us, 4) if measured is not None else None,
        used.registers if used is not None else None,
        used.spill_bytes if used is not None else None,
        round(100 * occupancy.occupancy, 2) if occupancy is not None else None,
        round(after_s, 2),
    ]


def _cell(value: object) -> str | float | int | None:
    return (
        value
        if isinstance(value, int | float) and not isinstance(value, bool)
        else None
        if value is None
        else str(value)
    )


def ceilings_table(study: StudyData) -> Markup | None:
    """Return the ceilings that were measured on the GPU; None if none were."""
    measured = study.ceilings
    if measured is None:
        return None
    rows = [tuple(map(with_units, row)) for row in measured.table.rows]
    headings = [plain_heading(heading) for heading in measured.table.headings]
    return tag("details", tag("summary", "The ceilings"), static_table(headings, rows))


def session_facts(study: StudyData) -> Markup | None:
    """Return the sessions of a study: when, by what, how long, and why they ended."""
    rows = [
        (
            moment_text(run.run.started_at),
            "running" if run.is_running else _length(run.run.started_at, run.run.ended_at),
            run.run.sampler,
            str(run.run.seed) if run.run.seed is not None else NOTHING,
            _END_REASONS.get(run.summary.stopped.rule, run.summary.stopped.rule) if run.summary.stopped else NOTHING,
            run.run.host or NOTHING,
            run.run.autotile_version,
        )
        for run in study.runs[-50:]
    ]
    if not rows:
        return None
    headings = ("started", "took", "sampler", "seed", "ended by", "host", "autotile")
    return static_table(headings, rows, caption="Sessions")


_END_REASONS = {
    "interrupt": "the user",
    "trials": "its number of trials",
    "budget": "its time",
    "until": "little expected gain",
    "settled": "nothing more expected",
    "space": "every configuration tried",
}


def _length(started_at: datetime, ended_at: datetime | None) -> str:
    return duration_text(max((ended_at - started_at).total_seconds(), 0.0)) if ended_at is not None else NOTHING


def _overview(page: Page, data: ReportData) -> Markup:
    rows = []
    for number, study in enumerate(data.studies, start=1):
        winner, speedup, bound = study.winner, study.speedup, study.bound(study.winner)
        rows.append(
            (
                tag("a", study.key.kernel, href=f"#s{number}"),
                key_text(study.key),
                source_text(study.key.gpu_name, study.key.source),
                f"{len(study.newest):,}",
                with_units(time_text(winner.time_us)) if winner is not None else NOTHING,
                f"{speedup.value:.3f}\N{MULTIPLICATION SIGN}" if speedup is not None else NOTHING,
                f"{percent_text(bound.share)} of {bound.roof.label}" if bound is not None else NOTHING,
            )
        )
    for other in data.others:
        best = with_units(time_text(other.best_time_us))
        rows.append(
            (
                tag("span", other.key.kernel),
                key_text(other.key),
                source_text(other.key.gpu_name, other.key.source),
                f"{other.trials:,}",
                best,
                NOTHING,
                NOTHING,
            )
        )
    headings = ("kernel", "problem", "device", "trials", "winner", "over the default", "share of the limit")
    table = static_table(headings, rows, caption="Tuned problems")
    charts = [page.chart(chart, f"r{place}-") for place, chart in enumerate(_rooflines(data.studies), start=1)]
    notes = [tag("p", notice, class_="note") for notice in data.notices]
    return page.section("overview", "Tuned problems", table, notes, charts, link="Problems")


def _rooflines(studies: Sequence[StudyData]) -> Iterable[Chart]:
    """Return a roofline for each device and element type with several studies."""
    groups: dict[tuple[str, str], list[StudyData]] = {}
    for study in studies:
        groups.setdefault((study.key.gpu_name, study.key.dtype), []).append(study)
    charts = [roofline_chart(group) for group in groups.values() if len(group) > 1]
    return [chart for chart in charts if chart.figure is not None]


def _folded(study: StudyData, number: int, sections: Sequence[Markup]) -> Markup:
    heading = tag("summary", tag("h2", study_title(study)))
    return tag("details", heading, sections, class_="study", id=f"s{number}", open=number == 1)


def _family(page: Page, number: int, stored: StoredRule) -> Markup:
    prefix = f"f{number}-"
    rule = stored.rule
    lines = [tag("li", text, class_=f"depth{min(depth, 12)}") for depth, text in tree_lines(rule.tree)]
    configs = [(f"#{index}", tag("code", config_text(one.config))) for index, one in enumerate(rule.configs)]
    return page.section(
        f"family{number}",
        f"Family {stored.key.kernel} {rule.family} {stored.key.dtype} on "
        f"{source_text(stored.key.gpu_name, stored.key.source)}",
        page.chart(family_loss_chart(stored), prefix),
        page.chart(rule_tree_chart(stored), prefix, wide=True),
        tag("details", tag("summary", "The rule in words"), tag("ul", lines, class_="tree")),
        static_table(("number", "configuration"), configs, caption="Configurations of the rule"),
        link="Family",
    )


def _operation(page: Page, number: int, operation: OperationData, data: ReportData) -> Markup:
    """Return the answer for a problem of an operation: what won and by how much, the race, and the line to serve it."""
    alone = len(data.operations) == 1
    anchor = "answer" if alone else f"operation{number}"
    heading, link = ("The answer", "Answer") if alone else (operation.title, f"{operation.problem.kernel} {number}")
    return page.section(
        anchor,
        heading,
        _operation_headline(operation),
        _facts_list(_operation_facts(operation)),
        _race_table(operation, data),
        _serving(operation.problem, f"Serve {operation.contenders[0].name}", data.path),
        page.chart(operation_chart(operation), f"o{number}-"),
        link=link,
    )


def _operation_headline(operation: OperationData) -> Markup:
    """Return the fastest contender, and its ratio to the best library, or to the best kernel."""
    winner = operation.contenders[0]
    rival = next((one for one in operation.contenders if one.is_library != winner.is_library), None)
    if rival is None or rival.ratio is None:
        text = f"{winner.name} is the fastest"
        known = "no kernel was timed" if winner.is_library else "no library was timed"
        detail = f"{with_units(winner.time_text)}; {known}"
    else:
        times, ratio = "\N{MULTIPLICATION SIGN}", rival.ratio
        interval = f"95 % interval {ratio.low:.3f}{times} to {ratio.high:.3f}{times}"
        if is_tie(ratio):
            text = f"{winner.name} and {rival.name} cannot be told apart"
            detail = f"{ratio.value:.3f}{times}, {interval}"
        else:
            text, detail = f"{winner.name} is {ratio.value:.3f}{times} faster than {rival.name}", interval
    return tag("p", tag("strong", text), " ", tag("span", detail), class_="headline")


def _operation_facts(operation: OperationData) -> Iterable[tuple[str, str | Markup]]:
    winner = operation.contenders[0]
    for label, one in (("Winner", winner), *(("Library", one) for one in operation.contenders if one.is_library)):
        if label == "Library" and one is winner:
            continue
        config = joined(" ", tag("code", config_text(one.trial.config))) if one.trial.config else None
        measured = measured_text(one.trial) or NOTHING
        yield label, joined(one.name, config, tag("br"), measured, f", {one.rate}" if one.rate != NOTHING else "")
    if not any(one.is_library for one in operation.contenders):
        yield "Library", "none was timed"
    ties = [one.name for one in operation.contenders[1:] if one.ratio is not None and is_tie(one.ratio)]
    yield "Ties", f"{', '.join(ties)} cannot be told apart from the winner" if ties else "none"
    yield "Device", operation.title.removeprefix(f"{operation.problem} on ")


def _race_table(operation: OperationData, data: ReportData) -> Markup:
    """Return a row for each kernel and library, the fastest first; names lead to the sections of the kernels."""
    places = {study.study_id: f"#s{number}" for number, study in enumerate(data.studies, start=1)}

    def row(one: ContenderData) -> tuple[str | Markup, ...]:
        place = places.get(one.study_id)
        measured = one.trial.measurement
        return (
            tag("a", one.name, href=place) if place and not one.is_library else one.name,
            "library" if one.is_library else "kernel",
            with_units(one.time_text),
            interval_text(measured.low_us, measured.high_us) if measured is not None else NOTHING,
            f"{one.ratio.value:.3f}\N{MULTIPLICATION SIGN}" if one.ratio is not None else NOTHING,
            one.rate,
            NOTHING if one.is_library else f"{one.tried:,}",
            tag("code", config_text(one.trial.config)) if one.trial.config else NOTHING,
        )

    rows = [row(one) for one in operation.contenders]
    micro = "\N{MICRO SIGN}s"
    headings = ("", "", "time", f"95 % interval, {micro}", "over the winner", "rate", "tried", "configuration")
    raced = static_table(headings, rows, caption="Kernels and libraries, the fastest first")
    if not operation.others:
        return raced
    others = static_table(("kernel", "why it has no time"), operation.others)
    return joined(raced, tag("details", tag("summary", f"{plural(len(operation.others), 'other kernel')}"), others))
