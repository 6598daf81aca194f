from __future__ import annotations

import gc
import json
import os
import socket
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings, strategies as st
from safetensors.numpy import load as load_by_reference

from dcr_cli.checkpoint.header import (
    DTYPES,
    DTYPES_BY_CODE,
    Header,
    TensorEntry,
    header_bytes,
    parse_header,
    read_header,
    read_safetensors,
    stored_elements,
    write_safetensors,
)
from dcr_cli.errors import ConflictError, DamagedError
from strategies import TensorData, byte_count, every_dtype, raw_file, shard_bytes, tensor_sets

# What we refuse and the reference reads, and nothing else.
STRICTER = ("duplicate key", "does not fit 64 bits", "levels", "not described by an object", "dtype is not a string")


def header_of(member: str = "", *, dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]") -> str:
    return f'{{"a":{{{member}"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


def refusal_of(content: bytes) -> str | None:
    """Our verdict, after comparing it with that of the reference."""
    reference: str | None = None
    try:
        safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        reference = str(error)
    try:
        header, data = read_safetensors(content, "x.safetensors")
    except DamagedError as error:
        ours = str(error)
        assert reference is not None or any(point in ours for point in STRICTER), ours
        assert ours.isprintable()
        return ours
    assert reference is None, reference
    assert header.raw + bytes(data) == content
    return None


def tensor(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> TensorEntry:
    return TensorEntry(name, dtype, shape, begin, end)


# What is read


def test_a_header_is_read_in_data_order() -> None:
    text = (
        '{"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},"__metadata__":{"format":"pt","x":"é"},'
        '"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   '
    )
    content = raw_file(text, b"abcdefg")
    header, data = read_safetensors(content, "f")
    assert header == Header(
        raw=content[: 8 + len(text.encode())],
        metadata={"format": "pt", "x": "é"},
        tensors=(tensor("a", "F32", (), 0, 4), tensor("b", "U8", (3,), 4, 7)),
        data_bytes=7,
    )
    assert bytes(data) == b"abcdefg"
    assert refusal_of(content) is None


@given(
    tensor_sets(),
    st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))),
)
def test_any_tensors_are_read_as_written(tensors: dict[str, TensorData], metadata: dict[str, str] | None) -> None:
    content = shard_bytes(tensors, metadata)
    assert refusal_of(content) is None
    header, data = read_safetensors(content, "f")
    assert {
        entry.name: (entry.dtype, entry.shape, bytes(data[entry.begin : entry.end])) for entry in header.tensors
    } == tensors
    assert header.metadata == (metadata or {})


def test_every_dtype_is_read() -> None:
    assert refusal_of(shard_bytes(every_dtype())) is None


def test_dtypes_are_those_of_the_format() -> None:
    text = (Path(__file__).parent.parent / "dcr_cli" / "FORMAT.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.count("|") == 6 and line[2:3].isdigit()
    ]
    assert [
        [str(d.code), d.name, str(d.width), str(d.exponent_bits), str(d.exponent_shift) if d.exponent_bits else ""]
        for d in DTYPES.values()
    ] == rows
    assert [DTYPES_BY_CODE[code].name for code in range(1, 23)] == list(DTYPES)


@pytest.mark.parametrize(
    ("dtype", "shape", "elements"),
    [
        ("BF16", (), 1),
        ("BF16", (3, 5), 15),
        ("BF16", (3, 0), 0),
        ("C64", (3,), 3),
        ("F4", (2, 8), 8),
        ("F4", (), 0),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (2, 8), 12),
        ("U8", (2**40, 2**40), 2**80),
    ],
)
def test_stored_elements(dtype: str, shape: tuple[int, ...], elements: int) -> None:
    assert stored_elements(DTYPES[dtype], shape) == elements


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\nb",
        "a\rb",
        "\x1b[31m",
        "\0",
        "\u202e",
        "🙂",
        '"',
        "\\",
        " a ",
        "__metadata",
        "../../x",
        "/",
        "x" * 65536,
        "dtype",
        "shape",
        "data_offsets",
    ],
)
def test_any_name_is_read_exactly(name: str) -> None:
    content = shard_bytes({name: ("U8", (1,), b"x"), "other": ("U8", (1,), b"y")})
    assert refusal_of(content) is None
    assert read_safetensors(content, "f")[0].tensors[0].name == name


def test_names_that_only_look_alike_are_kept_apart() -> None:
    tensors = dict.fromkeys(("é", "é", "A", "a", "ﬁ", "fi"), ("U8", (1,), b"x"))
    assert refusal_of(shard_bytes(tensors)) is None


