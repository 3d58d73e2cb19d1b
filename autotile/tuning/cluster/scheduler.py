"""Dask, where it is installed, and the address of its scheduler.

Only the modules of clusters import this one, with ``--scheduler`` and in ``autotile worker``.
"""

from __future__ import annotations

import signal
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
    from distributed.diagnostics.plugin import WorkerPlugin

    # A nanny's process reads it before it has the configuration of its nanny.
    _NANNY_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"
    _LEVEL = {"DASK_LOGGING__DISTRIBUTED": dask.config.get("logging.distributed")}
    dask.config.set({_NANNY_ENVIRONMENT: dask.config.get(_NANNY_ENVIRONMENT) | _LEVEL})
except ImportError:
    raise ToolchainError(
        "clusters need Dask, which is not installed; install it with `pip install 'autotile[cluster]'`"
    ) from None

__all__ = ["WorkerPlugin", "check_scheduler", "distributed", "ignore_interrupts"]


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
    if host is None or port is None or parts.scheme not in ("tls", "tcp"):
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
        keys = " and ".join(
            f"distributed.comm.tls.{name.replace('_cert', '.cert').replace('_', '-')}" for name in lacking
        )
        raise InputError(f"{address} needs certificates; name them in Dask's configuration as {keys}")
    files = [security.tls_ca_file, security.tls_client_cert, security.tls_worker_cert]
    for file in files:
        if "\n" not in file and not Path(file).is_file():
            raise InputError(f"the certificate {file} of Dask's configuration does not exist")
    return security


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
