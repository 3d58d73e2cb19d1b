"""Requests to a child: whatever it does, its parent raises the right error in time, and nothing of it is left."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from child_python import python
from waiting import wait_until

from autotile.errors import WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.workers.child import Child, parsed_reply
from autotile.workers.compile_pool import Compiled
from autotile.workers.jobs import Readings

DEADLINE_S = 0.6
GRACE_S = 0.5
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def child(clean, monkeypatch):
    monkeypatch.setattr("autotile.workers.child._EXIT_GRACE_S", GRACE_S)
    child = Child("bad_worker")
    child.request({"do": "answer"}, 10)  # wait for the start of the interpreter
    yield child
    child.close()


def test_a_reply_is_seen_before_it_is_waited_for():
    child = Child("echo_worker")
    child.send({"do": "echo", "value": 7}, 10)
    wait_until(child.has_reply)
    assert (child.has_reply(), child.receive(10), child.has_reply()) == (True, {"echo": 7}, False)
    child.send({"do": "hang"}, 10)
    time.sleep(0.05)
    assert not child.has_reply()  # it has told its stages only
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.has_reply()
    child.kill()
    assert child.has_reply()


MALFORMED = (
    ("not_json", "'hello'"), ("binary", ""),
    ("a_list", r"expected object, got array \('\[1, 2\]'\)"), ("deep", "got array"),
    ("no_reply", "not a reply"), ("reply_of_wrong_shape", "reply: expected object"),
    ("stage_of_wrong_shape", "stage: expected str"), ("another_request", "not a reply to this request"),
    ("huge_line", "more than 16 MiB"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "deed", "error", "words"),
    [
        *(((), deed, WorkerError, f"^malformed reply from bad_worker: .*{words}") for deed, words in MALFORMED),
        (("answer_twice",), "answer", WorkerError, "^malformed reply from bad_worker: .*not a reply to this request"),
        *(((), deed, WorkerTimeoutError, r"no answer within 0\.6 s") for deed in ("half_a_line", "endless_stages")),
        ((), "leave_a_grandchild", WorkerCrashError, "exit code 9"),  # though a grandchild holds the pipes
        (("close_input",), "answer", WorkerCrashError, "closed its input"),
    ],
)
def test_the_end_of_a_child_is_told_with_an_excerpt_of_what_is_malformed(child, before, deed, error, words):
    for one in before:
        assert child.request({"do": one}, 10) == {}
    with pytest.raises(error, match=words) as caught:
        child.request({"do": deed}, DEADLINE_S if error is WorkerTimeoutError else 20.0)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 250
    assert not Path(f"/proc/{child.pid}").exists()
    with pytest.raises(WorkerCrashError):  # it stays dead
        child.request({"do": "answer"}, 10)


READING = {"outcome": "ok", "stage": "measure"}
CUBIN = {"path": "p", "cubin_hash": "h", "functions": {}}
FUNCTION = {"symbol": "f", "resources": {"registers": 1}}


@pytest.mark.parametrize(
    ("schema", "reply", "words"),
    [
        (Readings, {"readings": [{**READING, "outcome": "splendid"}]}, "outcome: invalid enum value 'splendid'"),
        (Readings, {"readings": [{**READING, "measurement": [1, 2]}]}, "is malformed: .*measurement: expected object"),
        (Readings, {"readings": [{**READING, "rounds_us": 5}]}, "is malformed: .*rounds_us: expected array"),
        (Compiled, {"cubin": {**CUBIN, "functions": {"f": FUNCTION}}}, "].resources: object missing"),
        (Compiled, {"cubin": {**CUBIN, "path": 5}}, "is malformed: .*cubin.path: "),
        (Compiled, {"kind": "setup"}, "is malformed"),
    ],
)
def test_a_reply_of_a_wrong_shape_is_an_error(schema, reply, words):
    with pytest.raises(WorkerError, match=words):
        parsed_reply(reply, schema)


@pytest.mark.parametrize("deed", ["stop_reading", "stop_reading_but_talk"])
def test_a_child_that_does_not_read_blocks_nobody(child, deed):
    assert child.request({"do": deed}, 10) == {}
    with pytest.raises(WorkerError, match=r"no answer within 0\.6 s|malformed reply"):
        child.request({"do": "answer", "ballast": "x" * 8_000_000}, DEADLINE_S)


def test_megabytes_of_errors_or_messages_block_nobody(child):
    for _ in range(3):
        assert child.request({"do": "flood_errors"}, 10) == {}
    assert child.request({"do": "answer"}, 10) == {"pid": child.pid}
    assert len(child.last_line()) <= 2000
    assert child.request({"do": "chatter"}, 10) == {}


def test_a_child_that_ignores_everything_is_killed(child):
    child.request({"do": "ignore_everything"}, 10)
    start = time.monotonic()
    child.close()
    assert time.monotonic() - start > GRACE_S
    child.close()  # again, to no effect
    child.kill()


def test_a_kill_ends_the_request_of_another_thread(child):
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(WorkerCrashError, match="SIGKILL"):
        child.request({"do": "sleep"}, 20.0)


def test_a_module_that_does_not_exist_is_told():
    child = Child("no_such_module")
    with pytest.raises(WorkerCrashError, match=r"exit code 1: .*No module named no_such_module"):
        child.request({}, 10.0)


def test_more_than_a_thousand_open_files_are_no_obstacle():
    code = (
        "import os, resource; from autotile.workers.child import Child;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]));"
        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]; child = Child('bad_worker');"
        "assert child.request({'do': 'answer'}, 10)['pid'] == child.pid; child.close()"
    )
    python("-c", code, check=True)


@pytest.fixture
def echo(clean):
    child = Child("echo_worker")
    yield child
    child.close()


def test_requests_are_answered_without_core_dumps_full_disks_or_ctrl_c_of_the_terminal(echo):
    for value in (1, "text", {"nested": [1.5, None]}, "x" * 200_000):
        assert echo.request({"do": "echo", "value": value}, 10) == {"echo": value}
    assert echo.request({"do": "limits"}, 10) == {"core": 0, "file": 2**30}
    assert os.getpgid(echo.request({"do": "pid"}, 10)["pid"]) != os.getpgid(0)
    assert echo.request({"do": "last"}, 10) == {"bye": True, "last": True}
    with pytest.raises(WorkerCrashError):  # the final reply was received
        echo.request({"do": "echo", "value": 1}, 10)


def test_an_error_in_a_child_is_its_end_and_told_with_the_stage(echo):
    with pytest.raises(WorkerCrashError, match="an unexpected fault") as caught:
        echo.request({"do": "raise"}, 10)
    assert caught.value.stage == "begin"


@pytest.mark.parametrize("started", [True, False], ids=["at work", "still starting"])
def test_it_leaves_when_its_parent_is_killed(started):
    """Also one that has never seen its parent alive; `clean` finds one that stays."""
    code = (
        "import os, threading, time; from autotile.workers.child import Child; child = Child('echo_worker');"
        f"_ = {started} and child.request({{'do': 'pid'}}, 10);"
        "threading.Thread(target=child.request, args=({'do': 'hang'}, 60), daemon=True).start();"
        "time.sleep(0.01); os.kill(os.getpid(), 9)"
    )
    assert python("-c", code, timeout=30).returncode == -signal.SIGKILL


def test_files_of_any_size_may_be_written_where_that_is_asked_for():
    code = (
        "import resource; from autotile.workers.child import files_of_any_size, limit_disk_use\n"
        "limit_disk_use(); limit = lambda: resource.getrlimit(resource.RLIMIT_FSIZE)[0]\n"
        "with files_of_any_size(): inside = limit()\n"
        "print(limit() == 1 << 30, inside != 1 << 30)"
    )
    assert python("-c", code, check=True).stdout.split() == ["True", "True"]
