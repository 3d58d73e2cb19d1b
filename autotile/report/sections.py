"""The sections of a report, in their order: the answer first, then what supports it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotile.core.documents import encode_json
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Problem, Trial, config_key, config_text
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import NOTHING, duration_text, interval_text, moment_text, percent_text, plural, time_text
from autotile.database.database import open_existing
from autotile.database.keys import study_columns
from autotile.errors import InputError
from autotile.kernel.operation import named_operation
from autotile.report.charts import (
    family_loss_chart,
    operation_chart,
    roofline_chart,
    rule_tree_chart,
    study_charts,
    tree_lines,
)
from autotile.report.notebook import PageContent
from autotile.report.page import Content, DataTable, Markup, Page, joined, number, static_table, tag, words, write_page
from autotile.report.report_data import OperationData, ReportData, read_report, study_title
from autotile.report.study import RunSummary, StudyData, lenient
from autotile.report.theme import MICRO_S, measured_text, with_units
from autotile.settings import user_path

_MAX_PARAMETERS = 12
"""Parameters that the time is drawn against, the most important first."""
_MAX_BYTES = 9_000_000
"""Figures and tables of a page, so that it stays below 15 MB with Plotly's 5 MB."""
_MAX_ROWS = 50
"""Reasons of failures, and sessions, that are listed."""
_TIMES = "\N{MULTIPLICATION SIGN}"


def report_page(data: ReportData) -> str:
    """Return the page of a report as HTML; without Plotly it is a `ToolchainError`."""
    page = Page(data.title, f"From {data.location}, read {moment_text(data.made_at)}.")
    of_operation = bool(data.operations)
    alone = len(data.studies) == 1 and not of_operation
    page.body += [_operation(page, place, one, data) for place, one in enumerate(data.operations, start=1)]
    if not alone or data.others:
        page.body.append(_overview(page, data))
    for place, stored in enumerate(data.families, start=1):
        prefix, rule, key = f"f{place}-", stored.rule, stored.key
        lines = [tag("li", text, class_=f"depth{min(depth, 12)}") for depth, text in tree_lines(rule.tree)]
        configs = [(f"#{index}", tag("code", config_text(one.config))) for index, one in enumerate(rule.configs)]
        page.add(
            f"family{place}",
            f"Family {key.kernel} {rule.family} {key.dtype} on {key.device_label}",
            page.chart(family_loss_chart(stored), prefix),
            page.chart(rule_tree_chart(stored), prefix, wide=True),
            tag("details", tag("summary", "The rule in words"), tag("ul", lines, class_="tree")),
            static_table(("number", "configuration"), configs, caption="Configurations of the rule"),
            link="Family",
        )
    for place, study in enumerate(data.studies, start=1):
        if page.size_bytes > _MAX_BYTES:
            left = plural(len(data.studies) - place + 1, "study", "studies")
            note = f"{left} more would make the page too large; name one with its sizes."
            page.body.append(tag("p", note, class_="note"))
            break
        prefix = "" if alone else f"s{place}-"
        path = "" if of_operation else data.path
        sections = study_sections(page, study, prefix, of_operation=of_operation, path=path)
        if not alone:
            heading = tag("summary", tag("h2", study_title(study.key)))
            sections = [tag("details", heading, sections, class_="study", id=f"s{place}", open=place == 1)]
        page.body += sections
    return page.html()


def write_report_of(content: PageContent, output: str | Path) -> Path:
    """Write the page of a session's result to a file, or as ``report.html`` to a folder, and return its path."""
    path = user_path(output, "a report")
    path = path / "report.html" if path.is_dir() else path
    database, kernel, sizes, dtype, gpu_name = content
    if "***" in database:  # the password of a server
        raise InputError("the database is on a server; write the report with `autotile.report(..., database=URL)`")
    with open_existing(database) as opened:
        data = read_report(opened, named_operation(kernel) or kernel, sizes, dtype=dtype, gpu_name=gpu_name)
    write_page(report_page(data), path)
    return path


