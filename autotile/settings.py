"""Settings from the environment and the user's ``config.toml``; no other module reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from autotile.core.documents import convert, parse_toml, read_regular
from autotile.core.model import L2Mode
from autotile.errors import DataError, InputError

Numerics = Literal["any", "same"]
"""Whether what is served may be exchanged for any configuration, or only for those that compute the same bits."""

_APPLICATION = "autotile"
_MAX_CONFIG_BYTES = 2**16
"""Maximum size of ``config.toml``."""
_PACKAGE = Path(__file__).resolve().parent
_FIRST_FOLDER: Path | None
try:
    _FIRST_FOLDER = Path.cwd()
except OSError:  # the folder has been deleted
    _FIRST_FOLDER = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Locations and switches; the environment variable and the key in ``config.toml`` of each are in parentheses.

    A relative path is one below the working directory at the first use of autotile, whatever it is now.
    """

    database: str = field(repr=False)
    """Path of an SQLite file, or a database URL (``AUTOTILE_DB``, ``database``)."""
    cache: Path
    """Folder of compiled cubins (``AUTOTILE_CACHE``, ``cache``)."""
    cache_limit_bytes: int
    """Maximum size of the cubin cache (``AUTOTILE_CACHE_LIMIT_MIB``, ``cache_limit_mib``; default 1024 MiB)."""
    kernel_folders: tuple[Path, ...]
    """Folders of search-space files, in search order (``AUTOTILE_KERNELS``, ``kernels``, then the built-in folder)."""
    recording_folders: tuple[Path, ...]
    """Folders of recordings."""
    include_folders: tuple[Path, ...] = ()
    """Folders of headers for all kernels, such as those of CUTLASS (``AUTOTILE_INCLUDE``, ``include``)."""
    sanitizer: str = ""
    """Path of compute-sanitizer (``AUTOTILE_SANITIZER``, ``sanitizer``); empty to search the usual locations."""
    capture: Path | None = None
    """Folder to which calls of served kernels are written (``AUTOTILE_CAPTURE``, ``capture``); None for no capture."""
    capture_calls: int = 8
    """Maximum number of calls that a process captures (``AUTOTILE_CAPTURE_CALLS``, ``capture_calls``)."""
    capture_limit_bytes: int = 4 << 30
    """Maximum size of these (``AUTOTILE_CAPTURE_LIMIT_MIB``, ``capture_limit_mib``; default 4096 MiB)."""
    bundle: Path | None = None
    """Bundle whose cubins are loaded rather than compiled (``AUTOTILE_BUNDLE``, ``bundle``); None for none."""
    graphs: bool = True
    """Whether repeated launches become CUDA graphs (``AUTOTILE_GRAPHS``, ``graphs``; ``on`` or ``off``)."""
    refresh_s: float = 5.0
    """Seconds between looks for new results of what is served; 0 for none (``AUTOTILE_REFRESH``, ``refresh``)."""
    pin: Path | None = None
    """File that the choices of what is served are pinned to (``AUTOTILE_PIN``, ``pin``); None for none."""
    pin_strict: bool = False
    """Whether nothing else is served (``AUTOTILE_PIN_STRICT``, ``pin_strict``; ``on`` or ``off``)."""
    numerics: Numerics = "any"
    """Whether a choice is only exchanged for one that computes the same bits (``AUTOTILE_NUMERICS``, ``numerics``)."""
    l2: L2Mode = "cold"
    """State of the L2 cache for which kernels are served (``AUTOTILE_L2``, ``l2``)."""
    deployment: Literal["graph", "eager"] = "graph"
    """Whether the host's part of a launch counts for what is served (``AUTOTILE_DEPLOYMENT``, ``deployment``)."""
    wait: bool = False
    """Whether a first call waits for the compiler, rather than be served by something else meanwhile
    (``AUTOTILE_WAIT``, ``wait``; ``on`` or ``off``)."""
    race: bool = False
    """Whether the first call for an unmeasured problem of an operation races the best few ways to compute it
    (``AUTOTILE_RACE``, ``race``; ``on`` or ``off``)."""
    operation_folders: tuple[Path, ...] = ()
    """Folders of operation files (``AUTOTILE_OPERATIONS``, ``operations``, then the built-in folder)."""


class ConfigFile(Struct, forbid_unknown_fields=True):
    """Schema and defaults of ``config.toml``; the first two are by default in the user's folders."""

    database: str | UnsetType = UNSET
    cache: str | UnsetType = UNSET
    kernels: str = ""
    include: str = ""
    cache_limit_mib: int | str = 1024
    sanitizer: str = ""
    capture: str = ""
    capture_calls: int | str = 8
    capture_limit_mib: int | str = 4096
    graphs: str = "on"
    refresh: int | float | str = 5
    bundle: str = ""
    pin: str = ""
    pin_strict: str = "off"
    numerics: str = "any"
    l2: str = "cold"
    deployment: str = "graph"
    operations: str = ""
    race: str = "off"
    wait: str = "off"


