"""A receiver's own folder `.dcr/` (FORMAT 12): its lock, the marker of a change in progress, and what finishing it
needs.

What a change is, and whether it can be finished, is change.py's business; fresh.py builds new folders.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.in_progress import LOCK_FILE, MAX_MARKER_BYTES, STATE_FOLDER
from dcr_cli.durable import NEW_FILE_MODE, PRIVATE_FOLDER_MODE, Folder
from dcr_cli.errors import DamagedError, DcrError
from dcr_cli.locking import lock_folder
from dcr_cli.receiver.base import Base, Digests, decode_base, encode_base
from dcr_cli.receiver.marker import MARKER, REPAIR, Marker, decode_marker, encode_marker
from dcr_cli.receiver.passes.journal import Chunk
from dcr_cli.receiver.places import CONFIG, check_changeable
from dcr_cli.receiver.record import STATE_NAME, TABLE_NAME
from dcr_cli.receiver.view import NOTE_NAME

STAGE, JOURNAL, HELD = "stage", "journal", "held"
LOCK = LOCK_FILE.rpartition("/")[2]
BASE_NAME = "base"
HELD_CONFIG = f"{HELD}/{CONFIG}"
BASE_LIMIT = 1 << 40
_READ_MODE = 0o555
_BATCH_NAME = re.compile(r"([0-9]{6,9})\.(commit|done)")


@dataclass(frozen=True, slots=True)
class Batch:
    """Components, by number, whose staged files and journal are durable; from here on they are finished, not begun
    again."""

    number: int
    components: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    is_done: bool


class Receiver:
    """The state folder of the checkpoint in `root`, made and locked; a context manager."""

    def __init__(self, root: Folder) -> None:
        if root.status(STATE_FOLDER) is None:
            # What can be made but not removed again would stay.
            check_changeable(root)
        self.root = root
        locked = lock_folder(root, STATE_FOLDER, LOCK, PRIVATE_FOLDER_MODE)
        self.home, self._lock, self.was_made = locked.folder, locked.lock, locked.was_made
        # Whether its folder stays when all is done: it was there before, or holds a record now, or is another's.
        self.keeps_home = not self.was_made
        # Whether what is staged outlives an end without a marker, for the next run to go on with.
        self.keeps_staged = False
        try:
            # Whoever asks for no marker tidies up nothing that one tells of.
            self.is_marked = self.home.status(MARKER) is not None
            self.open_to_readers(os.fstat(root.fd))
        except BaseException:
            with self._lock, self.home:
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What went wrong before is the cause to report, not that tidying up failed after it; the next run tidies up
        # too.
        with suppress(DcrError) if error is not None else nullcontext(), self._lock, self.home:
            if not (self.is_marked or self.keeps_staged):
                self.clear()
                if not self.keeps_home:
                    self.home.remove(LOCK)
                    # Another process may be about to lock it.
                    self.root.remove_folder(STATE_FOLDER, used_ok=True)

    def open_to_readers(self, folder: os.stat_result) -> None:
        """Let those who may read a checkpoint in a folder with this status see whether it is complete, and its record.

        What is staged, held or locked stays its owner's alone.
        """
        own = os.fstat(self.home.fd)
        if os.geteuid() in (0, own.st_uid):
            self.home.set_mode(stat.S_IMODE(own.st_mode) & 0o777 | folder.st_mode & _READ_MODE)

    # The marker

    def read_marker(self) -> Marker | None:
        """The change that was begun and not finished, if there is one; then nothing of it is tidied up any more."""
        text = self.home.read(MARKER, MAX_MARKER_BYTES)
        self.is_marked = text is not None
        return decode_marker(text, str(self.home.path / MARKER)) if text is not None else None

    def write_marker(self, marker: Marker) -> None:
        """Say, durably, that a change is in progress; its BASE_NAME must be durable already."""
        self.is_marked = True
        self.home.replace_file(MARKER, encode_marker(marker), NEW_FILE_MODE)
        self.root.sync()

    def remove_marker(self) -> None:
        self.home.remove(MARKER)
        self.home.sync()
        self.is_marked = False

    # What is being prepared

    def begin(self) -> None:
        """Make the folders for a change, after check_notes. Whatever lay in them is removed first."""
        self.clear()
        self.check_notes()
        for name in (STAGE, JOURNAL):
            self.home.make_folder(name, PRIVATE_FOLDER_MODE)
        self.home.sync()

    def check_notes(self) -> None:
        """Raise DamagedError if something else than a file has a name that what is noted in the end needs."""
        for name in (STATE_NAME, TABLE_NAME, NOTE_NAME):
            status = self.home.status(name)
            if status is not None and not stat.S_ISREG(status.st_mode):
                facts = f"is {file_kind(status.st_mode)}, where a file has to be"
                raise DamagedError(str(self.home.path / name), facts, hint="remove it")

    def resume(self) -> None:
        """Make the folders for a change that was begun, where somebody has removed them."""
        for name in (STAGE, JOURNAL):
            self.home.make_folder(name, PRIVATE_FOLDER_MODE, exist_ok=True)
        self.home.sync()

    def clear(self) -> None:
        """Remove what a change prepared; put back what was held."""
        for name in (STAGE, JOURNAL):
            self.home.remove_tree(name, missing_ok=True)
        self.put_back_held()

    def put_back_held(self) -> None:
        """Put back a config that was held and that no marker tells of any more."""
        if self.home.status(HELD_CONFIG) is not None and self.root.status(CONFIG) is None:
            self.home.rename(HELD_CONFIG, self.root, CONFIG)
            self.root.sync()
        self.release_held()

    def release_held(self) -> None:
        """Remove, durably, what was held and is not needed any more."""
        if self.home.status(HELD) is not None:
            self.home.remove_tree(HELD)
            self.home.sync()

    def write_base(self, base: Base, digests: Digests) -> bytes:
        """Write down, durably, what is being changed, with the digests of its tensors; the blake3 of what was
        written."""
        data = encode_base(base, digests)
        self.home.replace_file(f"{JOURNAL}/{BASE_NAME}", data)
        return object_digest(data)

    def read_base(self, marker: Marker) -> tuple[Base, Digests]:
        what = str(self.home.path / JOURNAL / BASE_NAME)
        data = self.home.read(f"{JOURNAL}/{BASE_NAME}", BASE_LIMIT)
        if data is None or object_digest(data) != marker.base_blake3:
            facts = "is missing" if data is None else "is not what was written"
            raise DamagedError(what, f"{facts}; the change in progress cannot be finished", hint=REPAIR)
        return decode_base(data, self.root.path, what)

    def write_batch(self, batch: Batch) -> None:
        """Say, durably, that the components of `batch` are to be finished."""
        self.home.replace_file(f"{JOURNAL}/{batch.number:06d}.commit", _encode_batch(batch))

    def end_batch(self, number: int) -> None:
        """Say, durably, that the components of a batch are done."""
        self.home.rename(f"{JOURNAL}/{number:06d}.commit", self.home, f"{JOURNAL}/{number:06d}.done")
        self.home.sync(JOURNAL)

    def read_batches(self) -> list[Batch]:
        with self.home.open_folder(JOURNAL) as folder:
            batches = []
            for match in filter(None, map(_BATCH_NAME.fullmatch, folder.names())):
                text = folder.read(match[0], BASE_LIMIT)
                if text is not None:
                    what = str(folder.path / match[0])
                    batches.append(_decode_batch(int(match[1]), text, what, is_done=match[2] == "done"))
            return batches


def _encode_batch(batch: Batch) -> bytes:
    chunks = [[c.file, c.offset, c.size, c.blake3.hex(), int(c.is_alone)] for c in batch.chunks]
    text = json.dumps({"components": batch.components, "chunks": chunks}).encode()
    return text + b"\n" + object_digest(text).hex().encode() + b"\n"


def _decode_batch(number: int, data: bytes, what: str, *, is_done: bool) -> Batch:
    text, _, digest = data.partition(b"\n")
    if digest.strip() != object_digest(text).hex().encode():
        raise DamagedError(what, "is not what was written", hint=REPAIR)
    document = json.loads(text)
    chunks = tuple(
        Chunk(file, offset, size, bytes.fromhex(digest), bool(is_alone))
        for file, offset, size, digest, is_alone in document["chunks"]
    )
    return Batch(number, tuple(document["components"]), chunks, is_done)
