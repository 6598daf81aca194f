"""The folder `.dcr/fetched/` of a receiver: what was fetched of versions, kept until the receiver is at them.

Each version has a folder of its number and id in it, which becomes a delta's folder; its commit comes last. The folder
is locked, so that one pull at a time is at a checkpoint. What is fetched, and from where, is download.py's matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr_cli.checkpoint.digest import ObjectHasher
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.output import COMMIT_NAME, PAYLOADS_NAME
from dcr_cli.delta.payload import payload_name
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder
from dcr_cli.errors import DcrError
from dcr_cli.locking import lock_folder
from dcr_cli.receiver.fetched import FETCHED
from dcr_cli.receiver.install.wanted import Wanted, decode_wanted, encode_wanted
from dcr_cli.receiver.room import free_bytes
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.anchor import ANCHOR_LIMIT
from dcr_cli.remote.keys import Place, place_named
from dcr_cli.remote.version import PUBLISHED_NAME, Published, decode_version

_NAME = FETCHED.rpartition("/")[2]
_LOCK = "lock"
# What was fetched of an anchor, and which files it has.
_FILES, _WANTED = "files", "wanted"
_READ_BYTES = 1 << 20
_NEW = ".part"


class Spool:
    """The folder of what was fetched for the checkpoint in `root`, made and locked; a context manager.

    ConflictError if another pull is at it. When it is left, nothing stays but folders of versions.
    """

    def __init__(self, root: Folder) -> None:
        self._root = root
        made = root.make_folder(STATE_FOLDER, PRIVATE_FOLDER_MODE, exist_ok=True)
        if made:
            root.sync()
        self._home = root.open_folder(STATE_FOLDER)
        try:
            locked = lock_folder(self._home, _NAME, _LOCK, PRIVATE_FOLDER_MODE)
        except BaseException:
            with self._home:
                if made:
                    root.remove_folder(STATE_FOLDER, used_ok=True)
            raise
        self._folder, self._lock = locked.folder, locked.lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What went wrong before is the cause to report, not that tidying up failed after it.
        with (
            suppress(DcrError) if error is not None else nullcontext(),
            self._home,
            self._lock,
            self._folder,
        ):
            self._folder.remove(_LOCK, missing_ok=True)
            self._home.remove_folder(_NAME, used_ok=True)
            self._root.remove_folder(STATE_FOLDER, used_ok=True)

    @property
    def room_bytes(self) -> int:
        """How much more can be written there."""
        return free_bytes(self._folder)

    def is_of(self, path: Path) -> bool:
        """Whether the checkpoint that it is for is the one at `path`, or behind the link there."""
        return os.path.realpath(path) == os.path.realpath(self._root.path)

    def path(self, place: Place) -> Path:
        return Path(os.path.abspath(self._folder.path)) / str(place)

    def places(self) -> list[Place]:
        """The versions of which something is there."""
        return [place for place in map(place_named, self._folder.names()) if place is not None]

    def keep(self, places: Collection[Place]) -> None:
        """Remove what is there of all other versions, and what nobody knows."""
        kept = {*map(str, places), _LOCK}
        for name in self._folder.names():
            if name not in kept:
                # Without its commit it is no delta, whatever is left if this is stopped.
                if (self._folder.status(f"{name}/{COMMIT_NAME}")) is not None:
                    self._folder.remove(f"{name}/{COMMIT_NAME}")
                self._folder.remove_tree(name, missing_ok=True)

    def share(self, places: Collection[Place], to: Spool) -> None:
        """Have what is there of some versions in another spool too, where files can have second names."""
        for place in places:
            to.begin(place)
            for folder in (f"{place}/{PAYLOADS_NAME}", str(place)):
                if not self._share(folder, to):
                    return
                to._folder.sync(folder)

    def _share(self, folder: str, to: Spool) -> bool:
        """Give the files of a folder second names in another spool, a commit's last; False where that cannot be."""
        with self._folder.open_folder(folder) as there:
            names = sorted(there.names(), key=lambda name: name == COMMIT_NAME)
        for path in (f"{folder}/{name}" for name in names if name != PAYLOADS_NAME):
            to._folder.remove(path, missing_ok=True)
            if not to._folder.link_file(self._folder, path, path):
                return False
        return True

    def begin(self, place: Place) -> None:
        """Make the folders of a version."""
        if self._folder.make_folder(str(place), PRIVATE_FOLDER_MODE, exist_ok=True):
            self._folder.sync()
        if self._folder.make_folder(f"{place}/{PAYLOADS_NAME}", PRIVATE_FOLDER_MODE, exist_ok=True):
            self._folder.sync(str(place))

    def read(self, place: Place, name: str, limit: int) -> bytes | None:
        """Read a document of a version; None if it is not there, or is larger than `limit`."""
        try:
            return self._folder.read(f"{place}/{name}", limit)
        except DcrError:
            return None

    def write(self, place: Place, name: str, data: bytes) -> None:
        """Write a document of a version, durably."""
        self._folder.replace_file(f"{place}/{name}", data)

    @contextmanager
    def files(self, place: Place) -> Iterator[Folder]:
        """Open a folder, made if it is not there, for what is fetched of a version's anchor, as whoever fetches it
        wants it. After an error nothing stays of a version of which nothing has come."""
        self.begin(place)
        self._folder.make_folder(f"{place}/{_FILES}", PRIVATE_FOLDER_MODE, exist_ok=True)
        with self._folder.open_folder(f"{place}/{_FILES}") as folder:
            try:
                yield folder
            except DcrError:
                if not folder.names():
                    with suppress(DcrError):
                        self._folder.remove_tree(str(place))
                raise

    def write_wanted(self, place: Place, wanted: Wanted) -> None:
        """Write down the files of a version, whose anchor is fetched to be cut into other ones."""
        self.write(place, _WANTED, encode_wanted(wanted))

    def read_wanted(self, place: Place) -> Wanted | None:
        """The files of a version as they were written down, if they were, and can be read."""
        data = self.read(place, _WANTED, ANCHOR_LIMIT)
        try:
            return decode_wanted(data, _WANTED) if data is not None else None
        except DcrError:
            return None

    def expect(self, published: Published) -> None:
        """Note which version is being fetched, before its receiver can be at it."""
        self.begin(published.version.place)
        if self.read(published.version.place, PUBLISHED_NAME, COMMIT_LIMIT) != published.data:
            self.write(published.version.place, PUBLISHED_NAME, published.data)

    def finish(self, published: Published) -> None:
        """Say that all of a version's delta is there: from here on its folder is a delta."""
        place = published.version.place
        self._folder.sync(f"{place}/{PAYLOADS_NAME}")
        self.write(place, COMMIT_NAME, published.signed.line)

    def has_delta(self, place: Place) -> bool:
        """Whether all of a version's delta is there."""
        return self._folder.status(f"{place}/{COMMIT_NAME}") is not None

    def expected(self) -> list[Published]:
        """The versions that were being fetched, the newest first."""
        found = [self._published(place) for place in self.places()]
        known = [published for published in found if published is not None]
        return sorted(known, key=lambda published: published.version.number, reverse=True)

    def _published(self, place: Place) -> Published | None:
        data = self.read(place, PUBLISHED_NAME, COMMIT_LIMIT)
        if data is None:
            return None
        try:
            published = decode_version(data, place.version, PUBLISHED_NAME)
        except DcrError:
            return None
        return published if published.version.place == place else None

    def payload_digest(self, place: Place, index: int, size: int | None = None) -> bytes | None:
        """The blake3 of a payload that is there; None if it is not, or has another size."""
        try:
            file = self._folder.open_to_read(f"{place}/{payload_name(index)}")
        except DcrError:
            return None
        if file is None:
            return None
        with file:
            held = os.fstat(file.fd).st_size
            if size not in (None, held):
                return None
            hasher = ObjectHasher()
            for part in _parts(file, held):
                hasher.update(part)
            return hasher.digest()

    def create_payload(self, place: Place, index: int) -> File:
        """Begin a payload, under a name that is nobody's yet."""
        name = f"{place}/{payload_name(index)}{_NEW}"
        self._folder.remove(name, missing_ok=True)
        return self._folder.create_file(name, 0o600)

    def accept_payload(self, place: Place, index: int) -> None:
        """Give a payload that is written and synced its name."""
        name = f"{place}/{payload_name(index)}"
        self._folder.rename(f"{name}{_NEW}", self._folder, name)

    def write_payload(self, place: Place, index: int, data: bytes) -> None:
        """Write a payload whose bytes were checked, durably."""
        with self.create_payload(place, index) as file:
            file.write_at(0, data)
            file.sync()
        self.accept_payload(place, index)

    def drop_payload(self, place: Place, index: int) -> None:
        """Remove a payload that was begun."""
        self._folder.remove(f"{place}/{payload_name(index)}{_NEW}", missing_ok=True)


@contextmanager
def spool_of(path: Path) -> Iterator[Spool]:
    """Open what was fetched for the checkpoint at `path`, or behind the link there, and keep others from it."""
    with open_root(os.path.realpath(path)) as root, Spool(root) as spool:
        yield spool


def _parts(file: File, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    for begin in range(0, size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, size - begin)]
        file.read_into(begin, part)
        yield part