@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (3, 0), (2**40, 0), (0, 2**40, 2**40), (1,) * 100_000])
@pytest.mark.parametrize("place", ["front", "middle", "end", "alone"])
def test_empty_and_odd_shapes(shape: tuple[int, ...], place: str) -> None:
    odd: TensorData = ("F32", shape, bytes(byte_count("F32", shape)))
    full: TensorData = ("U8", (3,), b"abc")
    order = {
        "front": {"odd": odd, "odd2": odd, "a": full},
        "middle": {"a": full, "odd": odd, "odd2": odd, "b": full},
        "end": {"a": full, "odd": odd},
        "alone": {"odd": odd},
    }
    assert refusal_of(shard_bytes(order[place])) is None


def test_unordered_keys_and_unknown_members_are_kept_as_they_are() -> None:
    content = shard_bytes({"a": ("U8", (1,), b"x"), "b": ("U8", (2,), b"yz")}, note=[1, {"x": None}, 1.5], other="é")
    assert refusal_of(content) is None
    unordered = (
        '{"b":{"data_offsets":[1,3],"shape":[2],"dtype":"U8"},"a":{"data_offsets":[0,1],"dtype":"U8","shape":[1]}}'
    )
    assert refusal_of(raw_file(unordered, b"xyz")) is None


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        " \n\t{} \r\n\t",
        '{"__metadata__":{}}',
        '{"__metadata__":null}',
        '{"__metadata__":{"a":"b"}}',
        header_of(shape="[2,1]"),
        header_of(shape="[0]", offsets="[0,0]").replace("}}", '},"b":' + header_of()[5:]),
        '{"\\ud83d\\ude00":' + header_of()[5:],
        '{"\\\\ud800":' + header_of()[5:],
        header_of('"x":' + "[" * 14 + "]" * 14 + ","),
        header_of('"x":1e-400,'),
    ],
)
def test_other_forms_that_the_reference_reads(text: str) -> None:
    assert refusal_of(raw_file(text, b"ab" if '"dtype"' in text else b"")) is None