_EXPECTED_CONFIG = (
    f"known are {', '.join(ConfigFile.__struct_fields__)}, whose values are strings, with folders separated by "
    f"{os.pathsep!r}; correct it or delete it"
)


def _variable(name: str) -> str:
    """Return the environment variable of an entry of ``config.toml``."""
    return f"AUTOTILE_{'DB' if name == 'database' else name.upper()}"


_VARIABLES = (
    *map(_variable, ConfigFile.__struct_fields__),
    *("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
)
"""Environment variables that settings are read from."""
_KEYS = tuple(map(os.fsencode, _VARIABLES))
_held: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)
"""The encoded variables of `os.environ`, which takes 20 us to encode and decode those of the settings."""
_last: tuple[tuple[bytes | str | None, ...], str, tuple[int, ...], Settings] | None = None
"""Their values, the path and the state of ``config.toml``, and the settings when these were last read."""


def read_settings() -> Settings:
    """Read the settings from the environment, then the user's ``config.toml``, then the defaults.

    They are parsed again only if one of these has changed, since every look-up of a new size reads them. It is an
    `InputError` if ``config.toml`` is malformed, or the value of a setting is invalid.
    """
    global _last  # noqa: PLW0603 - replaced as a whole, so that threads need no lock
    last, values = _last, tuple(map(os.environ.get, _VARIABLES) if _held is None else map(_held.get, _KEYS))
    if last is not None and last[0] == values and last[2] == _file_state(last[1]):
        return last[3]
    path = _user_folder("XDG_CONFIG_HOME", ".config") / "config.toml"
    state = _file_state(str(path))
    try:
        config = convert(parse_toml(read_regular(path, _MAX_CONFIG_BYTES).decode("utf-8-sig")), ConfigFile)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        config = ConfigFile()
    except DataError as error:
        raise InputError(f"{path}: {error}; {_EXPECTED_CONFIG}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: {reason}; correct it or delete it") from None
    settings = _parse_settings(config)
    _last = values, str(path), state, settings
    return settings


