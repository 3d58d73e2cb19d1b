from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import add_trial, add_trials, start_run

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, config_key
from autotile.database.database import Database
from autotile.database.keys import TuningKey

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(0.0, 1e18)
TIMES = st.floats(1e-6, 1e15)
TRIPLES = st.tuples(*[st.integers(1, 2**31 - 1)] * 3)
VALUES = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), TEXT)
MEASUREMENTS = st.builds(
    Measurement, TIMES, FLOATS, FLOATS, st.lists(FLOATS, max_size=5).map(tuple), st.sampled_from(["cold", "hot"])
)
OCCUPANCIES = st.builds(
    Occupancy,
    NUMBERS,
    NUMBERS,
    st.floats(0.0, 1.0),
    st.lists(TEXT, max_size=2).map(tuple),
    st.dictionaries(TEXT, NUMBERS, max_size=3),
)
TRIALS = st.builds(
    Trial,
    config=st.dictionaries(TEXT, VALUES, max_size=4),
    outcome=st.sampled_from(Outcome),
    reason=TEXT,
    stage=TEXT,
    geometry=st.none() | st.builds(LaunchGeometry, TRIPLES, TRIPLES, NUMBERS),
    resources=st.none() | st.builds(Resources, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    occupancy=st.none() | OCCUPANCIES,
    measurement=st.none() | MEASUREMENTS,
    cubin_hash=TEXT,
    source=st.sampled_from(["cuda", "replayed"]),
    seconds=st.dictionaries(TEXT, FLOATS, max_size=2),
    telemetry=st.dictionaries(TEXT, st.one_of(FLOATS, NUMBERS, TEXT), max_size=2),
)


@settings(max_examples=25, deadline=None)
@given(trials=st.lists(TRIALS, min_size=1, max_size=8))
def test_a_trial_comes_back_as_it_was_stored(trials: list[Trial]) -> None:
    key = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
    with TemporaryDirectory() as folder, Database.open(Path(folder) / "tuning.db") as database:
        study = database.study(key, None)
        run = start_run(database, study, sampler="random")
        for trial in trials:
            add_trial(database, study, run, trial)
        add_trials(database, study, run, trials)
        back = database.trials(study)
        assert back == trials + trials
        for trial, stored in zip(trials, back, strict=False):
            assert list(stored.config) == list(trial.config)
            assert config_key(stored.config) == config_key(trial.config)
            assert [type(value) for value in stored.config.values()] == [type(value) for value in trial.config.values()]
