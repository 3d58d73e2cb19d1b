"""Capture of real calls: their arguments are written to a folder, on which `autotile tune --captured` tunes.

Nothing here is imported, and a served kernel has no further work, unless a capture was asked for.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.argument_types import checked_except
from autotile.core.documents import encode_json
from autotile.errors import InputError
from autotile.kernel.inputs import DOCUMENT, document_of
from autotile.serving.bound import BoundKernel, Code, Launcher, call_through, expect_served
from autotile.settings import absolute_path, read_settings


class CaptureFolder:
    """Writes calls to a folder, up to a number of calls and of bytes.

    Parameters
    ----------
    folder
        Folder of the calls, created for the user alone.
    max_calls, max_bytes
        Limits of this process.
    """

    def __init__(self, folder: Path, max_calls: int, max_bytes: int) -> None:
        self._folder = folder
        self._calls_left = max_calls
        self._bytes_left = max_bytes
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether no further call is written."""
        return self._calls_left <= 0

    def write(self, kernel: Code, views: Mapping[str, Any], scalars: Mapping[str, object]) -> Path | None:
        """Write a call, and return its folder; None if it does not fit in the limits.

        The arrays are copied from the device on CuPy's current stream. The folder appears when it is complete.

        Parameters
        ----------
        kernel
            The kernel that is called.
        views
            Its buffers as CuPy arrays.
        scalars
            Scalars that the caller set.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        spec, problem = kernel.definition.spec, kernel.problem
        read = {buffer.name: views[buffer.name] for buffer in spec.buffers if buffer.is_read}
        size_bytes = sum(int(view.nbytes) for view in read.values())
        with self._lock:
            if self._calls_left <= 0 or size_bytes > self._bytes_left:
                return None
            self._calls_left -= 1
            self._bytes_left -= size_bytes
        document = document_of(spec, problem.sizes, problem.dtype, scalars)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._folder))
            try:
                for name, view in read.items():
                    np.save(made / f"{name}.npy", view.get(), allow_pickle=False)
                (made / DOCUMENT).write_text(encode_json(_plain(document)), encoding="utf-8")
                target = self._folder / f"{spec.name}-{made.name.removeprefix('.writing-')}"
                made.rename(target)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        except OSError as error:
            hint = "choose another folder (AUTOTILE_CAPTURE)"
            raise InputError(f"a call cannot be captured in {self._folder}: {error.strerror}; {hint}") from None
        return target


def _plain(document: Any) -> dict[str, Any]:
    return {name: getattr(document, name) for name in document.__struct_fields__}


class CapturingLauncher:
    """A launcher that captures calls before it launches, until the limits are reached."""

    def __init__(self, launcher: Launcher, kernel: Code, folder: CaptureFolder) -> None:
        self._launcher = launcher
        self._kernel = kernel
        self._folder = folder

    @property
    def plain(self) -> Launcher:
        """The launcher without a capture."""
        return self._launcher

    def launch_fast(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Leave calls that are to be captured to `launch`."""
        return self._launcher.launch_fast(arrays) if self._folder.is_full else None

    def launch(self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]) -> Sequence[Any]:
        """Capture and launch."""
        if not self._folder.is_full:
            arrays = self._launcher.capture(
                arrays, stream, lambda views: self._folder.write(self._kernel, views, scalars)
            )
        return self._launcher.launch(arrays, stream, scalars)

    def capture(
        self, arrays: Sequence[Any], stream: Any, write: Callable[[Mapping[str, Any]], object]
    ) -> Sequence[Any]:
        """Pass the arrays of a call to ``write``; nothing is launched."""
        return self._launcher.capture(arrays, stream, write)

    def bind(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        """Capture once, and return a function that launches."""
        if not self._folder.is_full:
            self._launcher.capture(arrays, None, lambda views: self._folder.write(self._kernel, views, scalars))
        return self._launcher.bind(arrays, scalars)


_folders: dict[tuple[Path, int, int], CaptureFolder] = {}


def configured(launcher: Launcher, kernel: Code) -> Launcher:
    """Return a launcher that captures calls to the folder of the settings, one for all kernels; itself without one."""
    settings = read_settings()
    if settings.capture is None:
        return launcher
    key = (settings.capture, settings.capture_calls, settings.capture_limit_bytes)
    return CapturingLauncher(launcher, kernel, _folders.setdefault(key, CaptureFolder(*key)))


@checked_except("kernel")
def capture(
    kernel: BoundKernel, folder: str | Path | None = None, *, calls: int = 1, limit_bytes: int = 4 << 30
) -> CapturedKernel:
    """Return a kernel whose next calls are written to a folder, as inputs of `autotile tune --captured FOLDER`.

    Parameters
    ----------
    kernel
        A served kernel, from `get_best_kernel`.
    folder
        Folder of the calls; None for that of the setting ``AUTOTILE_CAPTURE``.
    calls, limit_bytes
        Maximum number of calls, and of their bytes.

    Returns
    -------
    CapturedKernel
        It is called like the kernel.

    Raises
    ------
    InputError
        There is no folder, or ``kernel`` is no served kernel.

    Examples
    --------
    >>> capture(kernel, "calls")(x, y)  # doctest: +SKIP
    """
    expect_served(kernel, "capture")
    chosen = absolute_path(folder, "a folder of captured calls") if folder is not None else read_settings().capture
    if chosen is None:
        raise InputError("no folder is given for captured calls; give folder, or set AUTOTILE_CAPTURE")
    return CapturedKernel(kernel, CaptureFolder(chosen, calls, limit_bytes))


class CapturedKernel:
    """A served kernel whose calls are captured; see `capture`."""

    def __init__(self, kernel: BoundKernel, folder: CaptureFolder) -> None:
        self._kernel = kernel
        self._folder = folder

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Capture and launch; as a call of the kernel."""
        wrap = partial(CapturingLauncher, folder=self._folder)
        return call_through(self._kernel, wrap, arrays, stream, scalars)
