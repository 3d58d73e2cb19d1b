import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotile.errors import WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.workers.child import Child


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    child = Child("echo_worker")
    yield child
    child.close()


def test_request_and_reply(child: Child) -> None:
    for value in (1, "text", {"nested": [1.5, None]}, "x" * 200_000):
        assert child.request({"do": "echo", "value": value}, 10) == {"echo": value}


@pytest.mark.parametrize(
    ("deed", "error", "words", "stage"),
    [
        ("hang", WorkerTimeoutError, r"no answer within 0\.5 s", "hang"),
        ("abort", WorkerCrashError, "SIGABRT: about to abort", "abort"),
        ("exit", WorkerCrashError, "exit code 3", "begin"),
        ("raise", WorkerCrashError, "an unexpected fault", "begin"),
    ],
)
def test_an_end_is_told_with_its_stage_and_nothing_more_is_answered(
    child: Child, deed: str, error: type[WorkerError], words: str, stage: str
) -> None:
    assert child.request({"do": "pid"}, 10) == {"pid": child.pid}
    with pytest.raises(error, match=words) as caught:
        child.request({"do": deed}, 0.5 if deed == "hang" else 10)
    assert caught.value.stage == stage
    with pytest.raises(WorkerCrashError):
        child.request({"do": "echo", "value": 1}, 10)


def test_a_final_reply_is_received(child: Child) -> None:
    assert child.request({"do": "last"}, 10) == {"bye": True}
    with pytest.raises(WorkerCrashError):
        child.request({"do": "echo", "value": 1}, 10)


def test_it_leaves_no_core_dump_and_fills_no_disk(child: Child) -> None:
    assert child.request({"do": "limits"}, 10) == {"core": 0, "file": 2**30}


def test_ctrl_c_in_the_terminal_does_not_reach_it(child: Child) -> None:
    pid = child.request({"do": "pid"}, 10)["pid"]
    assert os.getpgid(pid) != os.getpgid(0)


def test_it_leaves_when_its_parent_is_killed() -> None:
    code = (
        "import time; from autotile.workers.child import Child; child = Child('echo_worker');"
        "print(child.request({'do': 'pid'}, 10)['pid'], flush=True); child.request({'do': 'hang'}, 60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} outlived its parent")


def test_files_of_any_size_may_be_written_where_that_is_asked_for() -> None:
    code = (
        "import resource; from autotile.workers.child import files_of_any_size, limit_disk_use\n"
        "limit_disk_use(); limit = lambda: resource.getrlimit(resource.RLIMIT_FSIZE)[0]\n"
        "with files_of_any_size(): inside = limit()\n"
        "print(limit() == 1 << 30, inside != 1 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
