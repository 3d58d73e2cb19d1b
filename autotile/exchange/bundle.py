"""Bundles: single files from which kernels are served without a compiler or a database, and what is packed into them.

A bundle is a zip archive. ``manifest.json`` states the format, the length and SHA-256 of every other member, and its
own SHA-256, so a changed byte anywhere is detected on reading. The other members are, for each kernel, its unchanged
search-space file, a JSON document of its winners, rules and cubins, and the cubins themselves, which are read when they
are launched.

The hashes detect damage and modification, not forgery: a forged bundle can carry matching hashes.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import structs

from autotile.core.device import device_profile
from autotile.core.documents import (
    Bytes,
    Count,
    Format,
    Name,
    canonical_json,
    decode_json,
    encode_json,
    json_hash,
    to_document,
)
from autotile.core.model import Config, Problem, Resources, config_key, config_text
from autotile.core.text import sizes_text
from autotile.database.keys import version_of
from autotile.database.paths import atomic_write
from autotile.database.winners import StoredRule, StoredRuleDocument, Winner, WinnerDocument
from autotile.errors import BundleError, DataError, InputError, SpecError
from autotile.exchange.recording import ARCHIVE_FAULTS, open_archive, read_member
from autotile.exchange.shipped import shipped_models, shipped_rules, shipped_winners
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.operation import Operation, named_operation
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import ARCHITECTURE, capability_of, resolve_problem, runs_on, unsupported_reason
from autotile.kernel.spec import KernelSpec
from autotile.settings import read_settings

if TYPE_CHECKING:
    from autotile.cuda.function import PackedCubin
    from autotile.database.database import Database
    from autotile.database.keys import TuningKey
    from autotile.workers.compile_pool import CompilePool

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
_COMPILE_DEADLINE_S = 120.0
_STAND_IN_PROFILE = "h200"
"""Device of which only name and compute capability are replaced, for checks that need nothing else of a device."""

FALLBACK = "Without bundle=, kernels are served from the database and the compiler of this machine"
"""Hint at the end of each error message."""


@dataclass(frozen=True, slots=True)
class BundledCubin:
    """One compiled configuration."""

    target: Annotated[str, msgspec.Meta(pattern=rf"\A(?:{ARCHITECTURE})\Z")]
    """Target that it was compiled for, such as ``sm_90`` or ``sm_90a``."""
    dtype: Name
    flags: Mapping[Name, Count]
    """Values of the kernel's flags, and of the sizes that are compiled in, that it was compiled with."""
    config: Config
    resources: Resources
    member: Name
    """Name of the cubin's member in the bundle, or of its file beside a C++ header."""
    symbols: Mapping[Name, Name] = field(default_factory=dict)
    """Name in the cubin of each entry; one that is not listed has its own name."""


@dataclass(frozen=True, slots=True)
class BundledKernel:
    """A kernel in a bundle."""

    kernel: Kernel
    """Content of its search-space file, without the template's source."""
    nvrtc_version: str
    """Version of the compiler that produced the cubins."""
    winners: Sequence[Winner]
    cubins: Sequence[BundledCubin]
    rules: Sequence[StoredRule] = ()

    def cubins_for(self, problem: Problem, compute_capability: str) -> dict[str, BundledCubin]:
        """Return the cubin of each configuration for a problem's dtype and flags on a device, by `config_key`."""
        flags = {flag: problem.sizes[flag] for flag in self.kernel.spec.compiled_names}
        fitting = [
            cubin
            for cubin in self.cubins
            if cubin.dtype == problem.dtype and dict(cubin.flags) == flags and runs_on(cubin.target, compute_capability)
        ]
        nearest_last = sorted(fitting, key=lambda cubin: (int(cubin.target.strip("sm_a")), cubin.target.endswith("a")))
        return {config_key(cubin.config): cubin for cubin in nearest_last}


class PackedMember(msgspec.Struct):
    """Length and SHA-256 of a member."""

    bytes: Bytes
    sha256: Name


class BundleManifest(msgspec.Struct):
    """Schema of ``manifest.json``, besides its format."""

    digest: Name
    kernels: tuple[Name, ...]
    members: dict[Name, PackedMember]


class BundledDocument(msgspec.Struct):
    """Schema of the document of a kernel."""

    source_hash: Name
    nvrtc_version: Name
    winners: tuple[WinnerDocument, ...]
    rules: tuple[StoredRuleDocument, ...]
    cubins: tuple[BundledCubin, ...]
    contents: dict[Name, Name] = {}
    """SHA-256 of the content of each buffer that is a file, which is not packed."""


