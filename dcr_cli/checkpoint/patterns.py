"""Skip patterns (FORMAT 2): which paths they match.

What is left out for it is its users' business.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import NOT_SET, UsageError

# Of all patterns of a delta together.
MAX_PATTERNS_BYTES = 16_384
# A bracket that is first in a set, or first after its `!`, does not end it.
_SET = re.compile(r"\[!?+\]?+[^\]]*\]")
# For so many characters it is kept what they match; more differ only in what is hostile.
_KEPT_CHARACTERS = 512


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise UsageError about a pattern that cannot be meant, or that no delta can tell of."""
    for pattern in patterns:
        if not pattern:
            raise UsageError("--skip", "an empty pattern matches no file", hint=NOT_SET)
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            facts = f"the pattern {shown(pattern)} is not UTF-8"
            raise UsageError("--skip", facts, hint="write ? for what is not") from error


def check_recorded_patterns(patterns: Sequence[str]) -> None:
    """Raise UsageError as check_patterns does, and about more of them than a delta can tell of."""
    check_patterns(patterns)
    total = sum(len(pattern.encode()) for pattern in patterns)
    if total > MAX_PATTERNS_BYTES:
        facts = f"all patterns together have {total} bytes, at most {MAX_PATTERNS_BYTES} are allowed"
        raise UsageError("--skip", facts, hint="use fewer patterns, with * for what names have in common")


class Patterns:
    """Shell patterns, matched together: one step for each character of a path, whatever the patterns are.

    A state of the match is a number with a bit for every place in a pattern, before each of its parts and at its end,
    that what was read so far may lead to.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._starts = self._stars = self._ends = self._any = 0
        self._literals: dict[str, int] = {}
        self._sets: dict[str, int] = {}
        self._known: dict[str, int] = {}
        place = 1
        for pattern in patterns:
            self._starts |= place
            for part in _parts(pattern):
                if part == "*":
                    self._stars |= place
                    continue
                if part == "?":
                    self._any |= place
                elif len(part) > 1:
                    self._sets[part] = self._sets.get(part, 0) | place
                else:
                    self._literals[part] = self._literals.get(part, 0) | place
                place <<= 1
            self._ends |= place
            place <<= 1

    def match(self, path: str) -> bool:
        """Whether a pattern matches the relative path or a folder above it, with or without its last slash."""
        places = self._starts
        for character in path:
            is_folder = character == "/"
            if is_folder and places & self._ends:
                return True
            places = (places & self._places_before(character)) << 1 | (places & self._stars)
            if not places:
                return False
            if is_folder and places & self._ends:
                return True
        return bool(places & self._ends)

    def _places_before(self, character: str) -> int:
        """The places whose next part matches a character."""
        places = self._known.get(character)
        if places is None:
            places = self._any | self._literals.get(character, 0)
            for part, its_places in self._sets.items():
                if fnmatch.fnmatchcase(character, part):
                    places |= its_places
            if len(self._known) < _KEPT_CHARACTERS:
                self._known[character] = places
        return places


def _parts(pattern: str) -> Iterator[str]:
    """Cut a pattern into `*`, `?`, sets and single characters."""
    at = 0
    while at < len(pattern):
        found = _SET.match(pattern, at)
        yield found[0] if found is not None else pattern[at]
        at += len(found[0]) if found is not None else 1
