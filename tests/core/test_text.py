from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from autotile.core import text
from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome
from autotile.core.text import RIGHT, Part, Result, ResultTable, funnel_text, outcomes_text
from autotile.space.limits import occupancy

TIMES = {
    None: "-", 0.5: "0.500 us", 4.4063: "4.406 us", 12.345: "12.35 us", 123.45: "123.5 us", 4790.1: "4,790 us",
    1234567.8: "1,234,568 us",
}  # fmt: skip
SIZES = {
    0: "0 B", 1023: "1,023 B", 1024: "1 KiB", 232448: "227 KiB", 151397597184: "141 GiB", 2**41: "2,048 GiB",
}  # fmt: skip
DURATIONS = {
    0.00371: "3.7 ms", 0.0544: "54 ms", 0.104: "0.10 s", 6.666: "6.67 s", 21.34: "21.3 s", 59.96: "60.0 s",
    125: "2 min 05 s", 3720: "1 h 02 min",
}  # fmt: skip


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        *((text.time_text, *item) for item in TIMES.items()),
        *((text.bytes_text, *item) for item in SIZES.items()),
        *((text.duration_text, *item) for item in DURATIONS.items()),
    ],
)
def test_times_bytes_and_durations(show, value, shown):
    assert show(value) == shown


def test_other_texts():
    assert [text.flops_text(1.979e15), text.bytes_text(1023700)] == ["1,979 TFLOP/s", "1,000 KiB"]
    assert (text.percent_text(0.429), text.short_text(104_959.6)) == ("42.9 %", "104,960")
    assert text.interval_text(Measurement(4790.0, 4788.2, 4795.1)) == "4,788 to 4,795"
    assert text.sizes_text({"M": 4096, "N": 8}) == "M=4096 N=8"
    assert [text.plural(1, "study", "studies"), text.plural(1200, "trial")] == ["1 study", "1,200 trials"]
    assert text.moment_text(None) == "-"
    assert len(text.moment_text(datetime(2025, 1, 2, 3, 4, tzinfo=UTC))) == len("2025-01-02 03:04")
    assert text.device_text(device_profile("h200")) == "NVIDIA H200 (profile)"
    assert text.source_text("NVIDIA H200", "replayed") == "NVIDIA H200 (replayed)"
    assert text.source_text("NVIDIA H200", "cuda") == "NVIDIA H200"
    gates = {"combinations": 8294400, "limits": 24906}
    outcomes = {Outcome.PRUNED: 12, Outcome.OK: 180, Outcome.COMPILE_FAILED: 8, Outcome.CRASHED: 0}
    assert outcomes_text(outcomes) == "180 ok, 8 compile_failed, 12 pruned"
    assert funnel_text(gates, outcomes) == (
        "8,294,400 combinations -> 24,906 valid -> 200 tried: 180 ok, 8 compile_failed, 12 pruned"
    )
    assert funnel_text(gates, {}) == "8,294,400 combinations -> 24,906 valid -> 0 tried"
    assert funnel_text({"combinations": 1, "limits": 1}, {}) == "1 combination -> 1 valid -> 0 tried"


@pytest.mark.parametrize(
    ("threads", "shown"),
    [
        (1024, "66.7 %: 1 block on an SM, 32 of 48 warps; limited by threads"),
        (32, "33.3 %: 16 blocks on an SM, 16 of 48 warps; limited by blocks"),
        (2048, "no block fits on an SM; limited by threads"),
    ],
)
def test_occupancy(threads, shown):
    device = device_profile("rtx-3060")
    assert text.occupancy_text(device, occupancy(threads, 32, 1024, device)) == shown


class Bare(Result):
    def _headline(self) -> str:
        return "sgemm M=64 on <GPU> (replayed)"


class Full(Bare):
    def _parts(self) -> Iterator[Part]:
        yield "a <paragraph>"
        yield [("time & rate", "5 us"), ("ties", ["one", "two"])]
        yield ResultTable(("BM", f"{RIGHT}BN"), [("1", "<2>")])
        yield ResultTable(("row",), [(str(row),) for row in range(120)])


def test_a_result_has_a_repr_of_one_line_and_escaped_html():
    assert repr(Bare()) == "<Bare: sgemm M=64 on <GPU> (replayed)>"
    assert "<table>" not in Bare()._repr_html_()
    html = Full()._repr_html_()
    assert "<p><b>sgemm M=64 on &lt;GPU&gt; (replayed)</b></p><p>a &lt;paragraph&gt;</p>" in html
    assert "<th>time &amp; rate</th><td>5 us</td>" in html
    assert "<th>ties</th><td>one\ntwo</td>" in html
    assert "<thead><tr><th>BM</th><th>BN</th></tr></thead><tbody><tr><td>1</td><td>&lt;2&gt;</td></tr></tbody>" in html
    assert "<td>99</td>" in html
    assert "<td>100</td>" not in html
    assert html.endswith("<p>and 20 more rows</p>")
