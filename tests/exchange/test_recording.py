import io
import json
import os
import random
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from stored_runs import KEY, PARAMETERS, SPACE, failed, measured, space_of

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial
from autotile.errors import RecordingError
from autotile.exchange.recording import (
    RecordingHeader,
    find_recording,
    list_recordings,
    read_recording,
    read_recording_header,
    recording_name,
    write_recording,
)
from autotile.kernel.spec import Parameter


@pytest.fixture
def header(key, device):
    return RecordingHeader(
        key=key,
        parameters=PARAMETERS,
        device=device,
        driver="580.65",
        settings={"l2": "cold", "rounds": 12},
        valid_configs=24906,
        chosen="random sample, seed 1",
    )


@pytest.fixture
def path(tmp_path, header):
    write_recording(tmp_path / "space.npz", header, [measured(config, 10.0 + n) for n, config in enumerate(SPACE)])
    return tmp_path / "space.npz"


TEXT = st.text(max_size=20)
SMALL = st.integers(0, 2**16 - 1)
LARGE = st.integers(0, 2**32 - 1)
TIMES = st.floats(2.0**-10, 2.0**30, width=32)
MANY = Parameter("BM", tuple(range(257)))
"""Parameter of more values than a byte has."""


def trials_of(configs: list[dict[str, Any]]) -> st.SearchStrategy[Trial]:
    return st.builds(
        Trial,
        config=st.sampled_from(configs),
        outcome=st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.OK]),
        reason=TEXT,
        stage=TEXT,
        geometry=st.builds(LaunchGeometry, st.just((1, 1, 1)), st.just((32, 1, 1)), LARGE),
        resources=st.none() | st.builds(Resources, st.integers(1, 255), LARGE, LARGE, LARGE, LARGE),
        occupancy=st.builds(Occupancy, SMALL, SMALL, st.floats(0, 1, width=32), st.just(()), st.just({})),
        measurement=st.none() | st.builds(Measurement, TIMES, TIMES, TIMES, st.lists(TIMES, max_size=3).map(tuple)),
        seconds=st.fixed_dictionaries({"compile": st.floats(0, 100, width=32)}),
    )


@settings(max_examples=60)
@given(data=st.data(), several=st.sampled_from([PARAMETERS, (), (Parameter("BM", (32, 64)),), (MANY,)]))
def test_results_come_back_as_they_were_recorded(tmp_path_factory, data, several):
    parameters = (Parameter("LAYOUT", ("row",)), *several, Parameter("FAST", (True,)))  # also of a single value
    space = space_of(parameters)
    trials = data.draw(st.lists(trials_of(space[-1:]), max_size=1)) + data.draw(st.lists(trials_of(space), max_size=9))
    path = tmp_path_factory.mktemp("recordings") / "space.npz"
    write_recording(path, RecordingHeader(KEY, parameters, None), trials)
    recording = read_recording(path, kernel="k")
    newest = {tuple(trial.config.values()): trial for trial in trials}
    assert recording.header.parameters == parameters
    expected = [config for config in space if tuple(config.values()) in newest]
    assert [recording.config(row) for row in range(len(recording))] == expected
    for config in space:
        trial = newest.get(tuple(config.values()))
        if trial is None or trial.geometry is None or trial.occupancy is None:
            assert recording.lookup(config) is None
            continue
        measurement = replace(trial.measurement, samples_us=()) if trial.measurement else None
        seconds = {"all": trial.seconds["compile"]}
        expected = replace(trial, geometry=None, occupancy=None, measurement=measurement, seconds=seconds)
        assert recording.lookup(config) == expected
        stored = {name: column[recording.row_of(config)] for name, column in recording.columns.items()}
        assert stored["dynamic_smem_bytes"] == trial.geometry.dynamic_smem_bytes
        assert stored["blocks_per_sm"] == trial.occupancy.blocks_per_sm
        assert stored["occupancy"] == trial.occupancy.occupancy
        assert stored["samples"] == (len(trial.measurement.samples_us) if trial.measurement else 0)


def test_a_recording_says_what_it_holds(path, header):
    recording = read_recording(path, kernel="sgemm")
    assert (recording.header, read_recording_header(path)) == (header, header)
    assert recording.header.problem.sizes == {"M": 4096, "N": 2048, "K": 1024}
    assert [recording.config(row) for row in range(len(recording))] == SPACE
    assert recording.ok.all()
    assert recording.columns["time_us"].tolist() == [10.0 + n for n in range(len(SPACE))]


