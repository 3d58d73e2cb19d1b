"""Commands take the sizes that are not given from the file of the kernel or of the operation, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import Run

import autotile

SAID = "not given, so as in the search-space file: n=1048576"


@pytest.fixture
def scale_toml(scale_toml: Path) -> Path:
    """Return the tiny kernel with the recorded size as its default."""
    scale_toml.write_text(scale_toml.read_text().replace("n = 4096", "n = 1048576"))
    return scale_toml


@pytest.fixture
def tuned(run: Run, scale_toml: Path, recording: Path) -> Path:
    answer = run("tune", scale_toml, "--replay", recording)
    assert answer.code == 0
    assert SAID in answer.err
    assert "scale n=1048576 float32 on NVIDIA H200 (replayed)" in answer.out
    return scale_toml


class TestOfAKernel:
    def test_where_it_is_tuned(self, run: Run, tuned: Path, recording: Path, tmp_path: Path) -> None:
        bundle, plan = tmp_path / "b.bundle", tmp_path / "plan.toml"
        assert run("export", "--format", "bundle", tuned, "-o", bundle).code == 0
        tiers = []
        for words in (
            ("best", tuned, "--device", "h200"),
            ("best", "scale", "--bundle", bundle, "--device", "h200"),
            ("export", tuned, "-o", tmp_path / "scale.json"),
        ):
            answer = run(*words, "--json")
            assert SAID in answer.err
            assert answer.document["problem"] == {"n": 1048576}
            tiers.append(answer.document.get("tier"))
        assert tiers[0] == "exact"
        assert "not given" not in run("best", tuned, "n=1048576", "--device", "h200").err
        with pytest.raises(autotile.ProblemError, match="needs the size n"):  # a program that serves gives its sizes
            autotile.get_best_kernel(tuned, device="h200")
        # a report and trials are of all that is stored
        assert run("report", tuned, "-o", tmp_path / "r.html", "--json").document["studies"] == 1
        assert {one["problem"]["n"] for one in run("trials", tuned, "--json").document} == {1048576}
        plan.write_text(f'[[tune]]\nkernel = "{tuned}"\ntrials = 1\n')
        answer = run("tune", "--plan", plan, "--replay", recording, "--json")
        assert answer.code == 0
        assert [one["problem"] for one in answer.document["problems"]] == [{"n": 1048576}]

    def test_on_a_gpu_only(self, run: Run, scale_toml: Path) -> None:
        for words in (
            ["export", scale_toml, "--format", "recording", "--sample", "1"],
            ["verify", scale_toml.with_name("scale.cu"), "--like", scale_toml],
            ["verify", scale_toml],
        ):
            assert "needs the size" not in run(*words).err

    def test_functions(self, tuned: Path, recording: Path) -> None:
        found = autotile.tune(tuned, options=autotile.TuneOptions(replay=recording, trials=1))
        assert found.problem.sizes == {"n": 1048576}
        assert found.notices[0] == SAID
        said: list[str] = []
        found = autotile.tune(tuned, replay=recording, trials=1, announce=said.append)
        assert (said, SAID in found.notices) == ([SAID], False)  # they are announced or in the result
        result = autotile.best(tuned, device="h200")
        assert (result.problem.sizes, result.notices) == ({"n": 1048576}, (SAID,))
        with autotile.session(tuned, options=autotile.TuneOptions(replay=recording)) as session:
            assert session.evaluate({"THREADS": 64, "WORK": 1})


def test_sizes_that_are_partly_given(run: Run, tmp_path: Path) -> None:
    for words in (
        ("tune", "sgemm_2d", "M=4096", "--trials", "1", "--finals", "0", "--json"),
        *((command, "sgemm_2d", "M=4096", "--device", "h200", "--json") for command in ("space", "explain")),
        ("tune", "sgemm_2d", "M=4095..4096", "--points", "1", "--trials", "1", "--replay"),
        ("export", "sgemm_2d", "M=4096", "--format", "bundle", "-o", tmp_path / "x.autotile", "--arch", "sm_90"),
    ):
        answer = run(*words)
        assert "not given, so as in the search-space file: N=4096 K=4096" in answer.err
        assert "needs the size" not in answer.err
        if "--json" in words:
            assert answer.document["problem"] == {"M": 4096, "N": 4096, "K": 4096}
    best = run("best", "sgemm_2d", "N=7", "--device", "h200", "--json").document
    assert best["problem"] == {"M": 4096, "N": 7, "K": 4096}
    for command in ("space", "explain"):
        assert run(command, "sgemm_2d", "M=4096", "N=4096", "K=4096", "--device", "h200").err == ""
    for command in ("best", "explain"):
        answer = run(command, "matmul", "M=512", "--device", "h200", "--json")
        assert "not given, so as in the operation file: N=4096 K=4096" in answer.err
        assert "EMULATE" not in answer.err  # a condition may always be left out
        assert {name: answer.document["problem"][name] for name in "MNK"} == {"M": 512, "N": 4096, "K": 4096}
