"""The version that a push is sending, kept in the publisher's state folder until the baseline has moved on.

A push that was stopped goes on with it under the same id: what is made again and is the same is not sent again. What is
sent, and what the commit says, are its users' business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.commit import Commit, encode_commit
from dcr_cli.delta.manifest import Manifest
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME, PAYLOADS_NAME, Documents, encode_documents
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.durable import PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, Folder
from dcr_cli.errors import DcrError
from dcr_cli.publisher.uploads import Uploads
from dcr_cli.remote.keys import VERSIONS, Place, is_id
from dcr_cli.store.store import Store

OUTGOING = "outgoing"
_PLACE_NAME, _STATE_NAME, _SENT = "place.json", "state", "sent"
_LIMIT = 1 << 16
_OBJECT_LIMIT = 1 << 30


class SourceChangedError(Exception):
    """What is made now is not what a stopped push has begun to send under this id."""


@dataclass(frozen=True, slots=True)
class Sending:
    """What is being sent: a version's place in a history, and the blake3 of the commit that it follows, if there is
    one."""

    history: str
    place: Place
    previous: bytes | None


def read_sending(home: Folder) -> Sending | None:
    """Read what a push in this state folder was sending; None if nothing, or if that cannot be told."""
    text = home.read(f"{OUTGOING}/{_PLACE_NAME}", _LIMIT) if home.status(OUTGOING) is not None else None
    if text is None:
        return None
    try:
        document = strict_json(text, _PLACE_NAME)
        place = Place(int(document["version"]), str(document["id"]))
        previous = bytes.fromhex(document["previous"]) if document["previous"] is not None else None
        sending = Sending(str(document["history"]), place, previous)
    except (DcrError, TypeError, KeyError, ValueError):
        return None
    return sending if is_id(place.id) and is_id(sending.history) else None


def begin_sending(home: Folder, sending: Sending) -> None:
    """Say, durably, what is being sent, before the first of it goes out; unless that is said already."""
    if home.status(f"{OUTGOING}/{_PLACE_NAME}") is not None:
        return
    drop_outgoing(home)
    for name in (OUTGOING, f"{OUTGOING}/{PAYLOADS_NAME}", f"{OUTGOING}/{_SENT}"):
        home.make_folder(name, PRIVATE_FOLDER_MODE)
    place = sending.place
    previous = sending.previous.hex() if sending.previous is not None else None
    document = {"history": sending.history, "version": place.version, "id": place.id, "previous": previous}
    home.replace_file(f"{OUTGOING}/{_PLACE_NAME}", json.dumps(document).encode())
    home.sync()


def begin_anchor(home: Folder, make_sending: Callable[[], Sending], state: State) -> Sending:
    """Begin to send the files of `state`, or go on with it: what is being sent.

    What a stopped run had begun to send of another state is dropped.
    """
    while True:
        sending = make_sending()
        begin_sending(home, sending)
        text = state.content + state.files
        known = home.read(f"{OUTGOING}/{_STATE_NAME}", _LIMIT)
        if known is None:
            home.replace_file(f"{OUTGOING}/{_STATE_NAME}", text)
        if known in (None, text):
            return sending
        drop_outgoing(home)


def was_sent(home: Folder, name: str) -> bool:
    """Whether a run has noted that it had sent what is called so."""
    return home.status(_mark(name)) is not None


def note_sent(home: Folder, name: str) -> None:
    """Note that what is called so has been sent."""
    if not was_sent(home, name):
        home.create_file(_mark(name), PRIVATE_FILE_MODE).close()


def note_prepared(home: Folder) -> None:
    """Note, durably, that receivers may come to know what is being sent, before they do; of what is not kept here
    nothing is gone on with."""
    if home.status(f"{OUTGOING}/{_SENT}") is not None:
        note_sent(home, COMMIT_NAME)
        home.sync(f"{OUTGOING}/{_SENT}")


def was_prepared(home: Folder) -> bool:
    """Whether receivers may know what is being sent."""
    return was_sent(home, COMMIT_NAME)


def drop_outgoing(home: Folder) -> None:
    """Forget what a push was sending."""
    if home.status(OUTGOING) is not None:
        # Without this, what is half removed would be gone on with.
        home.remove(f"{OUTGOING}/{_PLACE_NAME}", missing_ok=True)
        home.remove_tree(OUTGOING)
        home.sync()


def outgoing_path(home: Folder) -> Path:
    """The folder of the delta that was sent; it is one that can be applied."""
    return home.path / OUTGOING


class Outgoing:
    """A delta on its way to a store: what a diff writes into.

    `bytes` is what was made, `sent_bytes` what this run has sent. `on_first` is called before
    anything goes out.
    """

    def __init__(
        self, home: Folder, sending: Sending, store: Store, uploads: Uploads, on_first: Callable[[], None]
    ) -> None:
        self._home = home
        self._sending = sending
        self._store = store
        self._uploads = uploads
        self._on_first = on_first
        self.place = sending.place
        self._sent: list[int] = []
        self.bytes = 0
        self.name: str | None = None
        self.dry_run = False
        self.documents: Documents | None = None
        place = sending.place
        identity = {"history": sending.history, "version": str(place.version), "id": place.id}
        self.writer = PayloadWriter(self._emit, identity=identity, is_streamed=True)
        self._is_begun = False

    def finish(self, manifest: Manifest, digests: Sequence[bytes], base: State, target: State) -> None:
        """Send the documents, when all payloads have arrived. Without a change there is nothing to send."""
        if base == target:
            return
        self.documents = encode_documents(manifest, digests, base, target)
        self._uploads.finish()
        for name, data in ((MANIFEST_NAME, self.documents.manifest), (DIGESTS_NAME, self.documents.digests)):
            self._emit(name, data)
        self._uploads.finish()
        # The commit makes of the folder a delta that can be applied, also after this process is gone.
        self._home.sync(f"{OUTGOING}/{PAYLOADS_NAME}")
        self._home.replace_file(f"{OUTGOING}/{COMMIT_NAME}", encode_commit(self.documents.commit))

    @property
    def sent_bytes(self) -> int:
        return sum(self._sent)

    @property
    def commit(self) -> Commit:
        assert self.documents is not None
        return self.documents.commit

    def _emit(self, name: str, data: bytes) -> None:
        self._begin()
        self.bytes += len(data)
        path = f"{OUTGOING}/{name}"
        known = self._home.read(path, _OBJECT_LIMIT)
        if known is None:
            # Whole or not at all: what is there may have been sent, and then it must not become another.
            self._home.replace_file(path, data)
        elif known != data:
            raise SourceChangedError
        if was_sent(self._home, name) and self._is_there(name, len(data)):
            return
        self._uploads.submit(lambda: self._send(name, len(data)))

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            begin_sending(self._home, self._sending)
            self._on_first()

    def _send(self, name: str, size: int) -> None:
        file = self._home.open_to_read(f"{OUTGOING}/{name}")
        assert file is not None
        with file, open(file.fd, "rb", closefd=False) as stream:
            self._store.put(self._key(name), stream)
        self._sent.append(size)
        note_sent(self._home, name)

    def _is_there(self, name: str, size: int) -> bool:
        """Whether what was sent is still there; a prune may have removed what seemed to be given up."""
        status = self._store.stat(self._key(name), is_denied_absent=True)
        return status is not None and status.size == size

    def _key(self, name: str) -> str:
        return f"{VERSIONS}{self._sending.place}/{name}"


def _mark(name: str) -> str:
    return f"{OUTGOING}/{_SENT}/{name.replace('/', '-')}"
