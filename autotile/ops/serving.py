"""Look at what would be served."""

from __future__ import annotations

from pathlib import Path

from autotile.api.targets import check_device_index, open_problem
from autotile.kernel.workrate import Workrate
from autotile.ops.reading import open_to_read
from autotile.report.served import ServedReport
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings


def best(
    kernel: str,
    sizes: dict[str, int],
    *,
    dtype: str | None = None,
    device: str | None = None,
    database: str | None = None,
    bundle: Path | None = None,
) -> ServedReport:
    """The best known configuration of a kernel for a problem, and why it is the one that is served.

    A look is not counted as a miss.

    Parameters
    ----------
    kernel, sizes, dtype
        The problem.
    device
        Name of a GPU profile, or the index of a GPU of this machine; None for the current one.
    database
        Path or URL; None for the user's own.
    bundle
        A file to look into in place of the database.

    Raises
    ------
    InputError
        Unknown kernel, size, dtype or device, a malformed search-space file, or a database that cannot be read.
    """
    place: int | str | None = device
    if device is not None and device.isdecimal():
        place = int(device)
        check_device_index(place)
    location = database or read_settings().database
    if bundle is None:
        loaded, _ = open_problem(kernel, sizes, dtype)
        _check_readable(database, loaded.name)
    bound = find_best_kernel(kernel, dtype, place, location, sizes, bundle=bundle)
    return ServedReport(bound, Workrate.of(bound.definition.spec, bound.problem))


def _check_readable(database: str | None, kernel: str) -> None:
    """Refuse a database that cannot be read: a program is served the default then, but who looks should know."""
    opened = open_to_read(database)
    if opened is not None:
        with opened:
            opened.best(kernel)
