"""A space as compiled: resources and occupancy, failures by reason, samples, Ctrl-C, columns."""

from __future__ import annotations

import csv
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import autotile
from autotile.api.inspection import SurveyProgress, survey
from autotile.errors import InputError


@pytest.fixture
def failing_toml(scale_toml: Path) -> Path:
    """A kernel whose blocks of 64 do not compile, and that needs too much shared memory with 4 outputs a thread."""
    template = scale_toml.with_suffix(".cu")
    template.write_text(
        template.read_text()
        + '\n#if THREADS == 64\n#error "64 threads, WORK is not supported"\n#endif\n'
        + "#if WORK == 4\n__device__ int wide[WORK] = {a_name_that_is_not_declared};\n#endif\n"
    )
    return scale_toml


class TestSurvey:
    def test_every_valid_configuration_is_compiled(self, scale_toml):
        found = survey(scale_toml, device="h200", n=4096)
        assert len(found) == len(found.space) == found.planned == 12
        assert found.is_usable.all()
        assert not found.failures
        assert not found.interrupted
        assert "12 configurations compiled, 12 usable" in repr(found)

    def test_resources_are_those_that_explain_shows(self, scale_toml):
        found = survey(scale_toml, device="h200", n=4096)
        for index in range(0, 12, 5):
            one = autotile.explain(scale_toml, found.config(index), device="h200", n=4096)
            assert found.columns["registers"][index] == one.resources.registers
            assert found.columns["threads"][index] == one.geometry.threads
            assert found.columns["blocks"][index] == one.geometry.blocks
            assert found.occupancy[index] == pytest.approx(one.occupancy.occupancy)
            assert found.columns["blocks_per_sm"][index] == one.occupancy.blocks_per_sm
            assert set(found.limited_by(index)) == set(one.occupancy.limited_by)
            resident = one.occupancy.blocks_per_sm * one.device.sm_count
            assert found.waves[index] == pytest.approx(one.geometry.blocks / resident)

    def test_failures_are_grouped_by_the_words_of_the_compiler(self, failing_toml):
        found = survey(failing_toml, device="h200", n=4096)
        assert len(found) == 12
        assert int(found.is_usable.sum()) == 6
        reasons = [group.reason for group in found.failures]
        assert len(reasons) == 2
        assert any("64 threads, WORK is not supported" in reason for reason in reasons)
        assert any("a_name_that_is_not_declared" in reason for reason in reasons)
        assert [group.count for group in found.failures] == [3, 3]  # #error comes before anything else
        failed = np.flatnonzero(~found.is_usable)
        assert all(found.reason(int(index)) in reasons for index in failed)
        assert np.isnan(found.occupancy[failed]).all()

    def test_a_sample_is_a_part_of_a_larger_one(self, scale_toml):
        few, more = (survey(scale_toml, device="h200", n=4096, sample=count, seed=3) for count in (4, 8))
        assert len(few) == 4
        assert set(few.rows) < set(more.rows)
        assert survey(scale_toml, device="h200", n=4096, sample=99).notices[-1] == (
            "there are 12 valid configurations: all are compiled"
        )

    def test_another_device_has_other_limits(self, scale_toml):
        found = survey(scale_toml, device="rtx-3060", n=4096, sample=2)
        assert found.device.compute_capability == "8.6"
        assert (found.columns["warps_per_sm"] <= found.device.max_warps_per_sm).all()

    def test_the_first_sigint_ends_it_with_what_there_is(self, scale_toml):
        def stop(state: SurveyProgress) -> None:
            if state.done:
                os.kill(os.getpid(), signal.SIGINT)

        found = survey(scale_toml, device="h200", n=4096, workers=1, observe=stop)
        assert found.interrupted
        assert 0 < len(found) <= 12
        assert found.planned == 12

    def test_columns_have_parameters_types_and_units(self, failing_toml):
        stream = io.StringIO()
        survey(failing_toml, device="h200", n=4096).table().write_csv(stream)
        rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
        assert [(row["param.THREADS"], row["param.WORK"]) for row in rows][:3] == [
            ("32", "1"),
            ("32", "2"),
            ("32", "4"),
        ]
        assert {row["outcome"] for row in rows} == {"ok", "compile_failed"}
        failed = next(row for row in rows if row["outcome"] != "ok")
        assert failed["reason"]
        assert failed["registers_per_thread"] == failed["occupancy_fraction"] == ""
        assert {"static_smem_bytes", "dynamic_smem_bytes", "spill_store_bytes", "waves", "estimated_us"} < {*rows[0]}

    @pytest.mark.parametrize(("name", "value"), [("sample", 0), ("sample", 1.5), ("seed", -1), ("workers", 0)])
    def test_a_number_out_of_range_is_refused(self, scale_toml, name, value):
        with pytest.raises(InputError, match=name):
            survey(scale_toml, device="h200", n=4096, **{name: value})
