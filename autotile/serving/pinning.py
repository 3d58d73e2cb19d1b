"""Pinned choices: what is served for each problem, frozen to a file, or received from another process.

The file is JSON for people and programs: equal choices make equal files. It is read by a declared schema and holds
nothing that is executed. A choice is served only to the version of the kernel that it was made for.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import Bytes, Count, Format, Name, Text, canonical_json, decode_json, read_regular
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Problem
from autotile.database.keys import key_of
from autotile.database.paths import atomic_write
from autotile.errors import DataError, InputError, PinError, PinWarning, SpecError
from autotile.kernel.library import Kernel
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Choice, Tier
from autotile.space.limits import check_config

PIN_FORMAT = 1
MAX_BYTES = 64 * 2**20
"""Maximum size of the JSON: 60,000 choices of a kilobyte."""
_MAX_CHOICES = 60_000
_MAX_SHARE = 0.01
"""Maximum share of the time spent writing the file while choices are added; the rest is written at exit."""

Device = tuple[str, str, int, int]
Request = tuple[str, str, str, str, bool, Device]
"""Operation, kernel, dtype, sizes as JSON, whether a library may compute it, and the device."""


@dataclass(frozen=True, slots=True)
class PinnedChoice:
    """What is served for a problem on a kind of GPU.

    Attributes
    ----------
    operation
        Name of the operation that was asked for; empty if a kernel was.
    sizes, dtype
        The problem, with flags; of an operation by its names, with conditions.
    library_allowed
        Whether a library might compute the operation.
    gpu_name, compute_capability, sm_count, smem_per_block_optin_bytes
        The GPU.
    source
        Whether a kernel or a library computes it.
    kernel
        Name of the kernel or the library.
    kernel_sizes
        Sizes by the kernel's names; empty for a library.
    template_hash, space_hash, options, nvrtc_version
        Version of the kernel and of its compiler; empty for a library.
    library_version
        Version of the library; empty for a kernel.
    config, tier
        The configuration, and how it was found.
    """

    operation: Name
    sizes: Mapping[Name, Count]
    dtype: Name
    library_allowed: bool
    gpu_name: Name
    compute_capability: Name
    sm_count: Count
    smem_per_block_optin_bytes: Bytes
    source: Literal["kernel", "library"]
    kernel: Name
    kernel_sizes: Mapping[Name, Count]
    template_hash: Name
    space_hash: Name
    options: tuple[Text, ...]
    nvrtc_version: Name
    library_version: Name
    config: Config
    tier: Tier

    @classmethod
    def of(
        cls, served: BoundKernel, nvrtc_version: str, *, requested: Problem | None = None, library: bool = True
    ) -> PinnedChoice:
        """Return the choice of a served kernel.

        Parameters
        ----------
        served
            The kernel, or the library.
        nvrtc_version
            Version of the compiler.
        requested
            Problem of the operation that it is served for; None if the kernel was asked for.
        library
            Whether a library might compute the operation.
        """
        is_library = getattr(served, "is_library", False)
        problem = served.problem
        key = key_of(served.definition, problem, served.device, nvrtc_version=nvrtc_version, l2_mode="cold")
        given = requested or problem
        return cls(
            operation=requested.kernel if requested is not None else "",
            sizes=dict(given.sizes),
            dtype=given.dtype,
            library_allowed=library,
            gpu_name=key.gpu_name,
            compute_capability=key.compute_capability,
            sm_count=key.sm_count,
            smem_per_block_optin_bytes=key.smem_per_block_optin_bytes,
            source="library" if is_library else "kernel",
            kernel=served.kernel,
            kernel_sizes={} if is_library else dict(problem.sizes),
            template_hash="" if is_library else key.template_hash,
            space_hash="" if is_library else key.space_hash,
            options=() if is_library else key.options,
            nvrtc_version="" if is_library else key.nvrtc_version,
            library_version=str(getattr(served, "version", "")) if is_library else "",
            config=dict(served.config),
            tier=served.tier,
        )

    @property
    def request(self) -> Request:
        """What was asked for, as a key."""
        device = self.gpu_name, self.compute_capability, self.sm_count, self.smem_per_block_optin_bytes
        asked = "" if self.operation else self.kernel
        return self.operation, asked, self.dtype, canonical_json(dict(self.sizes)), self.library_allowed, device

    def __str__(self) -> str:
        """Return the problem as text."""
        return str(Problem(self.operation or self.kernel, self.sizes, self.dtype))


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    choices: Annotated[tuple[PinnedChoice, ...], msgspec.Meta(max_length=_MAX_CHOICES)]


def write_choices(choices: Iterable[PinnedChoice]) -> str:
    """Return choices as JSON, in an order of their own, each on lines of its own."""
    rows = sorted((asdict(choice) for choice in choices), key=canonical_json)
    return json.dumps({"choices": rows, "format": PIN_FORMAT}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def parse_choices(text: bytes | str, origin: str) -> list[PinnedChoice]:
    """Parse the JSON of `write_choices`.

    Parameters
    ----------
    origin
        Where it comes from, for messages.

    Raises
    ------
    PinError
        It is malformed, of another format, or names a problem twice.
    """
    try:
        version = decode_json(text, Format).format
        if version != PIN_FORMAT:
            raise PinError(f"{origin} has format {version!r:.40}, expected {PIN_FORMAT}: it needs another autotile")
        choices = list(decode_json(text, _Document).choices)
    except DataError as error:
        raise PinError(f"{origin} holds no pinned choices: {error}; delete it, and pin again") from None
    if len({choice.request for choice in choices}) != len(choices):
        raise PinError(f"{origin} names a problem twice; delete one of the choices")
    return choices


def read_choices(path: Path) -> list[PinnedChoice]:
    """Read a file of choices; errors are those of `parse_choices`, or that it cannot be read."""
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise PinError(f"{path} cannot be read: {error.strerror}") from None
    return parse_choices(data, str(path))


class Pin:
    """Choices that are in force.

    Parameters
    ----------
    origin
        Where they come from: a path, or a text for messages.
    choices
        The choices.
    strict
        Whether a problem that is not among them is refused rather than served with a warning.
    path
        File that further choices are added to; None if nothing is added.

    Raises
    ------
    PinError
        The file cannot be written.
    """

    def __init__(
        self, origin: str, choices: Iterable[PinnedChoice], *, strict: bool = False, path: Path | None = None
    ) -> None:
        self.origin = origin
        self._choices = {choice.request: choice for choice in choices}
        self._strict = strict
        self._path = path
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._written = -1
        self._resume_s = 0.0
        if path is not None:
            self.flush()
            atexit.register(self._flush_at_exit)

    @property
    def is_recording(self) -> bool:
        """Whether choices are added."""
        return self._path is not None

    @property
    def choices(self) -> list[PinnedChoice]:
        """All choices."""
        with self._lock:
            return list(self._choices.values())

    def find(self, kernel: Kernel, problem: Problem, device: DeviceProperties, nvrtc_version: str) -> Choice | None:
        """Return the choice for a problem of a kernel; None if there is none.

        Raises
        ------
        PinError
            It was made for another version of the kernel, or cannot be used here.
        """
        found = self._choices.get(("", kernel.name, problem.dtype, *_asked(problem, True, device)))
        return None if found is None else self.choice_of(found, kernel, problem, device, nvrtc_version)

    def find_operation(self, problem: Problem, device: DeviceProperties, *, library: bool) -> PinnedChoice | None:
        """Return the choice for a problem of an operation; None if there is none."""
        return self._choices.get((problem.kernel, "", problem.dtype, *_asked(problem, library, device)))

    def choice_of(
        self, pinned: PinnedChoice, kernel: Kernel, problem: Problem, device: DeviceProperties, nvrtc_version: str
    ) -> Choice:
        """Return a pinned choice as one that is served; parameters and errors are those of `find`."""
        key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode="cold")
        changed = [
            what
            for what, name in (("template", "template_hash"), ("space", "space_hash"), ("options", "options"))
            if getattr(pinned, name) != getattr(key, name)
        ]
        again = f"delete {self.origin}, or the choice in it, and pin again"
        if changed:
            raise PinError(
                f"{self.origin} pins {pinned} to a configuration of another version of {kernel.name}: its "
                f"{' and '.join(changed)} changed since; restore that version, or {again}"
            )
        try:
            reason = check_config(kernel.spec, pinned.config, problem.sizes, device, problem.dtype)
        except SpecError as error:
            reason = str(error)
        if reason:
            raise PinError(f"{self.origin} pins {pinned} to a configuration that cannot run: {reason}; {again}")
        if pinned.nvrtc_version != key.nvrtc_version:
            warnings.warn(
                f"{self.origin} was made with NVRTC {pinned.nvrtc_version}, and {key.nvrtc_version} compiles here: "
                "results may differ in their last bits",
                PinWarning,
                stacklevel=2,
            )
        config = {parameter.name: pinned.config[parameter.name] for parameter in kernel.spec.parameters}
        return Choice(tier=pinned.tier, config=config, pinned=self.origin)

    def check_served(self, what: str) -> None:
        """Warn of a problem that is served although it is not pinned.

        Raises
        ------
        PinError
            That is refused.
        """
        said = f"{what} is not among the choices of {self.origin}"
        if self._strict:
            raise PinError(
                f"{said}, and no others are allowed; delete {self.origin} and pin again, or pin without strict"
            )
        warnings.warn(f"{said}, and is served as usual", PinWarning, stacklevel=2)

    def add(self, choice: PinnedChoice) -> None:
        """Add a choice, unless the problem has one, and write the file if that is not too soon."""
        if not self.is_recording or len(self._choices) >= _MAX_CHOICES:
            return
        with self._lock:
            self._choices.setdefault(choice.request, choice)
        if time.monotonic() >= self._resume_s:
            with suppress(PinError):  # it is tried again, at exit at last
                self.flush()

    def flush(self) -> None:
        """Write the file if choices were added since, in the process that pinned them.

        Raises
        ------
        PinError
            The file cannot be written.
        """
        with self._lock:
            if self._path is None or len(self._choices) == self._written or os.getpid() != self._process:
                return
            start_s = time.monotonic()
            text, count = write_choices(self._choices.values()), len(self._choices)
            try:
                with atomic_write(self._path) as stream:
                    stream.write(text.encode())
            except OSError as error:
                raise PinError(f"{self._path} cannot be written: {error.strerror}") from None
            self._written = count
            end_s = time.monotonic()
            self._resume_s = end_s + (end_s - start_s) / _MAX_SHARE

    def end(self) -> None:
        """Write the file, and add nothing any more."""
        self.flush()
        atexit.unregister(self._flush_at_exit)
        self._path = None

    def _flush_at_exit(self) -> None:
        with suppress(PinError):
            self.flush()


def _asked(problem: Problem, library: bool, device: DeviceProperties) -> tuple[str, bool, Device]:
    return (
        canonical_json(dict(problem.sizes)),
        library,
        (device.name, device.compute_capability, device.sm_count, device.smem_per_block_optin_bytes),
    )


class Ranks(Protocol):
    """Processes that serve the same choices."""

    @property
    def is_first(self) -> bool:
        """Whether this process states the choices."""

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of the first process, in every process."""

    def all_agree(self, agrees: bool) -> bool:
        """Return whether all processes agree."""


class PinsChoices(Protocol):
    """A dispatcher, as far as its choices can be pinned."""

    def served_choices(self) -> list[PinnedChoice]:
        """Return what is served."""

    def checked(self, pin: Pin) -> Any:
        """Return what a pin would change; raise if it cannot be in force."""

    def put_in_force(self, pin: Pin, checked: Any) -> None:
        """Serve the pinned choices from now on."""


def synchronize(dispatcher: PinsChoices, ranks: Ranks, *, strict: bool) -> None:
    """Serve the choices of the first of several processes in all of them; each must call this.

    Raises
    ------
    PinError
        A process cannot serve them; then nothing changes in any.
    """
    own = write_choices(dispatcher.served_choices()).encode() if ranks.is_first else b""
    text = ranks.broadcast(own)
    failure: InputError | None = None
    try:
        pin = Pin("the choices of rank 0", parse_choices(text, "what rank 0 sent"), strict=strict)
        checked = dispatcher.checked(pin)
    except InputError as error:
        failure = error
    if not ranks.all_agree(failure is None):
        raise failure or PinError("another rank cannot serve the choices of rank 0, and says why; nothing was changed")
    dispatcher.put_in_force(pin, checked)
