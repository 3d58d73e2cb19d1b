"""A PostgreSQL server of the tests' own, on the loopback address, with roles and a password made up for it."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

_START_S = 60.0
_SETTINGS = ("listen_addresses=127.0.0.1", "unix_socket_directories=")
TEST_SETTINGS = ("fsync=off", "shared_buffers=16MB", "wal_writer_delay=10s")
"""The last one lets a crash undo commits that did not wait for the disk."""


def programs_folder() -> Path | None:
    """Return the folder of ``initdb`` and ``postgres``: the one on the path, else Debian's newest; None without any."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: one.parent.name, reverse=True)
    return next((one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()), None)


class PostgresqlServer:
    """A running server, made by `running_server`; its user, None for this process's own, owns the empty folder."""

    def __init__(self, programs: Path, folder: Path, user: str | None, settings: Sequence[str]) -> None:
        self._programs, self._folder, self._user = programs, folder, user
        self._settings = (*_SETTINGS, *settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._emptied: str | None = None
        self.password = secrets.token_hex(12)
        with closing(socket.create_server(("127.0.0.1", 0))) as listening:
            self.port = listening.getsockname()[1]

    def url(self, role: str = "owner", database: str = "postgres", *, has_password: bool = True) -> str:
        """Return the URL of a database for a role; all roles of the tests have the same password."""
        password = f":{self.password}" if has_password else ""
        return f"postgresql://{role}{password}@127.0.0.1:{self.port}/{database}"

    def create(self) -> None:
        password = self._folder / "password"
        password.write_text(self.password)
        password.chmod(0o600)
        if self._user is not None:
            shutil.chown(password, self._user)
        options = ["-D", str(self._data), "-U", "owner", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-sync"]
        made = self._popen([str(self._programs / "initdb"), *options, f"--pwfile={password}"])
        output, _ = made.communicate(timeout=_START_S)
        if made.returncode:
            raise RuntimeError(f"initdb failed: {output.decode()}")
        password.unlink()

    def start(self) -> None:
        settings = [word for setting in (*self._settings, f"port={self.port}") for word in ("-c", setting)]
        die_with_parent = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        log = (self._folder / "log").open("ab")
        with closing(log):
            command = [*die_with_parent, str(self._programs / "postgres"), "-D", str(self._data), *settings]
            self._process = self._popen(command, log.fileno())
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {(self._folder / 'log').read_text()}")
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT ends its connections, SIGQUIT stops as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=_START_S)
            self._process = None

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Execute statements as the owner, each on its own."""
        import psycopg

        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]

    def new_database(self) -> str:
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(database=name)

    def emptied_database(self) -> str:
        """Return the URL of the same database each time, emptied: to create one takes ten times as long."""
        if self._emptied is None:
            self._emptied = self.new_database()
        else:
            others = "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            end = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity {others}"
            name = self._emptied.rpartition("/")[2]
            self.execute(end, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public", database=name)
        return self._emptied

    def log(self) -> str:
        return (self._folder / "log").read_text()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _is_ready(self) -> bool:
        import psycopg

        with suppress(psycopg.OperationalError), closing(psycopg.connect(self.url(), connect_timeout=2)):
            return True
        return False

    def _popen(self, command: list[str], output: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self._folder,
            user=self._user,
            group=pwd.getpwnam(self._user).pw_gid if self._user is not None else None,
            extra_groups=[] if self._user is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the tests, which then stop the server
        )


@contextmanager
def running_server(programs: Path, settings: Sequence[str] = TEST_SETTINGS) -> Iterator[PostgresqlServer]:
    """Start a server with a data folder of its own, and stop it at the end."""
    user = _server_user()
    folder = Path(tempfile.mkdtemp(prefix="autotile-postgresql-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresqlServer(programs, folder, user, settings)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_user() -> str | None:
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
