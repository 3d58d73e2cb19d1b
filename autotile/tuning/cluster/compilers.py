"""The compile farm of a cluster: machines that compile for sessions with their cores, and a session's use of them.

A session sends a job as JSON, and the author's headers when a machine lacks them. It receives a line of JSON and the
cubin, which is checked by its hash and stored in the session's own cache.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from autotile.core.documents import Text, decode_json, encode_json, to_fields
from autotile.core.model import Outcome
from autotile.core.text import plural
from autotile.cuda.compiler import Compilation, CompileJob
from autotile.cuda.toolchain import nvrtc_version
from autotile.errors import AutotileError, DataError, InputError, WorkerError
from autotile.kernel.sources import OwnSources, read_bytes
from autotile.settings import read_settings
from autotile.tuning.cluster.connection import Connection, WorkerPlugin, distributed, ignore_interrupts
from autotile.version import __version__
from autotile.workers.compile_pool import Compiled, CompilePool, Remote

COMPILERS = "compile with "
"""Prefix of the resource of a process of Dask that compiles; the toolchain follows."""
_PLUGIN = "autotile-compilers"
_CHECK_S = 1.0
"""Interval at which a session looks for machines, and for compilations that take too long."""
_MIN_PATIENCE_S = 10.0
_PATIENCE = 4.0
"""Times that recent compilations took, after which one is repeated on the session's machine: the machine or the network
may be gone."""
_RECENT = 64
_FETCH_S = 10.0
"""Time to fetch a result that is there."""
_MAX_REFUSALS = 20
"""Refusals in a row after which the farm is not used any more."""
_UNFOUND = "open source file"
"""Words of the compiler about a missing header, which the session's machine may have."""


def toolchain() -> str:
    """Return the versions that machines must share for their cubins to be the same."""
    return f"autotile {__version__} and NVRTC {nvrtc_version()}"


Digest = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")]
"""SHA-256 of the author's headers; empty for none."""


@dataclass(eq=False)
class CompilerPlugin(WorkerPlugin):  # type: ignore[misc]
    """Compilers, held by a process of Dask, for a number of compilations at the same time."""

    name = _PLUGIN
    _count: int

    def setup(self, worker: Any) -> None:
        """Make the pool of compile workers; leave Ctrl-C to the nanny."""
        ignore_interrupts(worker)
        self._pool = CompilePool(read_settings(), self._count)
        self._folder = tempfile.TemporaryDirectory(prefix="autotile-compilers-")

    def teardown(self, worker: Any) -> None:
        """End the compile workers."""
        self._pool.close()
        self._folder.cleanup()

    def handle(
        self, versions: str, key: str, job: CompileJob, deadline_s: float, digest: Digest, *, files: Mapping[str, bytes]
    ) -> Compiled | None:
        """Compile a job; requests come in as many threads as there are compilations at the same time.

        ``versions`` is the toolchain of the session, ``key`` the name of the cubin in its cache. None if the author's
        headers are lacking. Raise `AutotileError` if it cannot be compiled on this machine, which says nothing about
        the job.
        """
        if versions != toolchain():
            raise WorkerError(f"it compiles with {toolchain()}")
        root = Path(self._folder.name) / (digest or "none")
        if digest and not root.exists():
            if not files:
                return None
            made = Path(tempfile.mkdtemp(dir=root.parent))
            for name, content in files.items():
                file = Path(_below(made, name))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            try:
                made.rename(root)  # the folder is there only when it is complete
            except OSError:  # another thread was first
                if not root.exists():
                    raise
        folders = tuple(_below(root, folder) for folder in job.include_folders)
        moved = replace(job, template_path=_below(root, job.template_path), include_folders=folders, headers=())
        if moved.key != key:
            raise WorkerError("its compiler is another one")
        compiled = self._pool.submit(moved, deadline_s).result()
        reason = compiled.reason.replace(str(root), "")
        if compiled.outcome is Outcome.NOT_COMPILED or (digest and _UNFOUND in reason):
            raise WorkerError(reason)
        return replace(compiled, reason=reason)


