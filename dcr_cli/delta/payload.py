"""Payload files: the runs of encoded blocks, packed into files, and the form of these (FORMAT 6).

What is in a block is encoding.py's matter. Files are handed out whole to be written; payload_reader.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import LENGTH_BYTES, header_bytes, parse_header, write_safetensors
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.bits import BitReader, BitWriter, write_varint
from dcr_cli.delta.document import FORMAT, HEADER_LIMIT, check_format
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.delta.manifest_rules import PAYLOAD_DATA_LIMIT
from dcr_cli.errors import DamagedError

WIDTHS = (1, 2, 4, 8)
CLASSES, STATES_PER_CLASS = 16, 32
DEFAULT_STATE = 32768
# Per width one bit, and per class gamma(33) and 32 bytes.
HEAD_LIMIT = (len(WIDTHS) * (1 + CLASSES * (11 + 8 * STATES_PER_CLASS)) + 7) // 8
# What is streamed is cut into payloads of about so many bytes, which any block fits, then of this share of what came
# before.
FIRST_PAYLOAD_BYTES, STREAMED_SHARE = 1 << 20, 8
# A block's size is below 2^28, since no run is larger.
_SIZE_VARINT_BYTES = 4

_DEFAULT_STATES = np.full((CLASSES, STATES_PER_CLASS), DEFAULT_STATE, np.uint16)
_DEFAULT_STATES.flags.writeable = False

States = dict[int, NDArray[np.uint16]]
Emit = Callable[[str, bytes], None]


def payload_name(index: int) -> str:
    """The path of payload `index` within a delta."""
    return f"payloads/{index:06d}.safetensors"


class PayloadWriter:
    """Packs blocks into payloads, in the order in which they come; for one thread.

    `emit` gets the name and the bytes of every payload as soon as it is full. At most two payloads are in memory.
    `identity` is what each says besides of the delta that it is part of. With `is_streamed` payloads are small at first
    and grow with what has gone before, so that whoever fetches them while they appear has most of them at the end.
    The numbers of the payloads are `first`, then each `step` more: several writers of one delta take turns.
    """

    def __init__(
        self,
        emit: Emit,
        *,
        data_limit: int = PAYLOAD_DATA_LIMIT,
        identity: Mapping[str, str] | None = None,
        is_streamed: bool = False,
        first: int = 0,
        step: int = 1,
    ) -> None:
        self._emit = emit
        self._first = first
        self._step = step
        self._identity = identity or {}
        # Room is kept for the largest head, so that where payloads are cut does not depend on the head.
        self._most_room = data_limit - HEAD_LIMIT
        self._is_streamed = is_streamed
        self._emitted_bytes = 0
        self._rows: list[PayloadRow] = []
        self._parts: list[bytes] = []
        self._bytes = 0
        self._states: States = {}
        self._runs: list[Run] = []
        self._begin_run(b"")

    def begin_piece(self, table: bytes = b"") -> None:
        """Begin a piece or file, every run of which starts with `table`."""
        if self._runs or self._blocks:
            raise ValueError("the piece before has not ended")
        self._begin_run(table)

    def add_block(self, block: bytes, states: tuple[int, NDArray[np.uint16]] | None = None) -> None:
        """Add the next block of the piece; `states` are the element width and starting states of a context block."""
        size = write_varint(len(block))
        if self._bytes + self._run_bytes + len(size) + len(block) > self._room:
            self._end_run()
            self._emit_payload()
            self._begin_run(self._table)
            if self._run_bytes + len(size) + len(block) > self._room:
                raise ValueError(f"a block of {len(block)} bytes does not fit any payload")
        if states is not None:
            known = self._states.setdefault(states[0], states[1])
            if known is not states[1] and not np.array_equal(known, states[1]):
                raise ValueError("a payload has one set of starting states for a width")
        self._sizes += size
        self._blocks.append(block)
        self._run_bytes += len(size) + len(block)

    def end_piece(self) -> tuple[Run, ...]:
        """End the piece: where its blocks are."""
        self._end_run()
        runs, self._runs = tuple(self._runs), []
        self._begin_run(b"")
        return runs

    def finish(self) -> tuple[PayloadRow, ...]:
        """Emit what is left: the rows of all payloads."""
        if self._runs or self._blocks:
            raise ValueError("the last piece has not ended")
        self._emit_payload()
        return tuple(self._rows)

    @property
    def _room(self) -> int:
        if not self._is_streamed:
            return self._most_room
        return min(self._most_room, max(FIRST_PAYLOAD_BYTES, self._emitted_bytes // STREAMED_SHARE))

    @property
    def _index(self) -> int:
        """The number of the payload that is being filled."""
        return self._first + self._step * len(self._rows)

    def _begin_run(self, table: bytes) -> None:
        self._table = table
        self._sizes = bytearray()
        self._blocks: list[bytes] = []
        self._run_bytes = len(table)

    def _end_run(self) -> None:
        if self._blocks:
            self._runs.append(Run(self._index, self._bytes, self._run_bytes, len(self._blocks)))
            self._parts += (self._table, bytes(self._sizes), *self._blocks)
            self._bytes += self._run_bytes

    def _emit_payload(self) -> None:
        if not self._bytes:
            return
        index = self._index
        data = b"".join((write_head(self._states), *self._parts))
        self._parts, self._bytes, self._states = [], 0, {}
        file = encode_payload(index, data, self._identity)
        self._rows.append(PayloadRow(len(file), object_digest(file)))
        self._emitted_bytes += len(file)
        self._emit(payload_name(index), file)


def encode_payload(index: int, data: bytes, identity: Mapping[str, str] | None = None) -> bytes:
    """Make the file of payload `index` from its data, head and runs, and the `identity` of its delta."""
    metadata = {"format": FORMAT, "kind": "payload", "index": str(index), "blake3": object_digest(data).hex()}
    metadata |= identity or {}
    return write_safetensors({"blocks": ("U8", [len(data)], data)}, metadata)


def write_head(states: States) -> bytes:
    """Encode the starting states [16, 32] of each width.

    In each class they are some of the form 256 b + 128, then DEFAULT_STATE up to the end; ValueError otherwise.
    """
    bits = BitWriter()
    for width in WIDTHS:
        bits.field(int(width in states), 1)
        for row in states[width].tolist() if width in states else ():
            given = len(row)
            while given and row[given - 1] == DEFAULT_STATE:
                given -= 1
            bits.gamma(given + 1)
            for state in row[:given]:
                if state % 256 != 128:
                    raise ValueError(f"state {state} cannot be written")
                bits.field(state >> 8, 8)
    return bits.to_bytes()


def read_head(data: bytes | memoryview) -> tuple[States, int]:
    """Decode the head at the beginning of `data`: the states of all widths, and its bytes. ValueError if malformed."""
    bits = BitReader(data)
    states = dict.fromkeys(WIDTHS, _DEFAULT_STATES)
    for width in WIDTHS:
        if not bits.field(1):
            continue
        states[width] = _DEFAULT_STATES.copy()
        for row in states[width]:
            given = bits.gamma() - 1
            if given > STATES_PER_CLASS:
                raise ValueError(f"{given} states in a class, at most {STATES_PER_CLASS} are possible")
            row[:given] = [256 * bits.field(8) + 128 for _ in range(given)]
    return states, bits.align()


def split_run(data: bytes | memoryview, run: Run, start: int) -> NDArray[np.int64]:
    """Read the sizes of a run's blocks, from byte `start` of it on: where each block begins, and where the last ends.

    `data` are the run's bytes, or so many of its first bytes that they hold the sizes: 4 for a block are always
    enough. ValueError if malformed, or if the blocks do not end with the run.
    """
    head = np.frombuffer(data[start : start + _SIZE_VARINT_BYTES * run.blocks], np.uint8)
    lasts = np.flatnonzero(head < 0x80)[: run.blocks]
    if len(lasts) < run.blocks:
        raise ValueError(f"sizes of {run.blocks} blocks do not fit: at byte {start}")
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    lengths = lasts + 1 - firsts
    bad = (lengths > _SIZE_VARINT_BYTES) | ((lengths > 1) & (head[lasts] == 0))
    if bad.any():
        raise ValueError(f"size of a block is too long: at byte {start + firsts[bad.argmax()]}")
    sizes = np.zeros(run.blocks, np.int64)
    for place in range(int(lengths.max())):
        has = lengths > place
        sizes[has] |= (head[firsts[has] + place].astype(np.int64) & 0x7F) << 7 * place
    first_block = start + int(lasts[-1]) + 1
    bounds = first_block + np.concatenate(([0], np.cumsum(sizes)))
    if bounds[-1] != run.bytes:
        raise ValueError(f"blocks end at byte {bounds[-1]} of a run of {run.bytes}: at byte {first_block}")
    return bounds


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """Where the runs of a payload lie in its file, and the starting states that its context blocks have."""

    states: States
    runs_start: int
    runs_bytes: int


def check_payload_start(
    start: memoryview, total_bytes: int, index: int, content_blake3: bytes | None, what: str
) -> PayloadFacts:
    """Check header and head of payload `index`, whose file has `total_bytes` and begins with `start`.

    `content_blake3`, if given, is the blake3 of its data, which must be the one in its header.
    """
    data_start = LENGTH_BYTES + payload_header_bytes(start, total_bytes, what)
    header = parse_header(bytes(start[:data_start]), total_bytes, what)
    check_format(header.metadata.get("format"), what)
    if header.metadata.get("kind") != "payload":
        raise DamagedError(what, "is not a payload")
    if header.metadata.get("index") != str(index):
        raise DamagedError(what, f"has index {shown(header.metadata.get('index', ''))}, {index} expected")
    if [(entry.name, entry.dtype, len(entry.shape)) for entry in header.tensors] != [("blocks", "U8", 1)]:
        raise DamagedError(what, "does not hold one U8 tensor blocks of rank 1")
    if header.data_bytes > PAYLOAD_DATA_LIMIT:
        raise DamagedError(what, f"has {header.data_bytes} bytes of data, at most {PAYLOAD_DATA_LIMIT} are allowed")
    stated = header.metadata.get("blake3", "")
    if len(stated) != 64 or stated.strip("0123456789abcdef"):
        raise DamagedError(what, "its blake3 is not 64 lower-case hexadecimal digits")
    if content_blake3 is not None and content_blake3.hex() != stated:
        raise DamagedError(what, "its data is not what its own header says: the blake3 differs")
    try:
        states, head_bytes = read_head(start[data_start:])
    except ValueError as error:
        raise DamagedError(what, f"head of the payload: {error}") from error
    return PayloadFacts(states, data_start + head_bytes, header.data_bytes - head_bytes)


def payload_header_bytes(start: memoryview, total_bytes: int, what: str) -> int:
    """The length of a payload's header, from the first bytes of its file."""
    return header_bytes(bytes(start[:64]), total_bytes, what, max_header_bytes=HEADER_LIMIT)
