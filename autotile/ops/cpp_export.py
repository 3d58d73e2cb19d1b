"""Export a tuned kernel for C++ programs: a header and cubins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autotile import __version__
from autotile.database.paths import atomic_write
from autotile.database.winners import Winner
from autotile.errors import InputError
from autotile.exchange.cpp_header import HeaderCubin, namespace_of, write_header
from autotile.ops.shipping import ShippedCubin, Wanted, gather
from autotile.report.header import HeaderReport


def export_header(
    kernel: str,
    sizes: Mapping[str, int],
    output: Path,
    *,
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    database: str | None = None,
) -> HeaderReport:
    """Write a C++ header that chooses a configuration from the sizes, and the cubins beside it.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file.
    sizes
        Of one tuned problem; none for all.
    output
        The header.
    architectures, dtype, database
        As for `autotile.ops.shipping.gather`; None stands for the kernel's first dtype.

    Raises
    ------
    InputError
        As for `gather`, or a file cannot be written.
    """
    (shipment,) = gather([Wanted(kernel, sizes or None)], architectures, dtype=dtype, database=database)
    spec = shipment.kernel.spec
    element_type = dtype or spec.dtypes[0]
    cubins = [shipped for shipped in shipment.cubins if shipped.dtype == element_type]
    winners = [winner for winner in shipment.winners if winner.key.dtype == element_type]
    held = [_held(shipped, output.stem) for shipped in cubins]
    rules = [stored for stored in shipment.rules if stored.key.dtype == element_type]
    ordered = _ordered(winners)
    text = write_header(spec, element_type, ordered, held, rules=rules, stem=output.stem, version=__version__)
    files = {one.file: shipped.cubin.path.read_bytes() for one, shipped in zip(held, cubins, strict=True)}
    _write({output: text.encode(), **{output.with_name(name): data for name, data in files.items()}})
    namespace = f"autotile::{namespace_of(spec, element_type)}"
    return HeaderReport(str(output), namespace, sorted(files), len(winners), shipment.notices)


def _held(shipped: ShippedCubin, stem: str) -> HeaderCubin:
    file = f"{stem}.{shipped.target}.{shipped.cubin.cubin_hash[:12]}.cubin"
    return HeaderCubin(shipped.target, shipped.flags, shipped.config, shipped.cubin.resources, file)


def _ordered(winners: Sequence[Winner]) -> list[Winner]:
    """What is taken first of those that are equally near: measured before replayed, cold, own, newest."""
    return sorted(
        winners, key=lambda w: (w.key.source != "cuda", w.key.l2_mode != "cold", w.shipped, -w.tuned_at.timestamp())
    )


def _write(files: Mapping[Path, bytes]) -> None:
    for path, data in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as stream:
                stream.write(data)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None
