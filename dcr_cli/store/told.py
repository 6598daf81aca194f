"""What the XML of an object store's error says: its code, and its message where nothing in that can be a secret.

Such bodies repeat keys, signatures, tokens and what was signed, so nothing is passed on but plain words.
"""

from __future__ import annotations

import html
import re

_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,1000})</Message>")
# No key, digest or address is like that: a word of letters, or a small number, with a sentence's signs around it.
_PLAIN = re.compile(r"[('\"]*(?:[A-Za-z]{1,20}(?:['-][A-Za-z]{1,20})?|\d{1,6})[)'\".,;:!?]*|-")
_MOST_CHARACTERS = 200


def code_in(text: str) -> str:
    """The code of the error that a text holds; empty if there is none."""
    found = _CODE.search(text)
    return found[1] if found else ""


def told_in(text: str) -> str:
    """The code of the error that a text holds, and behind it the message where all of that may be shown."""
    code, found = code_in(text), _MESSAGE.search(text)
    # Azure's goes on with lines of its own about the request.
    message = plain_words(html.unescape(found[1])) if found else ""
    return f"{code}: {message}" if code and message else code


def plain_words(text: str) -> str:
    """The first line of a text, if it is short and nothing but plain words; else nothing."""
    lines = text.strip().splitlines()
    words = lines[0].split() if lines else []
    message = " ".join(words).rstrip(".")
    is_plain = len(message) <= _MOST_CHARACTERS and all(_PLAIN.fullmatch(word) for word in words)
    return message if is_plain else ""
