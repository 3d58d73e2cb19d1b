"""A child for the tests that violates the protocol as its requests say, without `serve`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Deed = tuple[Callable[[], object], ...]
"""Actions, performed in order."""

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
SIZES = ("spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes")
RESOURCES = {"registers": 8, **dict.fromkeys(SIZES, 0)}
FUNCTIONS = {"f": {"symbol": "f", "resources": RESOURCES}}
COMPILED = {"cubin": {"path": "/nowhere/a.cubin", "cubin_hash": "h", "functions": FUNCTIONS}}
number = 0
caches: list[Path] = []
"""Folders of the cubin caches of the requests so far."""


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


def again_and_again(act: Callable[[], None]) -> None:
    while True:
        act()


def die(last_stage: str, by: signal.Signals) -> None:
    for name in ("load", "verify", "measure"):
        stage(name)
        if name == last_stage:
            os.kill(os.getpid(), by)
    sleep()


def leave_a_grandchild() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os._exit(9)


def die_once() -> None:
    """Be killed, as by a system without memory; the next time, note which workers are busy."""
    if not (caches[-1] / "died").exists():
        (caches[-1] / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        sleep()
    (caches[-1] / "beside").write_text(" ".join(file.name for file in caches[-1].glob("busy-*")))


def be_busy() -> None:
    running = caches[-1] / f"busy-{os.getpid()}"
    running.touch()
    time.sleep(0.3)
    running.unlink()


def ignore_signals() -> None:
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)


def answering(reply: object) -> Deed:
    return (partial(answer, reply),)


def raced(rounds_us: object, outcome: str = "ok", reason: str = "") -> dict[str, Any]:
    return {"rounds_us": rounds_us, "outcome": outcome, "reason": reason}


def reading(found: dict[str, Any], **others: Any) -> Deed:
    return answering({"readings": [found], **others})


enter_verify = partial(stage, "verify")
flood_errors = partial(os.write, 2, 8 * MEGABYTE)
leave = partial(os._exit, 0)

DEEDS: dict[str, Deed] = {
    "answer": answering({"pid": os.getpid()}),
    "sleep": (enter_verify, sleep),
    "be_late": (partial(time.sleep, 0.8), *answering({})),
    # malformed messages
    "not_json": (partial(say, b"hello\n"),),
    "binary": (partial(say, bytes(range(1, 256)) + b"\n"),),
    "a_list": (partial(tell, [1, 2]),),
    "deep": (partial(say, b"[" * 100_000 + b"\n"),),
    "no_reply": (lambda: tell({"id": number}),),
    "reply_of_wrong_shape": answering([1]),
    "stage_of_wrong_shape": (lambda: tell({"id": number, "stage": 3}),),
    "another_request": (lambda: tell({"id": number + 1, "reply": {}}),),
    "half_a_line": (partial(say, b'{"id": 1, "rep'), sleep),
    # too much output
    "huge_line": (partial(again_and_again, partial(say, MEGABYTE)),),
    "endless_stages": (partial(again_and_again, enter_verify),),
    "flood_errors": (flood_errors, *answering({}), flood_errors),
    "chatter": (lambda: say(b'{"id": %d, "stage": "x"}\n' % number * 100_000), *answering({})),
    "answer_twice": answering({}) * 2,
    # no input is read
    "stop_reading": (*answering({}), sleep),
    "stop_reading_but_talk": (*answering({}), partial(again_and_again, partial(say, MEGABYTE))),
    "close_input": (partial(os.close, 0), *answering({}), sleep),
    "close_output": (enter_verify, partial(os.close, 1), sleep),
    "ignore_everything": (ignore_signals, *answering({}), sleep),
    # deaths
    "exit": (partial(os._exit, 3),),
    "leave_a_grandchild": (leave_a_grandchild,),
    "slow_repeats": (*(enter_verify, partial(time.sleep, 0.5)) * 4, *reading({**EVALUATION, "measurement": None})),
    "die_in_measure": (partial(die, "measure", signal.SIGKILL),),
    "killed": (partial(os.kill, os.getpid(), signal.SIGKILL),),
    "killed_once": (die_once, *answering(COMPILED)),
    "busy": (be_busy, *answering(COMPILED)),
    "fault_in_verify": (partial(die, "verify", signal.SIGSEGV),),
    # replies of a GPU worker, valid and malformed
    "ok": reading(EVALUATION),
    "ok_slowly": (partial(time.sleep, 0.03), *reading(EVALUATION)),
    "verified": reading({**EVALUATION, "seconds": {"verify": 0.05}}),
    "wrong": reading({**FAILED, "outcome": "wrong_result", "reason": "y[0] is 1"}),
    "refused": reading({**FAILED, "outcome": "crashed", "reason": "INVALID_IMAGE"}),
    "assertion": (
        partial(os.write, 2, b"faults.cu:7: Assertion `i < n` failed.\n"),
        *reading({**FAILED, "outcome": "crashed", "reason": "ASSERT"}, last=True),
        leave,
    ),
    "spent": (*reading({**FAILED, "outcome": "out_of_bounds"}, last=True), leave),
    "again": (*answering({"readings": [], "last": True}), leave),
    "times": answering({"readings": [raced([1, 2.5]), raced([3, 4], "wrong_result", "y[0] is 1")]}),
    "cuda_error": (
        *answering({"error": "an illegal address", "kind": "cuda", "stage": "check 0", "last": True}),
        leave,
    ),
    "no_keys": answering({}),
    "error_of_no_kind": answering({"error": "something"}),
    "setup_error": answering({"error": "too large", "kind": "input"}),
    # replies of a compile worker
    "compiled": answering(COMPILED),
    "compiled_late": (partial(time.sleep, 20), *answering(COMPILED)),
}


def perform(deed: str) -> None:
    for act in DEEDS[deed]:
        act()


def open_device(workload: dict[str, Any]) -> None:
    """Reply to ``open``; ``spec_source`` lists the deeds of the first openings, and later ones succeed."""
    log = Path(workload["cache"]) / "openings"
    with log.open("a") as file:
        file.write("x")
    deeds = workload["spec_source"].split()
    opening = log.stat().st_size - 1
    if opening < len(deeds) and deeds[opening] != "well":
        perform(deeds[opening])
    else:
        from autotile.core.device import device_profile  # as long as all else together

        answer(device_profile("h200").to_json())


def race_of(deeds: list[str]) -> None:
    """Do what each entry says when it is verified, unless it is well; then answer with times of all."""
    for place, deed in enumerate(deeds):
        stage(f"check {place}")
        if deed != "well":
            perform(deed)
    stage("race")
    answer({"readings": [raced([1, 2])] * len(deeds)})


def main() -> None:
    global number
    for line in sys.stdin.buffer:
        message = json.loads(line)
        number, request = message["id"], message["request"]
        caches.append(Path(request.get("cache", "")))
        if request.get("op") == "open":
            open_device(request["workload"])
        elif request.get("checks"):
            race_of([entry["candidate"]["config"]["DO"] for entry in request["entries"]])
        elif "entries" in request:
            perform(request["entries"][0]["candidate"]["config"]["DO"])
        else:
            perform(request.get("do") or request["job"]["entry"])


if __name__ == "__main__":
    main()
