"""What is told of an object store's error: its code, and a message of plain words."""

from __future__ import annotations

import pytest

from dcr_cli.store.told import code_in, told_in


def error_of(code: str, message: str) -> str:
    told = f"<Code>{code}</Code><Message>{message}</Message><Token-0>hunter2</Token-0>"
    return f'<?xml version="1.0"?>\n<Error>{told}</Error>'


@pytest.mark.parametrize(
    "message",
    [
        "The specified key does not exist.",
        "Access Denied",
        "The AWS Access Key Id you provided does not exist in our records.",
        "The region 'us-east' is wrong; expecting 'eu-west'",
        "Please reduce your request rate (at most 5500 a second), and don't come back!",
        "It's over - try again",
    ],
)
def test_messages_of_plain_words_are_told(message: str) -> None:
    text = error_of("Odd", message.replace("'", "&apos;"))
    assert told_in(text) == f"Odd: {message.rstrip('.')}"
    assert told_in(f"Generic S3 error: status code: 400, body: {text}") == told_in(text)


@pytest.mark.parametrize(
    "word",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "hunter2",
        "abcdefghijklmnopqrstuvwxyz",
        "https://host/path",
        "/bucket/key",
        "a=b",
        "user:word@host",
        "user@host",
        "12345678",
        "a_b",
        "gr\u00fc\u00df",
        "&lt;b&gt;",
        "&#x1b;[31m",
        "%41",
    ],
)
def test_others_are_not(word: str) -> None:
    assert told_in(error_of("Odd", f"You said {word}, we say no")) == "Odd"


def test_only_the_first_line_and_no_long_one() -> None:
    assert told_in(error_of("A", "No such thing.\nRequestId:1-2-3\nTime:4")) == "A: No such thing"
    assert told_in(error_of("A", "word " * 50)) == "A"
    assert told_in(error_of("A", "word " * 500)) == "A"
    assert told_in(error_of("A", " \n ")) == "A"


@pytest.mark.parametrize(
    "text", ["", "<Message>Access Denied</Message>", "<Code></Code>", "<Code>a b</Code>", "<html>"]
)
def test_without_a_code_nothing(text: str) -> None:
    assert told_in(text) == code_in(text) == ""
