"""A receiver's own folder `.dcr/` (FORMAT 12): its lock, the marker of a change in progress, and what finishing it
needs.

What a change is, and whether it can be finished, is change.py's business; fresh.py builds new folders.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import FileDigest, Shard, Tensor
from dcr_cli.checkpoint.digest import DIGEST_BYTES, State, blake3_text, object_digest, parse_blake3
from dcr_cli.checkpoint.header import DTYPES, parse_header
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, LOCK_FILE, MAX_MARKER_BYTES, STATE_FOLDER
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.durable import NEW_FILE_MODE, PRIVATE_FOLDER_MODE, Folder
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError
from dcr_cli.locking import lock_folder
from dcr_cli.receiver.journal import Chunk
from dcr_cli.receiver.places import CONFIG, check_changeable
from dcr_cli.receiver.plan import Base

# The format of a marker of one delta, and of one of several, which a dcr that knows of one alone must not finish.
MARKER_FORMAT, CHAIN_FORMAT = 1, 2
STAGE, JOURNAL, HELD = "stage", "journal", "held"
MARKER, LOCK = (path.rpartition("/")[2] for path in (IN_PROGRESS, LOCK_FILE))
BASE_NAME = "base"
HELD_CONFIG = f"{HELD}/{CONFIG}"
BASE_LIMIT = 1 << 40
_READ_MODE = 0o555
_REPAIR = "start again from a full copy of a checkpoint"
_BATCH_NAME = re.compile(r"([0-9]{6,9})\.(commit|done)")

Digests = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Marker:
    """Which change is in progress.

    `commits` are the blake3 of the commits of its deltas, in order. For people: `deltas` is where these lay, and
    `remote`, if it is not None, where they come from. `base_blake3` binds the file BASE_NAME.
    """

    commits: tuple[bytes, ...]
    deltas: tuple[str, ...]
    base: State
    target: State
    mode: str
    is_exact: bool
    base_blake3: bytes
    remote: str | None = None


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
        """Make the folders for a change. Whatever lay in them is removed first."""
        self.clear()
        for name in (STAGE, JOURNAL):
            self.home.make_folder(name, PRIVATE_FOLDER_MODE)
        self.home.sync()

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
            raise DamagedError(what, f"{facts}; the change in progress cannot be finished", hint=_REPAIR)
        return decode_base(data, what)

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


def encode_marker(marker: Marker) -> bytes:
    text = _encode_marker(marker, marker.deltas)
    # What is only for people must not make a marker that cannot be read.
    return text if len(text) <= MAX_MARKER_BYTES else _encode_marker(marker, ("",) * len(marker.deltas))


def _encode_marker(marker: Marker, deltas: Sequence[str]) -> bytes:
    folders = [_text(delta) for delta in deltas]
    document: dict[str, Any] = {
        "format": MARKER_FORMAT if len(folders) == 1 else CHAIN_FORMAT,
        "commit": blake3_text(marker.commits[-1]),
        "delta": folders[-1],
        "base": _state_members(marker.base),
        "target": _state_members(marker.target),
        "mode": marker.mode,
        "exact": marker.is_exact,
        "journal": blake3_text(marker.base_blake3),
    }
    if len(folders) > 1:
        document |= {"commits": [blake3_text(commit) for commit in marker.commits], "deltas": folders}
    if marker.remote is not None:
        document["remote"] = _text(marker.remote)
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _text(path: str) -> str:
    """A path that may not be UTF-8, as it is shown."""
    return path.encode(errors="backslashreplace").decode()


def decode_marker(text: bytes, what: str) -> Marker:
    document = strict_json(text, what)
    number = document.get("format") if isinstance(document, dict) else None
    if type(number) is int and number > CHAIN_FORMAT:
        facts = f"has format {number}; this dcr knows up to {CHAIN_FORMAT}"
        raise UnsupportedError(what, facts, hint="finish with the newer dcr that began the change")
    try:
        if number not in (MARKER_FORMAT, CHAIN_FORMAT):
            raise TypeError
        is_chain = number == CHAIN_FORMAT
        commits = document["commits"] if is_chain else [document["commit"]]
        return Marker(
            tuple(parse_blake3(commit, what) for commit in commits),
            tuple(map(str, document["deltas"] if is_chain else [document["delta"]])),
            _state(document["base"], what),
            _state(document["target"], what),
            str(document["mode"]),
            document["exact"] is True,
            parse_blake3(document["journal"], what),
            str(document["remote"]) if "remote" in document else None,
        )
    except (TypeError, KeyError) as error:
        raise DamagedError(what, "is not a marker that dcr wrote", hint=_REPAIR) from error


def _state_members(state: State) -> dict[str, str]:
    return {"content": blake3_text(state.content), "files": blake3_text(state.files)}


def _state(members: Mapping[str, Any], what: str) -> State:
    return State(parse_blake3(members["content"], what), parse_blake3(members["files"], what))


def _encode_batch(batch: Batch) -> bytes:
    chunks = [[c.file, c.offset, c.size, c.blake3.hex(), int(c.is_alone)] for c in batch.chunks]
    text = json.dumps({"components": batch.components, "chunks": chunks}).encode()
    return text + b"\n" + object_digest(text).hex().encode() + b"\n"


def _decode_batch(number: int, data: bytes, what: str, *, is_done: bool) -> Batch:
    text, _, digest = data.partition(b"\n")
    if digest.strip() != object_digest(text).hex().encode():
        raise DamagedError(what, "is not what was written", hint=_REPAIR)
    document = json.loads(text)
    chunks = tuple(
        Chunk(file, offset, size, bytes.fromhex(digest), bool(is_alone))
        for file, offset, size, digest, is_alone in document["chunks"]
    )
    return Batch(number, tuple(document["components"]), chunks, is_done)


def encode_base(base: Base, digests: Digests) -> bytes:
    """Write what a receiver holds, and the digests of its tensors in canonical order."""
    head = {
        "shards": [[shard.path, shard.size, len(shard.header.raw), shard.path in base.alone] for shard in base.shards],
        "files": [[file.path, file.kind, file.size, file.blake3.hex()] for file in base.files],
        "tensors": len(digests),
    }
    return b"".join(
        [
            json.dumps(head).encode() + b"\n",
            *(shard.header.raw for shard in base.shards),
            np.ascontiguousarray(digests).tobytes(),
        ]
    )


def decode_base(data: bytes, what: str) -> tuple[Base, Digests]:
    """The inverse of encode_base, for bytes that are known to be its own."""
    line, _, _ = data.partition(b"\n")
    head = json.loads(line)
    at = len(line) + 1
    shards, alone = [], set()
    for path, size, header_bytes, is_alone in head["shards"]:
        shards.append(Shard(path, parse_header(data[at : at + header_bytes], size, what), size))
        at += header_bytes
        if is_alone:
            alone.add(path)
    files = tuple(FileDigest(path, kind, size, bytes.fromhex(digest)) for path, kind, size, digest in head["files"])
    digests = np.frombuffer(data, np.uint8, head["tensors"] * DIGEST_BYTES, at).reshape(-1, DIGEST_BYTES)
    return Base(tuple(shards), tensors_of(shards), files, frozenset(alone)), digests


def tensors_of(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The tensors of `shards` by name."""
    return {
        entry.name: Tensor(
            entry.name,
            DTYPES[entry.dtype],
            entry.shape,
            number,
            len(shard.header.raw) + entry.begin,
            entry.end - entry.begin,
        )
        for number, shard in enumerate(shards)
        for entry in shard.header.tensors
    }
