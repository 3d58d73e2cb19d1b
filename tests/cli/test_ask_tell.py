"""``autotile tune --ask-tell``: one JSON object a line, and ``--try``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autotile.cli.application import app
from autotile.cli.ask_tell import MAX_LINE_BYTES
from autotile.settings import child_environment


@pytest.fixture
def converse(scale_toml, recording):
    """Send lines; return the exit code and the answers."""

    def send(*lines):
        sent = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        words = ["tune", str(scale_toml), "n=1048576", f"--replay={recording}", "--ask-tell"]
        result = CliRunner().invoke(app, words, input=sent, prog_name="autotile", catch_exceptions=False)
        return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]

    return send


class TestProtocol:
    def test_the_first_line_describes_the_session_and_the_last_is_the_result(self, converse):
        code, (ready, result) = converse()
        assert code == 0
        assert ready["ready"]["parameters"] == {"THREADS": [32, 64, 128, 256], "WORK": [1, 2, 4]}
        assert ready["ready"]["default"] == {"THREADS": 128, "WORK": 1}
        assert ready["ready"]["space"] == {"combinations": 12, "valid": 12}
        assert "replayed from measurements recorded on NVIDIA H200" in ready["ready"]["notices"][0]
        assert result["result"]["winner"]["config"] == {"THREADS": 128, "WORK": 1}
        assert "autotile.get_best_kernel(" in result["result"]["call"]

    def test_each_request_has_one_answer(self, converse):
        evaluated = [{"THREADS": 256, "WORK": 4}, {"THREADS": 48}]
        code, answers = converse(
            {"id": "a", "ask": 2},
            {"evaluate": evaluated},
            {"id": 7, "tell": [{"config": {"WORK": 2}, "time_us": 3}, {"config": {"THREADS": 32}, "time_us": None}]},
            {"finish": True},
            {"ask": 1},
        )
        assert code == 0
        _, asked, trials, told, result = answers
        assert asked["id"] == "a"
        assert len(asked["asked"]) == 2
        assert "id" not in trials
        assert [trial["outcome"] for trial in trials["trials"]] == ["ok", "infeasible"]
        assert trials["trials"][0]["time_us"] == pytest.approx(1000 / 256 + 0.5)
        assert told == {"id": 7, "told": 2}
        assert result["result"]["winner"]["config"] == {"THREADS": 256, "WORK": 4}

    def test_a_bad_line_is_an_error_and_the_session_goes_on(self, converse):
        cases = [
            (b"nonsense\n", "DataError", "JSON is malformed"),
            (b"\xff\xfe\n", "DataError", "malformed"),
            (b"[" * 5000 + b"\n", "DataError", ""),
            (b'{"evaluate": ["' + b"x" * MAX_LINE_BYTES + b'"]}\n', "DataError", "more than 1048576 bytes"),
            ({"ask": 1, "finish": True}, "DataError", "got ask and finish"),
            ({"id": 1}, "DataError", "got none"),
            ({"finish": False}, "DataError", "got none"),
            ({"ask": "two"}, "DataError", "ask"),
            ({"asks": 2}, "DataError", "unknown field asks"),
            ({"ask": 0}, "InputError", "n is 0"),
            ({"evaluate": [{"THREAD": 1}]}, "ConfigError", "did you mean 'THREADS'"),
            ({"evaluate": [{}] * 1001}, "InputError", "at most 1000"),
            ({"tell": [{"config": {"THREADS": 48}, "time_us": 1}]}, "InputError", "not in the space"),
        ]
        numbered = {"id": 3, "ask": "two"}
        code, answers = converse(*(line for line, _, _ in cases), numbered, b'{"ask": 1}')  # a last line needs no end
        assert code == 0
        _, *errors, last, asked, _ = answers
        for (line, kind, message), found in zip(cases, errors, strict=True):
            assert found["error"]["kind"] == kind, line
            assert message.lower() in found["error"]["message"].lower()
        assert last["id"] == 3
        assert asked["asked"] == [{"THREADS": 128, "WORK": 1}]

    def test_a_program_that_stops_reading_loses_nothing(self, run, scale_toml, recording):
        words = ["tune", str(scale_toml), "n=1048576", f"--replay={recording}", "--ask-tell"]
        process = subprocess.Popen(
            [sys.executable, "-m", "autotile", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        assert b'"ready"' in process.stdout.readline()
        process.stdout.close()
        _, errors = process.communicate(b'{"evaluate": [{"THREADS": 256, "WORK": 4}]}\n', timeout=120)
        assert b"Traceback" not in errors
        assert process.returncode == 0
        served = run("best", scale_toml, "n=1048576", "--device=h200", "--json")
        assert served.document["config"] == {"THREADS": 256, "WORK": 4}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=7), inner, max_size=3),
    max_leaves=6,
)
requests = st.dictionaries(st.sampled_from(["ask", "evaluate", "tell", "id", "x"]), values, max_size=3)


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=8, max_size=30))
def test_any_objects_are_answered(converse, sent):
    code, answers = converse(*sent)
    assert code == 0
    assert len(answers) == len(sent) + 2
    assert "result" in answers[-1]


def test_named_configurations_are_tried_and_shown(tune):
    answer = tune("--try", "THREADS=32,WORK=4", "--try", "WORK=2", "--trials", "6", "--json")
    assert [one["outcome"] for one in answer.document["tried"]] == ["wrong_result", "ok"]
    assert answer.document["tried"][1]["config"] == {"THREADS": 128, "WORK": 2}
    shown = tune("--try", "WORK=2", "--trials", "6")
    assert "tried" in shown.out
    assert "THREADS=128 WORK=2: 8.8" in shown.out
