"""Where a receiver stands in the history of a remote: what `.dcr/remote.json` remembers.

It is a note that saves requests and reading. It counts only beside a record of the very state that it tells of; torn,
or gone, it says nothing, and never that the receiver is at no version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from dcr_cli.checkpoint.digest import State, blake3_text, parse_blake3
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.delta.line import state_members, state_of
from dcr_cli.durable import NEW_FILE_MODE, Folder
from dcr_cli.errors import DcrError
from dcr_cli.remote.keys import Place, is_id
from dcr_cli.remote.log import Known
from dcr_cli.remote.version import Published

POSITION_NAME = "remote.json"
_FORMAT = 1
_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Position:
    """The version that a receiver was brought to, and what is still to be done for it.

    `commit` is the blake3 of its commit, `remote` the address for people. `trusted` are the keys that had signed all
    that the state was built from, in hexadecimal. `is_hook_due`: its hook has not succeeded yet. `acknowledged`: whose
    word was written that the receiver is at the version, None if nobody's. `held_files` is the files digest of what it
    has then, whose shards may be its own; None if that was not noted. `newer` is the newest version that it has seen,
    if it has gone back from that.
    """

    history: str
    place: Place
    commit: bytes
    target: State
    remote: str
    trusted: tuple[str, ...] = ()
    is_hook_due: bool = False
    acknowledged: str | None = None
    held_files: bytes | None = None
    newer: Known | None = None

    @property
    def version(self) -> int:
        return self.place.version

    @property
    def known(self) -> Known:
        return Known(self.history, self.version, self.commit)

    @property
    def newest(self) -> Known:
        """The newest version of its history that the receiver has seen, which the log has to have for ever."""
        return self.newer or self.known

    def after(self, newest: Known) -> Position:
        """This position, of a receiver that has seen `newest` before it came there."""
        is_newer = newest.history == self.history and newest.version > self.version
        return replace(self, newer=newest if is_newer else None)


def position_at(published: Published, remote: str, trusted: tuple[str, ...] = ()) -> Position:
    """The position of a receiver that is at a version."""
    version = published.version
    return Position(version.history, version.place, published.blake3, version.target, remote, trusted)


def write_position(home: Folder, position: Position) -> None:
    """Write a position, durably, into a receiver's state folder."""
    home.replace_file(POSITION_NAME, encode_position(position), NEW_FILE_MODE)


def read_position(home: Folder) -> Position | None:
    """Read the position in a receiver's state folder; None if there is none, or none that can be understood."""
    try:
        text = home.read(POSITION_NAME, _LIMIT)
        return _decode(strict_json(text, POSITION_NAME)) if text is not None else None
    except (DcrError, ValueError, TypeError, KeyError):
        # Whatever is wrong with it, the state is found from the bytes.
        return None


def encode_position(position: Position) -> bytes:
    document = {
        "format": _FORMAT,
        "history": position.history,
        "version": position.version,
        "id": position.place.id,
        "commit": blake3_text(position.commit),
        "target": state_members(position.target),
        "remote": position.remote.encode(errors="backslashreplace").decode(),
        "trusted": list(position.trusted),
        "hook_due": position.is_hook_due,
        "acknowledged": position.acknowledged,
        "held_files": blake3_text(position.held_files) if position.held_files is not None else None,
        "newer": _encode_newer(position.newer),
    }
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _encode_newer(newer: Known | None) -> dict[str, Any] | None:
    return {"version": newer.version, "commit": blake3_text(newer.blake3)} if newer is not None else None


def _decode(document: Any) -> Position | None:
    version, held, acknowledged = document["version"], document.get("held_files"), document.get("acknowledged")
    if document["format"] != _FORMAT or not (is_id(document["history"]) and is_id(document["id"])):
        return None
    if type(version) is not int or version < 1:
        return None
    return Position(
        document["history"],
        Place(version, document["id"]),
        parse_blake3(document["commit"], POSITION_NAME),
        state_of(document, "target", POSITION_NAME),
        str(document["remote"]),
        tuple(map(str, document["trusted"])),
        document["hook_due"] is True,
        str(acknowledged) if acknowledged is not None else None,
        parse_blake3(held, POSITION_NAME) if held is not None else None,
        _decode_newer(document.get("newer"), document["history"], version),
    )


def _decode_newer(newer: Any, history: str, version: int) -> Known | None:
    if newer is None:
        return None
    if type(newer["version"]) is not int or newer["version"] <= version:
        raise ValueError
    return Known(history, newer["version"], parse_blake3(newer["commit"], POSITION_NAME))
