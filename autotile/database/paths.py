"""Path checks for an SQLite file, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autotile.errors import DatabaseError

DATABASE_MAGIC = b"SQLite format 3\0"
"""First bytes of every SQLite database: https://sqlite.org/fileformat.html, "The Database Header"."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of a file when the block ends well.

    What is no ordinary file, such as ``/dev/stdout``, is written to as it is. A database is never replaced: it may
    hold weeks of measurements, and a slip of the hand names it in place of an output.

    Raises
    ------
    OSError
        It cannot be written, or is a database; the file is as it was.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
    if path.exists() and _is_database(path):
        raise FileExistsError(errno.EEXIST, "it is a database, which is not overwritten", str(path))
    place = path.resolve()  # a link stays one
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # some file systems find out only now that they are full
        partial.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _is_database(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(DATABASE_MAGIC)) == DATABASE_MAGIC


_NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre"}
    | {"nfs", "nfs4", "ocfs2", "smb3", "smbfs"}
)
"""Several hosts may have these mounted, and WAL needs memory shared by all writers: https://sqlite.org/wal.html."""

_FULL_BELOW_BYTES = 64 * 2**10
"""With less room SQLite cannot make the files that it needs beside a database: the index of its log takes 32 KiB."""


def check_readable(path: Path) -> None:
    """Refuse what cannot be a database, before SQLite gives a vaguer answer.

    The file is not opened: when this process closed it again, its other connections to that database would lose their
    locks, and what they write from then on: https://sqlite.org/howtocorrupt.html, section 2.2.

    Raises
    ------
    DatabaseError
        The path is a folder, or cannot be read.
    """
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder; expected the path of a database file, such as {path / 'autotile.db'}")
    if path.exists() and not os.access(path, os.R_OK):
        raise DatabaseError(f"cannot read the database {path}: change its permissions, or name another database")


def refuse_other_files(path: Path) -> None:
    """Refuse what SQLite cannot read because it is something else, and not a damaged database.

    Raises
    ------
    DatabaseError
        The file does not begin as an SQLite file does.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(DATABASE_MAGIC))
    except OSError as error:
        raise DatabaseError(f"cannot read the database {path}: {error.strerror}; check its permissions") from None
    if start and start != DATABASE_MAGIC:
        raise DatabaseError(f"{path} is not a database, so it is left as it is: move it away, or name another database")


def check_writable(path: Path) -> None:
    """Make the folder of a database, and see that the database can be written there.

    Raises
    ------
    DatabaseError
        The folder cannot be made, or folder or file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(f"cannot make the folder {path.parent}: {error.strerror}; name another database") from None
    # SQLite keeps its log beside the file, so the folder must be writable too.
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK):
            raise DatabaseError(
                f"cannot write {place}: change its permissions, or name a database in a folder of your own"
            )


def network_notice(path: Path) -> str:
    """What the user of a database on a network file system should know; empty where it lies on a local one."""
    kind = network_file_system(path)
    if not kind:
        return ""
    return (
        f"the database {path} lies on a network file system ({kind}): it is written without the log that lets others "
        "read meanwhile; for several hosts at once name a PostgreSQL server"
    )


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one that takes its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def has_log(path: Path) -> bool:
    """Whether a log with entries that the file lacks lies beside it."""
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def is_full(folder: Path) -> bool:
    """Whether a disk has no room for what SQLite needs beside a database."""
    disk = os.statvfs(folder)
    has_blocks = disk.f_blocks > 0  # /proc and its like have none, and are not full
    return has_blocks and disk.f_bavail * disk.f_frsize < _FULL_BELOW_BYTES


def network_file_system(path: Path) -> str:
    """Kind of the network file system that a file lies on, from Linux's table of mounts; empty for a local one."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    folder = path.absolute().parent.resolve()
    mounts = [(fields[1].replace("\\040", " "), fields[2]) for line in lines if len(fields := line.split()) > 2]
    # The longest mount point holds the folder; of several at one place, the last one covers the others.
    around = [(len(point), order, kind) for order, (point, kind) in enumerate(mounts) if folder.is_relative_to(point)]
    kind = max(around)[-1] if around else ""
    return kind if kind in _NETWORK_FILE_SYSTEMS else ""
