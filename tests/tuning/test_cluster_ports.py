"""Where the processes of a cluster can be reached: whoever reaches a process of Dask can run programs on it."""

import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from cluster_kit import listening, not_loopback, outer_address, running_cluster
from processes import wait_until

from autotile.errors import InputError
from autotile.tuning.cluster.connection import Connection

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(r"dask (scheduler [^`&#\n]+)")
HOST = re.compile(r"(?<=://)(head|\$\(hostname\)|[\w.]+):8786")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/*.sh"))


def test_with_tls_on_the_interface_that_reaches_the_scheduler(bench, tmp_path, tls):
    """All ports of the cluster, before a session on a worker with a GPU and compilers, and meanwhile."""
    host = outer_address()
    if host is None:
        pytest.skip("this machine has the loopback address alone")
    recording, meanwhile = bench.record(), set[tuple[str, int]]()
    with running_cluster(tmp_path, tls, host) as kit:
        worker = kit.worker("--replay", str(recording), "--compile", "1")
        with closing(Connection(kit.scheduler, insecure=False)) as connection:
            wait_until(lambda: len(connection.offers()) >= 2)
        before, own = listening(worker.pid), listening(os.getpid())

        def observe(_: object) -> None:
            meanwhile.update(listening(worker.pid), listening(os.getpid()) - own)

        assert bench.tune(recording, observe, sampler="brute-force", scheduler=kit.scheduler).winner is not None
        for ports in (before, meanwhile):
            assert {address for address, _ in ports} == {host, "127.0.0.1"}
        outer = {port for address, port in before | meanwhile if address == host}
        assert len(outer) >= 4
        for port in outer:
            assert speaks_tls(host, port)
            assert not answers_a_stranger(host, port, tls)


def speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), timeout=20) as plain, context.wrap_socket(plain) as secure:
        return secure.version() is not None


def answers_a_stranger(host: str, port: int, tls: Mapping[str, str]) -> bool:
    """Return whether a port has anything to say to one without a certificate."""
    context = ssl.create_default_context(cafile=tls["DASK_DISTRIBUTED__COMM__TLS__CA_FILE"])
    context.check_hostname = False
    try:
        with socket.create_connection((host, port), timeout=20) as plain, context.wrap_socket(plain) as secure:
            return bool(secure.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


def recipes() -> list[str]:
    """Return the commands with HOST and PORT in place of those of each page."""
    found = {one[1].strip() for page in PAGES for one in RECIPE.finditer(page.read_text()) if "--h" in one[1]}
    return sorted({HOST.sub("HOST:PORT", recipe) for recipe in found})


def test_the_pages_name_schedulers():
    assert len(recipes()) >= 2


@pytest.mark.parametrize("recipe", recipes())
def test_a_scheduler_as_on_the_pages_is_open_to_nobody(tmp_path, tls, recipe):
    scheme, folder = "tls" if "tls://" in recipe else "tcp", tmp_path / "scheduler"
    host = (outer_address() if scheme == "tls" else None) or "127.0.0.1"
    with closing(socket.create_server((host, 0))) as free:
        port = free.getsockname()[1]
    assert "HOST:PORT" in recipe
    folder.mkdir()
    command = [sys.executable, "-m", "dask", *recipe.replace("HOST:PORT", f"{host}:{port}").split()]
    environment = {**os.environ, **tls}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, env=environment)
    try:
        with closing(connected(f"{scheme}://{host}:{port}")):
            found = listening(process.pid)
            assert (host, port) in found
            assert not_loopback(found - {(host, port)}) == []
    finally:
        process.terminate()
        process.wait(60)


def connected(address: str) -> Connection:
    for _ in range(3):
        try:
            return Connection(address, insecure=False)
        except InputError as error:
            last = error
    raise last
