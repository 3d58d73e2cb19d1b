"""Locations of databases, of which none shows its secrets; and what a file and a PostgreSQL server do alike."""

import os
import socket
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from stored_runs import KEY, add_trial, add_trials, end_run, failed, measured, record_miss, start_run

from autotile.core.model import Outcome, Problem
from autotile.database import engine
from autotile.database.care import check_database
from autotile.database.database import Database, open_existing
from autotile.database.engine import parse_location
from autotile.database.paths import masked_message
from autotile.database.winners import ADD_MISSES, SERVER_TIMEOUT_S, miss_row, write_file
from autotile.errors import DatabaseError
from autotile.serving.dispatcher import Dispatcher
from autotile.tuning.options import TuneOptions

SECRET = "s3cr3t"

SERVERS = {
    f"postgresql://u:{SECRET}@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgres+psycopg2://u:{SECRET}@h/d": "postgresql+psycopg2://u:***@h/d",
    f"postgresql://u@h/d?password={SECRET}&application_name=x": "postgresql+psycopg://u:***@h/d?application_name=x",
    f"postgresql://u@h/d?p%61ssword={SECRET}": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?PassWord={SECRET}": "postgresql+psycopg://u@h/d?PassWord=***",
    f"postgresql://u@h/d?sslpassword={SECRET}": "postgresql+psycopg://u@h/d?sslpassword=***",
    f"postgresql://u@h/d?SSLPASSWORD={SECRET}&sslpassword=a": "postgresql+psycopg://u@h/d?SSLPASSWORD=***&sslpassword=***",
    f"postgresql://u@h/d?conninfo=password%3D{SECRET}": "postgresql+psycopg://u@h/d?conninfo=***",
    f"postgresql://u:a%40{SECRET}@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u:a/{SECRET}?&@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?sslmod={SECRET}": "postgresql+psycopg://u@h/d?sslmod=***",
    f"postgresql://u@h/d?pass%77ord={SECRET}": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?options=password%3D{SECRET}": "postgresql+psycopg://u@h/d?options=***",
    f"postgresql://u@h/d?options=-cx%3D{SECRET}": f"postgresql+psycopg://u@h/d?options=-cx%3D{SECRET}",
    f"postgresql://u@h/d?dbname=postgresql://u:{SECRET}@h": "postgresql+psycopg://u@h/d?dbname=***",
    f"postgresql://u%40team:{SECRET}@[::1]:5432/d": "postgresql+psycopg://u%40team:***@[::1]:5432/d",
    "postgresql://u@h/d?passfile=/home/me/.pgpass": "postgresql+psycopg://u@h/d?passfile=%2Fhome%2Fme%2F.pgpass",
}

REFUSED = [
    f"postgresql:/u:{SECRET}",
    f"postgresql:u:{SECRET}@h/d",
    f"postgresql+asyncpg://u:{SECRET}@h/d?sslpassword={SECRET}",
    f"postgresql://u:{SECRET}@h:port/d",
    f"postgresql://u:a@{SECRET}@h/d",
    f"postgresql://h/u:{SECRET}@h/d",
    f"POSTGRESQL://u:{SECRET}@h/d",
    f"jdbc:postgresql://u:{SECRET}@h/d",
    f" postgresql://u:{SECRET}@h/d",
    f"//u:{SECRET}@h/d",
    f"u:{SECRET}@h/d",
    f"u:a/{SECRET}@h/d",
    f"h/d?PASSWORD={SECRET}",
    f"h/d?ssl%70assword={SECRET}",
    f"host=h password={SECRET}",
    f"host=h password = 'a {SECRET}'",
    f"sqlite://u:{SECRET}@h/team.db",
    f"postgresql://u@h/d%3Bpassword%3D{SECRET}",
    f"postgresql://u@h/d?sslmode=disable#{SECRET}",
    f"postgresql://u;password={SECRET}@h/d",
    f"postgresql://u%3A{SECRET}@h/d",
    f"postgresql://u@h;password={SECRET}/d",
    f"postgresql://u@h:5432;password={SECRET}/d",
    f"postgresql://u@{SECRET}:x@h/d",
    f"postgresql://u@h/d?a b{SECRET}=1",
    f"postgresql%3A%2F%2Fu%3A{SECRET}%40h",
    f"jdbc:postgresql://h/d;password={SECRET}",
    f"Server=h;User Id=u;Pwd={SECRET}",
    f"Server=h;User Id=u;Pass%77ord={SECRET}",
    f"d;pass%2577ord={SECRET}",
    f"/data/d;password={SECRET}",
    f"./d#password={SECRET}",
    f":{SECRET}@h",
    f"@{SECRET}:@h",
    f"sqlite:///team.db;password={SECRET}",
    f"sqlite://:{SECRET}@/team.db",
    "sqlite:/team.db",
    "sqlite://team.db",
    "sqlite://",
    "",
    " ",
    "a\0b",
    "sqlite:///~no-such-user/team.db",
]


