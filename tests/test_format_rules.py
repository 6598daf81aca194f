"""FORMAT.md section 9, rule by rule: each test breaks one rule in something valid and sees it refused.

Rules that need a base or a target are tested with apply, by the same numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import dcr_cli
import dcr_kernels as kernels
from dcr_cli.checkpoint import patterns
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import DTYPES, write_safetensors
from dcr_cli.delta.bits import BitReader, BitWriter, read_varint, write_varint
from dcr_cli.delta.commit import decode_commit, encode_commit, open_digests, open_manifest
from dcr_cli.delta.document import Columns
from dcr_cli.delta.encoding import Encoding, decode_block
from dcr_cli.delta.frame import encode_frame
from dcr_cli.delta.huffman import HuffmanTable, read_table
from dcr_cli.delta.manifest import (
    FileRow,
    Manifest,
    PayloadRow,
    Run,
    decode_digests,
    decode_manifest,
    encode_digests,
    encode_manifest,
)
from dcr_cli.delta.payload import encode_payload, payload_name, read_head, split_run
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.delta.whole import decode_whole, encode_whole
from dcr_cli.errors import DcrError
from dcr_kernels.streams import RangeEncoder, write_magnitude
from documents import (
    BLAKE3,
    DIGEST,
    DIGESTS,
    MANIFEST,
    METADATA,
    columns,
    commit,
    commit_line,
    commit_members,
    document,
    raw_frame,
)

FORMAT = (Path(dcr_cli.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")


def test_every_rule_has_a_test() -> None:
    section = FORMAT[FORMAT.index("\n## 9. Rules") :]
    section = section.partition("\n## 10")[0]
    rules = [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tested = {int(number) for number in re.findall(r"^def test_rule_(\d{2,3})_", tests, re.MULTILINE)}
    assert rules == list(range(1, len(rules) + 1))
    assert tested == set(rules)


# What tests share


def refused(do: Callable[[], object], match: str, code: int = 4) -> None:
    with pytest.raises(DcrError, match=match) as caught:
        do()
    assert caught.value.exit_code == code
    assert "manifest.zst" in caught.value.what or "commit" in caught.value.what or "payload" in caught.value.what


def refused_manifest(broken: Columns | bytes, match: str, code: int = 4) -> None:
    data = broken if isinstance(broken, bytes) else document(broken)
    refused(lambda: decode_manifest(data, None, "manifest.zst"), match, code)


def with_value(name: str, index: Any, value: Any) -> Columns:
    """The valid columns, with one number changed."""
    changed = columns()
    changed[name][index] = value
    return changed


def with_texts(name: str, *texts: bytes) -> Columns:
    changed = columns()
    changed[f"{name}.bytes"] = np.frombuffer(b"".join(texts), np.uint8)
    changed[f"{name}.lengths"] = np.array([len(text) for text in texts], np.uint32)
    return changed


def decoded_manifest() -> bytes:
    return zstandard.ZstdDecompressor().decompress(encode_manifest(MANIFEST)[0])


def with_header(change: Callable[[bytes], bytes]) -> bytes:
    """The manifest with the text of its header changed, and its length with it."""
    decoded = decoded_manifest()
    end = 8 + int.from_bytes(decoded[:8], "little")
    header = change(decoded[8:end])
    assert header != decoded[8:end]
    return encode_frame(len(header).to_bytes(8, "little") + header + decoded[end:], 3)


def refused_commit(members: dict[str, Any] | bytes, match: str, code: int = 4) -> None:
    data = members if isinstance(members, bytes) else commit_line(members)
    refused(lambda: decode_commit(data, "commit.json"), match, code)


def malformed(match: str | None, function: Callable[..., object], *arguments: Any) -> None:
    with pytest.raises(ValueError, match=match):
        function(*arguments)


def test_what_the_rules_start_from_is_valid() -> None:
    assert decode_manifest(document(columns()), None, "manifest.zst") == MANIFEST
    assert decode_manifest(raw_frame(decoded_manifest()), None, "manifest.zst") == MANIFEST
    assert decode_commit(commit_line(commit_members()), "commit.json") == commit()


def test_what_is_not_known_breaks_no_rule() -> None:
    extra = columns() | {
        "tensor.colour": np.zeros(9, np.uint16),
        "y": np.zeros((1, 1, 1), np.uint8),
    }
    metadata = METADATA | {"colour": "red"}
    assert decode_manifest(document(extra, metadata), None, "manifest.zst") == MANIFEST
    members = commit_members() | {"colour": {"b": 1, "c": [1.5]}}
    members["base"] |= {"colour": None}
    assert decode_commit(commit_line(members), "commit.json") == commit()


# Safetensors files and zstd frames


def test_rule_01_header_length() -> None:
    decoded = decoded_manifest()
    for length in (len(decoded) - 7, 65_537, 1 << 63, (1 << 64) - 1):
        refused_manifest(encode_frame(length.to_bytes(8, "little") + decoded[8:], 3), "header")
    for content in (b"", b"\0" * 7):
        refused_manifest(encode_frame(content, 3), "empty|bytes")


def test_rule_02_header_is_strict_json() -> None:
    refused_manifest(with_header(lambda text: text.replace(b'"source.bytes"', b'"removed.bytes"')), "duplicate")
    refused_manifest(with_header(lambda text: text.replace(b'"kind":"manifest"', b'"kind":NaN')), "NaN")
    refused_manifest(with_header(lambda text: b"\xef\xbb\xbf" + text), "JSON")
    refused_manifest(with_header(lambda text: text.rstrip() + b"{}"), "JSON")
    refused_manifest(with_header(lambda text: b"[]"), "object")


def test_rule_03_tensors_tile_the_data() -> None:
    def moved(by: int) -> bytes:
        def change(text: bytes) -> bytes:
            header = json.loads(text)
            offsets = header["file.blake3"]["data_offsets"]
            offsets[0] += by
            offsets[1] += by
            return json.dumps(header).encode()

        return with_header(change)

    refused_manifest(moved(8), "overlap|gap|bytes")
    refused_manifest(moved(-8), "overlap")
    refused_manifest(encode_frame(decoded_manifest() + b"\0", 3), "more than its tensors need")
    refused_manifest(encode_frame(decoded_manifest()[:-1], 3), "cut short")


def test_rule_04_dtype_and_shape_fit_the_offsets() -> None:
    refused_manifest(with_header(lambda text: text.replace(b'"U32"', b'"U33"', 1)), "unknown dtype")
    refused_manifest(with_header(lambda text: text.replace(b'"U32"', b'"U64"', 1)), "bytes")


def test_rule_05_one_frame() -> None:
    frame = encode_manifest(MANIFEST)[0]
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    for broken in (frame[:-1], frame + b"\0", frame + frame, frame + skippable, skippable + frame, skippable, b""):
        refused_manifest(broken, "zstd")
    refused_manifest(encode_frame(b"", 3) * 1000, "zstd")
    refused_manifest(b"<!DOCTYPE html><title>404</title>", "looks like HTML")


def test_rule_06_the_frame_states_its_size() -> None:
    decoded = decoded_manifest()
    refused_manifest(zstandard.ZstdCompressor(write_content_size=False).compress(decoded), "does not state its size")
    refused_manifest(raw_frame(decoded, stated=len(decoded) + 1), "zstd")
    refused_manifest(raw_frame(decoded, stated=len(decoded) - 1), "zstd")
    refused_manifest(raw_frame(decoded, stated=(256 << 20) + 1), "at most 268435456")
    refused_manifest(raw_frame(decoded, stated=256 << 20), "zstd")


def test_rule_07_the_frame_has_a_small_window() -> None:
    assert decode_manifest(raw_frame(decoded_manifest(), window_log=27), None, "manifest.zst") == MANIFEST
    refused_manifest(raw_frame(decoded_manifest(), window_log=28), "window")


# Commit


def test_rule_08_the_commit_is_a_small_strict_object() -> None:
    refused_commit(commit_members() | {"publisher": "x" * 65_536}, "at most 65536")
    refused_commit(b"[]\n", "object")
    refused_commit(encode_commit(commit())[:-2], "JSON")
    refused_commit(commit_line(commit_members()).replace(b'"count":2', b'"count":2,"count":2'), "duplicate")
    refused_commit(b"<html>", "looks like HTML")
    refused_commit(b"", "JSON")


def test_rule_09_the_commit_is_one_sorted_line() -> None:
    line = commit_line(commit_members())
    refused_commit(line[:-1], "one line")
    refused_commit(line.replace(b",", b",\n", 1), "one line")
    refused_commit(line + b"\n", "one line")
    members = commit_members()
    refused_commit(json.dumps(dict(reversed(members.items()))).encode() + b"\n", "sorted")
    members["base"] = dict(reversed(members["base"].items()))
    refused_commit(json.dumps(members).encode() + b"\n", "sorted")


def test_rule_10_format_of_the_commit() -> None:
    refused_commit(commit_members() | {"format": "dcr-2"}, "dcr-2", 8)
    for other in ("dcr-", "dcr-01", "zip", 1, None):
        refused_commit(commit_members() | {"format": other}, "format")


def test_rule_11_requires_of_the_commit() -> None:
    refused_commit(commit_members() | {"requires": ["sums"]}, "requires sums", 8)
    others: tuple[Any, ...] = (None, "", [1], {})
    for other in others:
        refused_commit(commit_members() | {"requires": other}, "list of strings")


def test_rule_12_members_of_the_commit() -> None:
    for key in commit_members():
        members = commit_members()
        del members[key]
        refused_commit(members, key)
        refused_commit(commit_members() | {key: 1.5}, key)
    for outer, inner in (("base", "files"), ("manifest", "decoded"), ("digests", "bytes"), ("payloads", "count")):
        members = commit_members()
        del members[outer][inner]
        refused_commit(members, inner)


@pytest.mark.parametrize("outer", ["base", "target", "manifest", "digests"])
def test_rule_13_digests_of_the_commit(outer: str) -> None:
    inner = "content" if outer in ("base", "target") else "blake3"
    right = commit_members()[outer][inner]
    for other in (right.replace("blake3", "crc32"), right.upper(), right[:-1], right + "0", right[7:], right + "\n", 1):
        members = commit_members()
        members[outer][inner] = other
        refused_commit(members, "digest")


def test_rule_14_numbers_of_the_commit() -> None:
    for outer, inner in (("manifest", "bytes"), ("digests", "bytes"), ("payloads", "count"), ("payloads", "bytes")):
        for other in (-1, 1 << 63, True, 1.0, "1"):
            members = commit_members()
            members[outer][inner] = other
            refused_commit(members, inner)
    members = commit_members()
    members["payloads"]["count"] = 1_000_001
    refused_commit(members, "count")


def test_rule_15_the_manifest_is_the_one_of_the_commit() -> None:
    data = encode_manifest(MANIFEST)[0]
    assert open_manifest(commit(), data, "manifest.zst") == MANIFEST
    for facts in (
        {"manifest_bytes": len(data) + 1},
        {"manifest_blake3": BLAKE3},
        {"manifest_decoded_blake3": BLAKE3},
    ):
        refused(partial(open_manifest, commit(**facts), data, "manifest.zst"), "commit")


def test_rule_16_the_digests_are_those_of_the_commit() -> None:
    data = encode_digests(DIGESTS)
    assert open_digests(commit(), MANIFEST, data, "digests.zst").tobytes() == DIGEST * 3
    for facts in ({"digests_bytes": len(data) - 1}, {"digests_blake3": BLAKE3}):
        with pytest.raises(DcrError, match="commit"):
            open_digests(commit(**facts), MANIFEST, data, "digests.zst")


def test_rule_17_the_payloads_are_those_of_the_commit() -> None:
    data = encode_manifest(MANIFEST)[0]
    for facts in ({"payload_count": 3}, {"payload_bytes": 1000}):
        refused(partial(open_manifest, commit(**facts), data, "manifest.zst"), "payloads")


# Manifest: columns


def test_rule_18_format_of_the_manifest() -> None:
    refused_manifest(document(columns(), METADATA | {"format": "dcr-12"}), "dcr-12", 8)
    refused_manifest(document(columns(), METADATA | {"format": "dcr"}), "format")
    refused_manifest(document(columns(), {}), "format")


def test_rule_19_kind() -> None:
    refused_manifest(document(columns(), METADATA | {"kind": "digests"}), "kind")
    with pytest.raises(DcrError, match="kind"):
        decode_digests(document({"digest": np.zeros((3, 16), np.uint8)}), 3, "digests.zst")


def test_rule_20_requires_of_the_manifest() -> None:
    refused_manifest(document(columns(), METADATA | {"requires": '["sums", "x\\n"]'}), r"requires sums, x\\n", 8)
    for other in ("", "{}", "[1]", "null"):
        refused_manifest(document(columns(), METADATA | {"requires": other}), "requires")


@pytest.mark.parametrize("name", columns())
def test_rule_21_every_column_is_there(name: str) -> None:
    broken = columns()
    column = broken.pop(name)
    refused_manifest(broken, f"no column {name}")
    refused_manifest(broken | {name: column.astype(np.uint16)}, f"no column {name}")
    refused_manifest(broken | {name: column.reshape(-1, 1)}, f"column {name} has shape")
    if column.ndim == 2:
        refused_manifest(broken | {name: column[:, :-1]}, f"column {name} has shape")


@pytest.mark.parametrize("name", [name for name in columns() if ".bytes" not in name and "lengths" not in name])
def test_rule_22_columns_are_as_long_as_they_should(name: str) -> None:
    broken = columns()
    for column in (broken[name][:-1], np.concatenate((broken[name], broken[name][:1]))):
        refused_manifest(broken | {name: column}, "rows|adds? up to|pieces")


@pytest.mark.parametrize("name", ["tensor.name", "source", "removed", "file.path", "removed.file", "skipped"])
def test_rule_23_lengths_of_texts(name: str) -> None:
    length = int(columns()[f"{name}.lengths"][0])
    for other in (length - 1, length + 1):
        refused_manifest(with_value(f"{name}.lengths", 0, other), "do not add up")
    broken = columns()
    broken[f"{name}.lengths"] = np.full(3, 1 << 31, np.uint32)
    refused_manifest(broken, "do not add up")


def test_rule_24_texts_are_utf8() -> None:
    refused_manifest(with_texts("skipped", b"\xff"), "UTF-8")
    refused_manifest(with_texts("skipped", b"\xc3", b"\xa9"), "UTF-8")
    refused_manifest(with_texts("skipped", b"\xed\xa0\x80"), "UTF-8")


def test_rule_25_texts_are_short() -> None:
    assert decode_manifest(document(with_texts("removed", b"x" * 65_536)), None, "").removed == ("x" * 65_536,)
    refused_manifest(with_texts("removed", b"x" * 65_537), "at most 65536")


def test_rule_25_skipped_is_small() -> None:
    for fine in ([b"x" * 16_384], [b"x"] * 16_384, []):
        skipped = decode_manifest(document(with_texts("skipped", *fine)), None, "").skipped
        assert skipped == tuple(text.decode() for text in fine)
    for large in ([b"x" * 16_385], [b"x"] * 16_385, [b"x" * 65_536] * 2):
        refused_manifest(with_texts("skipped", *large), "at most 16384")
    refused_manifest(with_texts("skipped", b"x", b""), "empty")


@pytest.mark.parametrize("pattern", [b"*", b"config.json", b"model.safetensor?", b"s[tu]b", b"sub/", b"*notes.txt"])
def test_rule_25_skipped_matches_no_file(pattern: bytes) -> None:
    refused_manifest(with_texts("skipped", b"*.bin", pattern), "is skipped by a pattern")


@pytest.mark.parametrize("column", ["files", "removed_files"])
def test_rule_25_paths_beside_skipped_are_not_too_many(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself is that of test_file_rules."""
    last = getattr(MANIFEST, column)[-1]
    longer = replace(last, path=f"z/{'long' * 40}")
    manifest = replace(MANIFEST, **{column: (*getattr(MANIFEST, column)[:-1], longer)}, skipped=("*.bin",))
    most = sum(len(file.path.encode()) for file in getattr(manifest, column))
    monkeypatch.setattr(patterns, "MAX_PATHS_BYTES", most)
    assert decode_manifest(document(columns(manifest)), None, "") == manifest
    monkeypatch.setattr(patterns, "MAX_PATHS_BYTES", most - 1)
    refused_manifest(columns(manifest), f"its paths have {most} bytes together, with skip patterns")
    decode_manifest(document(columns(replace(manifest, skipped=()))), None, "")


