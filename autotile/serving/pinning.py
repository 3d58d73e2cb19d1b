"""Pins: choices of what is served that are in force, frozen to a file or received from another process.

A choice is served only to the version of the kernel that it was made for. While choices are pinned, new results change
nothing, but for configurations that compute the same bits where ``numerics="same"`` asks for them.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.database.paths import atomic_write
from autotile.errors import AutotileError, PinError, PinWarning, SpecError, ToolchainError
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Choice, Contender
from autotile.serving.numerics import Requested, exchanged
from autotile.serving.pinned_choices import (
    MAX_CHOICES,
    PinnedChoice,
    parse_choices,
    read_choices,
    request_of,
    write_choices,
)
from autotile.settings import Numerics, absolute_path, read_settings, user_path
from autotile.space.limits import check_config

if TYPE_CHECKING:
    from autotile.serving.operations import OperationTable
    from autotile.serving.refresh import ChooseAgain, Refresher

_MAX_SHARE = 0.01
"""Maximum share of the time spent writing the file while choices are added; the rest is written at exit."""


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
            from multiprocessing.util import Finalize  # also runs in the children that it forks, unlike atexit

            self._at_exit = Finalize(None, self.flush_quietly, exitpriority=0)

    @property
    def is_recording(self) -> bool:
        """Whether choices are added."""
        return self._path is not None

    def find(self, request: Requested) -> Choice | None:
        """Return the choice for a problem of a kernel; None if there is none.

        Raises
        ------
        PinError
            It was made for another version of the kernel, or cannot be used here.
        """
        pinned = self._choices.get(request_of(request.kernel.name, request.problem, request.device))
        return self.choice_of(pinned, request) if pinned is not None else None

    def find_operation(self, problem: Problem, device: DeviceProperties, *, library: bool) -> PinnedChoice | None:
        """Return the choice for a problem of an operation; None if there is none."""
        return self._choices.get(request_of("", problem, device, operation=problem.kernel, library=library))

    def choice_of(self, pinned: PinnedChoice, request: Requested) -> Choice:
        """Return a pinned choice as one that is served.

        Parameters
        ----------
        request
            The problem of the kernel that is pinned.

        Raises
        ------
        PinError
            As for `find`.
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
            reason = check_config(spec, pinned.config, request.problem.sizes, request.device, request.problem.dtype)
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
        return Choice(tier=pinned.tier, config=config, pinned=self.origin)

    def check(self, kernel: BoundKernel) -> None:
        """Warn of a kernel that is served although its choice is not pinned.

        Raises
        ------
        PinError
            That is refused.
        """
        if self.is_recording or kernel.choice.pinned == self.origin:
            return
        said = f"{kernel.operation or kernel.problem} on {kernel.device.name} is not among the choices of {self.origin}"
        if self._strict:
            raise PinError(f"{said}, and no others are allowed; pin without strict, or {self._cure}")
        _warn(f"{said}, and is served as usual")

    def add(self, choice: PinnedChoice) -> None:
        """Add a choice, unless the problem has one, and write the file if that is not too soon."""
        with self._lock:
            if self.is_recording and len(self._choices) < MAX_CHOICES:
                self._choices.setdefault(choice.request, choice)
        if time.monotonic() >= self._resume_s:
            self.flush_quietly()

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

    def abandon(self) -> None:
        """Neither add choices nor write the file any more."""
        self._at_exit.cancel()
        self._path = None

    def flush_quietly(self) -> None:
        """Write the file as `flush` does, if it can be written."""
        with suppress(PinError):  # it is tried again, at exit at last
            self.flush()

    @property
    def _cure(self) -> str:
        return f"delete {self.origin}, or the choice in it, and pin again"


def _warn(message: str) -> None:
    warnings.warn(message, PinWarning, stacklevel=2)


class _Exchange(NamedTuple):
    """A kernel that the program has, and what is served in its place."""

    location: str
    kernel: BoundKernel
    fresh: BoundKernel
    choose_again: ChooseAgain


class _Override(threading.local):
    """Choices that are tried in the calling thread before they are in force."""

    pin: Pin | None = None
    is_set_aside = False
    """Whether nothing is pinned in the calling thread."""


