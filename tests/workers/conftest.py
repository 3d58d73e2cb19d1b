"""Modules of children for the tests, and a check of what they leave behind."""

from pathlib import Path

import pytest
from faults.traces import no_traces


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Check that no process or file is left behind; children can import the tests' modules."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with no_traces(folder, monkeypatch):
        yield