def test_rule_26_digests_are_as_many_as_tensors_without_pieces() -> None:
    for count in (2, 4):
        with pytest.raises(DcrError, match="digests") as caught:
            decode_digests(encode_digests([DIGEST] * count), 3, "digests.zst")
        assert caught.value.exit_code == 4


# Manifest: tensors


def test_rule_27_names_are_in_canonical_order() -> None:
    names = [row.name.encode() for row in MANIFEST.tensors]
    refused_manifest(with_texts("tensor.name", *reversed(names)), "canonical order")
    refused_manifest(with_texts("tensor.name", names[0], *names[:-1]), "canonical order")


def test_rule_28_dtype_codes_are_known() -> None:
    for code in (0, 23, 255):
        refused_manifest(with_value("tensor.dtype", 4, code), "unknown dtype")


def test_rule_29_tensors_are_not_too_large() -> None:
    copied = 4
    for shape in ([1 << 61], [1 << 31, 1 << 30], [1 << 63, 1 << 63], [(1 << 64) - 1, 1], [3, 1 << 60]):
        assert _shaped(copied, "U8", shape, "2\\^64 bits")
    assert _shaped(copied, "F64", [1 << 58], "2\\^64 bits")
    assert _shaped(copied, "U8", [1 << 40, 0, 1 << 40], None)
    assert _shaped(copied, "U8", [(1 << 61) - 1], None)
    assert _shaped(copied, "F4", [(1 << 62) - 2], None)
    assert _shaped(copied, "U8", [1] * 100_000, None)
    assert _shaped(copied, "F4", [3], "whole bytes")
    assert _shaped(copied, "F6_E2M3", [2], "whole bytes")
    assert _shaped(copied, "F6_E3M2", [4], None)


