"""The note that a receiver keeps while it is brought to a wanted state: which state, and which files of its own go.

What these were is noted too: another file may have got such a name before a stopped run is gone on with. The note lies
in the journal, durable before the marker, so that a stopped run can be finished where the state's own list of files
cannot be had any more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.checkpoint.names import safe_path
from dcr_cli.durable import Folder
from dcr_cli.errors import DamagedError
from dcr_cli.receiver.install.wanted import Wanted, decode_wanted, encode_wanted
from dcr_cli.receiver.marks import Known, decode_known
from dcr_cli.receiver.receiver import JOURNAL

_NOTE = f"{JOURNAL}/wanted"
_NOTE_LIMIT = 1 << 34


@dataclass(frozen=True, slots=True)
class Note:
    """`going` are the files that go, as they were; None for those of which that is not known."""

    wanted: Wanted
    going: Known


def key_of(wanted: Wanted) -> bytes:
    """What tells a wanted state, with all its files, from every other."""
    return object_digest(encode_wanted(wanted))


def encode_note(note: Note) -> bytes:
    text = b"\n".join([encode_wanted(note.wanted), json.dumps(note.going).encode()])
    return b"\n".join([text, object_digest(text).hex().encode(), b""])


def write_note(home: Folder, note: Note) -> bytes:
    """Write the note durably: the blake3 of what was written."""
    data = encode_note(note)
    home.replace_file(_NOTE, data)
    return object_digest(data)


def read_note(home: Folder) -> Note | None:
    """Read the note in a receiver's state folder; None if there is none that is whole."""
    try:
        data = home.read(_NOTE, _NOTE_LIMIT)
        if data is None:
            return None
        text, _, digest = data.rstrip(b"\n").rpartition(b"\n")
        if digest != object_digest(text).hex().encode():
            return None
        wanted, _, going = text.partition(b"\n")
        return Note(decode_wanted(wanted, _NOTE), _decode_going(strict_json(going, _NOTE)))
    except (DamagedError, TypeError, ValueError, AttributeError):
        # It serves to go on with what it tells of; what is there shows without it what is left to do.
        return None


def _decode_going(members: Any) -> Known:
    """The files that go; notes that have their names alone were written once."""
    known = dict.fromkeys(members) if isinstance(members, list) else decode_known(members)
    return {safe_path(path, _NOTE): mark for path, mark in known.items()}
