"""Share of single changes of the package's functions that the tests notice.

    python benchmarks/mutants.py --sample 100 [--package space] [--seed 0] [--jobs 2] [--output FILE.json]
                                 [--near] [--limit 900] [--marks FILE.json]

Takes a random sample of places in functions, changes each in a way drawn at random (a comparison or an operator
replaced, a number off by one, a condition negated, a loop left out, an exception replaced, a call or an assignment
removed), and runs the tests against each change in copies of the checkout, several at a time. Names the changes that no
test notices, with their diffs, and prints the share that is noticed. `Cosmic Ray
<https://cosmic-ray.readthedocs.io>`_ finds the places and makes the changes; the removal of statements is an operator
of its own here.

For a change of ``autotile/space/limits.py`` in ``check_config``, the tests are run in this order, until one fails:

1. ``tests/space/test_limits*.py``
2. the rest of ``tests/space/``
3. other files of tests in which ``check_config`` or ``space.limits`` stands
4. all other tests, unless ``--near`` is given

A failure counts only if the same test passes without the change; so does a run of at most twelve files that exceeds its
limit of time. Tests of the code's style are left out, and so are those that need a GPU where there is none.

Changes that no test can notice (they compute the same), or only one that needs a GPU, can be marked in a file, by
default `mutants_marked.json` beside this script: a list of objects with ``path``, ``before`` and ``after`` (the changed
lines as in the output, without indentation) and ``why``, which is ``equivalent`` or ``gpu``. The share is printed with
and without them.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso import parse
from parso.tree import NodeOrLeaf

ROOT = Path(__file__).resolve().parents[1]
MARKS = Path(__file__).with_name("mutants_marked.json")
LEFT_OUT = ("tests/test_package.py", "tests/test_docs.py", "tests/test_figures.py", "tests/endurance")
"""Tests of the style and of the pages, which fail for any changed line, and those that take long."""
_KINDS = {
    *("operator", "keyword", "number", "comparison", "comp_op", "factor", "arith_expr", "term", "power", "ternary"),
    *("if_stmt", "while_stmt", "assert_stmt", "for_stmt", "except_clause", "simple_stmt"),
    *("not_test", "and_test", "or_test"),
}
"""Types of nodes that an operator changes."""
_UNUSED = ("VariableInserter", "VariableReplacer", "RemoveDecorator")
"""Operators of Cosmic Ray that need arguments, or change what is no function."""


_FEW = 20
"""Files of tests in which a name stands, at most; a name in more of them, such as ``join``, says nothing."""
_FILES = 12
"""Files of tests that are run together, at most."""


class RemoveStatement(Operator):
    """Replaces a call, an assignment to an attribute or an element, or an augmented assignment by ``pass``."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield the place of a statement with a side effect."""
        if node.type == "simple_stmt" and self._has_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        """Put ``pass`` in the place of the statement."""
        removed, (instead, _) = node.children[0], parse("pass\n").children[0].children
        instead.prefix = removed.get_first_leaf().prefix
        node.children[0] = instead
        return node

    @classmethod
    def examples(cls) -> Sequence[Any]:
        """Return no examples."""
        return ()

    @staticmethod
    def _has_effect(node: NodeOrLeaf) -> bool:
        if node.type in ("atom_expr", "power"):  # a call
            return bool(node.get_last_leaf().value == ")")
        if node.type != "expr_stmt":
            return False
        target, sign = node.children[0], node.children[1]
        return target.type == "atom_expr" or (sign.type == "operator" and sign.value != "=")


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes
    ----------
    path, line
        File below the checkout, and line.
    function
        Dotted name of the function.
    operator
        What is changed, such as ``ReplaceComparisonOperator_Lt_LtE``.
    code
        The whole changed file.
    before, after
        Changed lines, without indentation.
    diff
        The change as a unified diff with a line around it.
    """

    path: str
    line: int
    function: str
    operator: str
    code: str = field(repr=False)
    before: str
    after: str
    diff: str

    def mark(self) -> tuple[str, str, str]:
        """Return what identifies the change in a file of marks."""
        return self.path, self.before, self.after


@dataclass
class Verdict:
    """What became of a change: ``noticed``, ``timed out``, which counts as noticed, or ``survived``."""

    mutant: Mutant
    result: str = "survived"
    by: str = ""
    seconds: float = 0.0
    mark: str = ""

    @property
    def is_noticed(self) -> bool:
        """Whether the tests notice it."""
        return self.result != "survived"

    def to_json(self) -> dict[str, Any]:
        """Return everything but the changed file."""
        mutant = {name: value for name, value in asdict(self.mutant).items() if name != "code"}
        return {**mutant, "result": self.result, "by": self.by, "seconds": round(self.seconds, 1), "mark": self.mark}


@cache
def operators() -> dict[str, Operator]:
    """Return the operators by name."""
    names = [name for name in sorted(plugins.operator_names()) if not name.endswith(_UNUSED)]
    found = {name.removeprefix("core/"): plugins.get_operator(name)() for name in names}
    return {**found, "RemoveStatement": RemoveStatement()}


def places(source: str) -> dict[tuple[str, tuple[int, int]], list[tuple[str, int, str]]]:
    """Return the places in functions that can be changed.

    Returns
    -------
    dict
        For each place, given by a kind of change and a position, the changes: operator, number of the occurrence, and
        dotted name of the function.
    """
    numbers = {name: count() for name in operators()}
    found: dict[tuple[str, tuple[int, int]], list[tuple[str, int, str]]] = {}
    for node in ast_nodes(get_ast(source)):
        if node.type not in _KINDS:
            continue
        function = None
        for name, operator in operators().items():
            for start, _ in operator.mutation_positions(node):
                number = next(numbers[name])
                function = _function_of(node) if function is None else function
                if function:
                    found.setdefault((name.partition("_")[0], start), []).append((name, number, function))
    return found


def _function_of(node: NodeOrLeaf) -> str:
    """Return the dotted name of the function around a node; empty outside of one, and in a signature or annotation."""
    names: list[str] = []
    inside, child = False, node
    while (parent := child.parent) is not None:
        if parent.type in ("annassign", "tfpdef", "parameters", "decorator"):
            return ""
        if parent.type == "funcdef":
            if child is not parent.children[-1]:  # the name, or what it returns
                return ""
            inside = True
        if parent.type in ("funcdef", "classdef"):
            names.append(parent.name.value)
        child = parent
    return ".".join(reversed(names)) if inside else ""


def sample(paths: Sequence[Path], size: int, seed: int) -> list[Mutant]:
    """Return changes of different places, drawn from files in proportion to their length."""
    rng = random.Random(seed)
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    weights = [text.count("\n") for text in sources.values()]
    left: dict[Path, dict[tuple[str, tuple[int, int]], list[tuple[str, int, str]]]] = {}
    chosen: list[Mutant] = []
    for _ in range(50 * size):
        (path,) = rng.choices(paths, weights)
        if path not in left:
            left[path] = places(sources[path])
        found = left[path]
        if not found:
            continue
        place = rng.choice(sorted(found))
        name, number, function = rng.choice(found.pop(place))
        mutant = mutant_of(path, sources[path], name, number, function)
        if mutant is not None:
            chosen.append(mutant)
        if len(chosen) == size:
            break
    return chosen


def mutant_of(path: Path, source: str, name: str, number: int, function: str) -> Mutant | None:
    """Return a change of a file; None if the result is no Python."""
    code = mutate_code(source, operators()[name], number)
    if code is None or code == source:
        return None
    try:
        compile(code, str(path), "exec")
    except SyntaxError:
        return None
    lines = source.splitlines(), code.splitlines()
    changed = [
        block for block in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes() if block[0] != "equal"
    ]
    (_, first, last, start, end), *_ = changed
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    return Mutant(
        path=shown,
        line=first + 1,
        function=function,
        operator=name,
        code=code,
        before="\n".join(line.strip() for line in lines[0][first:last]),
        after="\n".join(line.strip() for line in lines[1][start:end]),
        diff="\n".join(difflib.unified_diff(*lines, f"a/{shown}", f"b/{shown}", n=1, lineterm="")),
    )


def stages(mutant: Mutant, *, near: bool) -> list[list[str]]:
    """Return the files of tests to run against a change, those first that concern it most."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    tests = [path for path in tests if not path.startswith(LEFT_OUT)]
    package, stem = Path(mutant.path).parent.name, Path(mutant.path).stem
    folder = f"tests/{'' if package == 'autotile' else package + '/'}"
    function = mutant.function.rpartition(".")[2]
    owner = mutant.function.split(".")[0]
    words = {owner, function, f"{package}.{stem}"} - {"__init__", "__call__"}
    using = [{path for path in tests if re.search(rf"\b{re.escape(word)}\b", _text(path))} for word in sorted(words)]
    mirrored = [path for path in tests if path.startswith(f"{folder}test_{stem}")]
    beside = [path for path in tests if Path(path).parent == Path(folder) and package != "autotile"]
    naming = sorted(set().union(*(found for found in using if len(found) <= _FEW)))
    ordered: list[list[str]] = []
    for group in (mirrored, beside, naming, [] if near else tests):
        known = {path for stage in ordered for path in stage}
        if fresh := [path for path in group if path not in known]:
            ordered.append(fresh)
    return ordered