# What is refused


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("3", "not a JSON object"),
        ('"a"', "not a JSON object"),
        ("\ufeff{}", "BOM"),
        ("{}\0", "Extra data"),
        ("{} x", "Extra data"),
        ("{}{}", "Extra data"),
        ("{" + " " * 10, "not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "levels"),
        (header_of('"x":' + "[" * 15 + "]" * 15 + ","), "levels"),
        (header_of('"x":NaN,'), "NaN"),
        (header_of('"x":1e400,'), "too large"),
        (header_of('"x":' + "1" * 5000 + ","), "64 bits"),
        (header_of(shape="[" + "1" * 5000 + "]"), "64 bits"),
        (header_of('"x":123456789012345678901234567890,'), "64 bits"),
        (header_of('"x":"\\ud800",'), "surrogate"),
        ('{"\\ud800":' + header_of()[5:], "surrogate"),
        ('{"\\ude00\\ud83d":' + header_of()[5:], "surrogate"),
        (header_of()[:-1] + "," + header_of()[1:], "duplicate key a"),
        (header_of()[:-1] + "," + header_of(offsets="[2,4]")[1:], "duplicate key a"),
        (header_of('"dtype":"U8",'), "duplicate key dtype"),
        (header_of('"x":1,"x":1,'), "duplicate key x"),
        ('{"__metadata__":{},"__metadata__":{}}', "duplicate key __metadata__"),
        ('{"__metadata__":{"k":"1","k":"1"}}', "duplicate key k"),
        ('{"__metadata__":{"k":1}}', "__metadata__ is not"),
        ('{"__metadata__":{"k":null}}', "__metadata__ is not"),
        ('{"__metadata__":{"k":{}}}', "__metadata__ is not"),
        ('{"__metadata__":[]}', "__metadata__ is not"),
        ('{"__metadata__":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "__metadata__ is not"),
        ('{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', "not a JSON object of tensors"),
        ('{"a":null}', "tensor a: it is not described"),
        ('{"a":["U8",[2],[0,2]]}', "tensor a: it is not described"),
        ('{"a":{"shape":[2],"data_offsets":[0,2]}}', "tensor a: dtype is missing"),
        ('{"a":{"dtype":"U8","data_offsets":[0,2]}}', "tensor a: shape is missing"),
        ('{"a":{"dtype":"U8","shape":[2]}}', "tensor a: data_offsets is missing"),
        (header_of(dtype='{"U8":null}'), "dtype is not a string"),
        (header_of(dtype="2"), "dtype is not a string"),
        (header_of(dtype='"Q7"'), "tensor a: unknown dtype Q7"),
        (header_of(dtype='""'), 'unknown dtype ""'),
        (header_of(dtype='"u8"'), "unknown dtype u8"),
        (header_of(dtype='"F8_E4M3FN"'), "unknown dtype F8_E4M3FN"),
        (header_of(dtype='"U8\\n"'), "unknown dtype U8\\n"),
        (header_of(dtype='""', shape="[0]", offsets="[0,0]"), 'unknown dtype ""'),
        (header_of(shape="2"), "shape is not"),
        (header_of(shape="[2.0]"), "shape is not"),
        (header_of(shape="[true,2]"), "shape is not"),
        (header_of(shape='["2"]'), "shape is not"),
        (header_of(shape="[-2]"), "shape is not"),
        (header_of(shape="[[2]]"), "shape is not"),
        (header_of(shape="[null]"), "shape is not"),
        (header_of(offsets="[0.0,2]"), "data_offsets is not"),
        (header_of(offsets="[0,2e0]"), "data_offsets is not"),
        (header_of(offsets='["0",2]'), "data_offsets is not"),
        (header_of(offsets="[false,2]"), "data_offsets is not"),
        (header_of(offsets="[-0,2]"), "data_offsets is not"),
        (header_of(offsets="[-2,0]"), "data_offsets is not"),
        (header_of(offsets="[0]"), "data_offsets is not"),
        (header_of(offsets="[0,2,2]"), "data_offsets is not"),
        (header_of(offsets="2"), "data_offsets is not"),
        (header_of(offsets="[2,0]"), "begins at byte 2, after its end at 0"),
        (header_of(offsets="[1,3]"), "gap"),
        (header_of(shape="[3]", offsets="[0,3]"), "cut short"),
        (header_of(offsets="[0,18446744073709551615]"), "make 2 bytes, its offsets 18446744073709551615"),
        (header_of(offsets="[18446744073709551613,18446744073709551615]"), "gap"),
        (header_of(shape="[1]"), "make 1 bytes, its offsets 2"),
        (header_of(dtype='"F32"', shape="[1000,1000]"), "make 4000000 bytes, its offsets 2"),
        (header_of(shape="[1]", offsets="[0,1]"), "1 more than its tensors need"),
        (header_of(dtype='"F4"', shape="[3]"), "3 elements of F4 do not fill whole bytes"),
        (header_of(dtype='"F6_E2M3"', shape="[2]"), "do not fill whole bytes"),
        (header_of(dtype='"F4"', shape="[]"), "do not fill whole bytes"),
        (header_of(shape="[4294967296,4294967296]"), "more elements"),
        (header_of(shape="[4294967296,4294967296,0]", offsets="[0,0]"), "more elements"),
        (header_of(dtype='"U64"', shape="[288230376151711744]"), "more elements"),
        (header_of(shape="[9223372036854775808,2,0]", offsets="[0,0]"), "more elements"),
    ],
)
def test_a_bad_header_is_refused_with_the_reason(text: str, fault: str) -> None:
    message = refusal_of(raw_file(text, b"ab"))
    assert message is not None
    assert message.startswith("x.safetensors: ")
    assert fault in message
    assert len(message) < 300


def entries(*ranges: tuple[str, int, int]) -> str:
    return json.dumps(
        {name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} for name, begin, end in ranges}
    )


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([("a", 0, 4), ("b", 2, 6)], "tensor b: begins at byte 2, but tensor a ends at 4: they overlap"),
        ([("a", 0, 6), ("b", 2, 4)], "tensor b: begins at byte 2, but tensor a ends at 6: they overlap"),
        ([("a", 0, 6), ("b", 0, 6)], "overlap"),
        ([("a", 0, 6), ("b", 3, 3)], "overlap"),
        ([("a", 0, 2), ("b", 4, 6)], "tensor b: begins at byte 4, leaving a gap from 2"),
        ([("a", 2, 6)], "tensor a: begins at byte 2, leaving a gap from 0"),
        ([("a", 0, 4)], "2 more than its tensors need"),
        ([("a", 0, 7)], "cut short"),
        ([("a", 0, 6), ("b", 9, 9)], "gap"),
        ([], "6 more than its tensors need"),
    ],
)
def test_data_that_is_not_tiled_is_refused(ranges: list[tuple[str, int, int]], fault: str) -> None:
    message = refusal_of(raw_file(entries(*ranges), b"abcdef"))
    assert message is not None
    assert fault in message