class Bundle:
    """Reader of a bundle; safe to use from several threads and after a fork, since it keeps no file open.

    The constructor reads only the manifest. It is a `BundleError` if the file cannot be read, is damaged or not a
    bundle, or was written by a newer autotile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = self._read(MANIFEST, _MAX_DOCUMENT_BYTES)
        try:
            found, stated = decode_json(text, Format).format, decode_json(text, dict[str, Any])
            manifest = decode_json(text, BundleManifest) if found == BUNDLE_FORMAT else None
        except DataError as error:
            raise self._damaged(f"its manifest cannot be read: {error}") from None
        if manifest is None:
            raise BundleError(
                f"{self.path} is a bundle of format {found!r:.40}, this version of autotile reads {BUNDLE_FORMAT}: "
                "upgrade autotile, or create the bundle with this version"
            )
        if manifest.digest != manifest_digest(stated):
            raise self._damaged("its manifest was changed")
        self.digest = manifest.digest
        """SHA-256 of the manifest, and so of the whole content."""
        self.kernels = manifest.kernels
        self._members = manifest.members
        self._known: dict[str, BundledKernel] = {}
        with self._opened() as archive:
            members = archive.namelist()
        if sorted(members) != sorted([MANIFEST, *self._members]):
            raise self._damaged("its members are not those of its manifest")

    def kernel(self, name: str) -> BundledKernel:
        """Return a kernel with its winners, rules and list of cubins; the cubins themselves are not read."""
        if name not in self.kernels:
            raise BundleError(f"{self.path} does not contain the kernel {name!r}, only {', '.join(self.kernels)}")
        if (known := self._known.get(name)) is not None:
            return known
        content, text = self.read(f"kernels/{name}.json"), self.read(f"kernels/{name}.toml")
        try:
            document = decode_json(content, BundledDocument)
            spec = parse_spec(text.decode(), f"{self.path}:kernels/{name}.toml")
            spec = spec.with_file_hashes(document.contents)
            winners = tuple(entry.winner() for entry in document.winners)
            rules = tuple(entry.stored_rule() for entry in document.rules)
        except (InputError, UnicodeDecodeError) as error:
            raise BundleError(
                f"{self.path}: the entry of {name} is malformed: {error}; create the bundle again. {FALLBACK}"
            ) from None
        kernel = Kernel(spec, "", self.path, document.source_hash)
        found = BundledKernel(kernel, document.nvrtc_version, winners, document.cubins, rules)
        return self._known.setdefault(name, found)

    def read(self, member: str) -> bytes:
        """Return the content of a member; a `BundleError` if it differs from the manifest's length or hash."""
        stated = self._members.get(member, PackedMember(0, ""))
        data = self._read(member, stated.bytes)
        if len(data) != stated.bytes or hashlib.sha256(data).hexdigest() != stated.sha256:
            raise self._damaged(f"{member} was changed")
        return data

    def packed(self, cubin: BundledCubin) -> PackedCubin:
        """Return a cubin as it is loaded; it is read at the first launch."""
        from autotile.cuda.function import PackedCubin

        return PackedCubin(cubin.member, cubin.resources, partial(self.read, cubin.member), cubin.symbols)

    def _read(self, member: str, max_bytes: int) -> bytes:
        try:
            with self._opened() as archive:
                return read_member(archive, member, min(max_bytes, _max_bytes(member)))
        except KeyError:
            raise self._damaged(f"it lacks {member}") from None

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        """Open the archive; a `BundleError` if it, or what is read of it, is damaged."""
        try:
            with open_archive(self.path, MAX_BYTES) as archive:
                yield archive
        except ARCHIVE_FAULTS as error:
            if isinstance(error, OSError) and error.strerror:
                raise BundleError(f"cannot read the bundle {self.path}: {error.strerror}. {FALLBACK}") from None
            raise self._damaged(str(error)) from None

    def _damaged(self, fault: str) -> BundleError:
        return BundleError(f"{self.path} is damaged, changed or not a bundle: {fault}; fetch it again. {FALLBACK}")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's canonical form without its ``digest`` entry."""
    return json_hash({name: entry for name, entry in manifest.items() if name != "digest"})


def _max_bytes(member: str) -> int:
    return _MAX_DOCUMENT_BYTES if member.endswith(".json") else _MAX_MEMBER_BYTES


