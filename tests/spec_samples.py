"""Search-space files for tests: a small SGEMM, and files made from parameters and rules."""

import json
from collections.abc import Mapping, Sequence

import pytest
from feature_kernels import space_text

from autotile.core.model import Value
from autotile.errors import SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec

SGEMM = space_text("sgemm")


def make_spec(
    parameters: Mapping[str, Sequence[Value]],
    rules: Mapping[str, str] | None = None,
    heuristics: Mapping[str, str] | None = None,
    *,
    default: Mapping[str, Value] | None = None,
    launch: Mapping[str, object] | None = None,
    limits: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> KernelSpec:
    """Parse a file made of these parameters, rules and heuristics, with more entries of sections by their names.

    The default is the first value of each parameter unless given.
    """
    sections: dict[str, Mapping[str, object]] = {
        "kernel": {"name": "k", "template": "k.cu", "entry": "k"},
        "problem": {},
        "problem.sizes": sizes or {"N": 4096},
        "parameters": parameters,
        "default": {name: values[0] for name, values in parameters.items()} | dict(default or {}),
        "rules": rules or {},
        "heuristics": heuristics or {},
        "launch": {"block": ["32"], "grid": ["ceil_div(N, 32)"], **(launch or {})},
        "limits": limits or {},
        "arguments.X": {"buffer": "float32", "shape": ["N"], "access": "inout"},
        "reference.outputs": {"X": "X"},
    }
    for name, entries in (more or {}).items():
        sections[name] = {**sections.get(name, {}), **entries}
    if sizes and "N" not in sizes:
        raise ValueError("the sample's launch and argument use the size N")
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
        for name, entries in sections.items()
    )
    return parse_spec(text, "sample.toml")


def copy_spec(*arguments: str, dtype: str = "float32", sizes: str = "N = 4096") -> KernelSpec:
    """The kernel that copies a vector of a type, with further arguments."""
    text = space_text("copy").replace("N = 4096", sizes).replace("float32", dtype)
    return parse_spec(text.replace("\n\n[reference]", "\n".join(("", *arguments, "", "[reference]"))), "k.toml")


def refused(text: str, old: str, new: str, key: str, said: str, *, count: int = -1) -> SpecError:
    """Expect an error, at a key unless that is empty, after a change of a file that is right without it."""
    assert old in text
    with pytest.raises(SpecError) as caught:
        parse_spec(text.replace(old, new, count), "k.toml")
    assert said in caught.value.problem
    assert key in ("", caught.value.key)
    return caught.value
