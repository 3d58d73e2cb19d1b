"""Tables of results: no line ends in spaces, no word is broken, and a row that is too long becomes several lines."""

import io
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console, RenderableType
from stored_rows import CEILINGS

from autotile.api.devices import DeviceList
from autotile.api.inspection import OperationExplanation
from autotile.api.plans import PlanEntry, PlanResult
from autotile.api.results import MissList, RecordingList, StudyList, StudyTrial, TrialList
from autotile.cli.output import facts, print_trimmed, render, table
from autotile.core.device import device_profile, profile_names
from autotile.core.model import Effect, Measurement, Outcome, Problem, Resources, Stopped, Trial
from autotile.core.statistics import Interval
from autotile.core.text import RIGHT, Part, Result, ResultTable
from autotile.database.database import StoredTrial, StudySummary
from autotile.database.keys import TuningKey
from autotile.exchange.recording import RecordingHeader
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import Workrate
from autotile.search.importance import ParameterEffects, Threshold
from autotile.search.transfer import MisleadingSource
from autotile.serving.choice import Contender
from autotile.tuning.operation_session import OperationResult, TunedContender
from autotile.tuning.plan import AssessedMiss, PlannedProblem
from autotile.tuning.result import Front, TuneResult

SIZES = {"M": 4096, "N": 4096, "K": 4096}
CONFIG = dict.fromkeys(("BM", "BN", "BK", "TM", "TN", "LANES_X", "VEC", "STAGES", "PAD", "UNROLL", "MIN_BLOCKS"), 128)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@dataclass(repr=False)
class Shown(Result):
    parts: tuple[Part, ...]
    heading: str = ""

    def _heading(self) -> str:
        return self.heading

    def _parts(self) -> tuple[Part, ...]:
        return self.parts


def drawn(report: Result | RenderableType, width: int) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, highlight=False)
    print_trimmed(console, render(report, console) if isinstance(report, Result) else report)
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


def reports() -> dict[str, Result]:
    study = StudySummary(1, key(), device_profile("h200"), NOON, 1, 200, 150, NOON, CONFIG, 3057.0)
    header = RecordingHeader(key=key(), parameters=(), device=device_profile("h200"), valid_configs=14712)
    problem, gpu = Problem("sgemm_2d", SIZES, "float32"), "NVIDIA GeForce RTX 3090"
    cost_us = 1234.5, 12.5e6 / 7
    miss = AssessedMiss(problem, gpu, "transferred", 7, NOON, None, True, *cost_us)
    planned = PlannedProblem("sgemm_2d", load_kernel("sgemm_2d"), problem)
    entries = (PlanEntry(planned, "NVIDIA H200", "failed", reason=WHY), PlanEntry(planned, "", "left"))
    contenders = (
        Contender("gemm_wgmma", CONFIG, 3057.0, source="replayed"),
        Contender("gemm_mma", CONFIG, 3000.0, 0.13),
    )
    asked = Problem("matmul", SIZES, "bfloat16"), device_profile("h200"), "gemm_wgmma", False, "exact", CONFIG
    file = Path("/home/someone/autotile/recordings/sgemm_2d-nvidia-h200.npz")
    return {
        "studies": StudyList((study,), "t.db"),
        "recordings": RecordingList(((file, header), (file, "it is damaged"))),
        "trials": TrialList((StudyTrial(key(), stored_trial(1)),)),
        "trials of several studies": TrialList(tuple(StudyTrial(key(), stored_trial(study)) for study in (1, 2))),
        "misses": MissList((miss,)),
        "plan": PlanResult("a plan", entries, 12.0, False, "/home/someone/tuning.db"),
        "operation": replace(operation_result(), call="kernel = autotile.get_best_kernel(...)"),
        "contenders": OperationExplanation(*asked, contenders, {}, "it was measured"),
        "devices": DeviceList((), {name: device_profile(name) for name in profile_names()}, (CEILINGS,)),
    }


WHY = (
    "no kernel of matmul ran for matmul M=128 N=7168 K=2048 bfloat16: there is no CUDA device here and no recording\n"
    "of gemm_wgmma;\tsee `autotile doctor`"
)


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


def test_a_message_of_several_lines_keeps_them_among_facts():
    assert drawn(facts([("why", "one\n\ttwo")]), 80) == ["why  one", "         two"]


@pytest.mark.parametrize("name", reports())
def test_a_report_fits_breaks_no_word_and_no_line_ends_in_spaces(name):
    report = reports()[name]
    words = {word for line in drawn(report, 10_000) for word in line.split() if "─" not in word}
    for width in (80, 120, 10_000):
        lines = drawn(report, width)
        assert max(map(len, lines)) <= width
        assert words <= {word for line in lines for word in line.split()}
        assert [line for line in lines if line != line.rstrip()] == []
        if name in ("plan", "operation"):  # a message of several lines, without escapes
            text = " ".join(" ".join(lines).split())
            assert "no recording of gemm_wgmma; see `autotile doctor`" in text
            assert "\\n" not in text
            assert "\\t" not in text


