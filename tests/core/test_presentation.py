from collections.abc import Iterator

from autotile.core.text import RIGHT, Part, Result, ResultTable


class Bare(Result):
    def _headline(self) -> str:
        return "sgemm M=64 on <GPU> (replayed)"


class Full(Bare):
    def _parts(self) -> Iterator[Part]:
        yield "a <paragraph>"
        yield [("time & rate", "5 us"), ("ties", ["one", "two"])]
        yield ResultTable(("BM", f"{RIGHT}BN"), [("1", "<2>")])
        yield ResultTable(("row",), [(str(row),) for row in range(120)])


def test_the_repr_is_one_line() -> None:
    assert repr(Bare()) == "<Bare: sgemm M=64 on <GPU> (replayed)>"


def test_html_is_escaped() -> None:
    html = Full()._repr_html_()
    assert "<p><b>sgemm M=64 on &lt;GPU&gt; (replayed)</b></p><p>a &lt;paragraph&gt;</p>" in html
    assert "<th>time &amp; rate</th><td>5 us</td>" in html
    assert "<th>ties</th><td>one\ntwo</td>" in html
    assert "<thead><tr><th>BM</th><th>BN</th></tr></thead><tbody><tr><td>1</td><td>&lt;2&gt;</td></tr></tbody>" in html


def test_long_tables_are_cut() -> None:
    html = Full()._repr_html_()
    assert "<td>99</td>" in html
    assert "<td>100</td>" not in html
    assert html.endswith("<p>and 20 more rows</p>")


def test_without_parts_there_is_no_table() -> None:
    assert "<table>" not in Bare()._repr_html_()