def study_sections(page: Page, study: StudyData, prefix: str, *, of_operation: bool, path: str) -> list[Markup]:
    """Return the sections of one study in the order of a report.

    The prefix makes all anchors unique on the page; the navigation leads to those of the only study, which has none. A
    kernel of an operation has another answer above its own; ``path`` is how the user named it, empty for a name.
    """
    charts = {chart.name: chart for chart in study_charts(study, _MAX_PARAMETERS)}

    def drawn(name: str, *, wide: bool = False, table: str = "") -> Markup:
        return page.chart(charts[name], prefix, wide=wide, table=table)

    times = [drawn(name) for name in charts if name.startswith("time_by_")]
    lines = drawn("parallel", wide=True, table=f"{prefix}trials-table")
    trials = page.data_table("trials", trial_table(study), prefix)
    serving = _serving_of(study, "Serve this kernel alone" if of_operation else "Serve it", path)
    failures: Markup | None = None
    if study.failures:
        told = zip(charts["failures"].table.rows[:_MAX_ROWS], study.failures, strict=False)
        described = [
            (f"{place}. {name}", *more, tag("span", reason, class_="words"), tag("code", config_text(one.examples[0])))
            for (place, name, *more, reason, _), one in told
        ]
        caption = "Failures, with the words of the compiler, verification or sanitizer"
        headings = ("outcome", "stage", "configurations", "what was said", "for example")
        failures = static_table(headings, described, caption=caption)
    ceilings: Markup | None = None
    if study.ceilings is not None:
        table = study.ceilings.table
        rows = [tuple(map(with_units, row)) for row in table.rows]
        ceilings = tag("details", tag("summary", "The ceilings"), static_table(table.headings, rows))
    parts: list[tuple[str, str, str, Content]] = [
        ("answer", "The kernel" if of_operation else "The answer", "Answer", [answer(study), serving]),
        ("finals", "Finals", "Finals", drawn("finals")),
        ("limits", "What limits the best", "Limits", drawn("limits", wide=True)),
        ("progress", "Best so far", "Progress", [drawn("best_over_trials"), drawn("best_over_seconds")]),
        (
            "parameters",
            "What matters",
            "Parameters",
            [drawn("importance"), tag("div", times, class_="grid"), drawn("heat_map")],
        ),
        ("gates", "Gates and failures", "Gates", [drawn("funnel"), drawn("failures"), failures]),
        ("trials", "All trials", "Trials", [lines, trials]),
        ("roofline", "Roofline", "Roofline", [drawn("roofline"), ceilings]),
        ("session", "The session", "Session", [drawn("drift"), _runs(study)]),
    ]
    if len(study.objectives) > 1:
        parts.append(("front", "Several objectives", "Front", drawn("front")))
    return [
        page.section(f"{prefix}{anchor}", heading, content, link="" if prefix else link)
        for anchor, heading, link, content in parts
    ]


def answer(study: StudyData) -> Markup:
    """Return the winner, its speed-up, and how it was found and verified."""
    winner, default, speedup = study.winner, study.default, study.speedup
    if winner is None:
        state = "is running" if study.is_running else "has ended"
        return tag("p", f"No configuration has been verified and timed yet; the session {state}.", class_="empty")
    if default is not None and config_key(default.config) == config_key(winner.config):
        headline, detail = "The default is the best", "no configuration was faster"
    elif speedup is not None:
        better = "better by the objective" if study.has_own_objective else "faster"
        headline, detail = f"{speedup.value:.3f}{_TIMES} {better} than the default", _interval(speedup)
    else:
        headline = with_units(time_text(winner.time_us, winner.source))
        detail = "the default was not timed"
    return joined(_headline(headline, detail), _facts(_answer_facts(study, winner, default)))


def _headline(text: str, detail: str) -> Markup:
    return tag("p", tag("strong", text), " ", tag("span", detail), class_="headline")


def _interval(ratio: Interval) -> str:
    return f"95 % interval {ratio.low:.3f}{_TIMES} to {ratio.high:.3f}{_TIMES}"


def _facts(facts: Iterable[tuple[str, str | Markup]]) -> Markup:
    return tag("dl", [(tag("dt", name), tag("dd", text)) for name, text in facts if text], class_="facts")


