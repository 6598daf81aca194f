from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dcr_cli.checkpoint.names import listed, safe_path, shown
from dcr_cli.errors import DamagedError


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "sub/model.safetensors",
        "a/b/c/d",
        "name with blanks",
        " leading and trailing ",
        "-rf",
        "~",
        "ab:c",
        "sub/c:d",
        "é/模型/🙂",
        "e\u0301",
        "a..a",
        "a..b/c.",
        "x" * 255,
        "/".join(["x" * 255] * 16),
    ],
)
def test_safe_path_is_returned(path: str) -> None:
    assert safe_path(path, "file") == path


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "it is empty"),
        ("/", "root"),
        ("/etc/passwd", "root"),
        ("../x", "dot"),
        ("a/../../x", "dot"),
        ("a/..", "dot"),
        ("..", "dot"),
        (".", "dot"),
        ("./x", "dot"),
        ("a/./b", "dot"),
        (".dcr/state.json", "dot"),
        ("sub/.hidden", "dot"),
        ("...", "dot"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("a\\b", "backslash"),
        ("..\\x", "backslash"),
        ("\\\\host\\share", "backslash"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x1b[2J", "control"),
        ("a\x7f", "control"),
        ("a\x85", "control"),
        ("C:", "drive"),
        ("c:x", "drive"),
        ("a:b", "drive"),
        ("C:/x", "drive"),
        ("\ud800", "UTF-8"),
        ("caf\udce9", "UTF-8"),
        ("x" * 256, "256 bytes"),
        ("é" * 128, "256 bytes"),
        ("/".join(["x" * 255] * 16) + "/y", "4097 bytes"),
    ],
)
def test_unsafe_path_is_refused_with_the_reason(path: str, fault: str) -> None:
    with pytest.raises(DamagedError, match="unsafe name") as caught:
        safe_path(path, "model.safetensors.index.json")
    assert fault in str(caught.value)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith("model.safetensors.index.json: ")


def test_a_long_path_is_safe_up_to_the_limit() -> None:
    assert safe_path("/".join(["x" * 127] * 32), "f")
    with pytest.raises(DamagedError):
        safe_path("/".join(["x" * 127] * 32) + "/x", "f")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("", '""'),
        (" a", '" a"'),
        ("a ", '"a "'),
        ("a b", "a b"),
        ("a\nb", "a\\nb"),
        ("a\\nb", "a\\\\nb"),
        ("a\rb\tc\0", "a\\rb\\tc\\x00"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("é🙂", "é🙂"),
        ('"q"', '"q"'),
    ],
)
def test_shown(name: str, text: str) -> None:
    assert shown(name) == text


def test_shown_leaves_out_the_middle_of_a_very_long_name() -> None:
    text = shown("a" * 30_000 + "b" * 35_536)
    assert len(text) < 500
    assert text.startswith("a" * 200)
    assert text.endswith("b" * 200)
    assert "65136 characters left out" in text
    assert shown("x" * 400) == "x" * 400


@given(st.text(st.characters(), max_size=60).filter(lambda name: '"' not in name))
def test_shown_is_one_line_from_which_the_name_can_be_read_back(name: str) -> None:
    text = shown(name)
    assert text.isprintable()
    assert text == text.strip(" ") != ""
    parts = text.removeprefix('"').removesuffix('"').split("\\\\")
    assert "\\".join(part.encode("latin-1", "backslashreplace").decode("unicode_escape") for part in parts) == name


def test_many_names_are_cut() -> None:
    assert listed(["a", "b\n"]) == "a, b\\n"
    assert listed([str(number) for number in range(47)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 37 more"
    assert listed(["a", "b", "c"], 1) == "a and 2 more"