def write_bundle(
    path: Path, kernels: Iterable[BundledKernel], images: Mapping[str, bytes], autotile_version: str
) -> str:
    """Write kernels, and images of cubins by the names of their members, and return the digest of the bundle.

    Equal contents give equal files. It is a `BundleError` if the file cannot be written.
    """
    members = dict(images)
    ordered = sorted(kernels, key=lambda bundled: bundled.kernel.name)
    for bundled in ordered:
        name = bundled.kernel.name
        members[f"kernels/{name}.toml"] = bundled.kernel.spec.text.encode()
        document: dict[str, Any] = {"source_hash": bundled.kernel.source_hash, "nvrtc_version": bundled.nvrtc_version}
        document |= {"winners": to_document(bundled.winners), "rules": to_document(bundled.rules), "cubins": []}
        if contents := {name: file.content_hash for name, file in bundled.kernel.spec.files.items()}:
            document["contents"] = contents
        for cubin in bundled.cubins:
            entry = to_document(cubin)
            entry["symbols"] = {name: symbol for name, symbol in cubin.symbols.items() if name != symbol}
            if not entry["symbols"]:
                del entry["symbols"]  # as before there were other than extern "C" functions
            document["cubins"].append(entry)
        # parameters keep their order
        members[f"kernels/{name}.json"] = encode_json(document, compact=True).encode()
    manifest: dict[str, Any] = {
        "format": BUNDLE_FORMAT,
        "autotile": autotile_version,
        "kernels": [bundled.kernel.name for bundled in ordered],
        "members": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()
        },
    }
    manifest["digest"] = manifest_digest(manifest)
    members[MANIFEST] = canonical_json(manifest).encode(errors="surrogatepass")
    total = sum(map(len, members.values()))
    large = next((name for name, data in members.items() if len(data) > _max_bytes(name)), None)
    if large is not None or total > MAX_BYTES:
        what = f"its member {large} would have {len(members[large]):,}" if large else f"it would have {total:,}"
        limit = _max_bytes(large) if large else MAX_BYTES
        raise BundleError(
            f"cannot write the bundle {path}: {what} bytes, at most {limit:,} are accepted; bundle fewer kernels, "
            "problems or architectures"
        )
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


def cubin_member(image: bytes) -> str:
    """Return the name of a cubin's member; configurations that compile to the same code share it."""
    return f"cubins/{hashlib.sha256(image).hexdigest()}.cubin"


def prepare_bundled(
    selections: Sequence[tuple[KernelName, Mapping[str, int] | None]],
    architectures: Sequence[str],
    database: Database | None,
    *,
    dtype: str | None = None,
) -> tuple[list[BundledKernel], dict[str, bytes], tuple[str, ...]]:
    """Collect the results of kernels and compile their configurations, for a bundle or a C++ header.

    A kernel is selected with a problem, several times with several; with None, all that are tuned are shipped, of an
    operation all configurations that its models of time choose among. Without architectures it is compiled for the GPUs
    that it is tuned on, or a model is of; without a database, only what comes with autotile is shipped.

    Return each kernel in its current version with the results for this version; the images of the cubins, by the names
    of their members; and which architectures and configurations were left out and why, one line each. It is an
    `InputError` if a kernel, size or architecture is unknown, a selected problem is not tuned, or no configuration
    compiles; a `ToolchainError` if NVRTC is missing.
    """
    from autotile.cuda.compiler import known_architectures  # a bundle is read without a compiler
    from autotile.cuda.toolchain import nvrtc_version
    from autotile.workers.compile_pool import CompilePool

    for architecture in architectures:
        if re.fullmatch(ARCHITECTURE, architecture) is None:
            raise InputError(f"{architecture!r} is no architecture; expected one such as sm_90")
        if architecture.removesuffix("a") not in (known := known_architectures()):
            raise InputError(
                f"NVRTC {nvrtc_version()} does not know the architecture {architecture!r}; it compiles for "
                f"{', '.join(known)}"
            )
    shipped: list[tuple[KernelName, Kernel, list[_Variant], Sequence[str]]] = []
    for name in dict.fromkeys(name for name, _ in selections):
        if (operation := named_operation(name)) is not None:
            chosen, own = _chosen_by_models(operation, database, dtype)
            shipped += [(member, load_kernel(member), variants, own) for member, variants in chosen.items()]
        else:
            shipped.append((name, load_kernel(name), [], ()))
    pool = CompilePool(read_settings(), deadline_s=_COMPILE_DEADLINE_S)
    try:
        bundled, images, notices = [], dict[str, bytes](), list[str]()
        for name, kernel, variants, of_models in shipped:
            winners, rules = _current_results(kernel, database, dtype)
            problems = [sizes for selected, sizes in selections if selected == name]
            if problems and None not in problems:  # rules are of all problems
                asked = [dict(resolve_problem(kernel.spec, given or {}, defaults=True).sizes) for given in problems]
                tuned = list(dict.fromkeys(sizes_text(winner.key.sizes) for winner in winners))
                for sizes in asked:
                    if not any(dict(winner.key.sizes) == sizes for winner in winners):
                        rest = f"tuned is {'; '.join(tuned)}" if tuned else f"nothing is tuned of {kernel.name}"
                        raise InputError(f"{kernel.name} {sizes_text(sizes)} is not tuned; {rest}. Run `autotile tune`")
                winners, rules = [winner for winner in winners if dict(winner.key.sizes) in asked], []
            targets = architectures or of_models
            cubins, left_out = _compiled(
                kernel, winners, rules, targets, images=images, variants=variants, dtype=dtype, pool=pool
            )
            bundled.append(BundledKernel(kernel, nvrtc_version(), winners, cubins, rules))
            notices += left_out
        return bundled, images, tuple(notices)
    finally:
        pool.close()


