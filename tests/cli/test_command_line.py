"""What holds for every command: help, options, words, exit codes, one document on standard output, a lean start."""

import errno
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
from child_python import python
from spec_samples import make_spec
from typer.testing import CliRunner

import autotile
from autotile import __main__ as main
from autotile import __version__
from autotile.cli.application import CommandLine, app, made_command, report_crash
from autotile.cli.commands import COMMANDS
from autotile.cli.commands import add_command as add
from autotile.cli.derivation import (
    REQUIRED,
    describe,
    in_options,
    parameter_of,
    read_assignments,
    read_values,
    split_assignments,
)
from autotile.cli.output import examples
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.settings import child_environment

HEAVY = ("optuna", "kernel_tuner", "cupy", "sqlalchemy", "torch")

NAMES = ["new", "tune", "best", "explain", "space", "list", "trials", "report", "watch", "verify", "export", "import"]
NAMES += ["worker", "devices", "doctor", "db", "db check", "db path", "db merge", "db diff", "db clean"]


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, with its full name; groups too."""
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        yield name, command
        for word in getattr(command, "commands", ()):
            inner = command.get_command(None, word)
            if not inner.hidden:
                waiting.append((f"{name} {word}".strip(), inner))


def test_a_command_is_made_without_the_others(run, monkeypatch):
    made = []
    monkeypatch.setattr("autotile.cli.application.add_command", lambda app, name: made.append(name) or add(app, name))
    made_command.cache_clear()
    assert (run("db", "path").code, made) == (0, ["db"])


def test_help_and_the_packages_import_no_function():
    code = (
        "import autotile.api, sys\nfrom autotile.cli.application import main\n"
        "for words in ([], ['tune'], ['export']):\n    sys.argv = ['autotile', *words, '--help']\n"
        "    try: main()\n    except SystemExit as end: assert end.code == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = python("-c", code, check=True)
    assert done.stdout.count("Usage: ") == 3
    assert not [name for name in done.stderr.split() if name.startswith(("autotile.api.", "numpy", *HEAVY))]


def test_every_command_and_option_has_help_and_every_command_a_function_of_its_name():
    assert {name for name, _ in commands()} == {"", *NAMES}
    for name, command in commands():
        assert command.help.strip().splitlines()[0].endswith("."), name
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name}"
        if not hasattr(command, "commands"):
            assert "Examples:" in command.epilog
            assert f"autotile {name}" in command.epilog
            named = "import_" if name == "import" else re.sub("[ -]", "_", name)
            assert named in dir(autotile)
            function = getattr(autotile, named)
            assert function.__name__ == named
            assert "Parameters\n" in function.__doc__ or not inspect.signature(function).parameters


def help_of(*words: str, application: typer.Typer = app, width: int = 100) -> list[str]:
    """Lines of a command's help, without colours and frames."""
    answer = CliRunner().invoke(application, [*words, "--help"], prog_name="autotile", env={"COLUMNS": str(width)})
    assert answer.exit_code == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", answer.stdout)
    return [line.strip("│ ") for line in plain.splitlines()]


@pytest.mark.parametrize(("name", "command"), [pytest.param(n, c, id=n) for n, c in commands() if n])
def test_help_is_shown_and_examples_keep_their_lines(name, command):
    lines = help_of(*name.split(), width=80)
    assert any(line.startswith(f"Usage: autotile {name} [OPTIONS]") for line in lines)
    if command.epilog:
        examples = [line.strip("\b ") for line in command.epilog.partition("\n\n")[0].splitlines()]
        first = lines.index("Examples:")
        assert lines[first : first + len(examples)] == examples


def panels(lines: list[str]) -> list[str]:
    return [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]


def test_commands_and_the_options_of_tune_are_in_panels():
    lines = help_of()
    assert panels(lines) == ["Options", "Everyday", "Results", "Machines and databases"]
    for name, command in commands():
        if name and " " not in name:
            (line,) = [line for line in lines if line.split()[:1] == [name]]
            assert line.endswith(command.help.splitlines()[0])
    lines = help_of("tune")
    assert panels(lines) == ["Arguments", "Options", "Search", "Measurement"]
    first = next(n for n, line in enumerate(lines) if line.startswith("╭─ Options"))
    assert sum(line.startswith("--") for line in lines[first : lines.index("Examples:")]) <= 16
    further = " ".join(lines[next(n for n, line in enumerate(lines) if line.startswith("Further options")) :])
    assert all(option in further for option in ("--seed", "--finals", "--max-configs", "--insecure"))


