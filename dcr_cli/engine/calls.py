"""Requests to an engine's server, and what becomes of them: what may be sent twice is tried again, everything else is
sent once.

How one is sent is wire.py's matter; what is called, and in which order, routes.py's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcr_cli.checkpoint.json_text import load_json, plain_object
from dcr_cli.engine.wire import Answer, NoAnswerError, Request, exchange
from dcr_cli.errors import DamagedError, HookError, one_line
from dcr_cli.stopping import pause

# How long what takes an engine no time may take it, with all tries.
SHORT_SECONDS = 60.0
_TRIES, _WAIT_SECONDS = 4, 0.5
_PASSING = frozenset((408, 425, 429, 502, 503, 504))
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Server:
    """An engine's server. `what` names it in messages; `token` is shown to it and to nobody else."""

    what: str
    url: str
    token: str | None = field(default=None, repr=False)
    sleep: Callable[[float], None] = pause

    def get(self, path: str) -> dict[str, Any]:
        """Ask for a document, and again if that fails in passing. HookError if there is none."""
        return self._again(path, self._request("GET", path))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send what does no harm if it is sent twice, and again if it fails in passing; HookError if it fails.

        Whoever is interrupted while the engine does it is so when that is done.
        """
        return self._again(path, self._request("POST", path, body, is_waited_out=True))

    def post_once(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send something once, and wait so long for its answer. HookError if it fails, or nobody knows whether it
        has."""
        try:
            return self._send(path, self._request("POST", path, body), seconds)
        except _PassingError as error:
            raise self._failed(path, str(error)) from error

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, is_waited_out: bool = False
    ) -> Request:
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return Request(method, f"{self.url}{path}", headers, data, is_waited_out)

    def _again(self, path: str, request: Request) -> dict[str, Any]:
        end = time.monotonic() + SHORT_SECONDS
        for number in range(_TRIES):
            try:
                return self._send(path, request, end - time.monotonic())
            except _PassingError as error:
                if number + 1 == _TRIES or time.monotonic() > end:
                    raise self._failed(path, str(error)) from error
            self.sleep(_WAIT_SECONDS * 2**number)
        raise AssertionError

    def _send(self, path: str, request: Request, seconds: float) -> dict[str, Any]:
        try:
            answer = exchange(request, time.monotonic() + seconds)
        except TimeoutError as error:
            raise _PassingError(f"no answer within {round(seconds, 2):g} s") from error
        except NoAnswerError as error:
            raise _PassingError(str(error)) from error
        if answer.is_success:
            return self._decoded(path, answer)
        facts = f"HTTP {answer.status}: {_shown(answer)}"
        if answer.status in _PASSING:
            raise _PassingError(facts)
        raise self._failed(path, facts, code=answer.status)

    def _decoded(self, path: str, answer: Answer) -> dict[str, Any]:
        """The JSON object that is the answer; some routes answer with text alone, which is one without members."""
        try:
            document = load_json(answer.body, self.what, plain_object)
        except DamagedError:
            return {}
        if not isinstance(document, dict):
            raise self._failed(path, f"answered {_shown(answer)}, which is no object")
        return document

    def _failed(self, path: str, facts: str, *, code: int | None = None) -> CallError:
        return CallError(self.what, f"{path.partition('?')[0]} failed: {facts}", code)


class CallError(HookError):
    """A request that failed; `code` is the status that it was answered with, None without an answer."""

    def __init__(self, what: str, facts: str, code: int | None) -> None:
        super().__init__(what, facts)
        self.code = code


class _PassingError(Exception):
    """What may be different the next time."""


def _shown(answer: Answer) -> str:
    text = one_line(answer.body.decode(errors="replace").strip())
    return text[:_SHOWN_CHARACTERS] or "no text"
