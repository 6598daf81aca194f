"""Manifest, digests and commit: what is encoded is decoded, in few bytes and little time."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from dcr_cli.checkpoint.header import DTYPES, stored_elements
from dcr_cli.delta.commit import decode_commit, encode_commit, open_digests, open_manifest
from dcr_cli.delta.frame import decode_frame, encode_frame, stated_bytes
from dcr_cli.delta.manifest import (
    Box,
    FileRow,
    Manifest,
    PayloadRow,
    Piece,
    RemovedFile,
    Run,
    TensorRow,
    decode_digests,
    decode_manifest,
    encode_digests,
    encode_manifest,
)
from dcr_cli.errors import DamagedError, UnsupportedError
from documents import DIGEST, DIGESTS, MANIFEST, commit

# What servers answer with instead, and what is said of it.
ANSWERS = (
    (b"<html>404</html>", "HTML"),
    (b"\n<!DOCTYPE html>", "HTML"),
    (b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>NoSuchKey</Code></Error>', "XML"),
    (b"<Error><Code>SlowDown</Code></Error>", "XML"),
    (b'{\r\n  "error": "no"\r\n}', "JSON of several lines"),
    (b'{"error":{"code":404}}', "JSON"),
)
EMPTY = Manifest((), (), (FileRow("model.safetensors", 1, 9, bytes(32), ()),), (), (), ())


def round_trip(manifest: Manifest) -> Manifest:
    encoded, decoded_blake3 = encode_manifest(manifest)
    assert encode_manifest(manifest) == (encoded, decoded_blake3)
    return decode_manifest(encoded, decoded_blake3, "manifest.zst")


def large_manifest(tensors: int, seed: int = 1) -> Manifest:
    """A model of `tensors` tensors, each changed in one piece that is coded context."""
    rnd = random.Random(seed)
    parts = ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj")
    names = sorted(f"model.layers.{i // 6}.{parts[i % 6]}.weight" for i in range(tensors))
    rows, offset, payload = [], 0, 0
    for name in names:
        shape = (4096,) if "norm" in name else (4096, 1024) if "attn" in name else (4096, 14336)
        elements = stored_elements(DTYPES["BF16"], shape)
        size = int(elements / 130 * rnd.uniform(0.8, 1.2)) + 9
        if offset + size > 67_000_000:
            offset, payload = 0, payload + 1
        runs = (Run(payload, offset, size, -(-elements // 262_144)),)
        piece = Piece(4, elements // 100 + rnd.randrange(elements // 1000 + 1) + 1, None, runs)
        rows.append(TensorRow(name, "BF16", shape, name, (piece,), rnd.randbytes(16)))
        offset += size
    payloads = tuple(PayloadRow(67_000_000, rnd.randbytes(32)) for _ in range(payload + 1))
    files = (FileRow("model.safetensors", 1, 9_000, rnd.randbytes(32), ()),)
    return Manifest(tuple(rows), (), files, (), payloads, ())


NAMES = st.text(max_size=8)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest: tensors of all dtypes, whole or in boxes, with runs wherever."""
    payloads = draw(
        st.lists(st.builds(PayloadRow, st.integers(20_000, 67_174_408), st.binary(min_size=32, max_size=32)))
    )

    def runs(blocks: int) -> tuple[Run, ...]:
        cuts = (
            [0, *sorted(draw(st.sets(st.integers(1, blocks - 1), max_size=2))), blocks] if blocks > 1 else [0, blocks]
        )
        made = []
        for start, end in pairwise(cuts):
            payload = draw(st.integers(0, len(payloads) - 1))
            size = draw(st.integers(end - start, end - start + 900))
            made.append(Run(payload, draw(st.integers(0, 1_000)), size, end - start))
        return tuple(made)

    def row(name: str) -> TensorRow:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 4, 24, 1000]), max_size=3)))
        if DTYPES[dtype].is_packed:
            shape = (*shape, 4)
        source = draw(st.sampled_from([None, name, "~", "~~"]))
        is_reshaped = source == name and draw(st.booleans())
        elements = stored_elements(DTYPES[dtype], shape)
        digest = draw(st.binary(min_size=16, max_size=16))
        per_block = 524_288 // DTYPES[dtype].width
        is_copy = draw(st.booleans())
        if not elements or not payloads or (source is not None and is_copy):
            source = source if source or not elements else name
            return TensorRow(name, dtype, shape, source, (), None, is_reshaped)
        pieces: tuple[Piece, ...]
        in_boxes = draw(st.booleans())
        if in_boxes and shape and shape[0] == 4 and not DTYPES[dtype].is_packed:
            rest = shape[1:]
            size = 2 * elements // 4
            changed = size if source is None else draw(st.integers(1, size))
            encoding = 1 if source is None or changed == size else draw(st.integers(2, 4))
            pieces = tuple(
                Piece(
                    encoding,
                    changed,
                    Box((start, *(0 for _ in rest)), (2, *(1 for _ in rest)), (2, *rest)),
                    runs(-(-size // per_block)),
                )
                for start in (0, 1)
            )
        else:
            encoding = 1 if source is None else draw(st.integers(1, 4))
            changed = elements if encoding == 1 else draw(st.integers(1, elements))
            pieces = (Piece(encoding, changed, None, runs(-(-elements // per_block))),)
        return TensorRow(name, dtype, shape, source, pieces, digest, is_reshaped)

    tensors = tuple(row(name) for name in sorted(draw(st.sets(NAMES, max_size=4)) - {"~", "~~"}))
    shards = {"b.safetensors", *draw(st.sets(st.just("c.safetensors")))}
    paths = sorted(shards | draw(st.sets(st.sampled_from(["a", "\u00e9/c", "\u00e9/d.safetensors", "z z"]))))
    kept = draw(st.sets(st.sampled_from([*paths, ""])))
    files = tuple(
        FileRow(
            path,
            1 if path in shards else 2,
            draw(st.integers(9, 10_000)),
            draw(st.binary(min_size=32, max_size=32)),
            runs(1) if payloads and path not in kept else (),
        )
        for path in paths
    )
    gone = sorted(draw(st.sets(st.sampled_from(["a", "b", "\u00e9/c.safetensors", "y"]))) - {*paths})
    removed_files = tuple(RemovedFile(path, draw(st.binary(min_size=32, max_size=32))) for path in gone)
    skipped = tuple(draw(st.lists(st.sampled_from(["*.bin", "original/", "[!a-z]?x"]), max_size=2)))
    return Manifest(tensors, ("~", "~~"), files, removed_files, tuple(payloads), skipped)


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    assert round_trip(manifest) == manifest


@pytest.mark.parametrize("manifest", [EMPTY, MANIFEST])
def test_round_trip_of_one_of_everything(manifest: Manifest) -> None:
    decoded = round_trip(manifest)
    assert decoded == manifest
    assert round_trip(decoded) == manifest


def test_rows_behave_as_a_sequence() -> None:
    rows = decode_manifest(encode_manifest(large_manifest(3000))[0], None, "manifest.zst").tensors
    expected = list(large_manifest(3000).tensors)
    assert list(rows) == expected
    assert rows[2500] == expected[2500]
    assert rows[-1] == expected[-1]
    assert rows[1000:1100] == expected[1000:1100]
    assert rows[::700] == expected[::700]
    assert rows[5:2] == []
    assert rows != expected[1:]
    for index in (3000, -3001):
        with pytest.raises(IndexError):
            rows[index]


def test_every_flipped_byte_is_refused() -> None:
    data, known = encode_manifest(MANIFEST)[0], commit()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        with pytest.raises(DamagedError):
            open_manifest(known, bytes(broken), "manifest.zst")


def test_bytes_of_any_kind_end_in_our_errors_alone() -> None:
    data = encode_manifest(MANIFEST)[0]
    decoded = decode_frame(data, stated_bytes(data, 1 << 20, 1 << 20), 1 << 20)
    rnd = random.Random(7)
    for _ in range(1500):
        broken = bytearray(decoded)
        for _ in range(rnd.randrange(1, 4)):
            broken[rnd.randrange(len(broken))] = rnd.randrange(256)
        with suppress(DamagedError, UnsupportedError):
            decode_manifest(encode_frame(bytes(broken), 1), None, "manifest.zst")


def test_a_manifest_that_a_reader_would_refuse_is_not_written() -> None:
    tensors = (replace(MANIFEST.tensors[0], name="A" * 65_537), *MANIFEST.tensors[1:])
    with pytest.raises(DamagedError, match="at most 65536"):
        encode_manifest(replace(MANIFEST, tensors=tensors))
    with pytest.raises(DamagedError, match="canonical order"):
        encode_manifest(replace(MANIFEST, tensors=tuple(reversed(MANIFEST.tensors))))


def test_a_manifest_takes_few_bytes() -> None:
    # 100 digests of 16 bytes and two of 32 are 1664 bytes that no compressor can shorten.
    assert len(encode_manifest(large_manifest(100))[0]) < 4000
    assert len(encode_manifest(EMPTY)[0]) < 700


def test_digests_round_trip() -> None:
    for digests in ([], DIGESTS, [bytes([i] * 16) for i in range(200)]):
        decoded = decode_digests(encode_digests(digests), len(digests), "digests.zst")
        assert [row.tobytes() for row in decoded] == digests
    with pytest.raises(ValueError, match="16 bytes"):
        encode_digests([DIGEST[1:]])


def test_commit_round_trip() -> None:
    line = encode_commit(commit())
    assert decode_commit(line, "commit.json") == commit()
    assert line.count(b"\n") == 1
    assert line.endswith(b"}\n")
    with pytest.raises(DamagedError, match="65536"):
        encode_commit(commit(publisher="x" * 65_536))


def test_commit_opens_what_it_names() -> None:
    assert open_manifest(commit(), encode_manifest(MANIFEST)[0], "manifest.zst") == MANIFEST
    assert len(open_digests(commit(), MANIFEST, encode_digests(DIGESTS), "digests.zst")) == 3
    for open_it in (open_manifest, lambda known, data, what: open_digests(known, MANIFEST, data, what)):
        for data, kind in ANSWERS:
            with pytest.raises(DamagedError, match=f"looks like {kind}"):
                open_it(commit(), data, "x")


def test_a_manifest_holds_little_more_than_its_columns() -> None:
    manifest = large_manifest(6000)
    encoded, decoded_blake3 = encode_manifest(manifest)
    tracemalloc.start()
    try:
        held = decode_manifest(encoded, decoded_blake3, "manifest.zst")
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert [row.name for row in held.tensors] == [row.name for row in manifest.tensors]
    # Columns, and for each tensor and its piece where its parts of other columns begin.
    assert kept < stated_bytes(encoded, 1 << 30, 1 << 30) + 6000 * 60
