"""Stages a version that is prepared and not committed: fetches all of it, and sees that a receiver could come to it.

The checkpoint is not changed; aside, all is done but the turning of the link. That the version becomes one only its
commit says.
"""

from __future__ import annotations

import time
from pathlib import Path

from dcr_cli.delta.chain import ChainPayloads, compose
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.errors import DamagedError
from dcr_cli.fetch.download import fetch_delta_documents, fetch_versions
from dcr_cli.fetch.leaving import is_left, leave_prepared
from dcr_cli.fetch.source import Source
from dcr_cli.fetch.spool import Spool
from dcr_cli.fetch.wish import Wish
from dcr_cli.fetch.words import Word, say
from dcr_cli.receiver.beside.aside import build_aside
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.job import Target
from dcr_cli.receiver.rehearsal import rehearse_change
from dcr_cli.receiver.survey import open_root
from dcr_cli.remote.hint import PREPARED, read_hint
from dcr_cli.remote.keys import STAGED, Place, prepared_key
from dcr_cli.remote.log import Known
from dcr_cli.remote.version import COMMIT_KIND, Published, decode_version

# Beside what was fetched of a version: whose word was written that it is staged.
_SAID = "staged"
_VOICE_LIMIT = 1 << 10


def find_prepared(source: Source, own: Known) -> Published | None:
    """The version after a receiver's own one that is prepared; None if none is, or none that can follow it.

    WrongBaseError if it is not signed as it has to be.
    """
    hint = read_hint(source.store)
    place = hint.place if hint is not None and hint.state == PREPARED else None
    if place is None or place.version != own.version + 1:
        return None
    key = prepared_key(place)
    data = source.store.get(key, most_bytes=COMMIT_LIMIT, is_denied_absent=True)
    if data is None:
        return None
    try:
        published = decode_version(data, place.version, f"{source.shown}/{key}")
    except DamagedError:
        # A hint may say anything; only of what is committed damage counts.
        return None
    follows = (published.version.previous, published.version.history) == (own.blake3, own.history)
    if not follows or published.version.place != place or published.version.delta is None:
        return None
    source.trust.check(published.signed, COMMIT_KIND, f"{source.shown}/{key}")
    return published


def is_staged(spool: Spool, place: Place, wish: Wish) -> bool:
    """Whether a version is staged, and its receiver has said so, if it says anything, and has left what it changes, if
    it leaves that."""
    if not spool.has_delta(place) or not is_left(wish, place):
        return False
    return wish.speaker is None or spool.read(place, _SAID, _VOICE_LIMIT) == wish.speaker.voice.encode()


def stage(source: Source, path: Path, spool: Spool, published: Published, wish: Wish) -> None:
    """Fetch a prepared version, have its changes decoded against the checkpoint at `path`, and say that it is staged;
    aside, the folder that the link will be turned to is built. What it changes is left for those who serve from it
    before that is said: who counts this receiver counts them as able to stage it.

    Raises what fetching and applying it would raise; then nothing is said.
    """
    version, effort = published.version, wish.effort
    if version.delta is None or is_staged(spool, version.place, wish):
        return
    documents = fetch_delta_documents(source.store, published, version.delta, spool)
    fetch_versions(source.store, spool, [documents], effort)
    if wish.speaker is None and wish.changes is None:
        return
    opened = open_delta(spool.path(version.place))
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        payloads.verify_all(effort.jobs)
        target = Target(compose([opened]), ChainPayloads([payloads]), effort.jobs, effort.progress)
        if wish.mode == ASIDE:
            build_aside(path, target, wish.view)
        else:
            with open_root(path) as root:
                rehearse_change(root, target, wish.mode, wish.view)
    leave_prepared(wish, path, opened, version.place)
    if wish.speaker is None:
        return
    is_built = wish.mode == ASIDE
    word = Word(version.history, version.place, version.target, STAGED, is_built=is_built)
    say(source.store, wish.speaker, word, time.time())
    spool.write(version.place, _SAID, wish.speaker.voice.encode())
