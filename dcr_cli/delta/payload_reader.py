"""Reads the payloads of a delta's folder: checks them against their rows, and gives the bytes of runs.

What is in a payload file is payload.py's matter.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from dcr_cli.checkpoint.digest import ObjectHasher
from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.folder import Files, Identity, identity_of
from dcr_cli.checkpoint.header import LENGTH_BYTES
from dcr_cli.delta.document import COPY_DELTA, HEADER_LIMIT
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.delta.payload import (
    HEAD_LIMIT,
    PayloadFacts,
    States,
    check_payload_start,
    payload_header_bytes,
    payload_name,
)
from dcr_cli.errors import DamagedError, LocalError, hint_of


class ReadsPayloads(Protocol):
    """The payloads of a delta, wherever they are; `folder` is what they are called by."""

    folder: Path
    count: int

    def states(self, index: int) -> States: ...

    def runs_bytes(self, index: int) -> int: ...

    def run_bytes(self, run: Run, start: int = 0, stop: int | None = None) -> memoryview: ...


class PayloadReader:
    """Reads the payloads of the delta in `folder`; a context manager, for any number of threads.

    DamagedError if a payload is missing, has another size than its row says, or is malformed; ConflictError if it is
    another file than it was when the reader was made.
    """

    def __init__(self, folder: Path, rows: Sequence[PayloadRow]) -> None:
        self.folder = folder
        self.count = len(rows)
        self._rows = rows
        self._files = Files(folder, {payload_name(i): self._identity(i, row) for i, row in enumerate(rows)})
        self._facts: dict[int, PayloadFacts] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def verify_all(self, jobs: int, progress: Callable[[int], None] | None = None) -> None:
        """Check every byte of every payload against its row; `progress` gets the bytes of each as it is done."""
        with ThreadPoolExecutor(max(1, min(jobs, len(self._rows))), "dcr-payload") as pool:
            try:
                for row, _ in zip(self._rows, pool.map(self.verify, range(len(self._rows))), strict=True):
                    if progress is not None:
                        progress(row.bytes)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def verify(self, index: int) -> None:
        """Check every byte of one payload against its row."""
        what, row = self._what(index), self._rows[index]
        whole, content = ObjectHasher(), ObjectHasher()
        left_of_header = None
        for part in self._files.parts_of(payload_name(index)):
            whole.update(part)
            if left_of_header is None:
                left_of_header = LENGTH_BYTES + payload_header_bytes(part, row.bytes, what)
            content.update(part[left_of_header:])
            left_of_header = max(0, left_of_header - len(part))
        if whole.digest() != row.blake3:
            raise DamagedError(what, "is not the payload that the manifest names: its blake3 differs", hint=COPY_DELTA)
        self._read_facts(index, content.digest())

    def states(self, index: int) -> States:
        """The starting states of payload `index`."""
        return self._known_facts(index).states

    def runs_bytes(self, index: int) -> int:
        """How many bytes the runs of payload `index` have together."""
        return self._known_facts(index).runs_bytes

    def run_bytes(self, run: Run, start: int = 0, stop: int | None = None) -> memoryview:
        """Read the bytes `start` to `stop` of a run, all of them if not told otherwise."""
        facts = self._known_facts(run.payload)
        if run.offset + run.bytes > facts.runs_bytes:
            end = run.offset + run.bytes
            raise DamagedError(self._what(run.payload), f"has {facts.runs_bytes} bytes of runs, one ends at {end}")
        buffer = memoryview(bytearray(min(run.bytes, run.bytes if stop is None else stop) - start))
        self._files.read_path_into(payload_name(run.payload), facts.runs_start + run.offset + start, buffer)
        return buffer

    def _identity(self, index: int, row: PayloadRow) -> Identity:
        what = self._what(index)
        try:
            status = os.stat(what)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedError(what, "is missing, though the manifest names it", hint=COPY_DELTA) from error
        except OSError as error:
            raise LocalError(what, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(what, f"is {file_kind(status.st_mode)}, not a payload")
        if status.st_size != row.bytes:
            raise DamagedError(what, f"has {status.st_size} bytes, the manifest says {row.bytes}", hint=COPY_DELTA)
        return identity_of(status)

    def _what(self, index: int) -> str:
        return str(self.folder / payload_name(index))

    def _known_facts(self, index: int) -> PayloadFacts:
        # Two threads may both read them; they find the same.
        return self._facts.get(index) or self._read_facts(index, None)

    def _read_facts(self, index: int, content_blake3: bytes | None) -> PayloadFacts:
        limit = LENGTH_BYTES + HEADER_LIMIT + HEAD_LIMIT
        start = memoryview(bytearray(min(self._rows[index].bytes, limit)))
        self._files.read_path_into(payload_name(index), 0, start)
        facts = check_payload_start(start, self._rows[index].bytes, index, content_blake3, self._what(index))
        self._facts[index] = facts
        return facts
