"""Golden files: what version 1 of the format once wrote is read for ever, and written again byte for byte.

tests/golden/make.py made them. Bytes that go through zstd, whose versions differ, are compared once decompressed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.document import decode_document
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.huffman import read_table
from dcr_cli.delta.payload import PayloadReader, split_run
from dcr_cli.diff import diff
from dcr_cli.verify import verify
from receivers import fresh_copy, tree

GOLDEN = Path(__file__).parent / "golden" / "dcr-1"
DELTAS = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/delta-*"))


def columns(delta: Path, kind: str, file: str) -> dict[str, object]:
    """A document's columns, without what depends on how well zstd packs payloads."""
    found = decode_document(kind, (delta / file).read_bytes(), None, file)
    return {name: column.tolist() for name, column in found.items() if not name.startswith(("payload.", "run."))}


def test_there_are_golden_deltas() -> None:
    assert len(DELTAS) == 8


@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize("name", DELTAS)
def test_golden_deltas_are_read(name: str, mode: str, tmp_path: Path) -> None:
    delta = GOLDEN / name
    receiver = fresh_copy(delta.parent / "base", tmp_path / "receiver")
    assert not apply(delta, receiver, mode=mode).already
    assert tree(receiver) == tree(delta.parent / "target")
    assert verify(receiver, delta=delta).matches


@pytest.mark.parametrize("name", DELTAS)
def test_golden_deltas_are_written_again(name: str, tmp_path: Path) -> None:
    golden, again = GOLDEN / name, tmp_path / "delta"
    diff(golden.parent / "base", golden.parent / "target", again, encoding=name.rpartition("-")[2])
    for kind, file in (("manifest", "manifest.zst"), ("digests", "digests.zst")):
        assert columns(again, kind, file) == columns(golden, kind, file)
    old, new = (json.loads((delta / "commit.json").read_bytes()) for delta in (golden, again))
    for member in ("format", "requires", "base", "target"):
        assert old[member] == new[member]


def test_streams_are_the_same_bytes(tmp_path: Path) -> None:
    """Nothing in this pair's `context` and `gap` deltas is whole, so that no byte of a payload comes from zstd."""
    for encoding in ("context", "gap"):
        golden, again = GOLDEN / "dtypes" / f"delta-{encoding}", tmp_path / encoding
        assert whole_blocks(golden) == 0
        diff(golden.parent / "base", golden.parent / "target", again, encoding=encoding)
        for path, data in tree(golden / "payloads").items():
            assert (again / "payloads" / path).read_bytes() == data


def whole_blocks(delta: Path) -> int:
    """How many blocks of a delta are whole, in pieces that are or by themselves."""
    opened = open_delta(delta)
    found = 0
    with PayloadReader(delta, opened.manifest.payloads) as payloads:
        for row in opened.manifest.tensors:
            for code, run in ((piece.encoding, run) for piece in row.pieces for run in piece.runs):
                encoding, data = Encoding(code), payloads.run_bytes(run)
                start = read_table(data, DTYPES[row.dtype].width)[1] if encoding.is_gap else 0
                begins = split_run(data, run, start).tolist()
                found += sum(
                    encoding is Encoding.WHOLE or bool(data[begin] & 1)
                    for begin, end in pairwise(begins)
                    if begin < end
                )
    return found