_Variant = tuple[str, tuple[tuple[str, int], ...], Config]
"""Element type, values of the flags that are compiled in, and configuration."""


def _chosen_by_models(
    operation: Operation, database: Database | None, dtype: str | None
) -> tuple[dict[str, list[_Variant]], list[str]]:
    """Return the configurations that models of an operation choose among, by kernel, and their GPUs' architectures.

    They are the user's and those that ship, for all flags that they were learned for. Some are listed several times.
    """
    from autotile.database.learned import read_models  # a bundle is read without SQLAlchemy
    from autotile.families.operation_model import OperationModel

    dtypes = [dtype] if dtype is not None else operation.dtypes
    models = [found for name in dtypes for found in shipped_models(operation.name, name)]
    for stored in read_models(database, operation.name, dtype) if database is not None else ():
        with suppress(InputError):  # no profile is needed of a GPU whose name says nothing: it is asked for by --arch
            models.append((OperationModel.from_json(stored.model), device_profile(stored.gpu_name)))
    if not models:
        raise InputError(
            f"there is no model of times of {operation.name} to ship for; name its kernels: "
            f"{', '.join(member.name for member in operation.members)}"
        )
    found: dict[str, list[_Variant]] = {}
    for model, _ in models:
        ranges = [range(model.ranges[flag][0], model.ranges[flag][1] + 1) for flag in model.vocabulary.flags]
        for *values, odd in product(*ranges, (0, 1)):  # some kernels are of aligned sizes, others are not
            sizes = {**operation.sizes, **dict(zip(model.vocabulary.flags, values, strict=True))}
            sizes |= {name: max(operation.sizes[name] - odd, 1) for name in model.vocabulary.sizes}
            problem = operation.resolve(sizes, model.dtype)
            for member, own in operation.fitting(problem):
                spec = member.load().spec
                flags = tuple((name, own.get(name, spec.sizes[name])) for name in spec.compiled_names)
                for one in model.candidates:
                    if one.kernel == member.name:
                        found.setdefault(member.kernel, []).append((model.dtype, flags, one.config))
    return found, list(dict.fromkeys(device.architecture for _, device in models))


def _current_results(
    kernel: Kernel, database: Database | None, dtype: str | None
) -> tuple[list[Winner], list[StoredRule]]:
    """Return the results for the kernel's current version: those in the database, then those shipped with autotile."""
    if dtype is not None and dtype not in kernel.spec.dtypes:
        raise InputError(f"{kernel.name} is not written for dtype {dtype!r}; it takes {', '.join(kernel.spec.dtypes)}")
    own = [best.winner for best in database.best(kernel.name, dtype=dtype)] if database is not None else []
    rules = database.rules(kernel.name, dtype) if database is not None else []
    dtypes = [dtype] if dtype is not None else kernel.spec.dtypes
    shipped = [winner for name in dtypes for winner in shipped_winners(kernel.name, name)]
    rules += [rule for name in dtypes for rule in shipped_rules(kernel.name, name)]
    digests = {winner.key.digest for winner in own}
    winners = own + [winner for winner in shipped if winner.key.digest not in digests]
    version = (*version_of(kernel), tuple(kernel.spec.options))

    functions = [rule for rule in kernel.spec.rules if rule.expression.node.operation == "function"]

    def is_current(key: TuningKey, *configs: Config) -> bool:
        """Return True if a result is of this version, and meets the rules that cannot be shipped with it."""
        is_own = (*key.version, key.options) == version
        return is_own and all(rule.expression.value(config) for rule in functions for config in configs)

    return [one for one in winners if is_current(one.key, one.config)], [
        one for one in rules if is_current(one.key, *(each.config for each in one.rule.configs))
    ]


