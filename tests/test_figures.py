"""The measured figures of the documentation are those of the committed records."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import console  # noqa: E402
import figures  # noqa: E402

MEASURED = re.compile(r"(?<![\w=.])\d[\d,.]*(?: to \d[\d,.]*)? (?:us|ms|TFLOP/s|TB/s|GB/s|MB|%|times|min \d+ s)(?!\w)")
"""What a measured figure looks like in prose: a number with a unit."""

_GUIDE = {
    "95 %",  # the level of an interval
    "10 %",  # who takes part in a last race
    "3 %",  # by which a kernel must be expected to be faster than PyTorch's own function
    "1 %",  # options, and the share of the time that counting misses may take
    "12 %",  # an example of a sentence that `tune` prints
    "22 us",  # an example of a sentence of `explain`
    "2,200 us",
    "50 ms",  # a timeout
    "20 ms",  # the limit of a race at the first call
    "100 %",
}
STATED = {
    "README.md": {
        "95 %",  # the level of an interval
        "66.9 TFLOP/s",  # a property of the device, from its data sheet
    },
    "docs/from-kernel-tuner.md": set(),
    "docs/scaling.md": set(),
    **{
        f"docs/{name}.md": _GUIDE
        for name in ("guide", "tuning", "serving", "distributed", "database", "reports", "python")
    },
}
"""Figures that are definitions, settings or properties, not measurements."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_records(page):
    assert page.read_text(encoding="utf-8") == figures.renewed(page), "run `python benchmarks/figures.py`"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_no_figure_is_typed_by_hand(page):
    prose = FENCE.sub("", figures.BLOCK.sub("", page.read_text(encoding="utf-8")))
    prose = re.sub(r"`[^`\n]*`|^    .*$", "", prose, flags=re.MULTILINE)
    assert set(MEASURED.findall(prose)) <= STATED[str(page.relative_to(ROOT))]


def test_every_record_names_its_command():
    for path in sorted(figures.RESULTS.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if path.stem != "gemm_seeds":
            command = found["command"].split()
            assert command[0] == "python", path
            assert (ROOT / command[1]).is_file(), path


RECORDED = json.loads((figures.RESULTS / "console.json").read_text(encoding="utf-8"))
AGAIN = f"record it again: {RECORDED['command']}, then bring README.md and docs/guide.md up to it"


def test_the_recorded_outputs_are_of_the_present_code():
    """A session over the same recording, in which nothing is compiled, reports what it did when they were recorded."""
    assert RECORDED["kernel"] == console.kernel_version(), AGAIN
    assert RECORDED["replayed"] == console.replayed(), AGAIN


@pytest.mark.parametrize("command", [one for one in RECORDED["commands"] if console.only_inspects(one)])
def test_commands_that_inspect_answer_as_recorded(command, tmp_path):
    lines = (console.run(command, tmp_path), RECORDED["commands"][command])
    now, then = ([console.DURATION.sub("TIME", line) for line in each] for each in lines)
    assert now == then, AGAIN


def test_the_guide_quotes_the_record():
    """Its first tune is that of the README: the lines with its gates and with what matters are those of the record."""
    tune = next(lines for command, lines in RECORDED["commands"].items() if command.startswith("autotile tune"))
    whole = " ".join(" ".join(tune).split())
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^    (93,312 combinations .*|matters   .*\n(?: {14}.*\n)*)", guide, re.MULTILINE)
    assert len(quoted) == 2
    for text in quoted:
        for piece in " ".join(text.split()).split("..."):
            assert piece.strip() in whole, AGAIN


def test_the_outputs_on_the_page_are_recorded():
    printed = RECORDED["commands"]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert list(printed) == console.commands(page)
    for block in console.BLOCK.findall(page):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            whole, position = " ".join(" ".join(printed[command]).split()), 0
            for piece in filter(None, (" ".join(part.split()) for part in shown.split("..."))):
                position = whole.find(piece, position)
                assert position >= 0, (command, piece)
                position += len(piece)
