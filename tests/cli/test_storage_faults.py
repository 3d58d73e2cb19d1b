"""Disks that are full, read-only or on a network, files that are damaged, foreign or from the future, broken streams.

Each command says in one message what is wrong and what to do, exits with the right code, and loses nothing.
"""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from answers import Answer
from child_python import python
from interrupts import heeded_interrupts
from small_disk import autotile, on_small_disk
from stored_runs import change_file, start_run

from autotile.cli.application import CommandLine
from autotile.core.model import Resources
from autotile.cuda.compiler import Compilation, CompiledFunction, CubinCache
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import InputError
from autotile.settings import child_environment

FULL = "the disk is full"
UNWRITTEN = "error: No space left on device: the answer cannot be written; what was stored is kept"
WINNER = '"THREADS": 256,\n      "WORK": 4'
SIZE = "n=1048576"


def refusal(answer: Answer | tuple[int, str, str], *, expected: int | None = 2) -> str:
    """The one message of a command that refused, with whatever code if that is None."""
    code, out, err = (answer.code, answer.out, answer.err) if isinstance(answer, Answer) else answer
    assert code == (code if expected is None else expected), err
    (message,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err + out
    return message


def stored(location: Path | str) -> int:
    with Database.open(location) as database:
        assert check_database(database).ok
        return len(database.trials(1, phase="search"))


def refusing(number: int) -> Callable[..., None]:

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def words(scale_toml, recording):
    """A command that tries all twelve configurations, in an order that the results decide."""
    return ["tune", str(scale_toml), SIZE, f"--replay={recording}", "--sampler", "tpe", "--workers", "1", "--json"]


@pytest.fixture
def cache_file(run, tuned, scale_toml, tmp_path):
    path = tmp_path / "cache.json"
    assert run("export", scale_toml, SIZE, "--db", tuned, "--format", "kernel-tuner", "-o", path).code == 0
    return path


@pytest.fixture
def commands(words, cache_file, scale_toml, tmp_path):
    return {
        "list": ["list"],
        "trials": ["trials", str(scale_toml), SIZE],
        "best": ["best", str(scale_toml), SIZE],
        "check": ["db", "check"],
        "export": ["export", str(scale_toml), SIZE, "--format", "t4", "-o", str(tmp_path / "t4.json")],
        "import": ["import", str(cache_file)],
        "tune": words,
    }


READING = ("list", "trials", "best", "check", "export")
WRITING = ("import", "tune")


class TestFullDisk:
    def test_one_that_fills_while_tuning(self, words, tmp_path):
        disk, kept = tmp_path / "disk", tmp_path / "kept.db"
        location = disk / "tuning.db"
        tune = autotile(*words, "--db", location, TMPDIR=tmp_path)
        copied = [["copy", f"{location}{end}", f"{kept}{end}"] for end in ("", "-wal")]
        first, again, *_, resumed = on_small_disk(disk, "220k", tune, tune, *copied, ["size", "4m"], tune)
        assert FULL in refusal(first, expected=1)
        assert "trials of this session are kept in" in refusal(first, expected=1)
        assert FULL in refusal(again, expected=None)
        trials = stored(kept)
        assert 0 < trials < 12
        assert resumed[0] == 0
        assert f'"resumed": {trials},' in resumed[1]
        assert WINNER in resumed[1]

    def test_one_without_room_for_a_database(self, words, tmp_path):
        disk = tmp_path / "disk"
        tune, another = (autotile(*words, "--db", disk / name, TMPDIR=tmp_path) for name in ("a.db", "b.db"))
        small, _, larger, _, *done = on_small_disk(
            disk, "4k", tune, ["size", "60k"], another, ["size", "4m"], tune, another
        )
        for refused in (small, larger):
            assert FULL in refusal(refused, expected=None)
        for code, out, _ in done:
            assert code == 0
            assert '"resumed": 0,' in out

    def test_one_that_filled_up_can_be_read(self, commands, tuned, tmp_path, scale_toml):
        disk = tmp_path / "disk"
        location = disk / "tuning.db"
        export = ["export", str(scale_toml), SIZE, "--format", "t4", "-o", str(disk / "old.json")]
        reading = [autotile(*commands[name], "--db", location) for name in READING]
        writing = [autotile(*commands["tune"], "--trials", "13", "--fresh"), autotile(*commands["import"])]
        elsewhere = autotile(*commands["tune"], "--trials", "2", AUTOTILE_CACHE=tmp_path / "cold", TMPDIR=disk)
        _, old, _, temporary, *done, over, kept = on_small_disk(
            disk,
            "400k",
            ["copy", str(tuned), str(location)],
            autotile(*export, "--db", location),
            ["fill"],
            elsewhere,
            *reading,
            *[[step[0], [*step[1], "--db", str(location)], step[2]] for step in writing],
            autotile(*export, "--db", location),
            ["text", str(disk / "old.json")],
        )
        assert (old[0], temporary[0]) == (0, 0), temporary[2]
        assert [code for code, _, _ in done[: len(READING)]] == [0] * len(READING)
        for answer in done[len(READING) :]:
            assert FULL in refusal(answer)
        assert "No space left on device" in refusal(over)
        assert kept == (tmp_path / "t4.json").read_text()

    def test_of_cubins_blames_no_candidate(self, words, tmp_path):
        disk, location = tmp_path / "disk", tmp_path / "tuning.db"
        tune = autotile(*words, "--db", location, AUTOTILE_CACHE=disk)
        full, listed, _, resumed = on_small_disk(
            disk, "40k", tune, autotile("list", "--json", "--db", location), ["size", "4m"], tune
        )
        message = refusal(full)
        assert "cannot write the cubin cache" in message
        assert "No space left on device; make room, or set AUTOTILE_CACHE" in message
        assert "compile_failed" not in listed[1]
        assert resumed[0] == 0
        assert WINNER in resumed[1]
        assert stored(location) == 12

    @pytest.mark.usefixtures("tuned")
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("list", [UNWRITTEN]),
            ("list --json", [UNWRITTEN]),
            ("--help", ["error: No space left on device: the help cannot be written"]),
            (
                "space nowhere.toml --json",
                [
                    "error: no search-space file 'nowhere.toml': expected the path of a .toml file that exists",
                    UNWRITTEN,
                ],
            ),
        ],
    )
    def test_of_the_answer(self, words, told):
        with Path("/dev/full").open("w") as full:
            done = python("-m", "autotile", *words.split(), stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr.splitlines()) == (1, told)

    def test_a_file_that_may_not_grow(self, words, tmp_path):
        """A limit on the size of files is another error to SQLite, and still one message."""
        location = tmp_path / "tuning.db"
        limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (140_000, 140_000))\n"
        code = f"{limited}from autotile.cli.application import main; sys.argv[0] = 'autotile'; main()"
        done = python("-c", code, *words, "--db", location, env={"TMPDIR": str(tmp_path)})
        message = refusal((done.returncode, done.stdout, done.stderr), expected=1)
        assert "reading from or writing to the disk failed" in message
        assert 0 <= stored(location) < 12


