"""The package as its users and its packagers see it."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from child_python import imported, python

import autotile
from autotile import errors

ROOT = Path(__file__).parent.parent
CHECKOUT = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout")

HEAVY = ("alembic", "cupy", "kernel_tuner", "optuna", "rich", "sqlalchemy", "typer")
"""What takes long to import."""


def run(*command: str) -> None:
    """Run a tool; what it prints is the failure's message."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def tool(name: str) -> str:
    """Path of a program that was installed with this Python; the test is skipped where it was not."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        pytest.skip(f"{name} is not installed")
    return str(path)


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Nodes of a file of the checkout, the module first, parsed once."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@CHECKOUT
def test_a_test_that_hangs_fails_and_the_others_go_on(tmp_path):
    """By the options of this checkout, in processes as the suite runs in."""
    file = tmp_path / "test_hanging.py"
    file.write_text(
        "import threading, pytest\n"
        "@pytest.mark.timeout(1)\ndef test_hangs(): threading.Event().wait()\n"
        "def test_has_a_limit(pytestconfig): assert 0 < float(pytestconfig.getini('timeout')) <= 600\n"
    )
    done = python("-m", "pytest", "-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", file, "-n", "1", cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout" in done.stdout


class TestNames:
    def test_the_public_names(self):
        assert {"tune", "tune_family", "tune_misses", "record", "export", "import_", "bundle"} <= set(autotile.__all__)
        assert {"get_best_kernel", "matmul", "TuneOptions", "TuneResult", "FamilyPlan"} <= set(autotile.__all__)
        assert dir(autotile) == sorted([*autotile.__all__, "list"])
        assert len(dir(autotile)) <= 77  # with __version__; the types of results are imported from their modules
        assert autotile.__version__.count(".") == 2

    def test_type_checkers_see_the_same_names(self):
        tree, *_ = nodes_of(Path(autotile.__file__))
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        seen = {alias.asname: node.module for node in imports for alias in node.names}
        assert seen == {name: f"autotile.{module}" for name, module in autotile._MODULE_OF.items()}

    def test_each_is_there_documented_always_the_same_and_defined_where_it_is_imported_from(self):
        for name, module in autotile._MODULE_OF.items():
            assert getattr(autotile, name).__module__ == f"autotile.{module}"
        for name in autotile.__all__:
            value = getattr(autotile, name)
            assert not isinstance(value, ModuleType)
            assert value is getattr(autotile, name)
            assert name == "__version__" or value.__doc__

    def test_a_subpackage_does_not_replace_a_name(self):
        before = autotile.tune
        autotile.tune = sys  # type: ignore[assignment]  # as Python does with a subpackage that it imports
        assert autotile.tune is before
        autotile.search = sys  # type: ignore[attr-defined]
        assert autotile.search is sys  # type: ignore[attr-defined]
        autotile.search = importlib.import_module("autotile.search")  # type: ignore[attr-defined]

    def test_modules_of_a_subpackage_of_that_name_are_imported_from_it(self):
        code = """
import autotile.tuning.options
from autotile.tuning import session
from autotile.tuning.session import tune
import autotile, sys
assert session is sys.modules["autotile.tuning.session"] and tune is session.tune
assert autotile.tuning.__module__ == "autotile.api.window", autotile.tuning
from autotile.tuning.plan import TuningPlan
assert autotile.tuning is autotile.__dict__["tuning"]
"""
        python("-c", code, check=True)

    def test_any_other_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="module 'autotile' has no attribute 'tunes'"):
            autotile.tunes  # noqa: B018

    def test_every_error_is_public_and_in_the_tree_at_the_top_of_its_file(self):
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        assert kinds
        for kind in kinds:
            assert kind.__name__ in autotile.__all__
            assert issubclass(kind, autotile.AutotileError)
            assert f" {kind.__name__}" in f" {errors.__doc__}"
            assert kind.__doc__


class TestSubmodules:
    """`autotile.torch` is there after `import autotile` alone."""

    TORCH = """