def test_a_configuration_is_found_by_value_and_type_in_any_order(path):
    recording = read_recording(path)
    found = recording.lookup({"KIND": "float4", "WIDE": True, "BM": 64})
    assert (found.measurement.time_us, found.occupancy) == (17.0, Occupancy(2, 16, 0.25, (), {}))
    for stranger in (
        {"WIDE": 1, "BM": 64},
        {"WIDE": True, "BM": 65},
        {"WIDE": True},
        {"WIDE": True, "BM": 64, "BN": 64},
    ):
        assert recording.lookup({"KIND": "float4", **stranger}) is None


def test_twenty_thousand_configurations_are_small(tmp_path, header):
    dice = random.Random(1)
    parameters = tuple(Parameter(name, tuple(range(1, 11))) for name in ("BM", "BN", "BK", "TM", "TN", "STAGES"))
    configs = [{p.name: dice.choice(p.values) for p in parameters} for _ in range(20_000)]
    trials = [
        failed(config, Outcome.RESOURCE_EXCEEDED, f"needs {dice.randrange(300_000):,} bytes of shared memory")
        if dice.random() < 0.1
        else measured(config, dice.lognormvariate(6, 1))
        for config in configs
    ]
    path = tmp_path / "large.npz"
    write_recording(path, replace(header, parameters=parameters), trials)
    assert path.stat().st_size < 500_000
    assert len(read_recording(path)) > 19_000


def test_a_configuration_of_another_space_or_a_place_that_cannot_be_written_says_so(tmp_path, header):
    with pytest.raises(RecordingError, match=r"BM=48 .* is not a configuration of the recorded space"):
        write_recording(tmp_path / "x.npz", header, [measured(SPACE[0] | {"BM": 48}, 1.0)])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match="cannot write the recording"):
        write_recording(tmp_path / "file" / "x.npz", header, [])


def test_what_is_missing_or_of_another_kernel_is_refused(path):
    with pytest.raises(RecordingError, match=r"there is no recording .*nothing\.npz.*list --recordings"):
        read_recording(path.with_name("nothing.npz"))
    with pytest.raises(RecordingError, match="is a folder; expected"):
        read_recording(path.parent)
    with pytest.raises(RecordingError, match="is a recording of 'sgemm', expected one of 'stencil'"):
        read_recording(path, kernel="stencil")