class TestCubinCache:
    def test_one_that_can_only_be_read_serves_what_it_has_and_one_must_be_made(self, run, words, tmp_path, monkeypatch):
        assert run(*words).code == 0
        monkeypatch.setattr(os, "utime", refusing(errno.EROFS))
        monkeypatch.setattr("autotile.cuda.compiler.tempfile.mkstemp", refusing(errno.EROFS))
        assert run(*words, "--db", tmp_path / "another.db").code == 0
        (tmp_path / "file").touch()
        monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "file"))
        assert "set AUTOTILE_CACHE to a folder elsewhere" in refusal(run(*words))

    def test_one_that_cannot_be_written(self, tmp_path, monkeypatch):
        cache = CubinCache(tmp_path, 10**6)
        compilation = Compilation(b"cubin", {"f": CompiledFunction("f", Resources(32, 0, 0, 0, 0))})
        monkeypatch.setattr("autotile.cuda.compiler.tempfile.mkstemp", refusing(errno.EACCES))
        with pytest.raises(InputError, match="Permission denied; change its permissions, or set AUTOTILE_CACHE"):
            cache.put("key", compilation)

    def test_one_that_is_deleted_in_a_session_is_made_anew(self, tmp_path):
        cache = CubinCache(tmp_path / "cache", 10**6)
        shutil.rmtree(tmp_path / "cache")
        stored = cache.put("key", Compilation(b"cubin", {"f": CompiledFunction("f", Resources(32, 0, 0, 0, 0))}))
        assert cache.get("key") == stored
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