def _shaped(row: int, dtype: str, shape: list[int], match: str | None) -> bool:
    changed = with_value("tensor.dtype", row, DTYPES[dtype].code)
    changed["tensor.rank"][row] = len(shape)
    start = int(columns()["tensor.rank"][:row].sum())
    old = changed["tensor.shape"].tolist()
    changed["tensor.shape"] = np.array(old[:start] + shape + old[start + 1 :], np.uint64)
    if match is None:
        return decode_manifest(document(changed), None, "manifest.zst").tensors[row].shape == tuple(shape)
    refused_manifest(changed, match)
    return True


def test_rule_30_sources_exist() -> None:
    for index in (3, (1 << 32) - 1):
        refused_manifest(with_value("tensor.source", 5, index), "there are 1 sources")


def test_rule_31_sources_are_used_and_in_order() -> None:
    refused_manifest(with_value("tensor.source", 4, 1), "source of no tensor")
    broken = with_texts("source", b"z", b"old")
    broken["tensor.source"][5] = 3
    refused_manifest(broken, "canonical order")


def test_rule_32_removed_tensors_are_not_there() -> None:
    refused_manifest(with_texts("removed", b"b", b"old"), "removed and in the target")
    refused_manifest(with_texts("removed", b"old", b"gone"), "canonical order")
    refused_manifest(with_texts("removed", b"old", b"old"), "canonical order")


