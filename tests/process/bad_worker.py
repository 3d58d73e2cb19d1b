"""A child for the tests that breaks every rule; what it does stands in the request, and it does it without `serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotile.files.profiles import device_profile

MEGABYTE = b"x" * (1 << 20)
EVALUATION = {
    "outcome": "ok",
    "reason": "",
    "stage": "measure",
    "measurement": {"time_us": 5.0, "low_us": 4.9, "high_us": 5.1, "samples_us": [5.0], "l2": "cold"},
    "seconds": {},
    "telemetry": {},
}
FAILED = {**EVALUATION, "stage": "verify", "measurement": None}
RESOURCES = {
    "registers": 8,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "stack_bytes": 0,
    "static_smem_bytes": 0,
}
number = 0


def say(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def tell(message: object) -> None:
    say(json.dumps(message).encode() + b"\n")


def answer(reply: object) -> None:
    tell({"id": number, "reply": reply})


def stage(name: str) -> None:
    tell({"id": number, "stage": name})


def sleep() -> None:
    time.sleep(60)


def for_ever(act: Callable[[], None]) -> None:
    while True:
        act()


def die(stage_name: str, signal_number: int) -> None:
    for name in ("load", "verify", "measure"):
        stage(name)
        if name == stage_name:
            os.kill(os.getpid(), signal_number)
    sleep()


def leave_a_grandchild() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os._exit(9)


def ignore_everything() -> None:
    for number_ in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number_, signal.SIG_IGN)
    answer({})
    sleep()


DEEDS: dict[str, Callable[[], Any]] = {
    "answer": lambda: answer({"pid": os.getpid()}),
    "sleep": lambda: (stage("verify"), sleep()),
    "be_late": lambda: (time.sleep(0.8), answer({})),
    # talk nonsense
    "not_json": lambda: say(b"hello\n"),
    "binary": lambda: say(bytes(range(1, 256)) + b"\n"),
    "a_list": lambda: tell([1, 2]),
    "a_number": lambda: tell(7),
    "deep": lambda: say(b"[" * 100_000 + b"\n"),
    "no_reply": lambda: tell({"id": number}),
    "reply_of_wrong_shape": lambda: answer([1]),
    "stage_of_wrong_shape": lambda: tell({"id": number, "stage": 3}),
    "another_request": lambda: tell({"id": number + 1, "reply": {}}),
    "half_a_line": lambda: (say(b'{"id": 1, "rep'), sleep()),
    # talk too much
    "huge_line": lambda: for_ever(lambda: say(MEGABYTE)),
    "endless_stages": lambda: for_ever(lambda: stage("verify")),
    "flood_errors": lambda: (os.write(2, 8 * MEGABYTE), answer({}), os.write(2, 8 * MEGABYTE)),
    "chatter": lambda: (say(b'{"id": %d, "stage": "x"}\n' % number * 100_000), answer({})),
    "answer_twice": lambda: (answer({}), answer({})),
    # stop listening
    "stop_reading": lambda: (answer({}), sleep()),
    "stop_reading_but_talk": lambda: (answer({}), for_ever(lambda: say(MEGABYTE))),
    "close_input": lambda: (os.close(0), answer({}), sleep()),
    "close_output": lambda: (stage("verify"), os.close(1), sleep()),
    "ignore_everything": ignore_everything,
    # die
    "leave_a_grandchild": leave_a_grandchild,
    "exit": lambda: os._exit(3),
    **{f"die_in_{name}": lambda name=name: die(name, signal.SIGKILL) for name in ("load", "verify", "measure")},  # type: ignore[misc]
    "fault_in_verify": lambda: die("verify", signal.SIGSEGV),
    # answers of the GPU worker and of the compile worker, right and wrong
    "ok": lambda: answer(EVALUATION),
    "no_keys": lambda: answer({}),
    "unknown_outcome": lambda: answer({**EVALUATION, "outcome": "splendid"}),
    "measurement_of_wrong_shape": lambda: answer({**EVALUATION, "measurement": [1, 2]}),
    "unknown_key": lambda: answer({**EVALUATION, "mood": "good"}),
    "error_of_no_kind": lambda: answer({"error": "something"}),
    "wrong": lambda: answer({**FAILED, "outcome": "wrong_result", "reason": "y[0] is 1"}),
    "assertion": lambda: (
        os.write(2, b"faults.cu:7: Assertion `i < n` failed.\n"),
        answer({**FAILED, "outcome": "crashed", "reason": "ASSERT", "last": True}),
        os._exit(0),
    ),
    "spent": lambda: (answer({**FAILED, "outcome": "out_of_bounds", "last": True}), os._exit(0)),
    "again": lambda: (answer({"again": True, "last": True}), os._exit(0)),
    "refused": lambda: answer({**FAILED, "outcome": "crashed", "reason": "INVALID_IMAGE"}),
    "times": lambda: answer({"times_us": [[1, 2.5], [3, 4]]}),
    "times_of_wrong_shape": lambda: answer({"times_us": 5}),
    "setup_error": lambda: answer({"error": "too large", "kind": "input"}),
    "compiled": lambda: answer({"path": "/nowhere/a.cubin", "cubin_hash": "h", "resources": RESOURCES}),
    "resources_of_wrong_shape": lambda: answer({"path": "p", "cubin_hash": "h", "resources": {"registers": 1}}),
    "setup_error_without_text": lambda: answer({"kind": "setup"}),
}


def open_device(workload: dict[str, Any]) -> None:
    """Answer ``open``; ``spec_source`` lists what to do at the first opening, the second and so on, then it is well."""
    log = Path(workload["cache"]) / "openings"
    with log.open("a") as file:
        file.write("x")
    deeds = workload["spec_source"].split()
    opening = log.stat().st_size - 1
    if opening < len(deeds) and deeds[opening] != "well":
        DEEDS[deeds[opening]]()
    else:
        answer({"device": device_profile("h200").to_json()})


def main() -> None:
    global number
    for line in sys.stdin.buffer:
        message = json.loads(line)
        number, request = message["id"], message["request"]
        if request.get("op") == "open":
            open_device(request["workload"])
        elif request.get("op") == "race":
            DEEDS[request["candidates"][0]["config"]["DO"]]()
        else:
            DEEDS[request.get("do") or request.get("config", {}).get("DO") or request["job"]["entry"]]()


if __name__ == "__main__":
    main()
