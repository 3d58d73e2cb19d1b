"""What `autotile tune` says of a replayed session, and the modules that a session imports."""

import io

import pytest
from child_python import needed
from rich.console import Console
from typer.testing import CliRunner

from autotile.cli.application import app
from autotile.cli.progress import TuneProgress

NOTICE = "replayed from measurements recorded on NVIDIA H200"


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_command_says_it_first_and_once(bench, scale_toml, words):
    command = ["tune", str(scale_toml), "n=4096", f"--replay={bench.record()}", *words]
    answer = CliRunner().invoke(app, command, catch_exceptions=False)
    lines = answer.stderr.splitlines()
    assert answer.exit_code == 0
    assert NOTICE in lines[0]
    assert lines[1].startswith("starting: ")
    assert answer.stderr.count(NOTICE) == 1
    assert answer.stdout.count(NOTICE) == (1 if words else 0)  # the document repeats it for programs


def test_on_a_terminal_it_stays_above_the_live_line(bench):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, markup=False)
    with TuneProgress(console) as progress:
        bench.tune(bench.record(), progress)
    assert screen.getvalue().count(NOTICE) == 1


PROGRAM = """
import sys
import autotile
options = autotile.TuneOptions(trials=12, sampler="feasible", replay=sys.argv[2], workers=1)
result = autotile.tune(sys.argv[1], options=options, progress=False)
assert result.winner is not None
"""


def test_a_session_needs_few_modules(bench):
    found = needed(PROGRAM, str(bench.kernel.spec.source), str(bench.record()), ceiling=64)
    assert {"autotile.tuning.session", "autotile.search.gp_sampler"} <= found
