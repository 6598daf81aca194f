"""Brings a folder to a wanted state, so that it can be stopped at any step: stages what it lacks, then places it.

The order of steps is change.py's, for the same reasons. Everything is staged, durable and checked before the marker,
which is durable before the first change and goes after the last; whatever a stopped run has left to do, the next one
for the same state does, as if from the start. Which folder it is, is install.py's and beside.py's matter.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import FileDigest
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.folder import AT_REST, Identity, check_same, identity_of
from dcr_cli.checkpoint.in_progress import INSTALL, STATE_FOLDER
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder
from dcr_cli.errors import ConflictError, DamagedError, LocalError
from dcr_cli.layout.document import decode_layout
from dcr_cli.receiver.install.built import read_built
from dcr_cli.receiver.install.gather import Effort, Gatherer, Shelf
from dcr_cli.receiver.install.note import Note, key_of, read_note, write_note
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.stock import Site, Stock, check_site, staged_name, take_stock
from dcr_cli.receiver.install.wanted import Fetcher, Part, Wanted, parts_of
from dcr_cli.receiver.marker import Marker
from dcr_cli.receiver.marks import replaced
from dcr_cli.receiver.places import CONFIG, folders_of
from dcr_cli.receiver.receiver import HELD, HELD_CONFIG, STAGE, Receiver
from dcr_cli.receiver.record import TensorRecord, mode_of_record, read_record, write_record
from dcr_cli.receiver.removal import move_file, remove_empty_folders, remove_files
from dcr_cli.receiver.sidecars import identities_now, identity_below
from dcr_cli.receiver.view import note_layout

# What the folder was before does not matter any more.
_ANY = State(bytes(32), bytes(32))


@dataclass(frozen=True, slots=True)
class Request:
    """What a folder is to become, whence the bytes come, and what people call that place.

    `before_seen` is called with a new folder when it is complete, before it gets its name or a link leads to it.
    """

    wanted: Wanted
    fetcher: Fetcher
    origin: str
    effort: Effort
    before_seen: Callable[[Path], None] = lambda folder: None


def begin(receiver: Receiver, wanted: Wanted) -> Marker | None:
    """Keep what is staged for this wanted state, or for a change in progress, and clear away all else: the marker of
    that change."""
    marker, note = receiver.read_marker(), read_note(receiver.home)
    is_same = note is not None and note.wanted == wanted
    if marker is None and is_same:
        receiver.put_back_held()
    elif marker is None:
        receiver.clear()
    receiver.keeps_staged = is_same
    return marker


class Installation:
    """The way of the folder that `receiver` has locked to the wanted state."""

    def __init__(self, receiver: Receiver, request: Request, site: Site) -> None:
        self._receiver = receiver
        self._root, self._home = receiver.root, receiver.home
        self._request = request
        self._wanted = request.wanted
        self._site = site
        self._gatherer = Gatherer(self._wanted, request.fetcher, self._open_staged, request.effort)
        self._copied_bytes = 0

    def done(self, result: InstallResult) -> InstallResult:
        """What was said to be done, done."""
        fetched = self._gatherer.fetched_bytes
        return replace(result, dry_run=False, fetched_bytes=fetched, bytes_written=fetched + self._copied_bytes)

    def carry_out(self) -> Stock:
        """Bring the folder to the wanted state: what it had of it before.

        What is raised before the marker is durable leaves the files as they were; what is staged stays for the next
        run, as it does after all that is raised later. Raises WrongBaseError, DamagedError, ConflictError, LocalError,
        and what the fetcher raises.
        """
        stock = take_stock(self._site, self._wanted, self._request.effort)
        if not (self._site.is_marked or stock.changed or self._site.belongings.removed):
            self.settle(stock)
            return stock
        check_site(self._site, stock, self._wanted)
        self._receiver.check_notes()
        self._receiver.resume()
        self._receiver.keeps_staged = True
        note = Note(self._wanted, self._site.belongings.going)
        note_blake3 = write_note(self._home, note)
        self._stage(stock)
        places, identities = self._places(stock)
        try:
            tensors, files = read_built(self._root.path, places, identities, self._wanted, self._request.effort)
        except DamagedError:
            # Whoever goes on with this would end here again.
            self._receiver.keeps_staged = False
            raise
        self._mark(note_blake3, stock)
        self._change(stock)
        self._end(stock, identities, tensors, files)
        return stock

    # Staging

    def _open_staged(self, number: int) -> File:
        return self._home.open_file(staged_name(number))

    def _stage(self, stock: Stock) -> None:
        """Have all files that are lacking in the stage, whole, synced, and with their last modes."""
        for number in stock.supply.files:
            if not stock.staged.is_whole(self._wanted, number):
                self._make(number)
        fetched = list(stock.supply.fetched)
        for shelf, parts in stock.supply.copied:
            fetched += self._copy(shelf, parts)
        self._gatherer.fetch(fetched)
        # Second names change the times of what is copied from, so they are made when that is done.
        late = [number for number in stock.shared if not self._share(number)]
        if late and stock.other is not None:
            for number in late:
                self._make(number)
            again = [part for number in late for part in parts_of(number, self._wanted.files[number])]
            self._gatherer.fetch(self._copy(stock.other.shelf, again))
        for number in stock.changed:
            name, path = staged_name(number), self._wanted.files[number].path
            status = self._home.status(name)
            if status is None or status.st_nlink != 1:
                continue
            file = self._home.open_to_read(name)
            if file is not None:
                with file:
                    file.sync()
            self._take_mode(name, path)
        self._home.sync(STAGE)

    def _copy(self, shelf: Shelf, parts: Sequence[Part]) -> list[Part]:
        self._copied_bytes += sum(part.size for part in parts)
        return self._gatherer.copy(shelf, parts)

    def _make(self, number: int) -> None:
        """Have a file in the stage that has the right size and no other name."""
        name, size = staged_name(number), self._wanted.files[number].size
        status = self._home.status(name)
        if status is not None and not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            self._home.remove_tree(name)
            status = None
        with self._home.open_file(name) if status is not None else self._home.create_file(name) as file:
            if os.fstat(file.fd).st_size != size:
                file.resize(size)

    def _share(self, number: int) -> bool:
        """Have an unchanged file of the other folder in the stage, as a second name or a clone; False if neither can
        be."""
        source, other, name = self._site.source, self._site.other, staged_name(number)
        assert source is not None and other is not None
        path = other.shelf.paths[number]
        before = other.shelf.identities[path]
        self._home.remove_tree(name, missing_ok=True)
        status = source.status(path)
        is_file = status is not None and stat.S_ISREG(status.st_mode)
        if is_file and self._home.link_file(source, path, name):
            after = self._home.status(name)
            # A second name changes its ctime.
            if after is None or identity_of(after)[:4] != before[:4]:
                raise _changed(source, path)
            return True
        with source.open_linked(path) as old:
            with self._home.create_file(name) as file:
                is_cloned = file.clone_from(old)
            if is_cloned and identity_of(os.fstat(old.fd))[:4] != before[:4]:
                raise _changed(source, path)
        if not is_cloned:
            self._home.remove(name)
        return is_cloned

    def _take_mode(self, name: str, path: str) -> None:
        """Give a staged file mode and owner of the file that it will replace; a link or a folder has none to give."""
        folder = self._site.source or self._root
        status = folder.status(path)
        if path == CONFIG and status is None:
            status = self._home.status(HELD_CONFIG)
        if status is not None and stat.S_ISREG(status.st_mode):
            self._home.take_mode(name, status)

    def _places(self, stock: Stock) -> tuple[list[str], dict[str, Identity]]:
        """Where each file lies now, below the root, and what it is."""
        kept = stock.placed.shelf
        places = [
            kept.paths[number] if number in set(stock.kept) else f"{STATE_FOLDER}/{staged_name(number)}"
            for number in range(len(self._wanted.files))
        ]
        return places, {path: kept.identities.get(path) or identity_below(self._root, path) for path in places}

    # Changing

    def _mark(self, note_blake3: bytes, stock: Stock) -> None:
        """Say that the change is in progress, while the files that stay, or go, are those that were looked at."""
        self._check_still(stock)
        key, state = key_of(self._wanted), self._wanted.state
        self._receiver.write_marker(
            Marker(
                commits=(key,),
                deltas=(self._request.origin,),
                base=_ANY,
                target=state,
                mode=INSTALL,
                is_exact=True,
                # A dcr that knows of no layout must not finish it.
                is_laid=self._wanted.layout is not None,
                base_blake3=note_blake3,
                remote=self._request.origin,
            )
        )
        try:
            self._check_still(stock)
        except ConflictError:
            if not self._site.is_marked:
                # Nothing is changed yet.
                self._receiver.remove_marker()
            raise

    def _check_still(self, stock: Stock) -> None:
        """Raise ConflictError if a file that stays is not the one that was read, or one that goes another one."""
        shelf, belongings = stock.placed.shelf, self._site.belongings
        before = {shelf.paths[number]: shelf.identities[shelf.paths[number]] for number in stock.kept}
        check_same(self._root.path, before, identities_now(self._root, before))
        others = replaced(self._root, {path: belongings.going[path] for path in belongings.removed})
        if others:
            facts = "was put there by another process just now, where a file of the checkpoint goes"
            raise ConflictError(str(self._root.path / others[0]), facts, hint=AT_REST)

    def _change(self, stock: Stock) -> None:
        """Give all files but the config their names, when what is to go has gone. How tensors are stored in them is
        noted before: who finds the change stopped must not take them for files of another kind."""
        self._note_layout()
        self._hold_config()
        removed = self._site.belongings.removed
        remove_files(self._root, removed)
        remove_empty_folders(self._root, removed)
        self._place([number for number in stock.changed if self._wanted.files[number].path != CONFIG])

    def _hold_config(self) -> None:
        try:
            is_file = stat.S_ISREG(os.stat(CONFIG, dir_fd=self._root.fd).st_mode)
        except OSError:
            return
        if not is_file or self._home.status(HELD_CONFIG) is not None:
            return
        if self._home.make_folder(HELD, PRIVATE_FOLDER_MODE, exist_ok=True):
            self._home.sync()
        move_file(self._root, CONFIG, self._home, HELD_CONFIG)
        self._home.sync(HELD)
        self._root.sync()

    def _place(self, numbers: Sequence[int]) -> None:
        paths = [self._wanted.files[number].path for number in numbers]
        for number, path in zip(numbers, paths, strict=True):
            self._root.make_parents(path)
            move_file(self._home, staged_name(number), self._root, path)
        for folder in folders_of(paths):
            self._root.sync(folder)
        if paths:
            self._home.sync(STAGE)

    def _end(
        self,
        stock: Stock,
        identities: dict[str, Identity],
        tensors: Sequence[TensorRecord],
        files: Sequence[FileDigest],
    ) -> None:
        """Put the config where it belongs, last of all, and say so."""
        shelf = stock.placed.shelf
        expected = {self._wanted.files[number].path: identities[shelf.paths[number]] for number in stock.kept}
        self._place([number for number in stock.changed if self._wanted.files[number].path == CONFIG])
        if self._home.status(HELD_CONFIG) is not None and self._root.status(CONFIG) is None:
            self._put_back_config(expected)
        for number in stock.changed:
            path = self._wanted.files[number].path
            before, now = identities[f"{STATE_FOLDER}/{staged_name(number)}"], identity_below(self._root, path)
            # Getting its name changed its ctime.
            expected[path] = before._replace(ctime_ns=now.ctime_ns)
        check_same(self._root.path, expected, identities_now(self._root, expected))
        # Without a marker, a config that is held would be put back.
        self._receiver.release_held()
        self._record(tensors, files, expected)
        self._receiver.remove_marker()
        self._receiver.keeps_staged = False

    def _put_back_config(self, expected: dict[str, Identity]) -> None:
        """Put a config back that stays, or that is no part of the checkpoint."""
        if CONFIG in self._site.belongings.removed:
            return
        move_file(self._home, HELD_CONFIG, self._root, CONFIG)
        self._root.sync()
        self._home.sync(HELD)
        before, now = expected.get(CONFIG), identity_below(self._root, CONFIG)
        # Putting it away and back changed its ctime, also under every other name, or link, that leads to it.
        if before is not None and now[:4] == before[:4]:
            expected |= {path: now for path, identity in expected.items() if identity == before}

    def settle(self, stock: Stock) -> None:
        """See that a folder that was at the wanted state already, all of it read, has a record that counts."""
        self._receiver.keeps_staged = False
        identities = dict(stock.placed.shelf.identities)
        record = read_record(self._home)
        if record is not None and self._wanted.is_recorded(record) and record.is_current(identities):
            return
        places = [stock.placed.shelf.paths[number] for number in range(len(self._wanted.files))]
        tensors, files = read_built(self._root.path, places, identities, self._wanted, self._request.effort)
        # A record that cannot be written is missing, and nothing else.
        with suppress(LocalError):
            self._record(tensors, files, identities)

    def _record(
        self, tensors: Sequence[TensorRecord], files: Sequence[FileDigest], identities: dict[str, Identity]
    ) -> None:
        self._note_layout()
        write_record(
            self._home,
            self._wanted.state.content,
            tensors,
            files,
            identities,
            self._wanted.skipped,
            mode=mode_of_record(self._root, identities),
            layout=self._wanted.layout_blake3,
        )
        self._receiver.keeps_home = True

    def _note_layout(self) -> None:
        if self._wanted.layout is not None:
            note_layout(self._home, decode_layout(self._wanted.layout, str(self._root.path)))


def _changed(source: Folder, path: str) -> ConflictError:
    return ConflictError(str(source.path / path), "changed while reading: its times are other ones", hint=AT_REST)
