"""Counting what is served for want of an exact result: calls, threads, processes, forks, databases that refuse."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from autotile.database.database import Database
from autotile.errors import DatabaseError
from autotile.serving.dispatcher import misses
from autotile.settings import read_settings

BEST = {"THREADS": 256, "WORK": 4}

FORKS = """
import multiprocessing, os, sys
from dataclasses import replace
from autotile.dispatch import serving
from autotile.core.device import device_profile

serving._current_device = lambda: 0
serving.live_device = lambda _: replace(device_profile("h200"), source="cuda")
if sys.argv[2] != "child alone":
    kernel = serving.get_best_kernel(sys.argv[1], n=8192)
    kernel.calls += 3

def child(calls):
    if sys.argv[2] != "child alone":
        kernel.calls += calls  # one that the parent was served
    serving.get_best_kernel(sys.argv[1], n=500).calls += calls  # one of its own

if sys.argv[2] != "fork":
    workers = [multiprocessing.get_context("fork").Process(target=child, args=(n,)) for n in (10, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
else:
    number = os.fork()
    if number == 0:
        child(10)
        sys.exit()
    os.waitpid(number, 0)
if sys.argv[2] != "child alone":
    kernel.calls += 4
"""


def counted() -> dict[int, int]:
    with Database.open(read_settings().database) as database:
        return {miss.problem.sizes["n"]: miss.count for miss in database.misses()}


@pytest.mark.usefixtures("live_gpu")
class TestOneProcess:
    def test_calls_are_counted_and_a_question_counts_as_one(self, shelf: Any) -> None:
        shelf.put(4096, BEST)
        called, asked = shelf.ask(8192, device=None), shelf.ask(500, device=None)
        called.calls += 7
        misses.flush()
        assert counted() == {8192: 7, 500: 1}
        asked.calls += 1
        called.calls += 2
        misses.flush()
        misses.flush()
        assert counted() == {8192: 9, 500: 1}

    def test_serving_waits_for_no_writing(self, shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        shelf.put(4096, BEST)
        monkeypatch.setattr(Database, "open", lambda *_, **__: pytest.fail("written while serving"))
        assert shelf.ask(8192, device=None).tier == "nearest"

    def test_what_cannot_be_written_is_kept_for_the_next_time(self, shelf: Any) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise DatabaseError("locked")

        shelf.put(4096, BEST)
        shelf.ask(8192, device=None).calls += 5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Database, "record_miss", refuse)
            misses.flush()
        assert counted() == {}
        misses.flush()
        assert counted() == {8192: 5}

    def test_no_database_is_made_for_it(self, shelf: Any) -> None:
        shelf.ask(8192, device=None)
        misses.flush()
        assert not Path(read_settings().database).exists()

    def test_without_an_sql_engine_nothing_is_counted(self, shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        shelf.put(4096, BEST)
        shelf.ask(8192, device=None)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "autotile.database.database", None)
            misses.flush()
        assert counted() == {}

    def test_while_another_thread_writes_nobody_waits(self, shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        shelf.put(4096, BEST)
        shelf.ask(8192, device=None)
        writing, go_on = threading.Event(), threading.Event()
        record = Database.record_miss

        def slowly(*arguments: Any, **named: Any) -> None:
            writing.set()
            assert go_on.wait(30)
            record(*arguments, **named)

        monkeypatch.setattr(Database, "record_miss", slowly)
        thread = threading.Thread(target=misses.flush)
        thread.start()
        assert writing.wait(30)
        misses.flush()  # returns at once
        go_on.set()
        thread.join()
        assert counted() == {8192: 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    ("how", "expected"),
    [("multiprocessing", {8192: 117, 500: 110}), ("child alone", {500: 110}), ("fork", {8192: 17, 500: 10})],
)
def test_every_process_writes_its_own_calls_at_its_end(shelf: Any, how: str, expected: dict[int, int]) -> None:
    shelf.put(4096, BEST)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, str(shelf.path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert counted() == expected
