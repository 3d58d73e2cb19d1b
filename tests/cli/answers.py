"""What a command printed, and its exit code."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    words: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        return json.loads(self.out)

    def is_refused(self, *said: str, kind: str = "") -> None:
        """Assert that the input was refused with a message, and that nothing else was printed.

        With ``--json``, standard output is one document with the message and the kind of the error, which is `kind` if
        that is given; otherwise it is empty.
        """
        assert self.code == 2, self
        for words in said:
            assert words in self.err
        assert "Traceback" not in self.err
        if "--json" not in self.words:
            assert self.out == ""
            return
        assert self.out.isascii()
        assert set(self.document) == {"error"}
        assert self.document["error"]["message"] in self.err
        assert self.document["error"]["kind"] == kind or (not kind and self.document["error"]["kind"].endswith("Error"))


Run = Callable[..., Answer]
"""A function that runs a command of the given words."""
