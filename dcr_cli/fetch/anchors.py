"""The files of anchors as a receiver fetches them (FORMAT 13.6): the state that they make up, and their bytes.

What becomes of the bytes is receiver/'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcr_cli.errors import NotFoundError
from dcr_cli.fetch.losses import RemovedError, is_gone, telling_spoiled
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.remote.anchor import Anchor
from dcr_cli.remote.keys import Place, anchor_file_key
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.store import Store

# So much of a range is in memory at a time.
_PART_BYTES = 16 << 20


def wanted_of(anchor: Anchor) -> Wanted:
    """The state that an anchor's files make up."""
    return Wanted(anchor.target, anchor.skipped, anchor.files)


class AnchorFetcher:
    """Fetches parts of the files of a version's anchor, in any number of threads; they are checked by whoever asks.

    RemovedError if a file is gone, SpoiledError if it is shorter than its document says.
    """

    def __init__(self, store: Store, place: Place) -> None:
        self._store = store
        self._place = place

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        key = anchor_file_key(self._place, path)
        for at in range(begin, begin + size, _PART_BYTES):
            try:
                with telling_spoiled(self._store, self._place, is_anchor=True):
                    data = self._store.get_range(key, at, min(_PART_BYTES, begin + size - at), is_seen=True)
            except (NotFoundError, RefusedError) as error:
                if not is_gone(self._store, key, error):
                    raise
                raise RemovedError(self._store.shown, self._place.version, is_anchor=True) from error
            yield data
