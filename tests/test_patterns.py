"""Skip patterns match what the standard library's would."""

from __future__ import annotations

import sys
import time
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given, strategies as st

from dcr_cli.checkpoint.patterns import Patterns

# Of few characters, so that they match now and then.
patterns = st.lists(st.text("ab/*?[]!-^&\\\n", min_size=1, max_size=8), max_size=4)
paths = st.lists(st.text("ab[]!-^\\\n", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@given(patterns, paths)
@example(["[]a]"], "]")
@example(["[!]a]"], "b")
@example(["[]"], "[]")
@example(["[!]"], "[!]")
@example(["[b-a]"], "a")
@example(["a*"], "a")
@example(["**?"], "ab")
def test_the_standard_library_agrees(patterns: list[str], path: str) -> None:
    above = [path[:at] for at, character in enumerate(path) if character == "/"]
    names = [path, *above, *(f"{folder}/" for folder in above)]
    assert Patterns(patterns).match(path) == any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


@given(st.text("a-!]^\\&|~[\U0010ffff\0", min_size=1, max_size=6), st.characters())
@example("!a", "\0")
@example("a-", "\U0010ffff")
@example("\0-\U0010ffff", "x")
@example("]-a", "_")
@example("!-a", "b")
def test_the_standard_library_agrees_on_sets(inside: str, character: str) -> None:
    for tried in (character, *inside, *(chr(min(ord(each) + 1, sys.maxunicode)) for each in inside)):
        assert Patterns([f"[{inside}]"]).match(tried) == fnmatchcase(tried, f"[{inside}]")


def test_many_sets_and_many_characters_take_no_time_of_each_pair() -> None:
    """A path of 4000 different characters against 2700 different sets, each of another one."""
    path = "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))
    patterns = Patterns(["*" + "".join(f"[{character}]" for character in path[:2700])])
    began = time.process_time()
    assert not patterns.match(path) and patterns.match("x" + path[:2700])
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a.bin", "*.bin"),
        ("sub/a.bin", "*.bin"),
        ("original/a/b", "original/"),
        ("original/a/b", "original"),
        ("original/a/b", "original/a"),
        ("original/a/b", "original/*"),
        ("original/a/b", "orig*"),
        ("model-00001-of-00002.safetensors", "model-0000?-of-*"),
        ("x[1].bin", "x[[]1].bin"),
    ],
)
def test_a_pattern_matches(path: str, pattern: str) -> None:
    assert Patterns(["nothing", pattern]).match(path)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a.bin", "*.BIN"),
        ("a.bin", "a"),
        ("original", "original/"),
        ("originals/a", "original/"),
        ("sub/original/a", "original/"),
        ("a/b", "b"),
        ("a", ""),
    ],
)
def test_a_pattern_does_not_match(path: str, pattern: str) -> None:
    assert not Patterns([pattern]).match(path)
