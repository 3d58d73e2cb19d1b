"""Names and reasons of any characters: no file elsewhere is touched, and no terminal sees a control character."""

import json
import os
import shutil
import sqlite3
import subprocess
import unicodedata
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from child_python import python
from feature_kernels import space_text, write_call
from msgspec import structs
from stored_runs import add_trial, record_miss, start_run

from autotile.core.device import device_profile
from autotile.core.model import Outcome, Trial
from autotile.core.text import shown_text
from autotile.cuda.compiler import CompileJob
from autotile.database.database import Database
from autotile.database.learned import save_model
from autotile.exchange.cpp_header import literal
from autotile.settings import data_folder
from autotile.tuning.cluster import compilers

NAMES = ["../x", "/tmp/abs", "a/b", "..", ".", "", "a\0b", "x" * 900, "a\nb", "NVIDIA H200"]


def stored(folder: Path, gpu_name: str, dtype: str = "float32") -> Path:
    path = folder / "models.db"
    model = json.loads((data_folder("tuned") / "models/nvidia-h200.matmul.float32.json").read_text())
    with Database.open(str(path)) as opened:
        save_model(opened, "matmul", dtype, structs.replace(device_profile("h200"), name=gpu_name), model)
    return path


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in NAMES), ("H200", "../../x")])
def test_models_are_written_in_their_folder(run, tmp_path, name, dtype):
    database = stored(tmp_path, name, dtype)
    folder = tmp_path / "deep" / "er" / "out"
    answer = run("export", "matmul", "-o", folder, "--db", database, "--json")
    assert answer.code == 0, answer.err
    (file,) = answer.document["files"]
    assert Path(file).parent == folder
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("models.db")]
    assert {path.parent for path in written} == {folder}
    if name == "NVIDIA H200":
        assert [path.name for path in folder.iterdir()] == ["nvidia-h200.matmul.float32.json"]


def test_a_link_in_the_folder_is_not_followed(run, tmp_path):
    database = stored(tmp_path, "NVIDIA H200")
    target, folder = tmp_path / "precious", tmp_path / "out"
    folder.mkdir()
    (folder / "nvidia-h200.matmul.float32.json").symlink_to(target)
    run("export", "matmul", "-o", folder, "--db", database).is_refused("symbolic link")
    assert not target.exists()
    target.write_text("kept")
    run("export", "matmul", "-o", folder, "--db", database).is_refused("symbolic link")
    assert target.read_text() == "kept"


def test_an_operation_is_not_named_like_a_path(run, tmp_path):
    file = tmp_path / "sums.toml"
    for name in ("../sums", "/tmp/sums", "a/b", "..", ".", "", "a\\u0000b", "a\\nb", "x y"):
        file.write_text(space_text("sums").replace('name = "sums"', f'name = "{name}"'))
        run("best", file, "ROWS=64", "N=4096", "--device", "h200").is_refused("name")


def test_the_kernel_of_a_captured_call_is_a_name(run, tmp_path):
    for name in ("../k", "/tmp/k.toml", "a/b", "..", "", "k\n", "k\0"):
        run("tune", "--captured", write_call(tmp_path, name, sizes={"n": 64})).is_refused(
            "not the document of a captured call"
        )


def test_a_machine_of_the_farm_takes_only_a_digest_for_a_folder(monkeypatch):
    handled: list[str] = []
    plugin = SimpleNamespace(handle=lambda *given, files: handled.append(given[4]))
    worker = SimpleNamespace(plugins={compilers.CompilerPlugin.name: plugin})
    monkeypatch.setattr(compilers.distributed, "get_worker", lambda: worker)
    job = asdict(CompileJob("", "", "/k.cu", "k", "sm_90", ()))
    for digest in ("a" * 64, "../x", "/tmp/abs", "a" * 63, "a" * 64 + "\n", ".."):
        answer = compilers.compile_remotely(json.dumps(["", "", job, 1.0, digest]), {})
        assert (b"expected str matching regex" in answer) == (digest != "a" * 64)
    assert handled == ["a" * 64]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_name_stays_in_its_cpp_string(tmp_path):
    names = ['a"; int x; //', 'a\nb"', "a\\", "tab\t", "é", "\u2028", "\ud800", "\x7f"]
    texts = list(map(literal, names))
    assert all(text.isprintable() for text in texts)
    source, program = tmp_path / "one.cpp", tmp_path / "one"
    written = "\n".join(f"{{ const char s[] = {text}; fwrite(s, 1, sizeof s, stdout); }}" for text in texts)
    source.write_text(f"#include <cstdio>\nint main() {{\n{written}\n}}")
    subprocess.run(["g++", "-o", program, source], check=True)
    *printed, _ = subprocess.run([program], capture_output=True, check=True).stdout.split(b"\0")
    assert printed == [name.encode(errors="surrogatepass") for name in names]


