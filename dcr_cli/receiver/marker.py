"""The marker of a change in progress: which change it is (FORMAT 12).

Writing and removing it is receiver.py's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcr_cli.checkpoint.digest import State, blake3_text, parse_blake3
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, MAX_MARKER_BYTES
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError, UnsupportedError

# The format of a marker of one delta; of one of several, which a dcr that knows of one alone must not finish; and of a
# receiver with a layout.
MARKER_FORMAT, CHAIN_FORMAT, LAID_FORMAT = 1, 2, 3
MARKER = IN_PROGRESS.rpartition("/")[2]
REPAIR = "start again from a full copy of a checkpoint"


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
    is_laid: bool = False


def encode_marker(marker: Marker) -> bytes:
    text = _encode_marker(marker, marker.deltas)
    # What is only for people must not make a marker that cannot be read.
    return text if len(text) <= MAX_MARKER_BYTES else _encode_marker(marker, ("",) * len(marker.deltas))


def _encode_marker(marker: Marker, deltas: Sequence[str]) -> bytes:
    folders = [_text(delta) for delta in deltas]
    document: dict[str, Any] = {
        "format": LAID_FORMAT if marker.is_laid else MARKER_FORMAT if len(folders) == 1 else CHAIN_FORMAT,
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
    if type(number) is int and number > LAID_FORMAT:
        facts = f"has format {number}; this dcr knows up to {LAID_FORMAT}"
        raise UnsupportedError(what, facts, hint="finish with the newer dcr that began the change")
    try:
        if number not in (MARKER_FORMAT, CHAIN_FORMAT, LAID_FORMAT):
            raise TypeError
        is_chain = "commits" in document if number == LAID_FORMAT else number == CHAIN_FORMAT
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
            number == LAID_FORMAT,
        )
    except (TypeError, KeyError) as error:
        raise DamagedError(what, "is not a marker that dcr wrote", hint=REPAIR) from error


def _state_members(state: State) -> dict[str, str]:
    return {"content": blake3_text(state.content), "files": blake3_text(state.files)}


def _state(members: Mapping[str, Any], what: str) -> State:
    return State(parse_blake3(members["content"], what), parse_blake3(members["files"], what))