def _serving_of(study: StudyData, heading: str, path: str) -> Markup | None:
    if study.winner is None:
        return None
    if not study.study_id:
        sizes = [f"{name}={value}" for name, value in study.key.sizes.items()]
        command = ["autotile", "tune", path or study.key.kernel, *sizes, "--dtype", study.key.dtype]
        code = tag("code", shlex.join([*command, "--replay", study.location]))
        return tag("p", "A recording is not served; ", code, " stores its winner.", class_="note")
    if not study.key.template_hash:
        return tag("p", "Imported results are not served.", class_="note")
    return _serving(study.key.problem, heading, path)


def _serving(problem: Problem, heading: str, path: str) -> Markup:
    """Return the line of Python that serves a problem of a kernel or an operation, which a path may name."""
    sizes = [f"{name}={value}" for name, value in problem.sizes.items()]
    if not all(name.isidentifier() for name in problem.sizes):
        sizes = [encode_json(dict(problem.sizes))]
    arguments = ", ".join([encode_json(path or problem.kernel), *sizes, f"dtype={encode_json(problem.dtype)}"])
    line = tag("code", f"kernel = autotile.get_best_kernel({arguments})")
    return joined(tag("h3", heading), tag("pre", line, tabindex=0, class_="code"))


def _answer_facts(study: StudyData, winner: Trial, default: Trial | None) -> Iterable[tuple[str, str | Markup]]:
    key, device = study.key, study.device
    is_imported = not key.template_hash
    name = config_text(winner.config) or "one configuration"
    yield "Winner", joined(tag("code", name), tag("br"), measured_text(winner))
    for name, value in winner.scores.items():
        yield f"{name} of the winner", f"{value:.6g}"
    if default is not None:
        measured = measured_text(default) or str(default.outcome).replace("_", " ")
        yield "Default", joined(tag("code", config_text(default.config)), tag("br"), measured)
    if not study.finals:
        yield "Ties", "no finals were held"
    else:
        ties = [f"#{one.rank}" for one in study.finals if one.is_tie]
        count = plural(len(ties), "configuration ties", "configurations tie")
        yield "Ties", f"{count}: {', '.join(ties)}" if ties else "none"
    bound = study.bound(winner)
    yield "Binding limit", with_units(bound.text) if bound is not None else "unknown: the kernel states no [work]"
    driver = next((f", driver {run.driver}" for run in reversed(study.runs) if run.driver), "")
    parts = [
        key.gpu_name,
        f", {device.sm_count} SMs" if device is not None else "",
        f", compute capability {key.compute_capability}" if key.compute_capability else "",
        driver,
        f", compiler {key.nvrtc_version}" if key.nvrtc_version else "",
        ", imported" if is_imported else ", replayed from a recording" if key.source == "replayed" else "",
    ]
    yield "Device", "".join(parts)
    stated = (one.trial.telemetry.get("sm_clock_mhz") for one in study.trials)
    clocks = [value for value in stated if isinstance(value, int | float)]
    during = "MHz during the trials; L2 cache"
    yield "Clocks", f"SM {min(clocks):,.0f} to {max(clocks):,.0f} {during} {key.l2_mode}" if clocks else "not recorded"
    found = []
    config = config_key(winner.config)
    tried = [one.trial.telemetry for one in reversed(study.trials) if config_key(one.trial.config) == config]
    error = next((telemetry["max_error"] for telemetry in tried if "max_error" in telemetry), None)
    if winner.outcome.has_time:
        text = "outputs compared with the reference"
        found.append(f"{text}, maximum relative error {error:.2g}" if isinstance(error, int | float) else text)
    if extra := len(study.settings.verify_sizes):
        found.append(f"at {plural(extra, 'further problem')} too")
    if study.finals and key.source == "cuda":
        found.append("repeatedly in the finals, with two sets of inputs")
    if study.settings.sanitize:
        found.append("compute-sanitizer found nothing")
    digest = winner.telemetry.get(OUTPUT_DIGEST)
    if digest is not None:
        same = "differ between launches" if digest == VARYING_OUTPUTS else "are the same at every launch"
        found.append(f"the bits of the outputs {same}")
    if key.source == "replayed":
        found.append("this was when it was recorded, as nothing ran here")
    yield "Verified", "unknown: the file does not say" if is_imported else "; ".join(found)
    yield "Trials", f"{plural(len(study.newest), 'configuration')} tried in {plural(len(study.runs) or 1, 'session')}"
    if notices := study.summary.notices:
        yield "Remarks", tag("ul", [tag("li", notice) for notice in notices])


