"""GPUs of one model compared: the scale of their times, the work of each, and the winner on a second one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotile.core.model import GPU_SCALE, STEP_TIME, Config, Measurement, Outcome, Trial, config_key, config_text
from autotile.core.statistics import Interval, median_interval, paired_ratio, widen_by_session_spread
from autotile.errors import AutotileError
from autotile.workers.jobs import Candidate, Check, Entry, Race, Reading

if TYPE_CHECKING:
    from autotile.tuning.backend import Backend
    from autotile.tuning.finals import Finals
    from autotile.tuning.scoring import Scorer

_ROUNDS = 30
"""Rounds of the race on the second GPU, at most; those of its two or three participants take a second."""
_MIN_ROUNDS = 9
_RACE_S = 1.0
_REPEATS = 20
_CHECK_S = 1.0
"""Repeats and seconds of the winner's verification there; it has passed the finals."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a GPU did in a session.

    Attributes
    ----------
    uuid
        UUID of the GPU; empty if it is not known.
    trials
        Number of candidates that it evaluated.
    busy_s
        Time for which it loaded, verified and measured, in seconds.
    scale
        Factor of its times to those of the GPU that holds the finals; None if it was not measured.
    lost
        Reason why it was given up; empty if it was not.
    """

    uuid: str
    trials: int
    busy_s: float
    scale: float | None = None
    lost: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "uuid": self.uuid,
            "trials": self.trials,
            "busy_s": round(self.busy_s, 3),
            "scale": self.scale,
            "lost": self.lost or None,
        }


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The winner of the finals on a second GPU of the same model.

    Attributes
    ----------
    gpu, home
        UUIDs of the second GPU and of the one that held the finals.
    time_us
        Time of the winner there, in microseconds, not rescaled.
    spread
        Relative excess over its time in the finals, 0.01 for 1 %.
    speedup
        Time of the default over that of the winner there; None where the default does not run.
    """

    gpu: str
    home: str
    time_us: float
    spread: float
    speedup: Interval | None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        ratio = self.speedup
        return {
            "gpu": self.gpu,
            "home": self.home,
            "time_us": self.time_us,
            "spread": round(self.spread, 5),
            "speedup": {"ratio": ratio.value, "interval": [ratio.low, ratio.high]} if ratio is not None else None,
        }


def confirm_finals(
    racing: Sequence[tuple[Trial, Candidate]],
    backend: Backend,
    *,
    default: Config,
    incumbent: Config | None,
    seed: int,
    hurried: bool,
    scorer: Scorer,
    observe: Callable[[float], None] = lambda _: None,
) -> tuple[Finals, Confirmation | None]:
    """Hold finals on one GPU, and confirm the winner on a second one, if the backend has several.

    A winner that is wrong on the second GPU is refused if another finalist is right there, and the finals are held
    again without it.

    Parameters
    ----------
    racing, backend, default, incumbent, seed, hurried, scorer, observe
        As for `autotile.tuning.finals.run_finals`.
    """
    from autotile.tuning.finals import run_finals

    left, refused = list(racing), list[Trial]()
    while True:
        finals = run_finals(
            left,
            backend,
            default=default,
            incumbent=incumbent,
            seed=seed,
            hurried=hurried,
            scorer=scorer,
            observe=observe,
        )
        spare = backend.spare() if finals.winner is not None and not hurried else None
        if spare is None or finals.winner is None:
            break
        candidates = {config_key(trial.config): candidate for trial, candidate in left}
        try:
            fault = _fault_on(spare, finals, candidates)
            if fault is None:
                confirmation = _confirmation(spare, finals, candidates, seed, backend.uuid)
                return replace(finals, refused=(*refused, *finals.refused)), confirmation
        except AutotileError as error:
            notice = f"the winner could not be confirmed on {spare.uuid or 'a second GPU'}: {error}"
            return replace(finals, refused=(*refused, *finals.refused), notices=(*finals.notices, notice)), None
        key = config_key(finals.winner.config)
        refused.append(
            replace(finals.winner, outcome=fault.outcome, reason=fault.reason, stage="finals", measurement=None)
        )
        left = [(trial, candidate) for trial, candidate in left if config_key(trial.config) != key]
    return replace(finals, refused=(*refused, *finals.refused)), None


