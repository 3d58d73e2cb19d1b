"""`diff`, `merge` and `clean`: what they show, and that no trial and no winner is lost."""

from datetime import UTC, datetime, timedelta

import pytest
from stored_runs import FAST, SLOW, Book, add_trial, change_file, end_run, start_run, timed

from autotile.core.model import Outcome, Trial
from autotile.database.care import check_database, copy_missing_rows
from autotile.database.database import Database
from autotile.exchange.shipped import write_winners

OTHER = {"THREADS": 32, "WORK": 1}


class TestDiff:
    def test_what_only_one_has_and_what_differs(self, book, run):
        a, b = book("a.db"), book("b.db")
        for side in (a, b):
            side.put(1024, FAST, 10.0)
        a.put(2048, FAST, 10.0)
        b.put(2048, SLOW, 12.0)
        a.put(4096, FAST, 10.0)
        b.put(4096, SLOW, 10.05)
        a.put(512, SLOW, 1.0)
        b.put(256, SLOW, 1.0)
        answer = run("db", "diff", a.path, b.path, "--json").document
        assert [entry["problem"] for entry in answer["only_a"]] == [{"n": 512}]
        assert [entry["problem"] for entry in answer["only_b"]] == [{"n": 256}]
        verdicts = {entry["problem"]["n"]: (entry["same_config"], entry["verdict"]) for entry in answer["both"]}
        assert verdicts == {1024: (True, "unresolved"), 2048: (False, "A is faster"), 4096: (False, "unresolved")}
        (pair,) = [entry for entry in answer["both"] if entry["problem"]["n"] == 2048]
        assert (pair["a"]["config"], pair["b"]["time_us"]) == (FAST, 12.0)
        low, high = pair["ratio"]["interval"]
        assert 1.0 < low < pair["ratio"]["value"] == 1.2 < high
        text = run("db", "diff", a.path, b.path).out
        assert "A is faster" in text
        assert "1 problem" in text

    def test_the_same_problem_under_another_key(self, book, run):
        a, b = book("a.db"), book("b.db")
        a.put(1024, FAST, 10.0)
        b.put(1024, FAST, 10.0, nvrtc_version="12.0")
        answer = run("db", "diff", a.path, b.path, "--json").document
        assert [entry["differs"] for entry in answer["only_a"] + answer["only_b"]] == [["nvrtc_version"]] * 2
        assert "nvrtc_version" in run("db", "diff", a.path, b.path).out

    def test_files_of_winners_and_what_is_not_there(self, book, run, tmp_path):
        a = book("a.db")
        a.put(1024, FAST, 10.0)
        with Database.open(a.path) as database:
            write_winners(tmp_path / "a.json", [best.winner for best in database.best()])
        answer = run("db", "diff", tmp_path / "a.json", a.path, "--json").document
        assert (answer["only_a"], answer["only_b"]) == ([], [])
        assert answer["both"][0]["same_config"]
        for other in ("missing.db", "missing.json"):
            run("db", "diff", a.path, tmp_path / other).is_refused(other)


