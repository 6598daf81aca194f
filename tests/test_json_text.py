from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_what_json_writes_is_read_back(value: object, ensure_ascii: bool, indent: int | None) -> None:
    assert strict_json(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode(), "f") == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "Expecting value"),
        (b"{", "not valid JSON"),
        (b"{}{}", "Extra data"),
        (b"{}\0", "Extra data"),
        (b"{} //", "Extra data"),
        (b"[1,]", "not valid JSON"),
        (b"[01]", "not valid JSON"),
        (b"[+1]", "not valid JSON"),
        (b"[.5]", "not valid JSON"),
        (b"['a']", "not valid JSON"),
        (b'["\n"]', "control character"),
        (b'["\\x41"]', "escape"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff\xfe{\0}\0", "not UTF-8, at byte 0"),
        (b'["\xc0\x80"]', "not UTF-8"),
        (b'["\xed\xa0\x80"]', "not UTF-8, at byte 2"),
        (b"[NaN]", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e400]", "too large"),
        (b"[-1e400]", "too large"),
        (b"[18446744073709551616]", "64 bits"),
        (b"[-9223372036854775809]", "64 bits"),
        (b"[" + b"9" * 5000 + b"]", "integer of 5000 characters"),
        (b'{"a": 1, "a": 1}', "duplicate key a"),
        (b'{"b": [{"x": {"a\\n": 1, "a\\u000a": 2}}]}', r"duplicate key a\n"),
        (b'["\\ud800"]', "surrogate"),
        (b'["\\udc00"]', "surrogate"),
        (b'["\\ud800\\n"]', "surrogate"),
        (b'["\\ud800", "\\u0041"]', "surrogate"),
        (b'["\\ud800", "\\udc00"]', "surrogate"),
        (b'["\\ud800\\ud800"]', "surrogate"),
        (b'["\\ud83d \\ude00"]', "surrogate"),
        (b'["\\ud83d\\n\\ude00"]', "surrogate"),
        (b'["\\ud83d\\\\\\ude00"]', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'{"\\uD83D\\uDE00\\uDE00": 1}', "surrogate"),
    ],
)
def test_text_that_is_not_strict_is_refused(text: bytes, fault: str) -> None:
    with pytest.raises(DamagedError) as caught:
        strict_json(text, "commit.json")
    assert str(caught.value).startswith("commit.json: ")
    assert fault in str(caught.value)
    assert len(str(caught.value)) < 200


@settings(max_examples=500)
@given(st.lists(st.text(st.sampled_from("a\\\n\ud800\udbff\udc00\udfff\U0001f600"), max_size=5), max_size=3))
def test_strings_are_read_when_and_only_when_they_have_no_lone_surrogate(strings: list[str]) -> None:
    text = json.dumps(strings)
    expected = json.loads(text)
    try:
        "".join(f"{string}\n" for string in expected).encode()
    except UnicodeEncodeError:
        with pytest.raises(DamagedError, match="surrogate"):
            strict_json(text.encode(), "f")
    else:
        assert strict_json(text.encode(), "f") == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b' \t\r\n{"a": 1}\n \t\r', {"a": 1}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),
        (b'"\\\\\\\\ud800\\ud83d\\ude00"', "\\\\ud800\U0001f600"),
        (b'"\\u0000"', "\0"),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"1e-400", 0.0),
    ],
)
def test_text_that_is_strict_is_read(text: bytes, value: object) -> None:
    assert strict_json(text, "f") == value


def test_minus_zero_is_no_integer() -> None:
    assert type(strict_json(b"-0", "f")) is float
    assert type(strict_json(b"0", "f")) is int


def test_sixteen_levels_are_read_and_seventeen_refused() -> None:
    assert strict_json(b"[" * 16 + b"]" * 16, "f")
    assert strict_json(b'{"a":' * 16 + b"1" + b"}" * 16, "f")
    for text in (b"[" * 17 + b"]" * 17, b'{"a":[' * 8 + b'{"a":1}' + b"]}" * 8, b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(DamagedError, match="levels"):
            strict_json(text, "f")