def _file_state(path: str) -> tuple[int, ...]:
    """Return the i-node, size and time of a file, which change when it is written; nothing if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path takes longer
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _parse_settings(config: ConfigFile) -> Settings:
    def entry(name: str, default: object = "") -> str:
        configured = getattr(config, name)
        return os.environ.get(_variable(name)) or str(default if configured is UNSET else configured)

    def matching(name: str, pattern: str = "on|off", expected: str = "") -> Any:
        value, expected = entry(name), expected or pattern.replace("|", " or ")
        if not re.fullmatch(pattern, value, re.ASCII | re.IGNORECASE):
            raise InputError(f"the setting {name} ({_variable(name)}) is {value!r:.80}, expected {expected}")
        return value.lower()

    def path(name: str, what: str) -> Path | None:
        given = entry(name)
        return absolute_path(given, what, _FIRST_FOLDER) if given else None

    def folders(name: str, what: str) -> tuple[Path, ...]:
        named = entry(name).split(os.pathsep)
        return tuple(absolute_path(folder, what, _FIRST_FOLDER) for folder in named if folder)

    count, mib = "0*[1-9][0-9]{0,8}", "a positive number of MiB"
    seconds = r"[0-9]{1,6}(\.[0-9]{1,6})?"
    location = entry("database", _user_folder("XDG_DATA_HOME", ".local/share") / "autotile.db")
    if not set(":@?=") & set(location):  # else it may be meant as a URL
        location = str(absolute_path(location, "a database", _FIRST_FOLDER))
    return Settings(
        database=location,
        cache=absolute_path(entry("cache", _user_folder("XDG_CACHE_HOME", ".cache")), "the cubin cache", _FIRST_FOLDER),
        cache_limit_bytes=int(matching("cache_limit_mib", count, mib)) * 2**20,
        kernel_folders=(*folders("kernels", "a kernel folder"), data_folder("search_spaces")),
        recording_folders=(data_folder("recordings"),),
        include_folders=folders("include", "a folder of headers"),
        sanitizer=entry("sanitizer"),
        capture=path("capture", "a folder of captured calls"),
        capture_calls=int(matching("capture_calls", count, "a positive number")),
        capture_limit_bytes=int(matching("capture_limit_mib", count, mib)) * 2**20,
        graphs=matching("graphs") == "on",
        bundle=path("bundle", "a bundle"),
        pin=path("pin", "a file of pinned choices"),
        pin_strict=matching("pin_strict") == "on",
        numerics=matching("numerics", "any|same"),
        l2=matching("l2", "cold|hot"),
        deployment=matching("deployment", "graph|eager"),
        race=matching("race") == "on",
        wait=matching("wait") == "on",
        refresh_s=float(matching("refresh", seconds, "seconds, or 0 for never")),
        operation_folders=(*folders("operations", "a folder of operations"), data_folder("operations")),
    )


def served_database() -> str:
    """Return the setting ``database``; the user's ``config.toml`` is read once, as each look-up needs it."""
    variables = ("AUTOTILE_DB", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HOME")
    return _database_of(tuple([os.environ.get(variable) for variable in variables]))


@lru_cache(maxsize=16)
def _database_of(_: tuple[str | None, ...]) -> str:
    return read_settings().database


def expand_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path of the user with ``~`` and ``~user`` at its start replaced by the home folder.

    It is an `InputError`, which says ``what`` the path is of, if the path is empty or ``-``, or there is no such user.
    """
    is_path = isinstance(path, str | os.PathLike)
    if not is_path or str(path).strip() in ("", "-") or "\0" in str(path):
        shown = str(path) if is_path else path
        raise InputError(f"{shown!r:.200} is not the path of {what}: expected the path of a file")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise InputError(f"{str(path)!r}: there is no home folder {user}; give the whole path of {what}") from None


_SOURCES = {".toml", ".cu", ".c", ".cc", ".cpp", ".py"}


def output_path(path: str | Path) -> Path:
    """Return the path of a file to write; ``~`` is expanded.

    It is an `InputError` if it is empty, of a folder or of a source file, or in the home of a user who does not exist.
    """
    found = user_path(path, "an output file")
    if not found.name or found.is_dir():
        raise InputError(f"cannot write {str(found)!r}: it names a folder, expected a file")
    if found.suffix in _SOURCES and found.exists():
        raise InputError(f"cannot write {found}: it is a source file, which is not overwritten; name another file")
    return found


def user_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a file or folder that the user named, which need not exist.

    Parameters and errors are those of `expand_path`; that the system cannot look the path up is an `InputError`, too.
    """
    expanded = expand_path(path, what)
    try:
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it cannot be encoded as a path"
        raise InputError(f"{str(path)!r:.200} cannot be the path of {what}: {reason}; give another path") from None
    return expanded


def absolute_path(path: str | os.PathLike[str], what: str, folder: Path | None = None) -> Path:
    """Return a path that means the same file after a change of the working directory.

    A relative one is below ``folder``, or the working directory; that this was deleted is an `InputError`. Other
    parameters and errors are those of `expand_path`.
    """
    expanded = expand_path(path, what)
    if expanded.is_absolute():
        return expanded
    try:
        return (folder or Path.cwd()) / expanded
    except OSError:
        raise InputError(
            f"{str(path)!r} is relative, and the working directory was deleted: change to another folder, or give the "
            f"whole path of {what}"
        ) from None


def toolkit_folders() -> tuple[Path, ...]:
    """Return possible locations of a CUDA toolkit: ``CUDA_HOME``, ``CUDA_PATH``, conda's, the installer's default."""
    named = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    conda = os.environ.get("CONDA_PREFIX")
    targets = sorted(Path(conda).glob("targets/*")) if conda else ()
    return (*(Path(folder) for folder in named if folder), *targets, Path("/usr/local/cuda"))


@lru_cache
def data_folder(name: str) -> Path:
    """Return a data folder: ``templates``, ``search_spaces``, ``recordings`` or ``tuned``.

    It is inside the package if installed from a wheel, and next to it in a checkout.
    """
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT", "4"
"""Variable and value with which the threads of OpenBLAS, one a core from the import of NumPy or SciPy on, go to sleep
after 2 ** 4 clock cycles instead of 2 ** 26: on 16 cores each spun for 0.12 s, beside the first compilers."""


def let_blas_sleep() -> None:
    """Let the threads of OpenBLAS sleep in this process, unless the user has set their timeout."""
    os.environ.setdefault(*BLAS_TIMEOUT)


def child_environment() -> dict[str, str]:
    """Return the environment of a child process, in which it imports the same autotile, installed or not."""
    # another thread may change it meanwhile
    environment = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
    paths = [str(_PACKAGE.parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment.setdefault(*BLAS_TIMEOUT)
    return environment


_WITH_PASSWORD = ("AUTOTILE_DB", "PGPASSWORD")
"""Environment variables that may hold the password of a database."""


ADDR_NO_RANDOMIZE = 0x0040000
"""Bit in Linux's ``personality`` of a process whose addresses are not randomized."""


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: a child's without what may hold a password, as no worker needs a database."""
    return {name: value for name, value in child_environment().items() if name not in _WITH_PASSWORD}


def forget_passwords() -> None:
    """Leave out of this process's environment what may hold a password: neither it nor its children need a database."""
    for name in _WITH_PASSWORD:
        os.environ.pop(name, None)


def overrides_float32() -> bool:
    """Return True if the environment may replace the float32 arithmetic of NVIDIA's libraries by a less exact one."""
    variables = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION")
    return any(os.environ.get(variable, "0") not in ("", "0") for variable in variables)


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _user_folder(variable: str, default: str) -> Path:
    """Return autotile's folder below one of the user's folders (XDG Base Directory Specification)."""
    named = Path(os.environ.get(variable, ""))
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises if there is none
    return (named if named.is_absolute() else home / default) / _APPLICATION
