"""Two sessions on a GPU, compared: both are of the same kernel, so that nothing is slower by a factor of three."""

from pathlib import Path

import pytest

import autotile
from autotile.report.live import DatabaseFollower

pytestmark = pytest.mark.gpu


def test_two_sessions_of_one_kernel(scale_toml: Path, tmp_path: Path) -> None:
    places = [tmp_path / "before.db", tmp_path / "after.db"]
    for place in places:
        options = autotile.TuneOptions(trials=4, finals=2, workers=4, database=str(place))
        autotile.tune(str(scale_toml), n=1 << 22, options=options)
    found = autotile.compare(*places)
    (one,) = found.problems
    assert one.ratio is not None
    assert one.ratio.low < one.ratio.value < one.ratio.high
    assert one.clock_ratio is not None
    assert one.common_count >= 2
    assert one.differences == ()
    assert found.slower_by(2.0) == ()
    follower = DatabaseFollower(places[0], "d0")
    follower.read()
    (session,) = follower.view().sessions
    follower.close()
    assert (session.trials, session.ended_at is not None) == (4, True)