class Pins:
    """The pinned choices of a dispatcher.

    Parameters
    ----------
    refresher
        Knows what is served.
    """

    def __init__(self, refresher: Refresher) -> None:
        self._refresher = refresher
        self._pin: Pin | None = None
        self._is_decided = False
        """Whether the setting is read, or something else was pinned."""
        self._tried = _Override()

    def in_force(self) -> Pin | None:
        """Return the choices that are in force, if any are; at first those of the setting ``pin``."""
        if self._tried.is_set_aside or self._tried.pin is not None:
            return self._tried.pin
        if not self._is_decided:
            settings = read_settings()
            self._pin = _pin_of_setting(settings.pin, strict=settings.pin_strict) if settings.pin is not None else None
            self._is_decided = True
        return self._pin

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the results alone decide in the calling thread, within the block."""
        self._tried.is_set_aside = True
        try:
            yield
        finally:
            self._tried.is_set_aside = False

    def choice_for(self, request: Requested, numerics: Numerics | None) -> Choice | None:
        """Return the pinned choice for a problem of a kernel; None if there is none.

        Parameters
        ----------
        numerics
            ``"same"``: a faster configuration that computes the same bits may take its place; None for the setting.
        """
        pin = self.in_force()
        choice = pin.find(request) if pin is not None else None
        return choice and _exchanged(choice, request, numerics)

    def serve_operation(
        self, table: OperationTable, problem: Problem, *, library: bool, numerics: Numerics | None
    ) -> BoundKernel | None:
        """Return what is pinned for a problem of an operation; None if nothing is."""
        pin = self.in_force()
        pinned = pin.find_operation(problem, table.device, library=library) if pin is not None else None
        if pin is None or pinned is None:
            return None
        if pinned.source == "library":
            contenders = (Contender(pinned.kernel, {}, None, is_library=True),)
            served = table.bind_library(pinned.kernel, problem, Choice("library", {}, contenders=contenders))
            if served is None:
                raise PinError(f"{pin.origin} pins {pinned} to the library {pinned.kernel}, which is not here")
            found = str(getattr(served, "version", ""))
            if found != pinned.library_version:
                _warn(f"{pin.origin} was made with {pinned.kernel} {pinned.library_version}, and {found} is here")
            served.choice = replace(served.choice, pinned=pin.origin)
            return served
        request = table.requested(pinned.kernel, pinned.kernel_sizes)
        if request is None:
            raise PinError(f"{pin.origin} pins {pinned} to {pinned.kernel}, which is no kernel of {problem.kernel}")
        choice = _exchanged(pin.choice_of(pinned, request), request, numerics)
        return table.bind_kernel(request, replace(choice, contenders=(Contender(pinned.kernel, choice.config, None),)))

    def check(self, kernel: BoundKernel) -> None:
        """Warn of a kernel that is served although its choice is not pinned, or raise `PinError`; see `Pin.check`."""
        pin = self.in_force()
        if pin is not None:
            pin.check(kernel)

    def record(self, kernel: BoundKernel) -> None:
        """Add the choice of a kernel, if choices are added."""
        pin = self.in_force()
        if pin is not None and pin.is_recording:
            pin.add(_pinned(kernel))

    def pin(self, path: str | Path, *, strict: bool = False) -> None:
        """Freeze what is served to a file, or serve what the file says; see `autotile.pin`."""
        whole = absolute_path(user_path(path, "a file of pinned choices"), "a file of pinned choices")
        if whole.exists():
            pin = Pin(str(whole), read_choices(whole), strict=strict)
            self.put_in_force(pin, self.checked(pin))
            return
        pin = Pin(str(whole), self.served_choices(), strict=strict, path=whole)
        try:
            pin.flush()
        except PinError:
            pin.abandon()
            raise
        self.put_in_force(pin, [])

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

    def served_choices(self) -> list[PinnedChoice]:
        """Return what is served, except from bundles."""
        return list({one.request: one for kernel, *_ in self._refresher.kernels() if (one := _pinned(kernel))}.values())

    def checked(self, pin: Pin) -> list[_Exchange]:
        """Return what choices would change, loaded; errors are those of `pin`."""
        self._tried.pin = pin
        try:
            found = [
                _Exchange(where, kernel, again(kernel), again) for kernel, where, again in self._refresher.kernels()
            ]
            for _, kernel, fresh, _ in found:
                if fresh is kernel:
                    pin.check(kernel)
                elif not kernel.has_shapes_of(fresh):
                    raise PinError(
                        f"{pin.origin} pins {kernel.problem} to a configuration for which arrays have other shapes "
                        "than for the one that is served; pin before the kernel is asked for"
                    )
                elif kernel.is_loaded:
                    fresh.load()
        finally:
            self._tried.pin = None
        return [one for one in found if one.fresh is not one.kernel]

    def put_in_force(self, pin: Pin, checked: list[_Exchange]) -> None:
        """Serve pinned choices from now on, given what `checked` returned for them."""
        self.forget()
        self._pin, self._is_decided = pin, True
        for location, kernel, fresh, again in checked:
            self._refresher.exchange(location, kernel, fresh, again)

    def synchronize(self, ranks: Ranks, *, strict: bool = False) -> None:
        """Serve the choices of the first of several processes in all of them; each of them must call this.

        Parameters
        ----------
        ranks
            The processes.
        strict
            As for `pin`.

        Raises
        ------
        PinError
            A process cannot serve them; then nothing is changed in any.
        """
        own = write_choices(self.served_choices()).encode() if ranks.is_first else b""
        text = ranks.broadcast(own)
        failure: AutotileError | None = None
        checked: list[_Exchange] = []
        pin = Pin("the choices of rank 0", (), strict=strict)
        try:
            pin = Pin(pin.origin, parse_choices(text, "what rank 0 sent"), strict=strict)
            checked = self.checked(pin)
        except AutotileError as error:
            failure = error
        if not ranks.all_agree(failure is None):
            raise failure or PinError("another rank cannot serve the choices of rank 0, so nothing was changed")
        self.put_in_force(pin, checked)


class Ranks(Protocol):
    """Processes that serve the same choices."""

    @property
    def is_first(self) -> bool:
        """Whether this process states the choices."""

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of the first process, in every process."""

    def all_agree(self, agrees: bool) -> bool:
        """Return whether all processes agree."""