class TestMerge:
    def test_every_trial_is_there_once_also_in_one_of_them(self, book, run):
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        a.put(1024, FAST, 10.0, SLOW, OTHER)
        b.put(1024, FAST, 10.0, OTHER)
        b.put(2048, SLOW, 5.0)
        assert run("db", "merge", a.path, b.path, "-o", out.path).code == 0
        assert out.trials() == sorted(a.trials() + b.trials())
        assert run("db", "merge", a.path, b.path, out.path, "-o", out.path).code == 0
        both = sorted(a.trials() + b.trials())
        assert out.trials() == both
        answer = run("db", "merge", a.path, b.path, "-o", a.path, "--json").document
        assert ([entry["trials"] for entry in answer["copied"]], a.trials()) == ([len(b.trials())], both)

    @pytest.mark.parametrize("faster_first", [True, False])
    def test_the_faster_is_served_where_the_intervals_say_so(self, book, run, faster_first):
        """Whichever session was the newer."""
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        sessions = [(a, FAST, 10.0), (b, SLOW, 12.0)]
        for side, config, time_us in sessions if faster_first else sessions[::-1]:
            side.put(1024, config, time_us)
        answer = run("db", "merge", a.path, b.path, "-o", out.path, "--json").document
        (study,) = answer["studies"]
        assert study["decision"] == ("taken" if faster_first else "kept")
        assert (study["served"]["config"], study["other"]["config"], out.served(1024)) == (FAST, SLOW, FAST)

    def test_what_an_objective_of_its_own_chose_is_not_compared_by_time(self, book, run):
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        a.put(1024, FAST, 10.0)
        b.put(1024, SLOW, 20.0)
        change_file(b.path, """UPDATE trials SET telemetry = '{"objective": 1.0, "objective_cost": 1.0}'""")
        answer = run("db", "merge", a.path, b.path, "-o", out.path, "--json").document
        assert (answer["studies"][0]["decision"], out.served(1024)) == ("unresolved", SLOW)

    def test_what_the_intervals_do_not_tell_is_left_to_the_newest(self, book, run):
        """An older session that is merged later does not replace it."""
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        a.put(1024, FAST, 10.0)
        b.put(1024, SLOW, 10.1)
        answer = run("db", "merge", a.path, b.path, "-o", out.path)
        assert "unresolved" in answer.out
        assert (out.served(1024), len(out.trials())) == (SLOW, 4)
        out.path.unlink()
        for _ in range(2):
            assert (run("db", "merge", b.path, a.path, "-o", out.path).code, out.served(1024)) == (0, SLOW)
        out.put(1024, OTHER, 10.05)
        assert (run("db", "merge", b.path, a.path, "-o", out.path).code, out.served(1024)) == (0, OTHER)

    def test_a_session_of_a_clock_that_was_ahead_is_not_the_newest(self, book, run):
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        a.put(1024, FAST, 10.0)
        future = "2140-01-01T00:00:00.000000+00:00"
        change_file(a.path, f"UPDATE runs SET started_at = '{future}', ended_at = '{future}'")
        change_file(a.path, f"UPDATE trials SET created_at = '{future}'")
        b.put(1024, SLOW, 10.1)
        for sources in ((a, b), (b, a)):
            out.path.unlink(missing_ok=True)
            assert run("db", "merge", *(side.path for side in sources), "-o", out.path).code == 0
            assert out.served(1024) == SLOW
        out.put(1024, OTHER, 10.05)
        assert out.served(1024) == OTHER
        assert (run("db", "merge", a.path, "-o", out.path).code, out.served(1024)) == (0, OTHER)

    def test_old_finals_that_were_deleted_return_as_old_ones(self, book, run, tmp_path):
        a = book("a.db")
        a.put(1024, FAST, 10.0)
        whole = tmp_path / "whole.db"
        with Database.open(a.path) as database, Database.open(whole) as copy:
            copy_missing_rows(database, copy)
        for path in (a.path, whole):
            change_file(path, "UPDATE trials SET created_at = '2020-01-01T00:00:00.000000+00:00'")
        a.put(1024, SLOW, 10.1)
        assert run("db", "clean", "--db", a.path, "--older-than", "90d").code == 0
        assert (run("db", "merge", whole, "-o", a.path).code, a.served(1024)) == (0, SLOW)

    def test_what_was_refused_stays_refused(self, book, run):
        """A refusal may be copied before the trial that it refuses."""
        a, b, out = book("a.db"), book("b.db"), book("out.db")
        b.put(1024, FAST, 10.0)
        a.put(1024, SLOW, 20.0)
        with Database.open(a.path) as database:
            study = database.find_study(a.key(1024))
            session = start_run(database, study, sampler="random")
            wrong = Trial(FAST, Outcome.WRONG_RESULT, "y[0] is 1", "verify")
            add_trial(database, study, session, wrong, phase="final")
            end_run(database, session)
        for order in ((a, b), (b, a)):
            out.path.unlink(missing_ok=True)
            assert run("db", "merge", *(side.path for side in order), "-o", out.path).code == 0
            assert out.served(1024) == SLOW

    def test_a_run_that_was_killed_in_one_and_has_ended_in_the_other(self, book, run, tmp_path):
        a = book("a.db")
        a.put(1024, FAST, 10.0)
        copy = tmp_path / "copy.db"
        Database.open(a.path).close()
        copy.write_bytes(a.path.read_bytes())
        change_file(copy, "UPDATE runs SET ended_at = NULL")
        assert run("db", "merge", a.path, "-o", copy).code == 0
        with Database.open(copy) as database:
            assert database.best()[0].confirmed
            assert len(database.runs(1)) == 2

    def test_a_source_that_is_missing_and_a_target_that_is_something_else(self, book, run, tmp_path):
        """Nothing is begun before all of them are there."""
        mine: Book = book("a.db")
        mine.put(1024, FAST, 10.0)
        answer = run("db", "merge", mine.path, tmp_path / "nothing.db", "-o", tmp_path / "out.db")
        answer.is_refused("there is no database")
        assert not (tmp_path / "out.db").exists()
        (tmp_path / "notes.txt").write_text("notes")
        answer = run("db", "merge", mine.path, "-o", tmp_path / "notes.txt")
        answer.is_refused("is not a database, so it is left unchanged")
        assert (tmp_path / "notes.txt").read_text() == "notes"