def trial_table(study: StudyData) -> DataTable:
    """Return columns and rows of the trials of the search, the newest of each configuration."""
    columns = [
        number("trial"),
        *words("outcome"),
        *(number(name, MICRO_S) for name in ("time", "low", "high")),
        number("registers"),
        *(number(name, unit) for name, unit in (("spills", "B"), ("occupancy", "%"), ("after", "s"))),
        *words(*study.parameters, "reason"),
    ]
    newest = {one.trial_id for one in study.newest}
    rows: list[list[str | float | int | None]] = []
    for place, (one, after_s) in enumerate(zip(study.trials, study.elapsed_s, strict=True), start=1):
        if one.trial_id not in newest:
            continue
        trial, used, occupancy = one.trial, one.trial.resources, one.trial.occupancy
        measured = trial.measurement
        times = (measured.time_us, measured.low_us, measured.high_us) if measured is not None else ()
        row = [
            place,
            str(trial.outcome),
            *([round(time_us, 4) for time_us in times] or (None, None, None)),
            *((used.registers, used.spill_bytes) if used is not None else (None, None)),
            round(100 * occupancy.occupancy, 2) if occupancy is not None else None,
            round(after_s, 2),
            *(str(value) if isinstance(value, bool) else value for value in map(trial.config.get, study.parameters)),
            trial.reason[:300],
        ]
        rows.append(row)
    return columns, rows


_END_REASONS = {
    "interrupt": "the user",
    "trials": "its number of trials",
    "budget": "its time",
    "until": "little expected gain",
    "settled": "nothing more expected",
    "space": "every configuration tried",
}


def _runs(study: StudyData) -> Markup | None:
    rows = []
    for run in study.runs[-_MAX_ROWS:]:
        stopped, took = lenient(run.summary, RunSummary).stopped, "running"
        if run.ended_at is not None:
            took = duration_text(max((run.ended_at - run.started_at).total_seconds(), 0.0))
        row = (
            moment_text(run.started_at),
            took,
            run.sampler,
            str(run.seed) if run.seed is not None else NOTHING,
            _END_REASONS.get(stopped.rule, stopped.rule) if stopped else NOTHING,
            run.host or NOTHING,
            run.autotile_version,
        )
        rows.append(row)
    headings = ("started", "took", "sampler", "seed", "ended by", "host", "autotile")
    return static_table(headings, rows, caption="Sessions") if rows else None


def _overview(page: Page, data: ReportData) -> Markup:
    """Return a row for each study, and a roofline for each device and element type with several of them."""
    rows: list[tuple[str | Markup, ...]] = []
    groups: dict[tuple[str, str], list[StudyData]] = {}
    for place, study in enumerate(data.studies, start=1):
        key, winner, speedup, bound = study.key, study.winner, study.speedup, study.bound(study.winner)
        groups.setdefault((key.gpu_name, key.dtype), []).append(study)
        row = (
            tag("a", key.kernel, href=f"#s{place}"),
            *study_columns(key)[1:],
            f"{len(study.newest):,}",
            with_units(time_text(winner.time_us)) if winner is not None else NOTHING,
            f"{speedup.value:.3f}{_TIMES}" if speedup is not None else NOTHING,
            f"{percent_text(bound.share)} of {bound.label}" if bound is not None else NOTHING,
        )
        rows.append(row)
    for other in data.others:
        key, best = other.key, with_units(time_text(other.best_time_us))
        columns = tag("span", key.kernel), *study_columns(key)[1:]
        rows.append((*columns, f"{other.trials:,}", best, NOTHING, NOTHING))
    headings = ("kernel", "problem", "device", "trials", "winner", "over the default", "share of the limit")
    table = static_table(headings, rows, caption="Tuned problems")
    rooflines = [roofline_chart(group) for group in groups.values() if len(group) > 1]
    drawn = [chart for chart in rooflines if chart.figure is not None]
    charts = [page.chart(chart, f"r{place}-") for place, chart in enumerate(drawn, start=1)]
    older = f"{plural(len(data.others), 'older study is', 'older studies are')} listed without charts"
    note = tag("p", older, class_="note") if data.others else None
    return page.section("overview", "Tuned problems", table, note, charts, link="Problems")