@pytest.mark.parametrize(("location", "shown"), SERVERS.items())
def test_the_text_of_a_server_masks_its_secrets(location, shown):
    found = parse_location(location)
    assert str(found) == shown
    assert repr(found) == f"ServerLocation({shown!r})"
    assert f"{[found]}" == f"[ServerLocation({shown!r})]"
    assert found == parse_location(location)
    assert SECRET in found.reveal().render_as_string(hide_password=False) or "passfile" in location


@pytest.mark.parametrize("location", REFUSED)
def test_what_is_neither_a_path_nor_a_url_is_refused_in_one_line(location):
    with pytest.raises(DatabaseError, match=r"expected the path|give the whole path") as caught:
        parse_location(location)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("team.db", "team.db"),
        ("./a:b@c.db", "a:b@c.db"),
        ("/data/secret=1/team.db", "/data/secret=1/team.db"),
        ("results/passes=3.db", "results/passes=3.db"),
        ("me@host.db", "me@host.db"),
        ("results//team.db", "results/team.db"),
        ("postgres/team.db", "postgres/team.db"),
        ("sqlite:///team.db", "team.db"),
        ("sqlite:////data/team.db", "/data/team.db"),
        (Path("postgresql"), "postgresql"),
    ],
)
def test_a_url_in_a_path_object_is_refused_and_a_path_stays_a_path(location, path):
    assert parse_location(location) == Path(path)
    for url in (f"postgresql:/u:{SECRET}@h", f"postgresql://u:{SECRET}@h/d"):
        with pytest.raises(DatabaseError, match=r"'postgresql:\.\.\.' \(2\d characters\) is not a database URL"):
            parse_location(Path(url))


class TestErrors:
    @pytest.mark.parametrize(
        "location",
        [
            f"postgresql://u:{SECRET}@h/d",
            f"postgresql://u:%73{SECRET[1:]}@h/d",
            f"postgresql://u@h/d?sslpassword={SECRET}",
            f"postgresql://u@h/d?conninfo={SECRET}",
        ],
    )
    @pytest.mark.parametrize("text", ["{}: refused", 'invalid option "{}"', "postgresql://u:{}@h/d", "SSLpassword={}"])
    def test_of_the_driver_are_masked_also_in_a_traceback(self, location, text):
        found = parse_location(location)
        for error in (
            OperationalError("connect", None, ValueError(text.format(SECRET))),
            SQLAlchemyError(text.format(SECRET)),
        ):
            with pytest.raises(DatabaseError, match=r"\*\*\*") as caught, engine.translated_errors(found):
                raise error
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__

    @pytest.mark.parametrize(
        ("password", "reason", "shown"),
        [
            ("p%2Fw", "p/w and p%2Fw", "*** and ***"),  # percent-encoded, in both forms
            ("a", "a database", "*** database"),  # words that hold a short one stay
        ],
    )
    def test_of_a_password_all_forms_but_no_other_words_are_masked(self, password, reason, shown):
        location = parse_location(f"postgresql://u:{password}@h/d")
        with pytest.raises(DatabaseError) as caught, engine.translated_errors(location):
            raise OperationalError("connect", None, ValueError(reason))
        assert str(caught.value) == f"database postgresql+psycopg://u:***@h/d: {shown}"

    def test_a_parameter_that_the_driver_does_not_take(self, monkeypatch):
        def refuse(*_: object, **__: object) -> None:
            raise TypeError(f"no parameter PASSWORD={SECRET}")

        monkeypatch.setattr("autotile.database.engine.create_engine", refuse)
        found = parse_location(f"postgresql://u@h/d?PASSWORD={SECRET}")
        with pytest.raises(DatabaseError, match=r"PASSWORD=\*\*\*$") as caught:
            engine.open_engine(found)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no kernel 'postgresql://u:s3cr3t@h/d'; try x@y", "no kernel 'postgresql://u:***@h/d'; try x@y"),
        ("no kernel 'postgres:s3cr3t@h'", "no kernel 'postgres:***@h'"),
        ("no kernel '@:s3cr3t@h'", "no kernel '@:***@h'"),
        ("no kernel 'Server=h;User Id=u;Password=s3cr3t'", "no kernel 'Server=h;User Id=u;Password=***'"),
        ("no kernel 'd#pass%77ord=s;3cr3t'", "no kernel 'd#pass%77ord=***'"),
        ("no size 'h/d?sslPassword=s3cr3t'", "no size 'h/d?sslPassword=***'"),
        ("no kernel 'postgresql://u:s3cr3t'", "no kernel 'postgresql://u:***'"),
        ("no answer of http://localhost:8080: refused", "no answer of http://localhost:8080: refused"),
        ("no size PASSES=3, TOKENS=4 at a.toml:3", "no size PASSES=3, TOKENS=4 at a.toml:3"),
        (
            "expected postgresql+psycopg://user:password@host/name",
            "expected postgresql+psycopg://user:password@host/name",
        ),
        ("postgresql+psycopg://u:***@h:5432/d: refused", "postgresql+psycopg://u:***@h:5432/d: refused"),
    ],
)
def test_a_url_in_any_message_is_masked(message, shown):
    assert masked_message(message) == shown


