"""Children for the tests, and a watch over what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.traces import no_traces


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be left behind; children find the test's own modules."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with no_traces(folder, monkeypatch):
        yield