def test_rule_33_tensors_without_elements_have_no_pieces() -> None:
    broken = with_value("tensor.shape", slice(0, 2), [0, 600])
    refused_manifest(broken, "no elements, but pieces")


def test_rule_34_tensors_without_source_are_whole() -> None:
    refused_manifest(with_value("tensor.source", 5, 0), "neither source nor pieces")
    broken = with_value("piece.encoding", 4, 3)
    refused_manifest(broken, "not coded whole")
    broken = with_value("tensor.source", 1, 0)
    broken["piece.encoding"][1:4] = 1
    broken["piece.changed"][1:4] = [12, 6, 6]
    decode_manifest(document(broken), None, "manifest.zst")
    broken["box"][5] = 5
    broken["piece.changed"][1] = 10
    refused_manifest(broken, "22 elements of 24")


# Manifest: pieces


def test_rule_35_encodings_are_known() -> None:
    for code in (0, 5, 255):
        refused_manifest(with_value("piece.encoding", 1, code), f"encoding {code}, unknown", 8)


def test_rule_36_a_piece_without_a_box_is_alone() -> None:
    refused_manifest(with_value("piece.box", 0, 2), "neither 0 nor 1")
    broken = with_value("piece.box", 3, 0)
    broken["box"] = broken["box"][:12]
    refused_manifest(broken, "a piece that is all of it, and others")


def test_rule_37_tensors_that_may_have_boxes() -> None:
    box = [0, 1, 2]
    packed = with_value("piece.box", 4, 1)
    packed["box"] = np.array([*packed["box"], *box], np.uint64)
    refused_manifest(packed, "allow none")
    for rank, is_fine in ((64, True), (65, False)):
        deep = columns()
        deep["tensor.rank"][0] = rank
        deep["tensor.shape"] = np.concatenate((np.ones(rank - 1, np.uint64), [1 << 19], deep["tensor.shape"][2:]))
        deep["tensor.shape"] = deep["tensor.shape"].astype(np.uint64)
        deep["piece.box"][0] = 1
        numbers = [0] * rank + [1] * rank + [1] * (rank - 1) + [1 << 19]
        deep["box"] = np.array([*numbers, *deep["box"]], np.uint64)
        deep["run.blocks"][:2] = 1
        if is_fine:
            decode_manifest(document(deep), None, "manifest.zst")
        else:
            refused_manifest(deep, "allow none")
    scalar = columns()
    scalar["tensor.pieces"][5] = 1
    scalar["tensor.digest"] = np.zeros((4, 16), np.uint8)
    for name, value in (("encoding", 4), ("changed", 1), ("box", 1), ("runs", 1)):
        scalar[f"piece.{name}"] = np.append(scalar[f"piece.{name}"], np.array(value, scalar[f"piece.{name}"].dtype))
    for name, value in (("payload", 0), ("offset", 0), ("bytes", 9), ("blocks", 1)):
        scalar[f"run.{name}"] = np.insert(scalar[f"run.{name}"], 6, value)
    refused_manifest(scalar, "allow none")


def test_rule_38_boxes_lie_in_their_tensor() -> None:
    starts, steps, counts = 0, 2, 4
    for index, value in (
        (starts, 3),
        (starts, 4),
        (starts, (1 << 64) - 1),
        (steps, 0),
        (steps, 4),
        (steps, 1 << 63),
        (counts, 0),
        (counts, 5),
        (counts, (1 << 64) - 1),
    ):
        refused_manifest(with_value("box", index, value), "does not lie in its shape")
    single = with_value("box", slice(2, 5), [(1 << 64) - 1, 1, 1])
    single["piece.changed"][1] = 3
    decode_manifest(document(single), None, "manifest.zst")


def test_rule_39_pieces_are_apart() -> None:
    refused_manifest(with_value("box", 7, 1), "overlap")
    refused_manifest(with_value("box", 4, 3), "overlap")
    _accept_pieces([(i, 1, 1) for i in range(65_536)], 65_537)
    refused_manifest(_columns_of_one_tensor([(i, 1, 1) for i in range(65_537)], 65_537), "at most 65536")


