"""Payloads: runs are packed, found again by their rows, and checked."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.delta.bits import write_varint
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.delta.payload import (
    DEFAULT_STATE,
    HEAD_LIMIT,
    PayloadWriter,
    encode_payload,
    payload_name,
    read_head,
    split_run,
    write_head,
)
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.errors import ConflictError, DamagedError, LocalError

States = NDArray[np.uint16]
Pieces = list[tuple[bytes, list[bytes]]]
PieceRuns = list[tuple[Run, ...]]


def states(seed: int, given: int = 32) -> States:
    rng = np.random.default_rng(seed)
    rows = np.full((16, 32), DEFAULT_STATE, np.uint16)
    for row in rows:
        count = rng.integers(0, given + 1)
        row[:count] = rng.integers(0, 256, count) * 256 + 128
    return rows


def written(folder: Path, pieces: Pieces, limit: int = 64 << 20) -> tuple[PieceRuns, list[PayloadRow]]:
    def emit(name: str, data: bytes) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    writer = PayloadWriter(emit, data_limit=limit)
    runs = []
    for table, blocks in pieces:
        writer.begin_piece(table)
        for block in blocks:
            writer.add_block(block)
        runs.append(writer.end_piece())
    return runs, list(writer.finish())


def blocks_of(reader: PayloadReader, runs: tuple[Run, ...], table: bytes) -> Iterator[bytes]:
    for run in runs:
        data = reader.run_bytes(run)
        assert data[: len(table)] == table
        bounds = split_run(data, run, len(table)).tolist()
        assert len(bounds) == run.blocks + 1
        for start, end in pairwise(bounds):
            yield bytes(data[start:end])


PIECES = st.lists(
    st.tuples(st.binary(max_size=40), st.lists(st.integers(0, 9) | st.integers(0, 900), min_size=1, max_size=9)),
    max_size=6,
)


@given(PIECES, st.integers(0, 2000))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[bytes, list[int]]], room: int) -> None:
    folder = tmp_path_factory.mktemp("delta")
    rnd = random.Random(3)
    pieces = [(table, [rnd.randbytes(size) for size in sizes]) for table, sizes in shape]
    limit = HEAD_LIMIT + 1000 + room
    all_runs, rows = written(folder, pieces, limit)
    with PayloadReader(folder, rows) as reader:
        reader.verify_all(2)
        for (table, blocks), runs in zip(pieces, all_runs, strict=True):
            assert list(blocks_of(reader, runs, table)) == blocks
    for index, row in enumerate(rows):
        data = (folder / payload_name(index)).read_bytes()
        assert (len(data), object_digest(data)) == (row.bytes, row.blake3)
        assert len(data) < limit + 400
    assert len(os.listdir(folder / "payloads") if rows else []) == len(rows)


def test_a_piece_that_crosses_payloads_has_a_run_with_its_table_in_each(tmp_path: Path) -> None:
    blocks = [bytes([i]) * 300 for i in range(10)]
    (runs,), rows = written(tmp_path, [(b"table", blocks)], HEAD_LIMIT + 1000)
    assert [run.payload for run in runs] == [0, 1, 2, 3]
    assert [run.blocks for run in runs] == [3, 3, 3, 1]
    assert [run.offset for run in runs] == [0, 0, 0, 0]
    with PayloadReader(tmp_path, rows) as reader:
        assert list(blocks_of(reader, runs, b"table")) == blocks
        assert bytes(reader.run_bytes(runs[0], 0, 5)) == b"table"
        assert bytes(reader.run_bytes(runs[0], 5, 11)) == write_varint(300) * 3


def test_the_same_blocks_give_the_same_bytes() -> None:
    emitted: list[list[tuple[str, bytes]]] = [[], []]
    for files in emitted:
        writer = PayloadWriter(lambda name, data, files=files: files.append((name, data)))  # type: ignore[misc]
        for number in range(3):
            writer.begin_piece(b"")
            writer.add_block(b"x" * number, (2, states(5)))
            writer.end_piece()
        writer.finish()
    assert emitted[0] == emitted[1]
    assert [name for name, _ in emitted[0]] == ["payloads/000000.safetensors"]


def test_payloads_are_emitted_as_soon_as_they_are_full() -> None:
    emitted: list[int] = []
    writer = PayloadWriter(lambda name, data: emitted.append(len(data)))
    writer.begin_piece(b"")
    for number in range(300):
        writer.add_block(bytes(524_288))
        assert len(emitted) == number // 127
    runs = writer.end_piece()
    assert [run.payload for run in runs] == [0, 1, 2]
    assert all(run.bytes <= 64 << 20 for run in runs)
    rows = writer.finish()
    assert [row.bytes for row in rows] == emitted
    assert max(emitted) <= 67_174_408


def test_the_head_has_the_states_of_the_payloads_own_blocks(tmp_path: Path) -> None:
    def emit(name: str, data: bytes) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)

    writer = PayloadWriter(emit, data_limit=HEAD_LIMIT + 100)
    writer.begin_piece(b"")
    writer.add_block(bytes(60), (2, states(1)))
    writer.add_block(bytes(30), (8, states(2)))
    writer.add_block(bytes(60), (4, states(3)))
    writer.add_block(bytes(80))
    writer.end_piece()
    default = np.full((16, 32), DEFAULT_STATE)
    with PayloadReader(tmp_path, writer.finish()) as reader:
        for index, expected in enumerate(({2: 1, 8: 2}, {4: 3}, {})):
            for width, found in reader.states(index).items():
                np.testing.assert_array_equal(found, states(expected[width]) if width in expected else default)


def test_a_payload_has_one_set_of_states_for_a_width() -> None:
    writer = PayloadWriter(lambda name, data: None)
    writer.begin_piece(b"")
    writer.add_block(b"", (2, states(1)))
    writer.add_block(b"", (2, states(1)))
    with pytest.raises(ValueError, match="one set"):
        writer.add_block(b"", (2, states(2)))


def test_no_blocks_make_no_payload() -> None:
    writer = PayloadWriter(lambda name, data: pytest.fail("emitted"))
    writer.begin_piece(b"table")
    assert writer.end_piece() == ()
    assert writer.finish() == ()


def test_pieces_begin_and_end_in_turn() -> None:
    writer = PayloadWriter(lambda name, data: None, data_limit=HEAD_LIMIT + 100)
    writer.begin_piece(b"")
    writer.add_block(b"x")
    with pytest.raises(ValueError, match="not ended"):
        writer.begin_piece(b"")
    with pytest.raises(ValueError, match="not ended"):
        writer.finish()
    with pytest.raises(ValueError, match="does not fit"):
        writer.add_block(bytes(101))


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.tuples(st.integers(0, 99), st.integers(0, 32))))
def test_head_round_trip(widths: dict[int, tuple[int, int]]) -> None:
    given_states = {width: states(*facts) for width, facts in widths.items()}
    data = write_head(given_states)
    assert len(data) <= HEAD_LIMIT
    found, size = read_head(data + b"\xff\xff")
    assert size == len(data)
    assert list(found) == [1, 2, 4, 8]
    for width, rows in found.items():
        np.testing.assert_array_equal(rows, given_states.get(width, np.full((16, 32), DEFAULT_STATE)))
    for cut in {0, len(data) // 3, len(data) // 2, len(data) - 1} - {len(data)}:
        with pytest.raises(ValueError, match="at bit"):
            read_head(data[:cut])


def test_the_largest_head_is_the_limit() -> None:
    assert len(write_head({width: np.full((16, 32), 128, np.uint16) for width in (1, 2, 4, 8)})) == HEAD_LIMIT


def test_states_that_no_head_can_say_are_not_written() -> None:
    rows = states(1)
    rows[3, 0] = 129
    with pytest.raises(ValueError, match="129"):
        write_head({2: rows})


@given(st.lists(st.integers(0, 200) | st.integers(0, 40_000), min_size=1, max_size=50), st.integers(0, 9))
def test_split_run_round_trip(sizes: list[int], start: int) -> None:
    head = bytes(start) + b"".join(map(write_varint, sizes))
    run = Run(0, 0, len(head) + sum(sizes), len(sizes))
    bounds = split_run(head + bytes(sum(sizes)), run, start)
    assert bounds[0] == len(head)
    assert np.diff(bounds).tolist() == sizes
    # The beginning of a run is enough.
    np.testing.assert_array_equal(split_run(head, run, start), bounds)


def test_sizes_of_other_forms_are_refused() -> None:
    for head in (b"\x80\x00", b"\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80\x00"):
        with pytest.raises(ValueError, match="at byte 0"):
            split_run(head + bytes(40), Run(0, 0, len(head) + 40, 1), 0)


def test_many_readers_at_once(tmp_path: Path) -> None:
    rnd = random.Random(1)
    pieces = [(b"", [rnd.randbytes(rnd.randrange(400))]) for _ in range(400)]
    all_runs, rows = written(tmp_path, pieces, HEAD_LIMIT + 1000)
    assert len(rows) > 40
    with PayloadReader(tmp_path, rows) as reader, ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda runs: list(blocks_of(reader, runs, b"")), all_runs * 3)
        assert list(found) == [blocks for _, blocks in pieces] * 3


@contextmanager
def damaged(match: str) -> Iterator[None]:
    with pytest.raises(DamagedError, match=match) as caught:
        yield
    assert "payloads/000000.safetensors" in caught.value.what


def test_what_stands_in_the_place_of_a_payload(tmp_path: Path) -> None:
    path = tmp_path / payload_name(0)
    row = PayloadRow(100, bytes(32))
    with damaged("missing"):
        PayloadReader(tmp_path, [row])
    path.parent.mkdir()
    path.mkdir()
    with damaged("directory"):
        PayloadReader(tmp_path, [row])
    path.rmdir()
    os.mkfifo(path)
    with damaged("FIFO"):
        PayloadReader(tmp_path, [row])
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(LocalError, match="cannot be read"):
        PayloadReader(tmp_path, [row])
    path.unlink()
    page = b"<html>" + bytes(94)
    path.write_bytes(page)
    with damaged("HTML"), PayloadReader(tmp_path, [PayloadRow(100, object_digest(page))]) as reader:
        reader.verify_all(1)


def test_a_payload_that_changes_is_seen(tmp_path: Path) -> None:
    (runs,), rows = written(tmp_path, [(b"", [b"abc"])])
    path = tmp_path / payload_name(0)
    with PayloadReader(tmp_path, rows) as reader:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.rename(path)
        with pytest.raises(ConflictError, match="changed while reading"):
            reader.run_bytes(runs[0])


def test_a_linked_payload_is_read(tmp_path: Path) -> None:
    (runs,), rows = written(tmp_path, [(b"", [b"abc"])])
    path = tmp_path / payload_name(0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with PayloadReader(tmp_path, rows) as reader:
        reader.verify_all(1)
        assert list(blocks_of(reader, runs, b"")) == [b"abc"]


def test_verify_tells_its_progress_and_needs_no_payloads(tmp_path: Path) -> None:
    _, rows = written(tmp_path, [(b"", [bytes(900)])] * 5, HEAD_LIMIT + 1000)
    told: list[int] = []
    with PayloadReader(tmp_path, rows) as reader:
        reader.verify_all(3, told.append)
    assert told == [row.bytes for row in rows]
    with PayloadReader(tmp_path, []) as reader:
        reader.verify_all(3)


def test_metadata_says_what_it_is() -> None:
    assert b'{"format":"dcr-1","kind":"payload","index":"7","blake3":"' in encode_payload(7, b"x")


def test_streamed_payloads_grow() -> None:
    def sizes_of(count: int, *, is_streamed: bool) -> list[int]:
        sizes: list[int] = []
        writer = PayloadWriter(lambda name, data: sizes.append(len(data)), is_streamed=is_streamed)
        writer.begin_piece()
        for _ in range(count):
            writer.add_block(bytes(400_000))
        assert sum(run.blocks for run in writer.end_piece()) == count
        assert [row.bytes for row in writer.finish()] == sizes
        return sizes

    assert len(sizes_of(100, is_streamed=False)) == 1
    streamed = sizes_of(100, is_streamed=True)
    assert streamed[0] < 2 << 20
    # Whoever fetches them while they come has most of all when the last one comes.
    assert max(streamed[-2:]) * 6 < sum(streamed)
    assert len(streamed) < 40