def test_an_old_name_says_the_new_one(run):
    for old, new in (("survey", "space --compile"), ("merge", "db merge")):
        answer = run(old, "sgemm_2d")
        assert (answer.code, answer.err) == (2, f"error: there is no command '{old}'; it is `autotile {new}`\n")


def test_texts_of_the_help_are_no_markup_and_fill_the_width():
    of_tune = ("NAME[,...]", "[FILE.npz]", "PARAM=VALUE[,...]")
    for name, metavars in (("tune", of_tune), ("verify", ("SIZE=N[,...]",)), ("export", ("KERNEL [SIZE=N]...",))):
        assert [shown for shown in metavars if shown not in "\n".join(help_of(name))] == []
    application = typer.Typer(cls=CommandLine)

    @application.callback()
    def group() -> None:
        """Hold [bold]one[/bold] command."""

    @application.command(epilog=examples("one [a-z]*", "one \\[b]"))
    def one(text: str = typer.Option("x", help="Take [red]any[/red] text \\.")) -> None:
        """Do [italic]one[/italic] thing.

        A paragraph of
        short
        lines with [brackets].
        """

    assert "Hold [bold]one[/bold] command." in help_of(application=application)
    lines = help_of("one", application=application)
    assert "A paragraph of short lines with [brackets]." in lines
    assert "Do [italic]one[/italic] thing." in lines
    assert any("Take [red]any[/red] text \\." in line for line in lines)
    assert lines[lines.index("Examples:") + 1 :][:2] == ["one [a-z]*", "one \\[b]"]


USAGE_ERRORS = [
    ["bogus"],
    ["--bogus"],
    ["space"],
    ["devices", "--bogus"],
    ["db", "bogus"],
    ["db"],
    [],
    ["list", "one", "two"],
    ["tune", "sgemm_2d", "--seed", "-1"],
    ["tune", "sgemm_2d", "--seed", "9" * 20],
    ["export", "--format", "recording", "--measure", "sgemm_2d", "--sample", "none"],
]


@pytest.mark.parametrize("words", USAGE_ERRORS)
def test_a_usage_error_says_where_the_help_is(run, words):
    run(*words, "--json").is_refused("--help`", kind="UsageError")


