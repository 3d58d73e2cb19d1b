"""Small kernels that use features of search-space files: files in ``sample_kernels``, and spaces that tests make."""

from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).with_name("sample_kernels")
STEPS = ("two_step_sum", "split_rows", "scan_rounds", "several_steps", "apart", "block_sums")
"""Kernels of several steps, and of arrays that depend on parameters."""


def space_text(name: str) -> str:
    return (FOLDER / f"{name}.toml").read_text()


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


def write_kernel(folder: Path, template: str, space: str) -> Path:
    """Write a kernel to a folder, and return the path of its search-space file, which has the name of the kernel."""
    name = space.partition('name = "')[2].partition('"')[0]
    (folder / f"{name}.cu").write_text(template)
    (folder / f"{name}.toml").write_text(space)
    return folder / f"{name}.toml"


def block_space(
    name: str,
    arguments: str,
    reference: str,
    *,
    entry: str = "",
    problem: str = "sizes = { N = 5000 }",
    parameters: Mapping[str, Sequence[int]] = {"BLOCK": (64, 128)},
    default: Mapping[str, int] = {"BLOCK": 128},
    grid: str = '"ceil_div(N, BLOCK)"',
    launch: str = "",
) -> str:
    """Return the search space of a kernel whose blocks have BLOCK threads; its entry is its name unless given."""
    lists = ", ".join(f"{key} = {list(values)}" for key, values in parameters.items())
    chosen = ", ".join(f"{key} = {value}" for key, value in default.items())
    return f"""
kernel = {{ name = "{name}", template = "{name}.cu", entry = "{entry or name}" }}
parameters = {{ {lists} }}
default = {{ {chosen} }}

[problem]
{problem}

[launch]
block = ["BLOCK"]
grid = [{grid}]
{launch}

[arguments]
{arguments.strip()}

[reference]
{reference.strip()}
"""
