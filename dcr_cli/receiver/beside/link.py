"""A link to a checkpoint's folder: what it says, which folders were made for it, and how it is turned.

A folder that a link was turned to holds a claim: which link that was. Copied with its folder, or found behind another
link, a claim says nothing. What is built behind a link, and what is removed, is aside.py's matter.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.durable import Folder, open_folder
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UsageError

CLAIM = "link"
_CLAIM_LIMIT = 1 << 10
_MOST_NAMES = 10
_TAG_DIGITS = _COMMIT_DIGITS = 12


class LinkIdentity(NamedTuple):
    """What tells a link from every other, also from one that had its name before; a rename keeps it."""

    inode: int
    mtime_ns: int


def link_identity(status: os.stat_result) -> LinkIdentity:
    return LinkIdentity(status.st_ino, status.st_mtime_ns)


# What a folder claims that was built for a link and that no link was turned to yet.
UNTURNED = LinkIdentity(0, 0)
# Says of a claim that it is the first after that.
_FIRST = "first"


@dataclass(frozen=True, slots=True)
class Link:
    """A link as it was when it was read; `folder` is the real path of what it leads to."""

    path: Path
    text: str
    folder: str
    identity: LinkIdentity

    @property
    def temporary(self) -> str:
        """The name of the link that takes its place."""
        return f".{self.path.name}.dcr-link"

    @property
    def prefix(self) -> str:
        """What the names of all folders begin with that are made for it, and of none that is made for another one.

        Links of one name, in different folders or on different machines, may lead into one folder.
        """
        above = os.path.realpath(self.path.parent)
        place = f"{socket.gethostname()}\0{os.path.join(above, self.path.name)}"
        return f"{self.path.name}.dcr-{object_digest(os.fsencode(place)).hex()[:_TAG_DIGITS]}-"

    def names(self, commit: bytes) -> list[str]:
        """What a new folder for it may be called, for a delta with this commit."""
        stem = self.prefix + commit.hex()[:_COMMIT_DIGITS]
        return [stem, *(f"{stem}-{number}" for number in range(2, _MOST_NAMES))]


def read_link(path: Path) -> Link:
    """Read a link; UsageError if it is none."""
    if not os.path.lexists(path):
        raise NotFoundError(str(path), "is not there")
    if not path.is_symlink():
        names = [shlex.quote(text) for text in (str(path), f"{path}-1", f"{path.name}-1")]
        hint = f"make it one: mv {names[0]} {names[1]} && ln -s {names[2]} {names[0]}"
        raise UsageError(str(path), "is not a link to a folder, as aside needs it", hint=hint)
    with open_folder(path.parent) as above:
        status = above.status(path.name)
        if status is None:
            raise _turned(path)
        return Link(path, above.link_text(path.name), os.path.realpath(path), link_identity(status))


def no_link(path: Path) -> Link:
    """What a link that is not there yet would be called, and what is made for it."""
    return Link(path, "", "", UNTURNED)


def check_still(link: Link) -> None:
    """Raise ConflictError if a link is not what it was when it was read."""
    if not link.path.is_symlink() or read_link(link.path) != link:
        raise _turned(link.path)


def is_made_for(home: Folder, link: Link) -> bool:
    """Whether the claim in a state folder says that `link`, as it is, was turned to this folder."""
    return _claimed(_read_claim(home)) == link.identity


def claim_nothing(home: Folder) -> None:
    """Have a folder that is built for a link say, until that is turned to it, that nobody was given it.

    One that has a claim was given to somebody before.
    """
    if home.status(CLAIM) is None:
        home.replace_file(CLAIM, encode_claim(UNTURNED))


def is_unturned(home: Folder, link: Link) -> bool:
    """Whether the claim in a state folder says that it was built for `link`, and no link was ever turned to it."""
    claim = _read_claim(home)
    if _claimed(claim) == UNTURNED:
        return True
    temporary = link.path.parent / link.temporary
    is_first = claim.get(_FIRST) is True
    return is_first and temporary.is_symlink() and _claimed(claim) == link_identity(temporary.lstat())


def _read_claim(home: Folder) -> dict[str, object]:
    """A claim; one that is none claims nothing."""
    try:
        text = home.read(CLAIM, _CLAIM_LIMIT)
        claim = strict_json(text, CLAIM) if text is not None else None
    except DamagedError:
        return {}
    return claim if isinstance(claim, dict) else {}


def _claimed(claim: dict[str, object]) -> tuple[object, object]:
    return claim.get("inode"), claim.get("mtime_ns")


def is_used_otherwise(link: Link, folder: str) -> bool:
    """Whether somebody may use `folder`, or what is in it, by another name than `link`'s.

    Looked at are what `link` says, which may be a link itself, and the links beside it and beside the folder.
    """
    if folder == link.folder and (link.path.parent / link.text.rstrip("/")).is_symlink():
        return True
    own = {link.path.name, link.temporary}
    above = os.path.realpath(link.path.parent)
    for place in {above, os.path.dirname(folder)}:
        with open_folder(place) as there:
            others = [name for name in there.names() if place != above or name not in own]
        for path in (os.path.join(place, name) for name in others):
            if os.path.islink(path) and f"{os.path.realpath(path)}/".startswith(f"{folder}/"):
                return True
    return False


def turn(link: Link, parent: Folder, name: str, home: Folder) -> Link:
    """Make a link lead to `name` in `parent`, whose state folder is `home`, in one step; relative if it was.

    ConflictError if somebody has turned it since it was read.
    """
    above, last = os.path.split(link.text.rstrip("/"))
    is_beside = last not in ("", ".", "..") and os.path.realpath(link.path.parent / above) == os.path.realpath(
        parent.path
    )
    new = os.path.join(above, name) if is_beside else str(parent.path / name)
    with open_folder(link.path.parent) as folder:
        _make_temporary(folder, link, new, home)
        try:
            check_still(link)
        except ConflictError:
            folder.remove(link.temporary, missing_ok=True)
            raise
        folder.rename(link.temporary, folder, link.path.name)
        folder.sync()
    return read_link(link.path)


def make_link(link: Link, parent: Folder, name: str, home: Folder) -> None:
    """Make a link that leads to `name` beside it, whose state folder is `home`, in one step.

    ConflictError if somebody has made something of its name meanwhile.
    """
    _make_temporary(parent, link, name, home)
    if parent.status(link.path.name) is not None:
        parent.remove(link.temporary, missing_ok=True)
        raise ConflictError(str(link.path), "was made by somebody else just now", hint="see what it is, and try again")
    parent.rename(link.temporary, parent, link.path.name)
    parent.sync()


def _make_temporary(folder: Folder, link: Link, text: str, home: Folder) -> None:
    """Make the link that is to get its name, and have the folder that it leads to claim it."""
    folder.remove(link.temporary, missing_ok=True)
    folder.make_link(text, link.temporary)
    status = folder.status(link.temporary)
    if status is None:
        raise _turned(link.path)
    is_first = _claimed(_read_claim(home)) == UNTURNED
    home.replace_file(CLAIM, encode_claim(link_identity(status), is_first=is_first))


def encode_claim(identity: LinkIdentity, *, is_first: bool = False) -> bytes:
    claim: dict[str, object] = {**identity._asdict(), **({_FIRST: True} if is_first else {})}
    return json.dumps(claim).encode() + b"\n"


def _turned(path: Path) -> ConflictError:
    return ConflictError(str(path), "was turned by somebody else just now", hint="run the same command again")
