"""Texts of database locations, checks of the path of an SQLite file, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from autotile.errors import DatabaseError, InputError
from autotile.settings import absolute_path, output_path, user_path

DATABASE_MAGIC = b"SQLite format 3\0"
"""First bytes of every SQLite database: https://sqlite.org/fileformat.html, "The Database Header"."""

_NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre"}
    | {"nfs", "nfs4", "ocfs2", "smb3", "smbfs"}
)
"""File systems that several hosts may mount; WAL needs memory shared by all writers: https://sqlite.org/wal.html."""

_MIN_FREE_BYTES = 64 * 2**10
"""Free space below which SQLite cannot create the files that it needs beside a database: the WAL index takes 32 KiB."""

EXAMPLE_CREDENTIALS = "user:password@"
"""User and password in the URL that messages give as an example."""

MASK = "***"
"""Replacement of a secret, as in SQLAlchemy."""

_SECRET_KEY = r"(?i)password|passwd|passphrase|secret|^(pwd|dsn|conninfo)$"
"""Names of connection parameters whose values are or contain secrets, such as libpq's ``password`` and ``sslpassword``:
https://www.postgresql.org/docs/current/libpq-connect.html, "Parameter Key Words"."""

_KEY = r"(?<![\w%-])([\w%-]+)\s*=\s*"
"""Name of a parameter of a URL's query, or of a connection string of libpq, JDBC or ADO."""

_VALUE = r"'[^']*'|[^&\s'\"]*"
"""Value after a name; it extends over what may separate parameters elsewhere, since a password may hold that."""

_SCHEME = r"(?i)[a-z][\w+.-]*:/+|(postgres|sqlite)[\w+]*(//|:)"
"""Start of a URL, also of one that lacks a slash or the colon. A path that starts so can be written with ``./``."""

_CREDENTIALS = r"(?s)(?![./~]).*:.*@|//.*@"
"""Start of a URL without its scheme: user, password and ``@``."""

_URL_IN_TEXT = r"(?i)[a-z][\w+.-]*(?::/+|//)[^\s:/@]*:[^\s'\"]*|[^\s:/@'\"]*:[^\s'\"]+@"
"""Text inside a message that may be a URL with a password."""


_SHOWN_SCHEME = r"(?ai)\s*((jdbc:)?([a-z][\w+.-]*(?=://)|(postgres|sqlite)[\w+]*(?=//|:)))"
"""Scheme of a URL that may be malformed; before a single colon or without one, the text could be a user instead."""

_NO_USER = r"(?is)\s*(jdbc:)?(\w[\w+.-]*:/+|(postgres|sqlite)[\w+]*(//|:)(?!.*@))"
"""Start of a URL before the user; what stands before a single colon may be the user itself if an ``@`` follows."""

_PORT_OR_IPV6 = r"(?is):[0-9]{1,5}(?=[/?,&][^@]*$|$)|(?<![^@,=])\[[0-9a-f:.]+(%\w+)?\]"
"""Colons of a host; digits before a later ``@`` may be the start of a password instead of a port."""

_OPTION = r"(?s)^(--[^=]*=?|-.=?)"


def looks_like_url(location: str) -> bool:
    """Return True if a location is a URL or can only be meant as one, so that it must not become a path."""
    return any(
        "://" in text or re.match(_SCHEME, text) or re.match(_CREDENTIALS, text) or _has_secret_parameter(text)
        for text in {location, _decoded(location)}
    )


def _has_secret_parameter(text: str) -> bool:
    # Only a query makes an absolute path a URL: a folder may be named "secret=1".
    searched = "".join(re.split("[?;#&]", text, maxsplit=1)[1:]) if text.startswith(("/", ".", "~")) else text
    return any(re.search(_SECRET_KEY, _decoded(found[1])) for found in re.finditer(_KEY, searched))


def _decoded(text: str) -> str:
    """Return a text without percent-encoding, which may have been applied twice by mistake."""
    return unquote(unquote(text))


def unparsed_text(location: str) -> str:
    """Describe a location that is not understood by its scheme and length: any other part may be a password."""
    scheme = re.match(_SHOWN_SCHEME, location)
    return f"'{scheme[1] + ':' if scheme else ''}...' ({len(location):,} characters)"


