"""Finds out what a folder lacks to be at a wanted state, and whether it could be brought there.

It reads and changes nothing; here.py does what is lacking.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from dcr_cli.checkpoint.folder import identity_of
from dcr_cli.checkpoint.in_progress import STATE_FOLDER
from dcr_cli.durable import Folder
from dcr_cli.receiver.install.belongings import Belongings
from dcr_cli.receiver.install.gather import Effort, Found, Shelf, Supply, find_right, supply_of
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.places import (
    CONFIG,
    check_moves,
    check_names,
    check_no_mount,
    check_places,
    check_room,
    with_slack,
)
from dcr_cli.receiver.receiver import HELD_CONFIG, STAGE

# What st_blocks counts in, whatever the file system's own blocks are.
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Site:
    """The folder that is to be at a wanted state, what is in it, and perhaps another one to take unchanged files from.

    `is_marked`: a change of it is in progress. `other` says what is right in the other folder, `source`.
    """

    root: Folder
    belongings: Belongings
    is_marked: bool = False
    source: Folder | None = None
    other: Found | None = None


@dataclass(frozen=True, slots=True)
class Stock:
    """What a folder has of a wanted state, files by number.

    `placed`, `staged` and `other` say what is right where it belongs, in the stage, and in the other folder. Files that
    are `kept` are whole and stay, `shared` ones are whole in the other folder; the rest are staged, from `supply`. What
    a stopped run has staged takes `staged_bytes` of room.
    """

    placed: Found
    staged: Found
    other: Found | None
    kept: tuple[int, ...]
    shared: tuple[int, ...]
    supply: Supply
    staged_bytes: int

    @property
    def changed(self) -> tuple[int, ...]:
        return tuple(sorted((*self.shared, *self.supply.files)))

    def needed_bytes(self, wanted: Wanted) -> int:
        """Bytes that have to be free, at least, to stage what is lacking."""
        return max(sum(wanted.files[number].size for number in self.supply.files) - self.staged_bytes, 0)


def staged_name(number: int) -> str:
    """Where a file lies, below the state folder, until it gets its name."""
    return f"{STAGE}/whole-{number:07d}"


def take_stock(site: Site, wanted: Wanted, effort: Effort) -> Stock:
    """Read what is there, as far as it may be of the wanted state."""
    numbers = range(len(wanted.files))
    placed = find_right(wanted, _placed(site, wanted), numbers, effort)
    kept = tuple(number for number in numbers if placed.is_whole(wanted, number))
    lacking = sorted(set(numbers).difference(kept))
    staged, staged_bytes = _staged(site.root, wanted, lacking, effort)
    shared = _shared(wanted, [number for number in lacking if not staged.is_whole(wanted, number)], site.other)
    others = [placed] if site.other is None else [placed, site.other]
    supply = supply_of(wanted, sorted(set(lacking).difference(shared)), staged, others)
    return Stock(placed, staged, site.other, kept, shared, supply, staged_bytes)


def no_stock(root: Folder, wanted: Wanted, other: Found | None = None) -> Stock:
    """The stock of a folder that is not there yet, and would be made in `root`."""
    nothing, numbers = Found(Shelf(root.path), frozenset()), range(len(wanted.files))
    shared = _shared(wanted, numbers, other)
    others = [] if other is None else [other]
    supply = supply_of(wanted, sorted(set(numbers).difference(shared)), nothing, others)
    return Stock(nothing, nothing, other, (), shared, supply, 0)


def _shared(wanted: Wanted, numbers: Iterable[int], other: Found | None) -> tuple[int, ...]:
    """Those files that are whole in the other folder."""
    return () if other is None else tuple(number for number in numbers if other.is_whole(wanted, number))


def _placed(site: Site, wanted: Wanted) -> Shelf:
    present = site.belongings.present
    paths = {number: file.path for number, file in enumerate(wanted.files) if file.path in present}
    identities = {path: present[path] for path in paths.values()}
    held = f"{STATE_FOLDER}/{HELD_CONFIG}"
    for number, file in enumerate(wanted.files):
        if file.path == CONFIG and number not in paths and site.is_marked:
            found = _regular(site.root, [held])
            if found:
                paths[number], identities[held] = held, identity_of(found[held])
    return Shelf(site.root.path, paths, identities)


def _staged(root: Folder, wanted: Wanted, numbers: Iterable[int], effort: Effort) -> tuple[Found, int]:
    """What a stopped run has staged, and how much room that takes.

    Of a file that has another name, too, nothing counts unless all does: what is lacking could not be written into it.
    """
    paths = {number: f"{STATE_FOLDER}/{staged_name(number)}" for number in numbers}
    statuses = _regular(root, paths.values())
    paths = {number: path for number, path in paths.items() if path in statuses}
    identities = {path: identity_of(status) for path, status in statuses.items()}
    found = find_right(wanted, Shelf(root.path, paths, identities), paths, effort)
    whole = {number for number in paths if found.is_whole(wanted, number)}
    counted = [number for number, path in paths.items() if statuses[path].st_nlink == 1 or number in whole]
    right = frozenset(key for key in found.right if key[0] in set(counted))
    return Found(found.shelf, right), sum(statuses[paths[number]].st_blocks * _BLOCK_BYTES for number in counted)


def _regular(root: Folder, paths: Iterable[str]) -> dict[str, os.stat_result]:
    """The statuses of those paths at which a file lies, and no link."""
    statuses = {path: root.status(path) for path in paths}
    return {path: status for path, status in statuses.items() if status is not None and stat.S_ISREG(status.st_mode)}


def check_site(site: Site, stock: Stock, wanted: Wanted) -> None:
    """Raise LocalError, DamagedError or WrongBaseError if a folder could not be brought to the wanted state."""
    root, removed = site.root, site.belongings.removed
    placed = [wanted.files[number].path for number in stock.changed]
    statuses = {path: root.status(path) for path in removed}
    # A stopped run may have removed it, and given a folder its name.
    gone = [path for path, status in statuses.items() if status is not None and not stat.S_ISDIR(status.st_mode)]
    check_places(root, [*placed, *gone], removed)
    for path in gone:
        check_no_mount(root, path, path.rpartition("/")[0])
    config = root.status(CONFIG)
    check_moves(root, [*placed, CONFIG] if config is not None and not stat.S_ISDIR(config.st_mode) else placed)
    check_names(root, [*(file.path for file in wanted.files), *site.belongings.foreign])
    check_room(root, room_for(stock, wanted))


def room_for(stock: Stock, wanted: Wanted) -> int:
    """Bytes that have to be free so that what is lacking can be staged."""
    return with_slack(stock.needed_bytes(wanted), len(stock.changed))
