"""Files by which the results of a reference in Python reach the worker that verifies with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from autotile.core.documents import canonical_json


def expected_file(folder: Path, name: str, sizes: Mapping[str, int], seed: int, *, check: bool) -> Path:
    """Return the path of the expected values of an output.

    Parameters
    ----------
    folder
        Folder of all files of a session.
    name
        Name of the output.
    sizes, seed, check
        What the inputs are made from: sizes and flags, the seed, and whether scalars have their check values.
    """
    inputs = canonical_json([dict(sorted(sizes.items())), seed, check])
    return folder / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.npy"
