"""Dask, where it is installed, and the address of its scheduler.

Only the modules of clusters import this one, with ``--scheduler`` and in ``autotile worker``.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotile.errors import InputError, ToolchainError

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

__all__ = ["WorkerPlugin", "check_scheduler", "distributed", "ignore_interrupts", "local_host", "no_scheduler_error"]

_HANDSHAKE_S = 5.0
"""Time in which what has accepted a connection proves to be a scheduler."""
_TLS = "distributed.comm.tls"
"""Prefix of the keys of Dask's configuration that name certificates."""


def ignore_interrupts(worker: Any) -> None:
    """Ignore SIGINT in the process of a worker of Dask if a nanny ends it; for the process's main thread."""
    if getattr(worker, "nanny", None):
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_scheduler(address: str, *, insecure: bool) -> distributed.Security:
    """Return the certificates for the connection to a scheduler, from Dask's configuration.

    Raises
    ------
    InputError
        The address cannot be read; it leaves the machine without TLS although ``insecure`` is not set; or no
        certificates are configured.
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
        if not (insecure or _is_loopback(host)):
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
    _check_readable(f"{_TLS}.ca-file", security.tls_ca_file)
    if not _is_inline(security.tls_ca_file):
        try:
            ssl.create_default_context(cafile=security.tls_ca_file)
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                f"{security.tls_ca_file}, {_TLS}.ca-file of Dask's configuration, holds no certificate in PEM format: "
                f"{error}"
            ) from None
    for role in ("client", "worker"):
        _check_key_pair(f"{_TLS}.{role}", getattr(security, f"tls_{role}_cert"), getattr(security, f"tls_{role}_key"))
    return security


def _check_key_pair(name: str, certificate: str, key: str | None) -> None:
    """Raise InputError unless a certificate and its key can be read, and belong together."""
    _check_readable(f"{name}.cert", certificate)
    if key:
        _check_readable(f"{name}.key", key)
    if _is_inline(certificate) or (key and _is_inline(key)):
        return
    files = f"{certificate} and {key}, {name}.cert and {name}.key" if key else f"{certificate}, {name}.cert"
    try:  # with an empty password, as OpenSSL would ask for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InputError(
            f"{files} of Dask's configuration, cannot be used: {error}; expected a certificate in PEM format and its "
            f"key without a password{'' if key else f', which {name}.key names or the same file holds'}"
        ) from None


def _check_readable(name: str, file: str) -> None:
    """Raise InputError unless a file of Dask's configuration can be read."""
    if _is_inline(file):
        return
    try:
        Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise InputError(f"{file}, {name} of Dask's configuration, {reason}; expected a file in PEM format") from None


def _is_inline(file: str) -> bool:
    """Return whether a value of Dask's configuration is the content of a file in place of its name."""
    return "\n" in file


async def local_host(address: str, security: distributed.Security, limit_s: float) -> str:
    """Return the address of this machine by which it reaches a scheduler.

    Parameters
    ----------
    address
        Address of the scheduler.
    security
        Certificates, as `check_scheduler` returns them.
    limit_s
        Time in which the scheduler has to answer, in seconds.

    Raises
    ------
    InputError
        No scheduler answers.
    """
    try:
        async with asyncio.timeout(limit_s + _HANDSHAKE_S):
            connection = await connect(address, timeout=limit_s, **security.get_connection_args("worker"))
            try:
                await connection.write({"op": "identity", "reply": True})
                answer = await connection.read()
            finally:
                connection.abort()
    except Exception as error:  # whatever Dask raises where something else answers
        raise no_scheduler_error(address, error) from None
    if not isinstance(answer, dict) or "workers" not in answer:
        raise no_scheduler_error(address, "something else listens there")
    return str(unparse_host_port(get_address_host(connection.local_address)))


def no_scheduler_error(address: str, reason: BaseException | str) -> InputError:
    """Return the error for an address at which no scheduler answers, for the first cause of an error of Dask."""
    while isinstance(reason, BaseException) and (cause := reason.__cause__ or reason.__context__) is not None:
        reason = cause
    text = f"{reason}" or "it does not answer like a scheduler in time"
    return InputError(f"no scheduler answers at {address}: {text}; check the address, or start `dask scheduler` there")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
