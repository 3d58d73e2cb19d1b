"""``autotile devices``, ``doctor``, ``worker`` and ``tune --scheduler``; tests/tuning runs sessions on workers."""

import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from stored_rows import CEILINGS

from autotile.api import doctor
from autotile.core.device import device_profile, profile_names
from autotile.database.database import Database
from autotile.database.learned import save_ceilings
from autotile.errors import ToolchainError


@pytest.fixture
def no_gpu(monkeypatch):
    for module in ("targets", "doctor"):
        monkeypatch.setattr(f"autotile.api.{module}.device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_devices_without_a_gpu(run):
    found = run("devices", "--json").document
    assert found["live"] == []
    assert [row["profile"] for row in found["profiles"]] == profile_names()
    h200 = next(row for row in found["profiles"] if row["profile"] == "h200")
    assert h200["peak_fp32_flops_per_s"] == pytest.approx(66.9e12, rel=1e-2)
    answer = run("devices")
    assert "no CUDA device on this machine" in answer.out
    assert "66.9 TFLOP/s" in answer.out
    run("devices", "--measure", "--json").is_refused("no CUDA device")


def test_devices_with_a_gpu_and_its_measured_ceilings(run, tmp_path, monkeypatch):
    monkeypatch.setattr("autotile.api.targets.device_count", lambda: 1)
    monkeypatch.setattr("autotile.api.targets.live_device", lambda index: device_profile("h100"))
    with Database.open(tmp_path / "tuning.db") as database:
        save_ceilings(database, CEILINGS)
    document = run("devices", "--json").document
    assert [(live["index"], live["name"]) for live in document["live"]] == [(0, "NVIDIA H100 80GB HBM3")]
    ceiling = document["ceilings"][0]["ceilings"][0]
    assert (ceiling["name"], ceiling["value"], ceiling["unit"]) == ("dram_read", 4.2e12, "B/s")
    shown = run("devices").out
    assert "DRAM, copy" in shown
    assert "4,000 GB/s" in shown


@pytest.mark.usefixtures("no_gpu")
class TestDoctor:
    @pytest.fixture
    def recordings_in(self, monkeypatch):
        settings = doctor.read_settings()

        def choose(folder):
            monkeypatch.setattr(doctor, "read_settings", lambda: replace(settings, recording_folders=(folder,)))

        return choose

    def test_replay_is_enough_and_a_damaged_recording_is_told(self, run, recordings_in, recording):
        recordings_in(recording.parent)
        answer = run("doctor", "--json")
        assert (answer.code, answer.document["ok"]) == (0, True)
        assert answer.document["verdict"].startswith("tuning works here by replay")
        status = {row["name"]: row["status"] for row in answer.document["checks"]}
        assert status["GPU"] == "warn"
        assert status["NVRTC"] == status["compiler"] == status["database"] == status["recordings"] == "ok"
        assert "tuning works here by replay, of 1 recorded problem" in run("doctor").out
        recording.with_name("broken.npz").write_bytes(b"broken")
        answer = run("doctor")
        assert answer.code == 0
        assert "broken.npz" in answer.out

    def test_neither_gpu_nor_recording(self, run, recordings_in, tmp_path):
        recordings_in(tmp_path / "none")
        answer = run("doctor", "--json")
        assert (answer.code, answer.document["ok"]) == (1, False)
        assert answer.document["verdict"] == "tuning does not work here: see driver, GPU, recordings"
        status = {row["name"]: row for row in answer.document["checks"]}
        assert status["GPU"]["status"] == "fail"
        assert status["recordings"]["cure"]

    def test_a_missing_compiler_missing_headers_and_a_database_that_cannot_be_read(self, run, monkeypatch, tmp_path):
        def missing() -> str:
            raise ToolchainError("no NVRTC; install the wheels")

        monkeypatch.setattr(doctor, "nvrtc_version", missing)
        monkeypatch.setattr(doctor, "toolkit_headers", lambda: ())
        (tmp_path / "notes.txt").write_text("no database")
        answer = run("doctor", "--db", tmp_path / "notes.txt", "--json")
        assert answer.code == 1
        found = {row["name"]: row for row in answer.document["checks"]}
        assert {name: found[name]["status"] for name in ("NVRTC", "headers", "database")} == {
            "NVRTC": "fail", "headers": "warn", "database": "fail"
        }  # fmt: skip
        assert "install the wheels" in found["NVRTC"]["detail"]
        assert 'pip install -e ".[cuda13]" in a checkout' in found["headers"]["cure"]
        assert 'pip install "autotile[cuda13]" elsewhere' in found["headers"]["cure"]

    def test_a_broken_kernel_of_the_user_is_no_fault_of_the_gpu_worker(self, run, tmp_path, monkeypatch):
        (tmp_path / "a_broken.toml").write_text("[[")
        (tmp_path / "a_folder.toml").mkdir()
        monkeypatch.setenv("AUTOTILE_KERNELS", str(tmp_path))
        (kernels,) = [check for check in run("doctor", "--json").document["checks"] if check["name"] == "kernels"]
        assert (kernels["status"], kernels["detail"].count("\n")) == ("warn", 0)
        assert "a_broken.toml: not TOML" in kernels["detail"]
        worker = doctor._check("GPU worker", lambda: doctor._worker_text(doctor.read_settings()))
        assert "a_broken" not in worker.detail  # with a GPU and without

    def test_a_broken_configuration_file(self, run, tmp_path):
        folder = tmp_path / "config" / "autotile"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("database = \n")
        answer = run("doctor", "--json")
        assert answer.code == 1
        assert "config.toml" in answer.document["checks"][0]["detail"]


@pytest.fixture
def dask():
    pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")


TUNE = ("tune", "sgemm_2d", "M=1024", "N=1024", "K=1024", "--scheduler")


@pytest.mark.usefixtures("dask")
def test_schedulers_that_are_refused(run):
    for words in (("worker",), TUNE):
        run(*words, "tcp://node7:8786").is_refused("not encrypted")
        run(*words, "tcp://127.0.0.1:8786x").is_refused("'tcp://127.0.0.1:8786x' cannot be read")
        run(*words, "tcp://me:secret@node7:8786").is_refused("a password on the command line")
        run(*words, "ws://127.0.0.1:8786", "--insecure").is_refused("cannot be read; expected tls:// or tcp://")
    run("worker", "tcp://127.0.0.1:8786", "--replay-seconds", "1").is_refused("--replay")
    for choice in (["--devices", "0,1"], ["--device", "1"]):
        run(*TUNE, "tcp://127.0.0.1:1", *choice).is_refused("to choose a model, name it")


def test_without_dask_the_error_names_the_extra(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("autotile.tuning.cluster.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    for words in (("worker",), TUNE):
        answer = run(*words, "tcp://127.0.0.1:8786")
        assert answer.code == 1
        assert "autotile[cluster]" in answer.err


@pytest.mark.usefixtures("dask")
def test_a_machine_offers_what_it_has(monkeypatch):
    from autotile.api import devices
    from autotile.errors import InputError, ToolchainError
    from autotile.tuning.cluster import worker as cluster_worker

    offered: list[tuple[int, int]] = []
    said: list[str] = []
    monkeypatch.setattr(
        cluster_worker,
        "offer",
        lambda address, gpus, observe, *, compilers, insecure: offered.append((len(gpus), compilers)),
    )
    monkeypatch.setattr(cluster_worker, "live_gpus", lambda indices: [None for _ in indices])
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    monkeypatch.setattr(devices, "resolve_gpus", lambda chosen: (0, 1, 2) if chosen == "all" else (0,))
    for count in (3, 0):
        monkeypatch.setattr(devices, "device_count", lambda n=count: n)
        devices.worker("tcp://127.0.0.1:1", observe=said.append)
    devices.worker("tcp://127.0.0.1:1", devices="0", compilers=2)
    assert (offered, said) == ([(3, 5), (0, 8), (1, 2)], ["this machine has no CUDA device: its cores are offered"])

    def missing() -> str:
        raise ToolchainError("NVRTC is not installed")

    monkeypatch.setattr(devices, "nvrtc_version", missing)
    with pytest.raises(InputError, match="has no CUDA device, and offers no cores"):
        devices.worker("tcp://127.0.0.1:1", observe=said.append)
    assert said[-1] == "no cores are offered: NVRTC is not installed"


@pytest.fixture
def patience(monkeypatch, dask):
    from autotile.tuning.cluster import connection
    from autotile.tuning.cluster import worker as cluster_worker

    monkeypatch.setattr(cluster_worker, "_FIRST_ANSWER_S", 0.5)
    monkeypatch.setattr(cluster_worker, "_START_S", 1.0)
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    monkeypatch.setattr(connection, "_HANDSHAKE_S", 0.5)


@pytest.fixture(params=["nothing", "something silent", "a talker"])
def no_scheduler(request):
    """Address of this machine at which no scheduler answers."""
    if request.param == "nothing":
        with socket.socket() as held:  # bound, and it does not listen: nobody else gets the port
            held.bind(("127.0.0.1", 0))
            yield f"tcp://127.0.0.1:{held.getsockname()[1]}"
        return
    talk = "import socket, time\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
    talk += "while True:\n    one, _ = s.accept()\n"
    talk += "    one.sendall(b'HTTP/1.1 400 Bad Request\\r\\n\\r\\n')\n" if request.param == "a talker" else ""
    with subprocess.Popen([sys.executable, "-c", talk], stdout=subprocess.PIPE, text=True) as process:
        yield f"tcp://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


@pytest.mark.usefixtures("patience")
def test_without_a_scheduler_they_say_so_and_end(run, scale_toml, recording, no_scheduler):
    answer = run("worker", no_scheduler, "--replay", recording)
    assert answer.code == 2
    waiting, error = answer.err.splitlines()
    assert waiting == f"no scheduler answers at {no_scheduler} yet; it is tried for another 0 s"
    assert error.startswith(f"error: no scheduler answers at {no_scheduler}: ")
    assert error.endswith("; check the address, or start `dask scheduler` there")
    answer = run("tune", scale_toml, "n=1048576", f"--replay={recording}", "--scheduler", no_scheduler)
    answer.is_refused(f"no scheduler answers at {no_scheduler}: ")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Folder with a certificate and its key, and with the keys of others, one of them with a password."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    for name, protection in (("key", ["-nodes"]), ("other", ["-nodes"]), ("protected", ["-passout", "pass:secret"])):
        files = ["-keyout", str(folder / name), "-out", str(folder / f"{name}.cert")]
        command = ["openssl", *words, *protection, "-subj", "/CN=autotile", *files]
        subprocess.run(command, check=True, capture_output=True)
    return folder


NAMES = ("ca-file", "client.cert", "client.key", "worker.cert", "worker.key")
FAULTS = [(name, fault) for name in NAMES for fault in ("missing", "a folder", "text")]
FAULTS += [(name, fault) for name in NAMES if "key" in name for fault in ("other", "protected")]


@pytest.mark.usefixtures("dask")
@pytest.mark.parametrize("case", FAULTS)
def test_an_error_of_certificates_names_the_file(run, scale_toml, tmp_path, certificate, case):
    import dask.config

    name, fault = case
    sound = {"ca-file": certificate / "key.cert", "cert": certificate / "key.cert", "key": certificate / "key"}
    role, _, which = name.rpartition(".")
    file = tmp_path / "broken.pem"
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_text((certificate / fault).read_text() if fault != "text" else "no certificate\n")
    paths = {one: str(path) for one, path in {**sound, which: file}.items()}
    roles = {one: paths if one == role else {key: str(sound[key]) for key in sound} for one in ("client", "worker")}
    tls = {**dask.config.get("distributed.comm.tls"), **roles, "ca-file": paths["ca-file"]}
    with dask.config.set({"distributed.comm.tls": tls}):
        for words in (["worker"], ["tune", scale_toml, "n=1048576", "--scheduler"]):
            answer = run(*words, "tls://127.0.0.1:1")
            assert answer.code == 2
            assert str(file) in answer.err
            assert f"distributed.comm.tls.{name}" in answer.err
            assert ("does not exist" in answer.err) == (fault == "missing")
