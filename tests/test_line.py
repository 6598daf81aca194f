"""Documents of one line: what is encoded is read back, in one form, and nothing else is let pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dcr_cli.checkpoint.digest import State
from dcr_cli.delta.line import COMMIT_LIMIT, count, decode_line, encode_line, member, state_members, state_of
from dcr_cli.errors import DamagedError, UnsupportedError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(1 << 63), (1 << 64) - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
members = st.dictionaries(texts.filter(lambda key: key not in ("format", "requires")), values, max_size=5)


@given(members)
def test_lines_are_read_back(members: dict[str, Any]) -> None:
    line = encode_line(members, "line")
    assert decode_line(line, "line") == {"format": "dcr-1", "requires": [], **members}
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert encode_line(dict(reversed(members.items())), "line") == line


def test_limits() -> None:
    fixed = len(encode_line({"x": ""}, "line"))
    line = encode_line({"x": "x" * (COMMIT_LIMIT - fixed)}, "line")
    assert len(line) == COMMIT_LIMIT == 65_536
    assert decode_line(line, "line")["x"] == "x" * (COMMIT_LIMIT - fixed)
    with pytest.raises(DamagedError, match="line: would have 65537 bytes, at most 65536 are allowed"):
        encode_line({"x": "x" * (COMMIT_LIMIT - fixed + 1)}, "line")
    with pytest.raises(DamagedError, match="line: has 65537 bytes, at most 65536 are allowed"):
        decode_line(line[:-1] + b" \n", "line")
    assert decode_line(line[:-1] + b" \n", "line", limit=65_537)
    with pytest.raises(DamagedError, match="has 65536 bytes, at most 65535"):
        decode_line(line, "line", limit=65_535)


def test_the_hint_is_the_document_s() -> None:
    for hint, expected in (({}, "copy the whole delta again"), ({"hint": "look"}, "look")):
        with pytest.raises(DamagedError) as caught:
            decode_line(b"{", "line", **hint)  # type: ignore[arg-type]
        assert caught.value.hint == expected


def test_a_feature_that_is_not_known_is_named_before_anything_else_is_looked_at() -> None:
    with pytest.raises(UnsupportedError, match="requires sums"):
        decode_line(b'{"requires":["sums"],"format":"dcr-1"}', "line")
    with pytest.raises(UnsupportedError, match="has format dcr-9"):
        decode_line(b'{"format":"dcr-9"}', "line")


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [], {}, -1, 10])
def test_counts(value: object) -> None:
    assert [count({"n": right}, "n", 10, "line") for right in (0, 9)] == [0, 9]
    with pytest.raises(DamagedError, match="line: n is not a number from 0 to 9"):
        count({"n": value}, "n", 10, "line")
    with pytest.raises(DamagedError, match="n is not a number"):
        count({}, "n", 10, "line")


def test_members() -> None:
    assert member({"a": "b"}, "a", str, "line") == "b"
    for members in ({}, {"a": None}):
        with pytest.raises(DamagedError, match="line: a is missing"):
            member(members, "a", str, "line")
    with pytest.raises(DamagedError, match="line: a is not of the right type"):
        member({"a": 1}, "a", bool, "line")


def test_states() -> None:
    state = State(b"\1" * 32, b"\2" * 32)
    assert state_of(json.loads(json.dumps({"base": state_members(state)})), "base", "line") == state
    with pytest.raises(DamagedError, match="line: base files: is not a digest"):
        state_of({"base": {"content": state_members(state)["content"]}}, "base", "line")
    with pytest.raises(DamagedError, match="base is missing"):
        state_of({}, "base", "line")