def _operation(page: Page, place: int, operation: OperationData, data: ReportData) -> Markup:
    alone = len(data.operations) == 1
    problem, device, (winner, *others), _ = operation
    heading, link = ("The answer", "Answer") if alone else (f"{problem} on {device}", f"{problem.kernel} {place}")
    rival = next((one for one in others if one.is_library != winner.is_library), None)
    if rival is None or rival.ratio is None:
        text = f"{winner.name} is the fastest"
        known = "no kernel was timed" if winner.is_library else "no library was timed"
        detail = f"{with_units(winner.time_text)}; {known}"
    elif is_tie(rival.ratio):
        text = f"{winner.name} and {rival.name} cannot be told apart"
        detail = f"{rival.ratio.value:.3f}{_TIMES}, {_interval(rival.ratio)}"
    else:
        text = f"{winner.name} is {rival.ratio.value:.3f}{_TIMES} faster than {rival.name}"
        detail = _interval(rival.ratio)
    facts: list[tuple[str, str | Markup]] = []
    libraries = [one for one in others if one.is_library]
    for name, one in (("Winner", winner), *(("Library", one) for one in libraries)):
        config = joined(" ", tag("code", config_text(one.trial.config))) if one.trial.config else None
        measured = measured_text(one.trial) or NOTHING
        rate = f", {one.rate}" if one.rate != NOTHING else ""
        facts.append((name, joined(one.name, config, tag("br"), measured, rate)))
    if not libraries and not winner.is_library:
        facts.append(("Library", "none was timed"))
    ties = [one.name for one in others if one.ratio is not None and is_tie(one.ratio)]
    facts.append(("Ties", f"{', '.join(ties)} cannot be told apart from the winner" if ties else "none"))
    facts.append(("Device", device))
    return page.section(
        "answer" if alone else f"operation{place}",
        heading,
        _headline(text, detail),
        _facts(facts),
        _race(operation, data.studies),
        _serving(problem, f"Serve {winner.name}", data.path),
        page.chart(operation_chart(operation), f"o{place}-"),
        link=link,
    )


def _race(operation: OperationData, studies: Sequence[StudyData]) -> Markup:
    """Return a row for each kernel and library, the fastest first; names lead to the sections of the kernels."""
    places = {study.study_id: f"#s{place}" for place, study in enumerate(studies, start=1)}
    rows: list[tuple[str | Markup, ...]] = []
    _, _, contenders, left = operation
    for one in contenders:
        place = places.get(one.study_id)
        row = (
            tag("a", one.name, href=place) if place and not one.is_library else one.name,
            "library" if one.is_library else "kernel",
            with_units(one.time_text),
            interval_text(one.trial.measurement),
            f"{one.ratio.value:.3f}{_TIMES}" if one.ratio is not None else NOTHING,
            one.rate,
            NOTHING if one.is_library else f"{one.tried:,}",
            tag("code", config_text(one.trial.config)) if one.trial.config else NOTHING,
        )
        rows.append(row)
    headings = ("", "", "time", f"95 % interval, {MICRO_S}", "over the winner", "rate", "tried", "configuration")
    raced = static_table(headings, rows, caption="Kernels and libraries, the fastest first")
    if not left:
        return raced
    others = static_table(("kernel", "why it has no time"), left)
    return joined(raced, tag("details", tag("summary", f"{plural(len(left), 'other kernel')}"), others))
