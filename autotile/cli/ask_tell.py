"""``autotile tune --ask-tell``: a session that another program drives, by one JSON object a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import msgspec
import typer

from autotile.cli.output import NOTHING_FOUND, notice, print_line
from autotile.core.documents import Count, Finite, Name, convert, decode_json, encode_json
from autotile.core.model import Value
from autotile.errors import AutotileError, DataError, InputError, WorkerError

if TYPE_CHECKING:
    from autotile.api.tuning import TuningSession

MAX_LINE_BYTES = 1 << 20
_FORMAT = 1
_REQUESTS = ("ask", "evaluate", "tell", "finish")


class Told(msgspec.Struct, forbid_unknown_fields=True):
    """A time that was measured elsewhere; null where the configuration does not work."""

    config: dict[Name, Value]
    time_us: Finite | None


class AskTellLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of standard input, with one of ``ask``, ``evaluate``, ``tell`` and ``finish``.

    The answer repeats its ``id``.
    """

    id: int | Name | None = None
    ask: Count | None = None
    evaluate: list[dict[Name, Value]] | None = None
    tell: list[Told] | None = None
    finish: bool | None = None


def drive(tune: Callable[..., Any], places: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Call `autotile.tune` with the lines of standard input as the search; the last line of the answers is the result.

    The exit code is 1 if no configuration ran.
    """
    result = tune(*places, **arguments, search=serve, announce=notice)
    print_line(encode_json({"result": result.to_json()}))
    if result.winner is None:
        raise typer.Exit(NOTHING_FOUND)


def serve(session: TuningSession) -> None:
    """Answer each line of standard input by one line on standard output, until the input ends."""
    from autotile.api.tuning import MAX_ASKED
    from autotile.tuning.result import trial_entry

    best = session.best
    ready = {
        "format": _FORMAT,
        **session.problem.document(),
        "device": session.device.identity,
        "parameters": {name: list(values) for name, values in session.parameters.items()},
        "default": dict(session.default),
        "space": {"combinations": session.combinations, "valid": session.valid},
        "trials": len(session.trials),
        "best": trial_entry(best) if best is not None else None,
        "notices": list(session.notices),
    }
    try:
        _write({"ready": ready})
        for line in _lines(sys.stdin.buffer):
            answer: dict[str, Any] = {}
            try:
                if line is None:
                    raise DataError(f"the line has more than {MAX_LINE_BYTES} bytes; send fewer configurations in one")
                sent = decode_json(line, dict[str, Any])
                if isinstance(identity := sent.get("id"), int | str):
                    answer["id"] = identity
                request = convert(sent, AskTellLine)
                values = {name: getattr(request, name) for name in _REQUESTS}
                given = [name for name, value in values.items() if value is not None and value is not False]
                if len(given) != 1:
                    got = " and ".join(given) or "none"
                    raise DataError(f"expected one of {', '.join(_REQUESTS)} in a line, got {got}")
                if request.finish:
                    return
                if request.ask is not None:
                    answer["asked"] = [dict(config) for config in session.ask(request.ask)]
                elif (configs := request.evaluate) is not None:
                    if len(configs) > MAX_ASKED:
                        raise InputError(f"{len(configs)} configurations in a line, at most {MAX_ASKED} are accepted")
                    answer["trials"] = [trial_entry(trial) for trial in session.evaluate(configs)]
                else:
                    told = request.tell or []
                    session.tell_all((one.config, one.time_us) for one in told)
                    answer["told"] = len(told)
            except AutotileError as error:
                answer["error"] = {"kind": type(error).__name__, "message": str(error)}
                if isinstance(error, WorkerError):  # the device is at fault
                    _write(answer)
                    raise
            _write(answer)
    except BrokenPipeError:
        notice("the program that reads the answers has ended; the result is stored")


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of the input; None for one that is too long. Empty lines are left out."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
            yield None
        elif line.strip():
            yield line


def _write(answer: Mapping[str, Any]) -> None:
    if not print_line(encode_json(answer)):
        raise BrokenPipeError