_by_setting: dict[tuple[Path, bool, int], Pin] = {}
_by_setting_lock = threading.Lock()


def _pin_of_setting(path: Path, *, strict: bool) -> Pin:
    """Return the choices of the file that the setting names, the same for all dispatchers of a process."""
    key = path, strict, os.getpid()
    pin = _by_setting.get(key)
    if pin is None:
        with _by_setting_lock:
            pin = _by_setting.get(key)
            if pin is None:
                exists = path.exists()
                choices = read_choices(path) if exists else []
                pin = _by_setting[key] = Pin(str(path), choices, strict=strict, path=None if exists else path)
    return pin


def _pinned(kernel: BoundKernel) -> PinnedChoice:
    return PinnedChoice.of(kernel, _nvrtc_version(), requested=kernel.operation, library=kernel.library_allowed)


def _nvrtc_version() -> str:
    from autotile.cuda.toolchain import nvrtc_version

    try:
        return nvrtc_version()
    except ToolchainError:
        return ""


def _exchanged(choice: Choice, request: Requested, numerics: Numerics | None) -> Choice:
    is_same = (numerics or read_settings().numerics) == "same"
    return exchanged(choice, request) if is_same else choice


@checked
def pin(path: str | Path, *, strict: bool = False) -> None:
    """Freeze what is served to a file, or serve what the file says.

    If the file does not exist, it is written: with what was served so far, and whatever is served from now on. If
    it exists, its choices are served, also by kernels that the program has already, and it is not changed. New
    results change nothing any more, except with ``numerics="same"``.

    Parameters
    ----------
    path
        The file, JSON.
    strict
        Refuse to serve a problem that is not in an existing file, rather than serve it as usual with a
        `PinWarning`.

    Raises
    ------
    PinError
        The file cannot be read or written, is malformed, or holds a choice that cannot be served in place of what
        is served now: of another version of the kernel, or for arrays of other shapes. Nothing is changed then.
    InputError
        The path is empty.
    CompileError, ToolchainError
        A pinned kernel cannot be loaded in place of one that is. Nothing is changed then.

    Examples
    --------
    >>> pin("choices.json")  # doctest: +SKIP
    """
    from autotile.serving.dispatcher import default_dispatcher

    default_dispatcher.pins.pin(path, strict=strict)


def unpin() -> None:
    """Serve what the results say again, whatever was pinned by `pin` or by the setting."""
    from autotile.serving.dispatcher import default_dispatcher

    default_dispatcher.pins.unpin()