class TestListing:
    ROWS = (("a", "1", "x " * 20, ""), ("b", "22", "y", "-"))
    LISTING = Shown((ResultTable(("name", f"{RIGHT}count", "long", "note"), ROWS, ("long",)),))

    def test_wide_enough_is_a_table_and_too_long_a_column_moves_below_its_row(self):
        lines = drawn(self.LISTING, 80)
        assert [line.split()[0] for line in lines[2:]] == ["a", "b"]
        assert lines[0].split() == ["name", "count", "long", "note"]
        assert drawn(self.LISTING, 30) == [
            "name   count   note",
            "───────────────────",
            "a          1",
            "  long  x x x x x x x x x x x",
            "        x x x x x x x x x",
            "b         22   -",
            "  long  y",
        ]

    def test_what_is_empty_is_left_out_below_and_the_first_column_never_moves(self):
        lines = drawn(self.LISTING, 12)
        assert lines[:3] == ["name   count", "────────────", "a          1"]
        assert not any("note" in line for line in lines)
        assert drawn(Shown((ResultTable(("name", "value"), [("a long name", "1")]),)), 8)[0] == "name"


def test_titles_paragraphs_and_facts_end_where_they_end():
    lines = drawn(Shown(("one", "word " * 30), "a title"), 10_000)
    assert lines == ["a title", "", "one", "", ("word " * 30).strip()]
    shown = table("one", "two")
    shown.add_row("a", "")
    assert drawn(shown, 80)[-1] == "a"
    assert drawn(facts([("label", ""), ("longer label", "text")]), 80) == ["label", "longer label  text"]


def test_a_line_of_colour_keeps_its_words():
    stream = io.StringIO()
    shown = table("one", "two")
    shown.add_row("a", "", style="bold red")
    print_trimmed(Console(file=stream, width=80, force_terminal=True, color_system="standard"), shown)
    assert stream.getvalue().splitlines()[-1] == "\x1b[1;31ma\x1b[0m"


H200 = device_profile("h200")
PROBLEM = Problem("sgemm", {"M": 4096, "N": 4096, "K": 4096}, "float32")
RATE = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")


def trial(tile: int, time_us: float) -> Trial:
    return Trial({"BM": tile}, Outcome.OK, measurement=Measurement(time_us, time_us - 2, time_us + 5))


RESULT = TuneResult(
    problem=PROBLEM,
    device=H200,
    combinations=8294400,
    valid=24906,
    gates={"combinations": 8294400, "limits": 24906},
    outcomes={Outcome.OK: 45, Outcome.PRUNED: 5},
    winner=trial(128, 4790),
    default=trial(64, 7185),
    speedup=Interval(1.5, 1.49, 1.51),
    ties=(),
    seconds=21.3,
    resumed=20,
    interrupted=False,
    database="tuning.db",
    flops=RATE.flops,
    bytes=RATE.bytes,
)


def shown(result: TuneResult, width: int = 120) -> list[str]:
    return drawn(replace(result, call='kernel = autotile.get_best_kernel("sgemm", M=4096)'), width)