def untuned_config(spec: KernelSpec, problem: Problem) -> Config:
    """Return the configuration that ships for problems of a dtype and flags that nothing is tuned for.

    It is the default or, where that breaks a rule at the default sizes in this dtype, the first valid configuration.
    """
    names = {**problem.names, **spec.default}
    if all(rule.expression.value(names) for rule in spec.rules if rule.expression.names <= names.keys()):
        return spec.default
    from autotile.space.search_space import feasible_space  # which serving from a bundle rarely needs

    try:
        return feasible_space(spec, problem, device_profile(_STAND_IN_PROFILE)).config(0)
    except SpecError:  # nothing is valid
        return spec.default


def _compiled(
    kernel: Kernel,
    winners: Sequence[Winner],
    rules: Sequence[StoredRule],
    architectures: Sequence[str],
    *,
    images: dict[str, bytes],
    variants: Sequence[_Variant],
    dtype: str | None,
    pool: CompilePool,
) -> tuple[list[BundledCubin], list[str]]:
    """Compile each configuration with the dtype and flags that it was tuned for, and the default with each of these.

    ``variants`` are compiled besides those of the results. Images are added to ``images``; the others are left out.
    """
    from autotile.cuda.compiler import compile_job

    if not winners and not architectures:
        raise InputError(
            f"nothing is tuned of {kernel.name}, so there is no GPU to make cubins for; run `autotile tune`, or name "
            "the architectures with --arch to ship the default configuration"
        )
    spec = kernel.spec
    targets: dict[str, None] = {}
    notices = []
    tuned_on = (winner.device.architecture for winner in winners if winner.device is not None)
    for architecture in dict.fromkeys(architectures or tuned_on):
        stand_in = structs.replace(
            device_profile(_STAND_IN_PROFILE), name=architecture, compute_capability=capability_of(architecture)
        )
        if fault := unsupported_reason(spec, stand_in):
            notices.append(f"{architecture} is left out: {fault}")
        else:
            targets[spec.architecture or architecture] = None

    def flags_of(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, sizes[name]) for name in spec.compiled_names)

    variants = [*variants, *((w.key.dtype, flags_of(w.key.sizes), w.config) for w in winners)]
    for stored in rules:
        rule_flags = dict.fromkeys(flags_of(point.sizes) for point in stored.rule.points)
        variants += [(stored.key.dtype, flags, one.config) for flags in rule_flags for one in stored.rule.configs]
    usual = (dtype or spec.dtypes[0], flags_of(spec.sizes))
    for each in dict.fromkeys([*(variant[:2] for variant in variants), usual]):
        variants.append((*each, untuned_config(spec, spec.at({**spec.sizes, **dict(each[1])}, each[0]))))

    started = {}
    for target in targets:
        for element_type, flags, config in variants:
            identity = (target, element_type, flags, config_key(config))
            if identity not in started:
                problem = spec.at({**spec.sizes, **dict(flags)}, element_type)
                job = compile_job(kernel, config, problem, target)
                started[identity] = ((target, element_type, flags, config), pool.submit(job))
    cubins = []
    for (target, element_type, flags, config), future in started.values():
        compiled = future.result()
        if compiled.cubin is None:
            notices.append(f"{kernel.name} {config_text(config)} is left out for {target}: {compiled.reason}")
            continue
        image = compiled.cubin.path.read_bytes()
        images[member := cubin_member(image)] = image
        made = compiled.cubin.resources, member, compiled.cubin.symbols
        cubins.append(BundledCubin(target, element_type, dict(flags), config, *made))
    if not cubins:
        raise InputError(f"nothing of {kernel.name} can be shipped: {'; '.join(notices)}")
    return cubins, notices
