"""Skip patterns match what the standard library's would."""

from __future__ import annotations

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