def test_rule_40_pieces_can_be_told_apart() -> None:
    # Pairs {i, 3n - i}: their ranges are nested, their steps have no common divisor, and no two share an element.
    def nested(n: int) -> list[tuple[int, int, int]]:
        return [(i, 3 * n - 2 * i, 2) for i in range(n)]

    _accept_pieces(nested(301), 1000)
    refused_manifest(_columns_of_one_tensor(nested(801), 3000), "cannot be told apart")


def _accept_pieces(boxes: list[tuple[int, int, int]], elements: int) -> None:
    decode_manifest(document(_columns_of_one_tensor(boxes, elements)), None, "manifest.zst")


def _columns_of_one_tensor(boxes: list[tuple[int, int, int]], elements: int) -> Columns:
    """A manifest of one tensor of rank 1 with these pieces."""
    count = len(boxes)
    shard = Manifest((), (), (FileRow("model.safetensors", 1, 9, BLAKE3, ()),), (), (), ())
    return columns(shard) | {
        "tensor.name.lengths": np.zeros(1, np.uint32),
        "tensor.dtype": np.array([2], np.uint8),
        "tensor.rank": np.array([1], np.uint32),
        "tensor.shape": np.array([elements], np.uint64),
        "tensor.source": np.array([1], np.uint32),
        "tensor.pieces": np.array([count], np.uint32),
        "tensor.digest": np.zeros((1, 16), np.uint8),
        "piece.encoding": np.full(count, 4, np.uint8),
        "piece.changed": np.ones(count, np.uint64),
        "piece.box": np.ones(count, np.uint8),
        "piece.runs": np.ones(count, np.uint32),
        "box": np.array(boxes, np.uint64).ravel(),
        "run.payload": np.zeros(count, np.uint32),
        "run.offset": np.zeros(count, np.uint32),
        "run.bytes": np.full(count, 9, np.uint32),
        "run.blocks": np.ones(count, np.uint32),
        "payload.bytes": np.array([1000], np.uint64),
        "payload.blake3": np.zeros((1, 32), np.uint8),
    }


def test_rule_41_changed_elements_of_a_piece() -> None:
    for value in (0, 13, (1 << 64) - 1):
        refused_manifest(with_value("piece.changed", 1, value), "elements of a piece changed")
    refused_manifest(with_value("piece.changed", 4, 1), "says that 1 changed")


def test_rule_42_blocks_of_a_piece() -> None:
    for value in (1, 3):
        refused_manifest(with_value("run.blocks", 1, value), "3 expected")


# Manifest: files


@pytest.mark.parametrize(
    "path",
    ["", "/x", "../x", "a/../x", "./x", "a//x", "x/", "a\\x", "a\0x", "a\nx", "C:x", ".dcr/x", "a/.x", "x" * 256],
)
def test_rule_43_paths_are_safe(path: str) -> None:
    rest = [row.path.encode() for row in MANIFEST.files[1:]]
    refused_manifest(with_texts("file.path", *sorted([path.encode(), *rest])), "unsafe name")
    refused_manifest(with_texts("removed.file", *sorted([path.encode(), b"vocab.txt"])), "unsafe name")


def test_rule_44_paths_are_in_order_and_apart() -> None:
    shard, weight_map = b"model.safetensors", b"model.safetensors.index.json"
    refused_manifest(with_texts("file.path", b"sub/empty", shard, weight_map, b"x"), "canonical order")
    refused_manifest(with_texts("file.path", b"a", shard, weight_map, weight_map), "canonical order")
    refused_manifest(with_texts("file.path", b"a", shard, weight_map, b"model.safetensors/x"), "canonical order|folder")
    refused_manifest(with_texts("file.path", b"a", b"a/b/model.safetensors", weight_map, b"x"), "folder of another")
    refused_manifest(with_texts("removed.file", b"vocab.txt", b"old/notes.txt"), "canonical order")
    refused_manifest(with_texts("removed.file", b"vocab.txt", b"vocab.txt"), "canonical order")
    refused_manifest(with_texts("removed.file", b"config.json", b"vocab.txt"), "config.json is removed and in the")
    for name in (b"a.safetensors", b"a.safetensors.index.json"):
        refused_manifest(with_texts("removed.file", name, b"vocab.txt"), "cannot be a sidecar")
        decode_manifest(document(with_texts("removed.file", b"sub/" + name, b"vocab.txt")), None, "manifest.zst")


def test_rule_45_kinds_fit_names() -> None:
    for kind in (0, 4):
        refused_manifest(with_value("file.kind", 0, kind), "unknown kind")
    refused_manifest(with_value("file.kind", 0, 1), "name says otherwise")
    refused_manifest(with_value("file.kind", 1, 2), "name says otherwise")
    in_a_folder = with_texts("file.path", b"a", b"model.safetensors", b"n/lora.safetensors", b"x")
    in_a_folder["file.kind"][:] = [2, 1, 2, 2]
    decode_manifest(document(in_a_folder), None, "manifest.zst")


@pytest.mark.parametrize(
    "path",
    ["model.bin", "sub/model.pt", "a.pth", "sub/a/b.gguf", "consolidated.json", "consolidated/a", "original/a/params"],
)
def test_rule_45_no_sidecar_is_a_second_copy(path: str) -> None:
    files = sorted([*MANIFEST.files[1:], replace(MANIFEST.files[0], path=path)], key=lambda file: file.path)
    refused_manifest(columns(replace(MANIFEST, files=tuple(files), skipped=())), "second copy")


def test_rule_46_one_weight_map() -> None:
    refused_manifest(with_value("file.kind", 0, 3), "cannot be a weight map")
    shard, weight_map = b"model.safetensors", b"model.safetensors.index.json"
    two = with_texts("file.path", b"a.safetensors.index.json", shard, weight_map, b"x")
    refused_manifest(two, "has to be a weight map")
    two["file.kind"][0] = 3
    refused_manifest(two, "more than one weight map")
    refused_manifest(with_value("file.kind", 2, 2), "has to be a weight map")
    refused_manifest(with_texts("file.path", b"a", shard, b"n/model.safetensors.index.json", b"x"), "weight map")


