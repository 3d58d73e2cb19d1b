"""The child's end: read requests, answer them, leave when the parent is gone."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from autotile.process.limits import leave_nothing_behind

Stage = Callable[[str], None]
"""Called with the name of a stage before it is entered."""
Handler = Callable[[Mapping[str, Any], Stage], Mapping[str, Any]]

_PARENT_CHECK_S = 1.0


class LastWords(Exception):  # noqa: N818 - it is an answer, not an error
    """Raised by a handler to answer and then end the process: its CUDA context can no longer be trusted."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply
        super().__init__("the worker ends itself after this reply")


def serve(handler: Handler) -> None:
    """Answer requests from standard input until it closes.

    Standard output becomes the message channel; whatever else prints there (a kernel's ``printf``) goes to standard
    error instead.
    """
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    leave_nothing_behind()
    leave_with_parent()
    if _is_orphan():
        return

    def say(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message).encode() + b"\n")
        channel.flush()

    for line in sys.stdin.buffer:
        _answer(handler, json.loads(line), say)


def _answer(handler: Handler, message: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
    number = message["id"]

    def enter(stage: str) -> None:
        say({"id": number, "stage": stage})

    try:
        say({"id": number, "reply": handler(message["request"], enter)})
    except LastWords as last:
        say({"id": number, "reply": last.reply})
        os._exit(0)  # an ordinary exit would wait for the broken context


def _is_orphan() -> bool:
    """Whether the parent died while this process was starting, so that its own parent is another one by now.

    The parent alone writes to standard input, and it closes that only when nothing is asked for any more.
    """
    poll = select.poll()
    poll.register(0, 0)  # only whether the other end is gone; a request may still be waiting in the pipe
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def leave_with_parent() -> None:
    """End this process when its parent dies, even in the middle of a kernel that never returns."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
