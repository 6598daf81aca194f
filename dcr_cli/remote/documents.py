"""Fetching the documents of a version: those of its delta, or of its anchor, checked against its commit."""

from __future__ import annotations

from dcr_cli.delta.documents import OBJECT_LIMIT, Documents, decode_documents
from dcr_cli.errors import DamagedError
from dcr_cli.remote.anchor import ANCHOR_LIMIT, Anchor, open_anchor
from dcr_cli.remote.keys import anchor_key, digests_key, manifest_key
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import Published
from dcr_cli.store.store import Store


def fetch_documents(store: Store, published: Published) -> Documents | None:
    """Fetch the documents of a version's delta; None if it has none, or has none any more.

    DamagedError if they are not those that the commit names, or the digests are missing beside the manifest.
    """
    commit, place = published.version.delta, published.version.place
    if commit is None:
        return None
    key = manifest_key(place)
    manifest = store.get(key, most_bytes=OBJECT_LIMIT, is_denied_absent=True, is_seen=True)
    if manifest is None:
        return None
    names = f"{store.shown}/{key}", f"{store.shown}/{digests_key(place)}"
    digests = store.get(digests_key(place), most_bytes=OBJECT_LIMIT, is_denied_absent=True, is_seen=True)
    if digests is None:
        raise DamagedError(names[1], "is missing, though the manifest beside it is there")
    return decode_documents(commit, (names[0], manifest), (names[1], digests))


def fetch_anchor(store: Store, published: Published, trust: Trust | None = None) -> Anchor | None:
    """Fetch the document of a version's anchor; None if it has none, or has none any more.

    DamagedError if it is not one of this version; WrongBaseError if it has to be signed and is not.
    """
    key = anchor_key(published.version.place)
    # That another version has one, nothing says.
    is_seen = published.version.delta is None
    data = store.get(key, most_bytes=ANCHOR_LIMIT, is_denied_absent=True, is_seen=is_seen)
    if data is None:
        return None
    return open_anchor(published.version, data, f"{store.shown}/{key}", trust or Trust())
