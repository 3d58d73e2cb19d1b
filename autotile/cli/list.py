"""``autotile list``: studies, families or recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument
from autotile.cli.output import examples, show
from autotile.cli.tables import (
    RIGHT,
    STUDY_HEADINGS,
    Listing,
    below,
    facts,
    lines,
    study_columns,
    study_document,
    title,
)
from autotile.core.model import config_text
from autotile.core.text import NOTHING, moment_text, percent_text, plural, sizes_text, source_text, time_text
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.api.listings import FamilyList, RecordingList, StudyList, TunedFamily
    from autotile.database.studies import StudySummary
    from autotile.exchange.recording import RecordingFile
    from autotile.families.rule import FamilyRule

_IN_FORCE = {True: "yes", False: "no: the kernel has changed since", None: "not known: no kernel of that name is found"}


def list_results(
    kernel: OptionalKernelArgument = None,
    *,
    recordings: Annotated[
        bool, typer.Option("--recordings", help="List the recordings that can be replayed instead.")
    ] = False,
    families: Annotated[
        bool, typer.Option("--families", help="List the families that were tuned, each with its rule, instead.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tuned problems, each with its best configuration.

    Lists those of one kernel if it is named, else of all.
    """
    from autotile.api import results

    if recordings and families:
        raise InputError("--recordings and --families are two lists; give one of them")
    if families:
        show(results.families(kernel, database=database), families_table, families_document, as_json=as_json)
    elif recordings:
        show(results.recordings(kernel), recordings_table, recordings_document, as_json=as_json)
    else:
        show(results.list(kernel, database=database), studies_table, studies_document, as_json=as_json)


def studies_table(found: StudyList) -> RenderableType:
    """Render one row per study."""
    if not found.studies:
        return Text(f"nothing is tuned yet in {found.location}; `autotile tune` does it")
    figures = (f"{RIGHT}tried", f"{RIGHT}ok", f"{RIGHT}best")
    headings = (*STUDY_HEADINGS, *figures, "configuration", "last trial")
    return Listing(headings, [_study_row(study) for study in found.studies], ("configuration", "last trial", "device"))


def _study_row(study: StudySummary) -> tuple[str, ...]:
    return (
        *study_columns(study.key),
        f"{study.trials:,}",
        f"{study.ok:,}",
        time_text(study.best_time_us),
        config_text(study.best_config) if study.best_config is not None else NOTHING,
        moment_text(study.last_at),
    )


def studies_document(found: StudyList) -> list[dict[str, Any]]:
    """Return one entry per study for JSON."""
    return [_study_document(study) for study in found.studies]


def _study_document(study: StudySummary) -> dict[str, Any]:
    best = None
    if study.best_config is not None:
        best = {"config": dict(study.best_config), "time_us": study.best_time_us}
    return {
        "study": study.study_id,
        **study_document(study.key),
        "nvrtc_version": study.key.nvrtc_version,
        "runs": study.runs,
        "trials": study.trials,
        "ok": study.ok,
        "best": best,
        "created_at": study.created_at.isoformat(),
        "last_at": study.last_at.isoformat() if study.last_at is not None else None,
    }


def recordings_table(found: RecordingList) -> RenderableType:
    """Render one row per recording; a damaged one shows its fault."""
    if not found.recordings:
        return Text("no recording is installed; `autotile record` makes one on a machine with a GPU")
    headings = (*STUDY_HEADINGS, f"{RIGHT}valid", "recorded", "made", "file")
    return Listing(headings, [_recording_row(one) for one in found.recordings], ("file", "made", "device"))


def _recording_row(recording: RecordingFile) -> tuple[str, ...]:
    header = recording.header
    if header is None:
        return "damaged", NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, recording.problem
    return (
        header.key.kernel,
        f"{sizes_text(header.key.sizes)} {header.key.dtype}",
        header.key.gpu_name,
        f"{header.valid_configs:,}",
        header.chosen,
        moment_text(header.created_at),
        str(recording.path),
    )


def recordings_document(found: RecordingList) -> list[dict[str, Any]]:
    """Return one entry per recording for JSON."""
    return [_recording_document(recording) for recording in found.recordings]


def _recording_document(recording: RecordingFile) -> dict[str, Any]:
    header = recording.header
    if header is None:
        return {"file": str(recording.path), "problem": recording.problem}
    return {
        **study_document(header.key),
        "valid": header.valid_configs,
        "recorded": header.chosen,
        "created_at": header.created_at.isoformat(),
        "file": str(recording.path),
    }


def families_table(found: FamilyList) -> RenderableType:
    """Render the rules of the families, one below the other."""
    if not found.families:
        return Text(f"no family is tuned yet in {found.location}; `autotile tune-family` tunes one")
    first, *others = (_family_facts(family) for family in found.families)
    return Group(first, *map(below, others))


def _family_facts(family: TunedFamily) -> RenderableType:
    stored, key = family.stored, family.stored.key
    hot = " hot L2" if key.l2_mode == "hot" else ""
    head = title(f"{key.kernel} {stored.rule.family} {key.dtype}{hot} on {source_text(key.gpu_name, key.source)}")
    known = [
        ("loss", loss_text(stored.rule)),
        ("learned", f"{moment_text(stored.learned_at)}, from {plural(len(stored.rule.points), 'point')}"),
        ("in force", _in_force_text(family)),
    ]
    return Group(head, facts(known), below(rule_facts(stored.rule)))


def _in_force_text(family: TunedFamily) -> str:
    rule = family.stored.rule
    return _IN_FORCE[family.in_force] if rule.in_force else f"no: {rule.verdict}"


def rule_facts(rule: FamilyRule) -> RenderableType:
    """Render the configurations of a family's rule and its tree."""
    configs: list[tuple[str, RenderableType]] = [
        (f"#{number}", config_text(one.config)) for number, one in enumerate(rule.configs)
    ]
    return facts([*configs, ("rule", lines(rule.lines()))])


def loss_text(rule: FamilyRule) -> str:
    """Format the relative losses of a family's rule at its points, and at points left out of learning."""
    worst = f"{percent_text(rule.worst.loss)} ({sizes_text(rule.worst.sizes)})"
    at_points = f"{percent_text(rule.mean_loss)} on average at the points, {worst} at worst"
    held_out = rule.held_out_losses
    if not held_out:
        return at_points
    left_out = f"{percent_text(sum(held_out) / len(held_out))} on average and {percent_text(max(held_out))} at worst"
    return f"{at_points}; {left_out} where the point was left out of learning"


def families_document(found: FamilyList) -> list[dict[str, Any]]:
    """Return one entry per family for JSON."""
    return [_family_document(family) for family in found.families]


def _family_document(family: TunedFamily) -> dict[str, Any]:
    stored, key = family.stored, family.stored.key
    return {
        "kernel": key.kernel,
        "family": str(stored.rule.family),
        "dtype": key.dtype,
        "device": {"name": key.gpu_name, "source": key.source},
        "nvrtc_version": key.nvrtc_version,
        "l2": key.l2_mode,
        "learned_at": stored.learned_at.isoformat(),
        "in_force": family.in_force,
        "judgement": judgement.to_json() if (judgement := stored.rule.judgement) is not None else None,
        "loss": {"mean": stored.rule.mean_loss, "worst": stored.rule.worst.loss},
        "held_out_loss": stored.rule.mean_held_out,
        "rule": stored.rule.to_json(),
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "list",
        epilog=examples(
            "autotile list",
            "autotile list sgemm_2d --json",
            "autotile list --families",
            "autotile list --recordings",
        ),
    )(list_results)
