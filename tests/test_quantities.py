"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from dcr_cli.cli.quantities import seconds_of, size_of
from dcr_cli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count_bytes"),
    [
        ("1", 1),
        ("1.9", 1),
        ("123456", 123_456),
        ("7B", 7),
        ("500k", 500_000),
        ("500K", 500_000),
        ("500kb", 500_000),
        ("20M", 20_000_000),
        ("0.5m", 500_000),
        ("1G", 10**9),
        ("2T", 2 * 10**12),
        ("1KiB", 1024),
        ("1ki", 1024),
        ("1.5GiB", 3 * 2**29),
        ("1.5gib", 3 * 2**29),
        ("0.1TiB", 109_951_162_777),
        ("0.0009765625Ki", 1),
        ("99999999999999999999", 10**20 - 1),
    ],
)
def test_sizes(text: str, count_bytes: int) -> None:
    assert size_of(text, "--limit-rate") == count_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0k",
        "0.4",
        "-1",
        "+1",
        "k",
        ".5k",
        "1.",
        "1.k",
        "1 k",
        "1k ",
        "1k\n",
        "1e6",
        "1_000",
        "1,5k",
        "5i",
        "5iB",
        "1kk",
        "1kBi",
        "1P",
        "1k/s",
        "\u0661k",
        "1\u212a",
        "nan",
        "inf",
        "1" * 21,
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--limit-rate: a size expected, found '") as caught:
        size_of(text, "--limit-rate")
    assert caught.value.hint == "such as 500k, 20M or 1.5GiB"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("30", 30),
        ("0.5", 0.5),
        ("0s", 0),
        ("30s", 30),
        ("0.25s", 0.25),
        ("15m", 900),
        ("1.5h", 5400),
        ("24h", 86_400),
        ("7D", 604_800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, "--wait") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "30 ", "1.", "-1s", "1 s", "1s\n", "1h30m", "1w", "1ms", ".5s", "\u0661s", "1\u017f", "1" * 20 + "s"],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--wait: a duration expected, found '") as caught:
        seconds_of(text, "--wait")
    assert caught.value.hint == "a number of seconds, or one and s, m, h or d, such as 30s, 15m, 24h or 7d"


def test_a_unit_that_is_needed() -> None:
    assert seconds_of("24h", "--keep-within", needs_unit=True) == 86_400
    with pytest.raises(UsageError, match=r"^--keep-within: a duration expected, found '24'$") as caught:
        seconds_of("24", "--keep-within", needs_unit=True)
    assert caught.value.hint == "a number and s, m, h or d, such as 30s, 15m, 24h or 7d"


def test_long_text_is_cut() -> None:
    with pytest.raises(UsageError, match=r"found '1{20}\.\.\.'$"):
        size_of("1" * 5000, "--limit-rate")
