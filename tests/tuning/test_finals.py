import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_calls import GivenGpu, raced
from judges import failed, timed

from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Config, Outcome, Trial, config_key
from autotile.tuning.finals import FinalRules, Finals, choose_finalists, run_finals
from autotile.workers.jobs import Candidate, Check, Race, Reading
from autotile.workers.sanitizer import Finding

A, B, C, D = ({"TILE": tile} for tile in (1, 2, 3, 4))
FINALS = import_module("autotile.tuning.finals")
slept_s = list[float]()
time = SimpleNamespace(perf_counter=lambda: math.fsum(slept_s), sleep=slept_s.append)
"""The clock of the finals, which only what takes time here moves."""


@pytest.fixture(autouse=True)
def _given_clock(monkeypatch):
    monkeypatch.setattr(FINALS, "time", time)


@dataclass
class Racer(GivenGpu):
    """Backend with given times for the race; None where no race is possible."""

    times_us: dict[int, Sequence[float]] | None
    faulty: Sequence[Config] = ()
    findings: Sequence[Finding] = ()
    wrong_when_timed: Sequence[Config] = ()
    breaks_race: Sequence[Config] = ()
    takes_s: float = 0.0
    fails_after_s: float = 0.0

    def __post_init__(self) -> None:
        self.rounds = self.races = self.repeats = self.seed = 0
        self.precision = 0.0
        self.verified: list[Config] = []
        self.limits_s: list[float | None] = []
        self.digests: dict[object, str] = {}

    def check(self, job: Check) -> Reading:
        (entry,) = job.entries
        candidate, repeats, limit_s = entry.candidate, job.repeats, job.limit_s
        self.seed = self.seed or job.seed
        assert self.seed, "a second set of inputs is asked for at the first verification"
        self.repeats = max(self.repeats, repeats)  # those of the winner
        self.verified.append(candidate.config)
        self.limits_s.append(limit_s)
        if candidate.config in (*self.faulty, *self.breaks_race):
            time.sleep(self.fails_after_s)
            return Reading(Outcome.WRONG_RESULT, "sometimes", "verify")
        done = repeats if limit_s is None or not self.takes_s else int(min(1.0, limit_s / self.takes_s) * repeats)
        time.sleep(self.takes_s * done / repeats)
        digest = self.digests.get(candidate.config["TILE"])
        found = {OUTPUT_DIGEST: digest} if digest else {}
        return Reading(Outcome.OK, stage="verify", telemetry={"repeats": done, **found})

    sanitizer = property(lambda self: self)

    def check_all(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        return [list(self.findings) if candidate.config == A else [] for candidate in candidates]

    def race(self, job: Race) -> list[Reading]:
        self.rounds, self.precision = job.rounds, job.precision
        self.races += 1
        candidates = [one.candidate for one in job.entries if one.candidate is not None]
        if self.times_us is None or any(c.config in self.breaks_race for c in candidates):
            return []
        wrong = [Outcome.WRONG_RESULT if c.config in self.wrong_when_timed else Outcome.OK for c in candidates]
        return [
            raced(self.times_us[int(c.config["TILE"])], outcome) for c, outcome in zip(candidates, wrong, strict=True)
        ]


def configs_of(trials: Sequence[Trial]) -> list[Config]:
    return [trial.config for trial in trials]


def by_tile(configs: Sequence[Config]) -> list[Trial]:
    """Return trials whose times in microseconds are their tiles."""
    return [timed(config, float(config["TILE"])) for config in configs]


def hold(
    finalists: list[Trial], racer: Racer, default: Config = D, incumbent: Config | None = None, **given: Any
) -> Finals:
    racing = [(trial, Candidate(trial.config, f"{trial.config}.cubin")) for trial in finalists]
    rules = FinalRules(default, incumbent, **given)
    return run_finals(racing, racer, rules)


@pytest.mark.parametrize(
    ("trials", "incumbent", "count", "expected"),
    [
        ([timed(A, 3.0), timed(B, 1.0), timed(C, 2.0), timed(D, 9.0)], None, 2, [B, C, D]),  # and the default
        ([timed(A, 3.0), timed(B, 1.0), timed(C, 2.0), timed(D, 9.0)], A, 1, [B, A, D]),  # the incumbent runs again
        # a pruned default is invited, but no other pruned one
        ([timed(A, 3.0), timed(B, 4.0, Outcome.PRUNED), timed(D, 9.0, Outcome.PRUNED)], None, 12, [A, D]),
        ([failed(D, Outcome.WRONG_RESULT), timed(A, 3.0), failed(B, Outcome.CRASHED)], B, 12, [A]),
        ([failed(D, Outcome.CRASHED)], None, 12, []),
    ],
)
def test_finalists_are_chosen(trials, incumbent, count, expected):
    assert configs_of(choose_finalists(trials, FinalRules(D, incumbent), count)) == expected


@pytest.mark.parametrize(
    ("limit_s", "expected"), [(10.0, [A, B, C, D]), (math.inf, [A, B, C, D]), (1.0, [A, B, D]), (0.1, [A, B, D])]
)
def test_those_who_cannot_race_in_time_stay_out(limit_s, expected):
    trials = [timed(A, 10_000.0), timed(B, 11_000.0), timed(C, 12_000.0), timed(D, 13_000.0)]
    assert configs_of(choose_finalists(trials, FinalRules(D, limit_s=limit_s), 12)) == expected


class TestRace:
    def test_paired_times_decide_whatever_the_search_measured(self):
        drift = [1.0 + 0.05 * i for i in range(9)]
        racer = Racer({1: [10 * d for d in drift], 2: [9.9 * d for d in drift], 4: [20 * d for d in drift]})
        finals = hold(by_tile([A, B, D]), racer)
        assert (configs_of(finals.ranked), finals.ties) == ([B, A, D], ())
        assert finals.speedup.value == pytest.approx(20 / 9.9)
        assert finals.default.time_us == pytest.approx(24.0)
        assert (finals.winner.stage, len(finals.winner.measurement.samples_us)) == ("finals", 9)

    @pytest.mark.parametrize(("incumbent", "winner", "tie", "best_us"), [(None, A, B, 10.4), (B, B, A, 10.5)])
    def test_what_cannot_be_told_apart_is_a_tie_which_the_incumbent_wins(self, incumbent, winner, tie, best_us):
        racer = Racer({1: [10, 11, 10, 11, 10, 11, 10, 11, 10.4], 2: [10.5] * 9, 4: [20] * 9})
        finals = hold(by_tile([A, B, D]), racer, incumbent=incumbent)
        assert (finals.winner.config, finals.ties) == (winner, (tie,))
        assert finals.speedup.value == pytest.approx(20 / best_us)

    def test_a_slower_incumbent_loses_and_the_default_may_win(self):
        racer = Racer({1: [10.0] * 9, 2: [10.5] * 9, 4: [20.0] * 9})
        assert hold(by_tile([A, B, D]), racer, incumbent=B).winner.config == A
        finals = hold(by_tile([A, D]), Racer({1: [10.0] * 9, 4: [5.0] * 9}))
        assert (finals.winner.config, finals.speedup.low, finals.speedup.high) == (D, 1.0, 1.0)
        # a pruned one that ran the race is measured for good
        finals = hold([timed(A, 1.0), timed(D, 3.0, Outcome.PRUNED)], Racer({1: [10.0] * 9, 4: [20.0] * 9}))
        assert finals.default.outcome is Outcome.OK

    def test_one_finalist_needs_no_race(self):
        finals = hold([timed(A, 1.0)], racer := Racer({}))
        assert (finals.winner.config, finals.default, finals.speedup) == (A, None, None)
        assert (finals.ties, racer.rounds) == ((), 0)

    @pytest.mark.parametrize(
        ("time_us", "limit_s", "rounds"),
        [(10.0, math.inf, 60), (30_000.0, math.inf, 50), (2e6, math.inf, 9), (10_000.0, 1.0, 15)],
    )
    def test_long_kernels_run_fewer_rounds(self, time_us, limit_s, rounds):
        racer = Racer(None)
        hold([timed(A, time_us), timed(B, time_us)], racer, limit_s=limit_s, precision=0.01)
        assert (racer.precision, racer.rounds) == (0.01, rounds)


def test_without_a_race_recorded_intervals_decide_and_the_incumbent_stays_among_ties():
    """In replay, and if the worker died during the race."""
    trials = [timed(A, 10.0), timed(B, 10.1), timed(C, 11.0), timed(D, 20.0)]
    finals = hold(trials, Racer(None))
    assert (configs_of(finals.ranked), finals.ties, finals.speedup.value) == ([A, B, C, D], (B,), 2.0)
    assert finals.speedup.low < 2.0 < finals.speedup.high
    assert hold(trials[:2], Racer(None), incumbent=B).winner.config == B
    assert hold([trials[0], trials[2]], Racer(None), incumbent=C).winner.config == A


TIMES_US = {1: [1.0] * 9, 2: [2.0] * 9, 3: [2.0] * 9, 4: [4.0] * 9}
SOMETIMES, WHEN_TIMED = (Outcome.WRONG_RESULT, "sometimes", "verify"), (Outcome.WRONG_RESULT, "", "finals")
RACE, ASTRAY = Finding("racecheck", "failed", "found"), Finding("memcheck", "failed", "found")
UNCHECKED = Finding("initcheck", "unchecked", "no time")


class TestChecks:
    @pytest.mark.parametrize(
        ("finalists", "fault", "incumbent", "ranked", "ties", "found"),
        [
            ([A, B, C, D], {"faulty": [A]}, None, [B, C, D], (C,), SOMETIMES),
            ([B, C], {"faulty": [C]}, C, [B], (), SOMETIMES),
            ([A, D], {"faulty": [A, D]}, None, [], (), SOMETIMES),
            ([B, C, D], {"faulty": [C]}, None, [B, D], (), SOMETIMES),  # a tie
            ([A, B, C, D], {"faulty": [D]}, None, [A, B, C], (), SOMETIMES),  # the default
            # in a timed launch, after all rounds or before any
            ([A, B, D], {"wrong_when_timed": [A]}, None, [B, D], (), WHEN_TIMED),
            ([A, B, D], {"wrong_when_timed": [A], "times_us": {**TIMES_US, 1: []}}, A, [B, D], (), WHEN_TIMED),
            # by the sanitizer
            (
                [A, D],
                {"findings": [RACE, UNCHECKED]},
                None,
                [D],
                (),
                (Outcome.WRONG_RESULT, "racecheck: found", "sanitize"),
            ),
            ([A, D], {"findings": [ASTRAY]}, None, [D], (), (Outcome.OUT_OF_BOUNDS, "memcheck: found", "sanitize")),
        ],
    )
    def test_what_is_faulty_is_refused_and_the_next_one_wins(self, *, finalists, fault, incumbent, ranked, ties, found):
        racer = Racer(**{"times_us": TIMES_US, **fault})
        finals = hold(by_tile(finalists), racer, incumbent=incumbent)
        assert (configs_of(finals.ranked), finals.ties) == (ranked, ties)
        refused = [(one.config, (one.outcome, one.reason, one.stage), one.measurement) for one in finals.refused]
        assert refused == [(config, found, None) for config in finalists if config not in ranked]
        assert all((config in racer.verified) is (found == SOMETIMES) for config, *_ in refused)
        not_made = "1 of the sanitizer's checks was not made; no time"
        assert finals.notices == (not_made,) * (UNCHECKED in racer.findings)
        assert len({*map(config_key, racer.verified)}) == len(racer.verified)
        assert (finals.speedup is None, finals.default is None) == (D not in ranked, D not in ranked)
        if finals.speedup is not None:
            assert finals.speedup.value == 4.0 / TIMES_US[ranked[0]["TILE"]][0]

    def test_the_digest_of_all_repeats_is_kept(self):
        racer = Racer(TIMES_US)
        racer.digests = {1: VARYING_OUTPUTS, 2: "in:out"}
        stored = {OUTPUT_DIGEST: "in:out", "power_w": 5}
        trials = [replace(timed(config, 1.0), telemetry=stored) for config in (A, B, C)]
        finals = hold(trials, racer)
        found = {trial.config["TILE"]: trial.telemetry for trial in finals.ranked}
        assert found[1] == {OUTPUT_DIGEST: VARYING_OUTPUTS, "power_w": 5}
        assert found[2] == found[3] == stored

    def test_a_finalist_that_breaks_the_race_is_found_and_the_others_race_again(self):
        racer = Racer(TIMES_US, breaks_race=[A])
        finals = hold([timed(A, 1.0), timed(B, 9.0), timed(C, 3.0), timed(D, 4.0)], racer)
        assert (racer.races, configs_of(finals.refused)) == (2, [A])
        assert (finals.winner.config, finals.winner.time_us) == (B, 2.0)
        assert sorted(t["TILE"] for t in racer.verified) == [1, 2, 3, 4]

    def test_a_tie_that_could_not_be_verified_as_often_is_none(self, monkeypatch):
        monkeypatch.setattr(FINALS, "_MIN_CHECK_S", 0.01)
        times = {tile: [2.0] * 9 for tile in (1, 2, 3, 4)}
        finals = hold([timed(c, 2.0) for c in (A, B, C, D)], Racer(times, takes_s=0.03), limit_s=0.07)
        assert (finals.ties, len(finals.ranked)) == ((B,), 4)
        said = "2 configurations as fast as the winner, not listed as ties, could not be verified as often within"
        assert finals.notices == (f"{said} 0.07 s",)

    def test_after_an_interrupt_the_race_takes_no_time_from_the_checks(self, monkeypatch):
        monkeypatch.setattr(FINALS, "_HURRIED_CHECKS_S", 0.1)
        racer = Racer({tile: [2.0] * 9 for tile in (1, 2, 4)})
        monkeypatch.setattr(racer, "race", lambda job, race=racer.race: time.sleep(0.15) or race(job))
        assert hold([timed(c, 2.0) for c in (A, B, D)], racer, hurried=True).ties == (B, D)

    def test_a_new_winner_gets_all_repeats(self, monkeypatch):
        monkeypatch.setattr(FINALS, "_MIN_CHECK_S", 0.01)
        racer = Racer({1: [1.0] * 9, 2: [1.0] * 9, 4: [4.0] * 9}, wrong_when_timed=[A], takes_s=0.02)
        assert hold([timed(A, 1.0), timed(B, 1.0), timed(D, 4.0)], racer, limit_s=0.01).winner.config == B
        assert racer.limits_s[racer.verified.index(B)] is None

    def test_the_winner_is_verified_often_enough_to_find_one_fault_in_fifty(self):
        racer, hurried = Racer(TIMES_US), Racer(TIMES_US)
        hold(by_tile([A, D]), racer)
        hold(by_tile([A, D]), hurried, hurried=True)
        assert 1 - 0.98 ** (2 * racer.repeats) > 0.95
        assert hurried.repeats == 10

    def test_equal_values_of_other_types_are_of_other_configurations(self):
        other = {"TILE": 1.0}
        finals = hold([timed(A, 1.0), timed(other, 1.0)], Racer(TIMES_US), default=other, incumbent=other)
        assert {config_key(finals.default.config), config_key(finals.winner.config)} == {config_key(other)}


def family(stages: Sequence[int]) -> list[Config]:
    """Return configurations, fastest first; those of equal ``STAGES`` are alike."""
    return [{"TILE": place, "WIDTH": 8 * place, "STAGES": value} for place, value in enumerate(stages, start=1)]


class TestFaultyFamily:
    """Finalists that share a fault, which shows late."""

    @staticmethod
    def times_us(configs: Sequence[Config]) -> dict[int, Sequence[float]]:
        return {int(one["TILE"]): [float(one["TILE"])] * 9 for one in configs}

    def test_the_fault_is_looked_for_in_those_that_are_alike_first(self):
        configs = family([4, 2, 3, 2, 4, 4])
        faulty = [one for one in configs if one["STAGES"] == 4]
        racer = Racer(self.times_us(configs), faulty=faulty)
        finals = hold(by_tile(configs), racer, default=configs[3])
        assert racer.verified[:3] == configs_of(finals.refused) == faulty
        assert finals.winner.config == configs[1]

    @pytest.mark.parametrize("kind", ["faulty", "breaks_race"])
    def test_faulty_finalists_share_one_limit_of_time(self, monkeypatch, kind):
        monkeypatch.setattr(FINALS, "_FAULTS_S", 0.1)
        configs = family([4] * 10 + [2, 3])
        racer = Racer(self.times_us(configs), fails_after_s=0.04, **{kind: configs[:10]})
        finals = hold(by_tile(configs), racer, default=configs[11])
        assert configs_of(finals.ranked) == configs[10:]
        assert finals.speedup is not None
        assert len(finals.refused) < 6
        assert len(set(map(str, racer.verified))) < 8
        (notice,) = finals.notices
        assert notice.startswith(f"{10 - len(finals.refused)} finalists were not verified, and not ranked")

    def test_all_are_tried_until_one_is_right(self, monkeypatch):
        monkeypatch.setattr(FINALS, "_FAULTS_S", 0.0)
        configs = family([4] * 6)
        racer = Racer(self.times_us(configs), faulty=configs[:5], fails_after_s=0.001)
        finals = hold(by_tile(configs), racer)
        assert configs_of(finals.ranked) == configs[5:]
        racer = Racer(self.times_us(configs), faulty=configs, fails_after_s=0.001)
        assert hold(by_tile(configs), racer).winner is None

    def test_the_time_left_counts_the_faults_to_come(self):
        configs = family([4, 4, 4, 2])
        times_us, right, wrong = self.times_us(configs), list[float](), list[float]()
        hold(by_tile(configs), Racer(times_us, takes_s=0.002), observe=right.append)
        hold(by_tile(configs), Racer(times_us, faulty=configs[:3], fails_after_s=0.125), observe=wrong.append)
        assert wrong[0] >= 0.375  # three more like the first
        assert wrong[0] > max(right)
        assert wrong[0] > wrong[1] > wrong[2]
        assert right[-1] == wrong[-1] == 0.0