def test_a_server_that_cannot_be_used_says_why_and_options_do_not_show_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for url, message in (
        ("mysql://", "kind 'mysql' is not supported; expected the path"),
        ("postgresql+nosuch://", r"no driver is available for postgresql\+nosuch://u:\*\*\*@h/d"),
        ("postgresql://", r"u:\*\*\*@h/d needs .*pip install 'psycopg\[binary\]'"),
    ):
        with pytest.raises(DatabaseError, match=message) as caught:
            Database.open(f"{url}u:{SECRET}@h/d")
        assert SECRET not in str(caught.value)
    assert SECRET not in repr(TuneOptions(database=f"postgresql://u:{SECRET}@h/d"))


def test_trials_come_back_and_the_finals_decide_and_none_lacks_its_study_or_run(shared, location, fresh_key, device):
    study = shared.study(fresh_key, device)
    assert shared.study(fresh_key, device) == study
    assert shared.find_study(structs.replace(fresh_key, source="replayed")) is None
    run = start_run(shared, study, sampler="tpe", seed=2**40)
    fast, winner = measured({"BM": 64, "WIDE": True, "KIND": "float4"}, 10.0), measured({"BM": 32}, 11.0)
    strange = failed({"BM": 1}, Outcome.COMPILE_FAILED, "error:\0 bad byte \udcff")  # as no database takes it
    add_trials(shared, study, run, [fast, strange])
    add_trial(shared, study, run, winner, phase="final", rank=1)
    assert shared.trials(study) == [fast, replace(strange, reason="error: bad byte ?"), winner]
    assert list(shared.trials(study)[0].config) == ["BM", "WIDE", "KIND"]
    assert [best.trial for best in shared.best(study_id=study)] == [fast]
    end_run(shared, run, {"winner": "BM=32"})
    assert [best.trial for best in shared.best(study_id=study)] == [winner]
    assert [summary.best_time_us for summary in shared.studies() if summary.study_id == study] == [11.0]
    with open_existing(location) as reader:
        assert reader.find_study(fresh_key) == study
        with pytest.raises(DatabaseError, match="reading only"):
            record_miss(reader, fresh_key.problem, "H200", "default")
    for study_id, run_id in ((study, 2**30), (2**30, run)):  # a trial needs both
        with pytest.raises(DatabaseError, match=r"(?i)foreign key constraint"):
            add_trial(shared, study_id, run_id, failed({"BM": 1}, Outcome.CRASHED))
    assert check_database(shared).ok


def test_misses_are_counted_a_problem_a_gpu_and_a_tier(shared):
    kernel = os.urandom(8).hex()
    first, second = (Problem(kernel, {"M": m, "N": 2}, "float32") for m in (1, 3))
    record_miss(shared, second, "H200", "default")
    before = shared.misses(kernel)[0].last_at
    for sizes in ({"M": 1, "N": 2}, {"N": 2, "M": 1}):
        record_miss(shared, Problem(kernel, sizes, "float32"), "H200", "nearest")
    rows = [miss_row(first, "H200", "nearest", 5), miss_row(second, "H200", "default", 3)]
    if shared.path is None:
        shared.add_misses(rows)
    else:  # without the engine, as serving does
        assert write_file(shared.path, ADD_MISSES, rows, timeout_s=10.0)
    misses = shared.misses(kernel)
    assert [(miss.problem, miss.tier, miss.count) for miss in misses] == [(first, "nearest", 7), (second, "default", 4)]
    assert all((miss.gpu_name, miss.last_at > before) == ("H200", True) for miss in misses)
    assert shared.misses("other") == []


