"""``autotile space``, ``explain``, ``verify`` and ``new``."""

import csv
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_python import python
from feature_kernels import copy_kernel
from interrupts import heeded_interrupts
from waiting import wait_until

import autotile
from autotile.api import verification
from autotile.api.verification import judge
from autotile.core.model import Measurement, Outcome, Trial
from autotile.core.statistics import Interval
from autotile.errors import InputError, ToolchainError
from autotile.settings import child_environment
from autotile.tuning.verifying import CandidateCheck


class TestOccupancy:
    def test_registers_count_and_a_person_sees_which_limit_binds(self, run):
        words = ["--threads", "256", "--registers", "128", "--device", "h200"]
        found = run("explain", *words, "--json").document
        assert (found["blocks_per_sm"], found["limited_by"], found["occupancy"]) == (2, ["registers"], 0.25)
        words = ["--threads", "1024", "--registers", "32", "--smem", "8192", "--device", "rtx-3060"]
        answer = run("explain", *words)
        lines = {line.split("  ")[0]: line for line in answer.out.splitlines()}
        assert "binds" in lines["threads"]
        assert "binds" not in lines["registers"]
        assert "8,192 B + 1,024 B reserved" in lines["shared memory"]
        assert "66.7 %: 1 block on an SM, 32 of 48 warps; limited by threads" in answer.out

    def test_the_device_is_said_where_there_is_none_and_where_it_is_another(self, run, monkeypatch):
        monkeypatch.setattr("autotile.api.targets.device_count", lambda: 0)
        answer = run("explain", "--threads", "32", "--json")
        assert answer.document["device"] == {"name": "NVIDIA H200", "source": "profile"}
        assert "no CUDA device here: the answer is for the NVIDIA H200" in answer.err
        monkeypatch.setattr("autotile.api.targets.device_count", lambda: 2)
        run("explain", "--threads", "32", "--device", "2").is_refused("there are 0 to 1")


def test_every_stage_of_a_space_is_counted_in_json_and_for_a_person(run, scale_toml):
    found = run("space", scale_toml, "n=100", "--device", "h200", "--json").document
    assert (found["kernel"], found["combinations"]) == ("scale", 12)
    assert found["rules"] == [{"name": "enough_blocks", "remaining": 3}]
    assert (found["limits"][-1], found["valid"]) == ({"name": "occupancy", "remaining": 3}, 3)
    assert found["parameters"] == {"THREADS": [32, 64, 128, 256], "WORK": [1, 2, 4]}
    assert found["seconds"] >= 0
    assert run("space", scale_toml, "--device", "h200", "--json").document["problem"] == {"n": 4096}
    shown = run("space", scale_toml, "n=100", "--device", "h200").out
    assert "rule enough_blocks" in shown
    assert "3 valid configurations" in shown
    for name in ("matmul_naive", "matmul_tiled", "sgemm_2d"):
        assert run("space", name, "--device", "h200", "--json").document["valid"] > 0


NOT_FOR = "transpose_tma needs compute capability 9.0, but NVIDIA A100"
ROWS_APART = "has rows 252 bytes apart in the shape 64 x 63, expected a multiple of 16"
LARGE = ["matmul_tiled", "M=1000000", "N=1000000", "K=8", "--device=rtx-3060"]
TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"


