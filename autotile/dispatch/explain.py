"""Say in a short paragraph what is served and why."""

from __future__ import annotations

from datetime import UTC, datetime

from autotile.dispatch.choose import Choice
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem, config_text

_NAMES = {
    "sizes": "sizes",
    "gpu_name": "GPU",
    "sm_count": "number of SMs",
    "nvrtc_version": "NVRTC version",
    "l2_mode": "L2 mode",
}
"""What is told of each difference; that a time was replayed is told in a sentence of its own."""


def explain(problem: Problem, device: DeviceProperties, choice: Choice) -> str:
    """A short paragraph about a choice."""
    served = f"{problem} on {device.name} is served {config_text(choice.config)}."
    sentences = [served, _reason(choice)]
    if choice.measurement is not None:
        time = choice.measurement
        took = "It took" if choice.tier == "exact" else _where(choice)
        interval = f"{_digits(time.low_us)} to {_digits(time.high_us)}"
        sentences.append(
            f"{took} {_digits(time.time_us)} us (95 % interval {interval}, {time.l2} L2){_when(choice.tuned_at)}."
        )
    if choice.aged:
        sentences.append(
            f"It has aged ({'; '.join(choice.aged)}); `autotile verify {problem.kernel}` measures it again."
        )
    if choice.packed:
        sentences.append(f"It comes from the bundle {choice.packed}.")
    if choice.shipped:
        sentences.append("The result came with autotile; tuning here may find a better one.")
    if choice.source == "replayed":
        sentences.append("The time was replayed from a recording, not measured on this machine.")
    if choice.unread:
        sentences.append(f"Your own results could not be read: {choice.unread}.")
    return " ".join(sentences)


def _reason(choice: Choice) -> str:
    if choice.tier == "default":
        return "Nothing is tuned that may be served for it, so this is the default configuration; run `autotile tune`."
    told = [(_NAMES[name], tuned, asked) for name, tuned, asked in choice.differences if name in _NAMES]
    differences = "; ".join(f"{name} {tuned} instead of {asked}" for name, tuned, asked in told)
    if choice.tier == "exact":
        return "It was tuned for exactly this problem on this GPU."
    if choice.tier == "family":
        return f"A rule chose it for the family {choice.rule}. Rules and limits hold here too."
    if not differences:
        return "It was tuned from a recording of this GPU, not on the GPU itself."
    how = "is the nearest that was tuned on this GPU" if choice.tier == "nearest" else "was tuned elsewhere"
    return f"It {how}: {differences}. Rules and limits hold here too."


def _where(choice: Choice) -> str:
    if choice.tier != "family" or choice.tuned_sizes is None:
        return "There it took"
    sizes = " ".join(f"{name}={value}" for name, value in choice.tuned_sizes.items())
    return f"At {sizes}, the nearest problem where it was timed, it took"


def _digits(time_us: float) -> str:
    """Four significant digits, all of those in front of the point, and no exponent."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _when(tuned_at: datetime | None) -> str:
    if tuned_at is None:
        return ""
    days = (datetime.now(UTC) - tuned_at).days
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return f" when tuned {age}"