def test_header_bytes_that_are_not_utf8_are_refused() -> None:
    for name in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"):
        message = refusal_of(raw_file(header_of().encode().replace(b"a", name, 1), b"ab"))
        assert message is not None
        assert "not UTF-8, at byte 2" in message


@pytest.mark.parametrize("cut", [1, 7, 40, 60])
def test_a_file_that_is_cut_short_is_refused_with_both_sizes(cut: int) -> None:
    whole = shard_bytes({"a": ("U8", (50,), bytes(50))})
    message = refusal_of(whole[:-cut])
    assert message is not None
    assert f"has {len(whole) - cut} bytes" in message
    assert "cut short" in message
    if cut < 50:
        assert f"need {len(whole)}" in message


@pytest.mark.parametrize("length", [0, 1, 2, 7, 50, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 8, 2**64 - 1])
def test_any_stated_length_of_the_header_is_checked_first(length: int) -> None:
    content = struct.pack("<Q", length) + b"{}" + bytes(40)
    tracemalloc.start()
    message = refusal_of(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message is not None
    assert peak < 1 << 20


@pytest.mark.parametrize("beyond", [1, 7, 8, 9])
def test_a_header_that_would_end_after_the_file_is_not_read(tmp_path: Path, beyond: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 92 + beyond) + b"{}" + b" " * 90)
    with pytest.raises(DamagedError, match=f"has 100 bytes, but its header alone should have {92 + beyond}"):
        read_path(path)
    path.write_bytes(struct.pack("<Q", 92) + b"{}" + b" " * 90)
    assert read_path(path).tensors == ()


@pytest.mark.parametrize("size", range(9))
def test_a_file_of_up_to_8_bytes_is_refused(size: int) -> None:
    message = refusal_of(bytes(size))
    assert message is not None
    assert ("is empty" if not size else "not valid JSON" if size == 8 else f"has {size} bytes, too few") in message


def test_a_caller_can_allow_less_header() -> None:
    content = shard_bytes({"a": ("U8", (1,), b"x")})
    assert read_safetensors(content, "f", max_header_bytes=200)
    with pytest.raises(DamagedError, match="more than the 20 allowed"):
        read_safetensors(content, "f", max_header_bytes=20)
    with pytest.raises(DamagedError, match="more than the 100000000 allowed"):
        header_bytes(struct.pack("<Q", 100_000_001), 1 << 40, "f")
    assert header_bytes(struct.pack("<Q", 100_000_000), 1 << 40, "f") == 100_000_000


def test_parse_header_wants_the_whole_header_and_no_more() -> None:
    content = shard_bytes({"a": ("U8", (2,), b"xy")})
    raw = content[:-2]
    assert parse_header(raw, len(content), "f").data_bytes == 2
    for wrong in (raw[:-1], content):
        with pytest.raises(DamagedError):
            parse_header(wrong, len(content), "f")


_PIECES = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "0",
    "-",
    "1e9",
    "\\",
    "\\ud800",
    "null",
    "a",
    " ",
    "\0",
    "é",
    "99999999999999999999",
]


@settings(max_examples=400)
@given(tensor_sets(max_size=3), st.data())
def test_a_spoilt_header_is_judged_as_the_reference_judges_it(
    tensors: dict[str, TensorData], data: st.DataObject
) -> None:
    content = shard_bytes(tensors, {"format": "pt"})
    header, values = read_safetensors(content, "f")
    text = header.raw[8:].decode()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        text = text[:at] + data.draw(st.sampled_from(["", *_PIECES])) + text[at + cut :]
    refusal_of(raw_file(text, bytes(values)))


@settings(max_examples=200)
@given(tensor_sets(max_size=3), st.data())
def test_a_flipped_byte_is_judged_as_the_reference_judges_it(
    tensors: dict[str, TensorData], data: st.DataObject
) -> None:
    content = bytearray(shard_bytes(tensors))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    refusal_of(bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]))


# Files


def read_path(path: Path) -> Header:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return read_header(fd, path.name)
    finally:
        os.close(fd)


