"""An answer other than success, in the relay's own words; nothing that a parent said is in it."""

from __future__ import annotations

from http import HTTPStatus

# What all answers have that no cache is to keep.
PLAIN = {"Cache-Control": "no-store", "Server": "dcr"}


class AnswerError(Exception):
    """Ends a request with a status other than success."""

    def __init__(self, status: HTTPStatus, words: str, **headers: str) -> None:
        self.status = status
        self.words = words
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(words)


def no_such_object() -> AnswerError:
    """The answer that a key has nothing."""
    return AnswerError(HTTPStatus.NOT_FOUND, "there is no such object")
