"""Recordings in folders: which there are, and which one fits a problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotile.ground.errors import RecordingError
from autotile.store.recording import read_recording_header
from autotile.store.recording_header import RecordingHeader


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """A recording of which only the header was read."""

    path: Path
    header: RecordingHeader | None
    problem: str = ""
    """Why the header could not be read; empty when it could."""


def list_recordings(folders: Sequence[Path]) -> list[RecordingFile]:
    """Recordings in folders, in order of folder and name; a damaged one is listed with its problem."""
    return [_open(path) for folder in folders for path in sorted(folder.glob("*.npz"))]


def find_recording(
    folders: Sequence[Path], kernel: str, sizes: Mapping[str, int], dtype: str, gpu_name: str | None = None
) -> RecordingFile | None:
    """Newest recording of a problem, on one GPU where it is named; None where there is none."""
    fits = [
        (found.header.created_at, number, found)
        for number, found in enumerate(list_recordings(folders))
        if found.header is not None and _fits(found.header, kernel, sizes, dtype, gpu_name)
    ]
    return max(fits)[-1] if fits else None


def recording_name(header: RecordingHeader) -> str:
    """File name that says what a recording holds: ``sgemm-nvidia-h200-4096x4096x4096-float32.npz``."""
    words = [header.key.kernel, header.key.gpu_name, "x".join(map(str, header.key.sizes.values())), header.key.dtype]
    return "-".join(re.sub(r"[^a-z0-9_.]+", "-", word.lower()).strip("-") for word in words) + ".npz"


def _open(path: Path) -> RecordingFile:
    try:
        return RecordingFile(path, read_recording_header(path))
    except RecordingError as error:
        return RecordingFile(path, None, str(error))


def _fits(header: RecordingHeader, kernel: str, sizes: Mapping[str, int], dtype: str, gpu_name: str | None) -> bool:
    key = header.key
    same_problem = key.kernel == kernel and key.dtype == dtype and dict(key.sizes) == dict(sizes)
    return same_problem and gpu_name in (None, key.gpu_name)
