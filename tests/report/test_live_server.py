"""The live page over HTTP: token, host, methods, read-only, and databases that are missing, locked or replaced."""

import http.client
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from interrupts import heeded_interrupts
from msgspec import structs
from report_studies import Session as Sessions
from report_studies import store_session
from sqlalchemy import select, update
from stored_runs import add_trial, change, change_file, end_run, measured, start_run
from waiting import wait_until

from autotile.core.device import DeviceProperties
from autotile.database.database import Database
from autotile.database.engine import RUNS, STUDIES, TRIALS
from autotile.database.keys import TuningKey
from autotile.errors import InputError, ToolchainError, UnknownKernelError
from autotile.report.live import DatabaseFollower, LiveServer, live_application
from autotile.settings import child_environment

TOKEN = "the-token"

testclient = pytest.importorskip("starlette.testclient", reason="Starlette and httpx are not installed")


class Client:
    """The page of one database, which is read when a test says so."""

    def __init__(self, path: Path | str, kernels: tuple[str, ...] = ()) -> None:
        self.follower = DatabaseFollower(path, "d0", kernels)
        application = live_application([self.follower], TOKEN)
        self.http = testclient.TestClient(application, base_url="http://127.0.0.1:8000")

    def get(self, path: str) -> Any:
        answer = self.http.get(f"/{TOKEN}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def state(self) -> Any:
        self.follower.read()
        return self.get("state")

    def message(self) -> str:
        (found,) = self.state()["databases"]
        return str(found["message"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "live.db"


@pytest.fixture
def client(path):
    made = Client(path)
    yield made
    made.follower.close()


class Session:
    """A session that never ran, which stores trials as one does."""

    def __init__(self, path: Path, key: TuningKey, device: DeviceProperties) -> None:
        self.database = Database.open(path)
        self.study = self.database.study(key, device)
        self.run = start_run(self.database, self.study, sampler="random", host="a host", gates={"limits": 100})

    def add(self, count: int) -> None:
        known = len(self.database.trials(self.study))
        for i in range(known, known + count):
            add_trial(self.database, self.study, self.run, measured({"BM": 8 * (i + 1)}, 100.0 - i))

    def end(self) -> None:
        end_run(self.database, self.run, {"seconds": 1.0})


@pytest.fixture
def session(path, key, device):
    made = Session(path, key, device)
    yield made
    made.database.close()


@pytest.fixture
def name(client, session):
    """The session with three trials, which are read from now on."""
    session.add(3)
    found = str(client.state()["sessions"][0]["name"])
    assert client.get(f"session/{found}")["number"] == 0
    return found


class TestGuard:
    def test_without_the_token_nothing_is_answered_and_only_this_machine(self, client):
        for target in ("/", "/state", "/wrong/state", f"/{TOKEN}x/state", f"/{TOKEN[:-1]}/", f"//{TOKEN}/"):
            answer = client.http.get(f"http://127.0.0.1:8000{target}")
            assert answer.status_code == 403, target
            assert TOKEN not in answer.text
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        strangers = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "")
        for host in (*strangers, "127.0.0.1", "127.0.0.1:8000", "localhost:1234"):
            answer = client.http.get(f"/{TOKEN}/state", headers={"host": host})
            assert answer.status_code == (400 if host in strangers else 200), host

    def test_nothing_but_reading(self, client):
        for target in ("", "state", "session/d0-1", "page.js"):
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
                assert client.http.request(method, f"/{TOKEN}/{target}").status_code == 405, (method, target)

    def test_headers_of_every_answer_and_a_page_that_names_nothing_elsewhere(self, client):
        for target in ("", "state", "page.js", "none"):
            headers = client.http.get(f"/{TOKEN}/{target}").headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cross-origin-resource-policy"] == "same-origin"
        for target in ("live.py", "%2e%2e%2flive.py", "assets/page.js", "session", "session/"):
            assert client.http.get(f"/{TOKEN}/{target}").status_code == 404, target
        page = client.http.get(f"/{TOKEN}/")
        assert page.headers["content-type"].startswith("text/html")
        assert "://" not in page.text
        assert "<script>" not in page.text


class TestState:
    def test_a_session_from_its_start_to_its_end(self, client, session):
        versions = []

        def listed() -> tuple[str, int]:
            (found,) = client.state()["sessions"]
            assert (found["kernel"], found["device"], found["host"]) == ("sgemm", "NVIDIA H200", "a host")
            versions.append(found["version"])
            return found["state"], found["trials"]

        assert listed() == ("running", 0)
        session.add(3)
        assert listed() == ("running", 3)
        session.end()
        assert listed() == ("ended", 3)
        assert len(set(versions)) == 3
        session.run = start_run(session.database, session.study, sampler="random", host="a host")
        assert listed() == ("running", 0)  # the newest run of the study

    def test_an_import_is_no_session_that_ended_at_once(self, client, path, key, device):
        with closing(Session(path, structs.replace(key, template_hash=""), device).database) as imported:
            end_run(imported, 1, {})
            (found,) = client.state()["sessions"]
        assert (found["state"], found["elapsed"]) == ("imported", "")

    def test_one_that_stores_nothing_may_have_been_killed_and_only_some_kernels(self, client, session, path):
        before = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        change(session.database, f"UPDATE runs SET started_at = '{before}'")
        (found,) = client.state()["sessions"]
        assert (found["state"], found["silent"]) == ("silent", "1 h 00 min")
        for kernel, count in (("sgemm", 1), ("other", 0)):
            of_kernel = Client(path, (kernel,))
            assert len(of_kernel.state()["sessions"]) == count
            of_kernel.follower.close()

    def test_a_row_that_does_not_match_its_schema(self, client, session):
        session.add(2)
        started = update(RUNS).values(started_at="2026-01-01T00:00:00+00:00")
        for changes in (
            [update(RUNS).values(started_at="yesterday")],
            [started, update(TRIALS).values(created_at="today")],
            [update(STUDIES).values(dtype="")],
        ):
            change(session.database, *changes)
            client.follower._disconnect()
            assert client.state()["sessions"] == []


class TestDrawing:
    def answer(self, client: Client, name: str, since: Any = 0) -> Any:
        client.follower.read()
        return client.get(f"session/{name}?since={since}")

    def test_only_what_changed_is_sent(self, client, path):
        store_session(path, Sessions(trials=40, ended=False, finals=False))
        name = client.state()["sessions"][0]["name"]
        assert client.get(f"session/{name}")["number"] == 0  # its trials are read from now on
        first = self.answer(client, name)
        charts = {chart["texts"]["name"]: chart for chart in first["charts"]}
        assert first["texts"]["order"] == list(charts)
        assert {"best_over_trials", "finals", "heat_map", "roofline", "drift"} <= charts.keys()
        assert charts["best_over_trials"]["figure"]["data"]
        assert charts["finals"]["figure"] is None
        assert [int(number) for number, *_ in first["texts"]["latest"]] == list(range(40, 25, -1))
        assert self.answer(client, name, first["number"]) == {"number": first["number"]}

        client.follower._drawings[name]._rest_until = 0.0
        with Database.open(path) as database, database.writing() as connection:
            failed = connection.execute(select(TRIALS).where(TRIALS.c.outcome == "wrong_result").limit(1)).mappings()
            row = dict(next(iter(failed)))
            del row["id"]
            connection.execute(TRIALS.insert(), row)
        later = self.answer(client, name, first["number"])
        changed = {chart["texts"]["name"] for chart in later["charts"]}
        assert later["number"] > first["number"]
        assert "best_over_trials" in changed
        assert not {"limits", "roofline", "finals"} & changed  # a failure changes none of these
        assert self.answer(client, name)["texts"]["order"] == list(charts)

    def test_drawing_rests_while_a_session_runs_and_not_at_its_end(self, client, session, name):
        first = self.answer(client, name)
        client.follower._drawings[name]._rest_until = time.monotonic() + 1000
        session.add(1)
        assert self.answer(client, name, first["number"]) == {"number": first["number"]}
        session.end()
        last = self.answer(client, name, first["number"])
        assert last["number"] > first["number"]
        assert last["version"] == client.get("state")["sessions"][0]["version"]

    def test_any_number_is_answered_and_sessions_that_are_listed_no_longer_are_freed(self, client, session, name):
        for since in ("-1", "x", "1e9", "99999999999999", "\N{SUPERSCRIPT TWO}", ""):
            assert self.answer(client, name, since)["charts"], since
        assert client.http.get(f"/{TOKEN}/session/d0-999").status_code == 404
        assert client.follower._drawings.keys() == {name}
        change(session.database, TRIALS.delete(), RUNS.delete())
        client.follower.read()
        assert (client.follower._stored, client.follower._drawings) == ({}, {})


class TestDatabase:
    def test_one_that_does_not_exist_yet_that_is_deleted_and_comes_back(self, client, path, request):
        assert "holds nothing yet" in client.message()
        assert not path.exists()
        session = request.getfixturevalue("session")
        assert client.message() == ""
        (first,) = client.get("state")["sessions"]
        session.database.close()
        kept = path.read_bytes()
        path.unlink()
        assert "was deleted or moved" in client.message()
        assert client.get("state")["sessions"][0]["name"] == first["name"]
        assert "holds nothing yet" in client.message()
        path.write_bytes(kept)
        assert client.message() == ""
        assert client.get("state")["sessions"][0]["version"] != first["version"]

    def test_one_that_another_process_holds(self, client, session, path):
        session.add(1)
        assert client.message() == ""
        session.database.close()
        client.follower._disconnect()

        def message() -> str:
            return str(client.get("state")["databases"][0]["message"])

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA journal_mode=DELETE")
            other.execute("BEGIN EXCLUSIVE")
            client.follower.start()
            wait_until(lambda: "another process may have locked it" in message(), message)
            assert client.get("state")["sessions"][0]["trials"] == 1
            other.execute("ROLLBACK")
            wait_until(lambda: not message(), message)

    def test_one_that_is_none(self, client, path):
        for content in (b"no database", b"SQLite format 3\0" + b"\xff" * 5000):
            path.write_bytes(content)
            assert str(path) in client.message()
            assert path.read_bytes() == content

    def test_one_of_an_older_version_is_not_upgraded(self, client, session, path):
        session.database.close()
        change_file(path, "UPDATE autotile_schema SET version_num = '0005'")
        before = path.read_bytes()
        assert "older autotile" in client.message()
        assert path.read_bytes() == before

    def test_nothing_is_written(self, client, session, path):
        session.add(3)
        session.end()
        session.database.close()
        before = path.read_bytes()
        for _ in range(3):
            client.state()
        client.follower._disconnect()
        assert path.read_bytes() == before
        assert path.with_name("live.db-wal").stat().st_size == 0  # SQLite's, which shares the memory of its log

    def test_several_side_by_side(self, path, tmp_path, session):
        followers = [DatabaseFollower(place, f"d{i}") for i, place in enumerate((path, tmp_path / "none.db"))]
        http = testclient.TestClient(live_application(followers, TOKEN), base_url="http://127.0.0.1")
        for follower in followers:
            follower.read()
        found = http.get(f"/{TOKEN}/state").json()
        assert [bool(one["message"]) for one in found["databases"]] == [False, True]
        assert [one["name"] for one in found["sessions"]] == [f"d0-{session.study}"]
        followers[0].close()


class TestServer:
    def test_the_loopback_only_with_a_token_of_its_own_and_known_kernels(self, path):
        servers = [LiveServer([path]) for _ in range(2)]
        with closing(servers[0]._socket) as bound, closing(servers[1]._socket):
            host, port = bound.getsockname()
            assert host == "127.0.0.1"
            assert servers[0].url.startswith(f"http://127.0.0.1:{port}/")
            with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 cannot be used"):
                LiveServer([path], port=port)
        with pytest.raises(UnknownKernelError):
            LiveServer([path], ["sgem_2d"])
        tokens = {server.url.split("/")[3] for server in servers}
        assert len(tokens) == 2
        assert all(len(token) >= 32 for token in tokens)

    def test_a_missing_package(self, path, monkeypatch):
        for missing in ("plotly", "starlette.applications", "uvicorn"):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, missing, None)
                with pytest.raises(ToolchainError, match=r"pip install 'autotile\[report\]'"):
                    LiveServer([path])

    @pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
    def test_the_command_until_it_is_interrupted(self, path, session, ending):
        command = [sys.executable, "-m", "autotile", "watch", str(path), "--no-open"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with heeded_interrupts(), subprocess.Popen(command, env=child_environment(), **options) as process:
            url = process.stdout.readline().strip()
            place, token = url.removeprefix("http://").rstrip("/").split("/")
            with closing(http.client.HTTPConnection(place, timeout=20)) as connection:
                for given, status in ((token, 200), ("wrong", 403)):
                    connection.request("GET", f"/{given}/state")
                    answer = connection.getresponse()
                    assert (answer.status, bool(answer.read())) == (status, True)
                process.send_signal(ending)  # while the connection is open, as a browser's is
                out, err = process.communicate(timeout=30)
        assert process.returncode == (0 if ending == signal.SIGINT else -signal.SIGTERM)
        assert out == ""
        assert err == "Ctrl-C ends it\n"
