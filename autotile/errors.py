"""The exception tree. Each message says what was wrong, what was expected and what to do.

::

    AutotileError
    ├── InputError                 what the user gave cannot be used (exit code 2)
    │   ├── SpecError              a search-space file is malformed
    │   │   └── EmptySpaceError    its rules, or a device's limits, leave nothing
    │   ├── UnknownKernelError     no kernel of that name
    │   ├── ProblemError           a size or dtype is missing, unknown or absurd
    │   ├── ConfigError            a configuration is not one of the space
    │   ├── DeviceError            the kernel is not for devices of this compute capability
    │   ├── ArgumentError          an array handed to a kernel has the wrong shape, dtype or layout
    │   ├── NotTunedError          strict serving was asked for, and only a fallback could be served
    │   ├── BundleError            a bundle cannot be written or read, is damaged, or is for another device
    │   ├── DatabaseError          the database cannot be opened, read or written
    │   └── RecordingError         a recording is damaged, of another version, or of another kernel
    ├── ToolchainError             NVRTC, CuPy or the driver is missing or too old
    ├── CompileError               NVRTC refused a source
    └── WorkerError                a child process died, hung or spoke nonsense
        ├── WorkerCrashError
        └── WorkerTimeoutError
"""

from __future__ import annotations

from collections.abc import Iterable


class AutotileError(Exception):
    """Base of every error that autotile raises on purpose."""


class InputError(AutotileError, ValueError):
    """What the user gave cannot be used; the command line exits with 2."""


class SpecError(InputError):
    """A search-space file is malformed.

    Parameters
    ----------
    problem
        What is wrong and, after a colon or a semicolon, how to cure it.
    source
        The file, as the user named it.
    key
        The dotted key in the file, such as ``rules.fits``.
    line
        1-based line in the file, where known.
    column
        1-based column in the expression, where the fault is inside one.
    expression
        The expression's text, shown with a caret under ``column``.
    """

    def __init__(
        self,
        problem: str,
        *,
        source: str = "",
        key: str = "",
        line: int | None = None,
        column: int | None = None,
        expression: str = "",
    ) -> None:
        self.problem = problem
        self.source = source
        self.key = key
        self.line = line
        self.column = column
        self.expression = expression
        super().__init__(self._render())

    def _render(self) -> str:
        place = self.source + (f":{self.line}" if self.line else "")
        parts = [part for part in (place, f"[{self.key}]" if self.key else "") if part]
        if self.column is not None:
            parts.append(f"column {self.column}")
        message = ": ".join([*parts, self.problem])
        if self.expression:
            message += f"\n    {self.expression}"
            if self.column is not None:
                message += "\n    " + " " * (self.column - 1) + "^"
        return message


class EmptySpaceError(SpecError):
    """A search-space file's rules, or a device's limits, leave no configuration."""


class UnknownKernelError(InputError):
    """No kernel of that name."""


class ProblemError(InputError):
    """A problem size or dtype is missing, unknown or absurd."""


class ConfigError(InputError):
    """A configuration names unknown parameters or values, or breaks a rule."""


class DeviceError(InputError):
    """The kernel cannot run on a device of this compute capability, whatever its configuration."""


class ArgumentError(InputError):
    """An array handed to a kernel has the wrong shape, dtype, layout or device."""


class NotTunedError(InputError):
    """Nothing is tuned for exactly what was asked, and strict serving takes nothing else.

    Parameters
    ----------
    message
        What was asked for.
    differences
        Fields of the key in which the nearest result differs: name, tuned value, asked value.
    """

    def __init__(self, message: str, differences: tuple[tuple[str, str, str], ...] = ()) -> None:
        self.differences = differences
        super().__init__(message)


class BundleError(InputError):
    """A bundle cannot be written or read, is damaged or of another version, or holds nothing for this device."""


class DatabaseError(InputError):
    """The tuning database cannot be opened, read or written."""


class RecordingError(InputError):
    """A recording is damaged, of another format version, or of another kernel."""


class ToolchainError(AutotileError):
    """NVRTC, CuPy or the CUDA driver is missing or too old; the message says which wheel brings it."""


class CompileError(AutotileError):
    """NVRTC refused a source.

    Parameters
    ----------
    message
        The compiler's own first error.
    log
        The whole compiler log.
    """

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class WorkerError(AutotileError):
    """A child process failed; ``stage`` is the last stage that it said it entered."""

    def __init__(self, message: str, stage: str = "") -> None:
        self.stage = stage
        super().__init__(message)


class WorkerCrashError(WorkerError):
    """A child process ended without an answer."""


class WorkerTimeoutError(WorkerError):
    """A child process gave no answer before its deadline and was killed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name nearest to a wrong one: ``"; did you mean 'BM'?"``, or nothing."""
    import difflib  # for errors alone

    matches = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def listing(names: Iterable[str]) -> str:
    """Names for a message, shortened after the first twenty."""
    ordered = list(names)
    shown = ", ".join(ordered[:20]) or "none"
    return shown if len(ordered) <= 20 else f"{shown} and {len(ordered) - 20} more"
