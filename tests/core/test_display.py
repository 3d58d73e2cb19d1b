from collections.abc import Iterable, Sequence

from autotile.core.text import Displayed


class Bare(Displayed):
    def _headline(self) -> str:
        return "sgemm M=64 on <GPU> (replayed)"


class Full(Bare):
    def _facts(self) -> Iterable[tuple[str, str]]:
        return [("time & rate", "5 us")]

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        return ("BM", "BN"), [("1", "<2>")]


def test_the_repr_is_one_line() -> None:
    assert repr(Bare()) == "<Bare: sgemm M=64 on <GPU> (replayed)>"


def test_html_is_escaped() -> None:
    html = Full()._repr_html_()
    assert "&lt;GPU&gt; (replayed)" in html
    assert "<th>time &amp; rate</th><td>5 us</td>" in html
    assert "<thead><tr><th>BM</th><th>BN</th></tr></thead><tbody><tr><td>1</td><td>&lt;2&gt;</td></tr></tbody>" in html


def test_without_facts_and_rows_there_is_no_table() -> None:
    assert "<table>" not in Bare()._repr_html_()
