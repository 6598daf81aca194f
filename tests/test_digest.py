from __future__ import annotations

import struct
import time
from itertools import pairwise

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from dcr_cli.checkpoint.digest import (
    ObjectHasher,
    State,
    add,
    blake3_text,
    content_digest,
    digest_bytes,
    digest_from_bytes,
    digest_text,
    files_digest,
    no_digest,
    object_digest,
    parse_blake3,
    tensor_digest,
)
from dcr_cli.errors import DamagedError

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def digest_by_the_book(data: bytes, offset: int = 0) -> bytes:
    """FORMAT.md 3.1 and 3.2, a byte at a time."""
    sums = [0, 0, 0, 0]
    for place, byte in enumerate(data, offset):
        value = byte if place % 2 == 0 else 256 * (byte - 256 if byte >= 128 else byte)
        for q in range(4):
            low = mix(2**62 + 4096 * q + place // 2 % 4096) % 2**16 | 1
            key = low - 2**16 if low >= 2**15 else low
            row = mix(2**60 * q + place // 2 // 4096) % 2**32 | 1
            sums[q] = (sums[q] + value * key * row) % 2**32
    return struct.pack("<4I", *sums)


# Objects


def test_object_digests_are_blake3() -> None:
    assert object_digest(b"").hex() == EMPTY
    hasher = ObjectHasher()
    for part in (b"ab", bytearray(b"c"), memoryview(b"def")):
        hasher.update(part)
    assert hasher.digest() == object_digest(b"abcdef") == blake3(b"abcdef").digest()


def test_blake3_text_is_read_back() -> None:
    assert blake3_text(object_digest(b"")) == f"blake3:{EMPTY}"
    assert parse_blake3(f"blake3:{EMPTY}", "f") == object_digest(b"")


@pytest.mark.parametrize(
    "text",
    [
        EMPTY,
        "",
        f"blake3:{EMPTY[:-1]}",
        f"blake3:{EMPTY}0",
        f"blake3:{EMPTY.upper()}",
        f"blake3: {EMPTY[1:]}",
        f"blake3:{EMPTY}\n",
        f"sha256:{EMPTY}",
        f"BLAKE3:{EMPTY}",
        "adler32:11e60398",
        f"blake3:{'٣' * 64}",
        "blake3:" + "g" * 64,
        None,
        7,
        [f"blake3:{EMPTY}"],
    ],
)
def test_another_algorithm_or_form_is_refused(text: object) -> None:
    with pytest.raises(DamagedError, match=r"commit.json: is not a digest"):
        parse_blake3(text, "commit.json")


# Tensors


@given(st.binary(max_size=200), st.integers(0, 2**62 - 200) | st.integers(8100, 8300))
def test_tensor_digest_is_that_of_the_format(data: bytes, offset: int) -> None:
    assert digest_bytes(tensor_digest(data, offset)) == digest_by_the_book(data, offset)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_digests_of_parts_add_up(data: bytes, cuts: list[int]) -> None:
    total = no_digest()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        total = add(total, tensor_digest(data[begin:end], begin))
    assert digest_bytes(total) == digest_bytes(tensor_digest(data))


def test_sums_wrap() -> None:
    most = np.full(4, 2**32 - 1, np.uint32)
    assert add(most, np.array([1, 2, 3, 4], np.uint32)).tolist() == [0, 1, 2, 3]


def test_digest_text_and_bytes() -> None:
    digest = np.array([1, 0x01020304, 0, 2**32 - 1], np.uint32)
    assert digest_bytes(digest).hex() == "010000000403020100000000ffffffff"
    assert digest_text(digest) == digest_text(digest_bytes(digest)) == "sum:010000000403020100000000ffffffff"
    assert digest_from_bytes(digest_bytes(digest)).tolist() == digest.tolist()
    assert digest_bytes(no_digest()) == bytes(16)
    with pytest.raises(ValueError, match="16 bytes"):
        digest_from_bytes(bytes(15))


# Checkpoints

SUM = bytes(range(16))
Record = tuple[str, str, tuple[int, ...], bytes]


def test_content_digest_is_blake3_over_the_records() -> None:
    records: list[Record] = [("", "BOOL", (), SUM), ("a", "BF16", (2, 3), bytes(16)), ("é", "U64", (2**63, 0), SUM)]
    expected = (
        b"\0\0\0\0" + b"\x01" + b"\0\0\0\0" + SUM
        + b"\x01\0\0\0a" + b"\x0f" + b"\x02\0\0\0" + struct.pack("<QQ", 2, 3) + bytes(16)
        + b"\x02\0\0\0\xc3\xa9" + b"\x16" + b"\x02\0\0\0" + struct.pack("<QQ", 2**63, 0) + SUM
    )  # fmt: skip
    assert content_digest(records) == blake3(expected).digest()
    assert content_digest(iter(records)) == content_digest(records)
    assert content_digest([]).hex() == EMPTY


def test_content_digest_depends_on_every_part() -> None:
    records: list[list[Record]] = [
        [("a", "U8", (4,), SUM)],
        [("b", "U8", (4,), SUM)],
        [("a", "I8", (4,), SUM)],
        [("a", "U8", (2, 2), SUM)],
        [("a", "U8", (4, 1), SUM)],
        [("a", "U8", (4,), bytes(16))],
        [("a", "U8", (4,), SUM), ("b", "U8", (0,), bytes(16))],
        [],
    ]
    assert len({content_digest(record) for record in records}) == len(records)


def test_records_must_be_in_canonical_order_once_each() -> None:
    record = ("U8", (), SUM)
    for first, second in (("b", "a"), ("a", "a"), ("\U0001f600", "\uffff")):
        with pytest.raises(ValueError, match="canonical order"):
            content_digest([(first, *record), (second, *record)])
        with pytest.raises(ValueError, match="canonical order"):
            files_digest([(first, 2, bytes(32)), (second, 2, bytes(32))])
    # Beyond the Basic Multilingual Plane, UTF-16 units would be in another order than UTF-8 bytes.
    assert content_digest([("\uffff", *record), ("\U0001f600", *record)])


def test_a_digest_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        content_digest([("a", "U8", (), bytes(15))])
    with pytest.raises(ValueError, match="31 bytes"):
        files_digest([("a", 1, bytes(31))])


def test_files_digest_is_blake3_over_the_records() -> None:
    first, second, third = (object_digest(bytes([n])) for n in range(3))
    expected = b"\x03\0\0\0a/b\x02" + first + b"\x01\0\0\0c\x01" + second + b"\x02\0\0\0\xc3\xa9\x02" + third
    records = [("a/b", 2, first), ("c", 1, second), ("é", 3, third)]
    assert files_digest(records) == blake3(expected).digest()
    assert files_digest([]).hex() == EMPTY
    with pytest.raises(ValueError, match="kind 0"):
        files_digest([("a", 0, first)])


def test_200_000_records_take_about_a_second() -> None:
    begin = time.process_time()
    digest = content_digest((f"layers.{n:06}.weight", "BF16", (4, 2), SUM) for n in range(200_000))
    assert time.process_time() - begin < 10
    assert (
        digest
        == blake3(
            b"".join(
                struct.pack("<I", 20) + b"layers.%06d.weight" % n + struct.pack("<BIQQ", 15, 2, 4, 2) + SUM
                for n in range(200_000)
            )
        ).digest()
    )


def test_a_state_is_both_digests() -> None:
    assert State(bytes(32), SUM * 2) == State(bytes(32), SUM * 2) != State(SUM * 2, bytes(32))
