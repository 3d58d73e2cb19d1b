"""Make a bundle: one file that serves kernels with neither compiler nor database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from autotile import __version__
from autotile.cli.assignments import read_sizes
from autotile.errors import InputError
from autotile.exchange.bundle import BundledCubin, BundledKernel, cubin_member, write_bundle
from autotile.ops.shipping import Shipment, Wanted, gather
from autotile.report.bundle import BundleReport, BundleRow


def make_bundle(
    wanted: Sequence[Wanted],
    output: Path,
    *,
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    database: str | None = None,
) -> BundleReport:
    """Compile the winners of kernels, and the defaults, and write them with their search-space files into one file.

    Parameters
    ----------
    wanted
        Kernels, each with a problem or with all that are tuned.
    output
        The file.
    architectures, dtype, database
        As for `autotile.ops.shipping.gather`.

    Raises
    ------
    InputError
        As for `gather`; two kernels have the same name; or the file cannot be written.
    """
    shipments = gather(wanted, architectures, dtype=dtype, database=database)
    images: dict[str, bytes] = {}
    kernels = [_bundled(shipment, images) for shipment in shipments]
    names = [held.kernel.name for held in kernels]
    if len(set(names)) < len(names):
        raise InputError(f"a bundle holds a kernel once, and two of {', '.join(names)} have the same name; make two")
    digest = write_bundle(output, kernels, images, __version__)
    rows = [BundleRow(h.kernel.name, len(h.winners), len(h.cubins), _targets(h)) for h in kernels]
    notices = tuple(notice for shipment in shipments for notice in shipment.notices)
    return BundleReport(str(output), digest, output.stat().st_size, rows, notices)


def read_wanted(words: Iterable[str]) -> list[Wanted]:
    """Read ``KERNEL [SIZE=N ...] ...``: sizes belong to the kernel before them.

    Raises
    ------
    InputError
        The first word is no kernel, or a size cannot be read.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{word!r} stands before any kernel; expected KERNEL [SIZE=N ...] ...")
    return [Wanted(kernel, read_sizes(sizes) if sizes else None) for kernel, sizes in groups]


def _bundled(shipment: Shipment, images: dict[str, bytes]) -> BundledKernel:
    """A shipment as a bundle holds it; its cubins are added to ``images``."""
    cubins = []
    for shipped in shipment.cubins:
        image = shipped.cubin.path.read_bytes()
        member = cubin_member(image)
        images[member] = image
        resources = shipped.cubin.resources
        cubins.append(BundledCubin(shipped.target, shipped.dtype, shipped.flags, shipped.config, resources, member))
    return BundledKernel(shipment.kernel, shipment.nvrtc_version, shipment.winners, cubins, shipment.rules)


def _targets(held: BundledKernel) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cubin.target for cubin in held.cubins))
