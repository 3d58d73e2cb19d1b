"""The documentation keeps to the program: commands, options, links, settings and constants are those that there are."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from autotile.cli.application import app, made_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
SET_UP = [
    'python3 -m venv .venv && .venv/bin/pip install -e ".[cuda13]" && '
    ".venv/bin/autotile tune sgemm_2d M=4096 N=4096 K=4096",
    'python3 -m venv .venv && .venv/bin/pip install -e ".[cuda13,test]" && .venv/bin/pytest',
]
MEASURING = ("cuda.timing", "tuning.finals")
"""Modules of which docs/measurement.md names every number."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CALL = re.compile(r"(?:^|[\s/`$(])autotile ((?:db )?[a-z][a-z-]*)((?: +[^\s`|;#)]+)*)", re.MULTILINE)
OPTION = re.compile(r"--[a-z][a-z0-9-]*|(?<= )-[a-z]\b")
CONSTANT = re.compile(r"^\| `([\w.]+)` \| ([\d.]+) \|", re.MULTILINE)
PACKAGES = sorted(path.parent.name for path in (ROOT / "autotile").glob("*/__init__.py"))
MODULE = re.compile(rf"`((?:{'|'.join(PACKAGES)})/[^`]*)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        yield fence[2]
    prose = FENCE.sub("", text)
    yield from INDENTED.findall(prose)
    yield from SPAN.findall(prose)


def calls(page: Path) -> Iterator[tuple[str, str]]:
    """Commands that a page names, with the words behind each."""
    for piece in code(page):
        for found in CALL.finditer(piece):
            yield found[1], found[2]


def commands() -> dict[str, Any]:
    """The program's commands by their full names."""
    known: dict[str, Any] = {name: made_command(name) for name in vars(typer.main.get_command(app))["commands"]}
    for name, group in list(known.items()):
        known |= {f"{name} {inner}": command for inner, command in getattr(group, "commands", {}).items()}
    return known


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def value_of(name: str) -> Any:
    """A constant of the package by its dotted name; of a dataclass's field, the default."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(["autotile", *parts[:depth]]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            defaults = {field.name: field.default for field in fields(found)} if is_dataclass(found) else vars(found)
            found = defaults[part]
        return found
    raise AssertionError(f"no module of {name}")


@pytest.mark.parametrize("command", SET_UP)
def test_the_readme_has_the_set_up_word_for_word(command):
    fences = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [body for _, body in fences if body.strip() == command]


@pages
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if fragment:
            headings = HEADING.findall(FENCE.sub("", file.read_text(encoding="utf-8")))
            assert fragment in [anchor(heading) for heading in headings], target


@pages
def test_every_command_and_option_exists(page):
    known = commands()
    for name, words in calls(page):
        assert name in known, f"autotile {name}"
        options = {option for parameter in known[name].params for option in parameter.opts}
        unknown = set(OPTION.findall(words)) - options - {"--help"}
        assert not unknown, f"autotile {name}{words}"


def test_every_command_is_in_the_documentation():
    named = {name for page in PAGES for name, _ in calls(page)}
    shown = {name for name, command in commands().items() if not command.hidden}
    assert shown - {"db"} <= named


def test_the_guide_is_read_in_a_sitting():
    assert len((ROOT / "docs" / "guide.md").read_text(encoding="utf-8").splitlines()) <= 400


def test_every_variable_is_read_by_the_settings():
    settings = (ROOT / "autotile" / "settings.py").read_text(encoding="utf-8")
    known = set(re.findall(r"AUTOTILE_[A-Z0-9_]+", settings))
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(AUTOTILE_[A-Z0-9_]+)`", guide, re.MULTILINE)) == known
    for page in PAGES:
        named = set(re.findall(r"AUTOTILE_[A-Z0-9_]+", page.read_text(encoding="utf-8")))
        assert {name for name in named if not name.startswith("AUTOTILE_TEST_")} <= known, page


@pages
def test_python_on_the_page_is_python(page):
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(body)


def test_the_constants_of_measuring_are_those_of_the_code():
    stated = dict(CONSTANT.findall((ROOT / "docs" / "measurement.md").read_text(encoding="utf-8")))
    for name, value in stated.items():
        assert value_of(name) == pytest.approx(float(value)), name
    for module in MEASURING:
        own = vars(import_module(f"autotile.{module}")).items()
        numbers = {name for name, value in own if name.isupper() and isinstance(value, int | float)}
        assert numbers
        assert numbers <= {name.rpartition(".")[2] for name in stated}


@pages
def test_every_module_named_exists(page):
    for name in MODULE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / "autotile" / name).exists(), name


def test_what_a_newcomer_reads_is_there_and_short():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.(?:py|toml))`", text[text.index("**A newcomer's hour**") : text.index("## Layers")])
    files = [ROOT / name if name.startswith("examples") else ROOT / "autotile" / name for name in named]
    assert (len(files), sum(file.read_text(encoding="utf-8").count("\n") for file in files) < 3000) == (8, True)


def test_the_architecture_has_one_row_a_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (?:`(\w+\.py)`)? ?\|$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted([*PACKAGES, "errors", "settings"])
    for name, first in rows:
        assert not first or (ROOT / "autotile" / name / first).is_file(), first
