"""No line ends in spaces, no word is broken, and a row that is too long becomes several lines."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from stored_rows import CEILINGS

from autotile.api.devices import DeviceList
from autotile.api.inspection import OperationExplanation
from autotile.api.plans import PlanEntry, PlanResult
from autotile.api.results import MissList, RecordingList, StudyList, StudyTrial, TrialList
from autotile.cli.tables import Listing, Trimmed, below, facts, render, table, title
from autotile.core.device import device_profile, profile_names
from autotile.core.model import Measurement, Outcome, Problem, Resources, Trial
from autotile.core.statistics import Interval
from autotile.core.text import RIGHT
from autotile.database.database import StoredTrial, StudySummary
from autotile.database.keys import TuningKey
from autotile.database.learned import MissCost
from autotile.exchange.recording import RecordingFile, RecordingHeader
from autotile.kernel.library import load_kernel
from autotile.serving.choice import Contender
from autotile.tuning.operation_session import OperationResult, TunedContender
from autotile.tuning.plan import AssessedMiss, PlannedProblem

SIZES = {"M": 4096, "N": 4096, "K": 4096}
CONFIG = dict.fromkeys(("BM", "BN", "BK", "TM", "TN", "LANES_X", "VEC", "STAGES", "PAD", "UNROLL", "MIN_BLOCKS"), 128)
CONFIG_TEXT = " ".join(f"{name}={value}" for name, value in CONFIG.items())
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
WIDTHS = pytest.mark.parametrize("width", [80, 120, 10_000])


def drawn(report: RenderableType, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False, highlight=False).print(Trimmed(report))
    return stream.getvalue().splitlines()


def key() -> TuningKey:
    problem, device = Problem("sgemm_2d", SIZES, "float32"), device_profile("h200")
    return TuningKey.for_device(
        problem, device, template_hash="t", space_hash="s", options=(), nvrtc_version="13.0", l2_mode="cold"
    )


def stored_trial(study: int) -> StoredTrial:
    trial = Trial(
        CONFIG,
        Outcome.RESOURCE_EXCEEDED,
        "spills 1,004 bytes, over max_spill_bytes = 64",
        resources=Resources(255, 500, 504, 0, 0),
        measurement=Measurement(3057.0, 3056.0, 3069.0),
    )
    return StoredTrial(1, study, 1, "search", None, NOON, trial)


def reports() -> dict[str, RenderableType]:
    study = StudySummary(1, key(), device_profile("h200"), NOON, 1, 200, 150, NOON, CONFIG, 3057.0)
    header = RecordingHeader(key=key(), parameters=(), device=device_profile("h200"), valid_configs=14712)
    problem, gpu = Problem("sgemm_2d", SIZES, "float32"), "NVIDIA GeForce RTX 3090"
    cost = MissCost(1234.5, 12.5e6 / 7, measured=False)
    miss = AssessedMiss(problem, gpu, "transferred", 7, NOON, None, cost, tuned=True)
    file = Path("/home/someone/autotile/recordings/sgemm_2d-nvidia-h200.npz")
    return {
        "studies": render(StudyList((study,), "t.db")),
        "recordings": render(RecordingList((RecordingFile(file, header), RecordingFile(file, None, "it is damaged")))),
        "trials": render(TrialList((StudyTrial(key(), stored_trial(1)),))),
        "trials of several studies": render(
            TrialList(tuple(StudyTrial(key(), stored_trial(study)) for study in (1, 2)))
        ),
        "misses": render(MissList((miss,))),
        "plan": render(plan_result()),
        "operation": render(replace(operation_result(), call="kernel = autotile.get_best_kernel(...)")),
        "contenders": render(operation_explanation()),
        "devices": render(DeviceList((), {name: device_profile(name) for name in profile_names()}, (CEILINGS,))),
    }


WHY = (
    "no kernel of matmul ran for matmul M=128 N=7168 K=2048 bfloat16: there is no CUDA device here and no recording\n"
    "of gemm_wgmma;\tsee `autotile doctor`"
)


def plan_result() -> PlanResult:
    kernel, problem = load_kernel("sgemm_2d"), Problem("sgemm_2d", SIZES, "float32")
    planned = PlannedProblem("sgemm_2d", kernel, problem)
    entries = (PlanEntry(planned, "NVIDIA H200", "failed", reason=WHY), PlanEntry(planned, "", "left"))
    return PlanResult("a plan", entries, 12.0, False, "/home/someone/tuning.db")


def operation_result() -> OperationResult:
    trial = stored_trial(1).trial
    contenders = (
        TunedContender("gemm_wgmma_padded", False, trial, 150, 20.0, "won", ratio=Interval(1.0, 1.0, 1.0)),
        TunedContender("cublas", True, trial, state="raced", ratio=Interval(1.1, 1.09, 1.12)),
        TunedContender("gemm_mma", False, trial, 9, 2.0, "dropped", "1.95x the time of gemm_wgmma", Interval(2, 2, 2)),
        TunedContender("gemm_small", False, None, state="inapplicable", reason="the rule leaves none of 1,290,240"),
        TunedContender("gemm_other", False, None, state="failed", reason=WHY),
    )
    problem = Problem("matmul", SIZES, "bfloat16")
    return OperationResult(
        problem=problem,
        device=device_profile("h200"),
        contenders=contenders,
        seconds=12.0,
        interrupted=False,
        database="/home/someone/tuning.db",
    )


def operation_explanation() -> OperationExplanation:
    contenders = (
        Contender("gemm_wgmma", CONFIG, 3057.0, source="replayed"),
        Contender("gemm_mma", CONFIG, 3000.0, 0.13),
    )
    problem, device = Problem("matmul", SIZES, "bfloat16"), device_profile("h200")
    return OperationExplanation(
        problem, device, "gemm_wgmma", False, "exact", CONFIG, contenders, {}, "it was measured"
    )


@pytest.mark.parametrize("name", ["plan", "operation"])
def test_messages_of_several_lines_have_no_escapes(name: str) -> None:
    for width in (80, 10_000):
        text = " ".join(" ".join(drawn(reports()[name], width)).split())
        assert "no recording of gemm_wgmma; see `autotile doctor`" in text
        assert "\\n" not in text
        assert "\\t" not in text


def test_a_message_of_several_lines_keeps_them_among_facts() -> None:
    assert drawn(facts([("why", "one\n\ttwo")]), 80) == ["why  one", "         two"]


@WIDTHS
@pytest.mark.parametrize("name", reports())
class TestTables:
    def test_it_fits_and_breaks_no_word(self, name: str, width: int) -> None:
        lines = drawn(reports()[name], width)
        assert max(map(len, lines)) <= width
        words = {word for line in drawn(reports()[name], 10_000) for word in line.split() if "─" not in word}
        assert words <= {word for line in lines for word in line.split()}

    def test_no_line_ends_in_spaces(self, name: str, width: int) -> None:
        lines = drawn(reports()[name], width)
        assert [line for line in lines if line != line.rstrip()] == []


class TestListing:
    LISTING = Listing(
        ("name", f"{RIGHT}count", "long", "note"), [("a", "1", "x " * 20, ""), ("b", "22", "y", "-")], ("long",)
    )

    def test_wide_enough_is_a_table(self) -> None:
        lines = drawn(self.LISTING, 80)
        assert [line.split()[0] for line in lines[2:]] == ["a", "b"]
        assert lines[0].split() == ["name", "count", "long", "note"]

    def test_too_long_a_column_moves_below_its_row(self) -> None:
        assert drawn(self.LISTING, 30) == [
            "name   count   note",
            "───────────────────",
            "a          1",
            "  long  x x x x x x x x x x x",
            "        x x x x x x x x x",
            "b         22   -",
            "  long  y",
        ]

    def test_what_is_empty_is_left_out_below(self) -> None:
        lines = drawn(self.LISTING, 12)
        assert lines[:3] == ["name   count", "────────────", "a          1"]
        assert not any("note" in line for line in lines)

    def test_the_first_column_never_moves(self) -> None:
        assert drawn(Listing(("name", "value"), [("a long name", "1")]), 8)[0] == "name"


def test_text_below_and_titles_end_where_they_end() -> None:
    lines = drawn(below("word " * 30), 10_000) + drawn(title("a title"), 80)
    assert lines == ["", ("word " * 30).strip(), "a title", ""]


def test_paragraphs_and_facts_are_not_padded() -> None:
    shown = table("one", "two")
    shown.add_row("a", "")
    assert drawn(shown, 80)[-1] == "a"
    assert drawn(facts([("label", ""), ("longer label", "text")]), 80) == ["label", "longer label  text"]


def test_a_line_of_colour_keeps_its_words() -> None:
    stream = io.StringIO()
    shown = table("one", "two")
    shown.add_row("a", "", style="bold red")
    Console(file=stream, width=80, force_terminal=True, color_system="standard").print(Trimmed(shown))
    assert stream.getvalue().splitlines()[-1] == "\x1b[1;31ma\x1b[0m"
