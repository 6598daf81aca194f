"""Brings a baseline to versions that are there, by their own objects: for who has no copy of what was sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dcr_cli.delta.commit import Commit, encode_commit, open_manifest
from dcr_cli.delta.manifest import PayloadRow
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME, PAYLOADS_NAME
from dcr_cli.delta.payload import payload_name
from dcr_cli.durable import PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, Folder
from dcr_cli.publisher.described import OBJECT_LIMIT, get_object
from dcr_cli.publisher.outgoing import OUTGOING, drop_outgoing
from dcr_cli.publisher.uploads import MOST_AT_ONCE
from dcr_cli.remote.keys import VERSIONS, Place
from dcr_cli.store.store import Store


def fetch_delta(store: Store, place: Place, delta: Commit, home: Folder, jobs: int) -> None:
    """Fetch a version's delta into the state folder `home`, where what a push was sending lies; that goes first."""
    drop_outgoing(home)
    for name in (OUTGOING, f"{OUTGOING}/{PAYLOADS_NAME}"):
        home.make_folder(name, PRIVATE_FOLDER_MODE)
    prefix = f"{VERSIONS}{place}/"
    data = get_object(store, prefix + MANIFEST_NAME, OBJECT_LIMIT)
    manifest = open_manifest(delta, data, f"{store.shown}/{prefix}{MANIFEST_NAME}")
    home.write_file(f"{OUTGOING}/{MANIFEST_NAME}", data, PRIVATE_FILE_MODE)
    digests = get_object(store, prefix + DIGESTS_NAME, OBJECT_LIMIT)
    home.write_file(f"{OUTGOING}/{DIGESTS_NAME}", digests, PRIVATE_FILE_MODE)

    def fetch(number: int, row: PayloadRow) -> None:
        name = payload_name(number)
        data = get_object(store, prefix + name, row.bytes)
        home.write_file(f"{OUTGOING}/{name}", data, PRIVATE_FILE_MODE)

    with ThreadPoolExecutor(max(1, min(jobs, MOST_AT_ONCE)), "dcr-fetch") as pool:
        list(pool.map(fetch, range(len(manifest.payloads)), manifest.payloads))
    home.sync(f"{OUTGOING}/{PAYLOADS_NAME}")
    home.replace_file(f"{OUTGOING}/{COMMIT_NAME}", encode_commit(delta))
