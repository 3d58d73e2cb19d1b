"""The example notebook runs from its first cell to its last without a GPU, in a kernel of Jupyter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotile.cuda.driver import device_count

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook" / "softmax.ipynb"
_TIMEOUT_S = 500


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    assert isinstance(found, list)
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs() -> None:
    assert [cell["outputs"] for cell in cells()] == [[] for _ in cells()]


@pytest.mark.skipif(device_count() > 0, reason="the cells for a GPU would tune on it")
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_it_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
