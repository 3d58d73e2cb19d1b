"""The report as a value; tests/cli/test_machine_commands.py covers what is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotile.api import doctor
from autotile.api.doctor import HealthCheck, HealthReport


def report(*checks: HealthCheck) -> HealthReport:
    return HealthReport(checks, "tuning works here")


def test_a_warning_is_no_failure():
    passed, warned = HealthCheck("NVRTC", "ok", "version 13.0"), HealthCheck("GPU", "warn", "no CUDA device")
    assert report(passed, warned).works
    assert not report(passed, warned, HealthCheck("database", "fail", "it is damaged")).works


def test_the_display_is_the_verdict_and_a_row_for_each_check():
    found = report(HealthCheck("cache", "ok", "5 < 6"), HealthCheck("headers", "warn", "none", "install them"))
    assert repr(found) == "<HealthReport: tuning works here>"
    html = found._repr_html_()
    assert "<td>ok</td><td>cache</td><td>5 &lt; 6</td>" in html
    assert "<td>warn</td><td>headers</td><td>none\ninstall them</td>" in html


def test_a_database_is_given_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_check_compiler", lambda target, _: HealthCheck("compiler", "ok", target))
    found = {check.name: check for check in doctor.doctor(tmp_path / "none.db").checks}
    assert found["database"].detail.startswith(f"{tmp_path / 'none.db'}: not there yet")
    assert found["compiler"].detail == "sm_80"
