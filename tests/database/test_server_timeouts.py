"""A server that does not answer, or not in time, ends in an error with a remedy, or in a fallback when serving."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from sqlalchemy import make_url, text

from autotile.database import engine as database_engine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.engine import LostServerError
from autotile.database.winners import SERVER_TIMEOUT_S
from autotile.errors import DatabaseError
from autotile.serving.dispatcher import Dispatcher


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Location of a server that accepts connections and never answers."""
    pytest.importorskip("psycopg")
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listening:
        yield f"postgresql://me:secret@127.0.0.1:{listening.getsockname()[1]}/tune"


@pytest.fixture
def silent_pooler() -> Iterator[str]:
    """Location of a pooler that lets everyone in and passes no statement on, as one whose server is down."""
    pytest.importorskip("psycopg")

    def let_in(client: socket.socket) -> None:
        with client, suppress(OSError):
            while request := client.recv(1024):
                if len(request) == 8:  # asks for encryption
                    client.sendall(b"N")
                elif request[4:8] == b"\0\3\0\0":  # begins
                    client.sendall(b"R\0\0\0\x08\0\0\0\0" + b"Z\0\0\0\x05I")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=let_in, args=(listening.accept()[0],), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"postgresql://me:secret@127.0.0.1:{listening.getsockname()[1]}/tune"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("open_database", [Database.open, Database.open_readonly])
def test_a_pooler_without_a_server_is_reported(silent_pooler: str, open_database: Any) -> None:
    start_s = time.monotonic()
    with pytest.raises(LostServerError, match="no answer to the first statement for 2 s: the server does not answer"):
        open_database(silent_pooler, server_timeout_s=1.0)
    assert time.monotonic() - start_s < 10


def test_the_words_of_a_command_that_waits_for_a_pooler_and_its_own_limit(
    silent_pooler: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LostServerError, match="for 3 s") as caught:
        Database.open_readonly(silent_pooler)
    with pytest.raises(LostServerError, match="for 2 s"):
        Database.open_readonly(f"{silent_pooler}?connect_timeout=2")
    waits = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert [text.partition(" the database")[0] for text in waits] == [
        "waiting for up to 3 s for",
        "waiting for up to 2 s for",
    ]
    assert "secret" not in " ".join([str(caught.value), *waits])


@pytest.mark.parametrize("open_database", [Database.open, Database.open_readonly])
def test_a_server_that_never_answers_is_reported(silent_server: str, open_database: Any) -> None:
    start_s = time.monotonic()
    with pytest.raises(DatabaseError, match="the server does not answer") as caught:
        open_database(silent_server, server_timeout_s=1.0)
    assert time.monotonic() - start_s < 10
    assert "secret" not in str(caught.value)


def test_serving_falls_back_and_says_why(silent_server: str) -> None:
    start_s = time.monotonic()
    kernel = Dispatcher(database=silent_server).get_best_kernel("matmul_naive", M=64, N=64, K=64, device="a100")
    assert time.monotonic() - start_s < 10
    assert "does not answer" in kernel.choice.unread
    assert "does not answer" in kernel.explain()
    assert "secret" not in kernel.explain()


def test_a_server_waits_no_longer_than_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_url("postgresql+psycopg://host/name")
    timeouts = database_engine._connection_timeouts(url, database_engine.LOCK_TIMEOUT_S)
    assert (timeouts["connect_timeout"], timeouts["tcp_user_timeout"]) == (30, 30_000)
    assert timeouts["keepalives_idle"] + timeouts["keepalives_interval"] * timeouts["keepalives_count"] == 30
    statement = database_engine._session_settings(url, database_engine.LOCK_TIMEOUT_S, readonly=False)
    assert "set_config('statement_timeout', '30000', false)" in statement
    assert "set_config('lock_timeout', '30000', false)" in statement


def test_what_the_url_states_precedes() -> None:
    url = make_url("postgresql+psycopg://host/name?connect_timeout=5&options=-c%20statement_timeout%3D0")
    timeouts = database_engine._connection_timeouts(url, SERVER_TIMEOUT_S)
    assert "connect_timeout" not in timeouts
    assert timeouts["tcp_user_timeout"] == 2000
    statement = database_engine._session_settings(url, SERVER_TIMEOUT_S, readonly=False)
    assert statement == "SELECT set_config('lock_timeout', '2000', false), set_config('jit', 'off', false)"
    both = url.update_query_dict({"options": "-c statement_timeout=0 -c lock_timeout=0 -c jit=on"})
    assert database_engine._session_settings(both, SERVER_TIMEOUT_S, readonly=False) == "SELECT 1"
    assert database_engine._connection_timeouts(make_url("postgresql+pg8000://host/name"), 1.0) == {}


@pytest.mark.parametrize("query", ["SELECT pg_sleep(20)", "LOCK TABLE misses IN ACCESS EXCLUSIVE MODE"])
def test_a_statement_that_takes_too_long_is_ended(query: str, server_url: str) -> None:
    with Database.open(server_url) as first, Database.open(server_url, server_timeout_s=0.5) as second:
        with first.writing() as holder:
            holder.execute(text("LOCK TABLE misses IN ACCESS EXCLUSIVE MODE"))
            start_s = time.monotonic()
            with pytest.raises(DatabaseError, match="overloaded, or another process"), second.writing() as connection:
                connection.execute(text(query))
            assert time.monotonic() - start_s < 10
        assert check_database(second).ok
