"""Input that commands refuse: a message and exit code 2, and nothing but the message is printed."""

import socket
from importlib import import_module

import pytest

from autotile.exchange.recording import read_recording_header
from autotile.tuning.result import Recorded

RANGE = "expected a whole number from 1 to 2147483647"
OF_FAMILIES = "--points and --max-configs are of families of sizes"
TUNE_DEFAULT = "tune KERNEL n=4096"
REPLAY = "tune KERNEL n=1048576 --replay=RECORDING"
EXPORT = "export KERNEL n=1048576"
BUNDLE = "export --format bundle KERNEL -o OUT/x"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("tune", "no kernel is named; expected `autotile tune KERNEL"),
        ("tune --plan none.toml --misses", "--plan states its kernels"),
        ("tune sgem_2d M=1", "sgemm_2d"),
        ("tune KERNEL n=abc", "n is 'abc'"),
        ("tune KERNEL n=", "expected NAME=VALUE"),
        ("tune KERNEL n=-4", RANGE),
        ("tune KERNEL n=0", "size n is 0, expected 1 to 2147483647"),
        ("tune KERNEL n=1.5", RANGE),
        ("tune KERNEL n=NINES", RANGE),
        ("tune KERNEL n=٣", RANGE),
        ("tune KERNEL n=4 n=5", "given twice"),
        ("tune KERNEL n=999999999999", "expected 1 to"),
        ("tune KERNEL m=4", "has no size 'm'"),
        ("tune KERNEL", "no recording of scale n=4096"),
        (f"{TUNE_DEFAULT} --dtype float99", "float99"),
        (f"{TUNE_DEFAULT} --until soon", "gain of 'soon'"),
        (f"{TUNE_DEFAULT} --insecure", "add --scheduler"),
        (f"{TUNE_DEFAULT} --trials x", "'--trials': expected a valid integer; see"),
        (f"{TUNE_DEFAULT} --trials 0", "'--trials': expected greater than or equal to 1; see"),
        (f"{TUNE_DEFAULT} --l2 warm", "'--l2': 'warm' is not one of 'cold', 'hot'; see"),
        (f"{TUNE_DEFAULT} --nonsense", "--nonsense"),
        (f"{TUNE_DEFAULT} --replay=missing.npz", "missing.npz"),
        ("tune KERNEL n=2048 --replay", "no recording"),
        ("tune KERNEL n=2048 --replay .", ". is a folder; expected the path of a recording (.npz)"),
        ("tune KERNEL n=4096 --replay=RECORDING", "n=1048576"),
        ("tune KERNEL n=4 --misses", "--misses takes its sizes from the database"),
        # of families
        ("tune KERNEL n=9..1", "the range n=9..1 is empty"),
        ("tune KERNEL n=many..2", "n=many..2 cannot be read"),
        ("tune KERNEL m=1..2", "has no size 'm'"),
        ("tune KERNEL --dtype float32 --misses", "--misses takes its sizes from the database, with their dtypes"),
        ("tune KERNEL n=1..9 --misses", "--misses takes its sizes from the database"),
        ("tune KERNEL n=1..9 --points 0", "--points"),
        ("tune KERNEL n=9 --points 3", OF_FAMILIES),
        ("tune KERNEL n=9 --max-configs 3", OF_FAMILIES),
        ("tune KERNEL n=1..9 --objective registers", "--objective is of one session"),
        ("tune KERNEL n=1..9 --verify-problem n=7", "--verify-problem is of one session"),
        ("tune KERNEL n=1..9 --ask-tell", "--ask-tell is of one session"),
        ("tune KERNEL n=1..9 --replay", "is recorded of scale as it is now; recorded are: none"),
        # options that need others
        ("tune KERNEL n=1..9 --maximize", "--objective is of one session"),
        ("tune matmul M=1..9 N=64 K=64 --sampler random", "takes only a budget, a number of problems, and a seed"),
        ("tune matmul M=1..9 N=64 K=64 --finals 3", "takes only a budget, a number of problems, and a seed"),
        (f"{TUNE_DEFAULT} --finals 0 --precision 1%", "--finals 0 holds none"),
        (f"{TUNE_DEFAULT} --finals 0 --sanitize", "--finals 0 holds none"),
        (f"{TUNE_DEFAULT} --until 1% --spend", "give one of them"),
        (f"{TUNE_DEFAULT} --ask-tell --trials 3", "are of autotile's own search"),
        (f"{REPLAY} --device 0", "leave --device or --replay out"),
        ("export KERNEL -o OUT/x --seed 3", "add --sample N"),
        ("export KERNEL -o OUT/x --format recording --measure --seed 3", "add --sample N"),
        ("export KERNEL -o OUT/x --format bundle --l2 hot", "--l2 is of trials, and not for --format bundle"),
        ("export --format plan --dtype float32", "--dtype is not for --format plan"),
        ("export matmul -o OUT/x --l2 hot", "give no sizes, format, GPU or L2"),
        ("import x.json -o OUT/x.npz --db OUT/x.db", "give --output or --db"),
        ("space KERNEL --device h200 --seed 2", "--seed is of compiled configurations; add --compile"),
        ("export KERNEL -o OUT/x --workers 2", "--workers is of a measurement; add --measure"),
        ("explain --threads 32 --dtype float32", "leave them out with --threads"),
        ("explain KERNEL --db OUT/x.db", "is a kernel, which nothing stored changes"),
        ("best KERNEL --bundle OUT/x --db OUT/x.db", "give --bundle or --db"),
        ("list --recordings --db OUT/x.db", "leave --db out"),
        (
            "report RECORDING --dtype float32",
            "--dtype selects problems of one database; leave it out to show a recording",
        ),
        # outputs, before the work
        (f"{REPLAY} --trace OUT/none/x.json", "there is no folder"),
        (f"{REPLAY} --trace OUT", "names a folder"),
        (f"{REPLAY} --trace /proc/x.json", "cannot write /proc/x.json"),
        (f"{REPLAY} --trace RECORDING", "reads or writes it already"),
        (f"{REPLAY} --trace OUT/new.db --db OUT/new.db", "reads or writes it already"),
        ("report RECORDING -o RECORDING", "reads or writes it already"),
        ("space KERNEL --device h200 --compile --csv OUT/x -o OUT/x", "reads or writes it already"),
        ("space KERNEL --device h200 --compile -o OUT/none/x.html", "there is no folder"),
        ("export KERNEL -o /proc/none/x.npz --format recording --measure", "cannot write /proc/none/x.npz"),
        # by replay
        (f"{REPLAY} --verify-problem ,", "names no size"),
        (f"{REPLAY} --objective registers,", "there is no objective ''"),
        (f"{REPLAY} --objective=", "there is no objective ''"),
        (f"{REPLAY} --scheduler=", "--scheduler is empty"),
        ("best KERNEL --device h200 --bundle=", "'' is not the path of a bundle"),
        ("verify OUT/new.cu --like KERNEL --config=", "cannot read ''"),
        (f"{REPLAY} --objective energy", "holds no energy of its configurations"),
        (f"{REPLAY} --objective registers,error", "holds no error of its configurations"),
        (f"{REPLAY} --try THREADS=48", "cannot be tried: THREADS = 48 is not among its values"),
        (f"{REPLAY} --try THREAD=32", "'THREAD' is not a parameter of scale; did you mean 'THREADS'"),
        (f"{REPLAY} --try n=5", "'n' is not a parameter"),
        # of other commands
        ("explain KERNEL --device h200 THREADS=big", "not among its values 32, 64, 128, 256"),
        ("explain KERNEL --device h200 THREADS=64 THREADS=32", "given twice"),
        ("explain --device h200 --threads 0", "greater than or equal to 1"),
        ("explain --device h200 --threads 32 --smem -1", "greater than or equal to 0"),
        ("explain --device h200", "nothing to explain; expected KERNEL"),
        ("explain --device h200 --threads 99999999999999999999", "are no block"),
        ("space [bold]x[/bold]", "'[bold]x[/bold]'"),
        ("best sgemm_2d --db EMPTY", "--db is empty"),
        ("list --db EMPTY", "--db is empty"),
        ("db path --db EMPTY", "--db is empty"),
        ("db clean --older-than 1d --db EMPTY", "--db is empty"),
        ("best KERNEL n=4096 --device 9", "no CUDA device 9"),
        ("best KERNEL n=4096 --device no-such-gpu", "'no-such-gpu'"),
        ("import /dev/null", "it is a device"),
        ("space KERNEL n=8 --device h200", "enough_blocks"),
        ("verify none.cu --like KERNEL", "there is no file 'none.cu'"),
        ("trials sgem_2d", "sgemm_2d"),
        ("list --families --recordings", "lists of their own"),
        ("export KERNEL n=4096 -o OUT/out.json", "nothing is tuned yet"),
        ("db clean", "give --older-than, --keep-gpu or --stale"),
        ("db clean sgem_2d --stale", "no kernel named 'sgem_2d'"),
        ("tune KERNEL --captured OUT/none", "none/call.json: No such file or directory; give a folder"),
        ("db clean --older-than soon", "cannot be read"),
        ("db clean --older-than EMPTY", "cannot be read"),
        ("db clean --older-than 90", "cannot be read"),
        ("db clean --older-than d", "cannot be read"),
        ("db clean --older-than 2026-13-01", "cannot be read"),
    ],
)
def test_bad_input_is_a_message_and_2(run, written, command, said):
    run(*written(command), "--json").is_refused(said)


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trials scale --outcome splendid", "expected one of ok, infeasible"),
        ("trials scale m=1", "no size 'm'"),
        ("trials matmul", "matmul is an operation, not a kernel"),
        ("trials scale --limit 0", "--limit"),
        ("trials scale --dtype float99", "there is no dtype 'float99'"),
        ("trials scale n=x", "whole number"),
        ("export KERNEL n=7 -o x.json", "tuned are: n=1048576 on NVIDIA H200"),
        (f"{EXPORT} -o x.json --device t4", "was not tuned on Tesla T4"),
        (f"{EXPORT} -o x.json --l2 hot", "was not tuned with a hot L2; tuned are: n=1048576 on NVIDIA H200, cold L2"),
        ("report --dtype byte -o x.html", "has no trials of int8; it has scale n=1048576 float32 on NVIDIA H200"),
        ("report DATABASE n=4", "is a database; give it as --db DATABASE, or a second one to compare it with"),
        (f"{EXPORT} -o x.json --format xml", "--format"),
        (EXPORT, "no file is named to write to; add -o FILE"),
        (f"{EXPORT} -o no/such/folder/x.json", "cannot write"),
        (f"{EXPORT} -o /", "it names a folder"),
        (f"{EXPORT} -o EMPTY --format c-header", "is not the path of an output file"),
        (f"{EXPORT} --format recording -o OUT/x.npz", "replayed from a recording"),
        (f"{EXPORT} -o OUT/x.json --arch sm_90", "--arch is for --format c-header and bundle"),
        ("export KERNEL n=4 --format c-header -o OUT/x.hpp", "n=4 is not tuned"),
        ("export KERNEL --format c-header -o OUT/x.hpp --device h200", "--device is not for --format c-header"),
        ("export --format bundle KERNEL -o OUT/no/folder/x", "there is no folder"),
        (f"{REPLAY} --trace DATABASE", "it is a database, which is not overwritten"),
        ("export KERNEL --format c-header -o /proc/none/x.hpp --db nowhere.db", "cannot write /proc/none/x.hpp"),
        ("trials scale --csv OUT/x --parquet OUT/x", "reads or writes it already"),
        (f"{BUNDLE} --device h200", "--device is not for --format bundle"),
        (f"{BUNDLE} --arch sm_9000", "does not know the architecture 'sm_9000'; it compiles for sm_"),
        (f"{BUNDLE} --dtype double", "not written for dtype 'float64'"),
        (f"{BUNDLE} --db nowhere.db", "there is no database nowhere.db"),
    ],
)
def test_where_a_problem_is_tuned(run, written, tmp_path, command, said):
    before = {path.name for path in tmp_path.iterdir()}
    run(*written(command)).is_refused(said.replace("DATABASE", str(tmp_path / "tuning.db")))
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("tuning.db")} <= before


def test_a_problem_beyond_any_memory(run):
    answer = run("tune", "matmul_naive", *[f"{name}=2147483647" for name in "MNK"], "--replay")
    answer.is_refused()
    assert "no recording" in answer.err or "GiB" in answer.err


def test_recording_needs_a_gpu_and_is_130_and_one_document_if_interrupted(run, scale_toml, recording, monkeypatch):
    words = ("export", "--format", "recording", "--measure", scale_toml, "n=1048576", "--json")
    monkeypatch.setattr("autotile.api.targets.device_count", lambda: 0)
    run(*words).is_refused("no CUDA device 0 on this machine")
    made = Recorded(None, read_recording_header(recording), 7, 1.0)
    monkeypatch.setattr("autotile.api.targets.device_count", lambda: 1)
    monkeypatch.setattr(import_module("autotile.tuning.session"), "record", lambda *_, **__: made)
    answer = run(*words)
    assert answer.code == 130
    assert "7 configurations measured; the same command goes on" in answer.document["error"]["message"]


def test_watch_says_how_to_end_it_only_where_it_serves(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = run("watch", "--port", port)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: port {port} of 127.0.0.1 cannot be used")
