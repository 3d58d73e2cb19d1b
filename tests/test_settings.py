"""Settings: from the environment, then config.toml, then defaults."""

import os
from pathlib import Path

import pytest
from child_python import python

import autotile
from autotile.errors import InputError
from autotile.settings import available_cores, child_environment, data_folder, read_settings, toolkit_folders

NAMES = ("DB", "CACHE", "KERNELS", "CACHE_LIMIT_MIB", "SANITIZER", "GRAPHS", "REFRESH")
VARIABLES = tuple(f"AUTOTILE_{name}" for name in NAMES)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Path of the user's ``config.toml``, with an environment without settings."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    path = tmp_path / "XDG_CONFIG_HOME" / "autotile" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.usefixtures("config")
def test_defaults_lie_in_the_users_folders_and_nothing_is_made(tmp_path):
    settings = read_settings()
    assert settings.database == str(tmp_path / "XDG_DATA_HOME" / "autotile" / "autotile.db")
    assert (settings.cache, settings.cache_limit_bytes) == (tmp_path / "XDG_CACHE_HOME" / "autotile", 2**30)
    assert settings.kernel_folders == (data_folder("search_spaces"),)
    assert (settings.recording_folders, settings.sanitizer) == ((data_folder("recordings"),), "")
    assert settings.graphs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["XDG_CONFIG_HOME"]


def test_config_file_and_environment(config, tmp_path, monkeypatch):
    config.write_text(
        f'database = "{tmp_path}/team.db"\ncache = "~/cubins"\ncache_limit_mib = 64\nkernels = "/a{os.pathsep}~/b"\n'
        'sanitizer = "/opt/compute-sanitizer"\ngraphs = "off"\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    own = data_folder("search_spaces")
    settings = read_settings()
    assert (settings.database, settings.cache) == (f"{tmp_path}/team.db", tmp_path / "cubins")
    assert (settings.cache_limit_bytes, settings.kernel_folders) == (64 * 2**20, (Path("/a"), tmp_path / "b", own))
    assert (settings.sanitizer, settings.graphs) == ("/opt/compute-sanitizer", False)

    values = ("postgresql://host/name", "/elsewhere", "/c", "5", "compute-sanitizer-2026", "ON")
    for variable, value in zip(VARIABLES, values, strict=False):
        monkeypatch.setenv(variable, value)
    settings = read_settings()
    assert (settings.database, settings.cache) == ("postgresql://host/name", Path("/elsewhere"))
    assert (settings.cache_limit_bytes, settings.kernel_folders) == (5 * 2**20, (Path("/c"), own))
    assert (settings.sanitizer, settings.graphs) == ("compute-sanitizer-2026", True)
    monkeypatch.setenv("AUTOTILE_GRAPHS", "1")
    with pytest.raises(InputError, match="'1', expected on or off"):
        read_settings()


def test_a_byte_order_mark_is_no_part_of_the_file(config):
    config.write_text("\ufeffcache_limit_mib = 5\n", "utf-8")
    assert read_settings().cache_limit_bytes == 5 << 20


def test_a_toolkit_is_looked_for_where_the_user_says_first(monkeypatch, tmp_path):
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", "")
    assert toolkit_folders() == (Path("/usr/local/cuda"),)
    monkeypatch.setenv("CUDA_PATH", "/opt/b")
    monkeypatch.setenv("CUDA_HOME", "/opt/a")
    assert toolkit_folders() == (Path("/opt/a"), Path("/opt/b"), Path("/usr/local/cuda"))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    (target := tmp_path / "targets" / "x86_64-linux").mkdir(parents=True)
    assert toolkit_folders()[2:] == (target, Path("/usr/local/cuda"))


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("variable", VARIABLES)
def test_an_empty_variable_counts_as_unset(variable, monkeypatch):
    before = read_settings()
    monkeypatch.setenv(variable, "")
    assert read_settings() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("database = ", "correct it or delete it"),
        ("database = 3", "database: expected str, got int"),
        ('databse = "x"', "unknown field databse; known are database, cache, kernels"),
        ('kernels = ["/a", "/b"]', "kernels: expected str, got array"),
        ("database = true", "database: expected str, got bool"),
        ("graphs = true", "graphs: expected str, got bool"),
        (f"cache_limit_mib = {2**70}", "expected a positive number of MiB"),
        ("cache_limit_mib = 0", r"\(AUTOTILE_CACHE_LIMIT_MIB\) is '0', expected a positive number of MiB"),
        ("cache_limit_mib = -1", "expected a positive number of MiB"),
        ('cache_limit_mib = "lots"', "expected a positive number of MiB"),
        ("\x00", "correct it or delete it"),
        (b"\xff\xfe", r"config\.toml"),
    ],
)
def test_a_malformed_file_is_refused(config, text, said):
    config.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match=said) as caught:
        read_settings()
    assert "config.toml" in str(caught.value) or "MiB" in str(caught.value)


def test_a_child_imports_the_same_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}")
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[1:] == [str(tmp_path)]
    found = python("-P", "-c", "import autotile; print(autotile.__file__)", cwd=tmp_path, check=True)
    assert found.stdout.strip() == autotile.__file__


def test_cores():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_changes_of_the_file_and_of_the_environment_are_seen(config, monkeypatch):
    assert read_settings().graphs
    for text, expected in (('graphs = "off"', False), ('graphs = "on" ', True)):
        config.write_text(text)
        assert read_settings().graphs is expected
        assert read_settings() is read_settings()
    monkeypatch.setenv("AUTOTILE_GRAPHS", "off")
    assert not read_settings().graphs
    config.write_text("graphs = 1")
    for _ in range(2):
        with pytest.raises(InputError, match=r"config\.toml"):
            read_settings()
    config.unlink()
    monkeypatch.delenv("AUTOTILE_GRAPHS")
    assert read_settings().graphs


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("AUTOTILE_RACE", "on", "race", True),
        ("AUTOTILE_WAIT", "on", "wait", True),
        ("AUTOTILE_REFRESH", "0.5", "refresh_s", 0.5),
        ("AUTOTILE_BUNDLE", "/app.autotile", "bundle", Path("/app.autotile")),
        ("AUTOTILE_PIN", "/choices.json", "pin", Path("/choices.json")),
        ("AUTOTILE_PIN_STRICT", "On", "pin_strict", True),
        ("AUTOTILE_NUMERICS", "same", "numerics", "same"),
        ("AUTOTILE_L2", "hot", "l2", "hot"),
        ("AUTOTILE_DEPLOYMENT", "eager", "deployment", "eager"),
    ],
)
def test_each_variable_sets_something(monkeypatch, variable, text, name, value):
    monkeypatch.delenv(variable, raising=False)
    assert getattr(read_settings(), name) != value
    monkeypatch.setenv(variable, text)
    assert getattr(read_settings(), name) == value
    if variable not in {"AUTOTILE_BUNDLE", "AUTOTILE_PIN"}:
        monkeypatch.setenv(variable, "nonsense")
        with pytest.raises(InputError, match=variable):
            read_settings()