class TestExplain:
    def test_parameters_and_sizes_may_be_mixed_and_have_defaults(self, run, scale_toml):
        found = run("explain", scale_toml, "THREADS=64", "n=1000", "WORK=2", "--device", "h200", "--json").document
        assert (found["config"], found["problem"]) == ({"THREADS": 64, "WORK": 2}, {"n": 1000})
        assert (found["valid"], found["fault"]) == (True, "")
        assert (found["geometry"]["grid"], found["geometry"]["threads"]) == ([8, 1, 1], 64)
        assert found["resources"]["registers"] > found["resources"]["spill_bytes"] == 0
        expected = {"blocks_per_sm": 32, "limited_by": ["threads", "blocks"], "compiled": True}
        assert found["occupancy"] == found["occupancy"] | expected
        found = run("explain", scale_toml, "--device", "h200", "--json").document
        assert found["config"] == {"THREADS": 128, "WORK": 1}

    def test_a_broken_rule_is_named(self, run, scale_toml):
        answer = run("explain", scale_toml, "THREADS=256", "n=100", "--device", "h200", "--json")
        assert (answer.code, answer.document["valid"]) == (1, False)
        assert "'enough_blocks' is broken" in answer.document["fault"]
        assert [c["name"] for c in answer.document["checks"] if not c["holds"]] == ["enough_blocks"]
        assert answer.document["resources"] is None
        assert answer.document["occupancy"]["compiled"] is False

    def test_a_kernel_that_takes_other_arguments_or_does_not_compile_is_explained_and_not_valid(self, run, scale_toml):
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text().replace("int n, float factor", "int n, float factor, short m"))
        answer = run("explain", scale_toml, "--device", "h200", "--json")
        assert answer.code == 1
        assert "takes 5 parameters, but 4 are declared" in answer.document["fault"]
        template.write_text("this is no CUDA\n")
        answer = run("explain", scale_toml, "--device", "h200", "--json")
        found = answer.document
        assert (answer.code, found["valid"]) == (1, False)
        assert found["fault"].startswith("it does not compile: scale.cu(1): error")
        assert [check["name"] for check in found["checks"] if not check["holds"]] == ["source"]
        assert found["not_compiled"] == "the compiler refuses it"
        assert found["occupancy"]["compiled"] is False
        shown = run("explain", scale_toml, "--device", "h200").out
        assert "verdict        it does not compile: scale.cu(1): error" in shown

    def test_without_a_compiler_what_is_known_is_said(self, run, scale_toml, monkeypatch):
        def missing(*_: object) -> None:
            raise ToolchainError("no NVRTC here")

        monkeypatch.setattr("autotile.api.inspection.compile_job", missing)
        found = run("explain", scale_toml, "--device", "h200", "--json").document
        assert (found["valid"], found["not_compiled"]) == (True, "no NVRTC here")
        shown = run("explain", scale_toml, "--device", "h200").out
        assert "valid, as far as is known without compiling" in shown

    def test_a_block_that_fits_nowhere_says_why(self, run):
        found = run("explain", "sgemm_2d", "BM=64", "--device", "g80", "--json").document
        (occupancy,) = [check["detail"] for check in found["checks"] if check["name"] == "occupancy"]
        assert occupancy.startswith("no block fits on an SM of GeForce 8800 GTX: 128 threads, at least 92 registers")
        assert occupancy.endswith("limited by registers")


class TestKernelsOfOneKindOfDevice:
    def test_flags_are_given_like_sizes(self, run, tmp_path):
        split = copy_kernel(tmp_path, "split")
        answer = run("explain", split, "TRANS_B=1", "SPLIT_K=5", "M=100", "N=50", "K=64", "--device", "a100", "--json")
        found = answer.document
        assert (answer.code, found["fault"]) == (0, "")
        assert found["problem"] == {
            "M": 100, "N": 50, "K": 64, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 1, "OUT_FP32": 0
        }  # fmt: skip
        assert [(w["name"], w["shape"], w["bytes"]) for w in found["workspaces"]] == [
            ("partials", [5, 1, 100, 50], 4 * 5 * 100 * 50),
            ("counters", [1, 7, 4], 4 * 7 * 4),
        ]
        shown = run("explain", split, "SPLIT_K=1", "--device", "a100").out
        assert "partials: none for this configuration" in shown
        for value, said in (("2", "flag TRANS_B is 2"), ("yes", "TRANS_B is 'yes'")):
            run("space", split, f"TRANS_B={value}", "--device", "h200").is_refused(said)

    @pytest.mark.parametrize("command", ["space", "explain", "best"])
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([TRANSPOSE, "M=64", "N=64", "--device=a100"], NOT_FOR),
            ([TRANSPOSE, "M=64", "N=63", "--device=h200"], ROWS_APART),
            (LARGE, "its arrays take 3,725.3 GiB, NVIDIA GeForce RTX 3060 has 12.0 GiB"),
        ],
        ids=["device", "tensor map", "memory"],
    )
    def test_what_a_device_cannot_hold_or_run(self, run, command, words, said):
        answer = run(command, *words)
        assert answer.code == (1 if command == "explain" else 2)
        assert said in answer.err + answer.out