def test_rule_46_shards_without_a_weight_map() -> None:
    def shards(*paths: bytes) -> Columns:
        changed = with_texts("file.path", *paths, b"y", b"z")
        changed["file.kind"][:] = [1, 1, 2, 2]
        return changed

    for fine in ((b"a.safetensors", b"b.safetensors"), (b"consolidated-0.safetensors", b"consolidated-1.safetensors")):
        decode_manifest(document(shards(*fine)), None, "manifest.zst")
    refused_manifest(shards(b"a.safetensors", b"b/c.safetensors"), "no weight map names")
    refused_manifest(shards(b"a.safetensors", b"consolidated.safetensors"), "no weight map names")


def test_rule_47_shards_are_all_there() -> None:
    names = [b"a-00001-of-00002.safetensors", b"a-00002-of-00002.safetensors"]
    both = with_texts("file.path", *names, b"y", b"z")
    both["file.kind"][:] = [1, 1, 2, 2]
    decode_manifest(document(both), None, "manifest.zst")
    for other in (b"a-00003-of-00002.safetensors", b"a-00002-of-00003.safetensors", b"a-1-of-00002.safetensors"):
        broken = both | {k: v for k, v in with_texts("file.path", names[0], other, b"y", b"z").items() if "path" in k}
        refused_manifest(broken, "is one of|the same number")
    none = with_texts("file.path", b"a", b"b", b"c", b"d")
    none["file.kind"][:] = 2
    refused_manifest(none, "has 0 shards")


def test_rule_47_sizes_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for row, fine, bad in (
        (1, [9, 100_000_008], [0, 8, 100_000_009]),
        (3, [0, 64 << 20], [(64 << 20) + 1, (1 << 64) - 1]),
        (2, [], [100_000_001]),
    ):
        for size in fine:
            decode_manifest(document(with_value("file.size", row, size)), None, "manifest.zst")
        for size in bad:
            refused_manifest(with_value("file.size", row, size), "more or less than its kind allows")
    names = [b"%02d" % i for i in range(17)]
    many = with_texts("file.path", *names, b"model.safetensors")
    many |= {
        "file.kind": np.array([2] * 17 + [1], np.uint8),
        "file.size": np.array([64 << 20] * 17 + [9], np.uint64),
        "file.blake3": np.zeros((18, 32), np.uint8),
        "file.runs": np.zeros(18, np.uint32),
    }
    for name in ("payload", "offset", "bytes", "blocks"):
        many[f"run.{name}"] = many[f"run.{name}"][:6]
    refused_manifest(many, "together")
    many["file.size"][0] = 0
    decode_manifest(document(many), None, "manifest.zst")
    monkeypatch.setattr("dcr_cli.delta.file_rules.MAX_SHARDS", 0)
    refused_manifest(columns(), "1 to 0 are allowed")


def test_rule_48_blocks_of_a_file() -> None:
    for value in (1, 3):
        refused_manifest(with_value("run.blocks", 6, value), "2 expected")
    refused_manifest(with_value("run.blocks", 7, 2), "1 expected")


# Manifest: runs and payloads


def test_rule_49_runs_add_up() -> None:
    refused_manifest(with_value("piece.runs", 0, 1), "add up to 7, there are 8")
    refused_manifest(with_value("file.runs", 0, 2), "add up to 9, there are 8")
    broken = with_value("piece.runs", slice(0, 2), [3, 0])
    refused_manifest(broken, "piece")


def test_rule_50_payloads_of_runs_exist() -> None:
    for index in (2, (1 << 32) - 1):
        refused_manifest(with_value("run.payload", 3, index), "of 2")


def test_rule_51_runs_have_blocks_and_bytes() -> None:
    broken = with_value("run.blocks", slice(0, 2), [3, 0])
    refused_manifest(broken, "no block")
    refused_manifest(with_value("run.bytes", 1, 1), "2 blocks in 1 bytes")


def test_rule_52_runs_end_in_their_payload() -> None:
    decode_manifest(document(with_value("run.offset", 7, 982)), None, "manifest.zst")
    refused_manifest(with_value("run.offset", 7, 983), "after its end")
    refused_manifest(with_value("run.offset", 7, (1 << 32) - 1), "after its end")
    refused_manifest(with_value("run.bytes", 7, (1 << 32) - 1), "after its end")
    broken = with_value("run.payload", 7, 1)
    broken["payload.bytes"][1] = (64 << 20) + 1000
    broken["run.offset"][7] = (64 << 20) - 10
    decode_manifest(document(broken), None, "manifest.zst")
    broken["run.offset"][7] += 1
    refused_manifest(broken, "after its end")


def test_rule_53_payload_files_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, 8, 67_174_409, (1 << 64) - 1):
        refused_manifest(with_value("payload.bytes", 1, size), "at most")
    decode_manifest(document(with_value("payload.bytes", 1, 67_174_408)), None, "manifest.zst")
    monkeypatch.setattr("dcr_cli.delta.manifest_rules.PAYLOAD_COUNT_LIMIT", 1)
    refused_manifest(columns(), "has 2 payloads, at most 1")


# Payloads

DATA = b"\0" + b"\x02\x01\x00abc"
PAYLOAD = encode_payload(0, DATA)
PAYLOAD_RUN = Run(0, 0, 6, 3)


def payload_file(data: bytes, **metadata: str) -> bytes:
    facts = {"format": "dcr-1", "kind": "payload", "index": "0", "blake3": object_digest(data).hex()}
    return write_safetensors({"blocks": ("U8", [len(data)], data)}, facts | metadata)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., None]:
    """Read a run of a delta whose only payload is `file`, which the manifest describes as `row`."""

    def read(file: bytes, row: PayloadRow | None = None) -> None:
        path = tmp_path / payload_name(0)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file)
        with PayloadReader(tmp_path, [row or PayloadRow(len(file), object_digest(file))]) as reader:
            reader.verify_all(2)
            assert bytes(reader.run_bytes(PAYLOAD_RUN)) == DATA[1:]

    return read


