"""JSON files of winners and of rules, such as those that ship with autotile in ``tuned/``.

A file of winners holds those of one GPU: its properties once, then one line for each tuned problem with the
configuration, its time and its resources. The files that ship let a user of such a GPU be served a good configuration
before tuning anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.documents import Format, attributes, convert, decode_json, encode_json, read_regular
from autotile.core.text import file_name
from autotile.database.keys import device_fields
from autotile.database.paths import write_output
from autotile.database.winners import StoredRule, StoredRuleDocument, Winner, WinnerDocument
from autotile.errors import DataError, InputError
from autotile.settings import data_folder

if TYPE_CHECKING:
    from autotile.database.learned import StoredModel
    from autotile.families.operation_model import OperationModel

_FORMAT = 1

_MAX_BYTES = 64 * 2**20
"""Maximum size of a file; those that ship have some ten kilobytes."""

_SAME_SPEED = {"float16": ("bfloat16",)}
"""Element types whose model serves another."""

Schema = TypeVar("Schema")


class WinnersFile(msgspec.Struct):
    """Schema of a file of winners, besides its format."""

    device: DeviceProperties
    winners: tuple[dict[str, Any], ...]
    """Of each, the key without the fields of the device, and the result."""


class RulesFile(msgspec.Struct):
    """Schema of a file of rules, besides its format."""

    rules: tuple[StoredRuleDocument, ...]


def shipped_winners(kernel: str, dtype: str) -> list[Winner]:
    """Return the winners of a kernel that ship with autotile, of all GPUs; an `InputError` if a file is damaged."""
    files = sorted(data_folder("tuned").glob("*.json"))
    found = (winner for path in files for winner in _known_winners(path))
    return [
        replace(winner, shipped=True) for winner in found if (winner.key.kernel, winner.key.dtype) == (kernel, dtype)
    ]


def shipped_rules(kernel: str, dtype: str) -> list[StoredRule]:
    """Return the rules of a kernel's families that ship with autotile, of all GPUs; errors as `shipped_winners`."""
    files = sorted((data_folder("tuned") / "families").glob(f"*.{escape(kernel)}.json"))
    found = (rule for path in files for rule in read_rules(path))
    return [replace(rule, shipped=True) for rule in found if (rule.key.kernel, rule.key.dtype) == (kernel, dtype)]


@lru_cache
def shipped_model(operation: str, dtype: str, device: DeviceProperties) -> OperationModel | None:
    """Return the model of times of an operation that ships with autotile for a GPU; None if there is none.

    Without one for the GPU, that of a GPU with as many of the same SMs serves it; without one for float16, that for
    bfloat16: the kernels run at the same speed, the libraries nearly. Raise `InputError` if the file is damaged.
    """
    folder = data_folder("tuned") / "models"
    for known in (dtype, *_SAME_SPEED.get(dtype, ())):
        paths = [folder / _model_file(device.name, operation, known)]
        if not paths[0].is_file():
            others = sorted(folder.glob(f"*.{escape(operation)}.{known}.json"))
            paths = [path for path in others if _has_same_sms(path.name.partition(".")[0], device)]
        if paths:
            from autotile.families.operation_model import OperationModel

            with _reading(paths[0], "model", "a model"):
                return OperationModel.from_json(decode_json(read_regular(paths[0], _MAX_BYTES), dict))
    return None


def shipped_models(operation: str, dtype: str) -> Iterator[tuple[OperationModel, DeviceProperties]]:
    """Yield the models of an operation that ship with autotile, each with the GPU that it is of."""
    for path in sorted((data_folder("tuned") / "models").glob(f"*.{escape(operation)}.{dtype}.json")):
        device = device_profile(path.name.partition(".")[0])
        if (model := shipped_model(operation, dtype, device)) is not None:
            yield model, device


def _has_same_sms(name: str, device: DeviceProperties) -> bool:
    names = ("compute_capability", "sm_count", "smem_per_sm_bytes")
    with suppress(InputError):
        return attributes(device_profile(name), *names) == attributes(device, *names)
    return False