class TestClean:
    @pytest.fixture
    def mine(self, book, scale_toml):
        """The user's own database: this version and another one, two GPUs, an old session."""
        mine: Book = book("tuning.db")
        mine.put(1024, FAST, 10.0, SLOW, OTHER)
        mine.put(1024, FAST, 10.0, SLOW, gpu="a100")
        mine.put(1024, OTHER, 10.0, SLOW, template_hash="0" * 64)
        mine.put(512, SLOW, 10.0, OTHER)
        long_ago = (datetime.now(UTC) - timedelta(days=100)).isoformat()
        change_file(mine.path, f"UPDATE trials SET created_at = '{long_ago}' WHERE study_id = 4")
        return mine

    def test_two_versions_do_not_read_alike(self, mine, run):
        for words in (["list"], ["trials", "scale"]):
            shown = run(*words).out
            assert ["n=1024 float32 (study 1)" in shown, "n=1024 float32 (study 3)" in shown] == [True, True]
            assert "(study 2)" not in shown

    def test_a_dry_run_changes_nothing(self, mine, run):
        before = mine.trials()
        answer = run("db", "clean", "--older-than", "90d", "--keep-gpu", "h200", "--dry-run", "--json").document
        assert mine.trials() == before
        assert answer["dry_run"]
        assert [(study["problem"]["n"], study["trials"], study["reasons"]) for study in answer["studies"]] == [
            (1024, 2, ["other GPU"]),
            (512, 2, ["old"]),
        ]
        assert "would be deleted" in run("db", "clean", "--older-than", "90d", "--dry-run").out

    def test_old_trials_go_and_their_winner_where_it_is_meant(self, mine, run):
        count = len(mine.trials())
        assert run("db", "clean", "--older-than", "90d").code == 0
        assert (len(mine.trials()), mine.served(512)) == (count - 2, SLOW)
        assert run("db", "clean", "--older-than", "90d", "--winners").code == 0
        assert mine.served(512) is None
        assert mine.served(1024) == FAST
        with Database.open(mine.path) as database:
            assert len(database.studies()) == 3
            assert check_database(database).ok

    def test_other_gpus_but_not_by_a_slip_in_a_name_or_in_a_date(self, mine, run):
        before = mine.trials()
        run("db", "clean", "--keep-gpu", "h2000", "--winners").is_refused(
            "nearest: h200", "the database holds results of NVIDIA A100-SXM4-80GB, NVIDIA H200"
        )
        run("db", "clean", "--older-than", "2062-01-31").is_refused("lies in the future")
        assert mine.trials() == before
        answer = run("db", "clean", "--keep-gpu", "h200", "--winners", "--json").document
        assert [(study["device"], study["whole"]) for study in answer["studies"]] == [("NVIDIA A100-SXM4-80GB", True)]
        assert mine.served(1024, gpu="a100") is None

    def test_other_versions(self, mine, run, scale_toml, write_scale, monkeypatch):
        answer = run("db", "clean", "--stale")
        assert "nothing to delete" in answer.out
        said = "no result of scale is of a kernel that is found by this name"
        assert f"{said}; `autotile db clean path/to/mine.toml --stale`" in answer.err
        other = write_scale(scale_toml.parent / "other").with_suffix(".cu")
        monkeypatch.setenv("AUTOTILE_KERNELS", str(other.parent))
        code = other.read_text()
        other.write_text(code.replace("factor * x[i]", "x[i] * factor"))
        assert said in run("db", "clean", "--stale").err  # the kernel of this name may be another one
        other.write_text(code)
        assert "other version" in run("db", "clean", "--stale", "--dry-run").out
        answer = run("db", "clean", scale_toml, "--stale", "--json").document
        (study,) = answer["studies"]
        assert (study["reasons"], study["trials"], study["of"]) == (["other version"], 2, 3)
        assert (mine.served(1024, template_hash="0" * 64), mine.served(1024)) == (OTHER, FAST)

    def test_what_a_session_needs_that_is_under_way(self, mine, run):
        with Database.open(mine.path) as database:
            study = database.study(mine.key(64, "a100"), None)
            session = start_run(database, study, sampler="random")
            assert run("db", "clean", "--keep-gpu", "h200", "--winners").code == 0
            add_trial(database, study, session, timed(SLOW, 1.0))
            assert len(database.trials(study)) == 1

    def test_a_database_that_is_not_there(self, run):
        answer = run("db", "clean", "--older-than", "2026-01-31")
        assert answer.code == 0
        assert "nothing to delete" in answer.out
