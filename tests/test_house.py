"""Ceilings of the size and the tangle of the package, which only ever fall.

`tests/pinned/house.json` holds them. A change that lowers a figure by more than its slack lowers the ceiling, too:
``pytest tests/test_house.py --pin`` writes those of the present code, and refuses to raise one.
"""

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotile

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "pinned" / "house.json"
SLACK = {
    "modules": 2,
    "lines": 700,
    "code_tokens": 4000,
    "classes": 5,
    "functions_per_10k_tokens": 1,
    "names_of_several_classes": 0,
    "public_names": 0,
    "circles": 0,
    "lines_of_tests": 700,
}
"""Amount by which a figure may lie below its ceiling."""
CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)

pytestmark = [
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout"),
    pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on an f-string is several tokens"),
]


def modules() -> dict[str, tuple[str, ast.Module]]:
    """Return the text and the tree of every module of the package, by its dotted name."""
    found = {}
    for path in sorted((ROOT / "autotile").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found[name] = (text, ast.parse(text))
    return found


def code_tokens(text: str, tree: ast.Module) -> int:
    """Count names, numbers, texts and operators outside of docstrings."""
    strings = [one for one in ast.walk(tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    prose = {
        line
        for one in strings
        if isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in CODE and token.start[0] not in prose for token in tokens)


def imported(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the modules that a module imports at its top, those for type checkers included."""
    for top in tree.body:
        for node in [top] if isinstance(top, ast.ImportFrom) else ast.walk(top) if isinstance(top, ast.If) else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if whole in names else node.module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or through others."""
    reachable: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        left = [start]
        while left:
            for following in graph[left.pop()] - seen:
                seen.add(following)
                left.append(following)
        reachable[start] = seen
    groups = {
        tuple(sorted(other for other in seen if start in reachable[other]))
        for start, seen in reachable.items()
        if start in seen
    }
    return sorted(map(list, groups))


@pytest.fixture(scope="module")
def figures():
    every = modules()
    names = [
        node.name.lstrip("_") for _, tree in every.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    graph = {
        name: {one for one in imported(tree, set(every)) if one in every} - {name} for name, (_, tree) in every.items()
    }
    tokens = sum(code_tokens(text, tree) for text, tree in every.values())
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for _, tree in every.values()
        for node in ast.walk(tree)
    )
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    return {
        "lines": sum(text.count("\n") for text, _ in every.values()),
        "functions_per_10k_tokens": round(1e4 * functions / tokens),
        "lines_of_tests": sum(text.count("\n") for text in tests),
        "modules": sum(path.name != "__init__.py" for path in (ROOT / "autotile").rglob("*.py")),
        "code_tokens": tokens,
        "classes": len(names),
        "names_of_several_classes": sum(count > 1 for count in Counter(names).values()),
        "public_names": sum(not name.startswith("_") for name in dir(autotile)),
        "circles": len(circles(graph)),
    }


def test_no_ceiling_is_exceeded(figures, request):
    ceilings = json.loads(FILE.read_text()) if FILE.is_file() else figures
    if request.config.getoption("--pin"):
        FILE.write_text(
            json.dumps({name: min(ceilings.get(name, figures[name]), figures[name]) for name in figures}, indent=1)
            + "\n"
        )
    above = {name: figure for name, figure in figures.items() if figure > ceilings.get(name, 0)}
    assert above == {} or request.config.getoption("--pin")


def test_a_ceiling_falls_with_its_figure(figures):
    ceilings = json.loads(FILE.read_text())
    assert ceilings.keys() == figures.keys() == SLACK.keys()
    low = {name: figure for name, figure in figures.items() if figure < ceilings[name] - SLACK[name]}
    assert low == {}, "lower the ceilings: pytest tests/test_house.py --pin"


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d2"}, "d2": {"d3"}, "d3": {"d"}}
    assert circles(graph) == [["b", "c"], ["d", "d2", "d3"]]