def _fault_on(spare: Backend, finals: Finals, candidates: Mapping[str, Candidate]) -> Reading | None:
    """Return the fault of the winner on another GPU; None if it is right there.

    Raises
    ------
    WorkerError
        No other finalist is right there either, so that the GPU may be at fault.
    """
    found: Reading | None = None
    for trial in finals.ranked:
        reading = spare.check(Check((Entry(candidates[config_key(trial.config)]),), _REPEATS, _CHECK_S))
        if found is None and reading.outcome is Outcome.OK:
            return None
        if found is None:
            found = replace(reading, reason=f"on {spare.uuid or 'a second GPU'}: {reading.reason}")
        elif reading.outcome is Outcome.OK:
            return found
    raise AutotileError(f"no finalist is right there: {found.reason if found is not None else ''}")


def _confirmation(
    spare: Backend, finals: Finals, candidates: Mapping[str, Candidate], seed: int, home: str
) -> Confirmation | None:
    """Race the winner and the default on another GPU."""
    winner, default = finals.winner, finals.default
    assert winner is not None
    racing = [winner]
    if default is not None and config_key(default.config) != config_key(winner.config):
        racing.append(default)
    round_us = sum(trial.time_us or 0.0 for trial in racing)
    rounds = max(_MIN_ROUNDS, min(_ROUNDS, int(_RACE_S * 1e6 / max(round_us, 1.0))))
    entries = tuple(Entry(candidates[config_key(trial.config)]) for trial in racing)
    raced = spare.race(Race(entries, rounds, seed), 1e-6 * rounds * round_us)
    if raced is None or not winner.time_us:
        return None
    fault = next((row for row in raced if row.outcome is not Outcome.OK), None)
    if fault is not None:
        raise AutotileError(f"{config_text(winner.config)} or the default failed in the race: {fault.reason}")
    time_us = median_interval(raced[0].rounds_us).value
    speedup = None
    if len(raced) > 1:
        count = min(len(raced[0].rounds_us), len(raced[1].rounds_us))
        speedup = widen_by_session_spread(paired_ratio(raced[0].rounds_us[:count], raced[1].rounds_us[:count]))
    return Confirmation(spare.uuid, home, time_us, time_us / winner.time_us - 1.0, speedup)


def scaled(reading: Reading, scale: float | None) -> Reading:
    """Return a reading with its times multiplied by a factor, which its telemetry states; None for none."""
    measured = reading.measurement
    if measured is None or scale is None:
        return reading
    telemetry = {
        name: round(float(value) * scale, 3) if name.startswith(STEP_TIME) else value
        for name, value in reading.telemetry.items()
    }
    times = tuple(round(time_us * scale, 4) for time_us in measured.samples_us)
    measurement = Measurement(
        measured.time_us * scale, measured.low_us * scale, measured.high_us * scale, times, measured.l2
    )
    whole = round(scale * float(telemetry.get(GPU_SCALE, 1.0)), 6)  # that of a GPU to its session, of that to its study
    return replace(reading, measurement=measurement, telemetry={**telemetry, GPU_SCALE: whole})


def measured_on(gpu: str, trial: Trial) -> Trial:
    """Return a trial of finals, whose times are those of the GPU that held them."""
    telemetry = {name: value for name, value in trial.telemetry.items() if name != GPU_SCALE}
    return replace(trial, gpu=gpu, telemetry=telemetry)


def gpu_notices(uses: Sequence[GpuUse]) -> tuple[str, ...]:
    """Return a line for each GPU that was lost."""
    left = sum(not use.lost for use in uses)
    return tuple(
        f"{use.uuid or 'a GPU'} was given up, and its candidates went to the other {left}: {use.lost}"
        for use in uses
        if use.lost
    )