class TestSurvey:
    def test_resources_configurations_and_failures_with_the_words_of_the_compiler(self, run, scale_toml):
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--limit", "3")
        assert answer.code == 0
        for words in ("12 valid, 12 compiled", "registers, a thread", "occupancy, %", "3 configurations of the least"):
            assert words in answer.out
        assert answer.out.count("THREADS=") == 3
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text() + "\n#error no configuration compiles\n")
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200")
        assert answer.code == 1
        assert "no configuration compiles" in answer.out
        assert "0 (0.0 %); 12 cannot be launched" in answer.out
        assert answer.out.count("THREADS=") == 1

    def test_json_and_csv_have_every_configuration_and_a_page_stands_beside_the_table(self, run, scale_toml, tmp_path):
        path = tmp_path / "survey.csv"
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--json", "--csv", path)
        document = answer.document
        assert (document["valid"], document["compiled"], document["usable"]) == (12, 12, 12)
        assert document["device"] == {"name": "NVIDIA H200", "source": "profile"}
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        assert [row["registers_per_thread"] for row in rows] == [
            str(entry["registers_per_thread"]) for entry in document["configurations"]
        ]
        named = {"param.THREADS", "param.WORK", "static_smem_bytes", "dynamic_smem_bytes", "spill_store_bytes", "waves"}
        assert {*named, "outcome", "occupancy_fraction", "estimated_us"} < {*rows[0]}
        assert "wrote 12 configurations to" in answer.err
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--sample", "2", "--csv", "-")
        assert len(list(csv.reader(io.StringIO(answer.out)))) == 3
        pytest.importorskip("plotly", reason="the extra autotile[report] is not installed")
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "-o", tmp_path / "survey.html")
        assert "12 valid" in answer.out
        assert f"wrote {tmp_path / 'survey.html'}" in answer.err
        assert (tmp_path / "survey.html").read_text().startswith("<!DOCTYPE html>")
        assert run("space", "--compile", scale_toml, "-o", "/no/such/folder/survey.html").code == 2

    def test_ctrl_c_shows_what_there_is(self, scale_toml, tmp_path):
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text() + f"\n// {tmp_path}\n#include <cuda/std/atomic>\n")  # in no cache yet
        words = [sys.executable, "-m", "autotile", "space", "--compile", str(scale_toml), "n=4096", "--device", "h200"]
        settings = {"env": {**child_environment(), "AUTOTILE_CACHE": str(tmp_path / "cache")}, "text": True}
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with heeded_interrupts(), subprocess.Popen([*words, "--workers", "1"], **settings) as command:
            wait_until(lambda: list((tmp_path / "cache").rglob("*.cubin")))
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=120)
        assert command.returncode == 130, err
        assert "12 valid" in out
        assert "the same command goes on from there" in err
        assert "Traceback" not in err


CONFIG = {"THREADS": 128, "WORK": 1}
TIME = Measurement(5.0, 4.9, 5.1)


def trial(outcome=Outcome.OK, reason=""):
    return Trial(CONFIG, outcome, reason, "finals", measurement=TIME if outcome is Outcome.OK else None)


@pytest.fixture
def answer(monkeypatch, run, scale_toml, tmp_path, device):
    """Run the command on a machine whose GPU comes to a given judgement."""
    (tmp_path / "mine.cu").write_text("// rewritten")

    def command(*words, candidate=None, speedup=None, notices=()):
        asked = {}

        def judge(kernel, rewritten, problem, **given):
            asked.update(given, problem=problem, source=rewritten.source)
            return CandidateCheck(problem, device, candidate or trial(), trial(), speedup, 75, notices)

        monkeypatch.setattr(verification, "judge", judge)
        found = run("verify", tmp_path / "mine.cu", "n=1000", "--like", scale_toml, *words)
        return found, asked

    return command


