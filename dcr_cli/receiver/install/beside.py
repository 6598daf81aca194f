"""Makes new folders at a wanted state: where none is, or beside a folder that a link is then turned from.

A folder that a stopped run has left is gone on with if it was for the same state. What links say, and what becomes of
the folder before, is the matter of the room beside/.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from dcr_cli.durable import NEW_FOLDER_MODE, PRIVATE_FOLDER_MODE, Folder, may_give_owner, open_folder
from dcr_cli.errors import ConflictError, DcrError
from dcr_cli.receiver.beside.aside import check_beside, remove_previous, remove_unfinished, stays, take_over
from dcr_cli.receiver.beside.carry import place_of
from dcr_cli.receiver.beside.folders import (
    ASIDE,
    check_free,
    is_unfinished,
    names_taken,
    open_parent,
    partial_name,
    remove_folder,
)
from dcr_cli.receiver.beside.fresh import with_those_above
from dcr_cli.receiver.beside.link import Link, check_still, claim_nothing, make_link, no_link, read_link
from dcr_cli.receiver.install.belongings import Belongings, sort_out
from dcr_cli.receiver.install.here import Installation, Request, begin
from dcr_cli.receiver.install.note import key_of, read_note
from dcr_cli.receiver.install.result import InstallResult, would_do
from dcr_cli.receiver.install.site import Allowance, site_of
from dcr_cli.receiver.install.stock import Site, Stock, no_stock, room_for, take_stock
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.receiver.places import check_changeable, check_names, check_no_mount, check_room, folders_of
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import find_record, record_folder
from dcr_cli.receiver.survey import open_root

NEW = "new"
_NOTHING = Belongings({}, {}, ())


def install_new(out: Path, request: Request) -> InstallResult:
    """Build the wanted state in `out`, which must not exist or be an empty folder."""
    out = Path(os.path.abspath(out))
    with open_parent(out) as parent:
        _check_free(parent, out.name)
        partial = partial_name(out.name)
        with _building(parent, partial, request.wanted, NEW_FOLDER_MODE) as receiver:
            installation, site = _first(receiver, request)
            stock = installation.carry_out()
            _show(receiver, request)
            _check_free(parent, out.name)
            parent.rename(partial, parent, out.name)
            parent.sync()
        return _made(installation.done(would_do(str(out), NEW, request.wanted, site, stock)), request.wanted)


def rehearse_new(out: Path, request: Request) -> InstallResult:
    """Say what `install_new` would do, and refuse what it would refuse before it fetches anything."""
    out = Path(os.path.abspath(out))
    with open_parent(out) as parent:
        _check_free(parent, out.name)
        check_changeable(parent)
        return _rehearse_in(parent, partial_name(out.name), request, str(out), NEW)


def _rehearse_in(parent: Folder, name: str, request: Request, checkpoint: str, mode: str) -> InstallResult:
    """Say what building the folder `name` would do; what a stopped run has left of it is made use of."""
    wanted = request.wanted
    check_names(parent, [file.path for file in wanted.files])
    if _is_for(parent, name, wanted):
        with parent.open_folder(name) as root:
            site = Site(root, sort_out(root, wanted, {}))
            stock = take_stock(site, wanted, request.effort)
    else:
        site, stock = Site(parent, _NOTHING), no_stock(parent, wanted)
    check_room(parent, room_for(stock, wanted))
    return _made(would_do(checkpoint, mode, wanted, site, stock), wanted)


def _made(result: InstallResult, wanted: Wanted) -> InstallResult:
    """The result for a folder that is new as a whole, whatever a stopped run has done of it."""
    return replace(result, already=False, files_changed=tuple(file.path for file in wanted.files))


def _check_free(parent: Folder, name: str) -> None:
    check_free(parent, name)
    if parent.status(name) is not None:
        check_no_mount(parent, name, "")


def _first(receiver: Receiver, request: Request) -> tuple[Installation, Site]:
    """The way of a new folder in which nothing is but what runs for this state have put there."""
    marker = begin(receiver, request.wanted)
    site = Site(receiver.root, sort_out(receiver.root, request.wanted, {}), is_marked=marker is not None)
    return Installation(receiver, request, site), site


def _show(receiver: Receiver, request: Request) -> None:
    """Have nothing to tidy up, and nothing to note, in a new folder that is about to be seen."""
    receiver.clear()
    request.before_seen(receiver.root.path)


@contextmanager
def _building(parent: Folder, name: str, wanted: Wanted, mode: int) -> Iterator[Receiver]:
    """Make a folder, locked, in which a wanted state is built; one that is there is gone on with if it was for that.

    After an error it is removed again, unless it holds what the next run can use.
    """
    is_new = False
    while True:
        is_new = parent.make_folder(name, mode, exist_ok=True) or is_new
        parent.sync()
        with parent.open_folder(name) as root, ExitStack() as stack:
            before = place_of(os.fstat(root.fd))
            receiver = stack.enter_context(Receiver(root))
            # Before it was locked, whoever had it may have finished it and given it its name.
            if (status := parent.status(name)) is None or place_of(status) != before:
                facts = "was built by another dcr meanwhile"
                raise ConflictError(str(parent.path / name), facts, hint="see what it has built, and try again")
            if not (receiver.was_made or _is_for(parent, name, wanted)):
                receiver.keeps_home = receiver.keeps_staged = True
                remove_folder(parent, name)
                continue
            try:
                yield receiver
            except BaseException:
                if not (receiver.keeps_staged or receiver.is_marked):
                    # The cause is what counts; what cannot be removed now, the next run removes.
                    receiver.keeps_home = receiver.keeps_staged = True
                    with suppress(DcrError):
                        remove_folder(parent, name)
                raise
            return


def _is_for(parent: Folder, name: str, wanted: Wanted) -> bool:
    """Whether a folder is one that a run for a wanted state has left, complete or not."""
    try:
        with parent.open_folder(name) as root:
            home = record_folder(root)
            if home is None:
                return False
            with home:
                note = read_note(home)
            if note is not None:
                return note.wanted == wanted
            return wanted.is_recorded(find_record(root))
    except DcrError:
        return False


# Beside the folder that a link leads to


def install_aside(path: Path, request: Request, allowance: Allowance, *, keep_previous: bool) -> InstallResult:
    """Build the wanted state beside the folder that the link at `path` leads to, then turn the link in one step.

    Where nothing is, the first folder and the link are made. What becomes of the folder before is as in apply_aside.
    """
    if not os.path.lexists(path):
        return _install_first(Path(os.path.abspath(path)), request)
    wanted, key = request.wanted, key_of(request.wanted)
    with _locked_behind(path) as (old, link), open_folder(old.root.path.parent) as parent:
        kept, not_carried = remove_previous(old, parent, link)
        _remove_unfinished(parent, link, wanted)
        site = site_of(old.root, wanted, allowance)
        stock = take_stock(site, wanted, request.effort)
        result = would_do(str(path), ASIDE, wanted, site, stock)
        if result.already:
            installation = Installation(old, request, site)
            installation.settle(stock)
            return replace(installation.done(result), previous=kept, not_carried=tuple(not_carried))
        with open_folder(path.parent) as above:
            check_beside(link, parent, above, key)
        name = _choose(parent, link.names(key), old.root.path.name, request)
        with _building(parent, name, wanted, PRIVATE_FOLDER_MODE) as receiver:
            marker = begin(receiver, wanted)
            claim_nothing(receiver.home)
            new_site = _site_beside(receiver.root, wanted, site, stock, is_marked=marker is not None)
            installation = Installation(receiver, request, new_site)
            result = _beside(result, wanted, installation.carry_out())
            _take_modes(old.root, receiver, wanted)
            parent.sync()
        gone = {*site.belongings.removed, *(file.path for file in wanted.files)}
        own = {path: identity for path, identity in site.belongings.present.items() if path in gone}
        request.before_seen(parent.path / name)
        kept, left = take_over(old, link, parent.path / name, own, keep_previous=keep_previous)
        return replace(installation.done(result), previous=kept, not_carried=(*not_carried, *left))


def rehearse_install_aside(path: Path, request: Request, allowance: Allowance, *, keep_previous: bool) -> InstallResult:
    """Say what `install_aside` would do, and refuse what it would refuse before it fetches anything."""
    wanted, key = request.wanted, key_of(request.wanted)
    if not os.path.lexists(path):
        path = Path(os.path.abspath(path))
        with open_parent(path) as parent:
            link = no_link(path)
            check_beside(link, parent, parent, key)
            name = _choose(parent, link.names(key), "", request)
            return _rehearse_in(parent, name, request, str(path), ASIDE)
    link = read_link(path)
    with open_root(link.folder) as old, open_folder(old.path.parent) as parent, open_folder(path.parent) as above:
        site = site_of(old, wanted, allowance)
        stock = take_stock(site, wanted, request.effort)
        result = would_do(str(path), ASIDE, wanted, site, stock)
        if result.already:
            return result
        check_changeable(old)
        check_beside(link, parent, above, key)
        name = _choose(parent, link.names(key), old.path.name, request)
        with parent.open_folder(name) if _is_for(parent, name, wanted) else nullcontext() as root:
            if root is not None:
                new_stock = take_stock(_site_beside(root, wanted, site, stock), wanted, request.effort)
            else:
                new_stock = no_stock(parent, wanted, stock.placed)
        check_room(parent, room_for(new_stock, wanted))
        with record_folder(old) or nullcontext() as home:
            goes = home is not None and not (keep_previous or stays(home, link))
        return replace(_beside(result, wanted, new_stock), previous=None if goes else link.folder)


def _install_first(path: Path, request: Request) -> InstallResult:
    """Build the first folder for a link, and make the link."""
    wanted, key = request.wanted, key_of(request.wanted)
    with open_parent(path) as parent:
        link = no_link(path)
        check_beside(link, parent, parent, key)
        _remove_unfinished(parent, link, wanted)
        name = _choose(parent, link.names(key), "", request)
        with _building(parent, name, wanted, NEW_FOLDER_MODE) as receiver:
            installation, site = _first(receiver, request)
            claim_nothing(receiver.home)
            stock = installation.carry_out()
            parent.sync()
            _show(receiver, request)
            make_link(link, parent, name, receiver.home)
        result = would_do(str(path), ASIDE, wanted, site, stock)
        return _made(installation.done(result), wanted)


def _site_beside(root: Folder, wanted: Wanted, old: Site, stock: Stock, *, is_marked: bool = False) -> Site:
    """A new folder, which takes unchanged files from the old one, whose stock is known."""
    return Site(root, sort_out(root, wanted, {}), is_marked=is_marked, source=old.root, other=stock.placed)


def _beside(result: InstallResult, wanted: Wanted, stock: Stock) -> InstallResult:
    """What is told of the folder before, but for what the new one costs."""
    fetched_bytes = stock.supply.fetched_bytes
    return replace(
        result,
        fetched_bytes=fetched_bytes,
        reused_bytes=wanted.bytes - fetched_bytes,
        room_bytes=room_for(stock, wanted),
    )


def _remove_unfinished(parent: Folder, link: Link, wanted: Wanted) -> None:
    """Remove folders that runs for this link began and did not complete, but for those for this wanted state."""
    names = link.names(key_of(wanted))
    remove_unfinished(parent, link, [name for name in names if _is_for(parent, name, wanted)])


def _choose(parent: Folder, names: Sequence[str], old: str, request: Request) -> str:
    """The name of the new folder: one that nobody has, or whose folder was begun, or completed, for just this."""
    for name in names:
        if parent.status(name) is None:
            return name
        is_ours = name != old and _is_for(parent, name, request.wanted)
        if is_ours and (is_unfinished(parent, name) or _is_whole(parent, name, request)):
            return name
    raise names_taken(parent, names)


def _is_whole(parent: Folder, name: str, request: Request) -> bool:
    """Whether a complete folder, which somebody may be using, need not be changed to be at the wanted state."""
    try:
        with parent.open_folder(name) as root:
            site = Site(root, sort_out(root, request.wanted, {}))
            return not take_stock(site, request.wanted, request.effort).changed
    except DcrError:
        return False


@contextmanager
def _locked_behind(path: Path) -> Iterator[tuple[Receiver, Link]]:
    """Lock the folder behind a link, which still leads to it then."""
    link = read_link(path)
    with open_root(link.folder) as root, Receiver(root) as receiver:
        check_still(link)
        if receiver.read_marker() is None:
            receiver.clear()
        yield receiver, link


def _take_modes(source: Folder, receiver: Receiver, wanted: Wanted) -> None:
    """Give the new folder, and those in it, mode and owner of the old ones."""
    for folder in with_those_above(folders_of(file.path for file in wanted.files)):
        status = source.status(folder)
        if status is not None and stat.S_ISDIR(status.st_mode):
            receiver.root.take_folder_mode(folder, status, with_owner=may_give_owner(status))
    status = os.fstat(source.fd)
    receiver.open_to_readers(status)
    receiver.root.take_folder_mode("", status, with_owner=may_give_owner(status))
