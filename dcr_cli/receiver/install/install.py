"""Brings a receiver to a state that is given as plain files: a new folder, or a checkpoint in whatever state it is.

This module chooses the way; here.py goes it in a folder, beside.py makes new folders.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.arguments import check_path, is_loop
from dcr_cli.durable import Folder
from dcr_cli.errors import IN_A_CIRCLE, LocalError, UsageError
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.change import IN_PLACE, REPLACE
from dcr_cli.receiver.install.beside import install_aside, install_new, rehearse_install_aside, rehearse_new
from dcr_cli.receiver.install.here import Installation, Request, begin
from dcr_cli.receiver.install.note import read_note
from dcr_cli.receiver.install.result import InstallResult, would_do
from dcr_cli.receiver.install.site import Allowance, is_of, marker_in, site_of
from dcr_cli.receiver.install.stock import check_site, take_stock
from dcr_cli.receiver.install.wanted import Wanted, check_wanted
from dcr_cli.receiver.places import check_changeable
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import record_folder
from dcr_cli.receiver.survey import open_root

MODES = (REPLACE, IN_PLACE, ASIDE)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a receiver is changed: `mode` as of an apply, where in-place means replace; see install_site.Allowance."""

    mode: str = REPLACE
    allowance: Allowance = field(default_factory=Allowance)
    keep_previous: bool = False
    dry_run: bool = False


def install(checkpoint: str | Path, request: Request, manner: Manner) -> InstallResult:
    """Bring `checkpoint` to the wanted state of `request`; what of it is there is not fetched.

    A folder that does not exist, or is empty, is built beside its place and gets its name when it is complete. What an
    existing one lacks is staged in it, checked, and put into place; in mode aside, a whole new folder is built beside
    the one that the link `checkpoint` leads to, or is the first one. Until all is staged, an error leaves the
    checkpoint as it was. Stopped later, it says that it is incomplete until the same call finishes it; what was staged
    is not fetched again. Raises DamagedError (IncompleteError if another change has to be finished first and may not be
    overtaken), WrongBaseError, NotFoundError, ConflictError, LocalError, UsageError, and what the fetcher raises.
    """
    path = Path(checkpoint)
    check_path(path, "checkpoint")
    if manner.mode not in MODES:
        raise UsageError("mode", f"one of {', '.join(MODES)} expected, found {manner.mode!r}")
    if manner.keep_previous and manner.mode != ASIDE:
        raise UsageError("install", "keep_previous needs mode aside")
    if is_loop(path):
        raise LocalError(f"checkpoint {path}", "is a link that leads in a circle", hint=IN_A_CIRCLE)
    check_wanted(request.wanted, request.origin)
    if manner.mode == ASIDE:
        way = rehearse_install_aside if manner.dry_run else install_aside
        return way(path, request, manner.allowance, keep_previous=manner.keep_previous)
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return (rehearse_new if manner.dry_run else install_new)(place, request)
    with open_root(place) as root:
        if manner.dry_run:
            return _rehearse(root, request, manner.allowance)
        return _replace(root, request, manner.allowance)


def _replace(root: Folder, request: Request, allowance: Allowance) -> InstallResult:
    with Receiver(root) as receiver:
        begin(receiver, request.wanted)
        site = site_of(root, request.wanted, allowance)
        installation = Installation(receiver, request, site)
        stock = installation.carry_out()
        result = would_do(str(root.path), REPLACE, request.wanted, site, stock)
        return installation.done(result)


def _rehearse(root: Folder, request: Request, allowance: Allowance) -> InstallResult:
    """Say what replacing would do, and refuse what it would refuse before it fetches anything."""
    site = site_of(root, request.wanted, allowance)
    stock = take_stock(site, request.wanted, request.effort)
    result = would_do(str(root.path), REPLACE, request.wanted, site, stock)
    if not result.already:
        check_changeable(root)
        check_site(site, stock, request.wanted)
    return result


def wanted_in_progress(checkpoint: str | Path) -> tuple[Wanted, str] | None:
    """The wanted state that a stopped run was bringing a checkpoint to, and what it called the place it came from.

    None if none is in progress, or its list of files is lost.
    """
    with open_root(checkpoint) as root:
        home = record_folder(root)
        if home is None:
            return None
        with home:
            marker, note = marker_in(home), read_note(home)
    if marker is None or note is None or not is_of(marker, note.wanted):
        return None
    return note.wanted, marker.remote or ""
