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
    "source": "source",
}


def explain(problem: Problem, device: DeviceProperties, choice: Choice) -> str:
    """A short paragraph about a choice."""
    served = f"{problem} on {device.name} is served {config_text(choice.config)}."
    sentences = [served, _reason(choice)]
    if choice.measurement is not None:
        time = choice.measurement
        sentences.append(
            f"It took {time.time_us:.4g} us (95 % interval {time.low_us:.4g} to {time.high_us:.4g}, {time.l2} L2)"
            f"{_when(choice.tuned_at)}."
        )
    if choice.source == "replayed":
        sentences.append("The time was replayed from a recording, not measured on this machine.")
    return " ".join(sentences)


def _reason(choice: Choice) -> str:
    if choice.tier == "default":
        return "Nothing is tuned that may be served for it, so this is the default configuration; run `autotile tune`."
    differences = "; ".join(f"{_NAMES[name]} {tuned} instead of {asked}" for name, tuned, asked in choice.differences)
    match choice.tier:
        case "exact":
            return "It was tuned for exactly this problem on this GPU."
        case "nearest":
            return f"It is the nearest that was tuned on this GPU: {differences}. Rules and limits hold here too."
        case _:
            return f"It was tuned elsewhere: {differences}. Rules and limits hold here too."


def _when(tuned_at: datetime | None) -> str:
    if tuned_at is None:
        return ""
    days = (datetime.now(UTC) - tuned_at).days
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return f" when tuned {age}"
