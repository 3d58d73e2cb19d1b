"""Dask, where it is installed: the address of its scheduler, and a connection that is made again when it is lost.

Only the modules of clusters import this one, with ``--scheduler`` and in ``autotile worker``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from autotile.errors import InputError, ToolchainError, WorkerError

try:
    import dask

    # A default of lower priority than the user's configuration: each process would log every step of joining.
    dask.config.update_defaults({"logging": {"distributed": "warning"}})
    import distributed
    from distributed.comm import connect, get_address_host, unparse_host_port
    from distributed.diagnostics.plugin import WorkerPlugin

    # A nanny's process reads it before it has the configuration of its nanny.
    _NANNY_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"
    _LEVEL = {"DASK_LOGGING__DISTRIBUTED": dask.config.get("logging.distributed")}
    dask.config.set({_NANNY_ENVIRONMENT: dask.config.get(_NANNY_ENVIRONMENT) | _LEVEL})
except ImportError:
    raise ToolchainError(
        "clusters need Dask, which is not installed; install it with `pip install 'autotile[cluster]'`"
    ) from None

__all__ = ["Connection", "WorkerPlugin", "check_scheduler", "distributed", "ignore_interrupts", "local_host"]

_HANDSHAKE_S = 5.0
"""Time in which what has accepted a connection proves to be a scheduler."""
_TLS = "distributed.comm.tls"
"""Prefix of the keys of Dask's configuration that name certificates."""
_CONNECT_S = 10.0
_LOOK_S = 5.0
"""Time in which the scheduler answers."""
_POLL_S = 1.0
"""Interval at which it is asked what is offered."""
_RECONNECT_S = 300.0
"""Time that a scheduler may be gone: for a restart, or a break of the network."""
_LOGGERS = ("distributed", "distributed.client")
"""Loggers of Dask, whose records of a lost connection, with tracebacks, are not for the user."""


def ignore_interrupts(worker: Any) -> None:
    """Ignore SIGINT in the process of a worker of Dask if a nanny ends it; for the process's main thread."""
    if getattr(worker, "nanny", None):
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_scheduler(address: str, *, insecure: bool) -> distributed.Security:
    """Return the certificates for the connection to a scheduler, from Dask's configuration.

    Raise `InputError` if the address cannot be read, if it leaves the machine without TLS although ``insecure`` is not
    set, or if no certificates are configured.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    # Dask reads addresses in its own way: what both would not read alike is refused.
    is_plain = address == f"{parts.scheme}://{parts.netloc}" and "@" not in address if host else False
    if host is None or port is None or not is_plain or parts.scheme not in ("tls", "tcp"):
        raise InputError(
            f"the scheduler {address!r} cannot be read; expected tls:// or tcp://, a host and a port, such as tls://node1:8786"
        )
    if parts.scheme == "tcp":
        is_local = host == "localhost"
        with suppress(ValueError):
            is_local |= ip_address(host).is_loopback
        if not (insecure or is_local):
            raise InputError(
                f"{address} is not encrypted, and whoever reaches a scheduler runs programs on its machines; "
                "use tls://, or --insecure in a network that you trust"
            )
        return distributed.Security(require_encryption=False)
    security = distributed.Security(require_encryption=True)
    lacking = [name for name in ("ca_file", "client_cert", "worker_cert") if not getattr(security, f"tls_{name}")]
    if lacking:
        keys = " and ".join(f"{_TLS}.{name.replace('_cert', '.cert').replace('_', '-')}" for name in lacking)
        raise InputError(f"{address} needs certificates; name them in Dask's configuration as {keys}")
    authority = security.tls_ca_file
    if _is_file(f"{_TLS}.ca-file", authority):
        try:
            ssl.create_default_context(cafile=authority)
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                f"{authority}, {_TLS}.ca-file of Dask's configuration, holds no certificate in PEM format: {error}"
            ) from None
    for role in ("client", "worker"):
        name, certificate = f"{_TLS}.{role}", getattr(security, f"tls_{role}_cert")
        key = getattr(security, f"tls_{role}_key")
        if not all([_is_file(f"{name}.cert", certificate), not key or _is_file(f"{name}.key", key)]):
            continue
        files = f"{certificate} and {key}, {name}.cert and {name}.key" if key else f"{certificate}, {name}.cert"
        try:  # with an empty password, as OpenSSL would ask for one on the terminal
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InputError(
                f"{files} of Dask's configuration, cannot be used: {error}; expected a certificate in PEM format and "
                f"its key without a password{'' if key else f', which {name}.key names or the same file holds'}"
            ) from None
    return security


def _is_file(name: str, value: str) -> bool:
    """Return True if an entry of Dask's configuration names a file, False if it is the content of one."""
    if "\n" in value:
        return False
    try:
        Path(value).read_bytes()
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise InputError(f"{value}, {name} of Dask's configuration, {reason}; expected a file in PEM format") from None
    return True


async def local_host(address: str, security: distributed.Security, limit_s: float) -> str:
    """Return the address of this machine by which it reaches a scheduler; `InputError` if none answers in time."""
    try:
        async with asyncio.timeout(limit_s + _HANDSHAKE_S):
            connection = await connect(address, timeout=limit_s, **security.get_connection_args("worker"))
            try:
                await connection.write({"op": "identity", "reply": True})
                answer = await connection.read()
            finally:
                connection.abort()
    except Exception as error:  # whatever Dask raises where something else answers
        raise _no_scheduler(address, error) from None
    if not isinstance(answer, dict) or "workers" not in answer:
        raise _no_scheduler(address, "something else listens there")
    return str(unparse_host_port(get_address_host(connection.local_address)))