def test_rule_54_payloads_are_the_ones_of_the_manifest(tmp_path: Path, read: Callable[..., None]) -> None:
    row = PayloadRow(len(PAYLOAD), object_digest(PAYLOAD))
    read(PAYLOAD, row)
    refused(partial(read, PAYLOAD, PayloadRow(len(PAYLOAD) + 1, row.blake3)), "bytes, the manifest says")
    for at in range(len(PAYLOAD)):
        flipped = bytearray(PAYLOAD)
        flipped[at] ^= 4
        refused(partial(read, bytes(flipped), row), "payload|header|safetensors")
    (tmp_path / payload_name(0)).unlink()
    refused(partial(PayloadReader, tmp_path, [row]), "missing")


def test_rule_55_metadata_of_a_payload(read: Callable[..., None]) -> None:
    read(payload_file(DATA, version="9"))
    refused(partial(read, payload_file(DATA, format="dcr-2")), "dcr-2", 8)
    refused(partial(read, payload_file(DATA, format="dcr")), "format")
    refused(partial(read, payload_file(DATA, kind="manifest")), "not a payload")
    for index in ("1", "00", "", "0 "):
        refused(partial(read, payload_file(DATA, index=index)), "index")


def test_rule_56_a_payload_is_one_tensor(read: Callable[..., None]) -> None:
    facts = {"format": "dcr-1", "kind": "payload", "index": "0", "blake3": object_digest(DATA).hex()}
    for tensors in (
        {"block": ("U8", [7], DATA)},
        {"blocks": ("I8", [7], DATA)},
        {"blocks": ("U8", [1, 7], DATA)},
        {"blocks": ("U8", [7], DATA), "more": ("U8", [0], b"")},
        {},
    ):
        refused(partial(read, write_safetensors(tensors, facts)), "one U8 tensor|more than its tensors")
    large = bytes((64 << 20) + 1)
    refused(partial(read, payload_file(large)), "at most 67108864")


def test_rule_57_a_payload_states_the_blake3_of_its_data(read: Callable[..., None]) -> None:
    right = object_digest(DATA).hex()
    refused(partial(read, payload_file(DATA, blake3=object_digest(b"").hex())), "differs")
    for other in (right.upper(), right[1:], "", "blake3:" + right):
        refused(partial(read, payload_file(DATA, blake3=other)), "hexadecimal")


def test_rule_58_the_head(read: Callable[..., None]) -> None:
    many = BitWriter()
    many.field(1, 1)
    many.gamma(34)
    many.field(0, 64)
    for head, match in (
        (b"\x10" + bytes(9), "padding"),
        (b"\x01", "ends inside|no gamma"),
        (many.to_bytes() + bytes(99), "at most 32"),
        (b"", "ends inside"),
    ):
        refused(partial(read, payload_file(head)), match)
        malformed(match, read_head, head)


def test_rule_59_runs_end_within_the_data(read: Callable[..., None]) -> None:
    refused(partial(read, payload_file(DATA[:-1])), "5 bytes of runs, one ends at 6")


def test_rule_60_sizes_of_blocks() -> None:
    for data in (b"\x02\x01\x01abc", b"\x02\x81\x00\x00abc", b"\xff" * 12, b"\x02\x01", b""):
        malformed("at byte", split_run, data, Run(0, 0, 6, 3), 0)


# Blocks

U8, BF16 = DTYPES["U8"], DTYPES["BF16"]
STATES = {width: np.full((16, 32), 32768, np.uint16) for width in (1, 2, 4, 8)}
ONE_SYMBOL = HuffmanTable(np.array([5], np.uint64), np.zeros(1, np.uint8), -1)


def decode(block: bytes, base: Any, encoding: Encoding = Encoding.CONTEXT, dtype: Any = U8, table: Any = None) -> Any:
    array = np.array(base, f"<u{dtype.width}")
    return decode_block(memoryview(block), array, dtype, len(array), encoding, STATES, table)


def gap(*fields: tuple[int, int], count: int = 1) -> bytes:
    """A gap block with these fields after the count of changes."""
    bits = BitWriter()
    bits.field(0, 1)
    bits.gamma(count)
    for field in fields:
        bits.field(*field)
    return bits.to_bytes()


def decode_gap(block: bytes, elements: int = 4) -> Any:
    return decode(block, [0] * elements, Encoding.GAP_OVERWRITE, U8, ONE_SYMBOL)


def context(base: Any, target: Any, dtype: Any = U8) -> tuple[bytes, bytes]:
    """The stream and the coder's section of a context block."""
    old, new = (np.array(values, f"<u{dtype.width}") for values in (base, target))
    draft = kernels.compare(old, new, 0, (dtype.exponent_bits, dtype.exponent_shift)).draft
    assert draft is not None
    return draft.stream, kernels.magnitude_encode(draft.class_counts, draft.magnitudes, STATES[dtype.width])


def test_rule_61_varints() -> None:
    for data in (b"\x80\x00", b"\xff" * 9 + b"\x02", b"\x80", b""):
        malformed("varint", read_varint, data, 0)


def test_rule_62_bit_streams() -> None:
    assert decode_gap(gap((1, 1), (1, 1))).positions.tolist() == [1]
    malformed("after the end", decode_gap, gap((1, 1), (1, 1), (1, 1)))
    malformed(None, decode_gap, gap((0, 5)))
    malformed("gamma", BitReader(bytes(8) + b"\x01" + bytes(9)).gamma)


def test_rule_63_whole_forms_end_with_the_block() -> None:
    form = encode_whole(np.arange(4, dtype="<u2"))
    malformed("planes", decode_whole, memoryview(bytes([form[0] | 4]) + form[1:]), 4, 2)
    malformed("after the last plane", decode_whole, memoryview(form + b"\0"), 4, 2)
    malformed("ends after", decode_whole, memoryview(form[:-1]), 4, 2)