def has_password(argument: str) -> bool:
    """Return True if an argument of a command line is a URL that may hold a password, also with one that is masked.

    Where a password is misplaced, the argument cannot be told from one that has none, so a colon after the scheme
    counts, except before a port.
    """
    text = re.sub(_OPTION, "", argument)
    if not looks_like_url(text):
        return False
    decoded = _decoded(text)
    if MASK in decoded or _has_secret_parameter(decoded):
        return True
    if re.fullmatch("t(cp|ls)://[^@]*", decoded):  # a scheduler, where any misspelt port is none of a user's
        return False
    scheme = re.match(_NO_USER, decoded)
    return ":" in re.sub(_PORT_OR_IPV6, "", decoded[scheme.end() :] if scheme is not None else decoded)


_SQLITE = "sqlite:///"


def absolute_location(location: str | Path) -> str:
    """Return a location that means the same after a change of the working directory; errors as of `absolute_path`."""
    text = str(location)
    if not isinstance(location, str | Path) or not looks_like_url(text):
        return str(absolute_path(location, "a database"))
    path = text.removeprefix(_SQLITE)
    return f"{_SQLITE}{absolute_path(path, 'a database')}" if path not in ("", text) else text


def masked_message(message: str, words: Iterable[str] = ()) -> str:
    """Return a message in which the passwords of what may be URLs are masked; other text is unchanged.

    Those of the words, such as of a command line, are masked wherever they stand.
    """
    secrets = set[str]()
    for word in (re.sub(_OPTION, "", word) for word in words):
        around = map(re.escape, masked_message(word).split(MASK))
        found_in = re.fullmatch("(.*)".join(around), word, re.DOTALL)
        secrets.update(filter(None, found_in.groups() if found_in is not None else ()))
    for secret in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
        message = message.replace(secret, MASK)
    message = re.sub(_URL_IN_TEXT, _masked_url, message)
    parts, end = [], 0
    for found in re.finditer(_KEY, message):
        if found.start() >= end and re.search(_SECRET_KEY, _decoded(found[1])):
            value = re.compile(_VALUE).match(message, found.end())
            parts += [message[end : found.end()], MASK]
            end = value.end() if value is not None else found.end()
    return "".join([*parts, message[end:]])


def _masked_url(found: re.Match[str]) -> str:
    """Mask all from the first colon after the scheme to the last ``@``: where the password ends is uncertain."""
    location, at = found[0], found[0].rfind("@")
    end = location.rpartition(":")[2]
    has_password = at >= 0 or (end and not end[0].isdigit())  # digits are a port
    if not has_password or EXAMPLE_CREDENTIALS in location:
        return location
    scheme = re.match(_SCHEME, location)
    # "postgres:password@host" starts with a user rather than a scheme.
    start = scheme.end() if scheme is not None and (scheme[0].endswith("/") or at < 0) else 0
    colon = location.find(":", start)
    if 0 <= colon < at:
        return f"{location[:colon]}:{MASK}{location[at:]}"
    return f"{location[:colon]}:{MASK}" if colon >= start > 0 and at < 0 else location


