"""What bringing a receiver to a wanted state has done, or would do, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.receiver.install.stock import Site, Stock, room_for
from dcr_cli.receiver.install.wanted import Wanted


@dataclass(frozen=True, slots=True)
class InstallResult:
    """What was done to `checkpoint`, the folder that is now at the target (or would be, if `dry_run`).

    `already`: it was at the target, nothing was written. `recovered`: a change that had been stopped was finished, or
    overtaken. `fetched_bytes` came from elsewhere, `reused_bytes` of the target were there. `room_bytes` have to be
    free. `unreadable` files could not be read where they were. `foreign` files are no part of the checkpoint and were
    left. `previous` is the folder that a link pointed at before, if it is left there. `not_carried` are files of such a
    folder that could not be carried over, so that it was not removed.
    """

    checkpoint: str
    mode: str
    target: State
    already: bool
    recovered: bool
    dry_run: bool
    fetched_bytes: int
    reused_bytes: int
    bytes_written: int
    room_bytes: int
    files_changed: tuple[str, ...]
    files_removed: tuple[str, ...]
    foreign: tuple[str, ...]
    previous: str | None = None
    not_carried: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def would_do(checkpoint: str, mode: str, wanted: Wanted, site: Site, stock: Stock) -> InstallResult:
    """The result of bringing a folder with this stock to a wanted state, if that is only said and not done."""
    fetched_bytes = stock.supply.fetched_bytes
    return InstallResult(
        checkpoint=checkpoint,
        mode=mode,
        target=wanted.state,
        already=not (site.is_marked or stock.changed or site.belongings.removed),
        recovered=site.is_marked,
        dry_run=True,
        fetched_bytes=fetched_bytes,
        reused_bytes=wanted.bytes - fetched_bytes,
        bytes_written=0,
        room_bytes=room_for(stock, wanted) if stock.changed else 0,
        files_changed=tuple(wanted.files[number].path for number in stock.changed),
        files_removed=site.belongings.removed,
        foreign=site.belongings.foreign,
        unreadable=tuple(wanted.files[number].path for number in sorted(stock.placed.unreadable)),
    )