import sys, types
from unittest.mock import MagicMock
sys.modules["torch"] = torch = MagicMock()
torch.Tensor = torch.nn.Linear = torch.autograd.Function = object
torch.ops.autotile.matmul = lambda a, b, emulate: (a, b, emulate)
torch._C._are_functorch_transforms_active, torch.autograd.forward_ad._current_level = bool, -1
"""
    """A stand-in for PyTorch, whose operator returns its arguments."""

    def test_it_is_imported_when_it_is_used(self):
        before = "import autotile\nassert 'autotile.torch' not in sys.modules\n"
        code = self.TORCH + before + "a = types.SimpleNamespace(shape=(2, 2), is_cuda=True)\n"
        code += "assert autotile.torch.matmul(a, a) == (a, a, True)\n"
        assert "autotile.torch" in imported(code)[0]

    def test_without_pytorch_the_error_says_so(self):
        code = "import sys; sys.modules['torch'] = None\nimport autotile\nautotile.torch.matmul"
        said = python("-c", code).stderr.splitlines()[-1]
        assert said.startswith("ModuleNotFoundError: autotile.torch needs PyTorch")

    def test_errors_and_kernel_tuners_interface(self):
        code = "import autotile\nassert issubclass(autotile.errors.InputError, autotile.errors.AutotileError)\n"
        found = imported(f"{code}autotile.kernel_tuner.tune_kernel, autotile.kernel_tuner.accuracy")[0]
        assert found >= {"autotile.errors", "autotile.kernel_tuner"}

    def test_every_module_that_the_documents_name(self):
        """A name after ``autotile.`` in code is there after `import autotile`."""
        texts = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
        code = "\n".join(re.findall(r"```python\n(.*?)```", texts, re.DOTALL))
        names = set(
            re.findall(r"(?<![\w.\"'])autotile\.(\w+)", re.sub(r"^\s*(?:from|import) .*", "", code, flags=re.M))
        )
        assert {"torch", "tune"} <= names
        assert names <= {*autotile._MODULE_OF, *autotile._SUBMODULES}


class TestImports:
    def test_each_name_needs_little(self):
        alone, errors, inspection, entry_points, functions = imported(
            "import autotile; dir(autotile)",
            "from autotile import InputError, SpecError",
            "import autotile.api.inspection",
            "from autotile import get_best_kernel, BoundKernel",
            "from autotile import tune, TuneOptions; import autotile.api.databases, autotile.api.verification",
        )
        assert not alone & {*HEAVY, "numpy", "torch", "autotile.core", "autotile.torch"}
        assert not errors & {*HEAVY, "numpy"}
        assert not inspection & {*HEAVY}
        assert entry_points & {*HEAVY} <= {"sqlalchemy"}
        assert "autotile.api.results" in functions
        assert not functions & {"cupy", "kernel_tuner", "typer", "rich"}

    def test_serving_needs_neither_the_search_nor_its_libraries(self):
        (found,) = imported("import autotile; autotile.get_best_kernel('sgemm_2d', M=64, N=64, K=64, device='h200')")
        packages = {f"autotile.{name}" for name in ("search", "tuning", "workers", "api", "cli")}
        assert not found & {*HEAVY, *packages, "numpy.random", "concurrent.futures", "html", "logging"}

    def test_plain_words_are_converted_without_pydantic(self):
        words = ["space", "matmul_tiled", "M=64", "--device", "h200", "--sample", "4"]
        code = f"from autotile.cli.application import app\ntry: app({words})\nexcept SystemExit: pass"
        assert imported(code)[0] & {"pydantic", "autotile.api.inspection"} == {"autotile.api.inspection"}


@CHECKOUT
class TestStandards:
    """What a change must keep; mypy, which takes longer, runs beside the tests."""

    def test_an_import_goes_only_downward(self):
        run(tool("lint-imports"), "--no-cache")

    @pytest.mark.parametrize("arguments", [("check",), ("format", "--check")])
    def test_ruff(self, arguments):
        run(tool("ruff"), *arguments, "--no-cache", "autotile", "tests", "benchmarks", "examples")

    def test_file_names_are_unique_but_for_those_of_commands(self):
        paths = [path for path in (ROOT / "autotile").rglob("*.py") if path.name != "__init__.py"]
        names = [path.name for path in paths if path.parent.name != "cli"]
        assert sorted(names) == sorted(set(names))

    def test_nothing_is_run_as_python_unpickled_or_given_to_a_shell(self):
        for path in (ROOT / "autotile").rglob("*.py"):
            for node in nodes_of(path):
                match node:
                    case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" | "__import__")):
                        pytest.fail(f"{path}:{node.lineno} runs text as Python")
                    case ast.alias(name="pickle" | "marshal" | "shelve"):
                        pytest.fail(f"{path}:{node.lineno} unpickles")
                    case ast.keyword(arg="shell"):
                        pytest.fail(f"{path}:{node.lineno} uses a shell")

    def test_other_packages_import_these_modules_of_the_kernels(self):
        face = {"arguments", "expressions", "inputs", "launch", "library", "operation", "parser", "problem"}
        face |= {"python_kernel", "sources", "spec"}
        used: set[str] = set()
        for path in (ROOT / "autotile").rglob("*.py"):
            for node in nodes_of(path) if path.parent.name != "kernel" else ():
                names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{name}" for name in names]
                parts = [name.split(".") for name in names]
                used |= {part[2] for part in parts if part[:2] == ["autotile", "kernel"] and len(part) > 2}
        assert used == face

    def test_only_the_settings_read_the_environment(self):
        readers = {path.name for path in (ROOT / "autotile").rglob("*.py") if "os.environ" in path.read_text()}
        assert readers == {"settings.py"}


@CHECKOUT
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_holds_all_that_is_read_at_run_time(tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    expected = {
        path.relative_to(ROOT)
        for folder, pattern in (("autotile", "*.*"), ("templates", "*.cu"), ("search_spaces", "*.toml"))
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    } | {path.relative_to(ROOT) for path in (ROOT / "recordings").glob("*.npz")}
    names = {str(path if path.parts[0] == "autotile" else Path("autotile") / path) for path in expected}
    assert names - held == set()
    assert {name.split("/")[0] for name in held} == {"autotile", f"autotile-{autotile.__version__}.dist-info"}


def test_a_missing_dependency_is_told_in_one_line():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['autotile', '--help'];"
        "import runpy; runpy.run_module('autotile', run_name='__main__')"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert done.stderr.startswith("error: autotile needs the package typer")
    assert len(done.stderr.splitlines()) == 1


@CHECKOUT
@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_every_name_of_the_package_that_is_used_exists(folder):
    """In functions, too, and in scripts that only run on a GPU."""
    missing = []
    for path in sorted({*(ROOT / folder).rglob("*.py")} - {Path(__file__)}):
        used: set[tuple[str, str]] = set()
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autotile":
                used |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autotile":
                used |= {("autotile", node.attr)}
        for module, name in sorted(used - {("autotile", "torch")}):  # which PyTorch is needed for
            try:
                found = hasattr(importlib.import_module(module), name)
                found = found or importlib.util.find_spec(f"{module}.{name}") is not None
            except ImportError:
                found = False
            if not found:
                missing.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert missing == []