def rewrite(path: Path, place: tuple[Any, ...], value: object) -> None:
    """Replace an array, an element of one, or an entry of the header, and write the recording again."""
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].tobytes())
    *holders, last = place
    holder: Any = {**arrays, "head": header}
    for name in holders:
        holder = holder[name]
    holder[last] = value
    if not holders:
        arrays[last] = value
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("head", "format_version"), 2, r"format version 2, expected 1: pip install --upgrade autotile"),
        (("head", "format_version"), 0, r"format version 0, expected 1: record it again"),
        (("head", "format"), "other", "not the header of an autotile recording"),
        (("head", "key", "sm_count"), "132", "sm_count: expected int, got str"),
        (("head", "key", "sizes"), {"M": True}, r"key\.sizes\[...\]: expected int"),
        (("head", "key", "l2_mode"), "warm", "l2_mode: invalid enum value 'warm'"),
        (("head", "device", "max_grid_dim"), [1, 2], "max_grid_dim"),
        (("head", "device"), {}, "missing required field warp_size"),
        (("head", "created_at"), "yesterday", "header cannot be used"),
        (("head", "parameters"), [["BM", []]], "parameters"),
        (("head", "parameters"), [["BM", [1, [1]]], ["A", [1]], ["B", [1]]], "parameters"),
        (("head", "parameters"), [["BM", [32, 64]], ["A", [1, 2]], ["B", [1, 2]]], "value that its parameter lacks"),
        (("head", "labels"), {"outcome": ["fine"], "stage": [""], "reason": [""]}, "invalid enum value 'fine'"),
        (("head", "labels", "reason"), [1], r"reason\[0\]: expected str"),
        (("head", "labels", "reason"), [], "unknown reason"),
        (("head", "labels"), None, "header cannot be used"),
        (("codes", 0), 1, "occurs twice"),
        (("time_us", 3), np.nan, "is ok has no time"),
        (("time_us", 3), -1, "value of time_us that is negative or not finite"),
        (("time_us", 3), np.inf, "value of time_us that is negative or not finite"),
        (("time_us",), np.zeros(12), r"'time_us' is float64 \(12,\), expected float32"),
        (("time_us",), np.zeros(11, np.float32), r"\(11,\), expected float32 \(12,\)"),
        (("codes",), np.zeros((3, 12), np.uint8).T, r"'codes' is uint8 \(12, 3\)"),
        (("outcome",), np.zeros((), np.uint8), r"'outcome' is uint8 \(\)"),
        (("extra",), np.zeros(1), "other arrays"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(path, place, value, message):
    rewrite(path, place, value)
    with pytest.raises(RecordingError, match=message) as caught:
        read_recording(path)
    assert str(path) in str(caught.value)


def test_a_pickle_and_a_file_that_claims_too_much_are_refused_before_they_are_read(path):
    np.savez(path, header=np.array([{}], dtype=object))
    with pytest.raises(RecordingError, match=r"'header' cannot be read .its elements are of type '.O'"):
        read_recording(path)
    bomb = io.BytesIO()
    np.lib.format.write_array_header_1_0(bomb, {"descr": "|u1", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", bomb.getvalue())
    with pytest.raises(RecordingError, match=r"'header' cannot be read .it has 128 bytes, expected 1,099,511,627,904 "):
        read_recording(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", bytes(12_345))
    size, declared = (number.to_bytes(4, "little") for number in (12_345, 257 * 2**20))
    path.write_bytes(path.read_bytes().replace(size, declared))
    with pytest.raises(RecordingError, match="declares 269,484,032 bytes"):
        read_recording(path)


def test_a_recording_is_found_by_its_problem_and_the_newest_wins(tmp_path, header, path):
    now = datetime.now(UTC)
    other_gpu = replace(header, key=structs.replace(header.key, gpu_name="A100"), created_at=now + timedelta(hours=2))
    other_size = replace(header, key=structs.replace(header.key, sizes={"M": 1, "N": 2, "K": 3}))
    later = replace(header, created_at=now + timedelta(hours=1))
    for name, one in (("a100", other_gpu), ("small", other_size), ("later", later)):
        write_recording(tmp_path / "more" / f"{name}.npz", one, [])
    (tmp_path / "broken.npz").write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe.npz")
    folders = [tmp_path, tmp_path / "more", tmp_path / "nowhere"]

    found = list_recordings(folders)
    assert [one.stem for one, _ in found] == ["broken", "pipe", "space", "a100", "later", "small"]
    assert [isinstance(header, str) for _, header in found] == [True, True, False, False, False, False]
    assert "it is a named pipe" in found[1][1]

    def find(dtype: str = "float32", **sizes: int) -> str | None:
        one = find_recording(folders, "sgemm", sizes, dtype)
        return one.stem if one else None

    assert find(K=1024, N=2048, M=4096) == "a100"
    folders.remove(tmp_path / "more")
    assert find(K=1024, N=2048, M=4096) == path.stem
    folders.append(tmp_path / "more")
    assert find(M=1, N=2, K=3) == "small"
    assert (find(M=1, N=2), find("float16", M=1, N=2, K=3)) == (None, None)


@pytest.mark.parametrize("name", ["../x", "a\0b", "x" * 900])
def test_a_recordings_name_says_what_it_holds_and_leads_to_no_other_folder(header, name):
    assert recording_name(header) == "sgemm-nvidia-h200-4096x2048x1024-float32.npz"
    sizes = dict.fromkeys(map(str, range(99)), 4096)
    file = recording_name(replace(header, key=structs.replace(header.key, gpu_name=name, kernel=name, sizes=sizes)))
    assert not {"/", "\0"} & {*file}
    assert file.isprintable()
    assert len(file) < 255
    assert file.endswith(".npz")
    assert not file.startswith(".")


def test_a_recording_named_by_autotile_follows_no_link(header, tmp_path):
    path = tmp_path / recording_name(header)
    path.symlink_to(tmp_path / "elsewhere.npz")
    with pytest.raises(RecordingError, match="symbolic link"):
        write_recording(path, header, [], follow_link=False)
    write_recording(path, header, [])  # a path that the user gives is followed
    assert (tmp_path / "elsewhere.npz").is_file()
    assert path.is_symlink()
