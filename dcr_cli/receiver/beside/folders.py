"""Folders that are being built beside all that is there: how they are called, made, and removed if they are not done.

What is built in them is not this module's matter.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dcr_cli.checkpoint.in_progress import INSTALL, MAX_MARKER_BYTES, STATE_FOLDER
from dcr_cli.checkpoint.names import shown
from dcr_cli.durable import PRIVATE_FOLDER_MODE, Folder, open_folder
from dcr_cli.errors import ConflictError, DcrError, LocalError
from dcr_cli.receiver.beside.carry import place_of
from dcr_cli.receiver.marker import MARKER, decode_marker
from dcr_cli.receiver.places import check_lengths
from dcr_cli.receiver.receiver import LOCK, Receiver

# Modes that build a folder.
TO, ASIDE = "to", "aside"


def open_parent(out: Path) -> Folder:
    """Open the folder that `out` is to be built in; LocalError if there is none."""
    if not out.parent.exists():
        hint = f"mkdir -p {shlex.quote(str(out.parent))}"
        raise LocalError(str(out), f"there is no folder {shown(str(out.parent))}", hint=hint)
    return open_folder(out.parent)


def names_taken(parent: Folder, names: Sequence[str]) -> ConflictError:
    return ConflictError(str(parent.path / names[0]), "exists, and so do all names like it; remove them")


def partial_name(name: str) -> str:
    """What a folder is called while it is built."""
    return f".{name}.dcr-partial"


def check_free(parent: Folder, name: str) -> None:
    """Raise UsageError or ConflictError if nothing could be built and then be called `name`."""
    check_lengths(parent, [name, partial_name(name)], "building it")
    status = parent.status(name)
    if status is not None and not (stat.S_ISDIR(status.st_mode) and parent.is_empty(name)):
        hint = "choose another name, or remove it"
        raise ConflictError(str(parent.path / name), "exists and is no empty folder", hint=hint)


@contextmanager
def new_folder(parent: Folder, name: str, *, exist_ok: bool) -> Iterator[Receiver]:
    """Make a folder, locked, and empty but for its lock, whatever was in it; after an error it is removed again."""
    parent.make_folder(name, PRIVATE_FOLDER_MODE, exist_ok=exist_ok)
    parent.sync()
    with parent.open_folder(name) as root, ExitStack() as stack:
        before = os.fstat(root.fd)
        root.make_private()
        private = os.fstat(root.fd).st_mode
        receiver = stack.enter_context(Receiver(root))
        # Before it was locked, whoever had it may have finished it and given it its name.
        if (status := parent.status(name)) is None or place_of(status) != place_of(before):
            if os.fstat(root.fd).st_mode == private:
                root.set_mode(stat.S_IMODE(before.st_mode))
            facts = "was built by another dcr meanwhile"
            raise ConflictError(str(parent.path / name), facts, hint="see what it has built, and try again")
        for folder, kept in ((root, STATE_FOLDER), (receiver.home, LOCK)):
            for inner in folder.names():
                if inner != kept:
                    folder.remove_tree(inner)
        try:
            yield receiver
        except BaseException:
            # The cause is what counts; what cannot be removed now, the next run removes.
            with suppress(DcrError):
                remove_folder(parent, name)
            receiver.keeps_home = True
            raise


@contextmanager
def _opened_private(parent: Folder, name: str) -> Iterator[Folder]:
    """Open a folder that is being built, or was and may have its last mode already, to change what is in it."""
    with parent.open_folder(name) as folder:
        folder.make_private()
        yield folder


def remove_folder(parent: Folder, name: str) -> None:
    """Remove an unfinished folder, last of all what says that it is one."""
    with _opened_private(parent, name) as folder:
        for inner in folder.names():
            if inner != STATE_FOLDER:
                folder.remove_tree(inner)
    parent.remove_tree(name)


def is_unfinished(parent: Folder, name: str) -> bool:
    """Whether nothing is in the folder yet, or a marker that says that it was being built for a link."""
    try:
        with parent.open_folder(name) as folder:
            if set(folder.names()) <= {STATE_FOLDER}:
                return True
        text = parent.read(f"{name}/{STATE_FOLDER}/{MARKER}", MAX_MARKER_BYTES)
        return text is not None and decode_marker(text, name).mode in (ASIDE, INSTALL)
    except DcrError:
        return False