@pytest.mark.parametrize(
    "command",
    [
        *("export --format bundle matmul_tiled --arch sm_90 -o", "list --csv", "tune matmul_tiled --captured"),
        *("tune --plan", "tune matmul_tiled M=2048 N=2048 K=2048 --replay", "verify matmul_tiled --like"),
        *("report matmul_tiled -o", "report", "import --format kernel-tuner", "new k --in", "space"),
        *("export --format plan --captured", "export --format plan -o"),
    ],
)
def test_a_path_that_cannot_be_used_is_an_error_with_words(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for path in ("/dev/null", "/proc/self/mem", "/proc/self/status", "x" * 3000, "loop", "loop/x", "a\0b"):
        answer = run(*command.split(), path)
        assert answer.code in (0, 1, 2), answer
        assert "Traceback" not in answer.err
        assert "please report" not in answer.err


ODD = "a\nb\x1b[31m\x1b]0;t\x07\u202ec\u2066\u200b\r\x9b31m\u2028"
"""A line break, sequences of a terminal, directions, an invisible character, and a break of Unicode."""


def is_plain(text: str) -> bool:
    return all(one == "\n" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for one in text)


@pytest.fixture
def odd(tmp_path, key):
    odd_key = structs.replace(key, kernel=ODD, gpu_name=f"GPU {ODD}", sizes={f"N{ODD}": 7}, nvrtc_version=ODD)
    with Database.open(tmp_path / "tuning.db") as database:
        study = database.study(odd_key, None)
        run = start_run(database, study, sampler=ODD, host=ODD)
        trial = Trial({f"BM{ODD}": ODD}, Outcome.COMPILE_FAILED, f"#error {ODD}", "compile")
        add_trial(database, study, run, trial)
        add_trial(database, study, run, replace(trial, reason="\x1b[2J first\nsecond"))
        record_miss(database, odd_key.problem, odd_key.gpu_name, "default")
    return tmp_path / "tuning.db"


@pytest.mark.usefixtures("odd")
def test_a_table_is_not_broken_and_the_terminal_sees_no_control(run):
    for command in (["list"], ["trials", ODD], ["list", "--misses"], ["db", "check"]):
        answer = run(*command)
        assert is_plain(answer.out)
        assert is_plain(answer.err)
        assert "\\x1b" in answer.out or command == ["db", "check"]
        assert command != ["list"] or answer.out.count("\n") == 3  # the headings and one row
        document = run(*command, "--json").out
        assert document.isascii()
        assert json.loads(document) is not None


def test_what_is_escaped():
    assert shown_text("a\nb\t\x1b[0m") == "a b \\x1b[0m"
    assert shown_text("a  \r\n  b\tc") == "a b c"
    assert shown_text("a\r\nb\tc\x00", lines=True) == "a\nb   c\\x00"
    assert shown_text("a\rb", lines=True) == "a\\rb"
    assert shown_text("\u202e\ud800\u2028\xa0") == "\\u202e\\ud800\\u2028\\xa0"
    assert shown_text("Größe \u03bcs \u4e2d \U0001f600 x=1") == "Größe \u03bcs \u4e2d \U0001f600 x=1"
    assert is_plain(shown_text("".join(map(chr, range(0x3000)))))


def test_bad_rows_are_remarked_once_and_listed_and_an_argument_may_be_no_text(run, odd):
    with closing(sqlite3.connect(odd)) as connection, connection:
        connection.execute("UPDATE trials SET config = '[' WHERE id = 1")
    answer = run("trials", ODD, "--json")
    assert [trial["trial"] for trial in answer.document] == [2]
    assert answer.err.count("trials 1: config: expected object") == 1
    found = run("db", "check", "--json")
    assert found.code == 1
    assert found.document["bad_rows"] == [
        {"table": "trials", "id": 1, "field": "config", "reason": "expected object, got something that is not JSON"}
    ]
    shown = run("db", "check")
    assert (shown.code, "-o NEW.db" in shown.out) == (1, True)
    done = python("-m", "autotile", "list", os.fsdecode(b"\xff"), "--json", env={"AUTOTILE_DB": str(odd)})
    assert done.stdout.isascii()
    assert set(json.loads(done.stdout)["error"]) >= {"kind", "message"}
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