def test_an_interrupted_command_says_so_and_is_130(run, monkeypatch):
    def interrupted(_: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotile.api.inspection.resolve_device", interrupted)
    answer = run("explain", "--threads", "32", "--json")
    assert answer.code == 130
    assert answer.document == {"error": {"kind": "CommandInterruptedError", "message": "interrupted"}}
    assert run("explain", "--threads", "32").err == "error: interrupted\n"


def test_a_group_alone_shows_its_help_and_the_program_its_version(run):
    for words in ([], ["db"]):
        answer = run(*words)
        assert (answer.code, answer.err) == (0, "")
        assert "Usage: autotile" in answer.out
    assert run("--version").out == f"autotile {__version__}\n"


class TestCrash:
    @pytest.fixture
    def crash(self, run, monkeypatch, tmp_path):
        """Run a command that raises an exception; reports are written below the test's folder."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        def crashed(error: BaseException, *words: str) -> Any:
            def fail(*_: Any, **__: Any) -> None:
                raise error

            monkeypatch.setattr("autotile.api.inspection.resolve_device", fail)
            return run("explain", "--threads", "32", *words)

        return crashed

    def test_it_is_one_line_and_a_report(self, crash, tmp_path):
        for error in (ZeroDivisionError("by\nzero"), RecursionError(), MemoryError(), KeyError("x")):
            answer = crash(error)
            (report,) = tmp_path.glob("autotile-report-*.txt")
            assert (answer.code, answer.out) == (70, "")
            name = " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())
            assert answer.err == f"error: unexpected {name}; please report it with the file {report}\n"
            text = report.read_text()
            assert text.startswith(f"autotile {__version__}, Python 3.")
            assert "\ncommand: autotile explain --threads 32\n" in text
            assert "Traceback (most recent call last)" in text
            assert "in fail" in text
            assert report.stat().st_mode & 0o777 == 0o600
            report.unlink()

    def test_passwords_are_masked(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        for place in (
            "//me:s3cr%40et@host/db",
            "//me:s3cr@et/x@host/db",
            "//host/db?user=me&password=s3cret",
            "//host/db?secret=s3cret",
        ):
            url = f"postgresql:{place}"
            error = ValueError(f"cannot connect to {url!r}: s3cr@et, s3cret")
            message = report_crash(error, ["list", f"--db={url}"])
            (report,) = tmp_path.glob("autotile-report-*.txt")
            for text in (message, report.read_text()):
                assert "***" in text
                assert not re.search("s3cr%40et|s3cr@et/x", text)
                assert url not in text
            assert "s3cr%40et" not in url or "s3cr@et" not in message
            report.unlink()

    def test_without_room_for_a_report(self, crash, monkeypatch, tmp_path):
        def refuse(**_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
        answer = crash(ZeroDivisionError("zero"))
        assert answer.code == 70
        assert answer.err.endswith("zero; no report could be written: No space left on device\n")

    def test_an_error_of_the_system_that_names_a_file_or_none(self, crash):
        answer = crash(PermissionError(errno.EACCES, "Permission denied", "/some/file"), "--json")
        assert answer.code == 1
        assert answer.document == {"error": {"kind": "PermissionError", "message": "/some/file: Permission denied"}}
        assert answer.err == "error: /some/file: Permission denied\n"
        answer = crash(OSError(errno.EIO, "Input/output error"), "--json")
        assert (answer.code, answer.document["error"]["kind"]) == (70, "OSError")
        assert "unexpected OSError: [Errno 5] Input/output error" in answer.document["error"]["message"]
        assert answer.document["error"]["message"] in answer.err


def test_a_closed_pipe_is_not_an_error_and_ascii_terminals_are_served(tmp_path):
    for rest, shown in (("--json | head -c 1", "{"), ("| grep -o rtx-3060 | head -n 1", "rtx-3060\n")):
        done = subprocess.run(
            ["/bin/sh", "-c", f"'{sys.executable}' -m autotile devices {rest}"],
            env={**child_environment(), "PYTHONIOENCODING": "ascii"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert (done.stdout, done.stderr) == (shown, "")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--help", 0, ""),
        ("tune --help", 0, ""),
        ("devices", 0, ""),
        ("devices --json", 0, ""),
        ("space matmul_tiled --device h200 --sample 1 --csv -", 0, "not given, so as in the search-space file: "),
        ("trials --json", 2, "error: Missing argument 'KERNEL'; see `autotile trials --help`\n"),
    ],
)
def test_who_does_not_read_the_answer_changes_no_exit_code(words, code, told):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python("-m", "autotile", *words.split(), stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == code
    assert done.stderr.startswith(told)
    assert told or not done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("autotile tu", "tune"),
        ("autotile tr", "trials"),
        ("autotile tune sgemm", "sgemm_2d"),
        ("autotile tune sgemm_2d --sampler brute", "brute-force"),
        ("autotile tune sgemm_2d --sampler kernel-tuner:ge", "kernel-tuner:genetic_algorithm"),
        ("autotile tune sgemm_2d --l2 c", "cold"),
        ("autotile space sgemm_2d --device rtx-30", "rtx-3060"),
        ("autotile trials sgemm_2d --outcome wrong", "wrong_result"),
        ("autotile export sgemm_2d --format ker", "kernel-tuner"),
    ],
)
def test_a_tab_completes_a_word(typed, offered):
    typing = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_AUTOTILE_COMPLETE": "complete_bash"}
    assert offered in CliRunner().invoke(app, prog_name="autotile", env=typing).stdout.split()


def test_the_source_says_what_the_function_does_and_the_first_sentence_is_the_help():
    """The derivation reads the source; what it finds is the signature of the function that is then called."""
    for path in sorted({command.function for command in COMMANDS.values()}):
        module, _, name = path.rpartition(".")
        function = getattr(import_module(f"autotile.{module}"), name)
        text, found = describe(path)
        assert text == inspect.cleandoc(function.__doc__).partition("\n\nParameters\n")[0]
        stated = inspect.signature(function).parameters
        own = [one for one in found if one.name in stated]
        assert own, path
        for one in own:
            parameter = stated[one.name]
            if parameter.kind is not parameter.VAR_POSITIONAL:
                assert (one.default is None and parameter.default == ()) or one.default == parameter.default, path
        assert all(one.help.endswith(".") for one in found), path
    described = {one.name: one for one in describe("api.results.best")[1]}
    kernel, dtype = described["kernel"], described["dtype"]
    assert (kernel.help, kernel.default) == ("Name of a kernel or an operation, or path of its file.", REQUIRED)
    assert (dtype.help, dtype.unsaid) == ("Element type, one of the kernel's.", "the kernel's first")
    options = {one.name: one for one in describe("api.tuning.tune")[1]}
    assert (options["finals"].hint, options["finals"].default, options["l2"].default) == ("int", 12, "cold")
    assert options["objective"].help.endswith("May be given again.")
    flags = {"output": "-o", "keep_gpus": "--keep-gpu"}
    assert in_options("With ``output`` and ``keep_gpus``; ``BM``.", flags) == "With -o and --keep-gpu; BM."


def test_options_have_their_form():
    for function, name, form, options in (
        ("api.results.best", "library", "", ["--library/--no-library"]),
        ("api.exchange.export", "output", "-o --output FILE", ["-o", "--output"]),
        ("api.results.trials", "limit", "N 1..", ["--limit"]),
        ("api.inspection.space", "sample", "N 1..9", ["--sample"]),
    ):
        (one,) = [one for one in describe(function)[1] if one.name == name]
        option = parameter_of(one, form, {}).annotation.__metadata__[0]
        assert [option.default, *option.param_decls] == options  # in an annotation, the first stands there
        assert option.max == (9 if form.endswith("9") else None)


def test_words_are_split_at_the_first_equals_sign_and_need_a_name_and_a_value():
    assert read_assignments(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}
    for word in ("A", "=1", "A=", "1A=2", "A B=1"):
        with pytest.raises(InputError, match="expected NAME=VALUE"):
            read_assignments([word])


def test_values_take_the_type_of_their_parameter():
    for word, value in (
        *(
            ("TILE=16", 16),
            ("TILE=-1", -1),
            ("TILE=big", "big"),
            ("TILE=12345678", 12345678),
            (f"TILE={10**32}", str(10**32)),
            ("GUARDED=TRUE", True),
        ),
        *(("GUARDED=0", False), ("GUARDED=maybe", "maybe"), ("N=512", 512), ("UNKNOWN=512", "512")),
    ):
        ((name, found),) = read_values(load_kernel("matmul_tiled").spec, [word]).items()
        assert name == word.partition("=")[0]
        assert (found, type(found)) == (value, type(value))


def test_values_of_a_configuration_have_all_their_digits_and_commas():
    spec = make_spec({"A": [0.1, 0.1 + 0.2], "T": ["float", "P<int, 2>"]})
    found = read_values(spec, split_assignments("T=P<int, 2>, A=0.30000000000000004,B=1"))
    assert found == {"T": "P<int, 2>", "A": 0.1 + 0.2, "B": "1"}


def test_an_option_that_is_written_as_in_python_is_recognized(run):
    for command, word, meant in (
        ("tune", "trials=8", "--trials 8"),
        ("tune", "budget=30s", "--budget 30s"),
        ("tune", "verify_problem=3", "--verify-problem 3"),
        ("best", "device=h200", "--device h200"),
    ):
        answer = run(command, "matmul_tiled", "M=2048", word)
        assert answer.code == 2
        assert answer.err.replace("\n", " ").rstrip().endswith(f"; did you mean {meant}?")
        assert "did you mean" not in run(command, "matmul_tiled", "rows=8").err
    assert "did you mean" not in run("best", "matmul_tiled", "trials=8").err, "which has no such option"


@pytest.mark.parametrize(
    ("words", "early"),
    [
        (["tune", "sgemm_2d"], {"autotile.workers.bench": 1, "autotile.workers.compile_pool": 1}),
        (["tune", "sgemm_2d", "--devices=1"], {"autotile.workers.compile_pool": 1}),
        (["tune", "sgemm_2d", "--replay"], {}),
        (["tune", "--help"], {}),
        (["list"], {}),
    ],
)
def test_the_first_workers_of_a_session_start_with_the_command_line(words, early, monkeypatch, tmp_path):
    started: list[str] = []
    monkeypatch.setattr("autotile.workers.child.start_early", lambda module, place="": started.append(module))
    monkeypatch.setattr("autotile.cli.application.main", lambda: None)
    monkeypatch.setattr(main, "_GPU_DRIVER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["autotile", *words])
    main._run()
    assert Counter(started) == early
    monkeypatch.setattr(main, "_GPU_DRIVER", tmp_path / "none")
    main._run()
    assert Counter(started) == early


SAID = "not given, so as in the search-space file: n=1048576"


class TestMissingSizes:
    """They are taken from the file of the kernel or of the operation, which is said."""

    @pytest.fixture
    def scale_toml(self, scale_toml):
        """Return the tiny kernel with the recorded size as its default."""
        scale_toml.write_text(scale_toml.read_text().replace("n = 4096", "n = 1048576"))
        return scale_toml

    @pytest.fixture
    def tuned(self, run, scale_toml, recording):
        answer = run("tune", scale_toml, "--replay", recording)
        assert answer.code == 0
        assert SAID in answer.err
        assert "scale n=1048576 float32 on NVIDIA H200 (replayed)" in answer.out
        return scale_toml

    def test_where_it_is_tuned(self, run, tuned, recording, tmp_path):
        bundle, plan = tmp_path / "b.bundle", tmp_path / "plan.toml"
        made = run("export", "--format", "bundle", tuned, "-o", bundle, "--arch", "sm_80", "--arch", "sm_90")
        assert (made.code, "sm_80 sm_90" in made.out, "digest" in made.out) == (0, True, True)
        found = []
        for words in (
            ("best", tuned, "--device", "h200"),
            ("best", "scale", "--bundle", bundle, "--device", "h200"),
            ("export", tuned, "-o", tmp_path / "scale.json"),
        ):
            answer = run(*words, "--json")
            assert SAID in answer.err
            assert answer.document["problem"] == {"n": 1048576}
            found.append(answer.document)
        assert (found[0]["tier"], found[1]["config"]) == ("exact", {"THREADS": 256, "WORK": 4})
        assert found[1]["bundle"].startswith(f"{bundle}, compiled for sm_90 with NVRTC ")
        assert str(bundle) in run("best", "scale", "--bundle", bundle, "--device", "h200").out
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

    def test_on_a_gpu_only(self, run, scale_toml):
        for words in (
            ["export", scale_toml, "--format", "recording", "--sample", "1"],
            ["verify", scale_toml.with_name("scale.cu"), "--like", scale_toml],
            ["verify", scale_toml],
        ):
            assert "needs the size" not in run(*words).err

    def test_functions(self, tuned, recording):
        found = autotile.tune(tuned, options=autotile.TuneOptions(replay=recording, trials=1))
        assert (found.problem.sizes, found.notices[0]) == ({"n": 1048576}, SAID)
        said: list[str] = []
        found = autotile.tune(tuned, replay=recording, trials=1, announce=said.append)
        assert (said, SAID in found.notices) == ([SAID], False)  # they are announced or in the result
        result = autotile.best(tuned, device="h200")
        assert (result.problem.sizes, result.notices) == ({"n": 1048576}, (SAID,))
        with autotile.session(tuned, options=autotile.TuneOptions(replay=recording)) as session:
            assert session.evaluate({"THREADS": 64, "WORK": 1})


def test_sizes_may_be_given_in_part(run, tmp_path):
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