def test_read_header_reads_what_is_in_the_file(tmp_path: Path) -> None:
    content = shard_bytes(every_dtype(), {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(content)
    header = read_path(tmp_path / "x.safetensors")
    assert header == parse_header(header.raw, len(content), "f")
    assert content.startswith(header.raw)
    assert header.data_bytes == sum(len(data) for _, _, data in every_dtype().values())


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS_POINTER, "is a Git-LFS pointer, not a safetensors file"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "is an HTML page, not"),
        (b"<html>", "is an HTML page, not"),
        (b"<?xml version='1.0'?><Error/>", "is an XML document, not"),
        (b"PK\x03\x04" + bytes(100), "is a zip file"),
        (b"GGUF" + bytes(100), "is a GGUF file"),
        (b"", "is empty"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "states a header of"),
    ],
)
def test_another_kind_of_content_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedError) as caught:
        read_path(path)
    assert str(caught.value).startswith(f"{path.name}: {message}")
    if "LFS" in message:
        assert "fetch the real file" in str(caught.value.hint)


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path, kind in (
        (tmp_path / "folder", "a directory"),
        (tmp_path / "fifo", "a FIFO"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(DamagedError, match=f"is {kind}, not a safetensors file"):
            read_path(path)
    left, right = socket.socketpair()
    with left, right, pytest.raises(DamagedError, match="is a socket"):
        read_header(left.fileno(), "x")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_bytes({"a": ("U8", (500,), bytes(500))}))
    real = os.pread

    def shrinking(fd: int, size: int, offset: int) -> bytes:
        part = real(fd, size, offset)
        os.truncate(path, 20)
        return part

    monkeypatch.setattr(os, "pread", shrinking)
    with pytest.raises(ConflictError, match="changed while reading"):
        read_path(path)


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_bytes({"a": ("U8", (5,), b"abcde")}))
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, 1, offset))
    assert read_path(path).tensors == (tensor("a", "U8", (5,), 0, 5),)


def test_half_a_million_tensors_take_linear_time_and_bounded_memory() -> None:
    def content_of(count: int) -> bytes:
        return raw_file(
            "{"
            + ",".join(
                f'"model.layers.{n}.weight":{{"dtype":"BF16","shape":[1,1],"data_offsets":[{2 * n},{2 * n + 2}]}}'
                for n in range(count)
            )
            + "}",
            bytes(2 * count),
        )

    def seconds(content: bytes) -> float:
        gc.collect()
        begin = time.process_time()
        assert read_safetensors(content, "f")
        return time.process_time() - begin

    small, large = content_of(25_000), content_of(500_000)
    ratio = seconds(large) / min(seconds(small) for _ in range(3))
    assert ratio < 80
    tracemalloc.start()
    header, _ = read_safetensors(small, "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(header.tensors) == 25_000
    assert peak < 20 * len(header.raw)


# Writing

payloads = st.sampled_from(["U8", "U32", "U64", "BF16", "BOOL", "F4"])


@given(
    tensor_sets(),
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), max_size=3),
)
@example({}, {})
def test_what_is_written_is_read_by_us_and_by_the_reference(
    tensors: dict[str, TensorData], metadata: dict[str, str]
) -> None:
    content = write_safetensors(tensors, metadata)
    assert refusal_of(content) is None
    header, data = read_safetensors(content, "f")
    assert header.metadata == metadata
    assert {e.name: (e.dtype, e.shape, bytes(data[e.begin : e.end])) for e in header.tensors} == tensors
    assert len(header.raw) % 8 == 0
    assert all(entry.begin % DTYPES[entry.dtype].width == 0 for entry in header.tensors)
    assert write_safetensors(tensors, metadata) == content


def test_arrays_are_written_as_they_are() -> None:
    columns: dict[str, Any] = {
        "small": ("U8", (3,), memoryview(b"abc")),
        "wide": ("U64", (2, 2), np.arange(4, dtype="<u8").reshape(2, 2)),
        "none": ("U32", (0, 4), np.zeros((0, 4), "<u4")),
        "shape": ("U8", (np.int64(1),), bytearray(b"x")),
    }
    arrays = load_by_reference(write_safetensors(columns, {"kind": "test"}))
    assert arrays["wide"].tolist() == [[0, 1], [2, 3]]
    assert arrays["small"].tobytes() == b"abc"
    assert arrays["none"].shape == (0, 4)
    assert arrays["shape"].tobytes() == b"x"


def test_written_bytes_are_fixed() -> None:
    assert write_safetensors({"b": ("U8", (1,), b"x"), "a": ("U16", (1,), b"yz")}, {"k": "é"}) == (
        b"\x88\0\0\0\0\0\0\0"
        b'{"__metadata__":{"k":"\xc3\xa9"},"a":{"dtype":"U16","shape":[1],"data_offsets":[0,2]},'
        b'"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}    yzx'
    )


def test_a_column_whose_bytes_do_not_fit_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="column a"):
        write_safetensors({"a": ("U16", (2,), b"abc")}, {})
