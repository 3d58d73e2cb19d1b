"""Bundles: single files from which kernels are served without a compiler or a database.

A bundle is a zip archive. ``manifest.json`` states the format, the length and SHA-256 of every other member, and its
own SHA-256, so a changed byte anywhere is detected on reading. The other members are, for each kernel, its unchanged
search-space file, a JSON document of its winners, rules and cubins, and the cubins themselves, which are read when they
are launched.

The hashes detect damage and modification, not forgery: a forged bundle can carry matching hashes.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autotile.core.documents import Bytes, Count, Format, Name, canonical_json, decode_json, encode_json
from autotile.core.model import Config, Resources
from autotile.database.paths import atomic_write
from autotile.database.winners import StoredRule, StoredRuleDocument, Winner, WinnerDocument
from autotile.errors import BundleError, DataError, InputError
from autotile.exchange.recording import ARCHIVE_FAULTS, open_archive, read_member
from autotile.kernel.library import Kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import ARCHITECTURE

BUNDLE_FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 512 * 2**20
"""Maximum decompressed size of a bundle: thousands of cubins of some hundred kilobytes."""
_MAX_MEMBER_BYTES = 64 * 2**20
"""Maximum decompressed size of one member."""
_MAX_DOCUMENT_BYTES = 16 * 2**20
"""Maximum size of the manifest and of a kernel's document, since JSON takes up to thirty times as much when parsed."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Timestamp of every member, the earliest that zip supports, so that equal contents give equal files."""


@dataclass(frozen=True, slots=True)
class BundledCubin:
    """One compiled configuration.

    Attributes
    ----------
    target
        Target that it was compiled for, such as ``sm_90`` or ``sm_90a``.
    flags
        Values of the kernel's flags, and of the sizes that are compiled in, that it was compiled with.
    member
        Name of the cubin's member in the bundle.
    symbols
        Name in the cubin of each entry; one that is not listed has its own name.
    """

    target: Annotated[str, msgspec.Meta(pattern=rf"\A(?:{ARCHITECTURE})\Z")]
    dtype: Name
    flags: Mapping[Name, Count]
    config: Config
    resources: Resources
    member: Name
    symbols: Mapping[Name, Name] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BundledKernel:
    """A kernel in a bundle.

    Attributes
    ----------
    kernel
        Content of its search-space file, without the template's source.
    nvrtc_version
        Version of the compiler that produced the cubins.
    """

    kernel: Kernel
    nvrtc_version: str
    winners: Sequence[Winner]
    cubins: Sequence[BundledCubin]
    rules: Sequence[StoredRule] = ()


class Bundle:
    """Reader of a bundle; safe to use from several threads and after a fork, since it keeps no file open.

    Parameters
    ----------
    path
        Path of the file. The constructor reads only the manifest.

    Attributes
    ----------
    digest
        SHA-256 of the manifest, and so of the whole content.
    kernels
        Names of the kernels in the bundle.

    Raises
    ------
    BundleError
        The file cannot be read, is damaged or not a bundle, or was written by a newer autotile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = self._manifest()
        self.digest = manifest.digest
        self.kernels = manifest.kernels
        self._members = manifest.members
        self._check_members()

    def kernel(self, name: str) -> BundledKernel:
        """Return a kernel with its winners, rules and list of cubins; the cubins themselves are not read.

        Raises
        ------
        BundleError
            The bundle does not contain the kernel, or is damaged.
        """
        if name not in self.kernels:
            raise BundleError(f"{self.path} does not contain the kernel {name!r}, only {', '.join(self.kernels)}")
        return _read_kernel(self, name)

    def read(self, member: str) -> bytes:
        """Return the content of a member.

        Raises
        ------
        BundleError
            The member is missing, or differs from the manifest's length or hash.
        """
        stated = self._members.get(member, _Member(0, ""))
        data = self._read(member, stated.bytes)
        if len(data) != stated.bytes or hashlib.sha256(data).hexdigest() != stated.sha256:
            raise self._damaged(f"{member} was changed")
        return data

    def _manifest(self) -> _Manifest:
        text = self._read(MANIFEST, _MAX_DOCUMENT_BYTES)
        try:
            found = decode_json(text, Format).format
            if found != BUNDLE_FORMAT:
                raise BundleError(
                    f"{self.path} is a bundle of format {found!r:.40}, this version of autotile reads {BUNDLE_FORMAT}: "
                    "upgrade autotile, or create the bundle with this version"
                )
            manifest = decode_json(text, _Manifest)
            if manifest.digest != manifest_digest(decode_json(text, dict[str, Any])):
                raise self._damaged("its manifest was changed")
        except BundleError:
            raise
        except DataError as error:
            raise self._damaged(f"its manifest cannot be read: {error}") from None
        return manifest

    def _check_members(self) -> None:
        try:
            with open_archive(self.path, MAX_BYTES) as archive:
                found = archive.namelist()
        except ARCHIVE_FAULTS as error:
            raise self._unreadable(error) from None
        if sorted(found) != sorted([MANIFEST, *self._members]):
            raise self._damaged("its members are not those of its manifest")

    def _read(self, member: str, max_bytes: int) -> bytes:
        try:
            with open_archive(self.path, MAX_BYTES) as archive:
                return read_member(archive, member, min(max_bytes, _max_bytes(member)))
        except KeyError:
            raise self._damaged(f"it lacks {member}") from None
        except ARCHIVE_FAULTS as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> BundleError:
        if isinstance(error, OSError) and error.strerror:
            return BundleError(f"cannot read the bundle {self.path}: {error.strerror}. {FALLBACK}")
        return self._damaged(str(error))

    def _damaged(self, fault: str) -> BundleError:
        return BundleError(f"{self.path} is damaged, changed or not a bundle: {fault}; fetch it again. {FALLBACK}")


class _Member(msgspec.Struct):
    """Length and SHA-256 of a member."""

    bytes: Bytes
    sha256: Name


class _Manifest(msgspec.Struct):
    """Schema of ``manifest.json``, besides its format."""

    digest: Name
    kernels: tuple[Name, ...]
    members: dict[Name, _Member]


class _KernelDocument(msgspec.Struct):
    """Schema of the document of a kernel."""

    source_hash: Name
    nvrtc_version: Name
    winners: tuple[WinnerDocument, ...]
    rules: tuple[StoredRuleDocument, ...]
    cubins: tuple[BundledCubin, ...]


FALLBACK = "Without bundle=, kernels are served from the database and the compiler of this machine"
"""Hint at the end of each error message."""


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's canonical form without its ``digest`` entry."""
    content = {name: entry for name, entry in manifest.items() if name != "digest"}
    return hashlib.sha256(canonical_json(content).encode(errors="surrogatepass")).hexdigest()