class TestReadOnlyDisk:
    def test_it_can_be_read_but_not_written(self, commands, tuned, tmp_path):
        disk = tmp_path / "disk"
        steps = [autotile(*commands[name], "--db", disk / "tuning.db") for name in (*READING, *WRITING)]
        cubins = autotile(*commands["tune"], "--db", tmp_path / "mine.db", AUTOTILE_CACHE=disk)
        copied = ["copy", str(tuned), str(disk / "tuning.db")]
        _, _, *done, refused = on_small_disk(disk, "4m", copied, ["read-only"], *steps, cubins)
        assert [code for code, _, _ in done[: len(READING)]] == [0] * len(READING)
        for answer in done[len(READING) :]:
            assert "cannot write" in refusal(answer)
        assert "cannot create the cubin cache" in refusal(refused)

    def test_a_log_that_was_left_there_is_not_passed_over(self, commands, tuned, tmp_path):
        """It may hold trials that the file lacks; to read them, SQLite must write."""
        disk = tmp_path / "disk"
        with Database.open(tuned) as database:
            start_run(database, 1, sampler="unfinished")
            copies = [["copy", f"{tuned}{end}", str(disk / f"tuning.db{end}")] for end in ("", "-wal")]
            steps = [autotile(*commands[name], "--db", disk / "tuning.db") for name in ("list", "check", "tune")]
            *_, listed, checked, told = on_small_disk(disk, "4m", *copies, ["read-only"], *steps)
        for answer in (listed, checked):
            assert "tuning.db-wal, which cannot be read in a folder that is not writable: copy both" in refusal(answer)
        assert "cannot write" in refusal(told)


def test_damage_is_told_and_left_alone_or_kept_aside(run, commands, tuned):
    before, damaged = tuned.read_bytes()[:20_000], tuned
    damaged.write_bytes(before)
    for name in ("list", "trials", "best", "export"):
        assert "the file is damaged" in refusal(run(*commands[name], "--db", damaged))
    answer = run(*commands["check"], "--db", damaged)
    assert answer.code == 1
    assert "malformed" in answer.out
    assert damaged.read_bytes() == before
    for name in WRITING:
        answer = run(*commands[name], "--db", damaged)
        assert answer.code == 0
        (kept,) = damaged.parent.glob("tuning.db.corrupt-*")
        assert f"was damaged: it is kept as {kept}" in answer.out + answer.err
        assert kept.read_bytes() == before
        kept.unlink()
        damaged.write_bytes(before)


def test_a_newer_schema_and_another_file_are_left_unchanged(run, commands, tuned, tmp_path):
    change_file(tuned, "UPDATE autotile_schema SET version_num = '0099'")
    notes = tmp_path / "notes.txt"
    notes.write_text("remember the milk")
    for path, said in ((tuned, "written by a newer autotile"), (notes, "is not a database, so it is left unchanged")):
        before = path.read_bytes()
        for words in commands.values():
            assert said in refusal(run(*words, "--db", path))
        assert path.read_bytes() == before