def _no_scheduler(address: str, reason: BaseException | str) -> InputError:
    """Return the error for an address at which no scheduler answers, for the first cause of an error of Dask."""
    while isinstance(reason, BaseException) and (cause := reason.__cause__ or reason.__context__) is not None:
        reason = cause
    text = f"{reason}" or "it does not answer like a scheduler in time"
    return InputError(f"no scheduler answers at {address}: {text}; check the address, or start `dask scheduler` there")


class Connection:
    """Connection to a scheduler.

    A thread asks every second what is offered. If the scheduler does not answer, the connection is made again when it
    does. Tasks that had no result are lost then: it is up to their owner to submit them again. Raise `InputError` if
    the address is not allowed, or nothing answers there.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        self._security = check_scheduler(address, insecure=insecure)
        self._address = address
        with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread runs a loop of its own
            pool.submit(asyncio.run, local_host(address, self._security, _CONNECT_S)).result()
        try:
            self._client = self._connected()
        except Exception as error:  # whatever Dask raises where something else answers
            raise _no_scheduler(address, error) from None
        self._levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._changed = threading.Condition()
        self._offers: list[Mapping[str, float]] = self._look() or []
        self._known = {name for resources in self._offers for name in resources}
        """Resources that were ever offered."""
        self._gone_at: dict[str, float] = {}
        """Time at which a look first missed a resource, by `time.monotonic`."""
        self._lost_at: float | None = None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="scheduler", daemon=True)
        self._watch.start()

    @property
    def lost_s(self) -> float:
        """Time for which the scheduler has not answered, in seconds; 0 if it has answered the last time."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

    @property
    def waiting(self) -> str:
        """Remark for the user while the scheduler does not answer; otherwise empty."""
        if self._lost_at is None:
            return ""
        return f"the scheduler {self._address} does not answer; it is waited for, {_RECONNECT_S / 60:.0f} min at most"

    def offers(self) -> list[Mapping[str, float]]:
        """Return the resources of each process of Dask that is present; none while the scheduler does not answer."""
        with self._changed:
            return [] if self._lost_at is not None else list(self._offers)

    def absent_s(self, resource: str) -> float:
        """Return the time for which a resource was not offered, in seconds, by a scheduler that answers."""
        with self._changed:
            return time.monotonic() - self._gone_at.get(resource, time.monotonic())

    def submit(self, function: Callable[..., Any], *arguments: Any, resource: str) -> Any:
        """Submit a task for a process that has a resource, and return its future.

        If the process dies, the scheduler has the task run by its successor, or by another one with the resource. If
        the scheduler is lost, the task is cancelled; raise `WorkerError` if it is lost already.
        """
        key = f"autotile-{uuid4().hex}"
        try:
            return self._client.submit(function, *arguments, key=key, resources={resource: 1}, pure=False)
        except Exception as error:  # of a client that is closed
            raise WorkerError(f"the scheduler {self._address} is lost: {error}") from None

    def is_lost(self, future: Any) -> bool:
        """Return True if a task was lost with an earlier connection."""
        return future.client is not self._client

    def await_look(self) -> None:
        """Wait until the scheduler was asked again; `WorkerError` after too long, or if the connection is closed."""
        with self._changed:
            if not self._ending.is_set():
                self._changed.wait(_POLL_S + _LOOK_S + _CONNECT_S)
        if self._ending.is_set():
            raise WorkerError(f"the connection to the scheduler {self._address} is closed")
        if self.lost_s > _RECONNECT_S:
            raise WorkerError(
                f"the scheduler {self._address} has not answered for {self.lost_s:.0f} s; all trials are stored: start "
                "`dask scheduler` again, and repeat the command, which goes on from them"
            )

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()
        self._client.close(timeout=_CONNECT_S)
        self._watch.join()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def _connected(self) -> Any:
        return distributed.Client(
            self._address, security=self._security, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=False
        )

    def _keep(self) -> None:
        """Ask the scheduler what is offered, and connect again where it was lost."""
        while not self._ending.wait(_POLL_S):
            found = self._look()
            if found is None and self._client.status == "closed":
                with suppress(OSError, TimeoutError, ValueError, RuntimeError):
                    self._client = self._connected()
                    found = self._look()
            with self._changed:
                now = time.monotonic()
                if found is None:  # what is absent cannot be known; after it, everything has time to join again
                    self._lost_at = self._lost_at or now
                    self._gone_at.clear()
                else:
                    self._lost_at, self._offers = None, found
                    present = {name for resources in found for name in resources}
                    self._known |= present
                    self._gone_at = {name: self._gone_at.get(name, now) for name in self._known - present}
                self._changed.notify_all()
        self._client.close(timeout=_CONNECT_S)  # one that was connected while the other was closed

    def _look(self) -> list[Mapping[str, float]] | None:
        """Return the offers of GPUs and compilers; None if the scheduler does not answer."""
        client = self._client
        try:
            found = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=_LOOK_S)
        except Exception:  # whatever Dask raises where the connection breaks, or is closed
            return None
        return [one.get("resources", {}) for one in found["workers"].values()] if client.status == "running" else None
