"""Turns the scanned blocks of pieces, given in order, into payloads: decides, codes in parallel, writes in order.

It holds blocks back only as long as FORMAT 5.8 asks: until a piece has an encoding and a width has starting states.
Scanning is diff.py's work and packing payload.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from dcr_cli.checkpoint.header import Dtype
from dcr_cli.delta.choice import SAMPLE_BLOCKS, Allowed, Choice, StatesSample, choose
from dcr_cli.delta.encoding import Draft, Encoding, LoadBlock, States, encode_block
from dcr_cli.delta.huffman import write_table
from dcr_cli.delta.manifest import Run
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.stages import Stages

# A task codes at least this many elements where it can, so that small tensors do not cost a task each.
TASK_ELEMENTS = 1 << 18
TASK_ITEMS = 1024

# At most so many blocks, and so many bytes of drafts, wait for an encoding or for starting states to be decided.
HELD_BLOCKS = 1 << 16
HELD_BYTES = 16 << 20

PieceDone = Callable[[Encoding, tuple[Run, ...]], None]


@dataclass(slots=True)
class _Begin:
    choice: Choice


@dataclass(slots=True)
class _Block:
    draft: Draft | None
    load: LoadBlock | None
    choice: Choice
    width: int


@dataclass(slots=True)
class _End:
    choice: Choice
    done: PieceDone


_Item = _Begin | _Block | _End


class PieceEncoder:
    """Codes pieces one after the other. One thread calls it; `pool` does the coding.

    begin, then add for every block in order (None: nothing changed in it), then end; close after the last piece.
    `done` of a piece is called with its encoding and runs, at the latest in close.
    """

    def __init__(
        self, pool: Executor, writer: PayloadWriter, allowed: Allowed, *, tasks: int, stages: Stages | None = None
    ) -> None:
        self._pool = pool
        self._stages = stages or Stages()
        self._writer = writer
        self._allowed = allowed
        self._tasks = tasks
        self._samples: dict[int, StatesSample] = {}
        self._states: States = {}
        self._choice: Choice | None = None
        self._dtype: Dtype | None = None
        self._held: list[tuple[Draft | None, LoadBlock | None]] = []
        self._held_changed = 0
        self._held_bytes = 0
        # Items whose starting states are not decided, the task that is being filled, tasks that run: all in the order
        # of the payloads.
        self._waiting: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._filling: list[_Item] = []
        self._filling_elements = 0
        self._running: deque[tuple[list[_Item], Future[list[bytes]] | None]] = deque()

    @property
    def has_chosen(self) -> bool:
        """Whether all is chosen for the piece, its starting states too, so that its blocks to come are no sample."""
        if self._choice is None or self._dtype is None:
            return False
        return self._choice.encoding is not Encoding.CONTEXT or self._dtype.width in self._states

    def begin(self, dtype: Dtype, choice: Choice | None) -> None:
        """Begin a piece; with `choice` None it is chosen from the first blocks."""
        self._dtype = dtype
        self._choice = choice
        self._held = []
        self._held_changed = 0
        self._held_bytes = 0
        if choice is not None:
            self._waiting.append(_Begin(choice))

    def add(self, draft: Draft | None, load: LoadBlock | None) -> None:
        """Add the piece's next block."""
        if self._choice is not None:
            self._put(draft, load)
            return
        self._held.append((draft, load))
        self._held_changed += draft is not None
        self._held_bytes += draft.held_bytes if draft is not None else 0
        is_full = len(self._held) == HELD_BLOCKS or self._held_bytes >= HELD_BYTES
        if self._held_changed == SAMPLE_BLOCKS or is_full:
            self._decide(complete=False)

    def end(self, done: PieceDone) -> None:
        """End the piece, which has at least one block that changed."""
        if self._choice is None:
            self._decide(complete=True)
        assert self._choice is not None
        self._waiting.append(_End(self._choice, done))
        self._fill_tasks()

    def close(self) -> None:
        """Code and write all that is left."""
        for width, sample in self._samples.items():
            self._states.setdefault(width, sample.states())
        self._fill_tasks()
        self._start_task()
        while self._running:
            self._write_first()

    def _decide(self, *, complete: bool) -> None:
        assert self._dtype is not None
        sample = [(draft, load) for draft, load in self._held if draft is not None and load is not None]
        alone = complete and len(self._held) == 1
        self._choice = choose(sample, self._dtype, self._allowed, complete=complete, alone=alone)
        self._waiting.append(_Begin(self._choice))
        held, self._held = self._held, []
        for draft, load in held:
            self._put(draft, load)

    def _put(self, draft: Draft | None, load: LoadBlock | None) -> None:
        assert self._choice is not None and self._dtype is not None
        width = self._dtype.width
        if draft is not None and self._choice.encoding is Encoding.CONTEXT and width not in self._states:
            sample = self._samples.setdefault(width, StatesSample())
            sample.add(draft)
            if sample.is_full:
                self._states[width] = sample.states()
        self._waiting.append(_Block(draft, load, self._choice, width))
        self._waiting_bytes += draft.held_bytes if draft is not None else 0
        self._fill_tasks()
        is_full = len(self._waiting) >= HELD_BLOCKS or self._waiting_bytes >= HELD_BYTES
        first = self._waiting[0] if is_full else None
        if isinstance(first, _Block):
            self._states[first.width] = self._samples[first.width].states()
            self._fill_tasks()

    def _can_code(self, item: _Item) -> bool:
        return not (
            isinstance(item, _Block)
            and item.draft is not None
            and item.choice.encoding is Encoding.CONTEXT
            and item.width not in self._states
        )

    def _fill_tasks(self) -> None:
        """Move items whose starting states are known into tasks; small ones wait for company."""
        while self._waiting and self._can_code(self._waiting[0]):
            item = self._waiting.popleft()
            self._filling.append(item)
            if isinstance(item, _Block) and item.draft is not None:
                self._filling_elements += item.draft.elements
                self._waiting_bytes -= item.draft.held_bytes
            if self._filling_elements >= TASK_ELEMENTS or len(self._filling) >= TASK_ITEMS:
                self._start_task()
                while self._running and (self._first_is_done() or len(self._running) > self._tasks):
                    self._write_first()

    def _start_task(self) -> None:
        items, self._filling, self._filling_elements = self._filling, [], 0
        blocks = [item for item in items if isinstance(item, _Block) and item.draft is not None]
        states = dict(self._states)
        self._running.append((items, self._pool.submit(self._code, blocks, states) if blocks else None))

    def _first_is_done(self) -> bool:
        future = self._running[0][1]
        return future is None or future.done()

    def _write_first(self) -> None:
        items, future = self._running.popleft()
        coded = future.result() if future is not None else []
        with self._stages.timed("write", sum(map(len, coded))):
            self._write(items, iter(coded))

    def _write(self, items: list[_Item], coded: Iterator[bytes]) -> None:
        for item in items:
            if isinstance(item, _Begin):
                self._writer.begin_piece(write_table(item.choice.table) if item.choice.table is not None else b"")
            elif isinstance(item, _End):
                item.done(item.choice.encoding, self._writer.end_piece())
            elif item.draft is None:
                self._writer.add_block(b"", None)
            elif item.choice.encoding is Encoding.CONTEXT:
                self._writer.add_block(next(coded), (item.width, self._states[item.width]))
            else:
                self._writer.add_block(next(coded), None)

    def _code(self, blocks: list[_Block], states: States) -> list[bytes]:
        coded = []
        with self._stages.timed("code", sum(block.draft.elements * block.width for block in blocks if block.draft)):
            for block in blocks:
                assert block.draft is not None and block.load is not None
                choice = block.choice
                coded.append(encode_block(block.draft, choice.encoding, block.width, states, choice.table, block.load))
        return coded