@contextmanager
def atomic_write(path: Path, *, follow_link: bool = True) -> Iterator[BinaryIO]:
    """Open a binary stream whose content replaces a file when the block ends without an exception.

    A special file, such as ``/dev/stdout``, is written to directly. A database is never replaced: it may hold weeks of
    measurements, and could be named as an output by mistake. A link is not followed where autotile names a file in a
    folder of the user's: it could lead out of the folder. After an `OSError` the file is unchanged.
    """
    if not follow_link and path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed; remove it", str(path))
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                yield stream
            return
        if path.exists() and _start_of(path) == DATABASE_MAGIC:
            raise FileExistsError(errno.EEXIST, "it is a database, which is not overwritten", str(path))
        target = path.resolve()  # keeps a symbolic link
        # In a folder that others may write, a predictable name could be a link that they put there to the user's file.
        partial = target.with_name(f".{target.name[:40]}.{os.urandom(8).hex()}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())  # some file systems report only now that they are full
            partial.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        if error.filename is None:  # of a read or a write, which know only the descriptor
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise


def write_output(path: Path, data: bytes | str, *, content: str = "", follow_link: bool = True) -> None:
    """Write a file that a user named; an `InputError` if it cannot be written, with what it was to hold."""
    try:
        with atomic_write(path, follow_link=follow_link) as stream:
            # a path in it has the bytes that the locale cannot decode as surrogates
            stream.write(data.encode(errors="surrogateescape") if isinstance(data, str) else data)
    except OSError as error:
        what = f"the {content} to {path}" if content else str(path)
        raise InputError(f"cannot write {what}: {error.strerror}; name another file") from None


def check_output(path: str | Path, *others: str | Path, makes_folder: bool = False) -> Path:
    """Return the path of a file that will be written after other work; an `InputError` if that would fail now.

    ``others`` are files that are read, or written, too. The folder need not exist if it will be made.
    """
    found = output_path(path)
    if found.resolve() in (user_path(one, "a file").resolve() for one in others):
        raise InputError(f"cannot write {found}: the command reads or writes it already; name another file")
    folder = found.absolute().parent
    if not (makes_folder or folder.is_dir()):
        raise InputError(f"cannot write {found}: there is no folder {str(folder)!r}; make it, or name another")
    while not folder.exists():
        folder = folder.parent
    target = folder / found.name
    try:
        if target.is_file() or not target.exists():
            with contextlib.suppress(LookupError), atomic_write(target):
                raise LookupError  # so that nothing is written
    except OSError as error:
        raise InputError(f"cannot write {found}: {error.strerror}; name another file") from None
    return found


def _start_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(len(DATABASE_MAGIC))


def check_readable(path: Path) -> None:
    """Raise if the path is a folder or another special file, or not readable: SQLite's own message is less specific.

    The file is not opened: closing it again would drop the locks of this process's other connections to the database,
    and so lose what they write from then on: https://sqlite.org/howtocorrupt.html, section 2.2.
    """
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder; expected the path of a database file, such as {path / 'autotile.db'}")
    if path.exists() and not path.is_file():
        raise DatabaseError(f"{path} is not a regular file; expected the path of a database file")
    if path.exists() and not os.access(path, os.R_OK):
        raise DatabaseError(f"cannot read the database {path}: change its permissions, or name another database")


def check_is_database(path: Path) -> None:
    """Raise if a file that SQLite cannot read is of another kind, rather than a damaged database."""
    try:
        start = _start_of(path)
    except FileNotFoundError:  # another process has just set it aside
        return
    except OSError as error:
        raise DatabaseError(f"cannot read the database {path}: {error.strerror}; check its permissions") from None
    if start and start != DATABASE_MAGIC:
        raise DatabaseError(
            f"{path} is not a database, so it is left unchanged: move it away, or name another database"
        )


def check_writable(path: Path) -> None:
    """Create the folder of a database if needed, and raise if it or the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"cannot create the folder {path.parent}: {error.strerror}; name another database"
        ) from None
    # SQLite writes its log beside the file, so the folder must be writable too; reading a read-only file leaves one.
    for checked in (path.parent, path, *(Path(f"{path}{end}") for end in ("-wal", "-shm"))):
        if checked.exists() and not os.access(checked, os.W_OK) and checked.exists():  # a log may end meanwhile
            raise DatabaseError(f"cannot write {checked}: change its permissions, or name a database in another folder")


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which differ if another file replaces this one; None if no file can be reached."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def has_wal(path: Path) -> bool:
    """Return True if a write-ahead log with entries that the database file lacks lies beside it."""
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def is_disk_full(folder: Path) -> bool:
    """Return True if the disk of a folder lacks room for the files that SQLite needs beside a database."""
    disk = os.statvfs(folder)
    # /proc and similar file systems report no blocks at all, and are not full
    return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES


def network_file_system(path: Path) -> str:
    """Return the type of the network file system that holds a file, by Linux's mount table; empty for a local one."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    folder = path.resolve().parent
    mounts = [(fields[1].replace("\\040", " "), fields[2]) for line in lines if len(fields := line.split()) > 2]
    # The longest mount point holds the folder; among equal mount points the last one hides the others.
    around = [(len(point), order, kind) for order, (point, kind) in enumerate(mounts) if folder.is_relative_to(point)]
    kind = max(around)[-1] if around else ""
    return kind if kind in _NETWORK_FILE_SYSTEMS else ""
