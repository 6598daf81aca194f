"""Commands run in this process, and what they print."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


Run = Callable[..., Ran]


def is_failure(ran: Ran, code: int, message: str, hint: str = "") -> bool:
    """One line `dcr: what: facts`, perhaps one hint, nothing on standard output."""
    lines = ran.err.splitlines()
    assert ran.code == code and ran.out == "", ran
    assert re.fullmatch(r"dcr: .+: .+", lines[0]) and message in lines[0], ran.err
    assert len(lines) <= 2 and all(line.startswith("hint: ") for line in lines[1:]), ran.err
    assert hint in "".join(lines[1:]), ran.err
    return True