def _parts(stage: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the files of a stage in parts, so that the limit of time is of few files."""
    yield from (stage[first : first + _FILES] for first in range(0, len(stage), _FILES))


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


class Copy:
    """A copy of the checkout, in which one change at a time is made and tested."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder = folder
        self.limit_s = limit_s
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        where = [sys.executable, "-c", "import autotile; print(autotile.__file__)"]
        found = subprocess.run(where, cwd=folder, env=self.environment, check=True, capture_output=True, text=True)
        if not Path(found.stdout.strip()).is_relative_to(folder):
            raise SystemExit(f"the copy in {folder} is not what is tested, but {found.stdout.strip()}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the tests, in which the copy is the package."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONHASHSEED": "0"}

    def judge(self, mutant: Mutant, *, near: bool) -> Verdict:
        """Run the tests that concern a change until one notices it."""
        verdict, started = Verdict(mutant), time.monotonic()
        ignored: list[str] = []
        files = [part for stage in stages(mutant, near=near) for part in _parts(stage)]
        while files and not verdict.is_noticed:
            with self._changed(mutant):
                code, failed = self._run(files[0], ignored)
            if code in (0, 5):  # 5: no test was collected
                files.pop(0)
                continue
            again, _ = self._run(failed or files[0], [])
            if again in (0, 5):  # without the change it passes
                verdict.result = "timed out" if code is None else "noticed"
                verdict.by = ", ".join(failed or files[0][:3])
            elif set(failed) - set(ignored):
                ignored += failed
            else:  # these tests do not end or do not begin here
                files.pop(0)
        verdict.seconds = time.monotonic() - started
        return verdict

    @contextlib.contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        """Make a change, and take it back."""
        path = self.folder / mutant.path
        original = path.read_text(encoding="utf-8")
        self._write(path, mutant.code)
        try:
            yield
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(
            f"__pycache__/{path.stem}.*.pyc"
        ):  # equal in size and second, it would be kept
            compiled.unlink()

    def _run(self, tests: Sequence[str], ignored: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run tests until one fails; return pytest's exit code, None after the limit of time, and what failed."""
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no"]
        options += [word for name in ignored for word in ("--deselect", name)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the tests have started
            process.wait()
        return process.returncode, re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def read_marks(path: Path) -> dict[tuple[str, str, str], str]:
    """Return the changes that are marked, each with the reason."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for entry in entries:
        if set(entry) != {"path", "before", "after", "why"} or entry["why"] not in ("equivalent", "gpu"):
            raise SystemExit(f"{path}: expected path, before, after, and why: equivalent or gpu; got {entry}")
    return {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the numbers of changes, and the shares that are noticed, of all and of those without a mark."""
    unmarked = [one for one in verdicts if not one.mark or one.is_noticed]

    def share(of: Sequence[Verdict]) -> float | None:
        return sum(one.is_noticed for one in of) / len(of) if of else None

    return {
        "changes": len(verdicts),
        "noticed": sum(one.is_noticed for one in verdicts),
        "marked": len(verdicts) - len(unmarked),
        "share": share(verdicts),
        "share_without_marked": share(unmarked),
    }


def files_of(package: str | None) -> list[Path]:
    """Return the modules of a package such as ``space``, or of all."""
    folder = ROOT / "autotile" / (package or "").removeprefix("autotile").strip("./").replace(".", "/")
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    found = [path for path in found if path.is_file() and "migrations" not in path.parts]
    if not found:
        raise SystemExit(f"there is no package or module {package!r} in autotile/")
    return found


def main() -> None:
    """Draw changes, test each, print those that nothing notices, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, help="number of changes (default: 100)")
    parser.add_argument("--package", help="package or module, such as space or space.limits (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="changes tested at a time")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--near", action="store_true", help="only run the tests that concern a change")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a run of tests (default: 900)")
    parser.add_argument("--marks", type=Path, default=MARKS, help="file of marked changes")
    arguments = parser.parse_args()
    marks = read_marks(arguments.marks)
    mutants = sample(files_of(arguments.package), arguments.sample, arguments.seed)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(Copy(Path(folder, str(number)), arguments.limit))

        def judge(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return copy.judge(mutant, near=arguments.near)
            finally:
                copies.put(copy)

        for verdict in pool.map(judge, mutants):
            verdict.mark = marks.get(verdict.mutant.mark(), "") if not verdict.is_noticed else ""
            verdicts.append(verdict)
            place = f"{verdict.mutant.path}:{verdict.mutant.line} {verdict.mutant.function}"
            print(f"{len(verdicts):>4} {verdict.result:<9} {verdict.seconds:6.0f} s  {place}", flush=True)
            if arguments.output:
                write(arguments, verdicts)
    for verdict in verdicts:
        if not verdict.is_noticed:
            print(f"\n{verdict.result}{f', marked {verdict.mark}' if verdict.mark else ''}: {verdict.mutant.operator}")
            print(verdict.mutant.diff)
    found = summary(verdicts)
    of_all, unmarked = (
        f"{100 * found[name]:.0f} %" if found[name] is not None else "-" for name in ("share", "share_without_marked")
    )
    print(f"\n{found['noticed']} of {found['changes']} changes are noticed, {of_all}", end="; ")
    print(f"{unmarked} without {found['marked']} marked")


def write(arguments: argparse.Namespace, verdicts: Sequence[Verdict]) -> None:
    """Write what is known so far."""
    from provenance import provenance

    chosen = {name: getattr(arguments, name) for name in ("sample", "package", "seed", "near", "limit")}
    report = {**provenance(), **chosen, **summary(verdicts), "mutants": [one.to_json() for one in verdicts]}
    arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
