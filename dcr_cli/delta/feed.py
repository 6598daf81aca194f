"""Hands what is written to where it is packed: the scanned blocks of a piece to the encoder, those of a file at once.

A piece in which nothing changes is never begun.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dcr_cli.checkpoint.header import Dtype
from dcr_cli.delta.choice import Choice
from dcr_cli.delta.encoder import PieceDone, PieceEncoder
from dcr_cli.delta.encoding import BLOCK_BYTES, Draft, Encoding, LoadBlock
from dcr_cli.delta.manifest import Run
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.delta.scan import whole_draft
from dcr_cli.delta.whole import encode_whole

# How many elements a block that did not change has, and how it is read.
Unchanged = Callable[[int], tuple[int, LoadBlock]]


class PieceFeed:
    """The blocks of one piece on their way to an encoder, which no other piece uses meanwhile.

    `whole`: whatever changed, the piece is coded whole; then it has all blocks, and `unchanged` gives those that did
    not change.
    """

    def __init__(self, encoder: PieceEncoder, dtype: Dtype, unchanged: Unchanged, *, whole: bool) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._unchanged = unchanged
        self._whole = whole
        self._blocks = 0
        self.is_begun = False
        self.changed = 0

    def add(self, draft: Draft | None, load: LoadBlock | None) -> None:
        """Add the next block; None if nothing changed in it."""
        if draft is not None and not self.is_begun:
            self.is_begun = True
            self._encoder.begin(self._dtype, Choice(Encoding.WHOLE, None) if self._whole else None)
            for earlier in range(self._blocks):
                self._add_unchanged(earlier)
        if draft is not None:
            self.changed += draft.changed
            self._encoder.add(draft, load)
        elif self.is_begun:
            self._add_unchanged(self._blocks)
        self._blocks += 1

    def end(self, done: PieceDone) -> None:
        """After the last block; `done` is called as the encoder says, if anything changed."""
        if self.is_begun:
            self._encoder.end(done)

    def _add_unchanged(self, block: int) -> None:
        """A block without changes takes nothing, unless its piece is whole, where all blocks are written."""
        if self._whole:
            elements, load = self._unchanged(block)
            self._encoder.add(whole_draft(elements), load)
        else:
            self._encoder.add(None, None)


def write_file(writer: PayloadWriter, data: bytes) -> tuple[Run, ...]:
    """Write all of a file, between two pieces: where its blocks are."""
    writer.begin_piece(b"")
    for start in range(0, max(len(data), 1), BLOCK_BYTES):
        writer.add_block(encode_whole(np.frombuffer(data[start : start + BLOCK_BYTES], np.uint8)), None)
    return writer.end_piece()