def write_models(folder: Path, models: Iterable[StoredModel]) -> list[Path]:
    """Write models to a folder, each under the name by which `shipped_model` finds it, and return their paths.

    Raise `InputError` if a file cannot be written, a model is damaged, or an earlier version learned it from
    configurations that were not verified at ragged sizes.
    """
    from autotile.families.operation_model import OperationModel

    written = []
    for model in models:
        path = folder / _model_file(model.gpu_name, model.operation, model.dtype)
        try:
            learned = OperationModel.from_json(model.model)
        except DataError as error:
            raise InputError(f"the model of {model.operation} in the database is damaged: {error}") from None
        if not learned.verified:
            raise InputError(
                f"the model of {model.operation} was learned by an earlier version, which verified configurations only "
                f"at the measured sizes; tune its family again, such as SIZE=1..8192"
            )
        write_output(path, encode_json(learned.to_json()) + "\n", content="model", follow_link=False)
        written.append(path)
    return written


def _model_file(gpu_name: str, operation: str, dtype: str) -> str:
    return file_name(gpu_name.lower(), operation, dtype, separator=".", suffix=".json")


def read_winners(path: Path) -> list[Winner]:
    """Read a file of winners; an `InputError` if it cannot be read, is damaged, or is of a newer autotile."""
    document = _read(path, "winners", WinnersFile)
    of_device = device_fields(document.device)
    entries = ({**one, "key": {**one, **of_device}, "device": None, "shipped": False} for one in document.winners)
    with _reading(path, "winners", "winners"):
        return [replace(convert(one, WinnerDocument).winner(), device=document.device) for one in entries]


_known_winners = lru_cache(read_winners)


def write_winners(path: Path, winners: Iterable[Winner]) -> int:
    """Write winners of one GPU, sorted by kernel, dtype and sizes, and return their number.

    Raise `InputError` if the winners are of several GPUs or of an unknown one, or the file cannot be written.
    """
    ordered = sorted(winners, key=lambda w: (w.key.kernel, w.key.dtype, *w.key.sizes.values()))
    devices = {winner.device for winner in ordered}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        raise InputError(f"a file of winners holds those of one known GPU; got {len(devices)} GPUs")
    of_device = device_fields(device)
    keys = [{n: v for n, v in winner.key.to_json().items() if n not in of_device} for winner in ordered]
    lines = ",\n".join(encode_json(key | winner.result_to_json()) for key, winner in zip(keys, ordered, strict=True))
    head = encode_json({"format": _FORMAT, "device": device.to_json()}, indent=1)[:-2]
    text = f'{head},\n "winners": [\n{lines}\n ]\n}}\n'
    write_output(path, text, content="winners")
    return len(ordered)


@lru_cache
def read_rules(path: Path) -> tuple[StoredRule, ...]:
    """Read a file of rules, once a process; errors as `read_winners`."""
    document = _read(path, "rules", RulesFile)
    with _reading(path, "rules", "rules"):
        return tuple(entry.stored_rule() for entry in document.rules)


def write_rules(path: Path, rules: Iterable[StoredRule]) -> int:
    """Write a file of rules, and return their number; an `InputError` if the file cannot be written."""
    entries = [rule.to_json() for rule in rules]
    write_output(path, encode_json({"format": _FORMAT, "rules": entries}, indent=1) + "\n", content="rules")
    return len(entries)


def _read(path: Path, content: str, schema: type[Schema]) -> Schema:
    """Read a JSON file of a known ``format``; ``content`` names what the file holds, for messages."""
    with _reading(path, content, content):
        text = read_regular(path, _MAX_BYTES)
        found = decode_json(text, Format).format
        if found == _FORMAT:
            return decode_json(text, schema)
    raise DataError(f"{path} has format {found!r:.40}, this version of autotile reads {_FORMAT}: upgrade autotile")


@contextmanager
def _reading(path: Path, content: str, kind: str) -> Iterator[None]:
    """Name the content of a file in the error that it cannot be read, and the kind of file in that it is damaged."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read the {content} in {path}: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path} is not a file of {kind}: {error}; fetch it again or delete it") from None
