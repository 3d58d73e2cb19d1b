"""The examples: kernels are valid, explained and compile, the notebook runs; what needs a GPU is in tests/gpu."""

import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from child_python import python

import autotile
from autotile.core.device import device_profile
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.cuda.driver import device_count
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import find_operation, load_operation
from autotile.serving import operations
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

FOLDER = Path(__file__).parents[1] / "examples"
H200 = device_profile("h200")
NEEDS_HEADERS = {"cute_copy"}
"""Examples that include a library which is not installed with autotile."""


FILES = sorted(FOLDER.glob("*/*.toml"))
OPERATIONS = [path for path in FILES if find_operation(str(path)) is not None]


@pytest.fixture(scope="module", params=[path for path in FILES if path not in OPERATIONS], ids=lambda path: path.stem)
def kernel(request):
    return load_kernel(str(request.param))


def test_there_is_a_choice_and_the_default_is_valid_at_both_shapes(kernel):
    for sizes in (kernel.spec.sizes, kernel.spec.ragged):
        assert check_config(kernel.spec, kernel.spec.default, kernel.spec.at(sizes), H200) == ""
    assert len(feasible_space(kernel.spec, kernel.spec.at(), H200)) >= 20


def test_the_source_explains_every_parameter(kernel):
    text = "\n".join(path.read_text() for path in kernel.template_path.parent.glob("*.cu*"))
    compiled_in = [p.name for p in kernel.spec.parameters if re.search(rf"\b{p.name}\b", text)]
    for name in compiled_in:
        assert re.search(rf"^// {{3}}.*\b{name}\b.* {{2}}", text, re.MULTILINE), name


def test_the_default_compiles_without_spilling(kernel):
    if kernel.name in NEEDS_HEADERS:
        pytest.skip("CUTLASS is not installed with autotile")
    for dtype in kernel.spec.dtypes:
        job = compile_job(kernel, kernel.spec.default, kernel.spec.at(dtype=dtype), "sm_90")
        assert compile_cubin(job).resources.spill_bytes == 0


def test_every_example_is_listed():
    listed = set(re.findall(r"^\| \[(\w+)\]\(\1/", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in FOLDER.iterdir() if path.is_dir()}


class TestOperations:
    @pytest.fixture(params=OPERATIONS, ids=lambda path: path.stem)
    def operation(self, request):
        return load_operation(str(request.param))

    def test_all_kernels_take_the_same_arrays(self, operation):
        problem = operation.resolve({name: operation.sizes[name] for name in operation.proper_sizes})
        declared = []
        for member, sizes in operation.fitting(problem):
            spec = member.load().spec
            declared.append([(b.name, str(b.dtype), b.access, b.array_shape(sizes)) for b in spec.buffers])
        assert len(declared) == len(operation.members) >= 2
        assert declared == declared[:1] * len(declared)

    def test_the_kernels_are_valid_at_small_and_large_sizes(self, operation):
        for size in (1, 35, 8457, 100_000):
            problem = operation.resolve(dict.fromkeys(operation.proper_sizes, size))
            fitting = list(operation.fitting(problem, H200))
            assert fitting
            for member, sizes in fitting:
                spec = member.load().spec
                assert check_config(spec, spec.default, spec.at(sizes), H200) == ""


class TestRowSums:
    """Who computes the sums of rows, where nothing was measured."""

    FILE = str(FOLDER / "row_sums" / "row_sums.toml")

    def test_short_rows_are_never_split(self):
        operation = load_operation(self.FILE)
        for n, kernels in ((2047, ["row_sums_whole"]), (2048, ["row_sums_whole", "row_sums_split"])):
            problem = operation.resolve({"ROWS": 64, "N": n})
            assert [member.name for member, _ in operation.fitting(problem)] == kernels

    def test_a_kernel_is_served_for_every_size(self, tmp_path):
        for rows, n in ((1, 1), (1, 10_000_000), (100_000, 33)):
            where = {"device": "h200", "database": tmp_path / "empty.db", "library": False}
            served = autotile.get_best_kernel(self.FILE, ROWS=rows, N=n, **where)
            assert served.kernel in ("row_sums_whole", "row_sums_split")
            assert not served.is_library
            assert served.shapes["x"] == (rows, n)

    def test_a_library_that_a_program_added_may_be_served(self, tmp_path, monkeypatch):
        monkeypatch.setattr(operations, "_added", {})
        runpy.run_path(str(FOLDER / "row_sums" / "row_sums.py"))
        request = {"ROWS": 64, "N": 200_000, "device": "h200", "database": str(tmp_path / "empty.db")}
        served = autotile.get_best_kernel(self.FILE, **request)
        assert (served.kernel, served.is_library, dict(served.config)) == ("cupy", True, {})
        assert not autotile.get_best_kernel(self.FILE, library=False, **request).is_library


class TestModels:
    """Programs of PyTorch, small and on the CPU, where all layers are left to PyTorch."""

    @pytest.mark.parametrize(
        ("program", "options", "needs"),
        [
            ("language_model/serve.py", "--batches 1 3 --longest 9 --new 3 --width 128 --layers 1", "transformers"),
            ("train_transformer/train.py", "--steps 4 --width 64 --layers 1 --batch 2 --length 16", "torch"),
            ("image_model/classify.py", "--batches 1 2 --width 64 --layers 1 --rounds 2 --modes eager", "torch"),
        ],
    )
    def test_they_run(self, program, options, needs):
        pytest.importorskip(needs)
        done = python(FOLDER / program, "--device", "cpu", *options.split(), timeout=300)
        assert done.returncode == 0, done.stderr
        assert "it is on the device cpu" in done.stdout

    def test_serving_says_what_is_missing(self):
        pytest.importorskip("torch")
        program = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path(sys.argv[1])"
        done = python("-c", program, FOLDER / "language_model" / "serve.py")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith("this example needs transformers: pip install transformers\n")


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*/*.sh")), ids=lambda path: path.parent.name)
def test_a_script_is_valid_and_may_be_run(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook" / "softmax.ipynb"
_TIMEOUT_S = 500


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    assert [cell["outputs"] for cell in cells()] == [[] for _ in cells()]


@pytest.mark.skipif(device_count() > 0, reason="the cells for a GPU would tune on it")
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebook_runs_without_a_gpu(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "tuning.db"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources=folder).execute()
    shown = {"".join(cell.source): cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    figures = [source for source in shown if ".plot_" in source and not source.startswith("gpus")]
    assert len(figures) >= 6
    for source in figures:
        (output,) = shown[source]
        assert output.data["application/vnd.plotly.v1+json"]["data"], source
    (tuned,) = [outputs for source, outputs in shown.items() if source.startswith("import tempfile")]
    assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in tuned)
    assert any("<b>matmul_tiled" in output.get("data", {}).get("text/html", "") for output in tuned)
    guarded = [outputs for source, outputs in shown.items() if source.startswith(("gpus", "if gpus"))]
    assert [outputs[0].text.strip() for outputs in guarded] == [
        "This cell needs a CUDA device; `autotile doctor` says what is missing."
    ] * len(guarded)
    assert 'rule_1 = "BLOCK * UNROLL <= 4096"' in notebook.cells[-1].outputs[0].text