def test_a_database_on_a_network_is_kept_without_shared_memory(run, words, tuned, monkeypatch):
    for module in ("engine", "database"):
        monkeypatch.setattr(f"autotile.database.{module}.network_file_system", lambda path: "nfs4")
    answer = run(*words, "--db", tuned)
    assert answer.code == 0
    assert f"{tuned} lies on a network file system (nfs4)" in answer.err
    with closing(sqlite3.connect(tuned)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert stored(tuned) == 12


@pytest.fixture
def session(words):
    """The command in a process of its own."""
    return [sys.executable, "-m", "autotile", *words]


def shell(redirection: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with redirections that only a shell can make."""
    line = ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *words]
    return subprocess.run(line, env=child_environment(), capture_output=True, text=True, timeout=120, check=False)


def went_on(code: int, out: str) -> None:
    """Assert that a session went on to its end, and stored and printed everything."""
    assert code == 0
    assert json.loads(out)["winner"]["config"] == {"THREADS": 256, "WORK": 4}
    assert stored(os.environ["AUTOTILE_DB"]) == 12


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupter:
    def find_spec(self, name, *_):
        if name == {module!r}:
            {press}

sys.meta_path.insert(0, Interrupter())
sys.argv = ["autotile", *{words!r}]
runpy.run_module("autotile", run_name="__main__")
"""
"""Ctrl-C while a module is imported."""
PRESSED = "os.kill(os.getpid(), signal.SIGINT)"
IN_EXEC = f'exec("import os, signal; {PRESSED}")'
"""In a text that `exec` runs, as `dataclasses` does."""


@pytest.mark.parametrize(
    ("module", "words", "press"),
    [
        ("autotile.cli", "list", IN_EXEC),
        ("typer", "list --json", IN_EXEC),
        ("autotile.cli.output", "list --json", IN_EXEC),
        ("sqlalchemy", "list --json", IN_EXEC),
        ("autotile.kernel.library", "space sgemm_2d --json", PRESSED),
    ],
)
def test_ctrl_c_while_modules_are_imported(module, words, press):
    Database.open(os.environ["AUTOTILE_DB"]).close()
    with heeded_interrupts():
        done = python("-c", INTERRUPTED_IMPORT.format(module=module, words=words.split(), press=press))
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    if "--json" in words:
        assert json.loads(done.stdout) == {"error": {"kind": "CommandInterruptedError", "message": "interrupted"}}


@pytest.mark.parametrize("redirection", ["2>/dev/full", "<&- 2>&-"])
def test_a_session_goes_on_without_standard_error(session, redirection):
    done = shell(redirection, session)
    assert done.stderr == ""
    went_on(done.returncode, done.stdout)


def test_a_session_goes_on_after_the_reader_of_standard_error(session):
    reader, writer = os.pipe()
    os.close(reader)
    done = python(*session[1:], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    went_on(done.returncode, done.stdout)


def test_a_live_picture_goes_with_its_terminal(session):
    parent, terminal = os.openpty()
    process = subprocess.Popen(session, env=child_environment(), stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    os.read(parent, 1)  # the picture is shown
    os.close(parent)
    out, _ = process.communicate(timeout=120)
    went_on(process.returncode, out)


def test_a_session_without_standard_input_has_no_requests(scale_toml, recording):
    words = ["-m", "autotile", "tune", str(scale_toml), SIZE, f"--replay={recording}", "--ask-tell"]
    done = shell("<&-", [sys.executable, *words])
    assert [*map(list, map(json.loads, done.stdout.splitlines()))] == [["ready"], ["result"]]


def test_an_error_keeps_its_exit_code():
    for redirection in ("2>&-", "2>/dev/full"):
        done = shell(redirection, [sys.executable, "-m", "autotile", "space", "nowhere.toml", "--json"])
        assert (done.returncode, done.stderr) == (2, "")
        assert json.loads(done.stdout)["error"]["kind"] == "UnknownKernelError"


def test_an_answer_without_standard_output_is_an_error_after_the_session(session):
    done = shell(">&-", session)
    assert done.returncode == 1
    said = "error: Bad file descriptor: the answer cannot be written; what was stored is kept"
    assert done.stderr.splitlines()[-1] == said
    assert "Traceback" not in done.stderr
    assert stored(os.environ["AUTOTILE_DB"]) == 12


def test_ctrl_c_while_the_command_line_is_parsed(run, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommandLine, "parse_args", interrupted)
    answer = run("devices", "--json")
    assert (answer.code, answer.err) == (130, "error: interrupted\n")
    assert answer.document["error"]["kind"] == "CommandInterruptedError"
