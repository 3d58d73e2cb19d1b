"""The parts of benchmarks/any_size.py that need no GPU: sizes, command line, summary, record and tables."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import any_size  # noqa: E402
import any_size_report as report  # noqa: E402
import figures  # noqa: E402
from any_size_draw import (  # noqa: E402
    MATMUL_FLAGS,
    MATMUL_RANGES,
    MAX_FLOPS,
    draw,
    layout_of,
    matmul_fits,
    matmul_flops,
    parse_ranges,
    parse_shape,
    read_shapes,
    text_of,
)

PRODUCT = {"M": 64, "N": 64, "K": 131072, "TRANS_A": 0, "TRANS_B": 1}


def drawn(seed: int, count: int = 200) -> list[dict[str, int]]:
    return draw(MATMUL_RANGES, MATMUL_FLAGS, count, seed, fits=matmul_fits)


def row(ratio: float | None = 1.0, **others: Any) -> report.Row:
    known = {
        "class": "bfloat16",
        "dtype": "bfloat16",
        "sizes": PRODUCT,
        "ratio": ratio,
        "served_us": 10.0 / ratio if ratio else None,
        "library_us": 10.0,
        "kernel": "gemm_mma",
        "config": {"BM": 64},
        "tier": "nearest",
        "grid": [4, 2, 1],
        "waves": 0.5,
        "error": 1e-3,
        "tolerance": 1e-2,
        "fault": "",
    }
    return dict.fromkeys(report.ROW_KEYS) | known | others


class TestDraw:
    @given(st.integers(0, 2**31), st.integers(1, 60))
    def test_products_are_in_their_ranges_and_differ(self, seed: int, count: int) -> None:
        found = drawn(seed, count)
        assert len({tuple(sizes.values()) for sizes in found}) == count
        for sizes in found:
            assert all(low <= sizes[name] <= high for name, (low, high) in MATMUL_RANGES.items())
            assert {sizes[flag] for flag in MATMUL_FLAGS} <= {0, 1}
            assert matmul_flops(sizes) <= MAX_FLOPS

    @given(st.integers(0, 2**31))
    def test_a_quarter_is_odd_and_half_are_multiples_of_8(self, seed: int) -> None:
        found = drawn(seed, 40)
        sizes_of = [[sizes[name] for name in MATMUL_RANGES] for sizes in found]
        assert all(size % 2 for sizes in sizes_of[::4] for size in sizes)
        assert all(size % 2 == 0 or size < 2 for sizes in sizes_of[1::4] for size in sizes)
        assert all(size % 8 == 0 or size < 8 for sizes in sizes_of[2::4] + sizes_of[3::4] for size in sizes)

    def test_sizes_are_spread_over_all_octaves_and_layouts(self) -> None:
        found = drawn(0)
        for name, (low, high) in MATMUL_RANGES.items():
            octaves = {int(math.log2(sizes[name])) for sizes in found}
            assert octaves >= set(range(int(math.log2(low)), int(math.log2(high))))
        assert {layout_of(sizes) for sizes in found} == {"NN", "NT", "TN", "TT"}

    def test_the_seed_decides_and_more_begin_with_fewer(self) -> None:
        assert drawn(3) == drawn(3)
        assert drawn(3) != drawn(4)
        assert drawn(3, 50) == drawn(3)[:50]

    def test_too_few_problems_are_refused(self) -> None:
        with pytest.raises(SystemExit, match="only 2 of 3"):
            draw({"N": (1, 2)}, (), 3, 0)

    @given(st.integers(1, 10**6), st.integers(1, 10**6))
    def test_any_range(self, a: int, b: int) -> None:
        low, high = sorted((a, b))
        for sizes in draw({"N": (low, high)}, ("FLAG", "OTHER"), 4, 0):
            assert low <= sizes["N"] <= high


class TestGivenShapes:
    def test_a_shape_may_have_a_layout(self) -> None:
        assert parse_shape("64,64,131072,nt") == PRODUCT
        assert parse_shape("35, 8457, 2560") == {"M": 35, "N": 8457, "K": 2560, "TRANS_A": 0, "TRANS_B": 0}

    @pytest.mark.parametrize("text", ["", "64", "64,64", "64,64,0", "64,64,64,XY", "64,64,64,NT,1", "a,b,c"])
    def test_what_is_no_shape_is_refused(self, text: str) -> None:
        with pytest.raises(SystemExit, match="is no shape"):
            parse_shape(text)

    def test_a_file_of_shapes(self, tmp_path: Path) -> None:
        path = tmp_path / "shapes.json"
        path.write_text('[[64, 64, 131072, "NT"], [1, 2, 3]]')
        assert read_shapes(path) == [PRODUCT, parse_shape("1,2,3")]
        assert len(read_shapes(BENCHMARKS / "gemm_shapes.json")) == 24

    @pytest.mark.parametrize("text", ["{}", "[1]", "[[1, 2, null]]", "not JSON"])
    def test_a_file_of_something_else_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "shapes.json").write_text(text)
        with pytest.raises(SystemExit):
            read_shapes(tmp_path / "shapes.json")

    def test_ranges(self) -> None:
        assert parse_ranges(["M=1..64", "N=35"]) == {"M": (1, 64), "N": (35, 35)}
        for word in ("M", "M=", "M=0..3", "M=5..3", "=3", "M=1.."):
            with pytest.raises(SystemExit, match="no range"):
                parse_ranges([word])

    def test_text(self) -> None:
        assert text_of(PRODUCT) == "64 x 64 x 131072 NT"
        assert text_of({"ROWS": 3, "N": 5}) == "ROWS=3 N=5"


class TestCommandLine:
    def test_problems_of_the_default(self) -> None:
        assert any_size.problems(any_size.parsed([]), None) == drawn(0)

    def test_ranges_may_be_narrowed(self) -> None:
        found = any_size.problems(any_size.parsed(["M=1..4", "--count", "20", "--seed", "7"]), None)
        assert len(found) == 20
        assert max(sizes["M"] for sizes in found) <= 4

    def test_given_shapes_replace_the_draw(self) -> None:
        assert any_size.problems(any_size.parsed(["--shape", "64,64,131072,NT"]), None) == [PRODUCT]

    @pytest.mark.parametrize(
        "words", [["--count", "0"], ["--operation", "x.toml"], ["--operation", "x.toml", "N=1..2", "--shape", "1,2,3"]]
    )
    def test_what_contradicts_itself_is_refused(self, words: list[str]) -> None:
        with pytest.raises(SystemExit):
            any_size.parsed(words)

    def test_an_unknown_size_is_refused(self) -> None:
        with pytest.raises(SystemExit, match="no size X"):
            any_size.problems(any_size.parsed(["X=1..4"]), None)


class TestSummary:
    def test_figures_of_each_class(self) -> None:
        rows = [row(0.5), row(2.0), row(1.0, **{"class": "float16"})]
        found = report.summary(rows)
        assert list(found) == ["bfloat16", "float16"]
        assert found["bfloat16"]["geometric_mean"] == pytest.approx(1.0)
        assert found["bfloat16"]["worst"] == 0.5
        assert found["float16"]["percentile_1"] == 1.0

    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=300))
    def test_the_worst_the_percentile_and_the_mean_are_ordered(self, ratios: list[float]) -> None:
        found = report.summary([row(ratio) for ratio in ratios])["bfloat16"]
        assert found["worst"] == min(ratios)
        assert found["worst"] <= found["percentile_1"] <= max(ratios)
        assert min(ratios) * 0.999 <= found["geometric_mean"] <= max(ratios) * 1.001

    def test_a_row_that_failed_or_is_wrong_is_counted_and_never_meets_a_target(self) -> None:
        good = [row(1.5)] * 10
        assert report.meets("bfloat16", report.summary(good)["bfloat16"]) is True
        for bad in (row(None, fault="it crashed"), row(1.5, error=0.5), row(1.5, error=None)):
            found = report.summary([*good, bad])["bfloat16"]
            assert found["failed"] + found["out_of_tolerance"] == 1
            assert report.meets("bfloat16", found) is False

    @pytest.mark.parametrize(
        ("name", "ratios", "met"),
        [
            ("bfloat16", [1.03] * 200, True),
            ("bfloat16", [1.01] * 200, False),
            ("bfloat16", [1.03] * 199 + [0.89], False),
            ("bfloat16", [1.03] * 199 + [0.91], True),
            ("bfloat16", [1.03] * 190 + [0.94] * 10, False),
            ("float32", [1.41] * 200, True),
            ("float32_cuda_cores", [1.05] * 200, True),
            ("bfloat16_no_library", [0.98] * 198 + [0.61] * 2, True),
            ("bfloat16_no_library", [0.98] * 199 + [0.59], False),
            ("own", [0.1], None),
        ],
    )
    def test_targets(self, name: str, ratios: list[float], met: bool | None) -> None:
        found = report.summary([row(ratio, **{"class": name}) for ratio in ratios])[name]
        assert report.meets(name, found) is met

    def test_loss_against_tuning(self) -> None:
        rows = [row(1.0, loss=0.02), row(1.0, loss=0.10), row(1.0)]
        assert report.summary(rows)["bfloat16"]["loss_against_tuning"] == {
            "mean": pytest.approx(0.06),
            "worst": 0.10,
            "count": 2,
        }

    def test_nothing_measured(self) -> None:
        assert report.summary([row(None)])["bfloat16"]["geometric_mean"] is None
        assert report.summary([]) == {}


class TestRecord:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        rows = [row(0.5), row(None, grid=None, fault='a "reason"')]
        record = report.document({"command": "x", "options": {"seed": 0}}, rows, {"new": 80.0, "known": 0.9})
        path = tmp_path / "h200" / "any_size.json"
        report.write(path, record)
        assert report.read(path) == json.loads(json.dumps(record))
        assert path.read_text().count("\n  {") == len(rows)  # one line for each
        assert list(path.parent.iterdir()) == [path]
        assert {"summary", "rows", "look_up_us", "keys", "options"} <= set(report.read(path))
        assert set(report.read(path)["rows"][0]) == set(report.ROW_KEYS)

    def test_an_empty_one(self, tmp_path: Path) -> None:
        report.write(tmp_path / "a.json", report.document({}, [], {}))
        assert report.read(tmp_path / "a.json")["rows"] == []

    def test_what_is_no_record_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text("[]")
        for path in (tmp_path / "a.json", tmp_path / "missing.json"):
            with pytest.raises(SystemExit):
                report.read(path)

    @pytest.mark.parametrize(
        ("gpu", "folder"),
        [
            ("NVIDIA H200", "h200"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA A100-SXM4-40GB", "a100"),
            ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
            ("Tesla T4", "t4"),
        ],
    )
    def test_the_folder_is_named_after_the_gpu(self, gpu: str, folder: str) -> None:
        assert report.folder_name(gpu) == folder

    def test_the_tables_show_figures_targets_and_the_worst(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = {"kernel": "gemm_wgmma", "config": {"BN": 128}, "tier": "exact", "grid": [9, 9, 9], "waves": 1.0}
        rows = [
            row(0.25, tuned=found, tuned_us=12.5, tuned_ratio=0.8, loss=2.2),
            row(3.5, tuned=found, tuned_us=2.0, tuned_ratio=4.5, loss=0.2),
            row(None, grid=None, waves=None, fault="did not compile"),
        ]
        path = tmp_path / "any_size.json"
        report.write(path, report.document({"device": "NVIDIA H200"}, rows, {"new": 80.0, "known": 2.0}))
        monkeypatch.setattr(sys, "argv", ["any_size.py", "--read", str(path), "--worst", "2"])
        any_size.main()
        shown = capsys.readouterr().out
        for text in (
            ">= 1.02",
            "NO",
            "64 x 64 x 131072 NT",
            "gemm_mma: BM=64",
            "4 x 2 x 1",
            "did not compile",
            "80 us",
        ):
            assert text in shown
        worst, beaten = shown.split("what tuning found")
        assert "gemm_wgmma: BN=128" not in worst
        assert "gemm_wgmma: BN=128" in beaten
        assert "4.5" not in shown  # neither among the two worst nor slower than the library


class TestFigure:
    """The figure of the guide, from the records that exist."""

    def test_a_row_for_each_gpu_and_class(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(figures, "RESULTS", tmp_path)
        assert figures.any_size() == "There is no record yet."
        head = {"command": "python benchmarks/any_size.py", "date": "2026-11-23"}
        rows = [row(0.5), row(2.0), row(1.5, **{"class": "float32_cuda_cores"})]
        report.write(tmp_path / "h100" / "any_size.json", report.document(head, rows, {}))
        shown = figures.any_size()
        assert "| H100 | bf16 | 2 | 1.00 | 0.52 | 0.50 |" in shown
        assert "| H100 | fp32, `emulate=False` | 1 | 1.50 | 1.50 | 1.50 |" in shown
        assert "(../benchmarks/results/h100/any_size.json)" in shown