def compile_remotely(text: str, files: Mapping[str, bytes]) -> bytes:
    """Compile a job in this process of Dask; the task that a session submits.

    ``text`` holds the other arguments of `CompilerPlugin.handle` as JSON, ``files`` are the contents of the author's
    headers by their paths, empty unless the machine lacks them. The answer is a line of JSON, and the cubin: a pair of
    the result and of why this machine has none, which says nothing about the job; neither if it lacks the headers.
    """
    plugin = cast("CompilerPlugin", distributed.get_worker().plugins[_PLUGIN])
    found: Compiled | None = None
    cubin, refusal = b"", ""
    try:
        found = plugin.handle(*decode_json(text, tuple[str, str, CompileJob, float, Digest]), files=files)
        if found is not None and found.cubin is not None:
            cubin = found.cubin.path.read_bytes()
    except (AutotileError, OSError, RuntimeError) as error:
        found, refusal = None, f"{error}"
    return encode_json(to_fields((found, refusal))).encode() + b"\n" + cubin


def _below(root: Path, path: str) -> str:
    parts = Path(path).parts
    if not Path(path).is_absolute() or ".." in parts or "\0" in path:
        raise InputError(f"the path {path!r:.200} of a compile job is not absolute")
    return str(root.joinpath(*parts[1:]))


