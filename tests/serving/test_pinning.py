"""Pinned choices: files, what they fix, what is refused, ranks, processes, and exchanges that keep the bits."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from child_python import python
from stored_runs import timed

import autotile
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Outcome, Trial
from autotile.database.database import Database
from autotile.database.winners import DIGESTED, read_file
from autotile.errors import InputError, PinError, PinWarning
from autotile.serving import dispatcher as serving
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, get_best_kernel
from autotile.serving.operations import OperationShelf
from autotile.serving.pinning import Pin, parse_choices, read_choices, write_choices
from autotile.settings import read_settings

SIZES = {"M": 512, "N": 512, "K": 512}
BEST, BETTER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 2}
DEFAULT, ALIKE = {"THREADS": 128, "WORK": 1}, {"THREADS": 32, "WORK": 1}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "choices.json"


@pytest.fixture(autouse=True)
def _unpinned():
    yield
    default_dispatcher.pins.forget()


def ask(store: Any, n: int, **named: Any) -> BoundKernel:
    return get_best_kernel(store.path, n=n, device="h200", **named)


def anew() -> None:
    """Serve as a new process does."""
    default_dispatcher.pins.forget()
    default_dispatcher.clear()


def repin(file: Path, **changes: Any) -> None:
    """Pin the file in what serves as a new process does, with changed entries of its only choice."""
    if changes:
        document = json.loads(file.read_text())
        document["choices"][0] |= changes
        file.write_text(json.dumps(document))
    anew()
    autotile.pin(file)


@pytest.fixture
def pinned(store, file):
    """Serve the default before anything is stored, and pin it."""
    ask(store, 4096)
    autotile.pin(file)


class TestFile:
    def test_what_was_served_and_will_be_is_written(self, store, file):
        store.put(4096, BEST)
        ask(store, 4096)
        autotile.pin(file)
        first = json.loads(file.read_text())
        ask(store, 8192)
        default_dispatcher.pins.in_force().flush()  # type: ignore[union-attr]
        choices = read_choices(file)
        assert (first["format"], len(first["choices"])) == (1, 1)
        expected = {"kernel": "scale", "config": BEST, "tier": "exact", "source": "kernel"}
        assert first["choices"][0].items() >= expected.items()
        assert {(one.sizes["n"], one.tier, one.gpu_name) for one in choices} == {
            (4096, "exact", "NVIDIA H200"),
            (8192, "nearest", "NVIDIA H200"),
        }
        text = write_choices(choices)  # equal choices make equal files
        assert write_choices(reversed(choices)) == text == write_choices(parse_choices(text, "it")) == file.read_text()

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "holds no pinned choices"),
            ("[]", "holds no pinned choices"),
            ('{"format": 2, "choices": []}', "has format 2, expected 1"),
            ('{"format": 1, "choices": [{}]}', "holds no pinned choices"),
            ('{"format": 1, "choices": [], "more": 1}', "holds no pinned choices"),
            ("[" * 100_000, "holds no pinned choices"),
            (None, "cannot be written"),
        ],
    )
    def test_what_is_no_such_file_and_a_folder_that_is_not_there(self, file, text, said):
        if text is not None:
            file.write_text(text)
        with pytest.raises(PinError, match=said):
            autotile.pin(file.parent / "none" / file.name if text is None else file)
        assert default_dispatcher.pins.in_force() is None

    def test_a_setting_of_a_folder_that_is_not_there(self, store, tmp_path, monkeypatch):
        file = tmp_path / "none" / "choices.json"
        monkeypatch.setenv("AUTOTILE_PIN", str(file))
        default_dispatcher.pins.forget()
        with pytest.warns(PinWarning, match="cannot be written"):
            ask(store, 4096)
        file.parent.mkdir()
        default_dispatcher.pins.forget()  # it is tried again
        assert file.exists()

    @pytest.mark.parametrize("named", [False, True])
    def test_a_strict_setting_without_a_file_serves_nothing(self, store, file, monkeypatch, named):
        monkeypatch.setenv("AUTOTILE_PIN_STRICT", "on")
        if named:
            monkeypatch.setenv("AUTOTILE_PIN", str(file))
        default_dispatcher.clear()
        for dispatcher in (default_dispatcher, Dispatcher()):
            with pytest.raises(PinError, match="there is no file" if named else "AUTOTILE_PIN names no file"):
                dispatcher.get_best_kernel(store.path, n=4096, device="h200")
        assert not file.exists()

    def test_where_nothing_was_served_no_file_is_left_and_one_that_appears_meanwhile_is(self, file):
        pin = Pin(str(file), [], path=file)
        pin.flush_quietly()
        assert not file.exists()
        file.write_text("of another process")
        with pytest.warns(PinWarning, match="written by another process"):
            pin.flush()
        assert (pin.is_recording, file.read_text()) == (False, "of another process")


@pytest.mark.usefixtures("pinned")
class TestPinned:
    """What is asked for after the default was served for 4096, and pinned."""

    def test_a_file_decides_whatever_the_results_are(self, store, file):
        """Also while choices are added to it."""
        text, kernel = file.read_text(), ask(store, 4096)
        store.put(4096, BEST)
        assert (default_dispatcher.refresher.poll(), kernel.tier) == (0, "default")
        default_dispatcher.clear()
        assert ask(store, 4096).tier == "default"
        anew()
        assert ask(store, 4096).config == BEST
        kernel = ask(store, 4096)
        autotile.pin(file)
        assert (kernel.tier, kernel.config) == ("default", store.kernel.spec.default)
        assert f"pinned by {file}" in kernel.explain()
        assert kernel.to_json()["pinned"] == str(file)
        default_dispatcher.clear()
        assert ask(store, 4096).config == store.kernel.spec.default
        store.put(4096, BETTER)
        default_dispatcher.refresher.poll()
        assert kernel.config == store.kernel.spec.default
        autotile.unpin()
        assert kernel.config == BETTER
        assert file.read_text() == text

    def test_other_problems_are_served_with_a_warning_or_refused(self, store, file):
        repin(file)
        with pytest.warns(PinWarning, match="scale n=8192 float32 on NVIDIA H200 is not among the choices"):
            kernel = ask(store, 8192)
        store.put(8192, BEST)
        default_dispatcher.refresher.poll()
        assert kernel.tier == "default"
        anew()
        kernel = ask(store, 8192)
        with pytest.raises(PinError, match="no others are allowed"):
            autotile.pin(file, strict=True)
        assert default_dispatcher.pins.in_force() is None
        assert kernel.choice.pinned == ""
        del kernel
        anew()
        autotile.pin(file, strict=True)
        for look_up in (lambda: ask(store, 8192), lambda: autotile.best(store.path, n=8192, device="h200")):
            with pytest.raises(PinError, match=r"no others are allowed; pin without strict, or delete .*choices.json"):
                look_up()
        assert ask(store, 4096).choice.pinned == str(file)

    def test_another_version_of_the_kernel_is_refused(self, store, file):
        anew()
        source = store.path.with_suffix(".cu")
        source.write_text(source.read_text().replace("factor * x", "x[i] * factor + 0 * x"))
        autotile.pin(file)
        said = r"another version of scale: its template changed since; .*delete .* pin again"
        with pytest.raises(PinError, match=said):
            ask(store, 4096)

    def test_a_bad_configuration_a_problem_that_is_named_twice_and_an_unknown_key_are_refused(self, store, file):
        for config, said in (
            ({"THREADS": 999, "WORK": 1}, "THREADS"),
            ({"THREADS": 64}, "WORK"),
            ({"THREADS": 256, "WORK": "4"}, "WORK"),
        ):
            repin(file, config=config)
            with pytest.raises(PinError, match=said):
                ask(store, 4096)
        document = json.loads(file.read_text())
        document["choices"] *= 2
        with pytest.raises(PinError, match="names a problem twice"):
            parse_choices(json.dumps(document), "it")
        document["choices"] = [document["choices"][0] | {"conifg": {}}]
        with pytest.raises(PinError, match="conifg"):
            parse_choices(json.dumps(document), "it")

    def test_what_is_set_aside_twice_stays_so_until_the_end_and_dispatchers_pin_for_themselves(self, store):
        pins = default_dispatcher.pins
        with pins.instead(None):
            with pins.instead(None):
                assert pins.in_force() is None
            assert pins.in_force() is None
        assert pins.in_force() is not None
        store.put(4096, BEST)
        request = (store.path, None, "h200", read_settings().database, {"n": 4096})
        assert (serving.find_best_kernel(*request).tier, serving.find_best_result(*request).tier) == (
            "default",
            "exact",
        )
        assert serving.find_best_kernel(*request).tier == "default"  # results are judged whatever is pinned
        assert Dispatcher().get_best_kernel(store.path, n=4096, device="h200").config == BEST


class TestOperations:
    def product(self, **named: Any) -> BoundKernel:
        return get_best_kernel("matmul", **SIZES, dtype="float32", device="h200", **named)

    def test_the_kernel_is_pinned_with_its_configuration(self, file):
        kernel = self.product(library=False)
        name, default = kernel.kernel, dict(kernel.definition.spec.default)
        autotile.pin(file)
        (choice,) = json.loads(file.read_text())["choices"]
        assert choice.items() >= {"operation": "matmul", "kernel": name, "library_allowed": False}.items()
        assert choice["sizes"] == {**choice["sizes"], **SIZES}
        repin(file, config=default)
        pinned = self.product(library=False)
        assert (pinned.kernel, pinned.config, pinned.choice.pinned) == (name, default, str(file))
        assert kernel.config == default  # the object that the program had
        assert f"pinned by {file}" in pinned.explain()
        with pytest.warns(PinWarning, match="matmul M=512"):
            self.product()

    def test_a_library_that_is_not_here_is_refused(self, file):
        get_best_kernel("matmul", **SIZES, device="h200")
        autotile.pin(file)
        repin(file, source="library", kernel="another", library_version="1", config={})
        with pytest.raises(PinError, match="the library another, which is not here"):
            get_best_kernel("matmul", **SIZES, device="h200")

    @pytest.mark.parametrize("pinned", [True, False])
    def test_nothing_is_raced_while_pinned(self, file, monkeypatch, pinned):
        if pinned:
            autotile.pin(file)
        serve, asked = OperationShelf.serve, []

        def record(self: OperationShelf, *problem: Any, **options: Any) -> BoundKernel:
            asked.append(options["race"])
            return serve(self, *problem, **options)

        monkeypatch.setattr(OperationShelf, "serve", record)
        get_best_kernel("matmul", M=384, N=384, K=384, device="h200", race=True)
        assert asked == [not pinned]


class TestSetting:
    def test_processes_share_a_file(self, store, file):
        program = "import autotile; print(autotile.get_best_kernel('scale', n=4096, device='h200').config['THREADS'])"
        environment = {"AUTOTILE_PIN": str(file), "AUTOTILE_KERNELS": str(store.path.parent)}

        def run() -> str:
            return python("-c", program, env=environment, check=True).stdout

        assert run() == "128\n"
        store.put(4096, BEST)
        assert [one.config["THREADS"] for one in read_choices(file)] == [128]
        assert run() == "128\n"
        assert ask(store, 4096).config == BEST  # without the setting

    def test_strict(self, store, file, monkeypatch):
        file.write_text('{"format": 1, "choices": []}')
        monkeypatch.setenv("AUTOTILE_PIN", str(file))
        with pytest.warns(PinWarning, match="served as usual"):
            ask(store, 4096)
        monkeypatch.setenv("AUTOTILE_PIN_STRICT", "on")
        default_dispatcher.pins.forget()
        with pytest.raises(PinError, match="no others are allowed"):
            ask(store, 8192)
        monkeypatch.setenv("AUTOTILE_PIN_STRICT", "perhaps")
        default_dispatcher.pins.forget()
        with pytest.raises(InputError, match="AUTOTILE_PIN_STRICT"):
            ask(store, 2048)


def synchronize(dispatchers: list[Dispatcher]) -> list[Exception | None]:
    """Synchronize ranks that are threads, each with a dispatcher of its own."""
    barrier, data, votes = threading.Barrier(len(dispatchers), timeout=20), [b""], list[bool]()

    def run(number: int) -> Exception | None:
        def broadcast(sent: bytes) -> bytes:
            if number == 0:
                data[0] = sent
            barrier.wait()
            return data[0]

        def all_agree(agrees: bool) -> bool:
            votes.append(agrees)
            barrier.wait()
            return all(votes)

        try:
            dispatchers[number].pins.synchronize(broadcast, all_agree, is_first=number == 0)
        except PinError as error:
            return error
        return None

    with ThreadPoolExecutor(len(dispatchers)) as threads:
        return list(threads.map(run, range(len(dispatchers))))


class TestRanks:
    def test_all_serve_what_the_first_does_which_first_looks_for_new_results(self, store, tmp_path):
        dispatchers = [Dispatcher(), *(Dispatcher(database=tmp_path / f"{i}.db") for i in range(2))]
        kernels = [one.get_best_kernel(store.path, n=4096, device="h200") for one in dispatchers]
        store.put(4096, BEST)
        assert [kernel.tier for kernel in kernels] == ["default"] * 3
        assert synchronize(dispatchers) == [None, None, None]
        assert [dict(kernel.config) for kernel in kernels] == [BEST] * 3
        store.put(4096, BETTER)
        for dispatcher in dispatchers:
            dispatcher.refresher.poll()
        assert [dict(kernel.config) for kernel in kernels] == [BEST] * 3
        with pytest.warns(PinWarning, match="is not among the choices of rank 0, and is served as usual"):
            dispatchers[1].get_best_kernel(store.path, n=8192, device="h200")

    def test_one_that_cannot_changes_none(self, store, tmp_path):
        store.put(4096, BEST)
        dispatchers = [Dispatcher(), Dispatcher(database=tmp_path / "other.db")]
        first = dispatchers[0].get_best_kernel(store.path, n=4096, device="h200")
        source = store.path.with_suffix(".cu")
        source.write_text(source.read_text().replace("factor * x", "x[i] * factor + 0 * x"))
        second = dispatchers[1].get_best_kernel(store.path, n=4096, device="h200")
        errors = synchronize(dispatchers)
        assert "another rank cannot serve" in str(errors[0])
        assert str(errors[1]).startswith("rank 0 pins scale n=4096 float32 to a configuration of another version")
        assert "restore that version, or call sync_choices again" in str(errors[1])
        assert (first.choice.pinned, second.tier, second.choice.pinned) == ("", "default", "")


class TestNumerics:
    def finals(self, store: Any, times: list[tuple[dict[str, int], float, str]], *, refuse: Any = None) -> None:
        """Store the finals of a session: configurations with their times and the digests of their outputs."""
        key = store.put(4096, times[0][0], time_us=times[0][1])
        trials = [
            replace(timed(config, time_us), telemetry={OUTPUT_DIGEST: digest} if digest else {})
            for config, time_us, digest in times
        ]
        refused = [Trial(refuse, Outcome.WRONG_RESULT, "wrong", "finals")] if refuse is not None else []
        with Database.open(read_settings().database) as database:
            database.add_run(key, trials, sampler="random", phase="final", is_ranked=True)
            database.add_run(key, refused, sampler="random", phase="final")
            rows = database.read(DIGESTED, study=key.digest, config="{}")
        assert rows == read_file(str(read_settings().database), DIGESTED, study=key.digest, config="{}")
        assert len(rows) > len(times)

    def test_the_fastest_with_the_same_bits_takes_over(self, store):
        kernels = {numerics: ask(store, 4096, numerics=numerics) for numerics in (None, "any", "same")}
        times = [(BEST, 5.0, "in:other"), (BETTER, 6.0, VARYING_OUTPUTS), (ALIKE, 7.0, "in:out")]
        self.finals(store, [*times, (DEFAULT, 9.0, "in:out")])
        default_dispatcher.refresher.poll()
        configs = {name: dict(kernel.config) for name, kernel in kernels.items()}
        assert configs == {None: BEST, "any": BEST, "same": ALIKE}
        assert kernels["same"].tier == "exact"

    @pytest.mark.parametrize(
        ("alike", "default", "but"),
        [
            ((7.0, "other inputs:out"), (9.0, "in:out"), ""),
            ((7.0, ""), (9.0, "in:out"), ""),
            ((7.0, "in:out"), (9.0, ""), ""),
            ((7.0, VARYING_OUTPUTS), (9.0, VARYING_OUTPUTS), ""),
            ((9.0, "in:out"), (7.0, "in:out"), ""),
            ((7.0, "in:out"), (9.0, "in:out"), "it varied once"),
            ((7.0, "in:out"), (9.0, "in:out"), "it was found to be wrong"),
        ],
    )
    def test_else_it_stays(self, store, alike, default, but):
        kernel = ask(store, 4096, numerics="same")
        if but == "it varied once":
            self.finals(store, [(ALIKE, 7.0, VARYING_OUTPUTS), (DEFAULT, *default)])
        wrong = ALIKE if but == "it was found to be wrong" else None
        self.finals(store, [(BEST, 5.0, "in:other"), (ALIKE, *alike), (DEFAULT, *default)], refuse=wrong)
        default_dispatcher.refresher.poll()
        assert kernel.config == DEFAULT

    def test_a_pin_gives_way_to_equal_bits_alone(self, store, file, monkeypatch):
        kernel = ask(store, 4096)
        autotile.pin(file)
        anew()
        self.finals(store, [(BEST, 5.0, "in:other"), (ALIKE, 7.0, "in:out"), (DEFAULT, 9.0, "in:out")])
        autotile.pin(file)
        assert ask(store, 4096).config == DEFAULT
        assert ask(store, 4096, numerics="same").config == ALIKE
        monkeypatch.setenv("AUTOTILE_NUMERICS", "same")
        default_dispatcher.clear()
        kernel = ask(store, 4096)
        assert (kernel.config, kernel.choice.pinned) == (ALIKE, str(file))
        assert f"same bits as the configuration that {file} pins" in kernel.explain()


SYNCHRONIZING = """
import os, sys
import torch.distributed as distributed
import autotile
import autotile.torch

path, store, rank, own = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ["AUTOTILE_DB"] = own
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
kernel = autotile.get_best_kernel(path, n=4096, device="h200")
before = kernel.config["THREADS"]
autotile.torch.sync_choices()
print(before, kernel.config["THREADS"])
distributed.destroy_process_group()
"""


@pytest.mark.usefixtures("torch")
def test_two_processes_serve_the_same(store, tmp_path):
    store.put(4096, {"THREADS": 256, "WORK": 4})
    words = "-W", "ignore", "-c", SYNCHRONIZING, store.path, tmp_path / "store"
    databases = os.environ["AUTOTILE_DB"], tmp_path / "other.db"
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: python(*words, str(rank), databases[rank]), range(2)))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert [rank.stdout.split("\n")[0] for rank in ranks] == ["256 256", "128 256"]
