"""Fetches the files of a wanted state as they are, into a folder where each is called by its number.

There they are read and are no checkpoint. Nothing has to be durable: what a run that was stopped, or a loss of power,
has left of them counts as far as its ranges are right.
"""

from __future__ import annotations

import os
import stat

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.folder import identity_of
from dcr_cli.checkpoint.header import LENGTH_BYTES, Header, header_bytes, parse_header
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.delta.file_rules import RangedFile
from dcr_cli.durable import Folder
from dcr_cli.layout.layout import Form
from dcr_cli.pool import run_all
from dcr_cli.receiver.install.built import open_built
from dcr_cli.receiver.install.gather import Gatherer, Shelf, find_right, supply_of
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.wanted import FetchedError, Wanted
from dcr_cli.receiver.places import check_room, with_slack


def fetch_forms(request: Request) -> dict[str, Form]:
    """The forms of the tensors of the wanted state: of all that it has, the headers of its shards are fetched.

    FetchedError if one is not the header that is wanted.
    """
    headers: dict[str, Header] = {}

    def fetch(file: RangedFile) -> None:
        headers[file.path] = _fetch_header(request, file)

    shards = [file for file in request.wanted.files if file.kind == SHARD]
    run_all(shards, lambda: fetch, request.effort.jobs)
    return {entry.name: Form(entry.dtype, entry.shape) for header in headers.values() for entry in header.tensors}


def copy_all(folder: Folder, request: Request, room_bytes: int) -> Checkpoint:
    """Have all files of the wanted state of `request` in `folder`, which is this module's alone: the checkpoint that
    they make up there, without its sidecars.

    NoRoomError before any is fetched, if there is no room for them and for `room_bytes` more; DamagedError if a range
    is wrong twice or the files make up no checkpoint; and what the fetcher raises.
    """
    wanted, numbers = request.wanted, range(len(request.wanted.files))
    shelf = _shelf(folder, wanted)
    right = find_right(wanted, shelf, shelf.paths, request.effort)
    supply = supply_of(wanted, numbers, right, [])
    if supply.fetched:
        check_room(folder, with_slack(supply.fetched_bytes + room_bytes, len(numbers)))
    for number in numbers:
        _make(folder, number, wanted.files[number].size)
    gatherer = Gatherer(wanted, request.fetcher, lambda number: folder.open_file(name_of(number)), request.effort)
    gatherer.fetch(supply.fetched)
    identities = {}
    for number in numbers:
        status = folder.status(name_of(number))
        assert status is not None
        identities[name_of(number)] = identity_of(status)
    return open_built(folder.path, [name_of(number) for number in numbers], identities, wanted)


def name_of(number: int) -> str:
    """What a file is called whose number among the wanted ones is given."""
    return f"{number:07d}"


def _fetch_header(request: Request, file: RangedFile) -> Header:
    what = f"shard {shown(file.path)}"

    def get(begin: int, size: int) -> bytes:
        return b"".join(request.fetcher.fetch(file.path, begin, size))

    start = get(0, LENGTH_BYTES)
    raw = start + get(LENGTH_BYTES, header_bytes(start, file.size, what))
    if object_digest(raw) != file.blake3:
        raise FetchedError(file.path, "its header is not the one that is wanted: its blake3 differs")
    return parse_header(raw, file.size, what)


def _shelf(folder: Folder, wanted: Wanted) -> Shelf:
    """Those files that are there."""
    paths, identities = {}, {}
    for number in range(len(wanted.files)):
        status = folder.status(name_of(number))
        if status is not None and stat.S_ISREG(status.st_mode):
            paths[number] = name_of(number)
            identities[name_of(number)] = identity_of(status)
    return Shelf(folder.path, paths, identities)


def _make(folder: Folder, number: int, size: int) -> None:
    """Have a file of the right size there."""
    name = name_of(number)
    status = folder.status(name)
    if status is not None and not stat.S_ISREG(status.st_mode):
        folder.remove_tree(name)
        status = None
    with folder.open_file(name) if status is not None else folder.create_file(name) as file:
        if os.fstat(file.fd).st_size != size:
            file.resize(size)