class TestExitCodesOfVerify:
    def test_of_a_right_and_of_a_wrong_candidate(self, answer):
        for speedup, code, verdict in (
            (Interval(1.2, 1.1, 1.3), 0, "faster"),
            (Interval(0.99, 0.98, 1.01), 0, "equal"),
            (Interval(0.9, 0.8, 0.95), 3, "slower"),
            (None, 0, "right"),
        ):
            found, _ = answer("--json", speedup=speedup)
            assert (found.code, found.document["verdict"], found.document["right"]) == (code, verdict, True)
            assert (found.document["candidate"]["time_us"], found.document["winner"]["tier"]) == (5.0, "default")
            if speedup is not None:
                assert found.document["speedup"] == {"ratio": speedup.value, "interval": [speedup.low, speedup.high]}
        found, _ = answer("--json", candidate=trial(Outcome.OUT_OF_BOUNDS, "wrote 1 word outside y"))
        assert (found.code, found.document["verdict"]) == (1, "wrong")
        candidate = found.document["candidate"]
        assert (candidate["outcome"], candidate["reason"]) == ("out_of_bounds", "wrote 1 word outside y")

    def test_of_bad_input_and_without_a_gpu(self, answer, run, scale_toml, monkeypatch):
        for words, message in (
            (("--config", "THREAD=1"), "'THREAD' is not a parameter of scale"),
            (("--config", "THREADS"), "expected NAME=VALUE"),
            (("--verify-problem", "m=3"), "scale has no size 'm'"),
        ):
            answer(*words)[0].is_refused(message)
        monkeypatch.setattr(verification, "judge", judge)
        found = run("verify", scale_toml.with_suffix(".cu"), "--like", scale_toml)
        found.is_refused()
        assert "no CUDA device" in found.err or "must run on a GPU" in found.err


def test_what_is_asked_for_reaches_the_judge(answer):
    words = ("--config", "WORK=4", "--verify-problem", "n=7", "--sanitize", "--l2", "hot")
    _, asked = answer(*words)
    assert (asked["configs"], asked["problem"].sizes) == (({"THREADS": 128, "WORK": 4}, CONFIG), {"n": 1000})
    assert (asked["source"], asked["options"].verify_sizes) == ("// rewritten", ({"n": 7},))
    assert (asked["options"].sanitize, asked["options"].l2) == (True, "hot")


def test_a_person_reads_the_verdict_first(answer):
    found, _ = answer(speedup=Interval(1.2, 1.1, 1.3), notices=("no second inputs",))
    assert "verdict    right and faster than the winner: 1.200x, 95 % interval 1.100x to 1.300x" in found.out
    assert "verified   75 times, two launches each" in found.out
    assert "no second inputs" in found.err


@pytest.mark.parametrize("name", ["blur", "printf", "blockDim", "size_t", "NULL", "x"])
def test_the_files_of_a_new_kernel_of_any_name_are_valid(name, tmp_path):
    made = autotile.new(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.cu", f"{name}.toml", f"test_{name}.py"}
    assert autotile.space(made.file, device="h200").valid == 19
    explanation = autotile.explain(made.file, device="h200")
    assert explanation.fault == ""
    assert explanation.resources.registers > 0
    written = [Path(made.document[name]) for name in ("source", "space", "test")]
    assert not any("NAME" in path.read_text() for path in written)


def test_the_test_of_a_new_kernel_passes(tmp_path):
    autotile.new("blur", tmp_path)
    done = python("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_the_name_of_a_new_kernel_is_an_identifier_that_is_free_and_the_folder_exists(tmp_path):
    for existing in ("blur.cu", "blur.toml", "test_blur.py"):
        (tmp_path / existing).write_text("mine")
        with pytest.raises(InputError, match=f"{existing} exists already, and nothing is overwritten"):
            autotile.new("blur", tmp_path)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "mine"}
        (tmp_path / existing).unlink()
    for name in ("", "2d", "a-b", "a b", "../up", "int", "class", "_hidden", "n" * 65, "é"):
        with pytest.raises(InputError, match="name"):
            autotile.new(name, tmp_path)
    with pytest.raises(InputError, match="is not a folder; make it first"):
        autotile.new("blur", tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_new_says_what_it_wrote(run, tmp_path):
    answer = run("new", "blur", "--in", tmp_path, "--json")
    assert answer.code == 0
    assert answer.document == {
        "name": "blur",
        "source": str(tmp_path / "blur.cu"),
        "space": str(tmp_path / "blur.toml"),
        "test": str(tmp_path / "test_blur.py"),
    }
    shown = run("new", "sharpen", "--in", tmp_path)
    assert f"autotile tune {tmp_path / 'sharpen.toml'} N=16777216" in shown.out
