"""A bundle: one file that serves kernels with neither compiler nor database.

It is a zip archive. ``manifest.json`` names its format and every other member with length and SHA-256, and holds the
SHA-256 of itself; so a changed byte anywhere is found when it is read. Beside it lie, for each kernel, the search-space
file as it was, a document of winners and cubins, and the cubins, which are read when they are launched.

What is found is damage and change, not forgery: who writes a whole new bundle writes new hashes too.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autotile.core.model import Config, Resources, canonical_json
from autotile.database.paths import atomic_write
from autotile.database.winners import StoredRule, Winner
from autotile.errors import BundleError, SpecError
from autotile.kernel.library import Kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import capability_of

BUNDLE_FORMAT = 1
MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 64 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The least date of a zip archive: equal contents make equal files."""
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""What `zipfile` raises of a damaged archive; the last two of one that claims to be compressed or encrypted oddly."""


@dataclass(frozen=True, slots=True)
class BundledCubin:
    """One compiled configuration.

    Attributes
    ----------
    target
        What it was compiled for, such as ``sm_90`` or ``sm_90a``.
    flags
        The kernel's flags that it was compiled with.
    member
        Where the cubin lies in the bundle.
    """

    target: str
    dtype: str
    flags: Mapping[str, int]
    config: Config
    resources: Resources
    member: str


@dataclass(frozen=True, slots=True)
class BundledKernel:
    """A kernel as a bundle holds it: what its search-space file says, without the template.

    Attributes
    ----------
    nvrtc_version
        Of the compiler that made the cubins.
    """

    kernel: Kernel
    nvrtc_version: str
    winners: Sequence[Winner]
    cubins: Sequence[BundledCubin]
    rules: Sequence[StoredRule] = ()


class Bundle:
    """A bundle that is open for reading; safe to use from threads and after a fork, as no file stays open.

    Parameters
    ----------
    path
        The file. Only its manifest is read now.

    Attributes
    ----------
    digest
        SHA-256 that stands for the whole content.
    kernels
        Names of the kernels that it holds.

    Raises
    ------
    BundleError
        It cannot be read, is damaged or no bundle, or was written by a newer autotile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = self._manifest()
        try:
            self.digest: str = manifest["digest"]
            self.kernels: tuple[str, ...] = tuple(manifest["kernels"])
            self._members: dict[str, tuple[int, str]] = {
                name: (int(entry["bytes"]), entry["sha256"]) for name, entry in manifest["members"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._damaged("its manifest lacks an entry") from None
        if any(size < 0 for size, _ in self._members.values()):
            raise self._damaged("its manifest gives a member a negative length")
        self._check_members()

    def kernel(self, name: str) -> BundledKernel:
        """A kernel with its winners and what is known of its cubins; the cubins themselves are not read.

        Raises
        ------
        BundleError
            The bundle holds no such kernel, or is damaged.
        """
        if name not in self.kernels:
            raise BundleError(f"{self.path} holds no kernel {name!r}, only {', '.join(self.kernels)}")
        return _read_kernel(self, name)

    def read(self, member: str) -> bytes:
        """A member's content, whole and unchanged.

        Raises
        ------
        BundleError
            It is missing or not what it was.
        """
        size, digest = self._members.get(member, (0, ""))
        data = self._read(member, size)
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(f"{member} is not what was put in")
        return data

    def _manifest(self) -> dict[str, Any]:
        text = self._read(MANIFEST, _MOST_MANIFEST_BYTES)
        try:
            manifest: dict[str, Any] = json.loads(text)
            written = manifest["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._damaged("its manifest cannot be read") from None
        if written != BUNDLE_FORMAT:
            raise BundleError(
                f"{self.path} is a bundle of format {written!r}, this autotile reads {BUNDLE_FORMAT}: upgrade "
                "autotile, or make the bundle with this version"
            )
        if manifest.get("digest") != manifest_digest(manifest):
            raise self._damaged("its manifest was changed")
        return manifest

    def _check_members(self) -> None:
        try:
            with zipfile.ZipFile(self.path) as archive:
                held = archive.namelist()
        except (OSError, *_UNREADABLE) as error:
            raise self._unreadable(error) from None
        if sorted(held) != sorted([MANIFEST, *self._members]):
            raise self._damaged("its members are not those of its manifest")

    def _read(self, member: str, most: int) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as stream:
                data = stream.read(most + 1)
        except KeyError:
            raise self._damaged(f"it has no {member}") from None
        except (OSError, *_UNREADABLE) as error:
            raise self._unreadable(error) from None
        if len(data) > most:
            raise self._damaged(f"{member} is longer than it was")
        return data

    def _unreadable(self, error: Exception) -> BundleError:
        if isinstance(error, OSError) and error.strerror:
            return BundleError(f"cannot read the bundle {self.path}: {error.strerror}. {FALLBACK}")
        return self._damaged(str(error))

    def _damaged(self, what: str) -> BundleError:
        return BundleError(f"{self.path} is damaged, changed or no bundle: {what}; fetch it again. {FALLBACK}")


FALLBACK = "Without bundle=, the database and the compiler of this machine serve"
"""What a refusal says of the way out."""


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's canonical form, without the entry that holds it."""
    content = {name: entry for name, entry in manifest.items() if name != "digest"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def write_bundle(
    path: Path, kernels: Iterable[BundledKernel], images: Mapping[str, bytes], autotile_version: str
) -> str:
    """Write a bundle and return its digest; equal contents make equal files.

    Parameters
    ----------
    images
        Cubins by their members' names.

    Raises
    ------
    BundleError
        The file cannot be written.
    """
    members = dict(images)
    names = []
    for held in sorted(kernels, key=lambda held: held.kernel.name):
        names.append(held.kernel.name)
        members[_space_member(held.kernel.name)] = held.kernel.spec.text.encode()
        document = json.dumps(_kernel_to_json(held), separators=(",", ":"))  # parameters keep their order
        members[_kernel_member(held.kernel.name)] = document.encode()
    manifest: dict[str, Any] = {
        "format": BUNDLE_FORMAT,
        "autotile": autotile_version,
        "kernels": names,
        "members": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()
        },
    }
    manifest["digest"] = manifest_digest(manifest)
    try:
        with atomic_write(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in [(MANIFEST, canonical_json(manifest).encode()), *sorted(members.items())]:
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise BundleError(f"cannot write the bundle {path}: {error.strerror}; name another file") from None
    return str(manifest["digest"])


def cubin_member(image: bytes) -> str:
    """Where a cubin lies in a bundle: configurations that compile to the same code share it."""
    return f"cubins/{hashlib.sha256(image).hexdigest()}.cubin"


@lru_cache(maxsize=64)
def _read_kernel(bundle: Bundle, name: str) -> BundledKernel:
    try:
        document = json.loads(bundle.read(_kernel_member(name)))
        text = bundle.read(_space_member(name)).decode()
        spec = parse_spec(text, f"{bundle.path}:{_space_member(name)}")
        cubins = tuple(_cubin(entry) for entry in document["cubins"])
        winners = tuple(Winner.from_json(entry) for entry in document["winners"])
        rules = tuple(StoredRule.from_json(entry) for entry in document["rules"])
        kernel = Kernel(spec, "", bundle.path, document["source_hash"])
        return BundledKernel(kernel, document["nvrtc_version"], winners, cubins, rules)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BundleError):
            raise
        reason = str(error) if isinstance(error, SpecError) else repr(error)
        raise BundleError(
            f"{bundle.path}: what it holds of {name} is not as expected: {reason}; make it again. {FALLBACK}"
        ) from None


def _cubin(entry: Mapping[str, Any]) -> BundledCubin:
    capability_of(entry["target"])  # raises where it is no target
    return BundledCubin(**{**entry, "resources": Resources(**entry["resources"])})


def _kernel_to_json(held: BundledKernel) -> dict[str, Any]:
    return {
        "source_hash": held.kernel.source_hash,
        "nvrtc_version": held.nvrtc_version,
        "winners": [winner.to_json() for winner in held.winners],
        "rules": [stored.to_json() for stored in held.rules],
        "cubins": [asdict(replace(cubin, config=dict(cubin.config), flags=dict(cubin.flags))) for cubin in held.cubins],
    }


def _space_member(name: str) -> str:
    return f"kernels/{name}.toml"


def _kernel_member(name: str) -> str:
    return f"kernels/{name}.json"
