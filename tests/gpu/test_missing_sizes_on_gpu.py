"""What needs a GPU of sizes that come from a file, and of the page of an operation that was raced with a library."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

import autotile
from autotile.core.model import config_key
from autotile.tuning.operation_session import OperationResult

pytestmark = pytest.mark.gpu

SAID = "not given, so as in the search-space file: n=4096"


def test_every_function_takes_the_sizes_of_the_file(scale_toml: Path, tmp_path: Path) -> None:
    tuned = autotile.tune(scale_toml, trials=3, finals=2, progress=False)
    assert isinstance(tuned, autotile.TuneResult)
    assert (tuned.problem.sizes, tuned.notices[0]) == ({"n": 4096}, SAID)
    recorded = autotile.record(scale_toml, sample=2, output=tmp_path, db=tmp_path / "other.db", progress=False)
    assert recorded.header.key.sizes == {"n": 4096}
    candidate = tmp_path / "rewritten.cu"
    candidate.write_text(scale_toml.with_name("scale.cu").read_text())
    judged = autotile.check(candidate, scale_toml)
    assert judged.is_right
    assert (judged.problem.sizes, judged.notices[0]) == ({"n": 4096}, SAID)
    verified = autotile.verify(scale_toml)
    assert [one.problem.sizes for one in verified.problems] == [{"n": 4096}]
    with autotile.session(scale_toml) as session:
        (trial,) = session.evaluate({"THREADS": 64, "WORK": 1})
    assert config_key(trial.config) == config_key({"THREADS": 64, "WORK": 1})


def test_the_page_of_a_race_names_what_won_and_the_library(tmp_path: Path) -> None:
    result = autotile.tune("matmul", M=512, N=512, K=512, dtype="bfloat16", trials=8, finals=2, progress=False)
    assert isinstance(result, OperationResult)
    winner, page = result.winner, tmp_path / "r.html"
    assert winner is not None
    autotile.report("matmul", output=page)
    text = html.unescape(page.read_text().partition('type="application/json"')[0])
    assert "<h1>matmul M=512 N=512 K=512 bfloat16 on " in text
    headline = text[text.index('class="headline"') :]
    assert headline.index(winner.name) < headline.index("</strong>")
    assert "cublas" in headline[: headline.index("</section>")]
    assert f"Serve {winner.name}" in text
    assert "(replayed)" not in text
