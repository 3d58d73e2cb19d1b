"""Single changes of functions by benchmarks/mutants.py: where they are made, which tests are run, and the verdicts."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="Cosmic Ray is not installed")

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import mutants  # noqa: E402

SOURCE = '''
LIMIT = 3

def below(value: int | None = 5, *rest: int) -> bool | None:
    """Say 7 < 8."""
    if value is None:
        log.append(value)
        return None
    for one in rest:
        value += one
    return value < 10 and not rest

class Box:
    size = 4
    def grow(self):
        self.items[0] = 1
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "below.py"
    path.write_text(SOURCE)
    return path


def changes(file: Path) -> list[mutants.Mutant]:
    made = [mutants.mutant_of(file, SOURCE, *change) for place in mutants.places(SOURCE).values() for change in place]
    return [one for one in made if one is not None]


def test_changes_are_made_in_the_bodies_of_functions_only(file):
    found = changes(file)
    assert {one.function for one in found} == {"below", "Box.grow"}
    lines = {one.line for one in found}
    assert lines == {6, 7, 9, 10, 11, 16}  # no constant, signature, docstring or class
    kinds = {one.operator.partition("_")[0] for one in found}
    assert {"ReplaceComparisonOperator", "NumberReplacer", "ZeroIterationForLoop", "RemoveStatement"} <= kinds


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("log.append(value)", "pass"),
        ("value += one", "pass"),
        ("self.items[0] = 1", "pass"),
        ("return value < 10 and not rest", "return value <= 10 and not rest"),
        ("return value < 10 and not rest", "return value < 11 and not rest"),
        ("return value < 10 and not rest", "return value < 10 or not rest"),
        ("if value is None:", "if value is not None:"),
    ],
)
def test_a_change_is_one_line_and_its_diff_shows_it(file, before, after):
    (one,) = [each for each in changes(file) if (each.before, each.after) == (before, after)]
    assert len([line for line in one.diff.splitlines() if line.startswith("-") and not line.startswith("---")]) == 1
    assert one.code.count("\n") == SOURCE.count("\n")


def test_a_sample_is_repeatable_and_has_each_place_once(file):
    first = mutants.sample([file], 8, seed=3)
    assert first == mutants.sample([file], 8, seed=3)
    assert first != mutants.sample([file], 8, seed=4)
    assert len(first) == 8
    assert len(mutants.sample([file], 1000, seed=0)) == len(mutants.places(SOURCE))


def test_tests_that_concern_a_change_come_first():
    (one, *_) = mutants.sample(mutants.files_of("space.limits"), 1, seed=0)
    near = mutants.stages(one, near=True)
    assert near[0] == ["tests/space/test_limits.py"]
    assert "tests/space/test_time_estimate.py" in near[1]
    whole = mutants.stages(one, near=False)
    assert whole[: len(near)] == near
    files = [path for stage in whole for path in stage]
    assert len(files) == len(set(files))
    assert not any(path.startswith(mutants.LEFT_OUT) for path in files)


PASSED: tuple[int, list[str]] = (0, [])
FAILED = (1, ["tests/a.py::test_one"])


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([PASSED, PASSED], "survived"),
        ([FAILED, PASSED], "noticed"),  # it passes without the change
        ([FAILED, FAILED, PASSED, PASSED], "survived"),  # it fails without the change, too, and is left out
        ([PASSED, FAILED, PASSED], "noticed"),
        ([(5, []), PASSED], "survived"),  # nothing was collected
        ([(None, []), PASSED], "timed out"),
        ([(None, []), (None, []), PASSED], "survived"),  # it takes as long without the change
    ],
)
def test_verdicts(file, monkeypatch, results, verdict):
    """Of a copy of the checkout whose runs of tests are given."""
    left, copy = list(results), object.__new__(mutants.Copy)
    monkeypatch.setattr(mutants, "stages", lambda mutant, near: [["tests/a.py"], ["tests/b.py"]])
    monkeypatch.setattr(mutants.Copy, "_run", lambda copy, tests, ignored: left.pop(0))
    copy.folder = file.parent
    (one, *_) = mutants.sample([file], 1, seed=0)
    assert copy.judge(replace(one, path=file.name), near=True).result == verdict
    assert file.read_text() == SOURCE  # the change was taken back
    assert left == []


def test_shares_with_and_without_marked_changes(file, tmp_path):
    first, second, third = mutants.sample([file], 3, seed=0)
    marks = tmp_path / "marks.json"
    path, before, after = second.mark()
    marks.write_text(json.dumps([{"path": path, "before": before, "after": after, "why": "equivalent"}]))
    known = mutants.read_marks(marks)
    verdicts = [mutants.Verdict(first, "noticed"), mutants.Verdict(second), mutants.Verdict(third)]
    for one in verdicts:
        one.mark = known.get(one.mutant.mark(), "")
    found = mutants.summary(verdicts)
    assert (found["share"], found["share_without_marked"]) == (1 / 3, 1 / 2)
    marks.write_text('[{"path": "x"}]')
    with pytest.raises(SystemExit, match="expected path, before, after, and why"):
        mutants.read_marks(marks)


def test_the_marked_changes_are_of_present_lines():
    for path, before, _ in mutants.read_marks(mutants.MARKS):
        lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
        assert all(line in lines for line in before.split("\n")), (path, before)


def test_a_change_is_noticed_in_a_copy(tmp_path):
    """With the real checkout and a real run: a flipped comparison of occupancies is noticed, an unused one is not."""
    source = (ROOT / "autotile" / "core" / "text.py").read_text(encoding="utf-8")
    broken = source.replace("if count == 1 else", "if count != 1 else", 1)
    assert broken != source
    mutant = mutants.Mutant("autotile/core/text.py", 1, "plural", "x", broken, "", "", "")
    copy = mutants.Copy(tmp_path, 300.0)
    with copy._changed(mutant):
        assert copy._run(["tests/core/test_text.py"], [])[0] == 1
    assert copy._run(["tests/core/test_text.py"], []) == (0, [])
