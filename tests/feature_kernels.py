"""Small kernels that use features of search-space files: files in ``sample_kernels``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autotile
from autotile import Buffer, Scalar

FOLDER = Path(__file__).with_name("sample_kernels")
STEPS = ("two_step_sum", "split_rows", "scan_rounds", "several_steps", "apart", "block_sums")
"""Kernels of several steps, and of arrays that depend on parameters."""


def space_text(name: str) -> str:
    return (FOLDER / f"{name}.toml").read_text()


SCALE_CODE = (FOLDER / "scale.cu").read_text()
SPLIT_SPACE, CLUSTER_SPACE = space_text("split"), space_text("swap")


def copy_kernel(folder: Path, name: str, changes: Mapping[str, str] = {}) -> Path:
    """Copy a kernel's template and search-space file to a folder, with changes; return the path of the latter."""
    texts = {ending: (FOLDER / f"{name}.{ending}").read_text() for ending in ("cu", "toml")}
    for old, new in changes.items():
        assert any(old in text for text in texts.values()), old
        texts = {ending: text.replace(old, new) for ending, text in texts.items()}
    for ending, text in texts.items():
        (folder / f"{name}.{ending}").write_text(text)
    return folder / f"{name}.toml"


def python_scale(source: str | Path = SCALE_CODE, entry: str | None = "scale", **changed: Any) -> Any:
    """The tiny kernel of ``scale.toml`` as it is written in Python, with changes."""
    described: dict[str, Any] = {
        "sizes": {"n": 4096},
        "ragged": {"n": 1001},
        "parameters": {"THREADS": [32, 64, 128, 256], "WORK": [1, 2, 4]},
        "default": {"THREADS": 128, "WORK": 1},
        "rules": {"enough_blocks": "n >= THREADS * WORK"},
        "arguments": {
            "x": Buffer("dtype", ["n"]),
            "y": Buffer("dtype", "n", "out"),
            "n": Scalar("int32", "n"),
            "factor": Scalar("float32", 2.0, check=-0.5),
        },
        "launch": {"block": "THREADS", "grid": ["ceil_div(n, THREADS * WORK)"]},
        "reference": "factor * x",
        "flops": "n",
        "bytes": "8 * n",
    }
    return autotile.kernel(source, entry, **{**described, **changed})


def write_call(folder: Path, kernel: str = "k", **changes: Any) -> Path:
    """Write the document of a captured call to a folder, and return the folder."""
    document = {"source": "k.toml", "sizes": {"N": 4}, "dtype": "float32", "scalars": {}, "arrays": {}, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.json").write_text(json.dumps({"kernel": kernel, **document}))
    return folder