@pytest.mark.parametrize("location", ["postgresql"], indirect=True)
def test_a_connection_that_the_server_closed_is_replaced(shared, location, monkeypatch):
    def end_connections() -> None:
        shared.find_study(KEY)
        with Database.open(location) as other, other.reading() as connection:
            where = "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity {where}"))

    monkeypatch.setattr(engine, "_IDLE_S", -1.0)
    end_connections()
    assert shared.find_study(KEY) is None
    monkeypatch.setattr(engine, "_IDLE_S", 60.0)  # it was used just now, and is not checked
    end_connections()
    with pytest.raises(engine.LostServerError):
        shared.find_study(KEY)
    assert shared.find_study(KEY) is None


@pytest.fixture
def silent_pooler():
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


def test_a_pooler_without_a_server_and_the_words_of_a_command_that_waits_for_it(silent_pooler, caplog):
    with pytest.raises(DatabaseError) as caught:
        Database.open("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in str(caught.value)
    expected = "no answer to the first statement for 2 s: the server does not answer"
    with pytest.raises(engine.LostServerError, match=expected):
        Database.open(silent_pooler, server_timeout_s=1.0)
    assert not caplog.records
    with pytest.raises(engine.LostServerError, match="for 3 s") as caught:
        Database.open_readonly(silent_pooler)
    with pytest.raises(engine.LostServerError, match="for 2 s"):
        Database.open_readonly(f"{silent_pooler}?connect_timeout=2")
    waits = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert [text.partition(" the database")[0] for text in waits] == [f"waiting for up to {s} s for" for s in (3, 2)]
    assert "secret" not in " ".join([str(caught.value), *waits])


def test_serving_falls_back_where_a_server_never_answers_and_says_why(monkeypatch):
    pytest.importorskip("psycopg")
    limits, limits_of = [], engine._server_limits
    monkeypatch.setattr(
        engine, "_server_limits", lambda *given, **named: limits.append(limits_of(*given, **named)) or limits[-1]
    )
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listening:  # it accepts, and never answers
        url = f"postgresql://me:secret@127.0.0.1:{listening.getsockname()[1]}/tune"
        kernel = Dispatcher(database=url).get_best_kernel("matmul_naive", M=64, N=64, K=64, device="a100")
    assert {(limit_s, network["connect_timeout"]) for limit_s, network, _ in limits} == {(2, 2)}
    assert "the server does not answer" in kernel.choice.unread
    assert "does not answer" in kernel.explain()
    assert "secret" not in kernel.explain()


def test_a_server_waits_no_longer_than_a_file_and_what_the_url_states_precedes():
    def limits(text: str, timeout_s: float) -> tuple[int, dict[str, int], str]:
        return engine._server_limits(make_url(f"postgresql+{text}"), timeout_s, readonly=False)

    limit_s, network, statement = limits("psycopg://host/name", engine.LOCK_TIMEOUT_S)
    assert (limit_s, network["connect_timeout"], network["tcp_user_timeout"]) == (30, 30, 30_000)
    assert network["keepalives_idle"] + network["keepalives_interval"] * network["keepalives_count"] == 30
    assert "set_config('statement_timeout', '30000', false)" in statement
    assert "set_config('lock_timeout', '30000', false)" in statement
    options = "psycopg://host/name?connect_timeout=5&options=-c%20statement_timeout%3D0"
    limit_s, network, statement = limits(options, SERVER_TIMEOUT_S)
    assert (limit_s, network["tcp_user_timeout"], "connect_timeout" in network) == (5, 2000, False)
    assert statement == "SELECT set_config('lock_timeout', '2000', false), set_config('jit', 'off', false)"
    assert limits(f"{options}%20-c%20lock_timeout%3D0%20-c%20jit%3Don", SERVER_TIMEOUT_S)[2] == "SELECT 1"
    assert limits("pg8000://host/name", 1.0)[1] == {}


@pytest.mark.parametrize("query", ["SELECT pg_sleep(20)", "LOCK TABLE misses IN ACCESS EXCLUSIVE MODE"])
def test_a_statement_that_takes_too_long_is_ended(query, server_url):
    with Database.open(server_url) as first, Database.open(server_url, server_timeout_s=0.5) as second:
        with first.writing() as holder:
            holder.execute(text("LOCK TABLE misses IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(DatabaseError, match="overloaded, or another process"), second.writing() as connection:
                connection.execute(text(query))
        assert check_database(second).ok