NOTHING_RAN = {"winner": None, "default": None, "speedup": None}
FAILED = Trial({"BM": 64}, Outcome.RESOURCE_EXCEEDED, "spills")
CUT_SHORT = "cut short after 50 configurations"
MATTERS = (
    "matters   BK explains 61 % of the differences (best at 16 or 32); no effect is seen of PAD; "
    "none of 48 trials beyond 256 threads came within 12 % of the best"
)
INSIGHT = ParameterEffects(
    (Effect("BK", 0.614, 0.5, True), Effect("PAD", 0.0, 0.0, False)),
    {"BK": (16, 32)},
    (Threshold("threads", "above", 256, 48, 0.129, "256 threads"),),
)
MISLED = {"learnt_from": ("n=1",), "not_learnt_from": (MisleadingSource("n=512", -0.13, 12),)}
SETTLED = "nothing more is expected: 0.02 % from 128 more trials; --spend uses the budget up"
UNTIL = "0.43 % was expected of 128 more trials, less than --until asks for"


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, ["1.500x over the default, 95 % interval 1.490x to 1.510x"], ["interrupted"]),
        ({"speedup": Interval(1.001, 0.99, 1.01)}, ["not told apart from the default"], []),
        ({"default": RESULT.winner}, ["the default configuration is the winner"], []),
        (MISLED, ["from n=1\n", "from n=512 (rank correlation -0.1 over 12 trials)"], []),
        ({"ties": ({"BM": 256},)}, ["1 configuration cannot be told apart"], []),
        ({"ties": tuple({"BM": tile} for tile in range(9))}, ["BM=4", "and 4 more"], ["BM=5"]),
        ({"default": FAILED, "speedup": None}, ["resource_exceeded"], []),
        ({"default": None, "speedup": None}, ["not run"], []),
        (NOTHING_RAN, ["none: no configuration ran"], []),
        ({"stopped": Stopped("settled", 0.0002, 128)}, [SETTLED], []),
        ({"stopped": Stopped("settled", 1e-90, 128)}, ["less than 0.001 % from 128 more"], []),
        ({"stopped": Stopped("until", 0.00432, 128)}, [UNTIL], []),
        ({"stopped": Stopped("trials", 0.00432, 128)}, [], ["stopped"]),
        ({"interrupted": True}, [CUT_SHORT], ["\nwinner"]),
        ({"interrupted": True, "speedup": None}, [f"{CUT_SHORT}, before the best were timed side by side"], []),
        (
            {"interrupted": True, **NOTHING_RAN, "outcomes": {}},
            ["best so far  none: no configuration ran", "cut short after 0 configurations"],
            ["serve it"],
        ),
        ({"device": structs.replace(H200, source="replayed")}, ["NVIDIA H200 (replayed)"], []),
    ],
)
def test_a_result_of_tuning_says(changes, said, unsaid):
    text = "\n".join(shown(replace(RESULT, **changes), width=200))
    assert [words for words in said if words not in text] == []
    assert [words for words in unsaid if words in text] == []


class TestTuneTable:
    def test_winner_and_default_stand_side_by_side(self):
        (winner,) = [line for line in shown(RESULT) if "28.7 TFLOP/s (42.9 % of fp32 peak)" in line]
        assert "winner" in winner
        assert "4,790 us" in winner
        assert any("default" in line and "7,185 us" in line for line in shown(RESULT))
        lines = shown(replace(RESULT, interrupted=True))
        assert len([line for line in lines if line.startswith("best so far")]) == 2
        lines = shown(RESULT, width=80)
        assert max(map(len, lines)) <= 80
        assert "4,790 us" in "".join(lines)

    def test_what_matters_is_one_line_of_the_report(self):
        lines = shown(replace(RESULT, insight=INSIGHT), width=200)
        assert [" ".join(line.split()) for line in lines if line.startswith("matters")] == [" ".join(MATTERS.split())]


def front_trial(number: int) -> Trial:
    time_us = 100.0 + number
    return Trial(
        {"BM": number, "SWIZZLE": "row-major-in-groups"},
        Outcome.OK,
        resources=Resources(200 - number, 0, 0, 0, 0),
        measurement=Measurement(time_us, time_us, time_us),
        telemetry={"energy_mj": 12.3456 * number, "max_error": 1.26e-6},
    )


def front_lines(count: int, *objectives: str, winner: int = 0, width: int = 120) -> list[str]:
    front = Front(("time", *objectives), tuple(front_trial(number) for number in range(count)))
    return drawn(Shown((front.table({"BM": winner, "SWIZZLE": "row-major-in-groups"}),)), width)


def test_each_objective_has_a_column_with_its_unit():
    heading, names, _, first, second = front_lines(2, "registers", "energy", "error")
    assert heading == "front of time, registers, energy and error: 2 configurations"
    assert names.split() == ["time", "registers", "energy", "error", "configuration"]
    assert " ".join(first.split()) == "winner 100.0 us 200 0.000 mJ 1.3e-06 BM=0 SWIZZLE=row-major-in-groups"
    assert " ".join(second.split()) == "101.0 us 199 12.35 mJ 1.3e-06 BM=1 SWIZZLE=row-major-in-groups"


def test_of_many_ten_are_shown_with_both_ends_and_of_one_itself():
    heading, _, _, *rows = front_lines(37, "registers")
    assert heading == "front of time and registers: 37 configurations, 10 shown; --json lists all"
    assert len(rows) == 10
    assert "BM=0 " in rows[0]
    assert "BM=36 " in rows[-1]
    assert "winner" not in "\n".join(front_lines(3, "registers", winner=99))
    assert front_lines(1, "registers")[0] == "front of time and registers: 1 configuration"
    for width in (60, 80):
        lines = front_lines(3, "registers", "energy", "error", width=width)
        assert max(len(line) for line in lines[1:]) <= width
        assert "\n".join(lines).count("SWIZZLE=row-major-in-groups") == 3