def test_rule_64_planes_are_frames() -> None:
    content = bytes(1000)

    def form(frame: bytes, elements: int = 1000) -> Any:
        block = memoryview(b"\x01" + write_varint(len(frame)) + frame)
        return decode_whole(block, elements, 1)

    frame = encode_frame(content, 1)
    assert form(frame).tobytes() == content
    assert form(raw_frame(content, window_log=23)).tobytes() == content
    for broken in (
        encode_frame(content + b"\0", 1),
        frame + frame,
        frame + b"\0",
        frame[:-1],
        zstandard.ZstdCompressor(write_content_size=False).compress(content),
        raw_frame(content, window_log=24),
        b"",
    ):
        malformed(None, form, broken)
    assert form(encode_frame(b"", 1), 0).tobytes() == b""
    malformed(None, form, encode_frame(b"", 1) + b"zz", 0)


def test_rule_65_whole_blocks_are_not_empty() -> None:
    malformed("empty", decode_whole, memoryview(b""), 4, 1)


def test_rule_66_head_bit() -> None:
    form = encode_whole(np.arange(4, dtype="u1"))
    assert decode(b"\x01" + form, [0] * 4).tolist() == [0, 1, 2, 3]
    for head in (3, 0x81):
        malformed("head bit", decode, bytes([head]) + form, [0] * 4)


def test_rule_67_positions_stay_inside() -> None:
    assert decode_gap(gap((0b11, 2))).positions.tolist() == [1]
    assert decode_gap(gap((0b110, 3))).positions.tolist() == [3]
    malformed(None, decode_gap, gap((0b0100, 4)))
    malformed(None, decode_gap, gap((0, 20), (1, 1), (0, 3)))


def test_rule_68_gap_counts() -> None:
    malformed(None, decode_gap, gap((0, 16), count=5))
    malformed(None, decode_gap, gap((0, 16), count=(1 << 32) - 1))


def test_rule_69_context_counts() -> None:
    for count in (0, 5, (1 << 32) - 1, (1 << 64) - 2):
        bits = BitWriter()
        bits.field(0, 1)
        bits.gamma(count + 1)
        malformed(None, decode, bits.to_bytes() + b"\xff", [0] * 4)


def test_rule_70_top_is_the_right_one() -> None:
    base = [0x3F80] * 4
    stream, coded = context(base, [0x3F81, *base[1:]], BF16)
    assert decode(stream + coded, base, dtype=BF16).positions.tolist() == [0]
    for top in (0, 126, 128, 255):
        word = int.from_bytes(stream, "little") & ~(255 << 1) | top << 1
        broken = word.to_bytes(len(stream), "little") + coded
        malformed("top", decode, broken, base, Encoding.CONTEXT, BF16)


def test_rule_71_magnitudes() -> None:
    stream, coded = context([0] * 4, [0x80, 0, 0, 0])
    assert decode(stream + coded, [0] * 4).values.tolist() == [0x80]
    # Head bit, gamma(2) and the position code of the first of four come before the only sign bit.
    sign = 1 << 1 + 3 + 2
    assert int.from_bytes(stream, "little") & sign
    positive = (int.from_bytes(stream, "little") ^ sign).to_bytes(len(stream), "little")
    malformed("magnitude", decode, positive + coded, [0] * 4)
    encoder = RangeEncoder()
    write_magnitude(encoder, [32768] * 32, 1 << 8)
    malformed("magnitude", decode, stream + encoder.end(), [0] * 4)


def test_rule_72_the_coders_section_is_the_shortest() -> None:
    stream, coded = context([0] * 4, [3, 0, 5, 0])
    assert decode(stream + coded, [0] * 4).values.tolist() == [3, 5]
    malformed(None, decode, stream + coded + b"\0", [0] * 4)
    malformed(None, decode, stream + coded + b"\1" * 8, [0] * 4)


def test_rule_73_gap_blocks_end() -> None:
    malformed(None, decode_gap, gap((0b11, 2)) + b"\0")


def test_rule_74_xor_masks_are_not_zero() -> None:
    zero = HuffmanTable(np.array([0], np.uint64), np.zeros(1, np.uint8), -1)
    malformed("0", decode, gap((0b11, 2)), [0] * 4, Encoding.GAP_XOR, U8, zero)
    assert decode(gap((0b11, 2)), [9] * 4, Encoding.GAP_OVERWRITE, U8, zero).values.tolist() == [0]


def table(symbols: int, escape: int | None, counts: tuple[int, ...], gaps: tuple[int, ...], width: int = 1) -> Any:
    """Read a table that is written field by field."""
    bits = BitWriter()
    bits.gamma(symbols + 1)
    bits.field(int(escape is not None), 1)
    if symbols + (escape is not None) > 1 and escape is not None:
        bits.field(escape, 4)
    for number in (*(count + 1 for count in counts), *gaps):
        bits.gamma(number)
    return read_table(bits.to_bytes() + bytes(300), width)[0]


def test_rule_75_tables_have_entries() -> None:
    assert table(1, None, (), (6,)).symbols.tolist() == [5]
    assert table(0, 0, (), ()).escape_length == 0
    malformed("without an entry", table, 0, None, (), ())
    malformed("at most 2048", table, 2049, None, (), ())


def test_rule_76_tables_fill_the_code_space() -> None:
    assert table(2, None, (2,), (1, 1)).lengths.tolist() == [1, 1]
    assert table(1, 1, (1,), (4,)).escape_length == 1
    for escape in (0, 13):
        malformed("length", table, 1, escape, (1,), (4,))
    malformed("more than its 2", table, 2, None, (3,), (1, 1, 1))
    malformed("no length", table, 2, None, (0,) * 12, (1, 1))
    malformed("fill", table, 2, None, (1, 1), (1, 1))
    malformed("fill", table, 3, None, (3,), (1, 1, 1))
    malformed("fill", table, 1, 2, (1,), (1,))


def test_rule_77_symbols_of_tables() -> None:
    assert table(1, None, (), (256,)).symbols.tolist() == [255]
    malformed("less than 256", table, 1, None, (), (257,))
    malformed("less than 4294967296", table, 1, None, (), ((1 << 32) + 1,), 8)
    malformed("two codes", table, 3, None, (1, 2), (6, 6, 1))