def write_bundle(
    path: Path, kernels: Iterable[BundledKernel], images: Mapping[str, bytes], autotile_version: str
) -> str:
    """Write a bundle and return its digest; equal contents give equal files.

    Parameters
    ----------
    images
        Cubins, by the names of their members.
    autotile_version
        Version that the manifest states.

    Raises
    ------
    BundleError
        The file cannot be written.
    """
    members = dict(images)
    names = []
    for bundled in sorted(kernels, key=lambda bundled: bundled.kernel.name):
        name = bundled.kernel.name
        names.append(name)
        members[_space_member(name)] = bundled.kernel.spec.text.encode()
        document = encode_json(_kernel_to_json(bundled), compact=True)  # parameters keep their order
        members[_kernel_member(name)] = document.encode()
    manifest: dict[str, Any] = {
        "format": BUNDLE_FORMAT,
        "autotile": autotile_version,
        "kernels": names,
        "members": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()
        },
    }
    manifest["digest"] = manifest_digest(manifest)
    members[MANIFEST] = canonical_json(manifest).encode(errors="surrogatepass")
    _check_sizes(path, members)
    packed = io.BytesIO()  # a special file, such as /dev/null, has no positions
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [(MANIFEST, members.pop(MANIFEST)), *sorted(members.items())]:
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    try:
        with atomic_write(path) as stream:
            stream.write(packed.getvalue())
    except OSError as error:
        raise BundleError(f"cannot write the bundle {path}: {error.strerror}; name another file") from None
    return str(manifest["digest"])


def _check_sizes(path: Path, members: Mapping[str, bytes]) -> None:
    """Raise if a bundle would be larger than what is read."""
    total = sum(map(len, members.values()))
    large = next((name for name, data in members.items() if len(data) > _max_bytes(name)), None)
    if large is not None or total > MAX_BYTES:
        what = f"its member {large} would have {len(members[large]):,}" if large else f"it would have {total:,}"
        limit = _max_bytes(large) if large else MAX_BYTES
        raise BundleError(
            f"cannot write the bundle {path}: {what} bytes, at most {limit:,} are accepted; bundle fewer kernels, "
            "problems or architectures"
        )


def _max_bytes(member: str) -> int:
    return _MAX_DOCUMENT_BYTES if member.endswith(".json") else _MAX_MEMBER_BYTES


def cubin_member(image: bytes) -> str:
    """Return the name of a cubin's member; configurations that compile to the same code share it."""
    return f"cubins/{hashlib.sha256(image).hexdigest()}.cubin"


@lru_cache(maxsize=64)
def _read_kernel(bundle: Bundle, name: str) -> BundledKernel:
    try:
        document = decode_json(bundle.read(_kernel_member(name)), _KernelDocument)
        text = bundle.read(_space_member(name)).decode()
        spec = parse_spec(text, f"{bundle.path}:{_space_member(name)}")
        winners = tuple(entry.winner() for entry in document.winners)
        rules = tuple(entry.stored_rule() for entry in document.rules)
        kernel = Kernel(spec, "", bundle.path, document.source_hash)
        return BundledKernel(kernel, document.nvrtc_version, winners, document.cubins, rules)
    except BundleError:
        raise
    except (InputError, UnicodeDecodeError) as error:
        raise BundleError(
            f"{bundle.path}: the entry of {name} is malformed: {error}; create the bundle again. {FALLBACK}"
        ) from None


def _kernel_to_json(bundled: BundledKernel) -> dict[str, Any]:
    return {
        "source_hash": bundled.kernel.source_hash,
        "nvrtc_version": bundled.nvrtc_version,
        "winners": [winner.to_json() for winner in bundled.winners],
        "rules": [stored.to_json() for stored in bundled.rules],
        "cubins": [_cubin_to_json(cubin) for cubin in bundled.cubins],
    }


def _cubin_to_json(cubin: BundledCubin) -> dict[str, Any]:
    symbols = {entry: symbol for entry, symbol in cubin.symbols.items() if entry != symbol}
    document = asdict(replace(cubin, config=dict(cubin.config), flags=dict(cubin.flags), symbols=symbols))
    if not symbols:
        del document["symbols"]  # as before there were other than extern "C" functions
    return document


def _space_member(name: str) -> str:
    return f"kernels/{name}.toml"


def _kernel_member(name: str) -> str:
    return f"kernels/{name}.json"
