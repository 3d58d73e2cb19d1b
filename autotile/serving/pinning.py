"""Pins: choices that are in force, frozen to a file or received from another process.

A choice is served only to the version of the kernel that it was made for. While choices are pinned, new results change
nothing, but for configurations that compute the same bits where ``numerics="same"`` asks for them. A file of choices is
JSON; equal choices make equal files. They are read by a declared schema, and hold nothing that is executed.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import structs

from autotile.core.device import DeviceProperties
from autotile.core.documents import Bytes, Count, Format, Name, Text, canonical_json, decode_json, read_regular
from autotile.core.model import Config, Problem
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import key_of
from autotile.database.paths import atomic_write
from autotile.errors import AutotileError, DataError, PinError, PinWarning, SpecError, ToolchainError
from autotile.serving.aside import at_exit, wait_for_compilations
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import EPOCH, Choice, Tier
from autotile.serving.selection import KernelRequest, same_bits
from autotile.settings import Numerics, absolute_path, read_settings, user_path
from autotile.space.limits import check_config

if TYPE_CHECKING:
    from autotile.serving.operations import OperationShelf, Way
    from autotile.serving.refresh import Refresher

PIN_FORMAT = 1
MAX_BYTES = 64 * 2**20
"""Maximum size of the JSON: 60,000 choices of a kilobyte."""
MAX_CHOICES = 60_000

Asked = tuple[str, str, str, str, bool, tuple[str, str, int, int]]
"""Operation, kernel, dtype, sizes as JSON, whether a library may compute it, and the device."""


class PinnedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice for a problem on a kind of GPU, as data.

    The problem has the names, flags and conditions of the operation that was asked for, which is empty if a kernel was.
    What is not of the ``source`` is empty: of a library the sizes by the kernel's names and the version of the kernel
    and its compiler, of a kernel the version of the library.
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
    def of(cls, served: BoundKernel) -> PinnedChoice:
        """Return the choice of a served kernel."""
        try:
            version = nvrtc_version()
        except ToolchainError:
            version = ""
        problem, library = served.problem, served.library
        key = key_of(served.definition, problem, served.device, nvrtc_version=version, l2_mode="cold")
        given = served.operation or problem
        return cls(
            operation=served.operation.kernel if served.operation is not None else "",
            sizes=dict(given.sizes),
            dtype=given.dtype,
            library_allowed=served.library_allowed,
            gpu_name=key.gpu_name,
            compute_capability=key.compute_capability,
            sm_count=key.sm_count,
            smem_per_block_optin_bytes=key.smem_per_block_optin_bytes,
            source="kernel" if library is None else "library",
            kernel=served.kernel,
            kernel_sizes=dict(problem.sizes) if library is None else {},
            template_hash=key.template_hash if library is None else "",
            space_hash=key.space_hash if library is None else "",
            options=key.options if library is None else (),
            nvrtc_version=key.nvrtc_version if library is None else "",
            library_version=library.version if library is not None else "",
            config=dict(served.config),
            tier=served.tier,
        )

    @property
    def request(self) -> Asked:
        """Key of the problem and the device."""
        device = self.gpu_name, self.compute_capability, self.sm_count, self.smem_per_block_optin_bytes
        asked = "" if self.operation else self.kernel
        return self.operation, asked, self.dtype, canonical_json(dict(self.sizes)), self.library_allowed, device

    def __str__(self) -> str:
        """Return the problem as text."""
        return str(Problem(self.operation or self.kernel, self.sizes, self.dtype))


class _PinFile(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    choices: Annotated[tuple[PinnedChoice, ...], msgspec.Meta(max_length=MAX_CHOICES)]


def write_choices(choices: Iterable[PinnedChoice]) -> str:
    """Return choices as JSON, in an order of their own, each on lines of its own."""
    rows = sorted(map(structs.asdict, choices), key=canonical_json)
    return json.dumps({"choices": rows, "format": PIN_FORMAT}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def parse_choices(text: bytes | str, origin: str) -> list[PinnedChoice]:
    """Parse the JSON of `write_choices`; messages say that it comes from ``origin``.

    Raise `PinError` if it is malformed, of another format, or names a problem twice.
    """
    try:
        version = decode_json(text, Format).format
        if version != PIN_FORMAT:
            raise PinError(f"{origin} has format {version!r:.40}, expected {PIN_FORMAT}: it needs another autotile")
        choices = list(decode_json(text, _PinFile).choices)
    except DataError as error:
        raise PinError(f"{origin} holds no pinned choices: {error}; pin to another file, or move it away") from None
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


_MAX_SHARE = 0.01
"""Maximum share of the time spent writing the file while choices are added; the rest is written at exit."""


class Pin:
    """Choices that are in force.

    ``origin`` is a path, or a text for messages, which then has a ``cure`` of its own. If ``strict``, a problem that is
    not among the choices is refused rather than served with a warning. Further choices are added to the file at
    ``path``, if one is given.
    """

    def __init__(
        self,
        origin: str,
        choices: Iterable[PinnedChoice],
        *,
        strict: bool = False,
        path: Path | None = None,
        cure: str = "",
    ) -> None:
        self.origin = origin
        self._cure = cure or f"delete {origin}, or the choice in it, and pin again"
        self._choices = {choice.request: choice for choice in choices}
        self._strict = strict
        self._path = path
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._written = -1
        self._resume_s = 0.0

    @property
    def is_recording(self) -> bool:
        """Whether choices are added."""
        return self._path is not None

    def find(
        self, problem: Problem, device: DeviceProperties, *, operation: bool = False, library: bool = True
    ) -> PinnedChoice | None:
        """Return the choice for a problem of a kernel, or of an operation; None if there is none."""
        place = device.name, device.compute_capability, device.sm_count, device.smem_per_block_optin_bytes
        names = (problem.kernel, "") if operation else ("", problem.kernel)
        return self._choices.get((*names, problem.dtype, canonical_json(dict(problem.sizes)), library, place))

    def choice_of(self, pinned: PinnedChoice, request: KernelRequest, numerics: Numerics | None) -> Choice:
        """Return a pinned choice of a kernel as one that is served.

        If ``numerics``, or else the setting, is ``"same"``, a faster configuration that computes the same bits may take
        its place. Raise `PinError` if it was made for another version of the kernel, or cannot be used here.
        """
        key, spec = request.key, request.kernel.spec
        changed = [
            what
            for what, name in (("template", "template_hash"), ("space", "space_hash"), ("options", "options"))
            if getattr(pinned, name) != getattr(key, name)
        ]
        if changed:
            raise PinError(
                f"{self.origin} pins {pinned} to a configuration of another version of {spec.name}: its "
                f"{' and '.join(changed)} changed since; restore that version, or {self._cure}"
            )
        try:
            reason = check_config(spec, pinned.config, request.problem, request.device)
        except SpecError as error:
            reason = str(error)
        if reason:
            raise PinError(f"{self.origin} pins {pinned} to a configuration that cannot run: {reason}; {self._cure}")
        if pinned.nvrtc_version != key.nvrtc_version:
            _warn(
                f"{self.origin} was made with NVRTC {pinned.nvrtc_version}, and {key.nvrtc_version} compiles here: "
                "results may differ in their last bits"
            )
        config = {parameter.name: pinned.config[parameter.name] for parameter in spec.parameters}
        choice = Choice(tier=pinned.tier, config=config, pinned=self.origin)
        return same_bits(choice, request) if (numerics or read_settings().numerics) == "same" else choice

    def way_for(
        self, shelf: OperationShelf, problem: Problem, *, library: bool, numerics: Numerics | None
    ) -> Way | None:
        """Return the pinned way to compute a problem of an operation; None if there is none. See `choice_of`."""
        from autotile.serving.operations import OperationRequest, Way, called

        pinned = self.find(problem, shelf.device, operation=True, library=library)
        if pinned is None:
            return None
        if pinned.source == "library":
            ways = called(OperationRequest(shelf, problem))
            way = next((one for one in ways if one.code.name == pinned.kernel), None)
            if way is None or way.code.library is None:
                raise PinError(f"{self.origin} pins {pinned} to the library {pinned.kernel}, which is not here")
            found = way.code.library.version
            if found != pinned.library_version:
                _warn(f"{self.origin} was made with {pinned.kernel} {pinned.library_version}, and {found} is here")
            return way._replace(choice=structs.replace(way.choice, pinned=self.origin))
        if pinned.kernel not in shelf.members:
            raise PinError(f"{self.origin} pins {pinned} to {pinned.kernel}, which is no kernel of {problem.kernel}")
        request = shelf.request_for(pinned.kernel, pinned.kernel_sizes)
        choice = self.choice_of(pinned, request, numerics)
        return Way(request.code(choice), choice)

    def check(self, kernel: BoundKernel) -> None:
        """Warn of a kernel that is served although its choice is not pinned, or raise `PinError` if that is refused."""
        if self.is_recording or kernel.choice.pinned == self.origin:
            return
        said = f"{kernel.operation or kernel.problem} on {kernel.device.name} is not among the choices of {self.origin}"
        if self._strict:
            raise PinError(f"{said}, and no others are allowed; pin without strict, or {self._cure}")
        _warn(f"{said}, and is served as usual")

    def record(self, kernel: BoundKernel) -> None:
        """Add the choice of a kernel, unless the problem has one, and write the file if that is not too soon."""
        if not self.is_recording:
            return
        choice = PinnedChoice.of(kernel)
        with self._lock:
            if self.is_recording and len(self._choices) < MAX_CHOICES:
                self._choices.setdefault(choice.request, choice)
        if time.monotonic() >= self._resume_s:
            self.flush_quietly()

    def flush(self) -> None:
        """Write the file if choices were added since, in the process that pinned them; `PinError` if that fails."""
        with self._lock:
            if self._path is None or len(self._choices) == self._written or os.getpid() != self._process:
                return
            if self._written < 0 and self._path.exists():
                _warn(f"{self._path} was written by another process meanwhile, and is left as it is")
                self._path = None
                return
            start_s = time.monotonic()
            text, count = write_choices(self._choices.values()), len(self._choices)
            try:
                with atomic_write(self._path) as stream:
                    stream.write(text.encode())
            except OSError as error:
                raise PinError(f"{self._path} cannot be written: {error.strerror}; pin to another file") from None
            self._written = count
            end_s = time.monotonic()
            self._resume_s = end_s + (end_s - start_s) / _MAX_SHARE

    def flush_quietly(self) -> None:
        """Write the file as `flush` does, if there is anything to write, with a warning if it cannot be written."""
        try:
            if self._choices:
                self.flush()
        except PinError as error:  # it is tried again, at exit at last
            _warn(str(error))


def _warn(message: str) -> None:
    warnings.warn(message, PinWarning, stacklevel=2)


Exchange = tuple[BoundKernel, BoundKernel]
"""A kernel that the program has, and the one that is served in its place."""


class Pins:
    """The pinned choices of a dispatcher, whose refresher knows what is served."""

    def __init__(self, refresher: Refresher) -> None:
        self._refresher = refresher
        self._pin: Pin | None = None
        self._is_decided = False
        """Whether the setting is read, or something else was pinned."""
        self._here = threading.local()
        """``pin``: what is in force in the calling thread alone; None if nothing is pinned there."""

    def in_force(self) -> Pin | None:
        """Return the choices that are in force, if any are; at first those of the setting ``pin``."""
        if hasattr(self._here, "pin"):
            here: Pin | None = self._here.pin
            return here
        if not self._is_decided:
            settings = read_settings()
            if settings.pin is not None:
                with _setting_lock:
                    self._pin = _pin_of_setting(settings.pin, settings.pin_strict, os.getpid())
            elif settings.pin_strict:
                raise PinError("only pinned choices are allowed (AUTOTILE_PIN_STRICT), but AUTOTILE_PIN names no file")
            self._is_decided = True
        return self._pin

    @contextmanager
    def instead(self, pin: Pin | None) -> Iterator[None]:
        """Let other choices, or none, be in force in the calling thread, within the block."""
        before = dict(vars(self._here))
        self._here.pin = pin
        try:
            yield
        finally:
            vars(self._here).clear()
            vars(self._here).update(before)

    def pin(self, path: str | Path, *, strict: bool = False) -> None:
        """Freeze what is served to a file, or serve what the file says; see `autotile.pin`."""
        whole = absolute_path(user_path(path, "a file of pinned choices"), "a file of pinned choices")
        if whole.exists():
            pin = Pin(str(whole), read_choices(whole), strict=strict)
            self._put_in_force(pin, self._checked(pin))
            return
        pin = Pin(str(whole), self.served_choices(), strict=strict, path=whole)
        pin.flush()
        at_exit(pin.flush_quietly)
        self._put_in_force(pin, [])

    def unpin(self) -> None:
        """Serve what the results say again, whatever was pinned, also by the setting."""
        self.forget()
        self._is_decided = True
        self._refresher.refresh()

    def forget(self) -> None:
        """Forget what is pinned, and read the setting again; what is served stays as it is."""
        if self._pin is not None:
            self._pin.flush_quietly()
        self._pin, self._is_decided = None, False
        EPOCH.now = object()

    def served_choices(self) -> list[PinnedChoice]:
        """Return the served kernels, except those of bundles."""
        wait_for_compilations()  # what stands in for a choice is not the choice
        found = map(PinnedChoice.of, self._refresher.kernels())
        return list({one.request: one for one in found}.values())

    def _checked(self, pin: Pin) -> list[Exchange]:
        """Return the kernels whose choices would change, loaded; errors are those of `pin`."""
        with self.instead(pin):
            again = self._refresher.choose_again
            found = [(kernel, again(kernel)) for kernel in self._refresher.kernels()]
            for kernel, fresh in found:
                if fresh is kernel:
                    pin.check(kernel)
                elif not kernel.has_shapes_of(fresh):
                    raise PinError(
                        f"{pin.origin} pins {kernel.problem} to a configuration for which arrays have other shapes "
                        "than for the one that is served; pin before the kernel is asked for"
                    )
                elif kernel.is_loaded:
                    fresh.load()
        return [(kernel, fresh) for kernel, fresh in found if fresh is not kernel]

    def _put_in_force(self, pin: Pin, checked: list[Exchange]) -> None:
        """Serve pinned choices from now on, given what `_checked` returned for them."""
        self.forget()
        self._pin, self._is_decided = pin, True
        EPOCH.now = object()
        for kernel, fresh in checked:
            self._refresher.exchange(kernel, fresh)

    def synchronize(
        self,
        broadcast: Callable[[bytes], bytes],
        all_agree: Callable[[bool], bool],
        *,
        is_first: bool,
        strict: bool = False,
    ) -> None:
        """Serve the choices of the first of several processes in all of them; each of them must call this.

        ``broadcast`` returns the data of the first process in every process, and ``all_agree`` whether all agree. Raise
        `PinError` if a process cannot serve them; then nothing is changed in any.
        """
        all_agree(True)  # waits until what the last of them has tuned is stored
        if is_first:
            self._refresher.poll()
        text = broadcast(write_choices(self.served_choices()).encode() if is_first else b"")
        failure: AutotileError | None = None
        cure = "call sync_choices again, with the same kernels in all ranks, when rank 0 has asked for what they use"
        try:
            pin = Pin("rank 0", parse_choices(text, "what rank 0 sent"), strict=strict, cure=cure)
            checked = self._checked(pin)
        except AutotileError as error:
            failure = error
        if not all_agree(failure is None):
            raise failure or PinError("another rank cannot serve the choices of rank 0, so nothing was changed")
        self._put_in_force(pin, checked)


_setting_lock = threading.Lock()


@cache
def _pin_of_setting(path: Path, strict: bool, process: int) -> Pin:
    """Return the choices of the file that the setting names, the same for all dispatchers of a ``process``."""
    exists = path.exists()
    if strict and not exists:
        raise PinError(
            f"there is no file {path}, and no other choices are allowed (AUTOTILE_PIN_STRICT); correct AUTOTILE_PIN, "
            "or let a program write the file without AUTOTILE_PIN_STRICT first"
        )
    pin = Pin(str(path), read_choices(path) if exists else [], strict=strict, path=None if exists else path)
    at_exit(pin.flush_quietly)
    return pin
