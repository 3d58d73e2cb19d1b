"""Exceptions. A message states what is wrong, what was expected, and what to do.

::

    AutotileError
    ├── InputError                 invalid input (exit code 2)
    │   ├── SpecError              malformed search-space file
    │   │   └── EmptySpaceError    its rules or the device's limits leave no configuration
    │   ├── UnknownKernelError     unknown kernel name
    │   ├── ProblemError           missing, unknown or invalid size or dtype
    │   ├── ConfigError            configuration that is not in the space
    │   ├── DeviceError            compute capability that the kernel does not support
    │   ├── ArgumentError          kernel argument of wrong shape, dtype, layout or device
    │   ├── NotTunedError          only a fallback could be served, with strict serving
    │   ├── PinError               pinned choices that cannot be read, or a problem that they do not allow
    │   └── DataError              file, row or message from outside that does not match its schema
    │       ├── BundleError        bundle that cannot be written or read, is damaged, or is for another device
    │       ├── DatabaseError      database that cannot be opened, read or written
    │       └── RecordingError     recording that is damaged, or of another version or kernel
    ├── DataWarning                warning of database rows that do not match their schema, and are skipped
    ├── PinWarning                 warning of a problem that is served although its choice is not pinned
    ├── ToolchainError             missing or outdated NVRTC, CuPy or driver
    ├── RescuedRunError            run that its database lost; its trials are in a rescue file
    ├── CompileError               failed compilation
    └── WorkerError                failed child process
        ├── WorkerCrashError
        └── WorkerTimeoutError
"""

from __future__ import annotations

from collections.abc import Iterable


class AutotileError(Exception):
    """Base class of autotile's errors."""


class InputError(AutotileError, ValueError):
    """Invalid input; the command line exits with 2."""


class SpecError(InputError):
    """Malformed search-space file.

    Parameters
    ----------
    problem
        Error and, after a colon or a semicolon, its remedy.
    source
        Path of the file, as given by the user.
    key
        Dotted key in the file, such as ``rules.fits``.
    line
        1-based line in the file, if known.
    column
        1-based column of the error in the expression, if it is inside one.
    expression
        Text of the expression, which is shown with a caret below ``column``.
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
        place = source + (f":{line}" if line else "")
        at = f"column {column}" if column is not None else ""
        message = ": ".join(filter(None, [place, f"[{key}]" if key else "", at, problem]))
        if expression:
            message += f"\n    {expression}"
            if column is not None:
                message += "\n    " + " " * (column - 1) + "^"
        super().__init__(message)


class EmptySpaceError(SpecError):
    """Search-space file whose rules, with the device's limits, leave no configuration."""

    @property
    def cause(self) -> str:
        """The reason why no configuration is left, in one line, without the place in the file and the remedy."""
        what = self.problem.partition(";")[0]
        return f"{what}: {' '.join(self.expression.split())}" if self.expression else what


class UnknownKernelError(InputError):
    """Unknown kernel name."""


class ProblemError(InputError):
    """Missing, unknown or invalid problem size or dtype."""


class ConfigError(InputError):
    """Configuration with unknown parameters or values, or that breaks a rule."""


class DeviceError(InputError):
    """Device of a compute capability that the kernel does not support in any configuration."""


class ArgumentError(InputError):
    """Kernel argument of wrong shape, dtype, layout or device."""


class NotTunedError(InputError):
    """Strict serving of a problem for which nothing is tuned exactly.

    ``differences`` are the fields of the key in which the nearest result differs: name, tuned value, requested value.
    """

    def __init__(self, message: str, differences: tuple[tuple[str, str, str], ...] = ()) -> None:
        self.differences = differences
        super().__init__(message)


class PinError(InputError):
    """Pinned choices that cannot be read, or a problem that they do not allow to be served; see `autotile.pin`."""


class DataError(InputError):
    """File, database row or message from outside that does not match its schema.

    Parameters
    ----------
    fault
        What was found, and what was expected.
    field
        Path of the field, such as ``winners[3].config``; empty for the whole.
    """

    def __init__(self, fault: str, *, field: str = "") -> None:
        self.fault = fault
        self.field = field
        super().__init__(f"{field}: {fault}" if field else fault)


class DataWarning(AutotileError, UserWarning):  # noqa: N818 - a warning, which can be turned into an error
    """Warning of rows of a database that do not match their schema, and are skipped."""


class PinWarning(AutotileError, UserWarning):  # noqa: N818 - a warning, which can be turned into an error
    """Warning of a problem that is served although its choice is not pinned, or may compute other bits here."""


class BundleError(DataError):
    """Bundle that cannot be written or read, is damaged or of another version, or holds nothing for the device."""


class DatabaseError(DataError):
    """Tuning database that cannot be opened, read or written."""


class RescuedRunError(AutotileError):
    """Run that its database lost or could not store.

    ``rescued`` is the path of a database with the trials of the run; empty if there are none, or no folder could be
    written.
    """

    def __init__(self, message: str, rescued: str = "") -> None:
        self.rescued = rescued
        super().__init__(message)


class RecordingError(DataError):
    """Recording that is damaged, or of another format version or kernel."""


class ToolchainError(AutotileError):
    """Missing or outdated NVRTC, CuPy or CUDA driver; the message names the wheel to install."""


class CompileError(AutotileError):
    """Failed compilation.

    Parameters
    ----------
    message
        First error of the compiler.
    log
        Complete compiler log.
    exceeds_limit
        Whether the source is valid, and needs more of a resource than the device has.
    """

    def __init__(self, message: str, log: str = "", *, exceeds_limit: bool = False) -> None:
        self.log = log
        self.exceeds_limit = exceeds_limit
        super().__init__(message)


class WorkerError(AutotileError):
    """Failed child process; ``stage`` is the last stage that it reported."""

    killed = False

    def __init__(self, message: str, stage: str = "") -> None:
        self.stage = stage
        super().__init__(message)


class WorkerCrashError(WorkerError):
    """Child process that ended without a reply.

    ``killed`` is whether SIGKILL ended it, which a process does not send to itself: the system does when memory runs
    out.
    """

    def __init__(self, message: str, stage: str = "", *, killed: bool = False) -> None:
        self.killed = killed
        super().__init__(message, stage)


class WorkerTimeoutError(WorkerError):
    """Child process that did not reply before its deadline and was killed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name, such as ``"; did you mean 'BM'?"``, or an empty string."""
    import difflib  # only needed for errors

    matches = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def type_text(kind: type) -> str:
    """Return the name of a type with its article: ``"an int"``."""
    return f"{'an' if kind.__name__[0] in 'aeioAEIO' else 'a'} {kind.__name__}"


def listing(names: Iterable[str]) -> str:
    """Return names for a message, at most the first twenty of them."""
    ordered = list(names)
    shown = ", ".join(ordered[:20]) or "none"
    return shown if len(ordered) <= 20 else f"{shown} and {len(ordered) - 20} more"
