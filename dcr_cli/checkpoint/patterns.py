"""Skip patterns (FORMAT 2): which paths they match.

What is left out for it is its users' business.
"""

from __future__ import annotations

import fnmatch
import operator
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import NOT_SET, DamagedError, UsageError

# Of all patterns of a delta together, and of all paths that they are matched with.
MAX_PATTERNS_BYTES = 16_384
MAX_PATHS_BYTES = 16 << 20
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


def check_paths(patterns: Sequence[str], paths: Iterable[str], what: str, *, hint: str | None = None) -> None:
    """Raise DamagedError about `what` if paths are so many that matching them with patterns would take minutes."""
    total = sum(len(path.encode(errors="surrogateescape")) for path in paths) if patterns else 0
    if total > MAX_PATHS_BYTES:
        facts = f"its paths have {total} bytes together, with skip patterns at most {MAX_PATHS_BYTES} are allowed"
        raise DamagedError(what, facts, hint=hint)


class Patterns:
    """Shell patterns, matched together: one step for each character of a path, whatever the patterns are.

    A state of the match is a number with a bit for every place in a pattern, before each of its parts and at its end,
    that what was read so far may lead to. A step is a few operations on such numbers.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._starts = self._stars = self._ends = self._any = 0
        self._literals: dict[str, int] = {}
        self._known: dict[str, int] = {}
        sets: dict[str, int] = {}
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
                    sets[part] = sets.get(part, 0) | place
                else:
                    self._literals[part] = self._literals.get(part, 0) | place
                place <<= 1
            self._ends |= place
            place <<= 1
        self._borders, self._in_sets = _places_by_range(sets)

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
            in_sets = self._in_sets[bisect_right(self._borders, ord(character))]
            places = self._any | self._literals.get(character, 0) | in_sets
            if len(self._known) < _KEPT_CHARACTERS:
                self._known[character] = places
        return places


def _places_by_range(sets: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Cut all characters into ranges whose members are in the same sets: where each begins but the first, and the
    places of the sets that its members are in.

    What is in a set can change only at the characters that it names, and after them.
    """
    changes: dict[int, int] = {}
    first = 0
    for part, places in sets.items():
        is_member = re.compile(fnmatch.translate(part)).match
        was_in = is_member("\0") is not None
        first |= places if was_in else 0
        for code in sorted({code for character in part for code in (ord(character), ord(character) + 1)}):
            is_in = code <= sys.maxunicode and is_member(chr(code)) is not None
            if is_in != was_in:
                changes[code] = changes.get(code, 0) ^ places
                was_in = is_in
    borders = sorted(changes)
    return borders, list(accumulate((changes[border] for border in borders), operator.xor, initial=first))


def _parts(pattern: str) -> Iterator[str]:
    """Cut a pattern into `*`, `?`, sets and single characters."""
    at = 0
    while at < len(pattern):
        found = _SET.match(pattern, at)
        yield found[0] if found is not None else pattern[at]
        at += len(found[0]) if found is not None else 1