class ClusterCompilers:
    """The compilers of a cluster's machines, a `autotile.workers.compile_pool.CompileFarm`.

    Only machines with the toolchain of this one are used. A compilation whose machine dies is repeated by Dask on
    another one; if there is none, or if it takes far longer than others, it is given back.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._toolchain = toolchain()
        self._lock = threading.Lock()
        self._running: dict[Remote, float] = {}
        """Start of each job that has not ended, by `time.monotonic`."""
        self._headers: dict[str, tuple[str, dict[str, bytes]]] = {}
        """Digest of the author's headers, empty for none, and their contents by their paths, by the source's hash."""
        self._took_s: deque[float] = deque(maxlen=_RECENT)
        self._refusals = 0
        self._refusal = ""
        self._others: dict[str, int] = {}
        self.slots = 0
        self.look()
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep_looking, name="compile farm", daemon=True)
        self._watch.start()

    @property
    def room(self) -> int:
        """Number of compilations that can begin now."""
        return self.slots - len(self._running) if self._refusals < _MAX_REFUSALS else 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks for the user about machines that are not used."""
        found = [
            f"{plural(count, 'core')} of the scheduler compile with {name}, and this session with {self._toolchain}: "
            "they are not used"
            for name, count in sorted(self._others.items())
        ]
        if self._refusals >= _MAX_REFUSALS:
            found.append(f"the compile farm is not used any more, as its machines cannot compile: {self._refusal}")
        return tuple(found)

    def accepts(self, job: CompileJob) -> bool:
        """Return True if another machine can compile a job: with NVRTC, and without files that options name."""
        return job.compiler == "nvrtc" and not job.files

    def submit(self, job: CompileJob, deadline_s: float) -> Remote:
        """Send a job; the future's result is None if it is to be compiled here."""
        done: Remote = Future()
        with self._lock:
            self._running[done] = time.monotonic()
        done.add_done_callback(self._forget)
        try:
            self._send(done, job, deadline_s, with_files=False)
        except WorkerError:  # the scheduler is lost
            _end(done, None)
        except Exception as error:  # such as a header that cannot be read, of which the compiler here has more to say
            self._refuse(done, f"{error}")
        return done

    def close(self) -> None:
        """Give everything back, and look no more."""
        self._ending.set()
        self._watch.join()
        with self._lock:
            left = list(self._running)
        for done in left:
            _end(done, None)

    def _send(self, done: Remote, job: CompileJob, deadline_s: float, *, with_files: bool) -> None:
        path, folders = Path(job.template_path), [Path(folder) for folder in job.include_folders]
        if job.source_hash not in self._headers:
            paths = OwnSources(path, job.source, folders).included
            own = {str(path): read_bytes(path, "included file") for path in sorted(paths)}
            names = {name: hashlib.sha256(content).hexdigest() for name, content in own.items()}
            digest = hashlib.sha256(encode_json(names).encode()).hexdigest() if own else ""
            self._headers[job.source_hash] = digest, own
        digest, own = self._headers[job.source_hash]
        resolved = tuple(str(folder.resolve()) for folder in folders)
        moved = replace(job, template_path=str(path.parent.resolve() / path.name), include_folders=resolved)
        text = encode_json(to_fields((self._toolchain, job.key, moved, deadline_s, digest)))
        files, resource = own if with_files else {}, COMPILERS + self._toolchain
        task = self._connection.submit(compile_remotely, text, files, resource=resource)

        def cancel(_: Remote) -> None:
            if not task.done():
                with suppress(Exception):  # the connection is closed, and the task with it
                    task.cancel()

        done.add_done_callback(cancel)
        task.add_done_callback(lambda _: self._take(task, done, job, deadline_s))

    def _take(self, task: Any, done: Remote, job: CompileJob, deadline_s: float) -> None:
        """Pass on what a task, a future of Dask, has returned; anything but a result of the job gives it back."""
        if done.done():
            return
        if task.cancelled():  # the scheduler was lost
            _end(done, None)
            return
        try:
            found, refusal = _read(task.result(timeout=_FETCH_S))
            if found is None and not refusal:
                self._send(done, job, deadline_s, with_files=True)
                return
        except Exception as error:  # whatever Dask raises where machines died, and what a damaged reply gives
            self._refuse(done, f"{type(error).__name__}: {error}")
            return
        if found is None:
            self._refuse(done, refusal)
            return
        self._refusals = 0
        with self._lock:
            if (begun_at := self._running.get(done)) is not None:
                self._took_s.append(time.monotonic() - begun_at)
        _end(done, found)

    def _refuse(self, done: Remote, reason: str) -> None:
        self._refusals, self._refusal = self._refusals + 1, reason
        _end(done, None)

    def _forget(self, done: Remote) -> None:
        with self._lock:
            self._running.pop(done, None)

    def look(self) -> None:
        """Count the cores that are offered."""
        offered = Counter[str]()
        for resources in self._connection.offers():
            for name, count in resources.items():
                if name.startswith(COMPILERS):
                    offered[name.removeprefix(COMPILERS)] += int(count)
        self.slots = offered.pop(self._toolchain, 0)
        self._others |= offered

    def _keep_looking(self) -> None:
        while not self._ending.wait(_CHECK_S):
            self.look()
            usual_s = sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else 0.0
            latest = time.monotonic() - max(_MIN_PATIENCE_S, _PATIENCE * usual_s)
            with self._lock:
                late = [done for done, begun_at in self._running.items() if begun_at < latest]
            for done in late:
                _end(done, None)


def _end(done: Remote, result: Compilation | Compiled | None) -> None:
    """Pass the result of a job on, unless it has ended before."""
    with suppress(InvalidStateError):
        done.set_result(result)


def _read(answer: object) -> tuple[Compilation | Compiled | None, str]:
    """Parse what `compile_remotely` has returned, a result or why there is none; a `DataError` if it is damaged."""
    if not isinstance(answer, bytes):
        raise DataError("the answer of a compiler is malformed")
    line, _, content = answer.partition(b"\n")
    compiled, refusal = decode_json(line, tuple[Compiled | None, Text])
    if compiled is None or compiled.outcome is not Outcome.OK:
        return compiled, refusal
    cubin = compiled.cubin
    if cubin is None or not cubin.functions or hashlib.sha256(content).hexdigest() != cubin.cubin_hash:
        raise DataError("a cubin arrived damaged")
    return Compilation(content, cubin.functions), ""
